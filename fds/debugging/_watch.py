"""`watch`: a step that is called as before, and runs a call again with checks where its numbers are not finite."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.debugging.checking import CheckedGradients, Checking, NamedLayers, NonFinite, is_finite, not_finite
from fds.display.readings import Reading, begin
from fds.errors import FdsError, checked_call, is_a
from fds.state import State
from fds.step import Measure, Step
from fds.step.all_stations import AtOnce
from fds.step.ranges import clocked


def replay(step: Step, state: State, batch: Any) -> NonFinite:
    """Run a call again, and return what in it is not finite first; all ranks that share the step call this."""
    order, mine = _replay_here(step, state, batch)
    if step.everyone is None:
        return mine
    sent = step.everyone.exchange([order, attrs.asdict(mine)], "watch")
    first = min(range(len(sent)), key=lambda rank: (sent[rank][0], rank))
    names = dict.fromkeys(name for _, theirs in sent for name in theirs["params"])
    return attrs.evolve(NonFinite.read(sent[first][1]), params=tuple(names))


def _replay_here(step: Step, state: State, batch: Any) -> tuple[list[int], NonFinite]:
    """Return what is not finite first on this rank, and what orders it among ranks: causes come before effects."""
    rank, size = (0, 1) if step.everyone is None else (step.everyone.index, step.everyone.size)
    in_state = [leaf for kind in ("params", "opt", "buffers") for leaf in not_finite(getattr(state, kind), kind)]
    in_batch = not_finite(batch, "batch")
    make = functools.partial(NonFinite, int(state.calls), rank, size)
    checking = Checking(state.step.device, make)
    checked = attrs.evolve(
        step,
        place=attrs.evolve(step.place, donate=False, speculate=False),
        run=AtOnce(),
        layer=(*step.layer, NamedLayers(checking.modules)),
        condition=(CheckedGradients(checking.params), *step.condition),
    )
    with torch.compiler.set_stance("force_eager"), clocked(checking.parts), checking.modules, checking:
        _, metrics = checked(state, batch)
    params = tuple(checking.params)
    if in_state:
        return [0], make("state", tensors=tuple(in_state), params=params)
    if in_batch:
        return [1], make("batch", tensors=tuple(in_batch), params=params)
    lost = not is_finite(metrics["loss"])
    loss = checking.of_loss if lost else None
    # of a loss that is finite, what is not was hidden again in forward: a mask
    culprits = [culprit for culprit in checking.culprits.values() if lost or culprit.part != "forward"]
    if (first := loss or next(iter(culprits), None)) is not None:
        microbatch = -1 if first.microbatch is None else first.microbatch
        order = [3 if loss is None else 2, microbatch, first.stage or 0]
        return order, attrs.evolve(first, params=params)
    reduced = bool(params) and not lost
    return [4 if reduced else 5], make("reduce" if reduced else "nowhere", params=params)


_LOOKED_AT = ("loss", "grad_norm", "skipped")


@attrs.frozen(eq=False)
class WatchedCall:
    """A call whose numbers are on their way to the host.

    Attributes:
        state: before it; None where that was given up.
        after: the state that it returned, of a step that donates.
        slots: before it, of those that a skipped step may change.
        batch: of it.
        reading: of its metrics.
    """

    state: State | None
    after: State | None
    slots: dict[str, Any]
    batch: Any
    reading: Reading

    def before(self, *, skipped: bool) -> State | None:
        """Return the state before the call; None where it is gone.

        A step that skipped has given nothing up but its count of calls and the slots that count skips.
        """
        if self.after is None or not skipped:
            return self.state
        return attrs.evolve(self.after, calls=self.after.calls - 1, slots={**self.after.slots, **self.slots})


class Watch:
    """What `fds.watch` returns: call it as the step is called.

    Attributes:
        step: that is watched.
        last: what was found last, a `NonFinite`; None before.
    """

    def __init__(self, step: Step):
        self.step = step
        self.last: NonFinite | None = None
        self._donates = step.place.donate
        self._small = [slot for slot, memory in step.memory.items() if memory.lies in ("named", "replicated")]
        self._calls: deque[WatchedCall] = deque()

    def __repr__(self) -> str:
        return f"watch({self.step!r})"

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Tensor]]:
        """Return what the step returns; see `fds.watch`. Raises what the step raises, and `FdsError`."""
        slots: dict[str, Any] = {}
        if self._donates and is_a(state, State):
            slots = {slot: tree.map(torch.clone, state.slots[slot]) for slot in self._small if slot in state.slots}
        after, metrics = self.step(state, batch)
        reading = begin([{name: metrics[name] for name in _LOOKED_AT if name in metrics}])
        before, given_back = (None, after) if self._donates else (state, None)
        self._calls.append(WatchedCall(before, given_back, slots, batch, reading))
        waits = after.step.device.type == "cuda" and not self._donates
        while len(self._calls) > waits:
            self._look()
        return after, metrics

    def finish(self) -> None:
        """Look at the last call, which on a GPU is otherwise looked at in the next one. Raises `FdsError`."""
        while self._calls:
            self._look()

    def replay(self, state: State, batch: Any) -> NonFinite:
        """Run a call again with checks, and return what in it is not finite first, "nowhere" if nothing is.

        For a state and a batch that were kept or saved; the state stays as it is. Where ranks share the step all of
        them call this, and each gets the same. Raises what a call raises.
        """
        return replay(self.step, state, batch)

    def _look(self) -> None:
        call = self._calls.popleft()
        [numbers] = call.reading.numbers()
        wrong = {name: x for name, x in numbers.items() if name != "skipped" and x - x != 0}
        if not wrong:
            return
        skipped = bool(numbers.get("skipped", False))
        state = call.before(skipped=skipped)
        got = ", ".join(f"{name} {x}" for name, x in wrong.items())
        if state is None:
            raise FdsError(
                "a step is not finite, and was not skipped",
                where="watch",
                got=got,
                want="the state before it, to run it again",
                hint="it was donated: go on from the last save without fds.donate()",
            )
        self.last = first = self.replay(state, call.batch)
        if skipped:
            warnings.warn(f"the call after {first.call} others was skipped ({got})\n{first}", stacklevel=3)
            return
        raise FdsError(
            "a step is not finite",
            where=f"the call after {first.call} others: {first.place}",
            got="\n".join([got, *str(first).split("\n")[1:]]),
            hint=_HINTS.get(first.part, ""),
        )


_HINTS = {
    "state": "an update before this call made it so: run the calls since the last save under fds.watch",
    "nowhere": "no operator that is looked at did it: what is compiled runs as it is written here, collectives are not "
    "looked at, and a GPU may sum in another order",
}


@checked_call
def watch(step: Step) -> Watch:
    """Return the step, to be called as before, which says by name what is not finite first when something is.

        watched = fds.watch(step)
        for batch in loader:
            state, metrics = watched(state, batch)

    A call whose loss, or norm of the gradients, is NaN or infinite runs again with every operator looked at: forward
    and backward, of every microbatch, on every rank that shares the step. What was found first is `watched.last`, a
    `NonFinite`: module, operator, microbatch, rank, and the statistics of what the operator was given and returned. If
    the step skipped, all ranks warn of it, and go on; if not, all raise `FdsError`, and the caller's state is still
    that before the call.

    States and metrics are those of the step, bit for bit. Nothing is copied and no number waited for: state and batch
    are kept until the metrics have arrived, on a GPU until the next call, which takes the memory of one more state.
    A step without a norm of its gradients has it measured, and `metrics["grad_norm"]`.

    A step that donates has no state to go back to, unless it skips, which leaves the state as it was: it is watched
    with `skip_nonfinite` or a loss scale beside `donate`, and then looked at after each call, for which the host waits.

    Args:
        step: what `compose(...)(loss)` returned.

    Raises `FdsError` for what is no step, and for one that donates and never skips.
    """
    if not is_a(step, Step):
        raise FdsError(
            "only a step can be watched",
            where="watch",
            got=type(step).__name__,
            want="what fds.compose(...)(loss) returned",
        )
    if step.place.donate and not step.skips:
        raise FdsError(
            "a step that donates leaves no state to run it again with",
            where="watch",
            got=repr(step)[:200],
            want="a step without fds.donate(), or one that skips",
            hint="compose(fds.skip_nonfinite(), ...) leaves the state as it was where a gradient is not finite",
        )
    measured = step.skips or step.normed
    return Watch(step if measured else attrs.evolve(step, measure=(*step.measure, Measure(norm=True))))
