"""`initialize`, for programs that come from DeepSpeed: from module, loss and configuration to step and state."""

from __future__ import annotations

import argparse
import glob
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fds.collectives import Mesh, init_distributed, mesh as make_mesh, worlds
from fds.collectives.launch import launched
from fds.config.composition import axes_of, calls, data_ranks, embeddings_of
from fds.config.compression import Factors, parts_of, sums_scores
from fds.config.eigenvalues import factors_at_start
from fds.config.elasticity import check_unchanged, search
from fds.config.function_call import FunctionCall, beside_sums, with_schedule
from fds.config.losses import loss_and_params
from fds.config.reading import Unknown
from fds.config.sampling import draws_by_tokens, microbatches_of, order_of, rate_of
from fds.config.sparse_models import sparse_model
from fds.config.training import TrainingConfig
from fds.config.trial import OnTrial, trial_asked_by, trial_of
from fds.data import BatchOrder, DistributedLoader, TokenBatches
from fds.errors import BatchError, ConfigError, DataError, FdsError, MeshError
from fds.loss import Layers
from fds.microbatches import Microbatches
from fds.optim import Optimizer
from fds.state import State
from fds.step import Split, Step, Transform, compose, rows
from fds.transforms.freeze import freeze


def initialize(
    model: nn.Module | Layers,
    loss: Callable | None = None,
    *,
    config: TrainingConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    args: Any = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    schedule: Callable[[Any], Any] | None = None,
    training_data: Any = None,
    collate_fn: Callable[[list], Any] | None = None,
    mesh: Mesh | None = None,
    auto: Mapping[str, Any] | None = None,
    unknown: Unknown = "error",
    transforms: Sequence[Any] = (),
    factors: Factors | None = None,
    key: int = 0,
) -> tuple[Step, State, DistributedLoader | None, Callable[[Any], Any] | None]:
    """Return the step, its initial state, a loader of the training data, and the learning rate's schedule.

    `config.explain(mesh)` shows the composition as Python; `fds.compose(*config.transforms(mesh))(loss_fn)` is the same
    step (with `sparse_gradients` or `compression_training`: `config.transforms(mesh, model=model)`). Starts the process
    group if torchrun, Slurm or MPI launched several ranks and the program has not.

    `compression_training` rounds and prunes the modules that its groups name; scores that pruning needs are added to a
    copy of the model, and a student of `layer_reduction` is made before, by `config.reduce_layers`. In the end
    `fds.bake(step, state, model)` is DeepSpeed's `redundancy_clean`.

    Args:
        model: a module, which is not modified: its parameters are copied, on their device, and those with
            `requires_grad=False` are frozen. Or `Layers`. With the key `sparse_attention` a model of transformers is
            trained as `fds.hf.sparsify` makes it, with the same parameters.
        loss: `loss(model, batch)` for a module; `model` is called like the module, with the step's parameters. Returns
            a scalar, `(scalar, metrics)` or a `Mean`. None calls the module with the batch (a dict as keywords, a tuple
            as arguments) and takes its output, or its `.loss`. `Layers` are their own loss.
        config: a `TrainingConfig`, a dict, or the path of a JSON file.
        args: of a parser with `fds.add_config_arguments`, instead of `config`.
        optimizer: replaces the JSON's: an `Optimizer`, or a function of the schedule, such as `fds.adamw`.
        schedule: f(t), t = updates applied before this one; replaces the JSON's scheduler.
        training_data: a map-style data set. The loader yields this rank's share of a batch for each call of the step.
        collate_fn: rows -> batch; default: torch's.
        mesh: with an axis `dp`, and others as `TrainingConfig.transforms` reads them; default: of all ranks, with as
            many along `tp` and `sp` as `autotp_size` and `sequence_parallel_size` say, `tp` named last, and the others
            as data ranks, at stage 3 in nodes of `zero_hpz_partition_size`.
        auto: JSON path -> value of keys that are `"auto"`; see `TrainingConfig.resolve`.
        unknown: `"warn"` leaves out unknown keys of the JSON; see `TrainingConfig.of`.
        transforms: additional ones, for which there is no key: `fds.donate()`, `fds.ema(0.999)`.
        factors: of weights whose bits fall (MoQ), by patterns of their names: what `config.eigenvalues` returns, or
            numbers, as `fds.quantize_weights` takes them. By default, where `eigenvalue.enabled` asks for them, layers
            are measured here, of the model as it is and the first batch of `training_data`, on all data ranks.
        key: seed of the state's random numbers, of the initial parameters of `Layers` and of the order of the data.

    Calls of the step raise `BatchError` for other rows than all microbatches of a rank have by the JSON. Fewer pass
    where it says `"dataloader_drop_last": false`: the last batch of an epoch. `evaluate` takes any number.

    With `elasticity` in the JSON, a `UserWarning` says where this number of ranks does not share the others' batch; one
    says where `eigenvalue.enabled` asks for factors, and there are neither these nor `training_data`.

    In a script that `fds tune` runs, the configuration of the trial takes the place of `config`, and the step ends the
    process once it has measured. So it does with `"autotuning": {"enabled": true}` in `config`, as DeepSpeed's engine.

    Raises `ConfigError` if JSON and arguments both say something, `ElasticityError` for a number of ranks that has no
    elastic batch and for a JSON that a scheduler was told otherwise, and all that `compose` and `step.init` raise.
    """
    ranks, trial = _mesh_of(mesh), trial_of(os.environ)

    def resolve() -> TrainingConfig:
        source = config_of(args, config) if trial is None else trial.config
        read = source if isinstance(source, TrainingConfig) else TrainingConfig.of(source, unknown=unknown)
        axes = axes_of(read.filled(auto or {}), ranks.size) if mesh is None else ranks.shape
        resolved = read.resolve(world_size=data_ranks(axes), auto=auto)
        _check_given_once(resolved, optimizer, schedule)
        if resolved.elasticity.enabled:
            check_unchanged(resolved.elasticity, os.environ)
        return resolved

    config = resolve_on_all_ranks(ranks, resolve, key)
    trial = trial or trial_asked_by(config)
    _warn_of_other_rows(config)
    mesh = make_mesh(**axes_of(config, ranks.size)) if mesh is None else ranks
    schedule = config.schedule() if schedule is None else schedule
    order = None if training_data is None else order_of(config, _data_axis(mesh), training_data)
    if isinstance(order, TokenBatches):
        schedule = rate_of(config, order, _data_axis(mesh), schedule, optimizer)
    model = sparse_model(config, model, mesh)
    model = config.with_scores(model) if isinstance(model, nn.Module) else model
    loss_fn, params = loss_and_params(model, loss)
    loader = None if training_data is None else _loader(config, mesh, training_data, collate_fn, key, order)
    if factors is None:
        factors = factors_at_start(config, loss_fn, params, loader, axis=_data_axis(mesh), key=key)
    configured = _transforms(config, mesh, model, optimizer, schedule, factors)
    step = compose(*_frozen(model), *transforms, *configured)(loss_fn)
    _check_tensor_axis(step, mesh)
    if not draws_by_tokens(config):
        step = attrs.evolve(step, split=_split(config, step.split))
    state = step.init(params, key=key)
    config.dump_state(state, step)
    if trial is not None:
        timed = OnTrial(step.run, trial, step, config.batch.train_batch_size or 0, worlds.current().rank == 0)
        step = attrs.evolve(step, run=timed)
    return step, state, loader, schedule


