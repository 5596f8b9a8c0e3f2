"""Where the ranks of trials are started: on this machine, or beside each rank that a launcher has started.

A search under a launcher is one program on all ranks: each starts a process of its own for a trial, which takes its
place in the launcher's job, and all hear what came of it. So trials meet over the links that training will have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from fds.collectives import Axis, init_distributed, mesh
from fds.collectives.launch import launched
from fds.errors import FdsError
from fds.tuning.processes import Ended, environ_of, first_of, free_port, run_processes


@attrs.frozen
class Here:
    """All ranks on this machine."""

    num_ranks: int
    is_first = True

    @property
    def num_here(self) -> int:
        """How many ranks share the memory of this machine."""
        return self.num_ranks

    def environs(self, num_ranks: int) -> list[Mapping[str, str]]:
        """Return what a launcher would tell each of the ranks to be started, which meet at a port."""
        port = free_port()
        return [environ_of(rank, num_ranks, port) for rank in range(num_ranks)]

    def run(self, work: Callable[..., None], arguments: Sequence[Any], *, num_ranks: int, limit: float) -> Ended:
        """Run `work(tell, *arguments)` on so many ranks: see `fds.tuning.processes`."""
        return run_processes(work, arguments, self.environs(num_ranks), limit=limit)

    def agree(self, value: Any) -> Any:
        """Return the first rank's value, JSON."""
        return value

    def everyones(self, value: Any) -> list[Any]:
        """Return the values of all ranks that search together, JSON."""
        return [value]


@attrs.frozen
class Launched:
    """The ranks of a launcher's job, one process of a trial beside each."""

    axis: Axis

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self.axis.size

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps the journal and says what goes on."""
        return self.axis.index == 0

    @property
    def num_here(self) -> int:
        """How many ranks share the memory of this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))

    def environs(self, num_ranks: int) -> list[Mapping[str, str]]:
        """Return what the one process beside this rank is told; of fewer ranks than there are the others have none."""
        launch, port = launched(os.environ), self.agree(free_port())
        if num_ranks < self.num_ranks:
            return [environ_of(self.axis.index, num_ranks, port)] if self.axis.index < num_ranks else []
        assert launch is not None
        ranks = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": launch.local_rank}
        meeting = {"MASTER_ADDR": launch.address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return [{name: str(n) for name, n in ranks.items()} | meeting | {"LOCAL_WORLD_SIZE": str(self.num_here)}]

    def run(self, work: Callable[..., None], arguments: Sequence[Any], *, num_ranks: int, limit: float) -> Ended:
        """Run `work(tell, *arguments)` beside the first ranks, and hear of all of them how it ended."""
        ended = run_processes(work, arguments, self.environs(num_ranks), limit=limit)
        ends = [Ended(**end) for end in self.axis.exchange(attrs.asdict(ended))]
        answers = tuple(tuple(of_rank) for end in ends for of_rank in end.answers)
        return attrs.evolve(first_of(ends), answers=answers)

    def agree(self, value: Any) -> Any:
        """Return the first rank's value, JSON."""
        return self.axis.exchange(value)[0]

    def everyones(self, value: Any) -> list[Any]:
        """Return the values of all ranks that search together, JSON."""
        return self.axis.exchange(value)


Place = Here | Launched


def place_of(num_ranks: int) -> Place:
    """Return where so many ranks are started: in the job of a launcher that started this process, else here.

    Raises `FdsError` for a job of another number of ranks.
    """
    launch = launched(os.environ)
    if launch is None or launch.world_size == 1:
        return Here(num_ranks)
    if launch.world_size != num_ranks:
        raise FdsError(
            "the launcher has started another number of ranks",
            where="WORLD_SIZE",
            got=str(launch.world_size),
            want=str(num_ranks),
            hint="trials run on the ranks that it started; without a launcher they run on this machine",
        )
    init_distributed()
    return Launched(mesh(ranks=-1)["ranks"])
