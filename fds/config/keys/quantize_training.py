"""Quantization outside of `compression_training`: by curvature (MoQ), and of weights at initialization.

Source: `runtime/config.py`, `inference/config.py` and `runtime/eigenvalue.py` of 0.19.6.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fds.config.field import key
from fds.config.meaning import Elsewhere, NotApplicable, NotYet
from fds.config.record import Config

_CURVATURE = Elsewhere("config.eigenvalues(loss, params, batch)", "after any step")


@attrs.frozen
class EigenvalueConfig(Config):
    """`eigenvalue`: the curvature of the loss in each layer, which sets how fast its bits are reduced."""

    enabled: bool = key(False, "measure curvature by power iteration", _CURVATURE)
    verbose: bool = key(False, "print them", NotApplicable("they are returned"))
    max_iter: int = key(100, "iterations at most", _CURVATURE, unit="iterations", over=0)
    tol: float = key(1e-2, "relative change of the eigenvalue at which iteration ends", _CURVATURE, low=0)
    stability: float = key(1e-6, "added to what is divided by", _CURVATURE, low=0)
    gas_boundary_resolution: int = key(
        1,
        "updates from one measurement to the next",
        NotApplicable("it is measured where it is called"),
        unit="updates",
        over=0,
    )
    layer_name: str = key("bert.encoder.layer", "path of the list of layers", _CURVATURE)
    layer_num: int = key(0, "layers of that list that are measured", _CURVATURE, unit="layers", low=0)


@attrs.frozen
class QuantizeTrainingConfig(Config):
    """`quantize_training`: mixture of quantization (MoQ). 0.19.6 reads no other keys, and refuses it if enabled."""

    eigenvalue: EigenvalueConfig = key(EigenvalueConfig, "curvature of layers")


@attrs.frozen
class WeightQuantizationPlacedConfig(Config):
    """`weight_quantization` of the top level: weights that are stored quantized and not trained."""

    enabled: bool = key(True, "nothing, in 0.19.6: one of the two below asks", NotApplicable("nothing reads it"))
    num_bits: int = key(8, "bits of a weight", NotApplicable("each of the two below has its own"), unit="bits", over=0)
    q_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "whether the range is about zero", NotApplicable("each of the two below has its own")
    )
    q_groups: int = key(
        1, "parts of a weight, each with a scale", NotApplicable("each of the two below has its own"), over=0
    )
    quantized_initialization: dict[str, Any] = key(
        dict,
        "num_bits, group_size, group_dim, symmetric: of all weights, as stage 3 makes them",
        NotYet("weights that are quantized as they are made", nothing=(None, {})),
    )
    post_init_quant: dict[str, Any] = key(
        dict,
        "the same by name of module, once the model is made",
        NotYet("quantized weights for inference", nothing=(None, {})),
    )