@attrs.frozen
class SplitRows(Split):
    """The station `split` of a JSON, which says how many rows a rank passes: others are a `BatchError`.

    A loader of the user's own may load microbatches, as in DeepSpeed: each would be an update, of too few rows.
    """

    rows: int = attrs.field(kw_only=True)
    shorter: bool = attrs.field(kw_only=True)  # whether the last batch of an epoch may have fewer

    def checked(self, batch: Microbatches) -> tuple[Any, ...]:
        """Return the parts of a batch that is cut already. Raises `BatchError`."""
        parts = super().checked(batch)
        self._check([rows(part) for part in parts])
        return parts

    def __call__(self, batch: Any) -> list[Any]:
        """Return the microbatches. Raises `BatchError`."""
        self._check([rows(batch)])
        return super().__call__(batch)

    def _check(self, lengths: list[int | None]) -> None:
        got, n = sum(filter(None, lengths)), self.num_microbatches
        if None in lengths or got == self.rows or (self.shorter and got < self.rows):
            return
        raise BatchError(
            "the batch has other rows than the configuration says",
            where="batch",
            got=f"{got} rows",
            want=f"{self.rows} rows: train_micro_batch_size_per_gpu {self.rows // n} x gradient_accumulation_steps {n}",
            hint=f"one call takes the rows of all microbatches of this rank: DataLoader(..., batch_size={self.rows})"
            + '\nfor shorter last batches "dataloader_drop_last": false in the JSON' * (got < self.rows),
        )


