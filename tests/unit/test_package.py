"""Is the package what it says: version, public names, types, and light to import?"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tenplex_megatron

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tenplex_megatron"
HEAVY = {"torch", "megatron", "deepspeed", "matplotlib"}


def test_the_public_names_are_these() -> None:
    assert tenplex_megatron.__all__ == [
        "Box",
        "ElasticPolicy",
        "ParallelLayout",
        "Region",
        "ReshardPlan",
        "TensorCollection",
        "TensorSpec",
        "Topology",
        "Transfer",
        "__version__",
        "plan_reshard",
    ]
    assert all(hasattr(tenplex_megatron, name) for name in tenplex_megatron.__all__)


def test_the_version_is_the_one_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tenplex_megatron.__version__ == project["version"]


def test_every_dependency_has_an_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [name for group in groups for name in group]
    assert {name.partition(">=")[0].lower() for name in wanted} <= pinned


def test_importing_the_package_loads_no_torch_and_no_framework() -> None:
    code = "import sys, tenplex_megatron; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(run.stdout.split())


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_a_module_lists_its_public_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node.name for node in tree.body if isinstance(node, definitions)]
    public = {name for name in defined if not name.startswith("_")}
    listed = ast.literal_eval(assigned["__all__"]) if "__all__" in assigned else []
    assert public <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("script", ["setup.sh", "test.sh"])
def test_a_shell_script_explains_itself_and_refuses_what_it_does_not_know(script: str) -> None:
    def run(argument: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "scripts" / script), argument]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    explained, refused = run("--help"), run("--no-such-thing")
    assert (explained.returncode, explained.stdout.split()[0]) == (0, "Usage:")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{script}: unknown argument '--no-such-thing'" in refused.stderr


def test_set_up_says_in_one_sentence_that_no_python_is_new_enough(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    run = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "setup.sh")],
        env={"PATH": "/usr/bin:/bin", "TENPLEX_PYTHON": "/no/such/python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "no Python >= 3.12 found: tried /no/such/python" in run.stderr
    assert "TENPLEX_PYTHON=" in run.stderr
