"""A job of torchrun's agents that loses a rank, then a node, then gets another: its losses are one process's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import fds
from tests.elastic import agents

CALLS, PAUSE = 100, 2.0  # 200 s of calls, which are more than all starts take; at the end ranks hurry through the rest
LIMIT = 150.0  # seconds; a start takes two on an idle machine, but torch's agents may need 60 to find together


def test_ranks_are_lost_and_join_and_the_losses_are_those_of_one_process(tmp_path):
    with agents.nodes(tmp_path, "dp0", CALLS, PAUSE) as job:

        def after(event: Callable[[], object], ranks: int) -> None:
            since = time.time()
            event()
            assert job.wait(lambda rows: agents.trains(rows, since, ranks), LIMIT), job.texts()

        after(lambda: (job.join(), job.join()), 2)
        first, second = job.nodes
        after(lambda: job.lose_rank(second), 2)  # its node and shelf stay, and it is started again
        after(lambda: job.lose(first), 1)  # what notices lost ranks does so after a restart too
        after(job.join, 2)
        assert job.ended(2 * LIMIT), job.texts()
        rows = job.rows()
    agents.check(rows, "dp0", CALLS)
    history = fds.elastic.read_history(tmp_path / "run")
    begun = list(itertools.dropwhile(lambda start: start.source == "init", history.starts))
    assert len(begun) >= 3 and all(start.source == "memory" for start in begun)
    assert 0 < history.goodput < 1
