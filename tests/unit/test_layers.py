"""Does every module know only what its layer may: lower layers, its third parties, no framework?"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "tenplex_megatron"
ROOT = Path(__file__).parents[2] / PACKAGE
LAYERS = {
    "errors": 0,
    "core": 1,
    "config": 1,
    "planner": 2,
    "store": 2,
    "transport": 3,
    "execution": 4,
    "adapters": 5,
    "cpu": 5,
    "elastic": 6,
    "auto": 7,
    "deepspeed": 7,
    "huggingface": 7,
    "cli": 7,
    "testing": 7,
    "run": 8,
}
TOP_LEVEL_MAY_IMPORT = ("errors", "core", "config", "planner")
FROM_STORE_UP = tuple(f"{PACKAGE}.{layer}" for layer, level in LAYERS.items() if level >= 2)
ALLOWED_IN = {
    "torch": tuple(name for name in FROM_STORE_UP if not name.endswith(".planner")),
    "yaml": (f"{PACKAGE}.config",),
    "megatron": (f"{PACKAGE}.adapters.megatron",),
    "deepspeed": (f"{PACKAGE}.adapters.deepspeed",),
    "transformers": (f"{PACKAGE}.adapters.huggingface",),
    "accelerate": (f"{PACKAGE}.adapters.huggingface",),
}
# A Trainer trains with DeepSpeed: its adapter stands on that one.
STANDS_ON = {f"{PACKAGE}.adapters.huggingface": f"{PACKAGE}.adapters.deepspeed"}
# Standing in for CUDA patches the frameworks that are there, and must load without them.
LATE_IN = {"megatron": f"{PACKAGE}.cpu", "deepspeed": f"{PACKAGE}.cpu"}
# What moves state names no framework, not even in a comment.
KNOW_NO_FRAMEWORK = ("core", "store", "transport", "execution", "elastic")
FRAMEWORK = re.compile("megatron|deepspeed|transformers|hugging", re.IGNORECASE)


def imports(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.Call, str, int]]:
    """Each import with the module or member it names and the number of leading dots."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node, alias.name, 0) for alias in node.names)
            case ast.ImportFrom(module=module, level=level):
                yield from ((node, f"{module or ''}.{a.name}", level) for a in node.names)
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node, name, 0


def is_inside(module: str, folders: tuple[str, ...]) -> bool:
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


