"""Kernels: Triton where the time goes, each beside a reference in plain torch. One kernel, one file.

Each takes float32, float16 and bfloat16 tensors of any strides, refuses what it cannot take with a `KernelError` that
names the argument, and works under `torch.func`, `torch.utils.checkpoint`, `torch.compile` and stage-3 parameters.
"""

from fds.kernels.adam_update import adamw
from fds.kernels.choice import chosen, only
from fds.kernels.dense import attention
from fds.kernels.dropout_add import bias_dropout_add, dropout
from fds.kernels.flash import flash_attention
from fds.kernels.gated import swiglu
from fds.kernels.gelu import bias_gelu
from fds.kernels.gelu_linear import bias_gelu_linear
from fds.kernels.head_loss import linear_cross_entropy
from fds.kernels.lamb_update import lamb
from fds.kernels.layer_normalization import add_layer_norm, layer_norm
from fds.kernels.lion_update import lion
from fds.kernels.rms_normalization import add_rms_norm, rms_norm
from fds.kernels.rotation import rotary
from fds.kernels.sgd_update import sgd
from fds.kernels.softmax import masked_softmax
from fds.kernels.token_loss import cross_entropy

__all__ = [
    "add_layer_norm", "add_rms_norm", "adamw", "attention", "bias_dropout_add", "bias_gelu", "bias_gelu_linear",
    "chosen", "cross_entropy", "dropout", "flash_attention", "lamb", "layer_norm", "linear_cross_entropy", "lion",
    "masked_softmax", "only", "rms_norm", "rotary", "sgd", "swiglu",
]  # fmt: skip
