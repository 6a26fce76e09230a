"""Which bytes does a byte-level Megatron dataset consist of?

Every file becomes one document of byte values, closed by the end-of-document token 255: UTF-8 text
never holds that byte, and it is the one Megatron's NullTokenizer takes with `--vocab-size 256`.
"""

import argparse
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 255
MEGABYTE = 1_000_000
EXAMPLES = """\
examples:
  the installed Python's own sources, at most 8 MB of them:
    python scripts/prepare_data.py --output data/stdlib --max-megabytes 8
  your own text:
    python scripts/prepare_data.py --output data/books ~/books/*.txt
  every .md file below a folder:
    python scripts/prepare_data.py --output data/notes --suffix .md ~/notes

then train with
    --data-path data/stdlib --tokenizer-type NullTokenizer --vocab-size 256
"""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Write a byte-level Megatron indexed dataset (PREFIX.bin and PREFIX.idx).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="text files, or folders to search (default: the Python standard library)",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX")
    parser.add_argument(
        "--suffix", default=".py", help="which files of a folder to take (default: %(default)s)"
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=8.0,
        help="stop before the text grows past this (default: %(default)s)",
    )
    return parser.parse_args()


def find_files(inputs: list[Path], suffix: str) -> list[Path]:
    """All files to read, in an order that depends on their names only."""
    folders = inputs or [Path(sysconfig.get_path("stdlib"))]
    found: list[Path] = []
    for path in folders:
        if path.is_dir():
            inside = path.rglob(f"*{suffix}")
            found += sorted(p for p in inside if p.is_file() and "site-packages" not in p.parts)
        elif path.is_file():
            found.append(path)
        else:
            sys.exit(f"prepare_data: {path} does not exist")
    return found


def read_documents(files: list[Path], max_bytes: int) -> Iterator[bytes]:
    """The files' contents, until the next one would pass the limit."""
    total = 0
    for number, path in enumerate(files, start=1):
        text = path.read_bytes()
        if total + len(text) > max_bytes:
            break
        if not text:
            continue
        total += len(text)
        if sys.stderr.isatty():
            print(f"\r{number} files, {total / MEGABYTE:.1f} MB", end="", file=sys.stderr)
        yield text
    ending = "\n" if sys.stderr.isatty() else ""
    print(f"{ending}{total / MEGABYTE:.2f} MB of text read", file=sys.stderr)


def write_dataset(prefix: Path, documents: Iterator[bytes]) -> int:
    """Write both files under temporary names, then rename; returns the number of documents."""
    # These take seconds to import, which --help and a wrong path need not wait for.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # They tell of optional kernels that are missing, which a dataset needs none of.
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    targets = {suffix: prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")}
    partial = {s: p.with_name(f".{p.name}.{os.getpid()}") for s, p in targets.items()}
    count = 0
    try:
        builder = IndexedDatasetBuilder(str(partial[".bin"]), dtype=np.uint8)
        for text in documents:
            tokens = np.frombuffer(text + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
            builder.add_document(torch.from_numpy(tokens.copy()), [len(tokens)])
            count += 1
        builder.finalize(str(partial[".idx"]))
        if count:
            # Readers open the index first, so it appears last.
            for suffix in (".bin", ".idx"):
                partial[suffix].replace(targets[suffix])
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return count


def main() -> None:
    """Read, write, and say what was written."""
    arguments = parse_arguments()
    files = find_files(arguments.inputs, arguments.suffix)
    limit = int(arguments.max_megabytes * MEGABYTE)
    count = write_dataset(arguments.output, read_documents(files, limit)) if files else 0
    if not count:
        where = ", ".join(map(str, arguments.inputs)) or sysconfig.get_path("stdlib")
        sys.exit(
            f"prepare_data: no text found in {where}: expected non-empty files"
            f" ({arguments.suffix} in folders) of at most {arguments.max_megabytes:g} MB;"
            " name other paths, or change --suffix or --max-megabytes"
        )
    print(f"{arguments.output}.bin and .idx: {count} documents")


if __name__ == "__main__":
    main()
