"""A search on the ranks that a launcher has started: one of all of them, in processes beside them."""

import json

import pytest

import fds
from fds.errors import FdsError
from fds.tuning import Space
from fds.tuning.places import Here, place_of
from fds.tuning.processes import Ended, environ_of, first_of, free_port
from tests.ranks import forkserver
from tests.tuning import launched
from tests.tuning.problem import batch, layers, recipe


def test_all_ranks_of_a_launcher_hear_of_one_search(tmp_path):
    port = free_port()
    parents = [
        forkserver.Process(target=launched.search, args=(environ_of(rank, 2, port), tmp_path, "grid", ["sharded"]))
        for rank in range(2)
    ]
    for parent in parents:
        parent.start()
    for parent in parents:
        parent.join(300)
    assert [parent.exitcode for parent in parents] == [0, 0]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    ((candidate, outcome, seconds, num_bytes, why),), _ = first
    assert (candidate, outcome, why) == ("dp=2, kind=sharded", "tried", "") and seconds > 0 and num_bytes > 0
    assert "trying dp=2, kind=sharded" in (tmp_path / "rank0.log").read_text()
    assert not (tmp_path / "rank1.log").read_text()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len({*lines}) == len(lines) == 3  # the head, what was weighed, and what was tried


def test_a_job_of_other_ranks_is_refused(monkeypatch):
    for name, value in environ_of(0, 4, 1).items():
        monkeypatch.setenv(name, value)
    loss = layers()
    with pytest.raises(FdsError, match="the launcher has started another number of ranks"):
        fds.tune(loss, loss.init, batch(), space=Space(recipe, {"dp": 2}, {"kind": ["whole"]}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert place_of(2) == Here(2)


def test_of_several_ends_the_one_that_others_follow_from_counts():
    late, lost, died = (
        Ended((), how, f"rank 0: {why}")
        for how, why in (
            ("hung", "0 of 2 ranks not done"),
            ("failed", "RankError: rank 1 is gone"),
            ("died", "ended by SIGKILL"),
        )
    )
    done = Ended((), "done")
    assert first_of([done, late, lost, died]) == died and first_of([done, late, lost]) == late
    assert first_of([done, done]) == done
