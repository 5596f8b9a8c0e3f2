"""Pipeline parallelism. The number of stages is the size of the mesh's axis: `fds.mesh(pp=2, dp=-1)`."""

from __future__ import annotations

import attrs

from fds.config.field import key
from fds.config.meaning import NotApplicable, argument
from fds.config.record import Config

_OWN_NEIGHBOUR = NotApplicable("each rank of a tensor axis sends to its own neighbour")


@attrs.frozen
class PipelineConfig(Config):
    """`pipeline`; used if the mesh has an axis `pp`."""

    stages: int | str = key("auto", "how many stages", NotApplicable("the mesh says it: fds.mesh(pp=2, dp=-1)"))
    partition: str = key(
        "best",
        "which stage has which layers: best, uniform, parameters or type:REGEX",
        argument("pipeline", name="partition", note="best is parameters"),
    )
    seed_layers: bool = key(
        False, "seed each layer by its number", NotApplicable("layers are always made from keys of their own")
    )
    activation_checkpoint_interval: int = key(
        0,
        "layers per group that is computed again in backward; 0: none",
        argument("checkpoint_activations", name="every"),
        low=0,
    )
    pipe_partitioned: bool = key(True, "share messages between tensor-parallel ranks", _OWN_NEIGHBOUR)
    grad_partitioned: bool = key(True, "share gradients' messages between tensor-parallel ranks", _OWN_NEIGHBOUR)
    use_reentrant: bool = key(True, "how torch computes again", NotApplicable("never: it breaks torch.autograd.grad"))
