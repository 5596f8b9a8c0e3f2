"""Generation between updates, as learning from feedback needs it.

Source: `runtime/config.py` and `runtime/hybrid_engine.py` of 0.19.6.
"""

from __future__ import annotations

import attrs

from fds.config.contradiction import contradiction
from fds.config.meaning import NotYet, Part
from fds.config.record import AUTO, Config, key


@attrs.frozen
class HybridEngineConfig(Config):
    """`hybrid_engine`: the model that is trained also generates, with kernels for that."""

    enabled: bool = key(False, "generate with the parameters that are trained", NotYet("generation between updates"))
    max_out_tokens: int = key(512, "length of prompt and answer at most", Part(), unit="tokens", over=0)
    inference_tp_size: int = key(1, "ranks that share a layer in generation", Part(), unit="ranks", over=0)
    release_inference_cache: bool = key(False, "free the keys and values of attention before training goes on", Part())
    pin_parameters: bool = key(True, "gather all layers of stage 3 once for an answer, not layer by layer", Part())
    tp_gather_partition_size: int = key(8, "layers that are gathered at once, to be shared", Part(), unit="layers",
                                        over=0)  # fmt: skip
    enable_cuda_graph: bool = key(False, "replay the kernels of a token as a graph", Part())

    def check(self) -> None:
        """Raise `ConfigError` for a graph of what does not stay where it is."""
        if self.enable_cuda_graph is True and self.release_inference_cache is True:
            raise contradiction(self, "a graph needs the memory that is released", "enable_cuda_graph",
                                "release_inference_cache", want="one of them")  # fmt: skip
        if self.enable_cuda_graph is True and self.inference_tp_size not in (1, AUTO):
            raise contradiction(self, "a graph is of one rank", "enable_cuda_graph", "inference_tp_size",
                                want="one of them")  # fmt: skip
