"""Record what torchao's linear layers in float8 compute on a CPU, forward and backward.

    .venv-peers/bin/python -m pip install --target /tmp/torchao --no-deps torchao==0.18.0
    PYTHONPATH=/tmp/torchao .venv-peers/bin/python tests/golden/float8.py

float8.json, per case: `y`, `dx` and `dw` of `made(case)`, flat. Numbers of a case that `adds_exactly` are quarters to
14, whose scales are powers of two: sums are the same in any order, and so on any CPU.
"""

import dataclasses
import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
CASES = [
    {"recipe": recipe, "dtype": dtype, "shape": list(shape), "adds_exactly": exact}
    for recipe, dtype, shape, exact in product(
        ("tensorwise", "rowwise"), ("float32", "bfloat16"), ((6, 16), (2, 3, 16)), (True, False)
    )
]


def made(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input (..., 16), a weight (8, 16) and the gradient that comes in (..., 8)."""
    g = torch.Generator().manual_seed(CASES.index(case))
    shapes = case["shape"], (8, 16), (*case["shape"][:-1], 8)
    if not case["adds_exactly"]:
        return tuple((torch.randn(x, generator=g) * 3).to(getattr(torch, case["dtype"])) for x in shapes)  # pyright: ignore[reportReturnType]
    numbers = [torch.randint(-55, 56, x, generator=g) / 4 for x in shapes]
    for x in numbers:
        x.view(-1)[0] = 14
    return tuple(x.to(getattr(torch, case["dtype"])) for x in numbers)  # pyright: ignore[reportReturnType]


def asked(case: dict[str, Any]) -> dict[str, list[float]]:
    """Ask torchao."""
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports]

    x, weight, grad = made(case)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(case["recipe"]), emulate=True)
    plain = nn.Linear(16, 8, bias=False)
    plain.weight = nn.Parameter(weight)
    module: Any = Float8Linear.from_float(plain, config)
    y = module(x.requires_grad_())
    dx, dw = torch.autograd.grad(y, [x, module.weight], grad)
    return {name: value.flatten().tolist() for name, value in (("y", y), ("dx", dx), ("dw", dw))}


if __name__ == "__main__":
    versions = {name: version(name) for name in ("torch", "torchao")}
    lines = ",\n".join(json.dumps({**case, **asked(case)}) for case in CASES)
    (HERE / "float8.json").write_text(f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n')
