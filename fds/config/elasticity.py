"""One batch size that many numbers of ranks share, chosen as DeepSpeed's elasticity 0.1 and 0.2 choose it.

A batch of R rows can be computed by n data ranks without a rest if n divides R / m for one of the microbatch sizes m.
So the candidates are multiples, as large as allowed, of each m and of the least common multiple of all of them, by
highly composite numbers, which have more divisors than any smaller number. The candidate that most numbers of ranks
divide is taken; of several, the largest, or the least. 0.2 counts nodes, of which a model takes whole parts.

Source: DeepSpeed 0.19.6, `elasticity/`; highly composite numbers: Ramanujan 1915, OEIS A002182.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from fds.config.record import Config, within
from fds.errors import ElasticityError, is_int

HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120),
    *(20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400),
    *(665280, 720720),  # where DeepSpeed's list ends
)
SCHEDULERS = ("FDS_ELASTICITY_CONFIG", "DEEPSPEED_ELASTICITY_CONFIG")  # what a scheduler was told, as JSON
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SEARCHED = (  # the keys on which batches depend
    *("max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "prefer_larger_batch", "version"),
    *("num_gpus_per_node", "model_parallel_size"),
)


@attrs.frozen
class Batch:
    """The batch of an update on a number of ranks.

    Attributes:
        rows: of the whole batch, of all ranks and microbatches.
        microbatch: rows that a rank computes at once.
        num_microbatches: of a rank in an update.
        data_ranks: ranks, or groups that share one copy of the model, which have different rows.
    """

    rows: int
    microbatch: int
    num_microbatches: int
    data_ranks: int


@attrs.frozen
class Batches:
    """The batch size of an elastic run, and the numbers of ranks that share it.

    Attributes:
        rows: of the batch of an update, the same on all of `ranks`.
        data_ranks: numbers of data ranks that divide it, in order: the valid GPU counts of DeepSpeed.
        config: the section `elasticity` of which they are made.
    """

    rows: int
    data_ranks: tuple[int, ...]
    config: Config

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that share the batch, in order: `model_parallel_size` times those of data ranks."""
        return tuple(n * self.config.model_parallel_size for n in self.data_ranks)

    def at(self, ranks: int) -> Batch:
        """Return the batch on a number of ranks, those that share a copy of the model included.

        The microbatch is the largest of `micro_batch_sizes` that divides a rank's rows. On a number that is not among
        `ranks` version 0.2 gives a batch of other rows, the largest or least multiple of a microbatch on each rank.

        Raises `ElasticityError` for a number of ranks that has no batch: in version 0.1 all that are not among `ranks`.
        """
        if not is_int(ranks, 1):
            raise ElasticityError("not a number of ranks", where="ranks", got=repr(ranks)[:80], want="1 or more")
        model = self.config.model_parallel_size
        if ranks % model:
            raise ElasticityError(
                "the ranks cannot be divided into copies of the model",
                where="ranks, elasticity.model_parallel_size",
                got=f"{ranks} ranks, {model} for each copy",
                want=f"a multiple of {model}",
            )
        data = ranks // model
        rows = self.rows if data in self.data_ranks else self._rows_alone(data)
        microbatch = max(n for n in self.config.micro_batch_sizes if rows // data % n == 0)
        return Batch(rows, microbatch, rows // data // microbatch, data)

    def _rows_alone(self, data: int) -> int:
        """Return the rows of a number of data ranks that does not share the batch of the others."""
        config = self.config
        multiples = [n * data for n in config.micro_batch_sizes if n * data <= config.max_train_batch_size]
        if config.version == 0.1 or not multiples:
            near = sorted(self.ranks, key=lambda n: abs(n - data * config.model_parallel_size))[:4]
            raise ElasticityError(
                "no batch for this number of ranks",
                where="ranks",
                got=str(data * config.model_parallel_size),
                want="one of fds.elastic.batches(config).ranks, of which these are near: "
                + ", ".join(map(str, sorted(near))),
            )
        choose = max if config.prefer_larger_batch else min
        return choose(config.max_train_batch_size // n * n for n in multiples)


def search(config: Config) -> Batches:
    """Return the batches of a section `elasticity` without `"auto"`.

    Raises `ElasticityError` where it is not enabled, and where no number of ranks fits.
    """
    if config.enabled is not True:
        raise ElasticityError("elasticity is not enabled", where="elasticity.enabled", got="false", want="true")
    node = config.num_gpus_per_node if config.version == 0.2 else 1  # ranks that come and go together
    data_ranks = node // config.model_parallel_size  # of a node
    least, most = -(-config.min_gpus // node), config.max_gpus // node
    if least > most:
        raise _no_number(config, "there is no number of whole nodes between the bounds", "num_gpus_per_node")
    rows, sizes = config.max_train_batch_size // data_ranks, config.micro_batch_sizes
    if max(sizes) > rows:
        raise ElasticityError(
            "the largest microbatch does not fit on every rank of a node",
            where="elasticity.max_train_batch_size, elasticity.micro_batch_sizes, elasticity.num_gpus_per_node",
            got=f"{max(sizes)} rows x {data_ranks} data ranks of a node, at most {config.max_train_batch_size}",
            want=f"microbatches of at most {rows} rows",
        )
    numbers = {whole: _numbers(whole, sizes, least, most) for whole in _candidates(sizes, rows)}
    sign = 1 if config.prefer_larger_batch else -1
    best = max(numbers, key=lambda whole: (len(numbers[whole]), sign * whole))
    if not numbers[best]:
        raise _no_number(config, "no number of ranks between the bounds divides a batch", "max_train_batch_size")
    return Batches(best * data_ranks, tuple(n * data_ranks for n in numbers[best]), config)


def batch_sizes(config: Config, data_ranks: int) -> dict[str, int]:
    """Return the batch sizes of a JSON, by their keys, on a number of data ranks.

    Raises `ElasticityError` where `search` and `Batches.at` do.
    """
    if not is_int(data_ranks, 1):
        got = repr(data_ranks)[:80]
        raise ElasticityError("not a number of data ranks", where="world_size", got=got, want="1 or more")
    batch = search(config).at(data_ranks * config.model_parallel_size)
    return dict(zip(BATCH, (batch.rows, batch.microbatch, batch.num_microbatches), strict=True))


def _candidates(sizes: tuple[int, ...], most: int) -> Iterator[int]:
    for base in (*sizes, math.lcm(*sizes)):
        if base <= most:
            yield base * max(n for n in HIGHLY_COMPOSITE if n <= most // base)


def _numbers(rows: int, sizes: tuple[int, ...], least: int, most: int) -> list[int]:
    """Return the numbers, between the bounds, that divide the microbatches of a batch, of whichever size they are."""
    numbers = {n for size in sizes if rows % size == 0 for n in _divisors(rows // size)}
    return sorted(n for n in numbers if least <= n <= most)


def _divisors(number: int) -> Iterator[int]:
    for n in range(1, math.isqrt(number) + 1):
        if number % n == 0:
            yield from (n, number // n)


def _no_number(config: Config, what: str, key: str) -> ElasticityError:
    names = ("min_gpus", "max_gpus", key)
    where = ", ".join(f"elasticity.{name}" for name in names)
    return ElasticityError(what, where=where, got=_shown(config, names), want="wider bounds")


def _shown(config: Config, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={config[name]!r}" for name in names)


def check_unchanged(config: Config, environ: Mapping[str, str]) -> None:
    """Raise `ElasticityError` if a scheduler was told another section `elasticity` than the one that is run.

    It is told in the environment, as JSON, and counts in all keys on which batches depend; DeepSpeed compares the
    largest batch, the microbatches and the version. Without such a variable nothing is checked.
    """
    for variable in SCHEDULERS:
        if variable not in environ:
            continue
        with within(f"{variable}."):
            scheduled = type(config).from_dict(_section(variable, environ[variable]))
        different = [name for name in _SEARCHED if scheduled[name] != config[name]]
        if different:
            raise ElasticityError(
                "elasticity is another one than the scheduler was told",
                where=", ".join(f"elasticity.{name}" for name in different),
                got=_shown(config, different),
                want=f"{_shown(scheduled, different)}, as {variable} says",
            )


def _section(variable: str, text: str) -> Mapping[str, Any]:
    try:
        section = json.loads(text)
    except (ValueError, RecursionError):
        section = None
    if not isinstance(section, dict):
        raise ElasticityError(
            "not a section of a configuration", got=text[:80], want='JSON, the value of the key "elasticity"'
        )
    return section
