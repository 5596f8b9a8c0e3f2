"""Elasticity: a batch size that is divisible by many numbers of GPUs, so that a job may grow and shrink.

Source: DeepSpeed 0.19.6, for defaults and for which values contradict each other.
"""

from __future__ import annotations

import attrs

from fds.config.contradiction import MissingKeyError, check_order, contradiction
from fds.config.field import key
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config

_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")
_VERSIONS = (0.1, 0.2)


@attrs.frozen
class ElasticityConfig(Config):
    """`elasticity`: the batch sizes and numbers of GPUs that are searched."""

    enabled: bool = key(False, "choose the batch sizes so that many numbers of GPUs fit", NotYet("elasticity"))
    max_train_batch_size: int = key(2000, "largest whole batch of an update", PartOf(), unit="rows", over=0)
    micro_batch_sizes: tuple[int, ...] = key((2, 4, 6), "rows that a GPU may compute at once", PartOf(), unit="rows")
    min_gpus: int = key(1, "fewest GPUs that must fit", PartOf(), unit="GPUs", low=1)
    max_gpus: int = key(10000, "most GPUs that must fit", PartOf(), unit="GPUs", low=1)
    min_time: int = key(0, "running time before the job may be scaled; 0: not known", PartOf(), unit="minutes", low=0)
    prefer_larger_batch: bool = key(
        True,
        "of batches that as many numbers of GPUs divide, take the largest, not the least",
        PartOf(),
        old=("prefer_large_batch",),
    )
    ignore_non_elastic_batch_info: bool = key(
        False, "overrule batch sizes given outside this section; else they are refused", PartOf()
    )
    version: float = key(
        0.2,
        "how to search: 0.1 counts GPUs; 0.2 counts nodes and knows model parallelism",
        PartOf(),
        low=_VERSIONS[0],
        high=_VERSIONS[-1],
    )
    num_gpus_per_node: int = key(1, "GPUs of a node, which come and go together", PartOf(), unit="GPUs", low=1)
    model_parallel_size: int = key(1, "GPUs that share one copy of the model", PartOf(), unit="GPUs", low=1)

    def check(self) -> None:
        """Raise `ConfigError` if the search is enabled and sizes are missing, or none can be found."""
        if self.enabled is True:
            self._check_required()
            self._check_sizes()
            self._check_gpus()

    def _check_required(self) -> None:
        if missing := [name for name in _REQUIRED if name not in self.given]:
            names = " and ".join(missing)
            raise MissingKeyError(
                "elasticity has no sizes to search",
                where=", ".join(["enabled", *missing]),
                got=f"enabled=True without {names}",
                want=f"{names}, given explicitly",
            )

    def _check_sizes(self) -> None:
        most, sizes = self.max_train_batch_size, self.micro_batch_sizes
        if not isinstance(sizes, tuple):  # "auto"
            return
        if not sizes or min(sizes) < 1:
            want = "a list of at least one number, each at least 1"
            raise contradiction(self, "microbatches need sizes of at least 1", "micro_batch_sizes", want=want)
        if isinstance(most, int) and max(sizes) > most:
            want = f"each of micro_batch_sizes at most {most}"
            raise contradiction(self, "a microbatch is larger than the batch", *_REQUIRED, want=want)

    def _check_gpus(self) -> None:
        check_order(self, "min_gpus", "max_gpus")
        version, node, model = self.version, self.num_gpus_per_node, self.model_parallel_size
        if isinstance(version, float) and version not in _VERSIONS:
            want = " or ".join(map(str, _VERSIONS))
            raise contradiction(self, "there is no such version", "version", want=want)
        if not isinstance(model, int):  # "auto"
            return
        if version == _VERSIONS[0] and model > 1:
            names = "version", "model_parallel_size"
            raise contradiction(self, "this version does not support model parallelism", *names, want="version 0.2")
        if isinstance(node, int) and node % model:
            names = "num_gpus_per_node", "model_parallel_size"
            want = "a model_parallel_size that divides num_gpus_per_node"
            raise contradiction(self, "copies of the model do not fill a node", *names, want=want)