def _split(config: TrainingConfig, split: Split) -> SplitRows:
    batch, loading = config.batch, config.loading
    assert batch.train_micro_batch_size_per_gpu is not None and batch.gradient_accumulation_steps is not None
    return SplitRows(
        split.num_microbatches,
        rows=batch.train_micro_batch_size_per_gpu * batch.gradient_accumulation_steps,
        shorter="dataloader_drop_last" in loading.given and not loading.dataloader_drop_last,
    )


def _mesh_of(mesh: Any) -> Mesh:
    """Return the mesh; for None one whose ranks are all data ranks, of those that a launcher started."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is not None:
        raise MeshError("not a mesh", where="mesh", got=repr(mesh)[:80], want="fds.mesh(dp=-1)")
    launch = launched(os.environ)
    if worlds.current() is worlds.SINGLE and launch is not None and launch.world_size > 1:
        init_distributed()
    return make_mesh(dp=-1)


def _warn_of_other_rows(config: TrainingConfig) -> None:
    if not config.elasticity.enabled:
        return
    shared, rows = search(config.elasticity), config.batch.train_batch_size
    if rows != shared.rows:
        warnings.warn(
            f"this number of ranks has batches of {rows} rows, not the {shared.rows} that others share: "
            "fds.elastic.batches(config).ranks are those",
            stacklevel=3,
        )


def _data_axis(mesh: Mesh) -> Any:
    return mesh[tuple(name for name in ("replicate", "node", "dp") if name in mesh.shape or name == "dp")]


def _check_tensor_axis(step: Step, mesh: Mesh) -> None:
    if mesh.shape.get("tp", 1) > 1 and not any(entry.role == "tensor" for entry in step.dimensions.entries):
        raise MeshError(
            "nothing divides the model over an axis of the mesh",
            where="mesh, tensor_parallel.autotp_size",
            got=f"tp={mesh.shape['tp']}, and no tensor_parallel",
            want='"tensor_parallel": {"autotp_size": ...} in the JSON, or '
            'transforms=[fds.tensor_parallel(mesh["tp"], {...})]',
        )


def _check_given_once(config: TrainingConfig, optimizer: Any, schedule: Any) -> None:
    """Raise `ConfigError` if JSON and arguments both say something: one of them would be ignored."""
    for name, argument, group in (("optimizer", optimizer, config.optimizer), ("schedule", schedule, config.scheduler)):
        key = "scheduler" if name == "schedule" else name
        if argument is not None and group is not None and group.type is not None:
            raise ConfigError(
                f"the {name} is given twice",
                where=f"{name}=, {key}.type",
                got=f"{argument!r:.60} and {group.type!r}",
                want="one of them",
            )
    cycle = config.scheduler is not None and config.scheduler.type == "OneCycle"
    if optimizer is not None and cycle and config["scheduler"].arguments.cycle_momentum:
        raise ConfigError(
            "OneCycle can only move the betas of an optimizer in the JSON",
            where="optimizer=, scheduler.params.cycle_momentum",
            got=f"{optimizer!r:.60} and true",
            want='"cycle_momentum": false, or the optimizer in the JSON',
        )
    scheduled = schedule is not None or (config.scheduler is not None and config.scheduler.type is not None)
    if isinstance(optimizer, Optimizer) and scheduled:
        raise ConfigError(
            "the optimizer already has a schedule",
            where="optimizer=",
            got=f"{optimizer!r} and a schedule",
            want="a function of the schedule, such as fds.adamw",
        )


def _transforms(
    config: TrainingConfig, mesh: Mesh, model: Any, optimizer: Any, schedule: Any, factors: Factors | None
) -> list[Any]:
    embeddings = embeddings_of(model) if isinstance(model, nn.Module) else None
    parts = parts_of(config, model, factors)
    configured = list(calls(config, mesh.shape, embeddings, parts))
    if config.optimizer is not None and config.optimizer.type is not None:
        if schedule is not None:  # no change if it is the JSON's
            configured[-1] = with_schedule(configured[-1], schedule)
        return [call.build(mesh) for call in configured]
    if optimizer is None:
        raise ConfigError(
            "there is no optimizer",
            where="optimizer, optimizer=",
            got="neither",
            want='"optimizer": {"type": "AdamW", ...} in the JSON, or optimizer=fds.adamw(3e-4)',
        )
    if isinstance(optimizer, type) or not (callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise ConfigError(
            "not an optimizer of fds",
            where="optimizer=",
            got=type(optimizer).__name__,
            want="fds.adamw, which receives the schedule, or fds.adamw(3e-4)",
        )
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer() if schedule is None else optimizer(schedule)
    if sums_scores(config):
        optimizer = FunctionCall("by_name", (beside_sums(optimizer),)).build(mesh)
    return [*(call.build(mesh) for call in configured), optimizer]


def _frozen(model: Any) -> list[Transform]:
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    names = [glob.escape(name) for name, x in named if not x.requires_grad]
    return [freeze(*names)] if names else []


_WORKERS = ("num_workers", "pin_memory")  # of data sampling


def _loader(
    config: TrainingConfig,
    mesh: Mesh,
    data: Any,
    collate_fn: Callable[[list], Any] | None,
    key: int,
    order: BatchOrder | None,
) -> DistributedLoader:
    batch, axis = config.batch, _data_axis(mesh)
    assert batch.train_batch_size is not None and batch.gradient_accumulation_steps is not None
    workers = {} if order is None else {name: config[f"data_efficiency.data_sampling.{name}"] for name in _WORKERS}
    last = "drop" if config["dataloader_drop_last"] else "wrap"
    try:
        return DistributedLoader(
            data,
            microbatches_of(config, axis) if isinstance(order, TokenBatches) else batch.train_batch_size,
            axis,
            sampler=order,
            **workers,
            seed=key,
            last=last,
            collate=collate_fn,
            num_microbatches=batch.gradient_accumulation_steps,
        )
    except DataError as error:
        hint = error.hint
        if "last=" in hint:  # not an argument of `initialize`: name the key instead
            hint = '"dataloader_drop_last": false, or a smaller train_batch_size'
        raise DataError(error.what, where=error.where, got=error.got, want=error.want, hint=hint) from error


def resolve_on_all_ranks(mesh: Mesh, resolve: Callable[[], TrainingConfig], key: int) -> TrainingConfig:
    """Return the result of `resolve`, once it and `key` are known to be equal on all ranks. Collective.

    Raises `ConfigError` on every rank if one cannot resolve its configuration, and if they differ, with the JSON
    paths.
    """
    config = error = None
    try:
        config = resolve()
    except FdsError as caught:
        error = caught
    mine = None if config is None else {**dict(_flat(config.to_dict(full=True))), "key": key}
    replies = mesh[tuple(mesh.shape)].exchange([mine, error and error.what, error and error.where], "configuration")
    if error is not None:
        raise error
    assert config is not None and mine is not None
    for rank, (other, what, where) in enumerate(replies):
        if other is None:
            raise ConfigError(f"rank {rank}: {what}", where=where)
    for rank, (other, _, _) in enumerate(replies):
        paths = [path for path in sorted({*mine, *other}) if mine.get(path) != other.get(path)]
        if paths:
            raise ConfigError(
                "the ranks have different configurations",
                where=", ".join(paths[:8]),
                got=f"{other.get(paths[0])!r} on rank {rank}",
                want=f"{mine.get(paths[0])!r}, as here",
            )
    return config


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, json.loads(json.dumps(value, default=repr))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--fds` and `--fds_config PATH` to a parser, and their aliases `--deepspeed` and `--deepspeed_config`.

    `fds.initialize(..., args=args)` reads `args.fds_config`; `args.fds` is only a flag.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds_config.json"])
    Namespace(fds=True, fds_config='ds_config.json')
    """
    group = parser.add_argument_group("fds", "training by fds")
    group.add_argument("--fds", "--deepspeed", dest="fds", action="store_true", help="train with fds")
    group.add_argument(
        "--fds_config",
        "--fds-config",
        "--deepspeed_config",
        dest="fds_config",
        metavar="PATH",
        help="DeepSpeed's configuration, a JSON file",
    )
    return parser


def config_of(args: Any, config: Any) -> Any:
    """Return the configuration, from one of the two. Raises `ConfigError` if both or neither are given."""
    paths = [value for name in ("fds_config", "deepspeed_config") if (value := getattr(args, name, None)) is not None]
    configs = [config] * (config is not None) + paths[:1]
    if len(configs) != 1:
        raise ConfigError(
            "exactly one configuration is needed",
            where="config, args.fds_config",
            got="both" if configs else "neither",
            want="one of them: config=, a TrainingConfig, a dict or a path, or --fds_config on the command line",
        )
    return configs[0]
