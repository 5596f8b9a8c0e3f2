"""Child processes: what one contender does to its process never takes the others' results away."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.children import ROOT, Pool, Task
from tests.benchmarks import tasks


@pytest.fixture
def pool():
    pool = Pool(2)
    yield pool
    pool.end()


def task(name, limit_s=60.0, **behaviours):
    return Task(name, tasks.in_turn, (behaviours,), limit_s)


def test_whoever_ends_or_hangs_its_process_is_left_out_and_the_others_are_done_again(pool):
    outcomes = pool.run([task("a", 1.0, good="works", bad="die", slow="hang", last="works"), task("b", one="works")])
    found = outcomes["a"].result
    assert found["bad"] == "ended the process (signal 11)" and found["slow"] == "took more than 1 s"
    assert found["good"] == found["last"] != os.getpid() and outcomes["a"].error == ""
    assert outcomes["b"].error == ""


def test_what_a_task_raises_is_its_own_and_the_child_goes_on(pool):
    before = pool.run([task("a", one="works")])["a"].result["one"]
    outcome = pool.run([task("a", wrong="raise")])["a"]
    assert outcome.error == "a: ValueError: wrong" and outcome.result is None
    assert pool.run([task("a", one="works")])["a"].result["one"] == before


def test_what_is_not_done_in_time_has_no_outcome(pool):
    outcomes = pool.run([task("quick", one="works"), task("slow", one="hang"), task("never", one="hang")], seconds=3.0)
    assert set(outcomes) <= {"quick"}  # a hang lasts a minute, and would have one then


def test_children_stay_for_the_next_tasks_unless_each_wants_a_fresh_one(pool):
    same = [pool.run([task("a", one="works")])["a"].result["one"] for _ in range(2)]
    assert same[0] == same[1]
    fresh = Pool(2, fresh=True)
    other = [fresh.run([task("a", one="works")])["a"].result["one"] for _ in range(2)]
    assert other[0] != other[1] and not fresh.idle


def test_children_end_with_the_process_that_started_them():
    program = (
        "from benchmarks.children import Pool, Task; from tests.benchmarks import tasks; import os, signal;"
        "pool = Pool(1); done = pool.run([Task('a', tasks.in_turn, ({'one': 'works'},))]);"
        "print(done['a'].result['one'], flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    child = int(done.stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{child}"):
            return
        time.sleep(0.1)
    pytest.fail(f"{child} still runs")
