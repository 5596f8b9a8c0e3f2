"""Meeting: who is missing, who is there twice and who is of another job is said on every rank, in time."""

import datetime
import socket
import threading
import time

import attrs
import pytest
import torch.distributed as dist

from fds.collectives import joining
from fds.collectives.launch import Launch, launched
from fds.errors import FdsError, MeshError, RankError


def meet(*launches: Launch, limit: float = 5.0, later: float = 0.0, monkeypatch) -> list:
    """Let processes meet, each a thread with a name of its own; return a store or an error for each."""
    names = threading.local()
    monkeypatch.setattr(joining, "_name", lambda: names.name)
    results: list = [None] * len(launches)

    def run(i: int, launch: Launch) -> None:
        names.name, start = f"{i}.{i} on host", time.monotonic()
        time.sleep(later * (i + 1 == len(launches)))
        try:
            results[i] = joining.meet(launch, None, datetime.timedelta(seconds=limit))
        except FdsError as error:
            assert time.monotonic() - start < limit + 3
            results[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(launches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def ranks():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return lambda size: [Launch(rank, size, 0, "127.0.0.1", port) for rank in range(size)]


def test_ranks_that_are_all_there_meet(ranks, monkeypatch):
    stores = meet(*ranks(3), later=0.2, monkeypatch=monkeypatch)
    stores[0].set("word", "heard")
    assert [store.get("word") for store in stores] == [b"heard"] * 3


def test_a_rank_that_is_missing_is_named_on_all(ranks, monkeypatch):
    for error in meet(*ranks(4)[:2], ranks(4)[3], limit=0.5, monkeypatch=monkeypatch):
        assert isinstance(error, RankError) and error.what == "rank 2 did not arrive within 0.5 s", error


def test_without_the_first_rank_the_others_say_where_they_looked(ranks, monkeypatch):
    for error in meet(*ranks(3)[1:], limit=0.5, monkeypatch=monkeypatch):
        assert isinstance(error, RankError) and error.what == "rank 0 did not arrive in time", error
        assert f"127.0.0.1:{ranks(3)[0].port}" in error.got


def test_a_rank_that_comes_twice_is_named_on_all(ranks, monkeypatch):
    for error in meet(*ranks(3)[:2], ranks(3)[1], monkeypatch=monkeypatch):
        assert isinstance(error, MeshError), error
        assert error.what.startswith("two processes are rank 1 of 3") and "process 2 on host" in error.what


def test_one_that_comes_when_all_are_there_disturbs_nobody(ranks, monkeypatch):
    *stores, error = meet(*ranks(2), ranks(2)[1], later=0.4, monkeypatch=monkeypatch)
    assert isinstance(error, MeshError) and error.what.startswith("two processes are rank 1")
    assert all(isinstance(store, dist.Store) for store in stores)


@pytest.mark.parametrize("other", [{"job": "b"}, {"world_size": 3}])
def test_another_job_is_refused_and_the_one_that_waits_hears_of_it(ranks, other, monkeypatch):
    first, second = (attrs.evolve(launch, job="a") for launch in ranks(2))
    waits, refused = meet(first, attrs.evolve(second, **other), limit=0.5, monkeypatch=monkeypatch)
    assert isinstance(refused, MeshError) and refused.what == "another job uses this address"
    assert isinstance(waits, RankError) and "rank 1 did not arrive" in waits.what and "came as rank 1 of" in waits.what


def test_a_second_rank_0_is_told_that_the_port_is_taken(ranks):
    taken = dist.TCPStore("127.0.0.1", ranks(2)[0].port, 2, True, wait_for_workers=False)
    with pytest.raises(MeshError, match=r"(?s)cannot wait for the others at this port.*MASTER_PORT"):
        joining.meet(ranks(2)[0], None, datetime.timedelta(seconds=1))
    del taken


@pytest.mark.parametrize("method", ["tcp://host", "tcp://host:99999", "nothing", "tcp://:1"])
def test_what_is_no_meeting_place_is_refused(method):
    with pytest.raises(MeshError, match="init_method"):
        joining.meet(Launch(0, 2, 0), method, datetime.timedelta(seconds=1))


@pytest.mark.parametrize("port", ["0", "99999", "-1"])
def test_what_is_no_port_is_refused(port):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": port}
    with pytest.raises(MeshError, match="no such port"):
        launched(environ)


JOBS = {
    "torchrun": (
        {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "a",
            "TORCHELASTIC_RUN_ID": "x",
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "2",
        },
        "x",
    ),
    "by hand": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ""),
    "srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "3", "SLURM_JOB_ID": "7", "MASTER_ADDR": "a"},
        "7.3",
    ),
}


@pytest.mark.parametrize(("environ", "job"), JOBS.values(), ids=JOBS)
def test_jobs_are_told_apart_by_what_their_launcher_says(environ, job):
    launch = launched(environ)
    assert launch is not None and launch.job == job
