"""Multiply the matrices of linear layers in float8, in training and in evaluations.

Fills:  modules, layer           State:  none: parameters stay as they are
Law:    torchao's emulation, bit for bit on a CPU, its module in the place of each layer
Cost:   on a GPU that multiplies 8 bits half of these products, and six casts a layer; elsewhere only the casts
Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao.float8 0.18
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch import nn

from fds import loss as losses
from fds.compression import float8 as eight_bits
from fds.compression.float8 import RECIPES, Recipe
from fds.errors import ComposeError, Rule
from fds.step import Call, SplitDim, Step, fill, transform


@attrs.frozen(eq=False)
class Multiplying:
    """What is done in the place of a call of a linear layer; `names` are those that were chosen."""

    recipe: Recipe
    names: set[str] = attrs.field(factory=set[str], repr=False)

    @property
    def is_planned(self) -> bool:
        """Whether it follows the state: never."""
        return False

    def check(self, name: str, module: nn.Module) -> None:
        """Raise `ComposeError` for a module that is no nn.Linear, or that something else computes."""
        if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
            linear = isinstance(module, nn.Linear)
            raise ComposeError(
                "float8 multiplies in the place of nn.Linear",
                where=name,
                got=f"{type(module).__name__}, which is computed in another way" if linear else type(module).__name__,
                want="patterns that match linear layers alone",
                hint="compose float8 before what rounds inputs" if linear else _inside(name, module),
            )
        self.names.add(name)

    def plan(self, call: Call) -> None:
        """Raise `ComposeError` where ranks have parts of matrices, whose scales are of all of them."""
        for entry in call.dimensions.entries:
            cut = [x for x in sorted(self.names) if isinstance(entry.placement.lies(f"{x}.weight"), SplitDim)]
            if entry.role == "sequence" or (entry.role == "tensor" and cut):
                raise ComposeError(
                    "float8: scales are of whole matrices, and ranks have parts of them",
                    where=cut[0] if cut else "",
                    got=f"{entry!r:.80}",
                    want="patterns without what tensor_parallel divides" if cut else "float8, or context_parallel",
                )

    def run(
        self,
        plan: None,
        call: Call | None,
        name: str,
        module: Any,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what a linear layer returns."""
        (x,) = (*args, *kwargs.values())
        out = eight_bits.linear(x, module.weight, self.recipe)
        return out if module.bias is None else out + module.bias.to(out.dtype)

    def bake(self, name: str, module: nn.Module, call: Call) -> None:
        """Raise `ComposeError`: a plain module multiplies in the dtype of its weights."""
        raise ComposeError(
            "bake makes no module that multiplies in float8",
            where=name,
            got=f"float8(..., {self.recipe!r})",
            want="bake of the composition without float8, whose weights are the same",
        )


def _inside(name: str, module: Any) -> str:
    """Say which linear layer a module has."""
    inner = [path for path, part in module.named_modules() if path and type(part) is nn.Linear]
    return f"it has {name}.{inner[0]}" if inner else ""


@transform(
    several=True,
    layers=losses.PATTERNS,
    recipe=Rule(RECIPES.__contains__, ": no such {name}", " or ".join(map(repr, RECIPES))),
)
def float8(layers: str | Sequence[str], recipe: Recipe = "tensorwise"):
    """Multiply in float8 in the place of some linear layers: forward, and both products of backward.

    Parameters, what an optimizer does and what layers return keep their dtypes: the operands of a product are cast to 8
    bits with scales, just before. On a GPU of compute capability 8.9 or more `torch._scaled_mm` multiplies, and sizes
    that are no multiples of 16 are filled up with zeros. Elsewhere operands are cast back and multiplied in float32,
    which is slower than without, and says what a GPU would make of a model.

    Args:
        layers: patterns of paths of `nn.Linear` modules (`*` crosses dots), which begin with the layer's name in
            `fds.Layers`.
        recipe: "tensorwise": a scale for each tensor, e4m3 forward and e5m2 for gradients that come in. "rowwise": a
            power of two for each row, e4m3 throughout.

    Raises `ComposeError` for anything else, patterns that match other modules or nothing, a module matched twice, and
    where ranks have parts of a layer's matrices or of its tokens.
    """
    rule = Multiplying(recipe)

    def apply(step: Step) -> Step:
        modules = losses.at_submodules((step.loss, step.eval_loss), layers, rule, "float8")
        if both := losses.overlapping(step.modules, modules):
            raise ComposeError(
                "float8: two multiply in the place of one module",
                where=both[0],
                got="patterns that both match it",
                want="each module matched once",
            )
        return fill(step, modules=modules, layer=modules.around)

    return apply
