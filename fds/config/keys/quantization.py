"""Quantization of weights and activations during training.

Source: `compression/config.py` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fds.config.contradiction import check_order
from fds.config.field import key
from fds.config.keys.module_groups import SHARED, ModuleGroupConfig, check_groups, schedule_offset_key
from fds.config.meaning import NotApplicable, NotYet, PartOf
from fds.config.record import Config

_KERNEL = NotApplicable("which kernel computes a formula is fds's choice")
_PRINTED = NotApplicable("a step prints nothing")


def _symmetry() -> Any:
    return key("symmetric", "whether the range is about zero or from the least to the greatest value", PartOf())


@attrs.frozen
class MixedQuantizationConfig(Config):
    """`fp16_mixed_quantize`: a weighted mean of weights and quantized weights, whose quantized share grows."""

    enabled: bool = key(False, "mix them", SHARED)
    quantize_change_ratio: float = key(0.001, "how much the quantized share grows with a step", SHARED, low=0)


@attrs.frozen
class WeightQuantizationSharedConfig(Config):
    """`shared_parameters` of weight quantization."""

    enabled: bool = key(False, "train with quantized weights", NotYet("training with quantized weights"))
    quantizer_kernel: bool = key(False, "quantize in a fused kernel", _KERNEL)
    schedule_offset: int = schedule_offset_key(0, documented=0)
    quantize_groups: int = key(1, "parts of a weight, each with a scale of its own", PartOf(), over=0)
    quantize_verbose: bool = key(False, "print when bits change", _PRINTED)
    quantization_type: Literal["symmetric", "asymmetric"] = _symmetry()
    rounding: Literal["nearest", "stochastic"] = key("nearest", "how values are rounded to the grid", PartOf())
    quantize_weight_in_forward: bool = key(
        False, "quantize where a weight is used, not where it is updated; float32 needs this", PartOf()
    )
    fp16_mixed_quantize: MixedQuantizationConfig = key(MixedQuantizationConfig, "mix both weights for a while")


@attrs.frozen
class WeightBitsConfig(Config):
    """`params` of a group of weight quantization."""

    start_bits: int | None = key(None, "bits of a weight at first", SHARED, unit="bits", over=0)
    target_bits: int | None = key(None, "bits of a weight at the end", SHARED, unit="bits", over=0)
    quantization_period: int = key(
        1, "steps for the first bit to go; each later one takes twice", SHARED, unit="steps", low=0
    )

    def check(self) -> None:
        """Raise `ConfigError` if the number of bits would increase."""
        check_order(self, "target_bits", "start_bits")


@attrs.frozen
class WeightQuantizationGroupConfig(ModuleGroupConfig):
    """A group of weight quantization."""

    params: WeightBitsConfig = key(WeightBitsConfig, "bits, and how fast they go")


@attrs.frozen
class WeightQuantizationConfig(Config):
    """`weight_quantization` of compression."""

    shared_parameters: WeightQuantizationSharedConfig = key(WeightQuantizationSharedConfig, "for all groups")
    different_groups: dict[str, WeightQuantizationGroupConfig] = key(dict, "groups of modules, by name", SHARED)

    def check(self) -> None:
        """Raise `ConfigError` for quantization without groups, or a group without bits."""
        check_groups(self, "start_bits", "target_bits")


@attrs.frozen
class ActivationQuantizationSharedConfig(Config):
    """`shared_parameters` of activation quantization."""

    enabled: bool = key(False, "train with quantized inputs of layers", NotYet("training with quantized activations"))
    quantization_type: Literal["symmetric", "asymmetric"] = _symmetry()
    range_calibration: Literal["dynamic", "static"] = key(
        "dynamic", "take the range from each token, or from a running mean", PartOf(), documented="static"
    )
    schedule_offset: int = schedule_offset_key(1000, documented=0)


@attrs.frozen
class ActivationBitsConfig(Config):
    """`params` of a group of activation quantization."""

    bits: int | None = key(None, "bits of an activation; 0.19.6 has 4 and 8", SHARED, unit="bits", over=0)


@attrs.frozen
class ActivationQuantizationGroupConfig(ModuleGroupConfig):
    """A group of activation quantization."""

    params: ActivationBitsConfig = key(ActivationBitsConfig, "bits")


@attrs.frozen
class ActivationQuantizationConfig(Config):
    """`activation_quantization` of compression."""

    shared_parameters: ActivationQuantizationSharedConfig = key(ActivationQuantizationSharedConfig, "for all groups")
    different_groups: dict[str, ActivationQuantizationGroupConfig] = key(dict, "groups of modules, by name", SHARED)

    def check(self) -> None:
        """Raise `ConfigError` for quantization without groups, or a group without bits."""
        check_groups(self, "bits")
