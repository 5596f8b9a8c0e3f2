"""Activation checkpointing: where checkpointed activations are kept between forward and backward.

In DeepSpeed the model decides which activations are recomputed; these keys say how.
"""

from __future__ import annotations

import attrs

from fds.config.field import key
from fds.config.meaning import NotApplicable, NotYet, argument
from fds.config.record import Config


@attrs.frozen
class ActivationCheckpointingConfig(Config):
    """`activation_checkpointing`: how the inputs of recomputed layers are kept."""

    partition_activations: bool = key(
        False, "share kept inputs between tensor-parallel ranks", NotYet("activations shared between ranks")
    )
    cpu_checkpointing: bool = key(False, "keep inputs in host memory", argument("checkpoint_activations", name="store"))
    contiguous_memory_optimization: bool = key(
        False,
        "copy kept inputs into one buffer",
        NotApplicable("torch's allocator holds them; there is nothing to defragment"),
    )
    number_checkpoints: int | None = key(None, "how many such buffers", NotApplicable("there are none"), low=0)
    synchronize_checkpoint_boundary: bool = key(
        False, "wait for the GPU at each", NotApplicable("it measures and changes nothing")
    )
    profile: bool = key(False, "time them", NotApplicable("torch.profiler shows them by name"))
