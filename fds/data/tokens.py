"""Files of tokens that are mapped into memory: Megatron's `.bin` with `.idx`, and raw streams, read as data sets."""

from __future__ import annotations

import array
import errno
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from fds.errors import DataError, is_int, nearest
from fds.storage.disk.files import check_path, read_errors, sync
from fds.storage.disk.placing import replace_files, write_errors

# An index, little-endian: MAGIC, version (u64) 1, code of the dtype (u8), sequences N (u64), documents D (u64), then
# lengths (N,) int32, first bytes (N,) int64, and the first sequence of each document with N at the end (D,) int64.
MAGIC, HEAD = b"MMIDIDX\x00\x00", 34
# The tables of Megatron and of DeepSpeed agree up to 5. Of the others the file's size says which was meant: no code
# stands for two integers of the same width. Their floats (6 and 7 in Megatron's) are no tokens.
CODES = {1: ("uint8",), 2: ("int8",), 3: ("int16",), 4: ("int32",), 5: ("int64",)}
CODES |= {6: ("uint16",), 7: ("uint32",), 8: ("uint16", "uint64")}
WRITTEN = {
    "megatron": {names[-1]: code for code, names in CODES.items() if code < 6} | {"uint16": 8},
    "deepspeed": {names[-1]: code for code, names in CODES.items()},
}
DTYPES = tuple(WRITTEN["deepspeed"])


