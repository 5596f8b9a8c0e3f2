"""One call for a program that comes from DeepSpeed: module, loss and configuration in, step and state out."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from fds.collectives import Mesh, init_distributed, mesh as make_mesh, worlds
from fds.collectives.launch import launched
from fds.config.agreement import agreed
from fds.config.arguments import config_of
from fds.config.training import TrainingConfig
from fds.config.translate.composition import calls
from fds.config.unknown import Unknown
from fds.data import DistributedLoader
from fds.errors import ComposeError, ConfigError, DataError, LossError, MeshError
from fds.loss import Layers, functional, with_buffers
from fds.optim import Optimizer
from fds.state import State
from fds.step import Step, Transform, compose
from fds.step.contracts import takes
from fds.transforms.freeze import freeze

Schedule = Callable[[Any], Any]


def initialize(
    model: nn.Module | Layers,
    loss: Callable | None = None,
    *,
    config: TrainingConfig | Mapping[str, Any] | str | os.PathLike | None = None,
    args: Any = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    schedule: Schedule | None = None,
    training_data: Any = None,
    collate_fn: Callable[[list], Any] | None = None,
    mesh: Mesh | None = None,
    auto: Mapping[str, Any] | None = None,
    unknown: Unknown = "error",
    transforms: Sequence[Any] = (),
    key: int = 0,
) -> tuple[Step, State, DistributedLoader | None, Schedule | None]:
    """Return the step, its first state, the loader of the training data, and the learning rate's schedule.

    Everything that it does can be read in `config.explain(mesh)`, and done by hand with
    `fds.compose(*config.transforms(mesh))(loss_fn)`.

    Args:
        model: a module, whose parameters training begins with, on the device where they are, and which is never
            touched; or `Layers`. Parameters that the module wants no gradient for are frozen.
        loss: of a module `loss(model, batch)`, where `model` is called as the module is and computes with the step's
            parameters; it returns a scalar, `(scalar, metrics)` or a `Mean`. None calls the module with the batch (a
            dict as keywords, a tuple as arguments) and takes its output, or its `.loss`. `Layers` are their own loss.
        config: a `TrainingConfig`, or where one is read from: a dict, a path of a JSON file.
        args: of a parser with `fds.add_config_arguments`, in place of `config`.
        optimizer: in place of the JSON's: an `Optimizer`, or a function from the learning rate to one, such as
            `fds.adamw`, which is given the schedule.
        schedule: f(t), t = updates applied before this one, in place of the JSON's scheduler.
        training_data: a map-style data set. The loader has a batch for each call of the step, this rank's share.
        collate_fn: rows -> batch; torch's unless given.
        mesh: with an axis `dp`, and `pp` for a pipeline; all ranks as data ranks unless given.
        auto: JSON path -> value of keys that are `"auto"`; see `TrainingConfig.resolve`.
        unknown: `"warn"` leaves out keys of the JSON that nobody knows; see `TrainingConfig.of`.
        transforms: further ones, that no key asks for, such as `fds.donate()` and `fds.ema(0.999)`.
        key: seed of the state's random numbers, of `Layers`' first parameters and of the data's order.

    Joins the ranks that torchrun, Slurm or MPI started, if nobody has. Raises `ConfigError` where JSON and arguments
    both say something, and everything that composing and `step.init` raise.
    """
    mesh = _mesh() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise MeshError("this is no mesh", where="mesh", got=repr(mesh)[:80], want="fds.mesh(dp=-1)")

    def resolved() -> TrainingConfig:
        found = _read(config_of(args, config), unknown).resolve(world_size=_data_axis(mesh).size, auto=auto)
        _refuse_twice(found, optimizer, schedule)
        return found

    config = agreed(mesh, resolved, key)
    if schedule is None:
        schedule = config.schedule()
    loss_fn, params = _loss(model, loss, key)
    step = compose(*_frozen(model), *transforms, *_transforms(config, mesh, optimizer, schedule))(loss_fn)
    loader = None if training_data is None else _loader(config, mesh, training_data, collate_fn, key)
    return step, step.init(params, key=key), loader, schedule


def _read(config: Any, unknown: Unknown) -> TrainingConfig:
    return config if isinstance(config, TrainingConfig) else TrainingConfig.of(config, unknown=unknown)


def _mesh() -> Mesh:
    launch = launched(os.environ)
    if worlds.current() is worlds.SINGLE and launch is not None and launch.world_size > 1:
        init_distributed()
    return make_mesh(dp=-1)


def _data_axis(mesh: Mesh) -> Any:
    return mesh["replicate", "dp"] if "replicate" in mesh.shape else mesh["dp"]


def _refuse_twice(config: TrainingConfig, optimizer: Any, schedule: Any) -> None:
    """Raise `ConfigError` where JSON and arguments both say something: one of them would be ignored."""
    for name, argument, group in (("optimizer", optimizer, config.optimizer), ("schedule", schedule, config.scheduler)):
        key = "scheduler" if name == "schedule" else name
        if argument is not None and group is not None and group.type is not None:
            raise ConfigError(f"the {name} is given twice", where=f"{name}=, {key}.type",
                              got=f"{argument!r:.60} and {group.type!r}", want="one of them")
    cycle = config.scheduler is not None and config.scheduler.type == "OneCycle"
    if optimizer is not None and cycle and config["scheduler"].arguments.cycle_momentum:
        raise ConfigError("OneCycle moves the betas of an optimizer that is in the JSON only",
                          where="optimizer=, scheduler.params.cycle_momentum", got=f"{optimizer!r:.60} and true",
                          want='"cycle_momentum": false, or the optimizer in the JSON')
    scheduled = schedule is not None or (config.scheduler is not None and config.scheduler.type is not None)
    if isinstance(optimizer, Optimizer) and scheduled:
        raise ConfigError("an optimizer has its schedule already", where="optimizer=",
                          got=f"{optimizer!r} and a schedule", want="a function of the schedule, such as fds.adamw")


def _transforms(config: TrainingConfig, mesh: Mesh, optimizer: Any, schedule: Any) -> list[Any]:
    made = list(calls(config, mesh.shape))
    if config.optimizer is not None and config.optimizer.type is not None:
        if schedule is not None:  # with the one from the JSON, what the call says already
            made[-1] = attrs.evolve(made[-1], args=(schedule,))
        return [call.build(mesh) for call in made]
    if optimizer is None:
        raise ConfigError("there is no optimizer", where="optimizer, optimizer=", got="neither",
                          want='"optimizer": {"type": "AdamW", ...} in the JSON, or optimizer=fds.adamw(3e-4)')
    if isinstance(optimizer, type) or not (callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise ConfigError("this is no optimizer of fds", where="optimizer=", got=type(optimizer).__name__,
                          want="fds.adamw, which is given the schedule, or fds.adamw(3e-4)")
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer() if schedule is None else optimizer(schedule)
    return [*(call.build(mesh) for call in made), optimizer]


def _frozen(model: Any) -> list[Transform]:
    """Return what freezes the parameters that a module wants no gradient for."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    names = [glob.escape(name) for name, x in named if not x.requires_grad]
    return [freeze(*names)] if names else []


