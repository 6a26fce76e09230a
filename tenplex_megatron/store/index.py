"""What do the small files beside the data say, and how is a damaged one told from a good one?

Each file is one JSON object whose last member is the digest of everything before it, so that a
torn, flipped or half-written file is refused before a word of it is believed.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import xxhash

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.base import StoredBox
from tenplex_megatron.store.values import PlainValue, decode_value, dump_compact, encode_value

__all__ = ["FORMAT", "JobRecord", "Manifest", "RankIndex", "digest_bytes", "seal", "unseal"]

FORMAT = 1
"""Version of the files; another one is refused, never guessed at."""

_DIGEST_HEX = 32
_SEAL_BYTES = len(',"digest":""}') + _DIGEST_HEX


def digest_bytes(content: bytes | memoryview) -> str:
    """The 128-bit xxHash3 of `content`, in hexadecimal; large inputs are hashed without the GIL."""
    return xxhash.xxh3_128_hexdigest(content)


def seal(record: Mapping[str, object]) -> tuple[bytes, str]:
    """The bytes of a file holding `record`, and their digest."""
    body = dump_compact(record)
    digest = digest_bytes(body)
    return body[:-1] + f',"digest":"{digest}"}}'.encode("ascii"), digest


def unseal(content: bytes, name: str) -> tuple[dict[str, Any], str]:
    """The record of a sealed file and its digest.

    Raises:
        StoreError: the content is not what was written, or of another format.
    """
    record: object = None
    with contextlib.suppress(ValueError):
        record = json.loads(content)
    if isinstance(record, dict) and "format" in record and record["format"] != FORMAT:
        raise StoreError(
            f"{name}: written in format {record['format']!r}, expected format {FORMAT}; use the "
            "tenplex_megatron that wrote it, or remove the snapshots"
        )
    digest = digest_bytes(content[:-_SEAL_BYTES] + b"}")
    if not isinstance(record, dict) or record.pop("digest", None) != digest:
        raise StoreError(f"{name}: torn or changed ({len(content)} bytes do not fit their digest)")
    return record, digest


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Whose snapshots a directory holds."""

    job: str
    identity: str

    def to_bytes(self) -> bytes:
        """The content of job.json."""
        return seal({"format": FORMAT, "job": self.job, "identity": self.identity})[0]

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> "JobRecord":
        """What job.json says; `name` is the file in errors."""
        record, _ = unseal(content, name)
        return cls(record["job"], record["identity"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """All ranks of the world have finished a version; the digests of the indexes held here."""

    job: str
    generation: int
    version: int
    world_size: int
    layout: Mapping[str, PlainValue]
    indexes: Mapping[int, str]

    def to_bytes(self) -> bytes:
        """The content of the manifest's file."""
        record = {
            "format": FORMAT,
            "job": self.job,
            "generation": self.generation,
            "version": self.version,
            "world_size": self.world_size,
            "layout": encode_value(self.layout, "layout"),
            "indexes": [[rank, digest] for rank, digest in sorted(self.indexes.items())],
        }
        return seal(record)[0]

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> "Manifest":
        """What a manifest says; `name` is the file in errors."""
        record, _ = unseal(content, name)
        return cls(
            job=record["job"],
            generation=record["generation"],
            version=record["version"],
            world_size=record["world_size"],
            layout=cast(dict[str, PlainValue], decode_value(record["layout"])),
            indexes=dict(record["indexes"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """Everything about one finished version of one rank except the bytes of its tensors."""

    job: str
    generation: int
    version: int
    rank: int
    world_size: int
    layout: Mapping[str, PlainValue]
    specs: Mapping[str, TensorSpec]
    boxes: tuple[StoredBox, ...]
    progress: Mapping[str, PlainValue]

    @property
    def data_bytes(self) -> int:
        """The size the data file must have at least."""
        return max((box.offset + box.nbytes for box in self.boxes), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors."""
        return sum(box.nbytes for box in self.boxes)

    def seal(self) -> tuple[bytes, str]:
        """The content of the index's file and its digest."""
        record = {
            "format": FORMAT,
            "job": self.job,
            "generation": self.generation,
            "version": self.version,
            "rank": self.rank,
            "world_size": self.world_size,
            "layout": encode_value(self.layout, "layout"),
            "specs": [
                [spec.name, list(spec.shape), spec.dtype, spec.padded]
                for spec in self.specs.values()
            ],
            "boxes": [
                {
                    "tensor": box.tensor,
                    "region": [list(box.region.start), list(box.region.stop)],
                    "dtype": box.dtype,
                    "offset": box.offset,
                    "nbytes": box.nbytes,
                    "digest": box.digest,
                }
                for box in self.boxes
            ],
            "progress": encode_value(self.progress),
        }
        return seal(record)

    @classmethod
    def unseal(cls, content: bytes, name: str) -> tuple["RankIndex", str]:
        """What an index says and its digest; `name` is the file in errors.

        Raises:
            StoreError: the content is torn, changed or of another format.
        """
        record, digest = unseal(content, name)
        specs = [
            TensorSpec(tensor, tuple(shape), dtype, padded=padded)
            for tensor, shape, dtype, padded in record["specs"]
        ]
        boxes = tuple(
            StoredBox(
                tensor=box["tensor"],
                region=Region(tuple(box["region"][0]), tuple(box["region"][1])),
                dtype=box["dtype"],
                offset=box["offset"],
                nbytes=box["nbytes"],
                digest=box["digest"],
            )
            for box in record["boxes"]
        )
        index = cls(
            job=record["job"],
            generation=record["generation"],
            version=record["version"],
            rank=record["rank"],
            world_size=record["world_size"],
            layout=cast(dict[str, PlainValue], decode_value(record["layout"])),
            specs={spec.name: spec for spec in specs},
            boxes=boxes,
            progress=cast(dict[str, PlainValue], decode_value(record["progress"])),
        )
        return index, digest
