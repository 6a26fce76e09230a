"""Published measurements of memory as models and strategies; sources are in the golden table."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from published_models import LLAMA
from published_rows import read_rows

from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["LLAMA", "MemoryRow", "b200_rows", "functional_rows"]

TABLES = Path(__file__).parents[2] / "golden" / "measured_tables.yaml"


class MemoryRow(NamedTuple):
    """One measured row."""

    name: str
    model: ModelProfile
    strategy: Strategy
    measured_bytes: float


def memory_rows(table: str) -> Iterator[MemoryRow]:
    """The rows of a table that say how much memory was allocated."""
    rows, _ = read_rows(table, yaml.safe_load(TABLES.read_text())["tables"][table])
    for row in rows:
        if row.memory_bytes is not None:
            yield MemoryRow(row.name, row.model, row.strategy, row.memory_bytes)


def b200_rows() -> Iterator[MemoryRow]:
    """Allocated at most over all ranks."""
    return memory_rows("simumax_b200_time_and_memory")


def functional_rows() -> Iterator[MemoryRow]:
    """Allocated at most on the last rank."""
    return memory_rows("megatron_functional_test_memory")
