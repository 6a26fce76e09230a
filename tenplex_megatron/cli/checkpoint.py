"""What does a torch_dist checkpoint hold?  Only its metadata and the sizes of its files are read.

The metadata is a pickle, written by torch.distributed.checkpoint: reading it can run any code its
author put there, so a checkpoint is trusted input.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tenplex_megatron.core.tensors import DTYPE_BYTES
from tenplex_megatron.errors import StoreError

__all__ = ["METADATA_FILE", "checkpoint_values", "find_checkpoint"]

METADATA_FILE = ".metadata"
_TRACKER_FILE = "latest_checkpointed_iteration.txt"


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint in `path`, or the newest one of a run's folder; None when it is neither.

    Raises:
        StoreError: the folder names a newest checkpoint that is not there.
    """
    if (path / METADATA_FILE).is_file():
        return path
    tracker = path / _TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    folder = path / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if not (folder / METADATA_FILE).is_file():
        raise StoreError(
            f"{tracker}: names {text!r}, but {folder} is no torch_dist checkpoint "
            f"(it has no {METADATA_FILE}); convert other formats with Megatron's own tools"
        )
    return folder


def checkpoint_values(path: Path, *, with_tensors: bool) -> dict[str, Any]:
    """The tensors, objects and files of a checkpoint, in plain values.

    Raises:
        StoreError: the metadata can't be read.
    """
    metadata = _read_metadata(path)
    tensors = []
    objects = []
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(_tensor(name, entry))
        else:
            objects.append(name)
    files, damaged = _files(path, metadata.storage_data or {})
    values: dict[str, Any] = {
        "kind": "torch_dist",
        "path": str(path),
        "sound": not damaged,
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "tensor_count": len(tensors),
        "chunk_count": sum(tensor["chunks"] for tensor in tensors),
        "objects": len(objects),
        "files": files,
        "damaged_files": damaged,
    }
    if with_tensors:
        values["tensors"] = tensors
        values["object_names"] = objects
    return values


def _read_metadata(path: Path) -> Any:  # noqa: ANN401 - whatever the pickle holds
    try:
        metadata: Any = FileSystemReader(path).read_metadata()
        _ = metadata.state_dict_metadata, metadata.storage_data
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError,
            KeyError, TypeError, ValueError) as error:  # fmt: skip
        raise StoreError(
            f"{path / METADATA_FILE}: can't be read as the metadata of a checkpoint "
            f"({type(error).__name__}: {error}); it is damaged or another version of torch wrote it"
        ) from error
    return metadata


def _tensor(name: str, entry: TensorStorageMetadata) -> dict[str, Any]:
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {
        "name": name,
        "shape": list(entry.size),
        "dtype": dtype,
        "bytes": entry.size.numel() * DTYPE_BYTES.get(dtype, entry.properties.dtype.itemsize),
        "chunks": len(entry.chunks),
    }


def _files(
    path: Path, places: Mapping[Any, Any]
) -> tuple[dict[str, int], list[dict[str, str | int]]]:
    """The size of every data file, and the files that are missing or too short."""
    needed: dict[str, int] = {}
    for place in places.values():
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    sizes: dict[str, int] = {}
    damaged: list[dict[str, str | int]] = []
    for name, expected in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            damaged.append({"file": str(file), "reason": f"missing, expected {expected} bytes"})
            continue
        sizes[name] = file.stat().st_size
        if sizes[name] < expected:
            reason = f"truncated to {sizes[name]} bytes, expected {expected}"
            damaged.append({"file": str(file), "reason": reason})
    return sizes, damaged
