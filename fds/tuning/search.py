"""`tune`: weigh all candidates, rehearse those that fit, and try the most promising on all ranks."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import __version__, tree
from fds.collectives import fingerprint
from fds.errors import FdsError, is_a, is_int, is_number
from fds.tuning.footprints import Footprint, weigh
from fds.tuning.journal import Journal
from fds.tuning.places import Launched, Place, place_of
from fds.tuning.prediction import Prediction, fit
from fds.tuning.problem import Problem
from fds.tuning.rehearsal import rehearse
from fds.tuning.report import Report, Row
from fds.tuning.spaces import Candidate, Space
from fds.tuning.trials import run_candidate

CGROUP = Path("/sys/fs/cgroup")
ORDERS = ("ranking", "grid", "random")
_START = 60.0  # seconds in which fresh processes import torch, meet, and compile what they need
_PROMISING = 1.05  # of the best that was measured: what is expected to take more is not tried
_ASKED = 100  # times the trials: what a study is asked at most


@attrs.frozen
class Budget:
    """When a search ends.

    Attributes:
        trials: at most so many.
        seconds: no trial begins later; None for any time.
        patience: after so many trials in a row that were not better than the best before.
        limit: seconds after which a trial counts as hung, its start included.
        measure: seconds of calls that are timed, five times over.

    Raises `FdsError` for other values.
    """

    trials: int = 10
    seconds: float | None = None
    patience: int = 5
    limit: float = 300.0
    measure: float = 0.3

    def __attrs_post_init__(self) -> None:
        for name in ("trials", "patience"):
            if not is_int(getattr(self, name), 1):
                raise FdsError("not a count", where=f"Budget, {name}", got=repr(getattr(self, name)), want="1 or more")
        for name in ("seconds", "limit", "measure"):
            value = getattr(self, name)
            if not (is_number(value) and value > 0) and not (value is None and name == "seconds"):
                raise FdsError("not a time", where=f"Budget, {name}", got=repr(value), want="seconds, above 0")


def tune(
    loss: Any,
    params: Any,
    batch: Any,
    *,
    space: Space,
    budget: Budget = Budget(),
    memory: int | None = None,
    order: Any = "ranking",
    key: int = 0,
    journal: str | Path | None = None,
    device: str = "cpu",
    show: Callable[[str], object] | None = print,
) -> Report:
    """Find the composition with the fastest step among those that fit the memory.

        report = fds.tune(layers, layers.init, batch, space=fds.tuning.standard(base, ranks=2))
        print(report)
        axes, choices = report.best.candidate.axes, report.best.candidate.choices

    First each candidate is weighed: what a rank holds at the peak of a call is found by a dry run, without arithmetic
    and without the other ranks, and what does not fit is never tried. Then those that fit are rehearsed: ranks compute
    at the same time, each alone, and the messages that the candidates send are timed by themselves. A replay of what
    all ranks do in a call ranks the candidates; the first are tried in fresh processes that meet and train, and each
    trial corrects the ranking. The search ends with its budget, or where no other candidate is expected within 5% of
    the best.

    A program that calls it does so under `if __name__ == "__main__":`, for trials import it. On all ranks that a
    launcher has started, of one machine or several, it is one search: a process of a trial runs beside each of them,
    messages are timed on the links between them, and all return the report. The journal is the first rank's.

    Args:
        loss: as for `compose(...)(loss)`. It and all that follows pickle.
        params: as for `step.init`.
        batch: of a step of all ranks: tensors whose rows are shared out along the axis "dp". It stays what it is for
            every candidate, so all of them train alike.
        space: what to choose from: `fds.tuning.standard`, or `fds.tuning.Space` of a function of yours.
        budget: when to stop.
        memory: bytes that a rank may hold; None for its share of what is there.
        order: "ranking", "grid", "random", or an object with `ask()` and `tell(trial, seconds)`, such as a study of
            Optuna, which minimizes seconds; it is told infinity of what does not run.
        key: of the order "random".
        journal: a file that keeps what was found, line by line; a search that was ended goes on from it.
        device: "cpu" or "cuda", where the ranks of this machine run.
        show: called with a line of progress at a time; None for silence.

    Raises `FdsError` for other values of these and for what does not pickle; `report.best` does where no candidate ran.
    """
    if not is_a(space, Space):
        want = "fds.tuning.standard(base, ranks), or fds.tuning.Space(...)"
        raise FdsError("not a space", where="tune, space", got=repr(space)[:80], want=want)
    if not (memory is None or is_int(memory, 1)):
        raise FdsError("not bytes", where="tune, memory", got=repr(memory), want="an int above 0, or None")
    if order not in ORDERS and not (hasattr(order, "ask") and hasattr(order, "tell")):
        raise FdsError("no such order", where="tune, order", got=repr(order)[:80], want=f"{ORDERS}, or ask and tell")
    if device not in ("cpu", "cuda"):
        raise FdsError("no such device", where="tune, device", got=repr(device), want='"cpu" or "cuda"')
    problem = Problem(space, loss, params, batch, device)
    place = place_of(space.candidates()[0].num_ranks)
    if order not in ORDERS and isinstance(place, Launched):
        hint = 'order="ranking", "grid" or "random"'
        raise FdsError("a study is asked on one machine, without a launcher", where="tune, order", hint=hint)
    kept = Journal(journal if place.is_first else None, name_of(problem))
    kept.answers = place.agree(kept.answers)
    show = show if show is not None and place.is_first else lambda line: None
    return _Search(problem, budget, memory, kept, show, place).run(order, key)


def name_of(problem: Problem) -> str:
    """Return what tells this search from others, as far as a journal must know it."""
    shapes = tree.map(lambda x: [*x.shape, str(x.dtype)] if isinstance(x, Tensor) else repr(x), problem.batch)
    keys = [candidate.key for candidate in problem.space]
    words = [__version__, torch.__version__, problem.device, keys, shapes, str(problem.loss), problem.space.compose]
    return fingerprint(re.sub(" at 0x[0-9a-f]+", "", str(words)))  # addresses differ between processes


@attrs.define(eq=False)
class _Search:
    problem: Problem
    budget: Budget
    memory: int | None
    journal: Journal
    show: Callable[[str], object]
    place: Place
    footprints: dict[str, Footprint] = attrs.field(factory=dict)  # by key: of those that compose
    predictions: dict[str, Prediction] = attrs.field(factory=dict)  # of those that fit and were rehearsed
    rows: dict[str, Row] = attrs.field(factory=dict)  # what came of each
    begin: float = attrs.field(factory=time.monotonic)

    def run(self, order: Any, key: int) -> Report:
        self.weigh()
        if order == "ranking":
            self.rehearse()
        tried, since, best = 0, 0, math.inf
        for candidate in self.ordered(order, key):
            late = self.budget.seconds is not None and time.monotonic() - self.begin > self.budget.seconds
            if tried == self.budget.trials or since == self.budget.patience or self.place.agree(late):
                break
            self.try_(candidate)
            seconds, tried = self.rows[candidate.key].measured or math.inf, tried + 1
            since = 0 if seconds < best else since + 1
            best = min(best, seconds)
        return self.report()

    def report(self) -> Report:
        rows = [
            attrs.evolve(row, footprint=self.footprints.get(key), prediction=self.predictions.get(key))
            for key, row in self.rows.items()
        ]
        num_rows = next((len(x) for x in tree.leaves(self.problem.batch) if isinstance(x, Tensor) and x.dim()), 0)
        return Report(tuple(rows), self.factors(), num_rows, time.monotonic() - self.begin, self.problem.space)

    def weigh(self) -> None:
        """Find what each candidate holds, and which do not fit."""
        candidates = self.problem.space.candidates()
        room = self.memory or min(self.place.everyones(room_of(self.problem.device, self.place.num_here)))
        self.ask("weigh", candidates, weigh)
        for candidate in candidates:
            answer = self.journal[f"weigh {candidate.key}"]
            if isinstance(answer, str):
                self.rows[candidate.key] = Row(candidate, "refused", why=answer)
                continue
            footprint = self.footprints[candidate.key] = Footprint(**answer)
            fits = footprint.num_bytes <= room
            why = "" if fits else f"{footprint.num_bytes:,} bytes, and a rank has {room:,}"
            self.rows[candidate.key] = Row(candidate, "not tried" if fits else "does not fit", why=why)

    def rehearse(self) -> None:
        """Find how long a call of each candidate that fits computes, and what its messages add."""
        waiting = self.waiting()
        self.ask("rehearse", [*waiting.values()], rehearse, self.budget.measure)
        for key, candidate in waiting.items():
            answer = self.journal[f"rehearse {key}"]
            if isinstance(answer, str):
                self.rows[key] = Row(candidate, "refused", why=answer)
            else:
                self.predictions[key] = Prediction(*answer)

    def waiting(self) -> dict[str, Candidate]:
        """Return the candidates that may be tried."""
        return {key: row.candidate for key, row in self.rows.items() if row.outcome == "not tried"}

    def ask(self, what: str, candidates: Sequence[Candidate], work: Callable[..., None], *arguments: Any) -> None:
        """Have ranks answer for each candidate, in as few starts as can be: after one that ends them they start again.

        Of what they answer the text of an error counts, else the largest number; None is no answer. Where they answer
        again for all candidates, the last time counts.
        """
        left = [candidate for candidate in candidates if f"{what} {candidate.key}" not in self.journal]
        while left:
            self.show(f"{what}: {len(left)} candidates")
            limit = _START + len(left) * self.budget.limit
            arguments_ = self.problem, tuple(left), *arguments
            ended = self.place.run(work, arguments_, num_ranks=self.place.num_ranks, limit=limit)
            answered = [*zip(*ended.answers, strict=False)]
            for i, candidate in enumerate(left[: len(answered)]):
                answers = [answer for answer in answered[i :: len(left)][-1] if answer is not None]
                refused = [answer for answer in answers if isinstance(answer, str)]
                answer = refused[0] if refused else answers[0] if len(answers) == 1 else max(answers)
                self.journal[f"{what} {candidate.key}"] = answer
            if ended.how == "failed":
                raise FdsError("the ranks have failed", got=ended.why)
            if len(answered) < len(left):  # what one rank has not come to yet another may have ended in
                at = left[min(len(ended.answers[ended.rank]), len(left) - 1)]
                self.journal[f"{what} {at.key}"] = f"{ended.how}: {ended.why}"
            left = [candidate for candidate in left if f"{what} {candidate.key}" not in self.journal]

    def ordered(self, order: Any, key: int) -> Iterator[Candidate]:
        """Yield the candidates to try; those that follow may depend on what came of it."""
        waiting = self.waiting()
        if order == "ranking":
            yield from self.ranked()
        elif order == "grid":
            yield from waiting.values()
        elif order == "random":
            yield from random.Random(key).sample([*waiting.values()], len(waiting))
        else:
            yield from self.suggested(order)

    def ranked(self) -> Iterator[Candidate]:
        """Yield the one that is expected to be fastest, as long as it is expected within 5% of the best."""
        while waiting := self.waiting():
            factors = self.factors()
            first = min(waiting, key=lambda key: self.predictions[key].seconds(factors))
            best = min((row.measured for row in self.rows.values() if row.measured), default=math.inf)
            if self.predictions[first].seconds(factors) > _PROMISING * best:
                return
            yield waiting[first]

    def suggested(self, study: Any) -> Iterator[Candidate]:
        """Yield what a study asks for, and tell it of what came of it."""
        space, by_key = self.problem.space, {c.key: c for c in self.problem.space}
        meshes = {", ".join(f"{name}={size}" for name, size in axes.items()): axes for axes in space.axes}
        for _ in range(_ASKED * self.budget.trials):  # most of what is asked for may have been tried already
            trial = study.ask()
            mesh = trial.suggest_categorical("mesh", [*meshes])
            choices = {name: trial.suggest_categorical(name, [*values]) for name, values in space.choices.items()}
            candidate = by_key.get(Candidate(meshes[mesh], choices).key)
            if candidate is not None and self.rows[candidate.key].outcome == "not tried":
                yield candidate
            seconds = None if candidate is None else self.rows[candidate.key].measured
            study.tell(trial, math.inf if seconds is None else seconds)

    def try_(self, candidate: Candidate) -> None:
        """Train a few calls in fresh processes."""
        if (question := f"try {candidate.key}") not in self.journal:
            self.show(f"trying {candidate}")
            arguments = (self.problem, candidate, self.budget.measure)
            ended = self.place.run(run_candidate, arguments, num_ranks=self.place.num_ranks, limit=self.budget.limit)
            numbers = [max(answers) for answers in zip(*ended.answers, strict=False)] if ended.how == "done" else []
            self.journal[question] = [ended.how, ended.why, numbers]
        how, why, numbers = self.journal[question]
        if how == "done":
            row = Row(candidate, "tried", measured=numbers[0], num_bytes=numbers[1])
            self.show(f"  {numbers[0] * 1e3:,.1f} ms a step")
        else:
            row = Row(candidate, how, why=why)
            self.show(f"  {how}: {why}")
        self.rows[candidate.key] = row

    def factors(self) -> tuple[float, float]:
        """Return the factors that fit the trials so far."""
        rows = self.rows.items()
        return fit(
            [(self.predictions[key], row.measured) for key, row in rows if key in self.predictions and row.measured]
        )


def room_of(device: str, num_ranks: int) -> int:
    """Return the bytes that a rank may hold: of its GPU, or its share of what is free here and in the container."""
    if device == "cuda":
        share = math.ceil(num_ranks / torch.cuda.device_count())
        return torch.cuda.get_device_properties(0).total_memory // share
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit = memory_limit(CGROUP)
    return (available if limit is None else min(available, limit)) // num_ranks


def memory_limit(cgroup: Path) -> int | None:
    """Return the bytes that the container may use; None without a limit."""
    try:
        text = (cgroup / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
