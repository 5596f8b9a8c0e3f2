"""Digests of what some hundred compositions compute: a change that is meant to move no bit shows it by them.

    python -m tests.digests write /tmp/before.json      # of the code as it was
    python -m tests.digests compare /tmp/before.json    # of the code as it is: names what differs, and where first
    python -m tests.digests messages                    # how many messages a steady call of each starts

Of every rank of a composition (tests/families.py) it keeps, after each call, digests of parameters, of every slot,
of buffers and of every metric; then of an evaluation, of the whole parameters, of a call with others, and of what other
ranks load. What a composition that is refused says is kept instead, word for word.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import fds
from fds import tree
from fds.collectives import Axis
from fds.collectives.links import Collective
from fds.collectives.traffic import Traffic, counting
from tests.bits import bits
from tests.compositions import Composition, Start
from tests.families import compositions
from tests.traffic import SMALL

Words = dict[str, str]


def main() -> int:
    """Run from the command line; the exit code says whether all digests are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare", "messages"])
    parser.add_argument("file", type=Path, nargs="?", help="digests of the code as it was")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="a regular expression: compositions in whose names it is")
    options = parser.parse_args()
    if (options.file is None) != (options.what == "messages"):
        parser.error("write and compare take a file, messages none")
    results = all_results(
        [i for i, one in enumerate(every_composition()) if re.search(options.only, one.name)], options.jobs
    )
    if options.what == "messages":
        for result in results:
            print(result.name, f"{result.small} small", *result.messages, sep="\n    ")
        counts = sorted(Counter(result.small for result in results if "error" not in result.digests).items())
        print("small messages a call:", ", ".join(f"{n} in {count} compositions" for n, count in counts))
        return 0
    digests = {result.name: result.digests for result in results}
    refused = sum("error" in words for words in digests.values())
    print(f"{len(digests)} compositions, {refused} of them refused")
    if options.what == "write":
        options.file.write_text(json.dumps(digests, indent=0))
        return 0
    return report(json.loads(options.file.read_text()), digests, all_of_them=not options.only)


def report(before: dict[str, Words], now: dict[str, Words], *, all_of_them: bool) -> int:
    """Print what differs; return whether anything does."""
    names = {**before, **now} if all_of_them else now
    count = 0
    for name in names:
        places = apart(before.get(name, {}), now.get(name, {}))
        count += bool(places)
        if places:
            print(name, *places, sep="\n    ")
    print(f"{count} differ")
    return int(count > 0)


def apart(before: Words, now: Words) -> list[str]:
    """Return when two digests differ first, and in which fields of which ranks; what each says where it is an error."""
    if "error" in before or "error" in now or not before or not now:
        errors = [words.get("error", "runs" if words else "is not there") for words in (before, now)]
        return [f"was: {errors[0]}", f"now: {errors[1]}"] if before != now else []
    when: dict[str, dict[str, list[str]]] = {}
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            rank, at, field = key.split(" | ")
            when.setdefault(at, {}).setdefault(field, []).append(rank)
    told = lambda fields: ", ".join(f"{field} ({', '.join(ranks)})" for field, ranks in fields.items())
    lines = [f"{at}: {told(fields)}" for at, fields in when.items()]
    return lines[:2] + [f"and at {len(lines) - 2} later times"] * (len(lines) > 2)


@attrs.frozen
class Result:
    """What one composition gave: digests of its numbers; the messages of its last call, and how many are small."""

    name: str
    digests: Words
    messages: list[str]
    small: int = 0


