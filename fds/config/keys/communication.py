"""Communication of gradients between ranks, and gradient clipping."""

from __future__ import annotations

from typing import Literal

import attrs
import torch

from fds.config.field import key
from fds.config.meaning import NotApplicable, NotYet, argument
from fds.config.record import Config

Message = Literal["fp32", "fp16", "bf16"]
Dtype = Literal[
    "fp32",
    "fp16",
    "bf16",
    "float32",
    "float16",
    "bfloat16",
    "float",
    "half",
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
]
DTYPES = {
    name: dtype
    for dtype, names in (
        (torch.float32, ("fp32", "float32", "float", "torch.float32")),
        (torch.float16, ("fp16", "float16", "half", "torch.float16")),
        (torch.bfloat16, ("bf16", "bfloat16", "torch.bfloat16")),
    )
    for name in names
}


@attrs.frozen
class CommunicationConfig(Config):
    """Keys of the top level on the communication of gradients."""

    communication_data_type: Message | None = key(
        None,
        "dtype in which gradients are sent; null: that of the parameters in the step",
        argument("precision", name="reduce"),
    )
    seq_parallel_communication_data_type: Message = key(
        "fp32",
        "dtype in which gradients are sent where ranks share a sequence, in place of the one above",
        argument("precision", name="reduce", note="on a mesh with an axis sp"),
    )
    prescale_gradients: bool = key(
        False,
        "divide gradients by the number of ranks before they are summed, not after",
        argument("shard_optimizer", name="predivide", note="the number of ranks"),
    )
    gradient_predivide_factor: float = key(
        1.0,
        "divide gradients by this before they are summed, and by the rest after",
        argument("shard_optimizer", name="predivide"),
        over=0,
    )
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean",
        "what the update takes of the ranks' gradients",
        NotYet("the sum of the ranks' gradients in place of their mean", nothing=("mean",)),
    )
    sparse_gradients: bool = key(
        False,
        "send only the rows of embeddings' gradients that are not 0, at stages 0 and 1",
        argument("shard_optimizer", name="gradients", note="`transports.rows()` for each embedding of the module"),
    )
    disable_allgather: bool = key(
        False, "nothing: 0.19.6 reads it and does not use it", NotApplicable("it has no effect in DeepSpeed either")
    )


@attrs.frozen
class ClippingConfig(Config):
    """The key of the top level on gradient clipping."""

    gradient_clipping: float = key(
        1.0,
        "bound of the norm of all gradients together; 0: none",
        argument("clip_by_global_norm", name="max_norm"),
        low=0,
    )
