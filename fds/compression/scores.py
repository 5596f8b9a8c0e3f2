"""Scores of pruning that are trained: parameters beside those whose masks they make, and an optimizer that sums them.

    module = fds.compression.with_scores(module, "*.weight")
    step = fds.compose(fds.prune_weights("*.weight", method="topk", density=0.5), fds.adamw(1e-3))(loss)

The scores of "0.weight" are the parameter "0.weight_scores". They are parameters as any other: trained, sharded, saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fds import random, tree
from fds.compression._shrink import Cut
from fds.errors import FdsError, OptimizerError, is_a, is_int, is_number
from fds.optim import Optimizer

Of = Literal["weights", "rows", "heads"]
SUFFIXES: dict[Of, str] = {"weights": "_scores", "rows": "_row_scores", "heads": "_head_scores"}
FAINT = 2.0**-12  # of the gradients of scores that are summed: in a norm over all gradients less than its rounding


def is_score(name: str) -> bool:
    """Say whether a parameter is the scores of another, by its name."""
    return name.endswith(tuple(SUFFIXES.values()))


def with_scores(
    model: Any, *patterns: str, of: Of = "weights", num_heads: int | None = None, zeros: bool = False, key: int = 0
) -> Any:
    """Return a copy of a module, or of a dict of tensors, that has scores beside the weights of these names.

    In a module they are parameters of the submodule that has the weight, which computes nothing with them: so
    `fds.functional` and `fds.Layers` know them. A loss without a module takes a dict, and ignores them.

    Args:
        model: an `nn.Module`, or a dict of parameters by name.
        patterns: of names of weights (`*` crosses dots); of these, the ones of two or more dims.
        of: what has a score: "weights" each number, (the weight's shape) named `<name>_scores`; "rows" each row, or
            output channel of a convolution, (rows, 1) named `<name>_row_scores`; "heads" the columns of each head of an
            output projection, (1, num_heads) named `<name>_head_scores`.
        num_heads: of "heads".
        zeros: begin with zeros, as sums do (`fds.compression.sensitivity`), and not drawn from a uniform
            distribution of bound 1 / sqrt(numbers of a row of the scores), as DeepSpeed's are.
        key: what they are drawn from, with their names.

    Raises `FdsError` for anything else, and for scores that are there already.
    """
    shown = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
    if not is_a(shown, Mapping) or not all(is_a(x, Tensor) for x in shown.values()) or of not in SUFFIXES:
        raise FdsError(
            "with_scores takes a module, or a dict of tensors, and what has scores",
            where="with_scores",
            got=f"{type(model).__name__}, of={of!r}",
            want=f"of={', '.join(map(repr, SUFFIXES))}",
        )
    if not (patterns and all(is_a(p, str) for p in patterns) and is_int(key) and is_a(zeros, bool)):
        raise FdsError("with_scores takes patterns of names", got=repr((*patterns, zeros, key))[:80], want='"*.weight"')
    if (of == "heads") != is_int(num_heads, 1):
        raise FdsError("with_scores takes a number of heads, of heads", where="num_heads", got=repr(num_heads))
    names = [n for n in shown if n in tree.match(patterns, shown, what="with_scores") and shown[n].dim() > 1]
    scores = {}
    for name in names:
        like, score = shown[name], name + SUFFIXES[of]
        if score in shown or not like.is_floating_point() or is_score(name):
            raise FdsError("there are scores already, or can be none", where=name, got=str(like.dtype))
        shape = {"weights": tuple(like.shape), "rows": (like.shape[0], 1), "heads": (1, num_heads)}[of]
        scores[score] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if not zeros:
            bound = 1 / math.sqrt(math.prod(shape[1:]))
            drawn = random.generator(random.fold_in(random.key(key), score))
            scores[score].copy_(torch.rand(shape, generator=drawn).mul_(2 * bound).sub_(bound))
    if not scores:
        raise FdsError("with_scores: patterns choose no weight of two or more dims", got=tree.named([*patterns]))
    if not isinstance(model, nn.Module):
        return {**shown, **scores}
    model = copy.deepcopy(model)
    for name, x in scores.items():
        path, _, last = name.rpartition(".")
        model.get_submodule(path).register_parameter(last, nn.Parameter(x))
    return model


def dropped(name: str, params: Mapping[str, Tensor]) -> Cut:
    """Return that nothing of scores stays."""
    return Cut(name, 0, torch.zeros(len(params[name]), dtype=torch.bool))


def summed(scores: Tensor) -> Tensor:
    """Return scores whose gradient is FAINT times what it is, as `sensitivity` takes it."""
    return scores.detach() + FAINT * (scores - scores.detach())


def sensitivity(momentum: float = 0.9) -> Optimizer:
    """Sum up how much the loss depends on what scores are of: an optimizer for scores, and for nothing else.

    Element by element, with g the gradient with respect to the mask at a score::

        s = momentum * s + |g|

    For a single weight w that is |w * dL/dw'|, w' being the weight that the loss sees: the loss's change, to first
    order, without it. With momentum 0.9 it is "snip_momentum". For a row or a head it is the sum of that over its
    numbers, with their signs. It has no learning rate; the gradient is that of the whole batch, after clips.

    Raises `OptimizerError` for a momentum outside [0, 1), and for gradients in float16, in which small ones are lost.
    Source: Lee et al. 2019, arXiv:1810.02340; Michel et al. 2019, arXiv:1905.10650.
    """
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise OptimizerError(
            "sensitivity: momentum is out of range",
            where="momentum",
            got=repr(momentum)[:60],
            want="a number in [0, 1)",
        )

    @torch.no_grad()
    def update(
        grads: Any,
        opt: Any,
        params: Any,
        *,
        step: Tensor,
        lr: Any,
        grad_scale: Tensor | None,
        skip: Tensor | None,
        segments: Any,
        axes: Any,
        out: Any = None,
    ) -> Any:
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            if torch.float16 in (p.dtype, g.dtype):
                raise OptimizerError(
                    "sensitivity: gradients of scores are too small for float16",
                    where=", ".join(dict.fromkeys(segment.name for segment in segments[i]))[:80],
                    got=f"scores in {p.dtype}, gradients in {g.dtype}",
                    want="fds.precision(torch.float16, accumulate=torch.float32, keep_float32=['*_scores'])",
                )
            g = g.view(-1).to(p.dtype).abs().div_(FAINT)
            new = p * momentum + (g if grad_scale is None else g / grad_scale)
            p.copy_(new if skip is None else torch.where(skip, p, new))
            if out is not None:
                out[i].copy_(p)
        return params, opt

    return Optimizer(
        lambda segments, *, params: {},
        update,
        lr=0.0,
        text=f"sensitivity({momentum})",
        separate=True,
        elementwise=True,
        draws=False,
    )
