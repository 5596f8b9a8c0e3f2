"""Real ranks that die, hang or take other paths: the others say so, and soon."""

import os
import signal
import threading
import time

import pytest
import torch

from fds import collectives as c
from fds.errors import RankError
from tests import ranks
from tests.collectives.cases import axis


def told(body) -> str:
    try:
        body()
    except RankError as error:
        return str(error)
    return "nothing"


def wait_for_one_who_dies():
    c.init_distributed(timeout=30)
    a, x = axis(), torch.ones(1_000_000)
    a.start_all_reduce(x).wait()
    if a.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    print(told(lambda: a.start_all_reduce(x).wait()), "at once" if time.monotonic() - start < 15 else "late")


def test_a_rank_that_dies_is_named_by_the_others():
    results = ranks.spawn(wait_for_one_who_dies, world_size=3)
    assert [code for code, _ in results] == [0, -signal.SIGKILL, 0], results
    for _, text in (results[0], results[2]):
        assert "rank 1 was lost" in text and "all_reduce (sum) of (1000000,) float32 on axis 'dp'" in text
        assert "ranks 0, 1, 2" in text and "at once" in text


def wait_for_one_who_sleeps() -> str:
    a = axis()
    a.barrier()
    if a.index == 0:
        return told(lambda: a.start_recv(torch.ones(3), 1).wait())
    time.sleep(7)
    return ""


def test_a_rank_that_does_not_come_in_time_is_named():
    text, _ = ranks.run(wait_for_one_who_sleeps, timeout=9)
    assert "rank 1 did not answer in time" in text and "recv from 1 of (3,) float32" in text
    assert "it is in wait_for_one_who_sleeps" in text or "it has been in wait_for_one_who_sleeps" in text


def wait_in_a_ring(origin: str) -> str:
    """Let every rank wait for the next, but one, which sleeps or ends; return what it is told."""
    a = axis()
    a.barrier()
    if a.index == 2:
        time.sleep(4.0 if origin == "sleeps" else 1.5)
        os._exit(0) if origin == "ends" else None
        return ""
    text = told(lambda: a.start_recv(torch.ones(3), (a.index + 1) % a.size).wait())
    print(text)
    return text


def test_the_rank_is_named_that_waits_for_nobody_and_not_the_neighbour():
    texts = ranks.run(wait_in_a_ring, "sleeps", world_size=4, timeout=6)
    for rank in (0, 1, 3):
        assert texts[rank].startswith("rank 2 did not answer in time"), texts[rank]
    assert "rank 1 waits for rank 2 in recv from 2 of (3,) float32" in texts[0]


def wait_for_one_who_ends():
    c.init_distributed(timeout=30)
    wait_in_a_ring("ends")


def test_the_rank_is_named_that_ended_first_though_others_end_for_it():
    for rank, (_, text) in enumerate(ranks.spawn(wait_for_one_who_ends, world_size=4)):
        assert "rank 2 was lost" in text or rank == 2, text


SHAPES = {
    "all_reduce": lambda a, n: a.start_all_reduce(torch.ones(n)).wait(),
    "all_to_all": lambda a, n: c.all_to_all(torch.ones(3, n), a),
    "all_gather": lambda a, n: c.all_gather(torch.ones(n), a),
    "broadcast": lambda a, n: (a.start_broadcast(torch.ones(n), 0).wait(), a.barrier()),
    "message": lambda a, n: (
        a.start_recv(torch.ones(n), 0).wait() if a.index == 1 else None,
        a.start_send(torch.ones(n), 1).wait() if a.index == 0 else None,
        a.barrier(),
    ),
}


def start_other_shapes(op: str) -> str:
    a = axis()
    a.barrier()
    return told(lambda: SHAPES[op](a, 5 if a.index == 1 else 8))


@pytest.mark.parametrize("op", SHAPES)
def test_other_shapes_on_a_rank_end_no_process_and_are_told_on_all_before_the_time_limit(op):
    for text in ranks.run(start_other_shapes, op, world_size=3):
        assert text.startswith("the ranks started different collectives"), text
        assert "rank 1: " in text and "5" in text.partition("rank 1: ")[2] and "8" in text.partition("got: ")[2], text


PATHS = {
    "op": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_broadcast(torch.ones(2), 0)),
    "shape": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_all_reduce(torch.ones(3))),
    "dtype": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_all_reduce(torch.ones(2).int())),
    "exchange": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.exchange(1)),
    "message": (lambda a: a.start_send(torch.ones(2), 1), lambda a: a.start_recv(torch.ones(3), 0)),
}