@attrs.frozen(eq=False, init=False)
class TokenFile:
    """A file of tokens, mapped into memory: a data set of its sequences, opened in a time and memory of O(1).

    A sequence is a row, `(length,) int64`. `windows` and `documents` are data sets of the same tokens with other rows.
    The file must not change while it is open.

    Args:
        path: `corpus`, `corpus.bin` or `corpus.idx` for the two files of Megatron and DeepSpeed; or a raw stream.
        dtype: of a raw stream, such as "uint16" for nanoGPT's; None for a file with an index, which says it.

    Attributes:
        tokens: all tokens of the file, one after another: `(T,)`, read-only, in the file's dtype.
        lengths: `(N,) int32`, of the sequences; of a raw stream, which is one sequence, `(1,) int64`.
        firsts: `(N,) int64`, the first byte of each sequence.
        borders: `(D + 1,) int64`, the first sequence of each document, and N.
        is_raw: whether the file has no index.

    Raises `DataError` for files that contradict each other, `StorageError` where they cannot be read.
    """

    path: Path
    dtype: str
    tokens: np.ndarray = attrs.field(repr=lambda x: f"({len(x)},)")
    lengths: np.ndarray = attrs.field(repr=lambda x: f"({len(x)},)")
    firsts: np.ndarray = attrs.field(repr=False)
    borders: np.ndarray = attrs.field(repr=False)
    is_raw: bool = False
    draws = False  # no random numbers, so that a loader need not seed them

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None):
        place, index, data = _paths(path)
        with read_errors("token file", place):
            if dtype is None:
                if place.exists() and not index.exists():
                    hint = 'TokenFile(path, dtype="uint16") reads a raw stream, such as nanoGPT\'s'
                    raise DataError("there is no index beside the tokens", where=str(place), want=str(index), hint=hint)
                self.__attrs_init__(place, *_indexed(index, data))  # type: ignore[attr-defined]
                return
            _check_dtype(dtype, DTYPES)
            if index.exists():
                hint = f"TokenFile({str(index)!r})"
                raise DataError("these tokens have an index, which says their dtype", where=str(index), hint=hint)
            tokens = _mapped(place, np.dtype(dtype).newbyteorder("<"))
        length, first, borders = map(np.array, ([len(tokens)], [0], [0, 1]))
        self.__attrs_init__(place, dtype, tokens, length, first, borders, is_raw=True)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        """Return a sequence, `(length,) int64`."""
        first, end = self.span(row_number(i, len(self)))
        return _row(self.tokens[first:end])

    def __reduce__(self) -> tuple:
        return TokenFile, (self.path, self.dtype if self.is_raw else None)

    def span(self, i: int) -> tuple[int, int]:
        """Return where a sequence begins and ends in `tokens`. Raises `DataError` where the index leads out of it."""
        first, rest = divmod(int(self.firsts[i]), self.tokens.itemsize)
        end = first + int(self.lengths[i])
        if rest or not 0 <= first <= end <= len(self.tokens):
            got, want = f"tokens {first} to {end}", f"within the {len(self.tokens)} tokens of the file"
            raise DataError("the index is damaged", where=f"{self.path}, sequence {i}", got=got, want=want)
        return first, end

    def rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences `begin` to `end` as their tokens, concatenated, and the first place of each and the end.

        Where they lie one after another, as all programs write them, the tokens are a view of the file.
        """
        lengths = self.lengths[begin:end].astype(np.int64)
        places = np.concatenate([[0], np.cumsum(lengths)])
        if begin == end:
            return self.tokens[:0], places
        (first, _), (_, last) = self.span(begin), self.span(end - 1)
        if lengths.min() >= 0 and np.array_equal(self.firsts[begin:end], (first + places[:-1]) * self.tokens.itemsize):
            return self.tokens[first:last], places
        return np.concatenate([self.tokens[slice(*self.span(i))] for i in range(begin, end)]), places

    def windows(self, length: int) -> TokenWindows:
        """Return the data set of rows of `length + 1` tokens of the whole stream, which overlap by one token.

        Row i is tokens i * length to (i + 1) * length, the last included: inputs and targets of `length` positions.
        Documents are not heeded. Raises `DataError` where no row fits.
        """
        if not is_int(length, 1):
            raise DataError("not a length", where="length", got=repr(length), want="an int, 1 or more")
        if len(self.tokens) <= length:
            got, want = f"{len(self.tokens)} tokens", f"{length + 1} or more"
            raise DataError("the file does not fill one window", where=str(self.path), got=got, want=want)
        return TokenWindows(self, length)

    def documents(self) -> TokenDocuments:
        """Return the data set of documents, each of all its sequences. Raises `DataError` for a raw stream."""
        if self.is_raw:
            want = "a file with an index; or `windows`"
            raise DataError("a raw stream does not say where documents end", where=str(self.path), want=want)
        return TokenDocuments(self)


@attrs.frozen(eq=False)
class TokenWindows:
    """The rows of `TokenFile.windows`."""

    file: TokenFile
    length: int
    draws = False

    def __len__(self) -> int:
        return (len(self.file.tokens) - 1) // self.length

    def __getitem__(self, i: int) -> Tensor:
        first = row_number(i, len(self)) * self.length
        return _row(self.file.tokens[first : first + self.length + 1])

    def rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows `begin` to `end` as `TokenFile.rows` does."""
        size = self.length + 1
        tokens = self.file.tokens[begin * self.length : end * self.length + 1]
        windows = np.lib.stride_tricks.sliding_window_view(tokens, size)[:: self.length] if end > begin else tokens[:0]
        return windows.reshape(-1), np.arange(end - begin + 1) * size


