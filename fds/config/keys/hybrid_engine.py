"""The hybrid engine: generation between updates, as in reinforcement learning from human feedback.

Source: `runtime/config.py` and `runtime/hybrid_engine.py` of 0.19.6.
"""

from __future__ import annotations

import attrs

from fds.config.contradiction import contradiction
from fds.config.field import AUTO, key
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config


@attrs.frozen
class HybridEngineConfig(Config):
    """`hybrid_engine`: the trained model also generates, with inference kernels."""

    enabled: bool = key(False, "generate with the parameters that are trained", NotYet("generation between updates"))
    max_out_tokens: int = key(512, "length of prompt and answer at most", PartOf(), unit="tokens", over=0)
    inference_tp_size: int = key(1, "ranks that share a layer in generation", PartOf(), unit="ranks", over=0)
    release_inference_cache: bool = key(
        False, "free the keys and values of attention before training goes on", PartOf()
    )
    pin_parameters: bool = key(True, "gather all layers of stage 3 once for an answer, not layer by layer", PartOf())
    tp_gather_partition_size: int = key(
        8, "layers that are gathered at once, to be shared", PartOf(), unit="layers", over=0
    )
    enable_cuda_graph: bool = key(False, "replay the kernels of a token as a graph", PartOf())

    def check(self) -> None:
        """Raise `ConfigError` for a CUDA graph of memory that is released, or of several ranks."""
        if self.enable_cuda_graph is True and self.release_inference_cache is True:
            raise contradiction(
                self,
                "a CUDA graph needs the memory that is released",
                "enable_cuda_graph",
                "release_inference_cache",
                want="one of them",
            )
        if self.enable_cuda_graph is True and self.inference_tp_size not in (1, AUTO):
            raise contradiction(
                self,
                "a CUDA graph is limited to one rank",
                "enable_cuda_graph",
                "inference_tp_size",
                want="one of them",
            )
