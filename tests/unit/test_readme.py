"""What the README says can be done can be done."""

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from deepspeed.launcher import runner as deepspeed_launcher

from tenplex_megatron.adapters.megatron import arguments
from tenplex_megatron.cli.what_if import is_what_if
from tenplex_megatron.config import parse_policy
from tenplex_megatron.core.mesh import ParallelLayout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def test_there_are_blocks_of_every_kind() -> None:
    assert blocks("bash")
    assert blocks("yaml")
    assert blocks("python")


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_is_one_that_exists(command: list[str]) -> None:
    if command[0] == "deepspeed":
        given = deepspeed_launcher.parse_args(command[1:])
        assert given.module
        assert importlib.util.find_spec(given.user_script)
        return
    if command[0] != "tenplex":
        script = ROOT / command[0]
        assert script.is_file()
        assert all(flag in script.read_text() + _python_of(script) for flag in command[1:])
        return
    name, arguments = command[1], command[2:]
    if name == "plan" and is_what_if(arguments):
        name = "what_if"
    module = importlib.import_module(f"tenplex_megatron.cli.{name}")
    module.build_parser().parse_args(arguments)


def _python_of(script: Path) -> str:
    beside = script.with_suffix(".py")
    return beside.read_text() if beside.is_file() else ""


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_policy_is_valid(text: str) -> None:
    parse_policy(text)


@pytest.mark.parametrize("text", blocks("python"))
def test_every_python_block_runs(text: str) -> None:
    """Parts of a training loop, whose names are a script's, run end to end."""
    code = compile(text, "README.md", "exec")
    if not any(name in text for name in ("engine", "trainer")):
        exec(code, {})


def test_layouts_of_the_policy_are_layouts() -> None:
    policy = parse_policy(blocks("yaml")[0])
    assert policy.layouts
    assert all(ParallelLayout.parse(text) for text in policy.layouts)


def test_the_supported_versions_are_those_the_adapter_names() -> None:
    compat = (Path(arguments.__file__).parent / "compat.py").read_text()
    found = re.search(r"SUPPORTED_VERSIONS = \((.*?),?\)", compat)
    assert found
    for version in re.findall(r'"(.*?)"', found[1]):
        assert f"megatron-core {version}" in README


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_policy_is_valid(path: Path) -> None:
    if path.parent.name == "elastic":
        parse_policy(path.read_text(), str(path))