@attrs.frozen(eq=False)
class TokenDocuments:
    """The rows of `TokenFile.documents`."""

    file: TokenFile
    draws = False

    def __len__(self) -> int:
        return len(self.file.borders) - 1

    def __getitem__(self, i: int) -> Tensor:
        i = row_number(i, len(self))
        return _row(self.rows(i, i + 1)[0])

    def rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return documents `begin` to `end` as `TokenFile.rows` does."""
        borders = self.file.borders[begin : end + 1].astype(np.int64)
        first, last = int(borders[0]), int(borders[-1])
        if first < 0 or last > len(self.file) or (np.diff(borders) < 0).any():
            got, want = f"sequences {first} to {last}", f"within {len(self.file)} sequences, in order"
            where = f"{self.file.path}, documents {begin} to {end}"
            raise DataError("the index is damaged", where=where, got=got, want=want)
        tokens, places = self.file.rows(first, last)
        return tokens, places[borders - first]


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | np.ndarray | Tensor],
    *,
    dtype: str = "int32",
    codes: str = "megatron",
) -> TokenFile:
    """Write documents, each one sequence, as Megatron's `.bin` and `.idx`, and return the file.

    Both files are written aside and get their names in the end; those that were there are replaced. Some 30 bytes a
    document are held in memory.

    Args:
        path: `corpus`, for `corpus.bin` and `corpus.idx`.
        documents: the tokens of each.
        dtype: of the tokens: "uint8", "int8", "int16", "int32", "int64", "uint16"; for DeepSpeed "uint32", "uint64".
        codes: whose reader is to take it, "megatron" or "deepspeed": they write "uint16" as different numbers. fds
            reads both, and both read all other dtypes.

    Raises `DataError` for tokens that are no integers of the dtype, and names the document; `StorageError` where the
    files cannot be written. Existing files are then unchanged.
    """
    _, index, data = _paths(path)
    if codes not in WRITTEN:
        hint = nearest(str(codes), WRITTEN)
        raise DataError("not a table of codes", where="codes", got=repr(codes), want=" or ".join(WRITTEN), hint=hint)
    _check_dtype(dtype, tuple(WRITTEN[codes]), hint='codes="deepspeed"' if dtype in WRITTEN["deepspeed"] else "")
    folder, names = data.parent, [data.name, index.name]
    lengths = array.array("i")
    with write_errors(folder), replace_files(folder, names) as hidden:
        with open(hidden / names[0], "wb") as file:
            for i, document in enumerate(documents):
                row = _integers(document, dtype, f"document {i}")
                lengths.append(len(row))
                row.astype(np.dtype(dtype).newbyteorder("<")).tofile(file)
            _sync_file(file)
        with open(hidden / names[1], "wb") as file:
            file.write(MAGIC + struct.pack("<QBQQ", 1, WRITTEN[codes][dtype], len(lengths), len(lengths) + 1))
            sizes = np.frombuffer(lengths, np.int32) if lengths else np.empty(0, np.int32)
            sizes.astype("<i4").tofile(file)
            ends = np.cumsum(sizes, dtype="<i8")
            ((ends - sizes) * np.dtype(dtype).itemsize).astype("<i8").tofile(file)
            np.arange(len(lengths) + 1, dtype="<i8").tofile(file)
            _sync_file(file)
        index.unlink(missing_ok=True)  # killed between two renames, tokens have no index, or theirs
        sync(folder)
    return TokenFile(index)


def as_tokens(tokens: Any, where: str) -> np.ndarray:
    """Return a sequence of tokens as an array of integers, `(length,)`. Raises `DataError`."""
    try:
        row = tokens.detach().cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError):
        row = np.array(None)
    if row.ndim == 1 and not row.size:
        return np.empty(0, np.int64)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        got = f"{type(tokens).__name__} of {row.dtype}, shape {row.shape}" if row.ndim else type(tokens).__name__
        raise DataError("not a sequence of tokens", where=where, got=got, want="integers, of one dimension")
    if row.dtype == np.uint64 and row.max() >= 1 << 63:
        raise DataError("a token is too large", where=where, got=str(row.max()), want="less than 2^63")
    return row


def _paths(path: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Return the path, and those of an index and of its tokens. Raises `DataError` for one without a name."""
    place = check_path(path, "path")
    stem = place.with_suffix("") if place.suffix in (".bin", ".idx") else place
    if not stem.name:
        raise DataError("not the path of a file", where="path", got=repr(str(path)), want="a path that ends in a name")
    return place, stem.with_name(f"{stem.name}.idx"), stem.with_name(f"{stem.name}.bin")


def _integers(tokens: Any, dtype: str, where: str) -> np.ndarray:
    row, bounds = as_tokens(tokens, where), np.iinfo(dtype)
    if len(row) > np.iinfo(np.int32).max:
        raise DataError("a sequence is too long for the format", where=where, got=f"{len(row)} tokens", want="< 2**31")
    least, most = (int(row.min()), int(row.max())) if len(row) else (0, 0)
    if least < bounds.min or most > bounds.max:
        got, want = f"tokens from {least} to {most}", f"{bounds.min} to {bounds.max}, which {dtype} has"
        raise DataError("a token does not fit into the dtype", where=where, got=got, want=want, hint="another dtype=")
    return row


