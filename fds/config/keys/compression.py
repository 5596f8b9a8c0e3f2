"""Compression during training: fewer layers, fewer bits, fewer weights.

Source: `compression/config.py` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

import attrs

from fds.config.contradiction import check_length
from fds.config.field import key
from fds.config.keys.pruning import HeadPruningConfig, RowPruningConfig, SparsePruningConfig
from fds.config.keys.quantization import ActivationQuantizationConfig, WeightQuantizationConfig
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config


@attrs.frozen
class LayerReductionConfig(Config):
    """`layer_reduction`: a student of fewer layers is initialized with layers of a teacher."""

    enabled: bool = key(False, "copy layers of a teacher into a student", NotYet("layers of a teacher for a student"))
    keep_number_layer: int | None = key(None, "layers of the student", PartOf(), unit="layers", over=0)
    module_name_prefix: str | None = key(None, "path of the list of layers, in both", PartOf())
    teacher_layer: tuple[int, ...] | None = key(None, "which layer of the teacher each of the student's gets", PartOf())
    other_module_name: tuple[str, ...] | None = key(None, "paths of further modules that are copied", PartOf())

    def check(self) -> None:
        """Raise `ConfigError` if the number of layers differs from the number of copied layers."""
        check_length(self, "keep_number_layer", "teacher_layer")


@attrs.frozen
class CompressionConfig(Config):
    """`compression_training`."""

    layer_reduction: LayerReductionConfig = key(LayerReductionConfig, "fewer layers")
    weight_quantization: WeightQuantizationConfig = key(WeightQuantizationConfig, "fewer bits for weights")
    activation_quantization: ActivationQuantizationConfig = key(
        ActivationQuantizationConfig, "fewer bits for what layers take"
    )
    sparse_pruning: SparsePruningConfig = key(SparsePruningConfig, "fewer weights, anywhere or in blocks")
    row_pruning: RowPruningConfig = key(RowPruningConfig, "fewer outputs of linear layers")
    head_pruning: HeadPruningConfig = key(HeadPruningConfig, "fewer heads of attention")
    channel_pruning: RowPruningConfig = key(RowPruningConfig, "fewer channels of convolutions")