def _loss(model: Any, loss: Callable | None, key: int) -> tuple[Any, Any]:
    """Return a loss of parameters and batch, and what `step.init` takes."""
    if isinstance(model, Layers):
        if loss is not None:
            raise ComposeError("layers have their criterion", where="loss", got=f"{loss!r:.60} and Layers",
                               want="fds.Layers(layers, criterion)")
        return model, model.init
    if not isinstance(model, nn.Module):
        raise ComposeError("this is no model", where="model", got=type(model).__name__, want="a module, or fds.Layers")
    if any(x.is_meta for x in model.parameters()):
        raise ComposeError("the module has no values", where="model", got="parameters on meta",
                           want="step.init(fds.recipe(Model)) of fds.compose(*config.transforms(mesh))(loss_fn)")
    if loss is not None and not takes(2)(loss):
        raise ComposeError("this is no loss", where="loss", got=repr(loss)[:60], want="loss(model, batch) -> scalar")
    apply, params, buffers = functional(model)
    name = type(model).__name__ if loss is None else getattr(loss, "__name__", type(loss).__name__)
    loss = _own_loss if loss is None else loss
    if not _changes_buffers(model):
        plain = lambda params, batch: loss(_Model(functools.partial(apply, params)), batch)
        plain.__name__ = name
        return plain, params

    def threaded(params: Any, batch: Any, buffers: dict[str, Tensor]) -> tuple[Any, dict, dict[str, Tensor]]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal buffers
            out, buffers = apply.with_buffers(params, buffers, *args, **kwargs)
            return out

        value = loss(_Model(call), batch)
        value, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        return value, metrics, buffers

    threaded.__name__ = name
    return with_buffers(threaded, buffers), params


class _AttributeError(LossError, AttributeError):
    """So that `hasattr` and `getattr` with a default go on."""


@attrs.frozen(eq=False)
class _Model:
    """What a loss calls as it would the module, with the parameters of the step."""

    call: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise _AttributeError(
            "the model that a loss is given can be called, and has no attributes", where="loss(model, batch)",
            got=f"model.{name}", want="model(...)",
            hint="read settings from the module itself; parameters, which are those of the step, are an argument of "
            "the loss in fds.compose(*config.transforms(mesh))(loss_fn): loss_fn(params, batch)",
        )  # fmt: skip


def _own_loss(model: Callable, batch: Any) -> Any:
    """Return the loss that a module computes itself."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return getattr(out, "loss", out)


def _changes_buffers(model: nn.Module) -> bool:
    """Return whether the module has batch statistics; what changes other buffers is refused where it happens."""
    return any(isinstance(one, nn.modules.batchnorm._NormBase) and one.track_running_stats for one in model.modules())


def _loader(
    config: TrainingConfig, mesh: Mesh, data: Any, collate_fn: Callable[[list], Any] | None, key: int
) -> DistributedLoader:
    batch = config.batch
    assert batch.train_batch_size is not None and batch.gradient_accumulation_steps is not None
    last = "drop" if config["dataloader_drop_last"] else "wrap"
    try:
        return DistributedLoader(data, batch.train_batch_size, _data_axis(mesh), seed=key, last=last,
                                 collate=collate_fn, num_microbatches=batch.gradient_accumulation_steps)
    except DataError as error:
        hint = error.hint
        if "last=" in hint:  # an argument that nobody gave here: the key that decides it
            hint = '"dataloader_drop_last": false, or a smaller train_batch_size'
        raise DataError(error.what, where=error.where, got=error.got, want=error.want, hint=hint) from error
