"""Which global rank stands where in a parallel layout, and which ranks form an axis group.

Ranks follow the order tp-cp-ep-dp-pp: the tensor axis varies fastest, the pipeline axis slowest.
Experts see the same ranks through a second grid, in which the data and context axes are cut into an
expert axis and an expert data axis.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from tenplex_megatron.errors import ConfigError, LayoutError

__all__ = ["AXES", "Coordinates", "ExpertCoordinates", "ParallelLayout", "parse_fields"]

AXES = ("tp", "cp", "dp", "pp")
"""The axes of the dense grid, fastest first."""

_NAMES = {
    "TP": "tp",
    "PP": "pp",
    "DP": "dp",
    "VPP": "vpp",
    "CP": "cp",
    "EP": "ep",
    "MBS": "micro_batch_size",
    "STAGES": "stage_layers",
    "ZERO": "zero_stage",
}
_OPTIONAL = ("micro_batch_size", "zero_stage")
_PATTERN = re.compile(r"(?P<name>[A-Za-z]+)(?P<value>[0-9]+(?:-[0-9]+)*)")


@dataclass(frozen=True, slots=True, order=True)
class Coordinates:
    """The place of a rank in the dense grid."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, order=True)
class ExpertCoordinates:
    """The place of a rank in the expert grid; `dp` counts the replicas of one expert."""

    tp: int = 0
    ep: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The size of every parallel axis, and how layers fall on pipeline stages.

    `vpp` is the number of model chunks per pipeline stage. `stage_layers` gives the layers of
    each stage (a stage's layers are divided evenly over its chunks), or of each of the
    `pp * vpp` virtual stages in model order; None means equal stages.

    >>> layout = ParallelLayout.parse("TP2,PP2,DP2")
    >>> layout.world_size, layout.coordinates(5)
    (8, Coordinates(tp=1, cp=0, dp=0, pp=1))
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch_size: int | None = None
    stage_layers: tuple[int, ...] | None = None
    zero_stage: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "vpp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name}: expected a size of at least 1, got {self}")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise LayoutError(f"micro batch size: expected at least 1, got {self}")
        if self.dp * self.cp % self.ep:
            raise LayoutError(
                f"{self}: expert axis of {self.ep} does not divide dp x cp = {self.dp * self.cp}"
            )
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            raise LayoutError(f"ZeRO stage: expected 0 to 3, got {self}")
        if self.stage_layers is not None:
            self._check_stage_layers(self.stage_layers)

    def _check_stage_layers(self, stage_layers: tuple[int, ...]) -> None:
        if len(stage_layers) not in (self.pp, self.pp * self.vpp):
            raise LayoutError(
                f"{self}: stage layers name {len(stage_layers)} stages, "
                f"expected {self.pp} or {self.pp * self.vpp}"
            )
        chunked = len(stage_layers) == self.pp
        if any(size < 0 or (chunked and size % self.vpp) for size in stage_layers):
            raise LayoutError(
                f"{self}: stage layers must be >= 0 and divide over {self.vpp} chunks per stage"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The layout a person wrote, such as `TP2,PP2,DP2,VPP2,MBS4` or `PP2,STAGES3-5`.

        Raises:
            ConfigError: when an entry is not an axis with a size.
        """
        values = parse_fields(text)
        try:
            return cls.from_json(values)
        except LayoutError as error:
            raise ConfigError(f"layout {text!r}: {error}") from error

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        parts += [f"{name.upper()}{size}" for name, size in self._optional_sizes() if size > 1]
        if self.micro_batch_size is not None:
            parts.append(f"MBS{self.micro_batch_size}")
        if self.stage_layers is not None:
            parts.append("STAGES" + "-".join(map(str, self.stage_layers)))
        if self.zero_stage is not None:
            parts.append(f"ZERO{self.zero_stage}")
        return ",".join(parts)

    def _optional_sizes(self) -> tuple[tuple[str, int], ...]:
        return ("vpp", self.vpp), ("cp", self.cp), ("ep", self.ep)

    def to_json(self) -> dict[str, int | list[int] | None]:
        """Every field by name; `from_json` gives the layout back."""
        return {
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "vpp": self.vpp,
            "cp": self.cp,
            "ep": self.ep,
            "micro_batch_size": self.micro_batch_size,
            "stage_layers": None if self.stage_layers is None else list(self.stage_layers),
            "zero_stage": self.zero_stage,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """The layout with these fields; absent ones take their defaults.

        Raises:
            LayoutError: for an unknown field or a value that is not an integer.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise LayoutError(f"layout has unknown fields {unknown}; known are {sorted(known)}")
        stages = values.get("stage_layers")
        if stages is not None and not isinstance(stages, Sequence):
            raise LayoutError(f"layout field stage_layers: expected integers, got {stages!r}")
        sizes = {
            name: _integer(name, value)
            for name, value in values.items()
            if name != "stage_layers" and not (name in _OPTIONAL and value is None)
        }
        layers = None if stages is None else tuple(_integer("stage_layers", n) for n in stages)
        return cls(**sizes, stage_layers=layers)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """The number of replicas of every expert."""
        return self.dp * self.cp // self.ep

    def size(self, axis: str) -> int:
        """The size of an axis of the dense grid, or of `ep`."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "ep": self.ep}
        if axis not in sizes:
            raise LayoutError(f"{axis!r} is no axis; known are {', '.join(sizes)}")
        return sizes[axis]

    def with_world_size(self, world_size: int) -> "ParallelLayout":
        """The same layout with as many data-parallel replicas as fill `world_size` ranks.

        >>> str(ParallelLayout.parse("TP2,PP2").with_world_size(8))
        'TP2,PP2,DP2'

        Raises:
            LayoutError: when one replica does not divide `world_size`.
        """
        replica = self.tp * self.pp * self.cp
        if world_size < 1 or world_size % replica:
            raise LayoutError(
                f"{self}: one replica needs {replica} ranks, which does not divide {world_size}"
            )
        return replace(self, dp=world_size // replica)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands in the dense grid."""
        tp, cp, dp, pp = self._digits(rank, (self.tp, self.cp, self.dp, self.pp))
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Where `rank` stands in the expert grid."""
        tp, ep, dp, pp = self._digits(rank, (self.tp, self.ep, self.expert_dp, self.pp))
        return ExpertCoordinates(tp=tp, ep=ep, dp=dp, pp=pp)

    def rank(self, place: Coordinates | ExpertCoordinates) -> int:
        """The global rank at a place of either grid."""
        if isinstance(place, Coordinates):
            digits = (place.tp, place.cp, place.dp, place.pp)
            sizes = (self.tp, self.cp, self.dp, self.pp)
        else:
            digits = (place.tp, place.ep, place.dp, place.pp)
            sizes = (self.tp, self.ep, self.expert_dp, self.pp)
        if any(not 0 <= digit < size for digit, size in zip(digits, sizes, strict=True)):
            raise LayoutError(f"{self}: no rank at {place}")
        rank = 0
        for digit, size in zip(reversed(digits), reversed(sizes), strict=True):
            rank = rank * size + digit
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along `axes` of the dense grid, sorted.

        >>> ParallelLayout.parse("TP2,DP2").groups("dp")
        ((0, 2), (1, 3))
        """
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(f"{axis!r} is no axis of the dense grid {AXES}")
        fixed = [axis for axis in AXES if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            members.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(rank)
        return tuple(sorted(map(tuple, members.values())))

    def layers(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """The global numbers of the layers in one model chunk of one pipeline stage.

        Chunks are interleaved: chunk 1 of the first stage follows chunk 0 of the last.

        >>> ParallelLayout(pp=2, vpp=2).layers(8, pp=0, chunk=1)
        range(4, 6)
        """
        if not (0 <= pp < self.pp and 0 <= chunk < self.vpp):
            raise LayoutError(f"{self}: no chunk {chunk} on stage {pp}")
        sizes = self._virtual_stage_sizes(num_layers)
        bounds = list(itertools.accumulate(sizes, initial=0))
        index = chunk * self.pp + pp
        return range(bounds[index], bounds[index + 1])

    def _virtual_stage_sizes(self, num_layers: int) -> list[int]:
        stages = self.pp * self.vpp
        if self.stage_layers is None:
            if num_layers % stages:
                raise LayoutError(
                    f"{self}: {num_layers} layers do not divide over {stages} stages; "
                    "give the layers per stage"
                )
            return [num_layers // stages] * stages
        if sum(self.stage_layers) != num_layers:
            raise LayoutError(
                f"{self}: stage layers sum to {sum(self.stage_layers)}, the model has {num_layers}"
            )
        if len(self.stage_layers) == stages:
            return list(self.stage_layers)
        return [size // self.vpp for size in self.stage_layers] * self.vpp

    def _digits(self, rank: int, sizes: tuple[int, ...]) -> list[int]:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"{self}: rank {rank} is not in a world of {math.prod(sizes)}")
        digits = []
        for size in sizes:
            rank, digit = divmod(rank, size)
            digits.append(digit)
        return digits


def parse_fields(text: str) -> dict[str, int | list[int]]:
    """The fields a layout text names, and no others, so that a caller knows what was left open.

    >>> parse_fields("TP2, PP2, STAGES3-5")
    {'tp': 2, 'pp': 2, 'stage_layers': [3, 5]}

    Raises:
        ConfigError: when an entry is not an axis with a size, or comes twice.
    """
    values: dict[str, int | list[int]] = {}
    for entry in text.split(","):
        match = _PATTERN.fullmatch(entry.strip())
        name = _NAMES.get(match["name"].upper()) if match else None
        if match is None or name is None:
            raise ConfigError(
                f"layout {text!r}: {entry.strip()!r} is no axis with a size; "
                f"expected entries such as TP2, of {', '.join(_NAMES)}"
            )
        if name in values:
            raise ConfigError(f"layout {text!r}: {match['name'].upper()} is given twice")
        numbers = [int(number) for number in match["value"].split("-")]
        if name != "stage_layers" and len(numbers) > 1:
            raise ConfigError(f"layout {text!r}: {entry.strip()!r} names more than one size")
        values[name] = numbers if name == "stage_layers" else numbers[0]
    return values


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayoutError(f"layout field {name}: expected an integer, got {value!r}")
    return value
