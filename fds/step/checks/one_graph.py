"""What cannot be one compiled graph: errors that say which code it is, and what to write instead."""

from __future__ import annotations

from fds.errors import ComposeError, FdsError, LossError, outside
from fds.step.checks.capture import HasStations, alone_on_a_device, at_fault

_HINT = "fds.compile() compiles the loss alone"


def composition(step: HasStations) -> None:
    """Raise `ComposeError` for a step that cannot be one graph, as far as its composition says so."""
    alone_on_a_device(step, _composed, f"ranks that share a step meet between its parts; {_HINT}")


def _composed(got: str, want: str, why: str) -> ComposeError:
    return ComposeError("this step cannot be one graph", where="station 'run'", got=got, want=want, hint=why)


def drawn_by_values(op: str) -> LossError:
    """Return the error of random numbers that depend on values in the graph, or come from a generator of the user's."""
    return LossError(
        "random numbers of a step in one graph are drawn before it runs, and these are not known then",
        where=outside(),
        got=op,
        want="F.dropout, torch.rand, torch.randn, torch.randint, x.bernoulli_(p), from torch's default generator",
        hint="torch.rand_like(p) < p draws what torch.bernoulli(p) does; or " + _HINT,
    )


def unseeded() -> ComposeError:
    """Return the error of random numbers from no seed of the step's."""
    return ComposeError(
        "a step in one graph draws from its own seeds, and this draws before any is set",
        where=outside(),
        got="a filler that draws, and says that it does not (draws = False)",
        want="draws = True, or no such attribute",
        hint=_HINT,
    )


def drawn_otherwise(fold: str) -> LossError:
    """Return the error of generators that were moved by something else than operators of torch that draw."""
    return LossError(
        "random numbers of a step in one graph were drawn, or a generator was set, where nothing sees it",
        where=f"seeded by ({fold})",
        got="torch's default generators in another state",
        want="operators of torch, such as F.dropout; fds.checkpoint_activations() in the place of torch's checkpoint",
        hint=_HINT,
    )


def written() -> LossError:
    """Return the error of a step that writes to tensors that are not its own."""
    return LossError(
        "a step in one graph writes to a tensor that is not its own",
        got="one that is neither of the state nor made in the step",
        want="metrics, buffers or slots, which a step returns",
        hint=_HINT,
    )


def unrecorded(error: Exception) -> FdsError:
    """Return the error of code that torch cannot record, though it runs."""
    return at_fault(
        error,
        "a step in one graph cannot hold this",
        want="functions of torch, of tensors that are made by functions of torch",
        hint=f"look for copy.deepcopy, torch.compile inside, storages; or {_HINT}",
    )


def uncompiled(error: Exception, backend: str) -> ComposeError:
    """Return the error of a graph that a backend does not take."""
    return ComposeError(
        "this backend does not compile the step",
        where="station 'run'",
        got=f"{type(error).__name__}: {error}"[:400],
        want=f"a step that {backend} can compile",
        hint=_HINT,
    )
