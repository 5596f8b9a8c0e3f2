"""The child of a fork (a worker of torch's DataLoader) has every lock, though a thread of its parent held it."""

import dataclasses
import os
import signal
import threading

import pytest
import torch

import fds
from fds import kernels, random, tree
from fds.kernels import choice
from fds.storage.foreign import foreign_leaf


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


STEP = fds.compose(fds.sgd(0.1))(lambda p, b: p["w"].sum())
LOCKS = {  # the lock, what the child does
    "containers": (lambda: tree._registering, lambda: tree._register(Batch)),
    "memory of a step": (lambda: STEP.runtime.pool.lock, lambda: STEP.runtime.pool.sweep()),
    "kernels": (lambda: choice._changing, lambda: kernels.only("reference").__enter__()),
    "files of torch": (lambda: foreign_leaf._admitting, lambda: foreign_leaf._admitting.acquire()),
    "generators": (lambda: random._lock, lambda: random.scope([]).__enter__()),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", LOCKS)
def test_a_child_has_the_lock_that_a_thread_of_its_parent_held(name):
    lock, work = LOCKS[name]
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock():
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30), "the thread could not take the lock"
    child = os.fork()
    if not child:
        signal.alarm(5)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    over.set()
    thread.join()
    assert status == 0, "it waited until the alarm"
