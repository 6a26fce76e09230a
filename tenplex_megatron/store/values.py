"""How do a job's progress values cross JSON without changing their value or type?

Plain JSON turns tuples into lists, keys into strings and has no NaN, infinity or bytes. Those are
written as `{"$kind": ...}`; everything else is JSON as it is. Order of dictionaries is kept.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any, cast

from tenplex_megatron.errors import StoreError

__all__ = ["PlainValue", "decode_value", "dump_compact", "encode_value"]

type PlainValue = (
    bool
    | int
    | float
    | str
    | bytes
    | tuple["PlainValue", ...]
    | list["PlainValue"]
    | Mapping["PlainValue", "PlainValue"]
    | Mapping[str, "PlainValue"]
    | None
)


def dump_compact(record: object) -> bytes:
    """ASCII JSON without blanks, keys in the order given; refuses NaN and infinity."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")


def encode_value(value: object, where: str = "progress") -> object:
    """JSON for a plain value; `decode_value` gives it back equal in value and type.

    >>> encode_value({"seen": (3, False), "scale": float("inf")})
    {'seen': {'$tuple': [3, False]}, 'scale': {'$float': 'inf'}}

    Raises:
        StoreError: the value, or one inside it, is no plain value; its place is named.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list | tuple):
        items = [encode_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    raise StoreError(
        f"{where}: {type(value).__module__}.{type(value).__qualname__} can't be kept in a snapshot;"
        " expected None, bool, int, float, str, bytes, list, tuple or dict: convert it first"
    )


def _encode_mapping(value: Mapping[object, object], where: str) -> object:
    pairs = [(key, encode_value(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [[encode_value(key, f"{where} key"), item] for key, item in pairs]}


def decode_value(record: object) -> PlainValue:
    """The value `encode_value` was given.

    >>> decode_value({"seen": {"$tuple": [3, False]}})
    {'seen': (3, False)}

    Raises:
        StoreError: the record uses a kind this version does not know.
    """
    if isinstance(record, list):
        return [decode_value(item) for item in record]
    if not isinstance(record, dict):
        return cast(bool | int | float | str | None, record)
    if len(record) == 1:
        kind, content = next(iter(record.items()))
        if kind.startswith("$"):
            return _decode_kind(kind, content)
    return {key: decode_value(item) for key, item in record.items()}


def _decode_kind(kind: str, content: Any) -> PlainValue:  # noqa: ANN401  # JSON of any kind
    if kind == "$tuple":
        return tuple(decode_value(item) for item in content)
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return base64.b64decode(content)
    if kind == "$dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    raise StoreError(f"a snapshot holds a value of unknown kind {kind!r}; update tenplex_megatron")