def all_results(indices: list[int], jobs: int) -> list[Result]:
    """Return the results of these compositions, each computed in one of so many processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for result in pool.imap(result_of, indices):
            results.append(result)
            print(f"\r{len(results)} of {len(indices)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def result_of(index: int) -> Result:
    """Return the result of one composition; any error is a result."""
    composition = every_composition()[index]
    with tempfile.TemporaryDirectory(prefix="fds-digests-") as folder:
        try:
            ranks = fds.simulate(lambda: trained(composition, folder), composition.ranks)
            if (then := composition.elsewhere) is not None:
                loaded_ranks = fds.simulate(lambda: loaded(then, folder), then.ranks)
                ranks += [({f"loaded, {at}": x for at, x in words.items()}, Counter()) for words in loaded_ranks]
        except Exception as error:  # of any kind: a rebuild may well fail by one that is not ours
            text = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")
            return Result(composition.name, {"error": re.sub(r"/tmp/[\w/.-]+", "DIR", text)}, [])
    digests = {f"rank {i} | {at}": x for i, (words, _) in enumerate(ranks) for at, x in words.items()}
    kinds: Counter[str] = Counter()
    for _, sent in ranks:
        kinds |= sent  # the most that any rank starts
    small = sum(count for kind, count in kinds.items() if kind.startswith("exchange") or kind.split(", ")[1] in SMALL)
    messages = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    return Result(composition.name, digests, messages, small)


class Kinds(Traffic):
    """Counts messages by operation, and by what they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def add(self, collective: Collective, axis: Axis) -> None:
        """Count one."""
        self.kinds[f"{collective.op}, {collective.what or axis.purpose}"] += 1


def trained(composition: Composition, folder: str) -> tuple[Words, Counter[str]]:
    """Return when and what -> digest of all that a rank gets to see, and the messages of the last call."""
    run = composition.start()
    step, (*batches, last) = run.step, run.batches
    state, words, traffic = step.init(run.params, key=3), {}, Kinds()
    for call, batch in enumerate(batches):
        traffic = Kinds()
        with counting(traffic):
            state, metrics = step(state, batch)
        words |= fields(f"call {call}", state, metrics)
    words |= {f"evaluated | {name}": digest([x]) for name, x in step.evaluate(state, last).items()}
    whole = step.params(state)
    words["at the end | whole params"] = digest(tree.leaves(whole))
    described = step.describe(state)
    words["at the end | described"] = f"{described.num_bytes} bytes, buckets {described.buckets}"
    if composition.elsewhere is not None:
        fds.save(folder, state, step)
    halved = tree.map(lambda x: x * 0.5 if x.is_floating_point() else x, whole)
    state, metrics = step(step.with_params(state, halved), batches[0])
    return words | fields("with_params", state, metrics), traffic.kinds


def loaded(composition: Composition, folder: str) -> Words:
    """Return the same of what a rank loads, and of a call with it."""
    run: Start = composition.start()
    state, _ = fds.load(folder, run.step, run.params, slots=("init", "drop"))
    words = fields("at first", state, {})
    state, metrics = run.step(state, run.batches[0])
    return words | fields("after a call", state, metrics)


def fields(at: str, state: fds.State, metrics: dict[str, Tensor]) -> Words:
    """Return the digests of a state and of metrics, each slot and metric for itself."""
    parts = {"params": state.params, "buffers": state.buffers, "counts": [state.step, state.calls, state.key]}
    parts |= {f"opt {slot}": x for slot, x in state.opt.items()}
    parts |= {f"slot {slot}": x for slot, x in state.slots.items()}
    parts |= {f"metric {name}": x for name, x in metrics.items()}
    return {f"{at} | {field}": digest(itertools.chain(*tree.paths(x).items())) for field, x in parts.items()}


def digest(values: Any) -> str:
    """Return the first digits of the SHA-256 of tensors' bits, dtypes and shapes, and of names."""
    total = hashlib.sha256()
    for x in values:
        total.update(f"{x.dtype} {tuple(x.shape)}".encode() if isinstance(x, Tensor) else repr(x).encode())
        if isinstance(x, Tensor):
            total.update(bits(x).numpy().tobytes())
    return total.hexdigest()[:16]


every_composition = functools.cache(compositions)  # seconds, and once in a process

if __name__ == "__main__":
    sys.exit(main())
