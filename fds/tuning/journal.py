"""What a search has found so far, a line of JSON each, so that another process goes on where one was ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fds.errors import FdsError

_FORMAT = 2


class Journal:
    """Answers by question, both JSON: kept in a file, or in memory where there is none.

    A last line that was not written whole is dropped. Raises `FdsError` for a file of something else.
    """

    def __init__(self, path: str | Path | None, problem: str):
        self.path = None if path is None else Path(path)
        self.answers: dict[str, Any] = {}
        head = {"format": _FORMAT, "problem": problem}
        if self.path is None or not self._read(head):
            self._write(head)

    def _read(self, head: dict[str, Any]) -> bool:
        assert self.path is not None
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return False
        text = self.path.read_text(encoding="utf-8")
        whole, _, torn = text.rpartition("\n")
        lines = [_line(line) for line in whole.split("\n")] if whole else []
        if not lines:
            return False
        if lines[0] != head or not all(isinstance(line, dict) and line.keys() == {"of", "is"} for line in lines[1:]):
            raise FdsError(
                "a journal of another search",
                where=str(self.path),
                want="one of the same space, loss, batch and number of ranks, or a file that is not there yet",
            )
        self.answers = {line["of"]: line["is"] for line in lines[1:]}
        if torn:
            with self.path.open("r+", encoding="utf-8") as file:
                file.truncate(len((whole + "\n").encode()))
        return True

    def __contains__(self, question: str) -> bool:
        return question in self.answers

    def __getitem__(self, question: str) -> Any:
        return self.answers[question]

    def __setitem__(self, question: str, answer: Any) -> None:
        self.answers[question] = answer
        self._write({"of": question, "is": answer})

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _line(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
