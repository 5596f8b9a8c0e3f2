"""The whole configuration of a training, as DeepSpeed's JSON says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import attrs

from fds.collectives import Mesh
from fds.config import explain as explanation
from fds.config.keys.groups import Groups
from fds.config.reading import read
from fds.config.record import Edition
from fds.config.translate import composition, optimizer as update
from fds.config.translate.buildable import refuse_what_cannot_be_made
from fds.config.translate.unsupported import refuse_what_is_not_there
from fds.config.unknown import Unknown, with_known_keys
from fds.errors import ConfigError, MeshError
from fds.schedules.curve import Curve
from fds.step import Transform


@attrs.frozen
class TrainingConfig(Groups):
    """DeepSpeed's JSON, whole. Its keys are the fields of `Groups`.

    >>> import fds
    >>> config = TrainingConfig.of({"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    ...                             "zero_optimization": {"stage": 2}})
    >>> config["zero_optimization.stage"], config.batch.train_batch_size, config.clipping.gradient_clipping
    (2, 16, 1.0)
    >>> config.transforms(fds.mesh(dp=1))
    (shard_optimizer(mesh['dp'], stage=2), clip_by_global_norm(1.0), adamw(lr=0.0003, weight_decay=0.0))
    """

    @classmethod
    def of(
        cls, source: Mapping[str, Any] | str | os.PathLike, *, defaults: Edition = "0.19.6", unknown: Unknown = "error"
    ) -> Self:
        """Return the configuration of a dict, of a file of JSON or HJSON, or of either in base64.

        Args:
            source: of the JSON.
            defaults: the edition that says what an absent key is: `"0.19.6"`, the code, or `"docs"`, its documentation.
            unknown: what happens to unknown keys: `"error"` refuses them, or `"warn"`, which leaves them out with a
                `UserWarning` that names each. Keys that begin with `_` are comments in any case.

        Raises `ConfigError` for a file that cannot be read, with the line; for keys, with their JSON path.
        """
        return cls.from_dict(with_known_keys(cls, read(source), unknown), defaults=defaults)

    def check(self) -> None:
        """Raise `ConfigError` for keys that contradict each other, and for values that nothing can be made with."""
        super().check()
        refuse_what_cannot_be_made(self)

    def schedule(self) -> Curve | None:
        """Return the learning rate's schedule f(t), t = updates applied before this one; None without a scheduler.

        Raises `NotSupportedError` for a scheduler that fds does not have.
        """
        call = update.schedule(self.filled({}))
        if call is None and self.scheduler is not None and self.scheduler.type is not None:
            refuse_what_is_not_there(self)
        return None if call is None else call.build(None)

    def transforms(self, mesh: Mesh) -> tuple[Transform, ...]:
        """Return what the JSON asks for, as transforms and an optimizer: `fds.compose(*config.transforms(mesh))(loss)`.

        Batch sizes and `"auto"` are resolved for the mesh: its axis `dp` has the data ranks, `pp` (if there is one) the
        stages of a pipeline, `replicate` (if there is one) the copies of the sharded state.

        Raises `NotSupportedError`, naming all keys, for what fds does not have yet; `ConfigError` for batch sizes that
        do not multiply; `MeshError` for a mesh without `dp`.
        """
        return tuple(call.build(mesh) for call in composition.calls(self, _sizes(mesh)))

    def explain(self, mesh: Mesh | Mapping[str, int], *, num_parameters: int | None = None) -> str:
        """Return what the JSON comes to: the composition as Python, the batch, memory per rank, and what is left out.

        Args:
            mesh: of the ranks that run, or the sizes of the axes that there will be: `{"dp": 8}`.
            num_parameters: of the model, for bytes in place of formulas.
        """
        if num_parameters is not None and (type(num_parameters) is not int or num_parameters < 1):
            raise ConfigError("this is no number of parameters", where="num_parameters", got=repr(num_parameters),
                              want="1 or more")
        return explanation.explain(self, mesh if isinstance(mesh, Mapping) else _sizes(mesh), num_parameters)


def _sizes(mesh: Any) -> dict[str, int]:
    if not isinstance(mesh, Mesh):
        raise MeshError("this is no mesh", got=repr(mesh)[:80], want="fds.mesh(dp=-1)")
    return mesh.shape
