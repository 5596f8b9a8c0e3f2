"""What a recording of a step's work cannot hold: errors that name the code, and say what to write instead."""

from __future__ import annotations

import itertools
import traceback
import types

import attrs

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

_WITHOUT = "leave out fds.cuda_graph(), or fds.compile(whole=True)"
_LOSS_ALONE = "fds.compile() compiles the loss alone"
_STATIONS = {"fds.optim.base": ScheduleError, "fds.loss": LossError}  # errors of the code that these modules call


@attrs.frozen
class Refusal:
    """An error, but for what is at fault."""

    kind: type[FdsError]
    what: str
    want: str = ""
    hint: str = _WITHOUT
    where: str | None = None  # None for the line of the user's that is running

    def error(self, got: str, *, want: str = "", where: str | None = None) -> FdsError:
        """Return the error."""
        where = self.where if where is None else where
        where = outside() if where is None else where
        return self.kind(self.what, where=where, got=got, want=want or self.want, hint=self.hint)

    def caused_by(self, error: BaseException) -> FdsError:
        """Return the error for what torch refused: it names the user's line, and is of the kind of its station."""
        first = first_of(error)
        frames = itertools.takewhile(_is_before_a_mode, traceback.walk_tb(first.__traceback__))
        lines = [(frame.f_globals.get("__name__", ""), frame.f_code, line) for frame, line in frames]
        users = ["", *(line_of(code, line) for module, code, line in lines if not is_of_library(module))]
        kinds = [kind for at, kind in _STATIONS.items() if any(module.startswith(at) for module, *_ in lines)]
        got = str(first).strip().partition("\n")[0][:200]
        return attrs.evolve(self, kind=[*kinds, self.kind][0]).error(got, where=users[-1])


def first_of(error: BaseException) -> BaseException:
    """Return the error that was raised first, while others were handled: handling it may have failed as well."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _is_before_a_mode(at: tuple[types.FrameType, int]) -> bool:
    """Say whether a frame is none of a mode of torch, which looks on."""
    return at[0].f_code.co_name not in ("__torch_dispatch__", "__torch_function__")


HOST_NUMBER = Refusal(  # no replay would change it
    ComposeError,
    "a graph would keep a number of the host as it is now",
    "torch's generators, which are seeded for every replay; or call.step, a tensor on the device",
)
SEED = Refusal(ComposeError, "a graph would keep a seed as it is now", "the seeds of the step: draw without seeding")
READ = Refusal(
    ComposeError,
    "a graph cannot hold what waits for the device, or depends on values",
    "tensors that stay on the device, of shapes that do not depend on values",
    "look for .item(), float(x), if x, .cpu(), nonzero, x[mask], torch.tensor(..., device=x.device)",
)
BATCH_LEAF = Refusal(
    BatchError,
    "a graph reads the tensors of every batch on its device",
    hint="x.to(device, non_blocking=True) before the step, of pinned memory",
)
KINDS = Refusal(
    BatchError,
    "every structure and shape of a batch needs a graph of its own",
    hint=f"pad batches to a few lengths; or {_WITHOUT}",
    where="batch",
)

# of a CUDA graph
DEVICES = Refusal(StateError, "a CUDA graph captures the work of one device", "all of it on one", where="")
HOST_DRAW = Refusal(
    LossError,
    "a CUDA graph would keep a random number that was drawn on the CPU",
    "the device's: torch.randint(2**62, (), device=x.device), torch.rand(n, device=x.device)",
)
DRAW_IN_SCOPE = Refusal(
    ComposeError,
    "a CUDA graph cannot set the generator back to where it was before a scope",
    "no such scope: in a replay what follows it would draw other numbers",
)
OTHER_PATH = Refusal(
    ComposeError,
    "a CUDA graph repeats one path through the step, and this call took another than the last one",
    hint=f"decide on the device (torch.where), or by the shapes of the batch; or {_WITHOUT}",
    where="the scopes that seed generators",
)

# of one compiled graph
DRAW_BY_VALUES = Refusal(
    LossError,
    "random numbers of a step in one graph are drawn before it runs, and these are not known then",
    "F.dropout, torch.rand, torch.randn, torch.randint, x.bernoulli_(p), from torch's default generator",
    f"torch.rand_like(p) < p draws what torch.bernoulli(p) does; or {_LOSS_ALONE}",
)
UNSEEDED_DRAW = Refusal(
    ComposeError,
    "a step in one graph draws from its own seeds, and this draws before any is set",
    "draws = True, or no such attribute",
    _LOSS_ALONE,
)
HIDDEN_DRAW = Refusal(
    LossError,
    "random numbers of a step in one graph were drawn, or a generator was set, where nothing sees it",
    "operators of torch, such as F.dropout; fds.checkpoint_activations() in the place of torch's checkpoint",
    _LOSS_ALONE,
)
WRITE = Refusal(
    LossError,
    "a step in one graph writes to a tensor that is not its own",
    "metrics, buffers or slots, which a step returns",
    _LOSS_ALONE,
    where="",
)
UNRECORDED = Refusal(
    ComposeError,
    "a step in one graph cannot hold this",
    "functions of torch, of tensors that are made by functions of torch",
    f"look for copy.deepcopy, torch.compile inside, storages; or {_LOSS_ALONE}",
)
UNCOMPILED = Refusal(ComposeError, "this backend does not compile the step", hint=_LOSS_ALONE, where="station 'run'")
