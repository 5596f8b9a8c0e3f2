"""Records of ArrayRecord files as a data set, read by the package that Grain reads them by."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fds.data.tokens import row_number
from fds.errors import DataError
from fds.storage.disk.files import check_path, read_errors


class ArrayRecords:
    """The records of ArrayRecord files, one after another. It needs the package `array_record`.

    A process that is forked cannot read them, such as a worker of `DistributedLoader(num_workers=)`; a spawned one can.

    Args:
        paths: of the files, in the order in which their records are counted.
        decode: bytes -> row; None gives the bytes.

    Raises `DataError` where the package is not installed, for paths that are not such files, for a record that cannot
    be read, and in a forked process.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        decode: Callable[[bytes], Any] | None = None,
    ):
        several = [paths] if isinstance(paths, str | os.PathLike) else paths
        if not isinstance(several, Sequence) or not several:
            raise DataError("no paths of files", where="paths", got=repr(paths)[:80], want="a path, or a list of them")
        if decode is not None and not callable(decode):
            raise DataError("decode is not a function", where="decode", got=repr(decode)[:80], want="bytes -> row")
        self.paths, self.decode = [check_path(path, "paths") for path in several], decode
        for path in self.paths:
            with read_errors("ArrayRecord file", path):
                path.open("rb").close()  # the package may end the process where there is none
        self._process, self._source = os.getpid(), self._opened()
        self._length = len(self._source)

    def __len__(self) -> int:
        """Return the number of records of all files."""
        return self._length

    def __getitem__(self, i: int) -> Any:
        """Return a row."""
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return rows, whose records are read together."""
        checked = [row_number(i, len(self)) for i in indices]
        if self._process != os.getpid():  # 0.8.6 ends a forked process whose parent has opened files
            got, want = (
                "a worker of num_workers=",
                "num_workers=0, which waits for memory at most, or a spawned process",
            )
            raise DataError("the package of ArrayRecord cannot read in a forked process", got=got, want=want)
        try:
            records = self._source.__getitems__(checked)
        except Exception as error:
            raise DataError("records cannot be read", where=f"{self.paths[0]} ...", got=str(error)[:200]) from error
        return list(records) if self.decode is None else [self.decode(record) for record in records]

    def __reduce__(self) -> tuple:
        return ArrayRecords, (self.paths, self.decode)

    def _opened(self) -> Any:
        try:
            from array_record.python import array_record_data_source as package  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            got, hint = str(error)[:200], "pip install array-record"
            raise DataError("it needs the package array_record", got=got, hint=hint) from error
        try:
            return package.ArrayRecordDataSource([str(path) for path in self.paths])
        except Exception as error:
            where, got = ", ".join(map(str, self.paths))[:200], str(error)[:200]
            raise DataError("these are no ArrayRecord files", where=where, got=got) from error
