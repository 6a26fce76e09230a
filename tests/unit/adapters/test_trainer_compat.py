"""Every name of Transformers and accelerate that is relied on is where it was seen."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest

from tenplex_megatron.adapters.huggingface.compat import SUPPORTED_VERSIONS, TOUCHED

PAIRS = [(module, name) for module, names in TOUCHED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_what_is_touched_exists(module: str, name: str) -> None:
    # Only the outermost package is imported: the others take seconds.
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert name in Path(spec.origin).parent.joinpath(*parts).with_suffix(".py").read_text()


@pytest.mark.parametrize("package", SUPPORTED_VERSIONS)
def test_the_installed_version_is_one_that_was_seen(package: str) -> None:
    assert version(package).startswith(f"{SUPPORTED_VERSIONS[package]}.")
