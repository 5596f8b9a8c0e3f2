"""Record the masks that DeepSpeed 0.19.6 makes of weights and of scores, and what its pruned modules return.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/pruning_masks.py

Each case of pruning_masks.json is a module of `torch.nn` with one way of pruning by its `enable_*_pruning`: its
parameters and input, drawn from a seed and rounded to float32, the mask, and the sum of its outputs with their squares.
Weights have no two equal magnitudes. A convolution's channels by l1 are not among the cases: 0.19.6 asks
`torch.linalg.norm` for a norm over three dims, which raises.
"""

import json
from pathlib import Path

import torch

HERE = Path(__file__).parent
CASES = [
    ("sparse", "l1", 0.5),
    ("sparse", "l1", 0.1),
    ("sparse", "topk", 0.3),
    ("row", "l1", 0.5),
    ("row", "topk", 0.7),
    ("head", "topk", 0.5),
    ("head", "topk", 0.25),
    ("channel", "topk", 0.5),
    ("conv", "l1", 0.4),
]
ROWS, COLUMNS, HEADS = 12, 16, 4


def made(index, kind):
    """Return the shapes' tensors of a case: weight, bias, scores and input."""
    g = torch.Generator().manual_seed(index)
    shape = (6, 3, 2, 2) if kind in ("channel", "conv") else (ROWS, COLUMNS)
    scores = {"sparse": shape, "row": (ROWS, 1), "head": (1, HEADS), "channel": (6, 1, 1, 1), "conv": shape}[kind]
    batch = (2, 3, 5, 5) if len(shape) == 4 else (3, COLUMNS)
    return [torch.randn(size, generator=g) for size in (shape, shape[:1], scores, batch)]


def case(index, kind, method, density):
    """Return what DeepSpeed makes of a case."""
    from deepspeed.compression.basic_layer import Conv2dLayer_Compress, LinearLayer_Compress  # pyright: ignore[reportMissingImports]

    weight, bias, scores, x = made(index, kind)
    is_conv = weight.dim() == 4
    module = Conv2dLayer_Compress(3, 6, 2) if is_conv else LinearLayer_Compress(COLUMNS, ROWS)
    module.weight.data, module.bias.data = weight.clone(), bias.clone()
    name = "sparse" if kind == "conv" else kind
    more = (HEADS,) if kind == "head" else ()
    getattr(module, f"enable_{name}_pruning")(density, method, *more)
    if method == "topk":
        parameter = "head_pruning_scores" if kind == "head" else f"{name}_mask_scores"
        getattr(module, parameter).data = scores.clone()
    setattr(module, f"{name}_pruning_enabled", True)
    mask = module.get_mask(name).detach()
    out = module(x)
    out.square().sum().backward()
    gradient = module.weight.grad
    by_scores = None
    if method == "topk":
        by_scores = getattr(module, parameter).grad.flatten().tolist()
    return {
        "kind": kind,
        "method": method,
        "density": density,
        "mask": "".join(str(int(m)) for m in mask.flatten()),
        "squares": out.square().sum().item(),
        "gradient": gradient.square().sum().item(),
        "of_scores": by_scores,
    }


def main():
    """Write the file."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    cases = [case(index, *one) for index, one in enumerate(CASES)]
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(one) for one in cases)
    text = f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n'
    (HERE / "pruning_masks.json").write_text(text)


if __name__ == "__main__":
    main()
