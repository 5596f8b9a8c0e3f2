"""Digests of what random compositions compute: a change that is meant to leave every number alone shows it by them.

    python -m tests.digests write /tmp/before.json      # of the code as it was
    python -m tests.digests compare /tmp/before.json    # of the code as it is: names every case that differs, and where

A case is a problem of tests/laws/problems, an optimizer, transforms, and a place: one process, ranks that share the
optimizer, or a pipeline. Of every rank it keeps the state and the metrics of each call (the third of them on a batch
that is not finite where the step can skip it), an evaluation, the whole parameters, and the bytes of `describe`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fds
from fds import plans, tree
from tests.bits import bits
from tests.laws import problems
from tests.laws.test_law_4_sharding import batch_of, share
from tests.storage.topologies import Stages, Topology

KINDS = (problems.layers, problems.tied_layers, problems.opaque, problems.tied_module, problems.raw, problems.records)
LAYERED = (problems.layers, problems.tied_layers, problems.records)
SCHEDULES = (plans.gpipe, plans.one_f_one_b, plans.zb_h1, plans.zb_v)
CALLS = 4
Words = dict[str, str]


def main() -> int:
    """Run from the command line; the exit code says whether all digests are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=180)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for number in range(options.cases):
        name, words = digests(number)
        found[name] = words
        print(f"\r{number + 1} of {options.cases}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if options.what == "write":
        options.file.write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(options.file.read_text())
    other = {name: apart(before.get(name, {}), words) for name, words in found.items()}
    for name, places in other.items():
        if places:
            print(f"{name}\n    {', '.join(places[:6])}{', ...' * (len(places) > 6)}")
    count = sum(map(bool, other.values()))
    print(f"{len(found)} compositions, {count} differ")
    return int(count > 0)


def apart(before: Words, now: Words) -> list[str]:
    """Return the names under which two digests differ, and what each says where it is an error."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} ({before.get(name)} -> {now.get(name)})" if name == "error" else name for name in names]


def digests(number: int) -> tuple[str, Words]:
    """Return the name of a case, and name -> digest of everything that it gives; an error's words in their place."""
    draw = random.Random(number)
    kind = number % 3
    place = (None, sharded, piped)[kind]
    topology = None if place is None else place(draw)
    problem = draw.choice(LAYERED if kind == 2 else KINDS)(
        draw.randrange(2**16), torch.float32, draw.choice([0.0, 0.3]), draw.random() < 0.5
    )
    optimizer, names = draw.choice(sorted(problems.OPTIMIZERS)), composition(draw, kind)
    donated, microbatches = draw.random() < 0.5, draw.choice([1, 2])
    name = f"{number} {problem.name}, {topology or 'one process'}, {optimizer}, {names}, donated {donated}"
    name = re.sub(" at 0x[0-9a-f]+", "", name)  # where functions lie in memory

    def run() -> Words:
        parts = [problems.TRANSFORMS[one].make() for one in names]
        parts += [fds.donate()] if donated else []
        if isinstance(topology, Topology):
            parts += [fds.accumulate(microbatches), topology.shard()]
        elif topology is not None:
            parts += topology.transforms()
        step = fds.compose(*parts, problems.OPTIMIZERS[optimizer]())(problem.loss)
        return trained(step, problem, names)

    try:
        ranks = [run()] if topology is None else topology.run(run)
    except fds.FdsError as error:
        return name, {"error": f"{type(error).__name__}: {error.what}"}
    return name, {f"rank {rank} {at}": words for rank, one in enumerate(ranks) for at, words in one.items()}


def trained(step: fds.Step, problem: problems.Problem, names: list[str]) -> Words:
    """Return name -> digest of what a rank gets to see."""
    data = 1 if step.shard is None else step.shard.data.size
    index = 0 if step.shard is None else step.shard.data.index
    skips = {"loss_scale", "static_loss_scale", "skip_nonfinite"} & set(names)
    state, found = step.init(problem.params, key=3), {}
    for call in range(CALLS):
        batch = share(batch_of(problem, 12 * data), index, data)
        if call == 2 and skips:
            batch = tree.map(lambda x: x * torch.inf if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
        state, metrics = step(state, batch)
        found |= {f"call {call} {at}": digest(x) for at, x in tree.paths({"state": state, "metrics": metrics}).items()}
    batch = share(batch_of(problem, 12 * data), index, data)
    found |= {f"evaluated {at}": digest(x) for at, x in step.evaluate(state, batch).items()}
    found |= {f"whole {at}": digest(x) for at, x in tree.paths(step.params(state)).items()}
    told = step.describe(state)
    return found | {"bytes": str(told.num_bytes), "sent": str(told.sent), "buckets": str(told.buckets)}


def digest(x: Any) -> str:
    """Return the first digits of the SHA-256 of a tensor's bits, dtype and shape."""
    if not isinstance(x, Tensor):
        return repr(x)
    told = f"{x.dtype} {tuple(x.shape)}".encode()
    return hashlib.sha256(told + bits(x).numpy().tobytes()).hexdigest()[:16]


def composition(draw: random.Random, kind: int) -> list[str]:
    """Draw names of transforms that may stand together; ranks and pipelines have microbatches of their own."""
    found: dict[str, str] = {}
    for name in draw.sample(sorted(problems.TRANSFORMS.keys() - {"offload", "offload_to_disk"}), draw.randint(0, 5)):
        part = problems.TRANSFORMS[name]
        if (name != "accumulate" or kind == 0) and (part.excludes or name) not in found:
            found[part.excludes or name] = name
    return list(found.values())


def sharded(draw: random.Random) -> Topology:
    """Draw ranks that share the optimizer."""
    ranks = draw.choice([2, 3, 4])
    replicas = 2 if ranks == 4 and draw.random() < 0.6 else 1
    return Topology(ranks, draw.randrange(4), draw.choice([64, 300, 2**20]), replicas, draw.choice([0, 8]))


def piped(draw: random.Random) -> Stages:
    """Draw a pipeline, some of them beside data ranks, some in one process."""
    places, data, copies = draw.choice([(2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1)])
    alone = data * copies == 1 and draw.random() < 0.3
    schedule = draw.choice([one for one in SCHEDULES if places == 2 or one is not plans.zb_v])
    return Stages(
        places,
        schedule,
        data,
        draw.randrange(4),
        copies,
        draw.choice([64, 300, 2**20]),
        draw.choice(["uniform", "parameters"]),
        alone,
    )


if __name__ == "__main__":
    sys.exit(main())
