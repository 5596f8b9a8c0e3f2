"""Batch sizes: of an update, of a microbatch on one rank, and the number of microbatches.

Source: DeepSpeed 0.19.6, for the order in which missing sizes are inferred.
"""

from __future__ import annotations

from typing import Self

import attrs

from fds.config.contradiction import MissingKeyError
from fds.config.field import AUTO, key
from fds.config.meaning import Elsewhere, NotApplicable, argument
from fds.config.record import Config
from fds.errors import ConfigError


@attrs.frozen
class BatchConfig(Config):
    """Batch sizes: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks."""

    train_batch_size: int | None = key(
        None,
        "rows of the whole batch of one update, of all ranks and microbatches",
        Elsewhere("fds.data.DistributedLoader(dataset, batch_size)", "a rank passes its share of them to the step"),
        unit="rows",
        over=0,
        old=("training_batch_size",),
    )
    train_micro_batch_size_per_gpu: int | None = key(
        None,
        "rows that one rank computes at once",
        argument("accumulate", "pipeline", name="num_microbatches", note="it divides a rank's share"),
        unit="rows",
        over=0,
        old=("train_step_batch_size",),
    )
    gradient_accumulation_steps: int | None = key(
        None,
        "microbatches whose gradients are summed before an update",
        argument("accumulate", "pipeline", name="num_microbatches"),
        over=0,
    )
    managed_gradient_accumulation: bool = key(
        True,
        "whether the engine counts microbatches; else every engine.step() is an update",
        NotApplicable("a step takes all microbatches of an update and counts nothing between calls"),
    )

    def resolve(self, *, world_size: int = 1, **known: object) -> Self:
        """Return the record with all three sizes, for a number of data ranks.

        Two of them determine the third; one size alone means one microbatch. Raises `ConfigError`, with all keys
        involved, if they do not multiply or neither size is given.
        """
        if type(world_size) is not int or world_size < 1:
            raise ConfigError("not a number of data ranks", where="world_size", got=repr(world_size), want="1 or more")
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        train, micro, steps = (None if n == AUTO else n for n in given)
        if train is None and micro is None:
            raise MissingKeyError(
                "the batch size is not known",
                where="train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps",
                got=self._given_text() or "nothing",
                want="train_batch_size or train_micro_batch_size_per_gpu",
            )
        if steps is None:
            steps = train // (micro * world_size) if train is not None and micro is not None else 1
        if micro is None:
            assert train is not None
            micro = train // (steps * world_size)
        if train is None:
            train = micro * steps * world_size
        if train != micro * steps * world_size:
            raise ConfigError(
                "the batch sizes do not multiply",
                where="train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps",
                got=f"{self._given_text()} on {world_size} data ranks",
                want="train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data ranks",
            )
        return self.with_keys(
            train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
        )

    def _given_text(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._given_items() if value is not None)
