"""Agreement: before data move, compare what the ranks of an axis are about to do, through torch's store.

For finding why ranks hang, as `init_distributed(check=True)`: every launch waits for the others of its axis, so ranks
must also start the collectives of different axes in one order. A launch costs a few round trips to the store.
"""

from __future__ import annotations

import datetime
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor

from fds.collectives.calls import Call, Link, Work, different
from fds.collectives.gloo import lost
from fds.errors import RankError

GRACE = datetime.timedelta(seconds=5)  # to tell each other of an error before the store's host goes away


class Checked:
    """A link that says first what it will do, and goes on only when all ranks of the axis say the same."""

    def __init__(
        self, link: Link, ranks: tuple[int, ...], index: int, timeout: datetime.timedelta, channel: str = ""
    ):
        self.link, self.ranks, self.index, self.timeout = link, ranks, index, timeout
        self.store: Any = dist.PrefixStore("fds-agreement", dist.distributed_c10d._get_default_store())
        self.name = ".".join(map(str, ranks)) + channel
        self.count = 0
        self.direct: dict[tuple[int, int], int] = {}  # messages from one rank to another

    def start(self, call: Call, out: Tensor, x: Tensor) -> Work:
        """Start a collective that all ranks agree on. Raises `RankError` on each of them where they do not."""
        if call.op not in ("send", "recv"):
            self._agree(call)
            return self.link.start(call, out, x)
        pair = (self.index, call.peer) if call.op == "send" else (call.peer, self.index)
        self.direct[pair] = number = self.direct.get(pair, 0) + 1
        rows = [f"{self.name}/{pair[0]}to{pair[1]}/{number}/{end}" for end in ("send", "recv")]
        own, other = rows if call.op == "send" else reversed(rows)
        # Compared when they are waited for, since neither end waits for the other at its start; gloo's tags keep what
        # differs apart until then.
        self._say(own, call)
        return CheckedMessage(self, call, own, other, self.link.start(call, out, x))

    def exchange(self, call: Call, text: str) -> list[str]:
        """Exchange texts when all ranks agree that they do."""
        self._agree(call)
        return self.link.exchange(call, text)

    def compare(self, call: Call, rows: dict[int, str], alike: Any) -> None:
        """Wait until these ranks have written their rows, and compare what `alike` makes of them."""
        try:
            self.store.wait(list(rows.values()), self.timeout)
        except dist.DistStoreError as error:
            raise self._missing(call, rows) from error
        except RuntimeError as error:  # the store ended with its host
            raise lost(call, self.ranks, self.index, None, error) from error
        said = {rank: self.store.get(row).decode() for rank, row in rows.items()}
        if len({alike(text) for text in said.values()}) > 1:
            self._farewell(rows)
            raise different(f"rank {self.ranks[self.index]}, axis {call.axis!r}", said)

    def _agree(self, call: Call) -> None:
        self.count += 1
        rows = {rank: f"{self.name}/{self.count}/{rank}" for rank in self.ranks}
        own = rows[self.ranks[self.index]]
        self._say(own, call)
        self.compare(call, rows, lambda text: text)
        # Who has come to this number has read all of the number before.
        self.store.delete_key(own.replace(f"/{self.count}/", f"/{self.count - 1}/"))

    def _say(self, row: str, call: Call) -> None:
        self.store.set(row, f"{call}, number {row.split('/')[-2]} on it")
        self.store.set(f"last/{self.ranks[self.index]}", str(call))

    def _missing(self, call: Call, rows: dict[int, str]) -> RankError:
        last = {}
        try:
            for rank in [rank for rank, row in rows.items() if not self.store.check([row])]:
                known = self.store.check([f"last/{rank}"])
                last[rank] = self.store.get(f"last/{rank}").decode() if known else "nothing yet"
        except RuntimeError:
            pass
        missing = ", ".join(f"rank {rank}" for rank in last)
        return RankError(
            f"{missing or 'a rank'} did not come in {self.timeout.total_seconds():g} s",
            where=f"rank {self.ranks[self.index]}, waiting in {call}",
            got="\n".join(f"rank {rank} started last: {text}" for rank, text in last.items()),
            want=f"ranks {', '.join(map(str, self.ranks))} to take part",
        )  # fmt: skip

    def _farewell(self, rows: dict[int, str]) -> None:
        """Wait a little until all have read the rows, since the store may end with the first rank that raises."""
        word = "read/" + min(rows.values())
        try:
            if self.store.add(word, 1) == len(rows):
                self.store.set(word + "/all", "")
            self.store.wait([word + "/all"], GRACE)
        except RuntimeError:
            pass


@attrs.define(eq=False)
class CheckedMessage:
    """A send or a receive whose two ends are compared when it is waited for."""

    checked: Checked
    call: Call
    own: str
    other: str
    started: Work
    over: bool = False

    def wait(self) -> None:
        """Compare both ends, then wait for the message. Raises `RankError`."""
        if self.over:
            return
        checked, call = self.checked, self.call
        rows = {checked.ranks[checked.index]: self.own, checked.ranks[call.peer]: self.other}
        checked.compare(call, rows, lambda text: text.partition(" of ")[2])
        self.started.wait()
        self.over = True

    def done(self) -> bool:
        """Say whether `wait` has returned."""
        return self.over
