"""`TrainingConfig`: DeepSpeed's whole JSON, which turns into transforms or an explanation."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import attrs
from torch import Tensor, nn

from fds.collectives import Axis, Mesh, worlds
from fds.config import composition, unsupported
from fds.config.composition import clipping_call, loss_scale_call
from fds.config.compression import Factors, parts_of, student_of, with_scores
from fds.config.eigenvalues import eigenvalues
from fds.config.explain import explanation
from fds.config.field import Argument, Edition
from fds.config.function_call import FunctionCall, difficulty_call, optimizer_call, random_ltd_call, schedule_call
from fds.config.keys import Groups
from fds.config.losses import loss_and_params
from fds.config.reading import Unknown, auto_paths, naming_the_option, read, with_known_keys
from fds.config.record import Config, UnknownKeyError
from fds.curvature import Eigenvalue
from fds.debugging import dump_state
from fds.errors import ComposeError, ConfigError, FdsError, MeshError, nearest
from fds.loss import Layers
from fds.monitors import CSV, Comet, Console, Monitor, Sink, TensorBoard, WandB, monitor
from fds.schedules.curve import Curve
from fds.state import State
from fds.step import Step, Transform
from fds.timing import OPERATIONS, MemoryBreakdown, Messages, Timed, memory_breakdown, messages, timed


class TrainingConfig(Groups):
    """DeepSpeed's whole JSON. Its keys are the fields of `Groups`.

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
        cls,
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        defaults: Edition = "0.19.6",
        unknown: Unknown = "error",
    ) -> Self:
        """Read a configuration from a dict, a JSON or HJSON file, or its text in base64.

        Args:
            source: a dict, a path, or base64.
            defaults: where the defaults of absent keys come from: `"0.19.6"`, DeepSpeed's code, or `"docs"`, its
                documentation.
            unknown: `"error"` refuses unknown keys, `"warn"` leaves each out with a `UserWarning`, but refuses those of
                `optimizer.params` and `scheduler.params`. Keys that begin with `_` are always comments.

        Raises `ConfigError` for a file that cannot be read, with the line; for keys, with their JSON path.
        """
        try:
            return cls.from_dict(with_known_keys(cls, read(source), unknown), defaults=defaults)
        except UnknownKeyError as error:
            raise naming_the_option(error) from None

    def check(self) -> None:
        """Raise `ConfigError` for keys that contradict each other, and for values that functions of fds refuse."""
        super().check()
        check_buildable(self)

    def schedule(self) -> Curve | None:
        """Return the learning rate's schedule f(t), t = updates applied before this one; None without a scheduler.

        Raises `NotSupportedError` for a scheduler that fds does not support.
        """
        call = schedule_call(self.filled({}))
        if call is None and self.scheduler is not None and self.scheduler.type is not None:
            unsupported.check_supported(self)
        return None if call is None else call.build(None)

    def transforms(
        self, mesh: Mesh, *, model: nn.Module | Layers | None = None, factors: Factors | None = None
    ) -> tuple[Transform, ...]:
        """Return the transforms and the optimizer, for `fds.compose(*config.transforms(mesh))(loss)`.

        Batch sizes and `"auto"` are resolved for the mesh: its axis `dp` has the data ranks, `pp` (optional) the stages
        of a pipeline, `replicate` (optional) the copies of the sharded state, `node` (optional) the nodes over which
        that is sharded too: then `dp` are the ranks of one. Ranks along `sp` (optional) pass parts of the same rows,
        and slice state as data ranks do; those along `tp` (optional) share layers, as `autotp_size` says.

        Args:
            mesh: of all ranks.
            model: the module, or `Layers`, whose parameters `step.init` gets, by the same names; it is read for
                `sparse_gradients`, which is of a module's embeddings, and for the modules of `compression_training`.
            factors: of weights whose bits fall (MoQ), by patterns of their names: what `config.eigenvalues` returns, or
                numbers, as `fds.quantize_weights` takes them.

        Without an optimizer in the JSON yours goes last; where `sparse_pruning` is by `snip_momentum`, beside that of
        its sums: `fds.by_name({"*weight_scores": fds.compression.sensitivity(), "*": yours})`.

        Raises `NotSupportedError`, naming all keys, for features that fds does not support yet; `ConfigError` for batch
        sizes that do not multiply, and for keys that need a module without one; `MeshError` for a mesh without `dp`;
        `ComposeError` for a model that is no module.
        """
        check_model(model)
        embeddings = composition.embeddings_of(model) if isinstance(model, nn.Module) else None
        parts = parts_of(self, model, factors)
        return tuple(call.build(mesh) for call in composition.calls(self, _sizes(mesh), embeddings, parts))

    def with_scores(self, model: nn.Module) -> nn.Module:
        """Return a copy of a module that has the scores which pruning by `"topk"` learns, or itself without such keys.

        They are parameters beside the weights, as `fds.compression.with_scores` makes them; those that are there stay.
        `fds.initialize` does so by itself.

        Raises `ConfigError` for groups that name no module, and a module that two name.
        """
        return with_scores(self, model)

    def reduce_layers(
        self, params: Mapping[str, Tensor], student: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the parameters with which a student of `compression_training.layer_reduction` begins, copies.

        Its layer i is layer `teacher_layer[i]` of the teacher. Without `student` all else is the teacher's too, as
        `fds.reduce_layers` has it; with it only the modules of `other_module_name` are, and the rest are the student's.
        Where the key is not enabled nothing is reduced.

        Args:
            params: the teacher's, by name.
            student: its own, by name, of as many layers as it is to have.

        Raises `ConfigError` for a teacher without such layers, and a student that is not like it.
        """
        return student_of(self, params, student)

    def monitor(self, mesh: Mesh) -> Monitor:
        """Return the monitor that `tensorboard`, `csv_monitor`, `wandb`, `comet` and `steps_per_print` ask for.

        Call it after each step, `monitor(state, metrics)`; see `fds.monitor`. Where no key asks for anything it writes
        nothing. All ranks make it.

        Raises `FdsError` for a package that is not installed, `ConfigError` for batch sizes that do not multiply, and
        `MeshError` for a mesh without `dp`.
        """
        resolved = self.resolve(world_size=composition.data_ranks(_sizes(mesh)))
        return monitor(*sinks(resolved), batch_size=resolved.batch.train_batch_size)

    def timed(self, mesh: Mesh) -> Timed:
        """Return the timer that `wall_clock_breakdown` and `activation_checkpointing.profile` ask for; see `fds.timed`.

        It times the calls that `steps_per_print` names, or all of them, and knows the samples of a call; with `profile`
        it times every layer: forward, computed again, and backward. Where both keys are false it times none, so that
        the program is the same.

        Raises `ConfigError` for batch sizes that do not multiply, and `MeshError` for a mesh without `dp`.
        """
        resolved = self.resolve(world_size=composition.data_ranks(_sizes(mesh)))
        layers = resolved.activation_checkpointing.profile
        interval = (printed_every(resolved) or 1) if resolved.logging.wall_clock_breakdown or layers else None
        return timed(every=interval, layers=layers, samples=resolved.batch.train_batch_size)

    def dump_state(self, state: State, step: Step) -> None:
        """Print what a step and its state are, as `fds.dump_state` says it, where the key `dump_state` asks for it.

        The first rank prints; all of them may call it. `fds.initialize` does so with the first state.

        Raises `FdsError` for what is no state and no step.
        """
        if self.logging.dump_state and worlds.current().rank == 0:
            print(dump_state(state, step))

    def messages(self, mesh: Mesh) -> Messages:
        """Return the log of messages that `comms_logger` asks for; see `fds.messages`.

        It watches every call, of the operations of `prof_ops` if `prof_all` is false. Where the key is not enabled it
        watches none, so that the program is the same.

        Raises `ConfigError` for a name in `prof_ops` that is no operation and batch sizes that do not multiply, and
        `MeshError` for a mesh without `dp`.
        """
        resolved = self.resolve(world_size=composition.data_ranks(_sizes(mesh)))
        asked, ops = resolved.comms_logger, operations(resolved)
        return messages(every=1 if asked.enabled else None, ops=ops, verbose=asked.verbose, debug=asked.debug)

    def memory_breakdown(self, mesh: Mesh) -> MemoryBreakdown:
        """Return the gauge that `memory_breakdown` asks for; see `fds.memory_breakdown`.

        It measures the calls that `steps_per_print` names, or all of them; where the key is false none.

        Raises `ConfigError` for batch sizes that do not multiply, and `MeshError` for a mesh without `dp`.
        """
        resolved = self.resolve(world_size=composition.data_ranks(_sizes(mesh)))
        return memory_breakdown(every=(printed_every(resolved) or 1) if resolved.logging.memory_breakdown else None)

    def eigenvalues(self, loss: Any, params: Any, batch: Any, *, axis: Axis | None = None) -> dict[str, Eigenvalue]:
        """Return the curvature of the layers that `eigenvalue`, or `quantize_training.eigenvalue`, names.

        It is that of `fds.curvature.top_eigenvalue`.

        A layer is a block of its own, `"bert.encoder.layer.0.*"`. Whoever trains decides when: after any step, with
        `step.params(state)`. Where the key is not enabled nothing is measured, and the dict is empty: so are factors,
        which then change nothing.

        Args:
            loss: as for `compose(...)(loss)`; where `params` is a model, as for `fds.initialize`: of `Layers` None.
            params: whole parameters; or a module, or `Layers`, for what they begin with.
            batch: of this rank.
            axis: data ranks that share the loss; all of them call this.

        Raises `ConfigError` for layers that are not there, and what `top_eigenvalue` raises.
        """
        if isinstance(params, nn.Module | Layers):
            loss, params = loss_and_params(params, loss)
        return eigenvalues(self, loss, params, batch, axis=axis)

    def explain(
        self,
        mesh: Mesh | Mapping[str, int],
        *,
        num_parameters: int | None = None,
        model: nn.Module | Layers | None = None,
    ) -> str:
        """Explain the configuration: the composition as Python, batch sizes, memory per rank, and keys without effect.

        Args:
            mesh: a mesh, or the sizes of its axes: `{"dp": 8}`.
            num_parameters: of the model, to show bytes beside the formulas.
            model: that is trained, a module or `Layers`: the names of its embeddings and of modules that are compressed
                are read from it. Without it patterns are guessed.

        Raises `ConfigError` for sizes that are not positive, and for groups that name no module; `ComposeError` for a
        model that is no module.
        """
        if num_parameters is not None and (type(num_parameters) is not int or num_parameters < 1):
            raise ConfigError(
                "not a number of parameters", where="num_parameters", got=repr(num_parameters), want="1 or more"
            )
        check_model(model)
        return str(explanation(self, mesh if isinstance(mesh, Mapping) else _sizes(mesh), num_parameters, model))


attrs.frozen(TrainingConfig, slots=False)  # in place: a decorator would hide from editors that keys are taken


def check_model(model: Any) -> None:
    """Raise `ComposeError` for what is no model."""
    if model is not None and not isinstance(model, nn.Module | Layers):
        raise ComposeError("not a module", where="model", got=repr(model)[:60], want="an nn.Module, Layers, or None")


def _sizes(mesh: Any) -> dict[str, int]:
    if not isinstance(mesh, Mesh):
        raise MeshError("not a mesh", got=repr(mesh)[:80], want="fds.mesh(dp=-1)")
    return mesh.shape


def sinks(config: Groups) -> list[Sink]:
    """Return where a resolved configuration has metrics written. Raises `FdsError` for a package that is missing."""
    out: list[Sink] = []
    for group, make in ((config.tensorboard, TensorBoard), (config.csv_monitor, CSV)):
        if group.enabled:
            out.append(make(os.path.join(group.output_path or "", group.job_name)))
    if config.wandb.enabled:
        out.append(WandB(config.wandb.project, team=config.wandb.team, group=config.wandb.group))
    if (comet := config.comet).enabled:
        assert config.batch.train_batch_size is not None
        out.append(
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
    if (interval := printed_every(config)) is not None:
        out.append(Console(every=interval))
    return out


def printed_every(config: Groups) -> int | None:
    """Return the calls between two lines of the console; None for no lines."""
    calls = config.logging.steps_per_print
    return None if calls is None or calls == math.inf else math.ceil(calls)


# DeepSpeed's names of what has another name here, and of what is never sent.
_SAME = {"isend": "send", "irecv": "recv", "monitored_barrier": "barrier", "broadcast_object_list": "exchange"}
_SAME |= {"all_gather_object": "exchange", "inference_all_reduce": "all_reduce"}
_NEVER = ("gather", "reduce", "scatter")
_ENDINGS = r"(_into_tensor|_tensor|_base|_coalesced|_single|_fn)+$"


def operations(config: Groups) -> list[str] | None:
    """Return the operations that a configuration has logged, None for all.

    Raises `ConfigError` for a name that is no operation.
    """
    asked = config.comms_logger
    return None if asked.prof_all else list(dict.fromkeys(op for name in asked.prof_ops for op in _named(name)))


def _named(name: str) -> list[str]:
    """Return the operation of this name, nothing for one that is never sent.

    >>> _named("all_gather_into_tensor"), _named("isend"), _named("scatter")
    (['all_gather'], ['send'], [])
    """
    short = re.sub(_ENDINGS, "", name)
    operation = _SAME.get(short, short)
    if operation not in OPERATIONS and operation not in _NEVER:
        raise ConfigError(
            "no such operation",
            where="comms_logger.prof_ops",
            got=repr(name),
            want=", ".join(OPERATIONS),
            hint=nearest(short, OPERATIONS),
        )
    return [operation] if operation in OPERATIONS else []


# What needs neither a mesh nor batch sizes is built once when a configuration is read, so that an error names its keys.
_CALLS = (  # function that returns a call, and the groups that it reads
    (lambda config: optimizer_call(config) or schedule_call(config), ("optimizer", "scheduler")),
    (loss_scale_call, ("fp16", "amp", "torch_autocast")),
    (clipping_call, ("clipping",)),
    (difficulty_call, ("curriculum_learning",)),
    (random_ltd_call, ("data_efficiency",)),
)


def check_buildable(config: Groups) -> None:
    """Raise `ConfigError`, with the JSON paths, for values that an optimizer, a schedule or a loss scale refuses.

    Groups that contain `"auto"` are checked once it is filled in.
    """
    for call_of, names in _CALLS:
        groups = [getattr(config, name) for name in names]
        if any(group is not None and auto_paths(group.to_dict()) for group in groups):
            continue
        try:
            call = call_of(config)
        except ConfigError:
            continue  # it needs an argument of `initialize`
        _check_call(config, call)


def _check_call(config: Groups, call: Any) -> None:
    """Build a call, after the calls among its arguments."""
    if isinstance(call, tuple):
        for item in call:
            _check_call(config, item)
    if not isinstance(call, FunctionCall):
        return
    for argument in (*call.args, *call.kwargs.values()):
        _check_call(config, argument)
    try:
        call.build(None)
    except FdsError as error:
        paths = list(_paths(config, call.path, str(error)))
        raise ConfigError(
            error.what, where=", ".join(paths), got=error.got, want=error.want, hint=error.hint
        ) from error


def _paths(config: Groups, function: str, message: str) -> Iterator[str]:
    """Yield the keys whose arguments of a function an error message mentions; if none, all that were given."""
    keys = [
        (path, key.meaning.name, is_given)
        for path, value, key, is_given in config.walk()
        if isinstance(key.meaning, Argument)
        and function in key.meaning.of
        and not isinstance(value, Config)
        and not _is_off(config, path.rpartition(".")[0])
    ]
    named = [path for path, name, _ in keys if name and re.search(rf"\b{name}\b", message)]
    yield from named or [path for path, _, is_given in keys if is_given]


def _is_off(config: Groups, group: str) -> bool:
    return group in ("fp16", "amp", "torch_autocast") and config[f"{group}.enabled"] is False
