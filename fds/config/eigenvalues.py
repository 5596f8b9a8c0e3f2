"""The curvature of layers, as `eigenvalue` or `quantize_training.eigenvalue` asks for it: the factors of MoQ.

Source: `runtime/eigenvalue.py` of DeepSpeed 0.19.6, whose engine measures in each step in which bits may be dropped.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fds import random, tree
from fds.collectives import Axis
from fds.config.compression import bits_fall
from fds.config.keys import Groups
from fds.curvature import Eigenvalue, top_eigenvalue
from fds.errors import ConfigError
from fds.microbatches import Microbatches

_TO_WRITE = """
    factors = fds.config.TrainingConfig.of(config).eigenvalues(loss, model, batch)
    fds.initialize(model, loss, config=config, factors=factors)"""


def asking(config: Groups) -> tuple[str, Any] | None:
    """Return the key path and the group that has layers measured; None where neither does."""
    groups = {"eigenvalue": config.eigenvalue, "quantize_training.eigenvalue": config.quantize_training.eigenvalue}
    return next(((path, group) for path, group in groups.items() if group.enabled), None)


def eigenvalues(
    config: Groups, loss: Any, params: Any, batch: Any, *, axis: Axis | None, key: int = 0
) -> dict[str, Eigenvalue]:
    """Return the eigenvalue of each layer by the pattern of its names; see `TrainingConfig.eigenvalues`."""
    asked = asking(config)
    if asked is None:
        return {}
    path, group = asked
    params = params(random.key(key)) if callable(params) else params
    names = list(tree.paths(params))
    blocks = [f"{group.layer_name}.{i}.*" for i in range(group.layer_num)]
    absent = [block for block in blocks if not fnmatch.filter(names, block)]
    if absent or not blocks:
        raise ConfigError(
            "there are no layers to measure" if not blocks else "there is no such layer",
            where=f"{path}.layer_num" if not blocks else f"{path}.layer_name, {path}.layer_num",
            got=absent[0] if absent else "0",
            want=f"layers of the model: {tree.named(names)}" if absent else "1 or more",
        )
    return top_eigenvalue(
        loss,
        params,
        batch,
        blocks=blocks,
        max_iter=group.max_iter,
        tol=group.tol,
        stability=group.stability,
        axis=axis,
        key=key,
    )


def factors_at_start(
    config: Groups, loss: Any, params: Any, loader: Iterable[Any] | None, *, axis: Axis, key: int
) -> dict[str, Eigenvalue]:
    """Return the eigenvalues with which a run begins, of the first batch of a loader; {} where no bits fall by them.

    Warns where there is no batch.
    """
    asked = asking(config)
    if asked is None or not bits_fall(config):
        return {}
    if loader is None:
        warnings.warn(
            f"{asked[0]}.enabled: without training_data there is no batch to measure layers with, so bits of all "
            f"weights fall alike; write, with a batch of this rank,{_TO_WRITE}",
            stacklevel=3,
        )
        return {}
    batch = next(iter(loader))
    batch = batch.parts[0] if isinstance(batch, Microbatches) else batch
    params = params(random.key(key)) if callable(params) else params
    device = tree.leaves(params)[0].device
    batch = tree.map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
    return eigenvalues(config, loss, params, batch, axis=axis, key=key)
