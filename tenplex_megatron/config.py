"""What may an elastic job do and what runs it, as a person wrote it in YAML?

The policy is read once into frozen dataclasses. Every mistake in the file becomes one `ConfigError`
that names the file, the path of the key, what was expected and what was found.
"""

import contextlib
import difflib
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import yaml

from tenplex_megatron.errors import ConfigError

__all__ = [
    "AuditPolicy",
    "ElasticPolicy",
    "PlannerPolicy",
    "SnapshotPolicy",
    "TimeoutPolicy",
    "cluster_file",
    "known_clusters",
    "load_policy",
    "load_profile",
    "parse_policy",
]

DEVICES = ("cuda", "cpu")
FAILED_DEVICE = ("drop", "reuse")
_AXIS = r"(?:(?:TP|PP|DP|VPP|CP|EP|MBS)[1-9]\d*|STAGES\d+(?:-\d+)*|ZERO[0-3])"
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_LAYOUT = re.compile(rf"{_AXIS}(?:,{_AXIS})*")


def _require(condition: bool, key: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(cast("float", value)) and cast("float", value) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """When and where the state is copied into node memory."""

    every_steps: int = 10
    """Training steps between two snapshots; a lost process costs at most this many steps."""
    directory: str | None = None
    """Folder on tmpfs that holds the snapshots; None means /dev/shm/tenplex-<uid>."""

    def __post_init__(self) -> None:
        _require(_is_count(self.every_steps), "every_steps", "a count from 1", self.every_steps)
        _require(
            self.directory is None or isinstance(self.directory, str),
            "directory",
            "a folder or null",
            self.directory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPolicy:
    """What is recorded so that a person can check exactness afterwards."""

    samples: bool = False
    """Record the ids of the samples of every global batch in samples-*.jsonl."""
    state: bool = False
    """Record fingerprints of all state before and after every planned change in events.jsonl."""

    def __post_init__(self) -> None:
        for name in ("samples", "state"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, "true or false", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutPolicy:
    """How long each blocking part of a reconfiguration may take, in seconds."""

    stop_s: float = 10.0
    """From a planned change to the last worker's exit; then workers are killed."""
    rendezvous_s: float = 60.0
    """How long nodes wait for each other, at the start and between two generations."""
    exchange_s: float = 300.0
    """How long the exchange of state between the new workers may take."""

    def __post_init__(self) -> None:
        for name in ("stop_s", "rendezvous_s", "exchange_s"):
            value = getattr(self, name)
            _require(_is_positive(value), name, "seconds above 0", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPolicy:
    """What the choice of a layout goes by."""

    cluster: str | None = None
    """A profile in configs/cluster by name, or a file; None: the one of this node's devices."""
    model: str | None = None
    """Profile of what is trained, a file such as those in configs/model; None: by the flags."""
    memory_gb: float | None = None
    """Memory of a device that may be used, in 1e9 bytes; None: all the profile says."""
    next_change_s: float = 3600.0
    """Seconds expected until the devices change again: what a move has to pay off in."""
    least_gain: float = 0.03
    """The part of the steps another layout must gain over the one the state lies in."""

    def __post_init__(self) -> None:
        gain: object = self.least_gain
        for key, what in (("cluster", "a name, a file or null"), ("model", "a file or null")):
            name: object = getattr(self, key)
            _require(name is None or (isinstance(name, str) and name != ""), key, what, name)
        is_limit = self.memory_gb is None or _is_positive(self.memory_gb)
        _require(is_limit, "memory_gb", "a number above 0 or null", self.memory_gb)
        seconds = self.next_change_s
        _require(_is_positive(seconds), "next_change_s", "seconds above 0", seconds)
        is_part = isinstance(gain, int | float) and not isinstance(gain, bool) and 0 <= gain < 1
        _require(is_part, "least_gain", "a part from 0 to under 1", gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPolicy:
    """The whole policy file."""

    framework: str = "megatron"
    """Name of the adapter that knows the training framework."""
    device: str = "cuda"
    """`cuda`, or `cpu`: the stand-in that runs the framework over gloo."""
    snapshot: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    layouts: tuple[str, ...] | None = None
    """Layouts the job may use ("TP2,PP2"; DP follows from the devices); None: every legal one, with
    DeepSpeed data parallelism alone, times `autotp_size` of its configuration."""
    schedule: Mapping[int, int] = field(default_factory=dict)
    """After step s is finished, go to N devices; step 0 sets the devices of the start."""
    failed_device: str = "drop"
    """`drop`: the device of a failed process rests until more are asked for; `reuse`: at once."""
    max_failures: int = 16
    """Worker failures after which the job ends."""
    preload: tuple[str, ...] = ()
    """Modules that the script imports, to be imported once per node and not at every change."""
    audit: AuditPolicy = field(default_factory=AuditPolicy)
    timeouts: TimeoutPolicy = field(default_factory=TimeoutPolicy)
    planner: PlannerPolicy = field(default_factory=PlannerPolicy)
    places: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """File and line of every key that was written, for messages; no key of the file itself."""

    def __post_init__(self) -> None:
        name: object = self.framework
        _require(isinstance(name, str) and name != "", "framework", "an adapter's name", name)
        _require(self.device in DEVICES, "device", " or ".join(DEVICES), self.device)
        _require(
            self.failed_device in FAILED_DEVICE,
            "failed_device",
            " or ".join(FAILED_DEVICE),
            self.failed_device,
        )
        _require(
            _is_count(self.max_failures, 0), "max_failures", "a count from 0", self.max_failures
        )
        for module in self.preload:
            _require(
                _MODULE.fullmatch(str(module)) is not None,
                "preload",
                "names of modules such as transformers.models.llama.modeling_llama",
                module,
            )
        for pattern in self.layouts or ():
            _check_pattern(pattern)
        _check_quoted(self.layouts or ())
        for step, devices in self.schedule.items():
            _require(_is_count(step, 0), "schedule", "step numbers as keys", step)
            _require(_is_count(devices), f"schedule.{step}", "a count of devices", devices)

    def place(self, key: str) -> str:
        r"""A key of the policy and where it is written.

        >>> parse_policy("max_failures: 3\nplanner: {least_gain: 0}", "p.yaml").place("planner")
        'planner (p.yaml, line 2)'
        """
        return f"{key} ({self.places[key]})" if key in self.places else key


def load_policy(path: Path) -> ElasticPolicy:
    """The policy in the YAML file `path`.

    Raises:
        ConfigError: the file can't be read, is no YAML, or says something the policy does not know.
    """
    return parse_policy(_read(path, "elastic policy"), str(path))


def load_profile[T](kind: type[T], path: Path) -> T:
    """The profile in the YAML file `path`, of the dataclass `kind`: a cluster or a model.

    Its fields are the keys of the file and take whole numbers, numbers, booleans or text. Numbers
    may be written as 312e12, which YAML 1.1 alone takes for text.

    Raises:
        ConfigError: the file can't be read, is no YAML, lacks a key, has one that `kind` does not
            know, or a value that does not fit.
    """
    data = _yaml(_read(path, "profile"), f"profile {path}")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, got {data!r}")
    known = {item.name: item for item in fields(cast("Any", kind))}
    for key in data:
        if key not in known:
            raise ConfigError(_unknown(key, list(known), str(path)))
    for name, item in known.items():
        is_required = item.default is MISSING and item.default_factory is MISSING
        if is_required and name not in data:
            raise ConfigError(f"{path}: {name}: expected a value, got none; add the key")
    values = {name: _typed(known[name].type, value, name, path) for name, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def known_clusters() -> dict[str, Path]:
    """The profiles of clusters that come with the package, by name."""
    checkout = Path(__file__).resolve().parents[1] / "configs"
    installed = Path(sys.prefix) / "share" / "tenplex_megatron"
    root = checkout if checkout.is_dir() else installed
    return {path.stem: path for path in sorted((root / "cluster").glob("*.yaml"))}


def cluster_file(name: str, folder: Path) -> Path:
    """The file of the cluster profile a person named: a known one, or a file seen from `folder`.

    Raises:
        ConfigError: there is neither.
    """
    known = known_clusters()
    if name in known:
        return known[name]
    path = folder / name
    if path.is_file():
        return path
    example = next(iter(known.values()), Path("configs/cluster/h100.yaml"))
    raise ConfigError(
        f"cluster {name!r}: expected a file, or one of {', '.join(known)}; for other devices copy "
        f"{example}, write their numbers into it, and give the path of that file"
    )


def _typed(kind: object, value: object, name: str, path: Path) -> Any:  # noqa: ANN401 - a field's
    """`value` as the type of its field."""
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    elif type(value) is kind:
        return value
    expected = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    what = expected.get(cast("type", kind), str(kind))
    raise ConfigError(f"{path}: {name}: expected {what}, got {value!r}")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} can't be read: {error}") from error


def _yaml(text: str, what: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} is not valid YAML: {reason}") from error


def parse_policy(text: str, origin: str = "policy") -> ElasticPolicy:
    """The policy in YAML `text`; `origin` names it in errors.

    >>> parse_policy("schedule: {6: 4}").schedule
    {6: 4}
    """
    data = _yaml(text, f"elastic policy {origin}")
    policy = _build(ElasticPolicy, {} if data is None else data, origin)
    assert isinstance(policy, ElasticPolicy)
    places = {key: f"{origin}, line {line}" for key, line in _lines(yaml.compose(text))}
    return replace(policy, places=places)


def _lines(node: object, above: str = "") -> Iterator[tuple[str, int]]:
    """Every key with its line; keys of sections have the section before a dot."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{above}{key.value}", key.start_mark.line + 1
            yield from _lines(value, f"{above}{key.value}.")


_SECTIONS: dict[str, type] = {
    "snapshot": SnapshotPolicy,
    "audit": AuditPolicy,
    "timeouts": TimeoutPolicy,
    "planner": PlannerPolicy,
}


def _build(cls: type, data: object, where: str) -> Any:  # noqa: ANN401 - one per section
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected keys and values, got {data!r}")
    known = {item.name: item for item in fields(cls) if item.name != "places"}
    for key in data:
        if key not in known:
            raise ConfigError(_unknown(key, list(known), where))
    values: dict[str, Any] = {}
    for name, item in known.items():
        if name not in data:
            assert item.default is not MISSING or item.default_factory is not MISSING
        elif name in _SECTIONS and cls is ElasticPolicy:
            values[name] = _build(_SECTIONS[name], data[name] or {}, f"{where}: {name}")
        else:
            values[name] = _convert(name, data[name], where)
    try:
        return cls(**values)
    except ConfigError as error:
        joint = "." if ": " in where else ": "
        raise ConfigError(f"{where}{joint}{error}") from None


def _convert(name: str, value: object, where: str) -> object:
    if name == "layouts":
        if value is None or value == "auto":
            return None
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{where}: layouts: expected auto or a list, got {value!r}")
        return tuple(value)
    if name == "preload":
        if not isinstance(value, list | None):
            raise ConfigError(f"{where}: preload: expected a list of modules, got {value!r}")
        return tuple(value or ())
    if name == "schedule":
        if not isinstance(value, dict | None):
            raise ConfigError(f"{where}: schedule: expected step: devices pairs, got {value!r}")
        return dict(value or {})
    return value


def _check_pattern(pattern: object) -> None:
    legal = isinstance(pattern, str) and _LAYOUT.fullmatch(pattern) is not None
    axes = re.findall(r"[A-Z]+", pattern) if isinstance(pattern, str) else []
    if not legal or len(set(axes)) != len(axes):
        raise ConfigError(
            "layouts: expected axes with sizes such as 'TP2,PP2', 'TP1,PP1,DP3' or, for DeepSpeed, "
            f"'DP4,ZERO3' (ZERO0 to ZERO3), got {pattern!r}"
        )


def _check_quoted(patterns: Sequence[str]) -> None:
    """YAML reads `[TP2,PP2]` without quotes as two layouts of one axis each."""
    axes = [re.sub(r"[\d-]", "", pattern) for pattern in patterns]
    if len(axes) > 1 and "," not in "".join(patterns) and len(set(axes)) == len(axes):
        one, first = ",".join(patterns), patterns[0]
        raise ConfigError(
            f'layouts: expected layouts such as "TP2,PP2" in quotes, got {len(axes)} layouts of '
            f'one axis each; write "{one}" for one layout, or {first},PP1 and the like for several'
        )


def _unknown(key: object, known: list[str], where: str) -> str:
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    joint = "." if ": " in where else ": "
    return (
        f"{where}{joint}{key}: unknown key; the closest key is {close[0]!r} "
        f"(known: {', '.join(known)})"
    )
