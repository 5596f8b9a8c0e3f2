"""DeepSpeed's engine without three defects, each of which would hide whatever else differs in its cases.

Each is in `fds.config.decisions`; what is repaired is compared in full, where a listed difference could not be.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def engine(model: torch.nn.Module, trained: list, data: dict[str, Any]) -> Any:
    """Return the engine of a model.

    16 bit at stage 0 begins without an update on gradients of zero, and in float16 the loss is scaled there. On a CPU,
    gradients that are not contiguous are added among the ranks.
    """
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime import torch_autocast  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer as Unfused  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.zero import stage_1_and_2  # pyright: ignore[reportMissingImports]

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # or an engine of another JSON before it would decide
    stage_1_and_2.split_half_float_double = _by_dtype
    with mock.patch.object(Unfused, "initialize_optimizer_states"):
        made = deepspeed.initialize(model=model, model_parameters=trained, config=json.loads(json.dumps(data)))[0]
    if "fp16" in data and isinstance(made.optimizer, Unfused):
        _scale_losses(made)
    return made


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of each dtype; DeepSpeed looks for the type `torch.cpu.FloatTensor`, and finds none."""
    return [[x for x in tensors if x.dtype is dtype] for dtype in dict.fromkeys(x.dtype for x in tensors)]


def _scale_losses(made: Any) -> None:
    """Multiply losses by the scale, as all other stages do, and divide it out of the norm that is reported."""
    backward, norm, used = made.backward, made.get_global_grad_norm, [1.0]

    def scaled(loss: Tensor) -> Tensor:
        used[0] = made.optimizer.loss_scale
        return backward(loss * used[0])

    def unscaled() -> float | None:
        found = norm()
        return None if found is None else float(found) / used[0]

    made.backward, made.get_global_grad_norm = scaled, unscaled