def take(path: str) -> tuple:
    c.init_distributed(check=True)
    mesh = c.mesh(a=-1, b=1)
    a = mesh["a"]
    total = a.all_reduce(torch.ones(3))
    if a.index < 2:  # messages go both ways at once
        out = torch.zeros(3)
        works = [a.start_send(total, 1 - a.index), a.start_recv(out, 1 - a.index)]
        for work in works:
            work.wait()
        assert torch.equal(out, total)
    assert a.exchange(a.index) == list(range(a.size))
    if path == "message" and a.index > 1:
        return total, ""
    start = time.monotonic()
    text = told(lambda: PATHS[path][a.index % 2](a).wait())
    return total, text if time.monotonic() - start < 5 else f"late: {text}"


@pytest.mark.parametrize("path", PATHS)
def test_checked_ranks_all_say_who_does_what(path):
    results = ranks.run(take, path, world_size=3)
    for rank, (total, text) in enumerate(results):
        assert torch.equal(total, torch.full((3,), 3.0))
        if path == "message" and rank == 2:
            continue
        assert text.startswith("the ranks started different collectives"), text
        assert "rank 0: " in text and "rank 1: " in text
        assert f"where: rank {rank}, axis 'a'" in text


def be_interrupted(how: str) -> list[str]:
    """Press Ctrl-C on rank 0 while it waits for rank 1, and go on; or let a handler of a signal raise there."""
    a = axis()
    a.barrier()
    if a.index:
        time.sleep(0.6)
        return [told(a.barrier)]

    def worker_died(*_):
        raise RuntimeError("DataLoader worker (pid 5) is killed by signal")

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, worker_died)
    number = signal.SIGINT if how == "key" else signal.SIGALRM
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    start = time.monotonic()
    try:
        a.barrier()
    except (KeyboardInterrupt, RuntimeError) as error:
        if how == "worker":
            time.sleep(1.0)  # what was sent goes out while the error holds it; rank 1 may be slow to take it
            return [f"{type(error).__name__} {error}"]
        return [type(error).__name__, told(a.barrier), "late" if time.monotonic() - start > 5 else ""]
    return ["nothing"]


def test_ctrl_c_ends_a_wait_and_all_are_told():
    (key, again, late), (other,) = ranks.run(be_interrupted, "key")
    assert key == "KeyboardInterrupt" and not late
    assert again.startswith("Ctrl-C was pressed while this rank waited") and "rank 0" in again
    assert other.startswith("rank 0 was lost")


def test_what_a_handler_of_a_signal_raises_is_not_blamed_on_another_rank():
    (mine,), (other,) = ranks.run(be_interrupted, "worker")
    assert mine == "RuntimeError DataLoader worker (pid 5) is killed by signal" and other == "nothing"


def stay_away() -> str:
    c.init_distributed(check=True)
    mesh = c.mesh(a=2, b=2)
    mesh["b"].barrier()
    if mesh.rank == 2:
        time.sleep(4.5)
        return ""
    if mesh.rank == 3:
        return told(lambda: mesh["b"].start_all_reduce(torch.ones(5)))
    return told(lambda: mesh["a"].start_all_reduce(torch.ones(4)))


def test_a_checked_rank_that_is_missing_is_named_with_what_it_does_instead():
    texts = ranks.run(stay_away, world_size=4, timeout=6)
    assert "rank 2 did not arrive within 3 s" in texts[0] and "rank 2 started last: barrier" in texts[0]
    assert "rank 2 is in stay_away (test_lost_ranks.py:" in texts[0]
    assert "rank 3 did not arrive within 3 s" in texts[1]
    assert "rank 3 started last: all_reduce (sum) of (5,) float32 on axis 'b'" in texts[1]
    assert "rank 2 did not arrive within 3 s" in texts[3]


def fail_on(rank: int):
    axis().barrier()
    if axis().index == rank:
        raise ZeroDivisionError("of one rank")
    return told(axis().barrier)


def die_on(rank: int):
    if axis().index == rank:
        print("the last words", flush=True)
        os._exit(3)
    return told(axis().barrier)


def test_the_pool_says_what_failed_and_goes_on():
    with pytest.raises(ranks.RankFailure, match=r"(?s)rank 1:.*ZeroDivisionError: of one rank"):
        ranks.run(fail_on, 1)
    with pytest.raises(ranks.RankFailure, match=r"(?s)rank 1 ended with 3:.*the last words"):
        ranks.run(die_on, 1)
    with pytest.raises(ranks.RankFailure, match="rank 0 took too long"):
        ranks.run(time.sleep, 30, world_size=1, timeout=0.5)
    assert ranks.run(fail_on, -1) == ["nothing"] * 2
