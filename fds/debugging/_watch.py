"""`watch`: a step that is called as before, and runs a call again with checks where its numbers are not finite."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.debugging.replay import NonFinite, replayed
from fds.display.readings import Reading, begin
from fds.errors import FdsError, checked_call, is_a
from fds.state import State
from fds.step import Measure, Step

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
        self._small = [slot for slot, one in step.memory.items() if one.lies in ("named", "replicated")]
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
        return replayed(self.step, state, batch)

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
        self.last = found = self.replay(state, call.batch)
        if skipped:
            warnings.warn(f"the call after {found.call} others was skipped ({got})\n{found}", stacklevel=3)
            return
        raise FdsError(
            "a step is not finite",
            where=f"the call after {found.call} others: {found.place}",
            got="\n".join([got, *str(found).split("\n")[1:]]),
            hint=_HINTS.get(found.part, ""),
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
