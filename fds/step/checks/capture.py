"""What a graph of a step cannot hold: errors that say which code it is, and what to write instead."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import (
    BatchError,
    ComposeError,
    FdsError,
    LossError,
    ScheduleError,
    StateError,
    is_of_library,
    line_of,
    outside,
)
from fds.step.residency.contract import Residency, text_of

_HINT = "leave out fds.cuda_graph(), or fds.compile(whole=True)"


class HasStations(Protocol):
    """What is looked at of a step: stations of other fillers."""

    @property
    def place(self) -> Placed:
        """The station `place`."""
        ...

    @property
    def layer(self) -> Sequence[Any]:
        """The station `layer`."""
        ...

    @property
    def everyone(self) -> Axis | None:
        """The ranks that share the step."""
        ...


class Placed(Protocol):
    """What is looked at of the station `place`."""

    @property
    def donate(self) -> bool:
        """Whether the old state is given up."""
        ...

    @property
    def residency(self) -> Residency:
        """Where leaves live."""
        ...


def composition(step: HasStations) -> None:
    """Raise `ComposeError` for a step that cannot be captured, as far as its composition says so."""
    if not step.place.donate:
        raise _composed(
            "the old state is kept", "fds.donate() too", "a graph writes to the same memory in every replay"
        )
    alone_on_a_device(step, _composed, "ranks that share a step are not captured yet")


def alone_on_a_device(step: HasStations, refused: Callable[[str, str, str], ComposeError], meeting: str) -> None:
    """Raise `refused(got, want, why)` for a step that has leaves or activations elsewhere, or meets other ranks.

    `meeting` says why it may not meet any.
    """
    if step.place.residency.kinds:
        lives = f"{', '.join(step.place.residency.kinds)} in {text_of(step.place.residency)}"
        raise refused(lives, "all leaves on the device", "the host reads and writes what lives elsewhere")
    if step.everyone is not None:
        got = f"axis {step.everyone.name!r} of {step.everyone.size} ranks"
        raise refused(got, "one rank", meeting)
    for keeps in filter(None, (getattr(one, "keeps", "") for one in step.layer)):
        got = f"checkpoint_activations({keeps})"
        raise refused(got, "store='device', and nothing else", "the host keeps account of what waits for backward")


def _composed(got: str, want: str, why: str) -> ComposeError:
    return ComposeError("a CUDA graph cannot capture this step", where="station 'run'", got=got, want=want, hint=why)


def frozen(what: str) -> ComposeError:
    """Return the error of a filler that asks for a number on the host, which no replay would change."""
    return ComposeError(
        "a graph would keep a number of the host as it is now",
        where=outside(),
        got=what,
        want="torch's generators, which are seeded for every replay; or call.step, a tensor on the device",
        hint=_HINT,
    )


def drawn_on_host(fold: object) -> LossError:
    """Return the error of random numbers of the host, in the scope whose seed was folded like this."""
    return LossError(
        "a CUDA graph would keep a random number that was drawn on the CPU",
        where=f"seeded by ({fold})",
        got="torch's generator of the CPU, drawn from",
        want="the device's: torch.randint(2**62, (), device=x.device), torch.rand(n, device=x.device)",
        hint=_HINT,
    )


def untraced() -> ComposeError:
    """Return the error of code that seeds torch's generators by itself."""
    return ComposeError(
        "a graph would keep a seed as it is now",
        where=outside(),
        got="fds.random.seeded or reseed, by a key of its own",
        want="the seeds of the step: draw without seeding",
        hint=_HINT,
    )


def drawn_again() -> ComposeError:
    """Return the error of a scope inside which random numbers are drawn that are to be drawn again after it."""
    return ComposeError(
        "a CUDA graph cannot set the generator back to where it was before a scope",
        where=outside(),
        got="random numbers drawn inside of fds.random.scope, from a seed that was set before it",
        want="no such scope: in a replay what follows it would draw other numbers",
        hint=_HINT,
    )


def other_path(got: str, want: str) -> ComposeError:
    """Return the error of work that sets other seeds in each call."""
    return ComposeError(
        "a CUDA graph repeats one path through the step, and this call took another than the last one",
        where="the scopes that seed generators",
        got=got,
        want=want,
        hint="decide on the device (torch.where), or by the shapes of the batch; or " + _HINT,
    )


def synchronized(error: Exception) -> FdsError:
    """Return the error of code that reads a number of a tensor, or cannot be in a graph for another reason."""
    return at_fault(
        error,
        "a graph cannot hold what waits for the device, or depends on values",
        want="tensors that stay on the device, of shapes that do not depend on values",
        hint="look for .item(), float(x), if x, .cpu(), nonzero, x[mask], torch.tensor(..., device=x.device)",
    )


def at_fault(error: BaseException, what: str, *, want: str, hint: str) -> FdsError:
    """Return an error that names the line of the user's that raised another one, and is of the kind of its station."""
    first = first_of(error)
    modules = [(tb.tb_frame.f_globals.get("__name__", ""), tb) for tb in _traceback(first)]
    kinds = {"fds.loss": LossError, "fds.optim.base": ScheduleError}
    inside = [kind for name, kind in kinds.items() if any(at.startswith(name) for at, _ in modules)]
    own = [tb for name, tb in modules if not is_of_library(name)]
    return (inside[-1] if inside else ComposeError)(
        what,
        where=line_of(own[-1].tb_frame.f_code, own[-1].tb_lineno) if own else "",
        got=str(first).strip().partition("\n")[0][:200],
        want=want,
        hint=hint,
    )


def first_of(error: BaseException) -> BaseException:
    """Return the error that was raised first, while others were handled: handling it may have failed as well."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def state_of(devices: Collection[object]) -> StateError:
    """Return the error of a state on several devices."""
    return StateError(
        "a CUDA graph captures the work of one device",
        got="a state on " + ", ".join(sorted(map(str, devices))),
        want="all of it on one",
        hint=_HINT,
    )


def leaf_of_batch(path: str, x: Any, device: object) -> BatchError:
    """Return the error of a leaf of the batch that a replay could not follow."""
    got = f"{type(x).__name__} on {x.device}, {x.layout}" if isinstance(x, Tensor) else type(x).__name__
    return BatchError(
        "a graph reads the tensors of every batch on its device",
        where=".".join(filter(None, ("batch", path))),
        got=got,
        want=f"a dense torch.Tensor on {device}, a number, a string or None",
        hint="x.to(device, non_blocking=True) before the step, of pinned memory",
    )


def too_many(shapes: str, most: int) -> BatchError:
    """Return the error of batches of more and more shapes."""
    return BatchError(
        "every structure and shape of a batch needs a graph of its own",
        where="batch",
        got=f"shapes of number {most + 1}: {shapes}",
        want=f"at most {most}",
        hint="pad batches to a few lengths; or " + _HINT,
    )


def shapes_of(batch: Any) -> str:
    """Return the shapes in a batch as text."""
    return ", ".join(str(tuple(x.shape)) for x in tree.leaves(batch) if isinstance(x, Tensor))[:120]


def _traceback(error: BaseException) -> list[types.TracebackType]:
    """Return where an error passed, up to a mode of torch that looks on."""
    found: list[types.TracebackType] = []
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_name not in ("__torch_dispatch__", "__torch_function__"):
        found.append(tb)
        tb = tb.tb_next
    return found
