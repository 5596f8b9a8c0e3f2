"""Kernels: Triton where the time goes, each beside a reference in plain torch. One idea, one file.

Each takes float32, float16 and bfloat16 tensors of any strides, raises a `KernelError` that names the argument for
anything else, and works under `torch.func`, `torch.utils.checkpoint`, `torch.compile` and stage-3 parameters.
"""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:
    from fds.kernels._lamb import lamb
    from fds.kernels._rotary import rotary
    from fds.kernels._swiglu import swiglu
    from fds.kernels.block_selection import BlockSelection, select_blocks
    from fds.kernels.choice import chosen, explained, only, prefer_triton
    from fds.kernels.dropout_add import bias_dropout_add, dropout
    from fds.kernels.elementwise import adamw, lion, sgd
    from fds.kernels.fake_quantized import fake_quantize
    from fds.kernels.flash import flash_attention
    from fds.kernels.gelu import bias_gelu, bias_gelu_linear
    from fds.kernels.head_loss import linear_cross_entropy
    from fds.kernels.normalization import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from fds.kernels.quantized import quantize
    from fds.kernels.scaled_dot_product import attention
    from fds.kernels.signs import pack_signs, sign_bits, signs_of
    from fds.kernels.softmax import masked_softmax
    from fds.kernels.sparse import sparse_attention
    from fds.kernels.sums import dequantize, sum_messages, unpack_signs
    from fds.kernels.token_loss import cross_entropy

__getattr__, __dir__ = lazily(__name__, {
    "fds.kernels._swiglu": "swiglu",
    "fds.kernels.dropout_add": "bias_dropout_add dropout",
    "fds.kernels.gelu": "bias_gelu bias_gelu_linear",
    "fds.kernels._rotary": "rotary",
    "fds.kernels.flash": "flash_attention",
    "fds.kernels.scaled_dot_product": "attention",
    "fds.kernels.softmax": "masked_softmax",
    "fds.kernels.sparse": "sparse_attention",
    "fds.kernels.block_selection": "BlockSelection select_blocks",
    "fds.kernels.choice": "chosen explained only prefer_triton",
    "fds.kernels.token_loss": "cross_entropy",
    "fds.kernels.head_loss": "linear_cross_entropy",
    "fds.kernels.fake_quantized": "fake_quantize",
    "fds.kernels.quantized": "quantize",
    "fds.kernels.signs": "pack_signs sign_bits signs_of",
    "fds.kernels.sums": "dequantize sum_messages unpack_signs",
    "fds.kernels.normalization": "add_layer_norm add_rms_norm layer_norm rms_norm",
    "fds.kernels.elementwise": "adamw lion sgd",
    "fds.kernels._lamb": "lamb",
})

__all__ = [
    "BlockSelection", "add_layer_norm", "add_rms_norm", "adamw", "attention", "bias_dropout_add", "bias_gelu",
    "bias_gelu_linear", "chosen", "cross_entropy", "dequantize", "dropout", "explained", "fake_quantize",
    "flash_attention", "lamb", "layer_norm", "linear_cross_entropy", "lion", "masked_softmax", "only",
    "pack_signs", "prefer_triton", "quantize", "rms_norm", "rotary", "select_blocks", "sgd", "sign_bits",
    "signs_of", "sparse_attention", "sum_messages", "swiglu", "unpack_signs",
]
