"""`TransformerConfig`: the settings of a transformer layer, and what it saves for backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from fds.errors import KernelError, did_you_mean, is_int, is_number
from fds.kernels import arguments

# DeepSpeed settings that are set elsewhere here; the docstring says where.
ELSEWHERE = {"local_rank", "seed", "fp16", "max_seq_length", "huggingface", "layer_id", "test_gemm"}
GELU = {"gelu_tanh": "tanh", "gelu_erf": "none"}  # values of torch's `approximate`


def _count(config: Any, field: attrs.Attribute, value: Any) -> None:
    if not is_int(value, 1):
        raise KernelError(f"{field.name} is not a count", where=field.name, got=repr(value), want="an int >= 1")


def _ratio(config: Any, field: attrs.Attribute, value: Any) -> None:
    arguments.ratio(field.name, value)


def _flag(config: Any, field: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, bool):
        raise KernelError(f"{field.name} is not a bool", where=field.name, got=repr(value), want="True or False")


def _not_negative(config: Any, field: attrs.Attribute, value: Any) -> None:
    if not (is_number(value) and math.isfinite(value) and value >= 0):
        raise KernelError(
            f"{field.name} is negative or not a number", where=field.name, got=repr(value), want="a finite number >= 0"
        )


def _setting(validator: Any, *default: Any) -> Any:
    return attrs.field(validator=validator, **({"default": default[0]} if default else {}))


def _four_times_hidden(size: int | None, config: Any) -> Any:
    h = config.hidden_size  # not validated yet
    return 4 * h if size is None and isinstance(h, int) else size


_optional_count = attrs.validators.optional(_count)


@attrs.frozen(kw_only=True)
class TransformerConfig:
    """Settings of a `TransformerLayer`, named as those of DeepSpeed's transformer kernel.

    With B sequences of S tokens, h = `hidden_size`, i = `intermediate_size`, a = `heads`:

    =======================  ===========================================================================================
    field                    meaning
    =======================  ===========================================================================================
    hidden_size              h, a multiple of `heads`
    heads                    a
    num_hidden_layers        layers of the model; required by `adjust_init_range`, else unused
    intermediate_size        i; None: 4h
    batch_size               largest B, larger batches are a `KernelError`; None: any
    attn_dropout_ratio       dropout of the attention probabilities
    hidden_dropout_ratio     dropout of the outputs of attention and feed-forward
    initializer_range        standard deviation of the initial weights; biases are 0
    adjust_init_range        divide initializer_range of the output projections by sqrt(2 * num_hidden_layers)
    layer_norm_eps           added to the variances
    pre_layer_norm           normalize the inputs of attention and feed-forward (True), or the residual sums (BERT)
    activation               "gelu_tanh" as in DeepSpeed, or "gelu_erf" as in BERT
    causal                   a token attends to itself and to the tokens before it
    normalize_invertible     recompute the inputs of layer norms from their outputs: saves 2BSh elements
    gelu_checkpoint          recompute the output of the activation: saves BSi elements
    attn_dropout_checkpoint  recompute attention probabilities under dropout: saves 2BaSS elements
    stochastic_mode          no effect (see below)
    return_tuple             return `(hidden_states,)`, as Hugging Face's layers did
    training                 initial mode of the layer: `train()` or `eval()`
    =======================  ===========================================================================================

    The saving of `normalize_invertible` is that in a stack: with post layer norm one of the two outputs is the layer's,
    which the next layer saves anyway. A norm whose weight contains a 0 cannot be inverted (see `layer_norm`).
    `attn_dropout_checkpoint` on a GPU requires heads of at most 512 bytes: 256 elements of 16 bits, 128 of 32.
    `stochastic_mode` is accepted and has no effect. Without dropout on attention a layer on a GPU uses torch's, whose
    backward may sum gradients in an order that varies; `torch.use_deterministic_algorithms(True)` fixes the order.
    Everything else in a layer is deterministic.

    These settings of DeepSpeed are replaced here:

    ==================  =====================================================================
    local_rank          a layer runs where its parameters are
    seed                dropout draws from torch's generator, which a step seeds from its key
    fp16                `fds.precision`, `fds.autocast` or `layer.to(dtype)`
    max_seq_length      not needed: any length runs without padding
    huggingface         the older name of `return_tuple`
    layer_id            the index of a layer in `fds.Layers`
    test_gemm           not needed: matrix products are torch's
    ==================  =====================================================================

    `from_deepspeed` takes all of them. `attrs.evolve(config, ...)` changes a field.
    Raises `KernelError`, which names the field.

    >>> TransformerConfig(hidden_size=1024, heads=16, num_hidden_layers=24).intermediate_size
    4096
    """

    hidden_size: int = _setting(_count)
    heads: int = _setting(_count)
    num_hidden_layers: int | None = _setting(_optional_count, None)
    intermediate_size: int = attrs.field(
        default=None, converter=attrs.Converter(_four_times_hidden, takes_self=True), validator=_count
    )
    batch_size: int | None = _setting(_optional_count, None)
    attn_dropout_ratio: float = _setting(_ratio, 0.1)
    hidden_dropout_ratio: float = _setting(_ratio, 0.1)
    initializer_range: float = _setting(_not_negative, 0.02)
    adjust_init_range: bool = _setting(_flag, True)
    layer_norm_eps: float = _setting(_not_negative, 1e-12)
    pre_layer_norm: bool = _setting(_flag, True)
    activation: str = _setting(None, "gelu_tanh")
    causal: bool = _setting(_flag, False)
    normalize_invertible: bool = _setting(_flag, False)
    gelu_checkpoint: bool = _setting(_flag, False)
    attn_dropout_checkpoint: bool = _setting(_flag, False)
    stochastic_mode: bool = _setting(_flag, False)
    return_tuple: bool = _setting(_flag, False)
    training: bool = _setting(_flag, True)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise KernelError(
                "hidden_size is not divisible by heads",
                where="hidden_size",
                got=f"hidden_size={self.hidden_size}, heads={self.heads}",
                want="a multiple of heads",
            )
        if self.activation not in GELU:
            raise KernelError(
                "unknown activation", where="activation", got=repr(self.activation), want=" or ".join(map(repr, GELU))
            )
        if self.adjust_init_range and self.num_hidden_layers is None:
            raise KernelError(
                "adjust_init_range needs the number of layers",
                where="num_hidden_layers",
                got="None",
                want="the number of layers of the model",
                hint="or adjust_init_range=False",
            )

    @classmethod
    def from_deepspeed(cls, settings: Mapping[str, Any]) -> TransformerConfig:
        """Return the config of a DeepSpeedTransformerConfig's arguments, by name; -1 there means "not given".

        Settings that are replaced here are ignored. Raises `KernelError` for unknown names and for missing sizes and
        dropout ratios, which have no safe default.
        """
        fields = {field.name for field in attrs.fields(cls)}
        unknown = settings.keys() - fields - ELSEWHERE
        if unknown:
            name = min(unknown)
            raise KernelError(
                f"{name} is not a setting of DeepSpeed's transformer kernel",
                where=name,
                got=repr(settings[name]),
                hint=did_you_mean(name, fields | ELSEWHERE),
            )
        values: dict = dict.fromkeys(("hidden_size", "heads", "attn_dropout_ratio", "hidden_dropout_ratio"), -1)
        values |= {"return_tuple": settings.get("huggingface", False)} | dict(settings)
        optional = {"batch_size", "intermediate_size", "num_hidden_layers", "initializer_range"}
        chosen: dict = {n: x for n, x in values.items() if n in fields and not (x == -1 and n in optional)}
        return cls(**chosen)

    @property
    def approximate(self) -> str:
        """The value of torch's `approximate`: "tanh" or "none"."""
        return GELU[self.activation]

    @property
    def output_range(self) -> float:
        """Standard deviation of the initial weights of the two output projections."""
        if not self.adjust_init_range or self.num_hidden_layers is None:
            return self.initializer_range
        return self.initializer_range / math.sqrt(2 * self.num_hidden_layers)
