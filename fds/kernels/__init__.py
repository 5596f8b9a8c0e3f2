"""Kernels: Triton where the time goes, each beside a reference in plain torch. One idea, one file.

Each takes float32, float16 and bfloat16 tensors of any strides, raises a `KernelError` that names the argument for
anything else, and works under `torch.func`, `torch.utils.checkpoint`, `torch.compile` and stage-3 parameters.
"""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:
    from fds.kernels.activations._swiglu import swiglu
    from fds.kernels.activations.dropout_add import bias_dropout_add, dropout
    from fds.kernels.activations.gelu import bias_gelu, bias_gelu_linear
    from fds.kernels.attentions._rotary import rotary
    from fds.kernels.attentions.flash import flash_attention
    from fds.kernels.attentions.scaled_dot_product import attention
    from fds.kernels.attentions.softmax import masked_softmax
    from fds.kernels.choice import chosen, explained, only, prefer_triton
    from fds.kernels.losses._cross_entropy import cross_entropy
    from fds.kernels.losses._linear_cross_entropy import linear_cross_entropy
    from fds.kernels.messages.quantized import quantize
    from fds.kernels.messages.signs import pack_signs, sign_bits, signs_of
    from fds.kernels.messages.sums import dequantize, sum_messages, unpack_signs
    from fds.kernels.norms.normalization import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from fds.kernels.optimizers.elementwise import adamw, lion, sgd
    from fds.kernels.optimizers.lamb import lamb

__getattr__, __dir__ = lazily(__name__, {
    "fds.kernels.activations._swiglu": "swiglu",
    "fds.kernels.activations.dropout_add": "bias_dropout_add dropout",
    "fds.kernels.activations.gelu": "bias_gelu bias_gelu_linear",
    "fds.kernels.attentions._rotary": "rotary",
    "fds.kernels.attentions.flash": "flash_attention",
    "fds.kernels.attentions.scaled_dot_product": "attention",
    "fds.kernels.attentions.softmax": "masked_softmax",
    "fds.kernels.choice": "chosen explained only prefer_triton",
    "fds.kernels.losses._cross_entropy": "cross_entropy",
    "fds.kernels.losses._linear_cross_entropy": "linear_cross_entropy",
    "fds.kernels.messages.quantized": "quantize",
    "fds.kernels.messages.signs": "pack_signs sign_bits signs_of",
    "fds.kernels.messages.sums": "dequantize sum_messages unpack_signs",
    "fds.kernels.norms.normalization": "add_layer_norm add_rms_norm layer_norm rms_norm",
    "fds.kernels.optimizers.elementwise": "adamw lion sgd",
    "fds.kernels.optimizers.lamb": "lamb",
})

__all__ = [
    "add_layer_norm", "add_rms_norm", "adamw", "attention", "bias_dropout_add", "bias_gelu", "bias_gelu_linear",
    "chosen", "cross_entropy", "dequantize", "dropout", "explained", "flash_attention", "lamb", "layer_norm",
    "linear_cross_entropy", "lion", "masked_softmax", "only", "pack_signs", "prefer_triton", "quantize", "rms_norm",
    "rotary", "sgd", "sign_bits", "signs_of", "sum_messages", "swiglu", "unpack_signs",
]
