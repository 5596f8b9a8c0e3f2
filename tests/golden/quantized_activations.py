"""What compressed modules of DeepSpeed 0.19.6 make of inputs: the cases of quantized_activations.json.

`outputs[i]` is what a module returned of input i, all given one after another, in training; `seen[i]` the range that
QuantAct then had, (least, greatest). No case has zeros or constants alone, of which DeepSpeed makes NaN.
"""

from typing import Any

import torch

CASES = [
    {"module": module, "bits": bits, "symmetric": symmetric, "range": range_}
    for module in ("linear", "convolution")
    for bits in (8, 4)
    for symmetric in (True, False)
    for range_ in ("dynamic", "static")
]


def made(case: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return inputs of a case and parameters of its module, float32."""
    g = torch.Generator().manual_seed(CASES.index(case))
    rand = lambda *shape: torch.randn(shape, generator=g)
    if case["module"] == "linear":
        return [rand(2, 3, 5) * scale for scale in (1, 3, 0.5)], {"weight": rand(4, 5), "bias": rand(4)}
    return [rand(2, 3, 4, 4) * scale for scale in (1, 3, 0.5)], {"weight": rand(2, 3, 3, 3), "bias": rand(2)}


def cases() -> list[dict[str, Any]]:
    """Ask DeepSpeed."""
    from deepspeed.compression.basic_layer import Conv2dLayer_Compress, LinearLayer_Compress

    answers = []
    for case in CASES:
        inputs, params = made(case)
        module = LinearLayer_Compress(5, 4) if case["module"] == "linear" else Conv2dLayer_Compress(3, 2, 3)
        module.load_state_dict(params, strict=False)
        kind = "symmetric" if case["symmetric"] else "asymmetric"
        module.enable_activation_quantization(case["bits"], kind, case["range"])
        module.activation_quantization_enabled = True
        outputs, seen = [], []
        for x in inputs:
            outputs.append(module(x).flatten().tolist())
            seen.append(getattr(module.activation_quantizer, "x_min_max", torch.zeros(0)).tolist())
        answers.append({**case, "outputs": outputs, "seen": seen})
    return answers
