"""Activation checkpointing: where checkpointed activations are kept between forward and backward.

In DeepSpeed the model decides which activations are recomputed; these keys say how.
"""

from __future__ import annotations

import attrs

from fds.config.field import key
from fds.config.meaning import Elsewhere, NotApplicable, argument
from fds.config.record import Config


@attrs.frozen
class ActivationCheckpointingConfig(Config):
    """`activation_checkpointing`: how the inputs of recomputed layers are kept."""

    partition_activations: bool = key(
        False,
        "share kept inputs between tensor-parallel ranks",
        argument("checkpoint_activations", name="partition", note='over mesh["tp"], where the mesh has it'),
    )
    cpu_checkpointing: bool = key(False, "keep inputs in host memory", argument("checkpoint_activations", name="store"))
    contiguous_memory_optimization: bool = key(
        False,
        "copy kept inputs into one buffer",
        argument("checkpoint_activations", name="contiguous", note="where layers are computed again"),
    )
    number_checkpoints: int | None = key(
        None,
        "how many groups of layers have a place in the buffer",
        argument("checkpoint_activations", name="number", note="0 is all; without that buffer it has no effect"),
        low=0,
    )
    synchronize_checkpoint_boundary: bool = key(
        False,
        "wait for the GPU at the borders of each",
        NotApplicable("nothing of fds runs beside the computing stream there that would have to be waited for"),
    )
    profile: bool = key(
        False,
        "measure how long they take, forward and backward",
        Elsewhere(
            "config.timed(mesh)", "of every layer: forward, computed again, and backward, as `fds.timed(layers=True)`"
        ),
    )