def own_import_violation(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, a module of this package."""
    importer, imported = (f"{path}..".split(".")[1] for path in (module, name))
    if imported == "__version__" and LAYERS.get(importer) == LAYERS["cli"]:
        return None
    if imported not in LAYERS:
        return "names no layer: import from the module that defines it"
    if not importer:
        return None if imported in TOP_LEVEL_MAY_IMPORT else "the top level stays pure"
    frameworks = {ALLOWED_IN[party] for party in ("megatron", "deepspeed", "transformers")}
    own_and_below = [above for above, below in STANDS_ON.items() if is_inside(name, (below,))]
    other = [
        own
        for own in frameworks
        if is_inside(name, own) and not is_inside(module, (*own, *own_and_below))
    ]
    if importer == "adapters" and other and module != f"{PACKAGE}.adapters.registry":
        return "one framework's adapter is nothing to the other modules of the layer"
    lower = LAYERS[imported] < LAYERS[importer]
    return None if lower or imported == importer else f"{importer} is not above {imported}"


def third_party_violation(module: str, name: str, *, late: bool) -> str | None:
    """Why `module` may not import `name`, a module of somebody else."""
    party = name.partition(".")[0]
    if party not in ALLOWED_IN or is_inside(module, ALLOWED_IN[party]):
        return None
    if party in LATE_IN and is_inside(module, (LATE_IN[party],)):
        return None if late else f"{party} may be imported here inside functions only"
    return f"{party} belongs into {', '.join(ALLOWED_IN[party])}"


def violations(module: str, source: str) -> list[str]:
    """One sentence per forbidden import in the source of `module`."""
    tree = ast.parse(source)
    if module.split(".")[1:2] not in [[], *([layer] for layer in LAYERS)]:
        return [f"{module}: no layer is given for it in LAYERS"]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    late_nodes = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node, name, dots in imports(tree):
        if dots:
            reason: str | None = "relative imports hide the layer"
        elif is_inside(name, (PACKAGE,)):
            reason = own_import_violation(module, name)
        else:
            reason = third_party_violation(module, name, late=id(node) in late_nodes)
        if reason:
            found.append(
                f"{module}:{node.lineno}: import of '{'.' * dots}{name.lstrip('.')}': {reason}"
            )
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_lower_layers(module: str) -> None:
    assert violations(module, SOURCES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("planner.choose", "import tenplex_megatron.elastic.policy"),
        ("planner.choose", "from tenplex_megatron.elastic.policy import ElasticPolicy"),
        ("planner.choose", "from tenplex_megatron import elastic"),
        ("planner.choose", "def f():\n    from tenplex_megatron import elastic"),
        ("planner.choose", "if TYPE_CHECKING:\n    from tenplex_megatron.elastic import policy"),
        ("planner.choose", "import importlib\nimportlib.import_module('tenplex_megatron.elastic')"),
        ("planner.choose", "from tenplex_megatron.store import base"),
        ("planner.choose", "from tenplex_megatron import Region"),
        ("planner.choose", "import tenplex_megatron"),
        ("core.plan", "from tenplex_megatron.config import ElasticPolicy"),
        ("errors", "from tenplex_megatron.core.region import Region"),
        ("elastic.agent", "from tenplex_megatron.cli import render"),
        ("adapters.base", "from tenplex_megatron.cpu import install"),
        ("adapters.base", "from tenplex_megatron.adapters.megatron import layout"),
        ("adapters.deepspeed.zero", "from tenplex_megatron.adapters.megatron import layout"),
        ("adapters.deepspeed.zero", "from tenplex_megatron.adapters import megatron"),
        ("adapters.deepspeed.zero", "from tenplex_megatron.adapters.huggingface import callback"),
        ("adapters.huggingface.callback", "from tenplex_megatron.adapters.megatron import layout"),
        ("adapters.deepspeed.zero", "import transformers"),
        ("core.plan", "from . import region"),
        ("core.plan", "from .region import Region"),
        ("core.plan", "from ..errors import LayoutError"),
        ("elastic.hook", "import megatron"),
        ("elastic.hook", "def f():\n    from megatron.training import training"),
        ("adapters.base", "import megatron.core"),
        ("adapters.deepspeed.zero", "from megatron.core import parallel_state"),
        ("adapters.megatron.layout", "import deepspeed"),
        ("cpu.cuda", "import megatron.core"),
        ("core.plan", "import torch"),
        ("config", "import torch"),
        ("planner.choose", "from torch import Tensor"),
        ("", "import torch"),
        ("", "from tenplex_megatron.store import base"),
        ("elastic.policy", "import yaml"),
        ("unheard_of", "import os"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    assert len(violations(f"{PACKAGE}.{module}".strip("."), line)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core.plan", "import numpy\nfrom tenplex_megatron.core.region import Region"),
        ("config", "import yaml\nfrom tenplex_megatron.errors import ConfigError"),
        ("store.shared", "import torch\nfrom tenplex_megatron.core.tensors import TensorSpec"),
        ("adapters.megatron.layout", "from megatron.core import parallel_state"),
        ("adapters.megatron.layout", "from tenplex_megatron.adapters.base import FrameworkAdapter"),
        ("adapters.huggingface.callback", "from tenplex_megatron.adapters.deepspeed import hooks"),
        (
            "adapters.registry",
            "def f():\n    from tenplex_megatron.adapters.megatron import adapter",
        ),
        ("cpu.cuda", "import torch\ndef f():\n    import megatron.core"),
        ("elastic.worker", "from tenplex_megatron.cpu import install"),
        ("cli.main", "from tenplex_megatron import __version__"),
        ("", "from tenplex_megatron.core.region import Region"),
    ],
)
def test_an_allowed_import_passes(module: str, line: str) -> None:
    assert violations(f"{PACKAGE}.{module}".strip("."), line) == []


def framework_lines(source: str) -> list[str]:
    """The lines that name a framework; the package's own name does not count."""
    lines = source.splitlines()
    return [line for line in lines if FRAMEWORK.search(line.replace(PACKAGE, ""))]


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in SOURCES
        if is_inside(name, tuple(f"{PACKAGE}.{layer}" for layer in KNOW_NO_FRAMEWORK))
    ],
)
def test_what_moves_state_names_no_framework(module: str) -> None:
    assert framework_lines(SOURCES[module].read_text()) == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("x = 1  # as Megatron does", True),
        ("message = 'DeepSpeed'", True),
        ("def megatron_flags(): ...", True),
        ("from tenplex_megatron.huggingface import x", True),
        ("from tenplex_megatron.core.region import Region", False),
        ("logging.getLogger('tenplex_megatron')", False),
    ],
)
def test_a_word_of_a_framework_is_found(line: str, is_found: bool) -> None:
    assert bool(framework_lines(line)) == is_found