def _indexed(index: Path, data: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return dtype, tokens, lengths, first bytes and documents of two files that belong together."""
    size, nbytes = _size(index), _size(data)
    with open(index, "rb") as file:
        head = file.read(HEAD)
    if len(head) < HEAD or not head.startswith(MAGIC):
        want = f"an index of Megatron or DeepSpeed, which begins with {MAGIC!r}"
        raise DataError("not an index of tokens", where=str(index), got=repr(head[:9]), want=want)
    version, code, count, documents = struct.unpack("<QBQQ", head[9:])
    if version != 1 or code not in CODES:
        got, want = f"version {version}, dtype {code}", "version 1, dtype 1 to 8"
        raise DataError("an index of another version", where=str(index), got=got, want=want)
    want = HEAD + 12 * count + 8 * documents
    if size not in (want, want + count) or not documents:  # Megatron's multimodal indices end with a byte a sequence
        got = f"{size} bytes for {count} sequences and {documents} documents"
        raise DataError("the index is truncated", where=str(index), got=got, want=f"{want} bytes")
    at = lambda offset, length, dtype: _mapped(index, np.dtype(dtype), offset, length)
    lengths = at(HEAD, count, "<i4")
    firsts, borders = at(HEAD + 4 * count, count, "<i8"), at(HEAD + 12 * count, documents, "<i8")
    for dtype in CODES[code]:
        if _fits(lengths, firsts, nbytes, np.dtype(dtype).itemsize):
            return dtype, _mapped(data, np.dtype(dtype).newbyteorder("<")), lengths, firsts, borders
    if not count:
        raise DataError("an index of no sequences", where=str(data), got=f"{nbytes} bytes of tokens", want="0 bytes")
    last = f"the last sequence, {int(lengths[-1])} long, begins at byte {int(firsts[-1])}"
    got = f"{nbytes} bytes; {last}, dtype {code}"
    want = f"an index of these tokens, in {' or '.join(CODES[code])}"
    raise DataError("the index does not fit the tokens", where=str(data), got=got, want=want)


def _fits(lengths: np.ndarray, firsts: np.ndarray, nbytes: int, width: int) -> bool:
    """Return whether the index is one of so many bytes, in tokens of this width.

    The first sequence that is not empty ends where the next begins, and the last where the file does.
    """
    if not len(lengths) or int(firsts[-1]) + int(lengths[-1]) * width != nbytes:
        return not len(lengths) and not nbytes
    for begin in range(0, len(lengths) - 1, 1 << 16):
        filled = np.flatnonzero(lengths[begin : min(begin + (1 << 16), len(lengths) - 1)])
        if len(filled):
            i = begin + int(filled[0])
            return int(firsts[i + 1]) - int(firsts[i]) == int(lengths[i]) * width
    return True


def _mapped(path: Path, dtype: np.dtype, offset: int = 0, length: int | None = None) -> np.ndarray:
    nbytes = _size(path)
    if length is None and nbytes % dtype.itemsize:
        want = f"a multiple of {dtype.itemsize}, for {dtype.name}"
        raise DataError("the file is no stream of tokens", where=str(path), got=f"{nbytes} bytes", want=want)
    if not nbytes or length == 0:  # what is empty cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(
        np.memmap(path, dtype, "r", offset, length)
    )  # slices of an array take half the time of a memmap's


def _size(path: Path) -> int:
    """Return the bytes of a regular file: to open a pipe would wait for its writer. Raises `OSError`."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return about.st_size


def _row(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def row_number(i: int, length: int) -> int:
    """Return the number of a row that may be counted from the end. Raises `IndexError`, by which iteration ends."""
    if not -length <= i < length:
        raise IndexError(f"row {i} of {length}")
    return i % length


def _check_dtype(dtype: object, dtypes: tuple[str, ...], hint: str = "") -> None:
    if dtype not in dtypes:
        hint = hint or nearest(str(dtype), dtypes)
        raise DataError("not a dtype of tokens", where="dtype", got=repr(dtype), want=", ".join(dtypes), hint=hint)


def _sync_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
