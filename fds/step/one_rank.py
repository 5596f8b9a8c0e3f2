"""A call of a step that ranks divide beside the same call on one rank: the loss, and the gradient of every parameter.

Each rank runs the undivided loss by itself, of whole parameters, on the rows of all ranks, under the same key; every
`Axis` is one of a single rank meanwhile. An optimizer that writes gradients in the place of parameters has both ways
end in whole trees under the user's names, at any stage, of any product of axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fds import tree
from fds.collectives import alone
from fds.errors import BatchError, LossError, StateError
from fds.microbatches import Microbatches
from fds.optim import Optimizer
from fds.state import State
from fds.step.all_stations import AtOnce, Program, Stations
from fds.step.batch import Split, Whole, split_batch
from fds.step.checks.agreement import same_composition
from fds.step.checks.state_check import StateTensors, graphless, usable
from fds.step.execution import InTurn
from fds.step.into import whole_parameters
from fds.step.sharding.transport import LOSSLESS
from fds.step.stations import Place
from fds.step.topology import Dimensions

_DOING = "compare_with_one_rank"
_DEVIATIONS = 16  # of roundings that are independent, from their mean
# Of a gradient, at most, that roundings may change: in 16 bits products are added in float32, and depth alone counts.
_MOST = 0.25
_SHOWN = 6  # parameters that an error names


@attrs.frozen
class Comparison:
    """How far a call of a step over ranks is from the same call on one rank.

    Attributes:
        loss: of the ranks together.
        loss_of_one_rank: of the undivided call.
        tolerance: what roundings alone may make of a relative difference.
        differences: parameter -> norm of the difference of its two gradients over the norm of one rank's gradient.
    """

    loss: float
    loss_of_one_rank: float
    tolerance: float
    differences: dict[str, float]

    def __str__(self) -> str:
        name = max(self.differences, key=self.differences.__getitem__)
        return (
            f"loss {self.loss:.8g}, on one rank {self.loss_of_one_rank:.8g}; gradients differ by at most "
            f"{self.differences[name]:.1e} ({name}) of {self.tolerance:.1e}"
        )


@graphless
def compare_with_one_rank(step: Stations, state: State, batch: Any) -> Comparison:
    """Run a call of a step as its ranks divide it, and once undivided; return how far loss and gradients are apart.

        print(fds.debugging.compare_with_one_rank(step, state, batch))

    It catches what no other check sees: a plan of tensor parallelism that computes something else, a loss that looks
    at a part of a sequence, gradients that are counted twice. Compared is what the optimizer would be given, before
    clips and noise; the state stays as it is. Where ranks share the step all of them call this with the batch that
    they would pass to it (in a pipeline on every rank), and all get the same, or the same error.

    The undivided call draws what the ranks draw, and collectives and axes that the loss itself uses are those of one
    rank. Every rank holds whole parameters and the batch of all for it, once more than a step: for a small model.

    The tolerance is what rounding does: `16 eps sqrt(n)` of a gradient's norm for n additions on the longest way
    through the model, eps being that of the coarsest dtype in which an operator returned something (Higham and Mary
    2019, doi:10.1137/18M1226312), and a quarter at most. That is little for 16 bits: leave `precision` out to compare.

    Args:
        step: what `compose(...)(loss)` returned.
        state: of it.
        batch: as the step takes it.

    Raises `LossError`, which names the first parameter that differs, with how much; `StateError` for another state,
    parameters that ranks make equal now and then (`local_updates`), gradients that are not finite, and where a rank
    cannot run the undivided call; `BatchError` where a rank has no batch; and what a call of the step raises.
    """
    usable(state, _DOING)
    same_composition(step)
    dims = step.dimensions
    if dims.local is not None:
        raise StateError(
            "ranks have parameters of their own, so their step is not that of one rank",
            where=_DOING,
            got=f"a dimension of role 'local', {dims.local.size} ranks",
            want="a composition without local_updates",
        )
    params = whole_parameters(step, state, _DOING, copies=True)
    buffers = dims.collect(state.buffers)
    parts = _all_microbatches(step, _together(step, functools.partial(_microbatches, step, state, batch)), batch)
    divided = attrs.evolve(
        step,
        view=step.views,
        gather=attrs.evolve(step.gather, transport=LOSSLESS),
        reduce=attrs.evolve(step.reduce, transport=LOSSLESS),
        measure=(),
        condition=(),
        optimizer=Optimizer(_nothing, _gradients, lr=0.0, draws=False, separate=True, elementwise=True),
        after=(),
        place=Place(),
        run=AtOnce(),
        memory={slot: filler for slot, filler in step.memory.items() if filler.lies in ("named", "replicated")},
    )
    undivided = attrs.evolve(
        divided,
        topology=(),
        dimensions=Dimensions(),
        batch=(),
        split=Split(len(parts)),
        execute=InTurn(),
        modules=tuple(filler for filler in step.modules if getattr(filler, "axis", None) is None),
        context=step.contexts,
    )
    with torch.compiler.set_stance("force_eager"):
        loss, ours = _pass(divided, params, attrs.evolve(state, buffers=state.buffers), batch)

        def run() -> Any:
            with alone(), Coarsest() as coarsest:
                of_one = _pass(undivided, params, attrs.evolve(state, buffers=buffers), Microbatches(parts))
            return _compared((loss, ours), of_one, params, coarsest.eps, parts)

        comparison, error = _together(step, run)
    replies = [[attrs.asdict(comparison), error]]
    if step.everyone is not None:
        replies = step.everyone.exchange(replies[0], _DOING)
    wrong = next(((i, fields) for i, (_, fields) in enumerate(replies) if fields is not None), None)
    if wrong is not None:
        rank = "" if step.everyone is None else f" on rank {step.everyone.ranks[wrong[0]]}"
        raise LossError(**{**wrong[1], "where": wrong[1]["where"] + rank})
    return Comparison(**replies[0][0])


@attrs.frozen
class FirstCallCompared:
    """The station `run`: a first call is compared with one rank before it is done, and later ones are done at once."""

    kind: ClassVar = "compared"

    def refuse(self, step: Stations) -> None:
        """Do nothing: what cannot be compared is said when it is."""

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Compare, and do the work. Raises what `compare_with_one_rank` raises; the state is then as it was."""
        if self.kind not in program.runtime.asked:
            program.compare(state, batch)
            program.runtime.asked[self.kind] = []
        return program.work(state, held, batch)

    def __repr__(self) -> str:
        return "the first call is compared with one rank"


