"""Token files on disk, seen as one long row of ids that is never loaded whole.

Two formats share the suffix .npy. Real NumPy arrays begin with magic bytes and name their own item type; the headerless
files that Olmo-core writes are nothing but items, of the type data.token_dtype.
"""

import bisect
import functools
import itertools
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from moejax.errors import DataError

_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK\x03\x04"
_BLOCK = 1 << 16
# Up to this many tokens are all checked when the files are opened; of more, evenly spaced blocks.
_CHECKED_AT_OPEN = 1 << 24
# A mapped file holds a file descriptor, and the usual limit of a process is 1024. Collections of thousands of files are common.
_MAPPED_AT_ONCE = 512


@dataclass(frozen=True)
class TokenFile:
    """Where the ids of one file lie. Holds no open file."""

    setting: str
    """The setting that names the file, for messages: data.paths[0]=/some/where.npy"""
    path: Path
    dtype: np.dtype
    offset_bytes: int
    num_tokens: int

    @property
    def is_headerless(self) -> bool:
        return self.offset_bytes == 0

    def map(self) -> mmap.mmap:
        with self.path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        # Shuffled windows lie anywhere: without this the kernel reads its whole read-ahead (128 KiB, megabytes on some systems) for each.
        mapped.madvise(mmap.MADV_RANDOM)
        return mapped

    def read(self, mapped: mmap.mmap, start: int, stop: int) -> Integer[np.ndarray, " T"]:
        """The ids of a span that ends at the file's end at the latest; not copied."""
        stop = min(stop, self.num_tokens)
        first_byte, last_byte = (self.offset_bytes + token * self.dtype.itemsize for token in (start, stop))
        page = first_byte - first_byte % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, page, last_byte - page)  # one request to the disk instead of one per page
        return np.frombuffer(mapped, self.dtype, stop - start, first_byte)


@dataclass(frozen=True)
class TokenFiles:
    """Several files as one row of ids: len() and slices, as of a NumPy array. Slices cross file boundaries and are copies."""

    files: tuple[TokenFile, ...]
    vocab_size: int

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, span: slice) -> Int32[np.ndarray, " T"]:
        """The ids of a span, each checked against the vocabulary.

        Raises:
            DataError: if an id is outside the vocabulary.
        """
        start, stop, _ = span.indices(len(self))
        pieces = [np.empty(0, np.int32)]
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            file, skipped = self.files[number], start - self._starts[number]
            ids = file.read(self._map(file), skipped, skipped + stop - start)
            _check_ids(file, skipped, ids, self.vocab_size)
            pieces.append(ids.astype(np.int32))
            start, number = start + len(ids), number + 1
        return np.concatenate(pieces)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """First token of each file, and of a file that would follow the last."""
        return list(itertools.accumulate((file.num_tokens for file in self.files), initial=0))

    @functools.cached_property
    def _map(self) -> Callable[[TokenFile], mmap.mmap]:
        """TokenFile.map that remembers the files used last."""
        return functools.lru_cache(maxsize=_MAPPED_AT_ONCE)(TokenFile.map)


def open_token_files(paths: Sequence[str], headerless_dtype: str, vocab_size: int) -> TokenFiles:
    """Find the format and length of each file and check its ids: all of them, or evenly spaced blocks if there are many.

    Raises:
        DataError: if a file is missing, empty, misshapen or holds ids outside the vocabulary.
    """
    files = tuple(_inspect(f"data.paths[{i}]={path}", path, np.dtype(headerless_dtype)) for i, path in enumerate(paths))
    stride = math.ceil(sum(file.num_tokens for file in files) / _CHECKED_AT_OPEN) * _BLOCK
    for file in files:
        mapped = file.map()
        for start in sorted({*range(0, file.num_tokens, stride), max(0, file.num_tokens - _BLOCK)}):
            _check_ids(file, start, file.read(mapped, start, start + _BLOCK), vocab_size)
    return TokenFiles(files, vocab_size)


def _inspect(setting: str, text: str, headerless_dtype: np.dtype) -> TokenFile:
    if not text:
        raise DataError(f"{setting} is an empty path; name a token file or leave it out")
    try:
        path = Path(text).expanduser()
        if not path.is_file():
            what = "is a folder; name the files in it" if path.is_dir() else "does not exist; correct the path"
            raise DataError(f"{setting} {what}")
        with path.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
        if not magic:
            raise DataError(f"{setting} is empty (0 bytes); leave it out or write it again")
        if magic.startswith(_ZIP_MAGIC):
            raise DataError(f"{setting} is a .npz or another zip archive; write each array in it to a file of its own with numpy.save")
        return _inspect_npy(setting, path) if magic == _MAGIC else _inspect_headerless(setting, path, headerless_dtype)
    except OSError as error:
        raise DataError(f"{setting} cannot be read ({error.strerror}); make it readable, correct the path or leave it out") from error
    except RuntimeError as error:  # from expanduser
        raise DataError(f"{setting} begins with the home of a user that does not exist here; write the whole path") from error


def _inspect_npy(setting: str, path: Path) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise DataError(
            f"{setting} begins like a .npy array but cannot be mapped as one ({error}); write it again with numpy.save"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{setting} is a {array.dtype} array of shape {array.shape}; token files hold one row of integers: "
            "save ids.reshape(-1) with an integer type such as uint16"
        )
    if array.size == 0:
        raise DataError(f"{setting} is an array of 0 tokens; leave it out or write it again")
    extra_bytes = path.stat().st_size - array.offset - array.nbytes
    if extra_bytes:
        raise DataError(f"{setting} has {extra_bytes} bytes behind its array of {array.size} tokens; write one array per file")
    return TokenFile(setting, path, array.dtype, array.offset, array.size)


def _inspect_headerless(setting: str, path: Path, dtype: np.dtype) -> TokenFile:
    size_bytes = path.stat().st_size
    if size_bytes % dtype.itemsize:
        raise DataError(
            f"{setting} has no .npy header and {size_bytes} bytes, not a multiple of the {dtype.itemsize} of data.token_dtype={dtype}; "
            "set data.token_dtype to the type the file was written with, or copy the file again if it was cut short"
        )
    return TokenFile(setting, path, dtype, 0, size_bytes // dtype.itemsize)


def _check_ids(file: TokenFile, start: int, ids: Integer[np.ndarray, " T"], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; start is the position of the first id in its file."""
    if ids.min() >= 0 and ids.max() < vocab_size:
        return
    wrong = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    other = "set data.token_dtype to the type the file was written with" if file.is_headerless else "write the file again with other ids"
    raise DataError(
        f"{file.setting} holds id {ids[wrong]} at token {start + wrong} (read as {file.dtype}), "
        f"but model.vocab_size={vocab_size} allows 0..{vocab_size - 1}; "
        f"raise model.vocab_size, or {other}"
    )
