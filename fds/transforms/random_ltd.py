"""Random layerwise token dropping: layers in the middle compute a random part of the tokens, others pass them by.

Fills:  layer, memory; of a loss that is no `Layers` also modules        State:  slot `random_ltd`: two counts of tokens
Law:    14: the hand-written loop that gathers the same tokens; keeping all tokens is the identity, bit for bit
Cost:   k/S of these layers, k^2/S^2 of their attention; a sort of (B, S) numbers, one gather and one scatter a layer
Source: Yao et al. 2022, arXiv:2211.11586
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import loss as losses, random
from fds.errors import ComposeError, LossError, Rule, ScheduleError, is_int
from fds.loss import Block
from fds.nn.kept_tokens import Order, Places, Tokens, is_cache
from fds.step import Call, Memory, Step, fill, transform

SLOT = "random_ltd"


@attrs.frozen(eq=False)
class Keeping:
    """What is done in the place of a call of a layer. `looked` are the layers that were looked at in a first call."""

    schedule: Callable[[int], int]
    order: Order
    looked: set[str] = attrs.field(factory=set[str], repr=False)

    def plan(self, call: Call) -> tuple[tuple[int, int], int]:
        """Return the words of the microbatch's key, and how many tokens are kept.

        Raises `ComposeError` where ranks pass parts of rows, and `ScheduleError` for no number of tokens.
        """
        for entry in call.dimensions.entries:
            in_parts = (getattr(part, "in_parts", ()) for part in getattr(entry.placement, "resolved", ()))
            if entry.role == "sequence" or any(in_parts):
                raise ComposeError(
                    "random_ltd keeps tokens of whole rows, and ranks pass parts of them",
                    got=f"{entry!r:.80}",
                    want="context_parallel or tensor_parallel(sequence=True), or random_ltd",
                )
        kept = self.schedule(call.calls)
        if not is_int(kept, 1):
            raise ScheduleError(
                "random_ltd: the schedule returned no number of tokens",
                where=f"call {call.calls}",
                got=repr(kept)[:60],
                want="an int, 1 or more",
                hint="schedules of rates give floats: lambda t: 8 keeps 8 tokens in every call",
            )
        return call.base, kept

    def run(
        self,
        plan: tuple[tuple[int, int], int],
        call: Call | None,
        block: Block,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a layer on the tokens that it keeps, and put what it returns in their places."""
        words, kept = plan
        argument, x = block.first(args, kwargs)
        if not isinstance(x, Tensor) or x.dim() < 2 or (x.dim() < 3 and kept < x.shape[self.order == "batch_seq"]):
            raise LossError(
                "random_ltd: a layer is given something else than tokens",
                where=f"layer {block.name!r}",
                got=str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__,
                want="(rows, tokens, features), or a tuple that begins with that",
            )
        rows, length = x.shape[:2] if self.order == "batch_seq" else (x.shape[1], x.shape[0])
        if call is not None:
            for name, count in (("kept", min(kept, length)), ("dropped", max(length - kept, 0))):
                number = torch.full((), rows * count, dtype=torch.int64, device=call.device)
                call.note(SLOT, name, number)
        if kept >= length:
            return forward(*args, **kwargs)
        seed = random.seed(words, SLOT, block.name)
        tokens = Tokens.drawn(seed, x, kept, self.order, block, first=kept > 1 and block.name not in self.looked)
        if not tokens.first:
            return tokens.called(forward, argument, args, kwargs)
        self.looked.add(block.name)
        lines = list[set[str]]()

        def watched(*args: Any, **kwargs: Any) -> Any:
            with Places(kept - len(lines), (args, kwargs)) as places:
                out = forward(*args, **kwargs)
            lines.append(set(places.lines))
            return out

        out = tokens.called(watched, argument, args, kwargs)
        if lines[0]:  # of the tokens, if one less changes it
            fewer = attrs.evolve(tokens, index=tokens.index[:, 1:])
            new_args = [_cacheless(name, value) for name, value in block.named(args, {})]
            new_kwargs = {name: _cacheless(name, value) for name, value in kwargs.items()}
            with random.scope([x.device]), torch.no_grad():
                fewer.called(watched, argument, new_args, new_kwargs)
            if both := sorted(lines[0] & lines[1]):
                raise LossError(
                    "random_ltd: a layer counts tokens by itself, and takes those that are left for neighbours",
                    where=f"layer {block.name!r}",
                    got="; ".join(both),
                    want="positions, or their sines and cosines, that the layer is given: (B or 1, S, ...)",
                )
        return out


def _cacheless(name: str, value: Any) -> Any:
    """Return an argument, None for a cache, into which a layer would write again."""
    return None if is_cache(name) else value


def _nothing(shapes: Any, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("dropped", "kept")}


@transform(
    layers=losses.NAMES,
    schedule=Rule(
        callable,
        " takes a schedule of tokens",
        "a function int -> int, say fds.schedules.fixed_linear(128, 512, 10_000)",
    ),
    order=Rule(("batch_seq", "seq_batch").__contains__, ": no such order of dims", "'batch_seq' or 'seq_batch'"),
)
def random_ltd(layers: str | int | Sequence[str | int], schedule: Callable[[int], int], *, order: Order = "batch_seq"):
    """Have each of some layers compute a random part of the tokens; the others pass it by. Evaluations keep all.

    In the call after t others a layer is given `schedule(t)` tokens of each row, in their order, another subset for
    each layer and row. What it returns is put in their places. Subsets follow from the key of the call and the
    microbatch: they are the same where a layer runs again for backward, and on all ranks that compute it together.

    What else a layer is given is gathered with the tokens: masks (B, S), (B or 1, heads or 1, S or 1, S), numbers of
    tokens (B or 1, S, ...) such as positions or sines and cosines. A mask (S, S) without rows must be causal, and is
    cropped. Arguments are known by name and shape; `LossError` says what cannot be told, and, in a first call, which
    layer counts tokens by itself, as rotary positions in it do.

    `state.slots["random_ltd"]` counts tokens of these layers in all updates, `"kept"` and `"dropped"`;
    `fds.schedules.by_layer_tokens` is a learning rate that follows them.

    Args:
        layers: patterns of names of layers in `fds.Layers`, or of paths of modules that the loss runs (`*` crosses
            dots, and the outermost count), or numbers: layers of `fds.Layers`, or modules in the one list of modules of
            a class that the loss has, such as the blocks of a transformer.
        schedule: t -> tokens, counted from t = 0, such as `fds.schedules.fixed_linear(128, 512, 10_000)`; any that is
            no less than the tokens of a row keeps all.
        order: of the dims of what layers pass on, (B, S, ...) or (S, B, ...).

    Raises `ComposeError` for anything else, for names that match nothing, and where ranks pass parts of rows.
    """

    def apply(step: Step) -> Step:
        return fill(
            step,
            memory=Memory(SLOT, _nothing, "replicated", merge="sum"),
            **losses.at_blocks(step.loss, layers, Keeping(schedule, order), SLOT),
        )

    return apply
