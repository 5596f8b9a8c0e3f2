"""A job of torchrun's agents that loses a rank, then a node, then gets another: its losses are one process's."""

from __future__ import annotations

import fds
from tests.elastic import agents

CALLS = 200
LIMIT = 60.0  # seconds; a start takes two on a machine that is not busy


def test_ranks_are_lost_and_join_and_the_losses_are_those_of_one_process(tmp_path):
    with agents.nodes(tmp_path, "dp0", CALLS) as job:
        first, second = job.join(), job.join()
        assert job.wait(lambda rows: agents.made(rows, 2) >= 6, LIMIT), job.texts()
        job.lose_rank(second)  # its node and shelf stay, and it is started again
        assert job.wait(lambda rows: agents.starts(rows, 2) == 2, LIMIT), job.texts()
        job.lose(first)  # noticed after a restart too
        assert job.wait(lambda rows: agents.starts(rows, 1) == 1, LIMIT), job.texts()
        job.join()
        assert job.wait(lambda rows: agents.starts(rows, 2) == 3, LIMIT), job.texts()
        assert job.ended(2 * LIMIT), job.texts()
        rows = job.rows()
    agents.check(rows, "dp0", CALLS)
    history = fds.elastic.read_history(tmp_path / "run")
    assert [(e.ranks, e.source) for e in history.starts] == [(2, "init"), (2, "memory"), (1, "memory"), (2, "memory")]
    assert 0 < history.goodput < 1
