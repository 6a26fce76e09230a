"""Every name of DeepSpeed that is relied on is where it was seen."""

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tenplex_megatron.adapters.deepspeed.compat import SUPPORTED_VERSIONS, TOUCHED

PAIRS = [(module, name) for module, names in TOUCHED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_what_is_touched_exists(module: str, name: str) -> None:
    root = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
    path = root.joinpath(*module.split(".")[1:])
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    assert re.search(rf"\b{name}\b", source)


def test_the_installed_version_is_one_that_was_seen() -> None:
    assert ".".join(version("deepspeed").split(".")[:2]) in SUPPORTED_VERSIONS
