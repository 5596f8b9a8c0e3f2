"""Record what DeepSpeed's and torchao's quantizers make of two rows of 16 weights, and MoQ of one weight in time.

    .venv-peers/bin/python -m pip install --target /tmp/torchao --no-deps torchao==0.18.0
    DS_ACCELERATOR=cpu PYTHONPATH=/tmp/torchao .venv-peers/bin/python tests/golden/weight_grids.py

weight_grids.json: `weights`, and of `grids` per case the quantizer's `numbers`, for torchao with the gradient of their
sum beside `ones`. torchao's fake quantizer is asked for symmetric grids, and its integer tensor for the others, of
which the fake quantizer rounds zero points in units of the weight. `moq`, per case: the bits after each call of
DeepSpeed's `Quantizer`, which is given the same weights each time, and what it made of the first 4.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
WEIGHTS = [[round(((7 * i * i + 3 * i + 5) % 41 - 20) / 37, 4) for i in range(j, j + 16)] for j in (0, 16)]
CALLS = 20


def deepspeed_grids() -> list[dict]:
    from deepspeed.compression import utils  # pyright: ignore[reportMissingImports]

    cases, x = [], torch.tensor(WEIGHTS)
    for bits in (16, 8, 6, 4, 3, 2, 1):
        few = {2: utils.TernaryQuantizer, 1: utils.BinaryQuantizer}
        for symmetric in (True, False) if bits > 2 else (True,):
            quantizer = few.get(bits) or (utils.SymQuantizer if symmetric else utils.AsymQuantizer)
            for groups in (1, 2, 4):
                numbers = quantizer.apply(x, bits, None, None, groups).tolist()
                cases.append(case("deepspeed", bits, symmetric, 32 // groups, "float32", numbers))
    return cases


def torchao_grids() -> list[dict]:
    from torchao.quantization.qat import IntxFakeQuantizeConfig  # pyright: ignore[reportMissingImports]
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer  # pyright: ignore[reportMissingImports]
    from torchao.quantization.quant_primitives import MappingType  # pyright: ignore[reportMissingImports]
    from torchao.quantization.quantize_.workflows import IntxUnpackedToInt8Tensor as Shifted  # pyright: ignore[reportMissingImports]

    cases = []
    for bits in range(1, 9):
        kind = getattr(torch, f"int{bits}")
        for group in (16, 8):
            for dtype in ("float32", "bfloat16"):
                x = torch.tensor(WEIGHTS, dtype=getattr(torch, dtype), requires_grad=True)
                y = IntxFakeQuantizer(IntxFakeQuantizeConfig(kind, group_size=group, is_symmetric=True))(x)
                (ones,) = torch.autograd.grad(y.sum(), x)
                kept = case("torchao", bits, True, group, dtype, y.tolist())
                cases.append({**kept, "ones": ones.round().tolist()} if dtype == "float32" else kept)
            x = torch.tensor(WEIGHTS)
            if bits > 1:
                shifted = Shifted.from_hp(x, (1, group), kind, mapping_type=MappingType.ASYMMETRIC)
                cases.append(case("torchao", bits, False, group, "float32", shifted.dequantize().tolist()))
    return cases


def case(scheme: str, bits: int, symmetric: bool, group: int, dtype: str, numbers: list) -> dict:
    kept = {"scheme": scheme, "bits": bits, "symmetric": symmetric, "group": group, "dtype": dtype}
    return {**kept, "numbers": numbers}


def moq() -> list[dict]:
    from deepspeed.runtime.quantize import Quantizer  # pyright: ignore[reportMissingImports]

    cases = []
    for start, target, period, change in ((8, 4, 1, None), (6, 3, 2, 0.125), (4, 1, 1, 0.25), (5, 5, 1, 0.0625)):
        quantizer = Quantizer(2, change is not None, change or 0.0, "symmetric", "nearest")
        steps = []
        weight: Any = torch.nn.Parameter(torch.tensor(WEIGHTS))
        weight.start_bits, weight.target_bits, weight.q_period = start, target, period
        for _ in range(CALLS):
            weight.data = torch.tensor(WEIGHTS)  # of the master weights, which an update would have changed
            quantizer.quantize([[weight]], False, False)
            steps.append({"bits": weight.start_bits, "numbers": weight.data[0, :4].tolist()})
        cases.append({"bits": [start, target], "period": period, "mixing": change, "calls": steps})
    return cases


def main() -> None:
    """Write the file."""
    lines = lambda cases: "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]"
    versions = {name: version(name) for name in ("deepspeed", "torch", "torchao")}
    fields = {
        "versions": json.dumps(versions),
        "weights": json.dumps(WEIGHTS),
        "grids": lines(deepspeed_grids() + torchao_grids()),
        "moq": lines(moq()),
    }
    text = ",\n".join(f'"{name}": {value}' for name, value in fields.items())
    (HERE / "weight_grids.json").write_text(f"{{{text}}}\n")


if __name__ == "__main__":
    sys.exit(main())
