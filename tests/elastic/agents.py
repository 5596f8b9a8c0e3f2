"""Nodes that come and go: an agent of torchrun each, in a process of its own, with a shelf of its own.

Where they meet is a store that a further process hosts, so that any of them may die.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests import ranks
from tests.elastic import job

EPS = 2.0**-52
MEETING = {"is_host": False, "last_call_timeout": 2, "keep_alive_interval": 2, "keep_alive_max_attempt": 4}


def host(port: Any) -> None:
    """Host the store of the agents."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    while True:
        time.sleep(60)


def agent(port: int, most: int, restarts: int, log: str, arguments: tuple) -> None:
    """Be torchrun on a node with one rank; ranks are forked, since importing torch takes seconds."""
    logs = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(logs, 1)
    os.dup2(logs, 2)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    # With a shared store torch 2.13 tells a node that joins no address of rank 0, if it is that of the round before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # For its log torch asks for the stack, which reads the sources of all that is imported, at each sign of life.
    dynamic_rendezvous.get_method_name = lambda depth=0: ""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=most,
        nproc_per_node=1,
        run_id="resizing",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_backend="c10d",
        rdzv_configs=dict(MEETING),
        max_restarts=restarts,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, job.train)(*arguments)


@attrs.define(eq=False)
class Node:
    """An agent, and its shelf."""

    process: Any
    shelf: Path


@attrs.define(eq=False)
class Nodes:
    """The nodes of a job, and what its ranks write."""

    root: Path
    kind: str
    calls: int
    pause: float
    most: int = 4
    restarts: int = 100
    port: int = 0
    store: Any = None
    nodes: dict[str, Node] = attrs.field(factory=dict)  # by the name of the shelf
    count: int = 0
    revived: int = 0  # agents that ended by themselves, and were started again

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.root / "run"

    def join(self) -> str:
        """Start a node, and return its name."""
        self.count += 1
        name = f"node{self.count}"
        (self.root / "shelves" / name).mkdir(parents=True)
        self._start(name)
        return name

    def _start(self, name: str) -> None:
        shelf = self.root / "shelves" / name
        arguments = (str(self.directory), str(shelf), self.kind, self.calls, self.pause)
        target = (self.port, self.most, self.restarts, str(self.root / f"{name}.log"), arguments)
        process = ranks.forkserver.Process(target=agent, args=target)
        process.start()
        self.nodes[name] = Node(process, shelf)

    def revive(self) -> None:
        """Start agents again that ended by themselves, as whoever runs torchrun on a node would."""
        for name, node in list(self.nodes.items()):
            if node.process.exitcode not in (None, 0):
                self.revived += 1
                self._start(name)

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines that ranks have written."""
        try:
            text = (self.directory / "log.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def pid(self, name: str) -> int:
        """Return the process of a node's rank, which wrote last there."""
        return next(row["pid"] for row in reversed(self.rows()) if row["shelf"] == name)

    def lose_rank(self, name: str, number: int = signal.SIGKILL) -> None:
        """Kill a node's rank; the node and its shelf stay."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(name), number)

    def lose(self, name: str) -> None:
        """Take a node away at once, with all that was in its memory."""
        node, pid = self.nodes.pop(name), self.pid(name)
        os.kill(node.process.pid, signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        node.process.kill()
        node.process.join()
        shutil.rmtree(node.shelf, ignore_errors=True)

    def leave(self, name: str) -> None:
        """Ask a node to leave, as a scheduler does before it takes it away."""
        self.nodes.pop(name).process.terminate()

    def wait(self, until: Any, limit: float) -> bool:
        """Wait until a function of the lines is true, and return whether it became so within the limit, in seconds."""
        end = time.monotonic() + limit
        while not until(self.rows()):
            if time.monotonic() > end:
                return False
            self.revive()
            time.sleep(0.05)
        return True

    def ended(self, limit: float) -> bool:
        """Let the ranks hurry to the last call, and return whether all agents end well within a limit, in seconds."""
        (self.directory / "hurry").touch()
        good = lambda rows: all(node.process.exitcode == 0 for node in self.nodes.values())
        return self.wait(good, limit)

    def texts(self) -> str:
        """Return what agents and ranks have printed."""
        return "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in sorted(self.root.glob("*.log")))


@contextlib.contextmanager
def nodes(root: Path, kind: str, calls: int, pause: float = 0.5, **more: Any) -> Iterator[Nodes]:
    """Yield a job without nodes; at the end, kill whatever runs."""
    ours, theirs = ranks.forkserver.Pipe()
    store = ranks.forkserver.Process(target=host, args=(theirs,), daemon=True)
    store.start()
    (root / "run").mkdir(parents=True)
    made = Nodes(root, kind, calls, pause, port=ours.recv(), store=store, **more)
    try:
        yield made
    finally:
        pids = {row["pid"] for row in made.rows()}
        for node in made.nodes.values():
            node.process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        store.kill()


def trains(rows: list[dict[str, Any]], since: float, ranks_: int) -> bool:
    """Return whether so many ranks train that were started since then."""
    new = {row["pid"] for row in rows if "start" in row and row["time"] > since}
    return any("calls" in row and row["world"] == ranks_ and row["pid"] in new for row in rows)


def check(rows: list[dict[str, Any]], kind: str, calls: int) -> None:
    """Compare the loss and rate of each call, on every rank that made it, with those of one rank, to rounding."""
    want, seen = undisturbed(kind, calls), set()
    for row in rows:
        if "calls" in row:
            loss, rate = want[row["calls"]]
            assert abs(row["loss"] - loss) <= 16 * job.BATCH * row["calls"] * EPS * loss, row
            assert row["lr"] == rate, row
            seen.add(row["calls"])
    assert seen == set(want)


@functools.cache
def undisturbed(kind: str, calls: int, ranks_: int = 1) -> dict[int, tuple[float, float]]:
    """Return loss and learning rate of each call of the run that nothing disturbs, on one rank."""
    step, loader = job.compose(kind, ranks_)
    state, found = step.init(job.model().init, key=3), {}
    batches = iter(loader)
    for _ in range(calls):
        try:
            batch = next(batches)
        except StopIteration:
            loader = loader.next_epoch()
            batches = iter(loader)
            batch = next(batches)
        state, metrics = step(state, batch)
        found[int(state.calls)] = float(metrics["loss"]), float(metrics["lr"])
    return found
