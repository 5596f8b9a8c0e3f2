"""Check that all ranks of an axis start the same collective, before any data is sent.

Used by `init_distributed(check=True)` to find out why ranks hang. Ranks compare their collectives through torch's
store, at a few round trips each. Every start waits for the other ranks of the axis, so all ranks must also start the
collectives of different axes in the same order.
"""

from __future__ import annotations

import datetime
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor

from fds.collectives.gloo import lost
from fds.collectives.links import Collective, Link, Work, different
from fds.collectives.waits import everywhere
from fds.errors import RankError

GRACE = datetime.timedelta(seconds=5)  # for all ranks to read an error before the rank that hosts the store ends


class Checked:
    """A link that starts a collective only after all ranks of the axis have announced the same one."""

    def __init__(self, link: Link, ranks: tuple[int, ...], index: int, timeout: datetime.timedelta, channel: str = ""):
        self.link, self.ranks, self.index, self.timeout = link, ranks, index, timeout
        self.store: Any = dist.PrefixStore("fds-agreement", dist.distributed_c10d._get_default_store())
        self.name = ".".join(map(str, ranks)) + channel
        self.count = 0
        self.direct: dict[tuple[int, int], int] = {}  # (from, to) -> number of messages

    def start(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Start a collective that all ranks agree on. Raises `RankError` on all of them if they do not."""
        if collective.op not in ("send", "recv"):
            self._agree(collective)
            return self.link.start(collective, out, x)
        pair = (self.index, collective.peer) if collective.op == "send" else (collective.peer, self.index)
        self.direct[pair] = number = self.direct.get(pair, 0) + 1
        rows = [f"{self.name}/{pair[0]}to{pair[1]}/{number}/{end}" for end in ("send", "recv")]
        mine, other = rows if collective.op == "send" else reversed(rows)
        # Compared in `wait`, since neither end waits for the other at the start; until then gloo's tags keep messages
        # that differ apart.
        self._announce(mine, collective)
        return _CheckedMessage(self, collective, mine, other, self.link.start(collective, out, x))

    def rehearse(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Do on this rank what `start` does, without the others, who are not asked."""
        return self.link.rehearse(collective, out, x)

    def exchange(self, collective: Collective, text: str) -> list[str]:
        """Return the texts of all ranks, after checking that all of them exchange texts."""
        self._agree(collective)
        return self.link.exchange(collective, text)

    def compare(self, collective: Collective, rows: dict[int, str], alike: Any) -> None:
        """Wait until these ranks have written their rows, and compare `alike(text)` of each."""
        try:
            self.store.wait(list(rows.values()), self.timeout)
        except dist.DistStoreError as error:
            raise self._missing(collective, rows) from error
        except RuntimeError as error:  # the rank that hosts the store has ended
            raise lost(collective, self.ranks, self.index, None, error) from error
        texts = {rank: self.store.get(row).decode() for rank, row in rows.items()}
        if len({alike(text) for text in texts.values()}) > 1:
            self._await_readers(rows)
            raise different(f"rank {self.ranks[self.index]}, axis {collective.axis!r}", texts)

    def _agree(self, collective: Collective) -> None:
        self.count += 1
        rows = {rank: f"{self.name}/{self.count}/{rank}" for rank in self.ranks}
        mine = rows[self.ranks[self.index]]
        self._announce(mine, collective)
        self.compare(collective, rows, lambda text: text)
        # All ranks have reached this number, so all have read the rows of the one before.
        self.store.delete_key(mine.replace(f"/{self.count}/", f"/{self.count - 1}/"))

    def _announce(self, row: str, collective: Collective) -> None:
        self.store.set(row, f"{collective}, number {row.split('/')[-2]} on it")
        self.store.set(f"last/{self.ranks[self.index]}", str(collective))

    def _missing(self, collective: Collective, rows: dict[int, str]) -> RankError:
        last = {}
        try:
            for rank in [rank for rank, row in rows.items() if not self.store.check([row])]:
                has_started = self.store.check([f"last/{rank}"])
                last[rank] = self.store.get(f"last/{rank}").decode() if has_started else "nothing yet"
        except RuntimeError:
            pass
        missing = ", ".join(f"rank {rank}" for rank in last)
        return RankError(
            f"{missing or 'a rank'} did not arrive within {self.timeout.total_seconds():g} s",
            where=f"rank {self.ranks[self.index]}, waiting in {collective}",
            got="\n".join(
                [f"rank {rank} started last: {text}" for rank, text in last.items()] + [*everywhere(tuple(last))]
            ),
            want=f"ranks {', '.join(map(str, self.ranks))} to take part",
        )

    def _await_readers(self, rows: dict[int, str]) -> None:
        """Wait up to `GRACE` for all ranks to read the rows: the store may end with the first rank that raises."""
        key = "read/" + min(rows.values())
        try:
            if self.store.add(key, 1) == len(rows):
                self.store.set(key + "/all", "")
            self.store.wait([key + "/all"], GRACE)
        except RuntimeError:
            pass


@attrs.define(eq=False)
class _CheckedMessage:
    """A send or a receive whose two ends are compared in `wait`."""

    checked: Checked
    collective: Collective
    text: str
    peer_text: str
    started: Work
    over: bool = False

    def wait(self) -> None:
        if self.over:
            return
        checked, collective = self.checked, self.collective
        rows = {checked.ranks[checked.index]: self.text, checked.ranks[collective.peer]: self.peer_text}
        checked.compare(collective, rows, lambda text: text.partition(" of ")[2])
        self.started.wait()
        self.over = True

    def done(self) -> bool:
        return self.over
