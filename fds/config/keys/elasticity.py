"""Elasticity: a batch size that many numbers of GPUs divide, so that a job may grow and shrink.

Source: reference/003 and features.md 1.14; defaults and what contradicts itself as in DeepSpeed 0.19.6.
"""

from __future__ import annotations

import attrs

from fds.config.contradiction import contradiction, refuse_disorder
from fds.config.meaning import NotYet, Part
from fds.config.record import Config, key
from fds.errors import ConfigError

_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")
_VERSIONS = (0.1, 0.2)


@attrs.frozen
class ElasticityConfig(Config):
    """`elasticity`: the batch sizes and numbers of GPUs that are searched.

    Raises `ConfigError` where it is enabled and the search has nothing to find. What is switched off is not looked at.
    """

    enabled: bool = key(False, "choose the batch sizes so that many numbers of GPUs fit", NotYet("elasticity"))
    max_train_batch_size: int = key(2000, "largest whole batch of an update", Part(), unit="rows", over=0)
    micro_batch_sizes: tuple[int, ...] = key((2, 4, 6), "rows that a GPU may compute at once", Part(), unit="rows")
    min_gpus: int = key(1, "fewest GPUs that must fit", Part(), unit="GPUs", low=1)
    max_gpus: int = key(10000, "most GPUs that must fit", Part(), unit="GPUs", low=1)
    min_time: int = key(
        0, "running time before the job may be scaled; 0: not known", Part(), unit="minutes", low=0)
    prefer_larger_batch: bool = key(
        True, "of batches that as many numbers of GPUs divide, take the largest, not the least", Part(),
        old=("prefer_large_batch",),
    )  # fmt: skip
    ignore_non_elastic_batch_info: bool = key(
        False, "overrule batch sizes given outside this section; else they are refused", Part())
    version: float = key(
        0.2, "how to search: 0.1 counts GPUs; 0.2 counts nodes and knows model parallelism", Part(),
        low=_VERSIONS[0], high=_VERSIONS[-1],
    )  # fmt: skip
    num_gpus_per_node: int = key(1, "GPUs of a node, which come and go together", Part(), unit="GPUs", low=1)
    model_parallel_size: int = key(1, "GPUs that share one copy of the model", Part(), unit="GPUs", low=1)

    def check(self) -> None:
        """Raise `ConfigError` for an enabled search that lacks its sizes, or that cannot find any."""
        if self.enabled is True:
            self._refuse_missing()
            self._refuse_sizes()
            self._refuse_gpus()

    def _refuse_missing(self) -> None:
        if missing := [name for name in _REQUIRED if name not in self.given]:
            names = " and ".join(missing)
            raise ConfigError("elasticity has no sizes to search", where=", ".join(["enabled", *missing]),
                              got=f"enabled=True without {names}", want=f"{names}, given explicitly")  # fmt: skip

    def _refuse_sizes(self) -> None:
        most, sizes = self.max_train_batch_size, self.micro_batch_sizes
        if not isinstance(sizes, tuple):  # "auto"
            return
        if not sizes or min(sizes) < 1:
            want = "a list of at least one number, each at least 1"
            raise contradiction(self, "microbatches have rows", "micro_batch_sizes", want=want)
        if isinstance(most, int) and max(sizes) > most:
            want = f"each of micro_batch_sizes at most {most}"
            raise contradiction(self, "a microbatch is larger than the batch", *_REQUIRED, want=want)

    def _refuse_gpus(self) -> None:
        refuse_disorder(self, "min_gpus", "max_gpus")
        version, node, model = self.version, self.num_gpus_per_node, self.model_parallel_size
        if isinstance(version, float) and version not in _VERSIONS:
            want = " or ".join(map(str, _VERSIONS))
            raise contradiction(self, "there is no such search", "version", want=want)
        if not isinstance(model, int):  # "auto"
            return
        if version == _VERSIONS[0] and model > 1:
            names = "version", "model_parallel_size"
            raise contradiction(self, "this search knows no model parallelism", *names, want="version 0.2")
        if isinstance(node, int) and node % model:
            names = "num_gpus_per_node", "model_parallel_size"
            want = "a model_parallel_size that divides num_gpus_per_node"
            raise contradiction(self, "copies of the model do not fill a node", *names, want=want)