class Coarsest(TorchDispatchMode):
    """Note the coarsest floating dtype of what operators return."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at what it returns."""
        if getattr(func, "_overloadpacket", None) is None:  # an operator of higher order, whose parts are looked at
            return NotImplemented
        out: Any = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if isinstance(x, Tensor) and x.dim() and x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return out


def _nothing(segments: Any, *, params: Any) -> dict[str, list[Tensor | None]]:
    return {}


def _gradients(
    grads: list[Tensor], opt: Any, params: list[Tensor], *, step: Tensor, lr: Any, grad_scale: Tensor | None, skip: Any,
    segments: Any, axes: Any, out: Any = None,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Write the gradients over the parameters."""
    for g, p in zip(grads, params, strict=True):
        p.copy_((g if grad_scale is None else g * grad_scale).view(p.shape))
    return params, opt


def _pass(step: Stations, params: Any, state: State, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a call with these whole parameters, and the gradients of the trained ones by name."""
    whole: Any = step  # which is called
    first = whole.init(params, key=state.key)
    slots = {slot: state.slots[slot] for slot in first.slots}
    first = attrs.evolve(first, step=state.step, calls=state.calls, buffers=state.buffers, slots=slots)
    after, metrics = whole(first, batch)
    grads = tree.paths(whole_parameters(step, after, _DOING, copies=False))
    trained = step.dimensions.names(step.structure_of(first.params)[0].trained_names)
    return metrics["loss"], {name: grads[name] for name in trained}


def _compared(
    divided: tuple[Tensor, dict[str, Tensor]],
    of_one: tuple[Tensor, dict[str, Tensor]],
    params: Any,
    eps: float,
    parts: list[Any],
) -> tuple[Comparison, dict[str, str] | None]:
    """Return the comparison, and the fields of an error where something differs by more than roundings."""
    (loss, ours), (want, theirs) = divided, of_one
    norms = {name: _norm(x) for name, x in theirs.items()}
    joint = math.hypot(*norms.values())
    if not math.isfinite(joint + float(want)):
        raise StateError("the gradients of one rank are not finite", where=_DOING, got=f"loss {float(want)}")
    rows = [x.numel() for x in tree.leaves(parts) if isinstance(x, Tensor)]
    additions = max(rows, default=0) + sum(max(x.shape, default=1) for x in theirs.values())
    tolerance = min(_DEVIATIONS * eps * math.sqrt(additions), _MOST)
    # what is 0 but for roundings, as the gradient of a bias of keys, is measured by all others
    off = {n: _norm(ours[n].double() - x.double()) for n, x in theirs.items()}
    differences = {n: off[n] / max(norms[n], joint * _DEVIATIONS * eps / tolerance, 1e-300) for n in theirs}
    comparison = Comparison(float(loss), float(want), tolerance, differences)
    # a rounding in forward is as if parameters were rounded
    named = tree.paths(params)
    scale = abs(float(want)) + sum(norms[n] * _norm(named[n]) for n in theirs)
    wrong = [n for n in theirs if not differences[n] <= tolerance]
    same_loss = abs(float(loss - want)) <= tolerance * scale
    if same_loss and not wrong:
        return comparison, None
    got = [f"loss {float(loss):.8g}, on one rank {float(want):.8g}"]
    got += [f"{n}: off by {differences[n]:.2g}{_factor(ours[n], theirs[n], tolerance)}" for n in wrong[:_SHOWN]]
    got += [f"and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
    if wrong:
        got += [f"{len(wrong)} of {len(theirs)} parameters, the last of them {wrong[-1]}"]
    hint = "losses agree, so look at what has the last of these: gradients travel from the loss to the inputs"
    return comparison, {
        "what": "the step over these ranks is not that of one rank",
        "where": f"{_DOING}: {f'the gradient of {wrong[0]}' if wrong else 'the loss'}",
        "got": "\n".join(got),
        "want": f"relative differences of at most {tolerance:.1e}: {_DEVIATIONS} eps sqrt({additions} additions)",
        "hint": hint * (abs(float(loss - want)) <= tolerance * abs(float(want))),
    }


def _norm(x: Tensor) -> float:
    return float(x.detach().double().square().sum().sqrt())


def _factor(x: Tensor, want: Tensor, tolerance: float) -> str:
    """Say by which factor a gradient is too large, where that is all that is wrong with it."""
    x, want = x.double().flatten(), want.double().flatten()
    factor = float(x @ want) / max(float(want @ want), 1e-300)
    is_all = _norm(x - factor * want) <= tolerance * _norm(x)
    return f", it is {factor:.4g} times one rank's" * (is_all and x.numel() > 1)


def _together(step: Stations, make: Callable[[], Any]) -> Any:
    """Return what a function returns. Raises `StateError` on every other rank where it raises on one."""
    made, error = None, None
    try:
        made = make()
    except Exception as caught:  # the other ranks wait: they are told
        error = caught
    replies = [None]
    if step.everyone is not None:
        replies = step.everyone.exchange(None if error is None else f"{type(error).__name__}: {error}"[:2000], _DOING)
    if error is not None:
        raise error
    for rank, text in enumerate(replies):
        if text is not None:
            raise StateError("another rank cannot compare", where=f"{_DOING}, rank {rank}", got=text)
    return made


def _microbatches(step: Stations, state: State, batch: Any) -> list[Any]:
    """Return the microbatches of this rank."""
    if batch is None:
        raise BatchError(
            "a rank has no batch", where=_DOING, got="None", want="the batch on every rank, of every stage too"
        )
    return split_batch(batch, step.batch, step.split, step.call(state)).microbatches or []


def _all_microbatches(step: Stations, parts: list[Any], batch: Any) -> list[Any]:
    """Return the microbatches of all ranks in their order, with whole rows, given those of this rank."""
    peers, sequence = step.dimensions.peers, step.dimensions.sequence
    if peers is None:
        return parts
    marked = [path for path, x in tree.paths(batch).items() if isinstance(x, Whole)]
    leaves, build = tree.flatten(parts)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    kinds = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    place = [step.dimensions.share_of_batch[0], 0 if sequence is None else sequence.index]
    replies = peers.exchange([place, kinds], _DOING)
    odd = next((i for i, (_, theirs) in enumerate(replies) if len(theirs) != len(kinds)), None)
    if odd is not None:
        raise BatchError(
            "ranks pass batches of other structures",
            where=f"{_DOING}, rank {odd} of {peers.name}",
            got=f"{len(replies[odd][1])} tensors",
            want=f"{len(kinds)}",
        )
    received = dict[tuple[int, int], list[Tensor]]()
    for source, ((share, part), theirs) in enumerate(replies):
        received[share, part] = [
            _sent(peers, source, x, dtype, shape) for x, (dtype, shape) in zip(tensors, theirs, strict=True)
        ]
    shares, size = max(share for share, _ in received) + 1, max(part for _, part in received) + 1
    joins = [context.joined for context in step.context if hasattr(context, "joined")]
    join: Callable[[list[Tensor]], Tensor] = joins[0] if joins else functools.partial(torch.cat, dim=1)
    paths = [path.partition(".")[2] for path, x in tree.paths(parts).items() if isinstance(x, Tensor)]
    microbatches = list[Any]()
    for share in range(shares):
        whole = list[Tensor]()
        for i, path in enumerate(paths):
            cut = [received[share, part][i] for part in range(size)]
            is_shared = any(path == prefix or path.startswith(f"{prefix}.") for prefix in marked)
            has_tokens = size > 1 and not is_shared and cut[0].dim() > 1 and max(x.shape[1] for x in cut) > 1
            whole.append(join(cut) if has_tokens else cut[0])
        taken = iter(whole)
        microbatches += build([next(taken) if isinstance(x, Tensor) else x for x in leaves])
    return microbatches


def _sent(peers: Any, source: int, x: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """Return the tensor of the rank with coordinate `source`, where this rank's is."""
    mine = source == peers.index
    like = x.detach() if mine else torch.empty(shape, dtype=getattr(torch, dtype), device=x.device)
    flat = like.to(peers.device).contiguous().view(-1).view(torch.uint8)
    if mine and like.device == peers.device:
        flat = flat.clone()
    if flat.numel():
        peers.start_broadcast(flat, source).wait()
    return flat.view(like.dtype).view(shape).to(x.device)
