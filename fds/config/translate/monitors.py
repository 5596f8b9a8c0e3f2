"""From a configuration to the sinks of its monitor."""

from __future__ import annotations

import math
import os

from fds.config.keys import Groups
from fds.monitors import CSV, Comet, Console, Sink, TensorBoard, WandB


def sinks(config: Groups) -> list[Sink]:
    """Return where a resolved configuration has metrics written. Raises `FdsError` for a package that is missing."""
    found: list[Sink] = []
    for group, make in ((config.tensorboard, TensorBoard), (config.csv_monitor, CSV)):
        if group.enabled:
            found.append(make(os.path.join(group.output_path or "", group.job_name)))
    if config.wandb.enabled:
        found.append(WandB(config.wandb.project, team=config.wandb.team, group=config.wandb.group))
    if (comet := config.comet).enabled:
        assert config.batch.train_batch_size is not None
        found.append(
            Comet(
                comet.project,
                workspace=comet.workspace,
                name=comet.experiment_name,
                experiment_key=comet.experiment_key,
                mode=comet.mode,
                online=comet.online,
                api_key=comet.api_key,
                every=math.ceil(comet.samples_log_interval / config.batch.train_batch_size),
            )
        )
    if (every := printed_every(config)) is not None:
        found.append(Console(every=every))
    return found


def printed_every(config: Groups) -> int | None:
    """Return the calls between two lines of the console; None for no lines."""
    calls = config.logging.steps_per_print
    return None if calls is None or calls == math.inf else math.ceil(calls)
