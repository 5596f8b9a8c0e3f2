"""What DeepSpeed's section `elasticity` comes to: its batches, and whether a scheduler was told the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fds.config import Config, TrainingConfig, elasticity, reading
from fds.config.elasticity import Batches
from fds.errors import ElasticityError

Source = TrainingConfig | Mapping[str, Any] | str | os.PathLike[str]


def batches(config: Source) -> Batches:
    """Return the batch size that DeepSpeed's elasticity 0.1 or 0.2 chooses, and the numbers of ranks that share it.

    Only the section `elasticity` is read, as a scheduler does that knows nothing of the rest.

    Args:
        config: a `TrainingConfig`, a dict, the path of a JSON file, or JSON in base64.

    Raises `ElasticityError` for a configuration without elasticity, and where no number of ranks fits; `ConfigError`
    for a file that cannot be read, and for keys, with their JSON path.

    >>> config = {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [4, 6]}}
    >>> found = batches(config)
    >>> found.rows, found.ranks
    (48, (1, 2, 3, 4, 6, 8, 12))
    >>> found.at(4)
    Batch(rows=48, microbatch=6, num_microbatches=2, data_ranks=4)
    """
    return elasticity.search(_section(config))


def check_unchanged(config: Source, environ: Mapping[str, str] | None = None) -> None:
    """Check that the scheduler, which chose the number of ranks, was told the section `elasticity` that is run.

    It is told in the environment, in `FDS_ELASTICITY_CONFIG` or `DEEPSPEED_ELASTICITY_CONFIG`, as JSON. All keys on
    which batches depend are compared. Without a variable nothing is. `fds.initialize` does this by itself.

    Args:
        config: as `batches` takes it.
        environ: of this process, by default.

    Raises `ElasticityError` where one of these keys has another value, and what `batches` raises.
    """
    elasticity.check_unchanged(_section(config), os.environ if environ is None else environ)


def _section(config: Source) -> Config:
    """Return the section, in which `"auto"` is the default."""
    data = config.to_dict() if isinstance(config, TrainingConfig) else reading.read(config)
    if "elasticity" not in data:
        raise ElasticityError(
            "the configuration has no elasticity", where="elasticity", got="nothing", want='{"enabled": true, ...}'
        )
    return TrainingConfig.of(reading.fill({"elasticity": data["elasticity"]}, {})).elasticity
