"""Train factors of low rank beside weights that stay as they are.

Fills:  added, frozen, modules,  State:  the factors, parameters beside their weights; of what is frozen no moments
        view where form="view"
Law:    the hand-written loop whose weights are W + s B A, to derived rounding, in both forms; peft's numbers
Cost:   "layer": backward without the products of weights' gradients, 2 r (in + out) a token more; "view": W + B A and
        its gradient, made for each microbatch. State: 12 r (in + out) bytes a weight with Adam, where it was 12 in out
Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024, arXiv:2402.09353
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from fds.errors import FLAG, ComposeError, Rule, count, is_a, is_number
from fds.loss import Layers
from fds.step import AllBut, Step, fill, transform
from fds.transforms.lora.in_layers import adapted
from fds.transforms.lora.low_rank import LowRank

Form = Literal["layer", "view"]
TRAINED = "*lora_[ABM].*"


def _is_name(x: Any) -> bool:
    return is_a(x, str) and x.isidentifier()


@transform(
    several=True,
    rank=count(": {name} is that of factors", 1),
    alpha=Rule(
        lambda x: is_number(x) and 0 < x < math.inf, ": {name} scales a product", "a finite number > 0"
    ).or_none(),
    form=Rule(("layer", "view").__contains__, ": no such {name}", '"layer" or "view"'),
    stabilized=FLAG,
    dora=FLAG,
    dropout=Rule(lambda x: is_number(x) and 0 <= x < 1, ": {name} is a probability", "0 <= dropout < 1"),
    name=Rule(_is_name, ": {name} is part of names", '"default", say'),
)
def lora(
    *patterns: str,
    rank: int,
    alpha: float | None = None,
    form: Form = "layer",
    stabilized: bool = False,
    dora: bool = False,
    dropout: float = 0.0,
    train: Sequence[str] = (),
    name: str = "default",
):
    """Freeze all parameters, and train factors A (rank, in) and B (out, rank) beside some: W + alpha / rank * B A.

    `step.init` adds them: of the weight "0.q_proj.weight" they are "0.q_proj.lora_A.default.weight" and
    "0.q_proj.lora_B.default.weight". A is uniform in 1 / sqrt(in), B zero. They are parameters as any other: sharded,
    saved, averaged. `fds.bake` returns a model with the product in its weights; `fds.adapters` reads and writes files.

    Args:
        patterns: of names of weights; `*` crosses dots, and `(q|k)_proj` is either. Of these, the ones of two dims.
        rank: of the factors.
        alpha: of the scale; None: the rank, which scales by 1.
        form: "layer": linear layers compute x W^T + s x A^T B^T. "view": the loss sees W + s B A, whatever it
            does with it.
        stabilized: scale by alpha / sqrt(rank).
        dora: train the lengths of rows apart from their directions, as "lora_M": what is added to the length of W's.
        dropout: of what A is given; of "layer" alone.
        train: patterns of parameters that are trained too, such as a new head's.
        name: of the adapter. Several of different names stand on one base, and add up; `fds.freeze("*.lora_?.first.*")`
            keeps one of them as it is.

    It stands before `tensor_parallel` and `pipeline`, which divide what it adds. Raises `ComposeError` for anything
    else, for layers that are not linear, for "layer" with `dora` after another adapter of the same weight, and for
    views with `dora` of layers that a tensor axis divides by their inputs; `StateError` at init for a pattern that
    chooses no weight, and for parameters that are no dict by name.
    """
    if not patterns or not all(is_a(p, str) and p for p in patterns):
        raise ComposeError("lora takes patterns of names of weights", got=repr(patterns)[:80], want='"*.q_proj.weight"')
    if is_a(train, str) or not is_a(train, list | tuple) or not all(is_a(p, str) and p for p in train):
        raise ComposeError("lora takes patterns of what is trained too", where="train", got=repr(train)[:80])
    if dropout and form != "layer":
        raise ComposeError(
            "lora: a view has no activations to drop", got=f"dropout={dropout}, form={form!r}", want='form="layer"'
        )
    scaled = float(rank if alpha is None else alpha)
    described = LowRank(tuple(patterns), rank, scaled, stabilized, name, form, float(dropout), dora)

    def apply(step: Step) -> Step:
        if any(entry.role in ("tensor", "stage") for entry in step.topology):
            raise ComposeError(
                "lora stands before what divides parameters over ranks",
                got=", ".join(map(str, step.composition)),
                want="lora before tensor_parallel and pipeline",
            )
        loss, eval_loss = step.loss, step.eval_loss
        adapter, modules, names = adapted(described, [loss] if eval_loss is loss else [loss, eval_loss])
        layered = [x for x in step.added if isinstance(x, LowRank) and x.form == "layer"]
        if dora and form == "layer" and (both := [n for n in names if any(x.chooses(n, 2) for x in layered)]):
            raise ComposeError(
                "lora: the lengths of rows are of weights that another adapter changes in the layer",
                where=both[0],
                got=f"dora=True after {layered[-1]!r}",
                want="the adapter with dora=True first, or form='view'",
            )
        if form == "layer" and modules is None:
            raise ComposeError(
                "lora finds no linear layer that a pattern chooses in the loss",
                got=repr(patterns)[:80],
                want="patterns of weights of fds.Layers, or of the module of fds.functional that the loss calls",
                hint="form='view' needs no modules",
            )
        others = [x for x in step.frozen if isinstance(x, AllBut) and TRAINED in x.patterns]  # of other adapters
        names_trained = dict.fromkeys([TRAINED, *(pattern for x in others for pattern in x.patterns), *train])
        step = attrs.evolve(step, frozen=tuple(x for x in step.frozen if x not in others))
        step = fill(step, added=adapter, frozen=AllBut(tuple(names_trained)))
        if modules is not None:
            step = fill(step, modules=modules)
        if form == "view":
            step = fill(step, view=adapter)
        loss, other = (x.adding(names, draws=dropout > 0) if isinstance(x, Layers) else x for x in (loss, eval_loss))
        return attrs.evolve(step, loss=loss, eval_loss=loss if eval_loss is step.loss else other)

    return apply
