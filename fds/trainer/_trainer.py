"""`Trainer`: the loop of transformers' `Trainer`, an update of which is one call of a step.

Theirs calls `training_step` for every microbatch, then clips, steps the optimizer, and the scheduler. Here
`training_step` collects the microbatches, and the last one of an update calls the step with all of them. What comes
after it in their loop reads what the step has done: its norm, its rates. The module is written to when somebody reads
it: an evaluation, a save, a callback.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from fds.collectives import init_distributed, mesh as make_mesh, worlds
from fds.config import TrainingConfig, training_arguments
from fds.config.composition import compute_dtype
from fds.config.initialize import initialize
from fds.config.losses import loss_and_params
from fds.config.reading import read
from fds.errors import ComposeError, ConfigError, StorageError
from fds.microbatches import Microbatches
from fds.state import State
from fds.step import Split, Step, Transform, compose, whole
from fds.step.composition import Composition
from fds.storage import load, save
from fds.trainer._arguments import (
    Rates,
    check_arguments,
    check_json,
    hidden_size_of,
    optimizer_of,
    rates_of,
    round_trained,
)
from fds.trainer._stand_ins import Follower, Readers, StandIn, events_of, home
from fds.transforms.clip import clip_by_global_norm
from fds.transforms.freeze import freeze
from fds.transforms.loss_scale import loss_scale
from fds.transforms.offload import donate
from fds.transforms.precision import autocast
from fds.transforms.shard_optimizer import shard_optimizer

if TYPE_CHECKING:
    Theirs = Any  # transformers' Trainer, which is imported with the class that has this one among its bases
else:
    Theirs = object

FOLDER, TAG = "fds", "state"  # in a checkpoint of theirs
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class StepTrainer(Theirs):
    """What `fds.hf.Trainer` changes of transformers' `Trainer`, which is its other base.

    Their loop, arguments, callbacks, logs, evaluations and checkpoints stay. An update is one call of a step, of the
    composition `step`, or of the JSON `config`, or of the arguments. `class SFT(fds.hf.Trainer, trl.SFTTrainer)` is a
    trainer of TRL that does so.

    Args:
        model: as theirs.
        args: `TrainingArguments`.
        rest: as theirs.
        step: `fds.compose(...)`, which trains on the trainer's own loss (`compute_loss`, with what it makes of
            `num_items_in_batch`, label smoothing and `compute_loss_func`); or a `Step`, which has a loss of its own,
            `loss_fn(params, batch)` of the model's parameters by name and a batch of the collator. Arguments that a
            composition says itself (`learning_rate`, `max_grad_norm`, `bf16`, ...) keep their defaults.
        config: DeepSpeed's JSON, as `fds.initialize` takes it. Values that are `"auto"` come from the arguments;
            without an optimizer, or a scheduler, that of the arguments is taken.
        theirs: as theirs.

    Attributes:
        step: the step, while and after training.
        step_state: its state, which the next update takes over.
        step_metrics: what the last update returned.

    Without both, the arguments are translated. Raises `ConfigError` and `ComposeError` for what is not followed.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, step: Any = None, config: Any = None, **theirs: Any
    ):
        if step is not None and config is not None:
            raise ConfigError("the step is given twice", where="step=, config=", got="both", want="one of them")
        if step is not None and not isinstance(step, Step | Composition | Transform):
            raise ComposeError(
                "not a step", where="step=", got=repr(step)[:60], want="fds.compose(...), or fds.compose(...)(loss_fn)"
            )
        if args is not None:
            check_arguments(args, composed=step is not None)
        self._asked, self._config = step, config
        self.step: Step | None = None
        self.step_state: State | None = None
        self.step_metrics: dict[str, Tensor] = {}
        self._parts: list[dict[str, Any]] = []
        self._steps: dict[int, Step] = {}
        self._is_written, self._trained = True, None
        self.read_events: set[str] = set()
        super().__init__(model, args, *rest, **theirs)
        check_arguments(self.args, composed=step is not None)
        self._check()
        self.callback_handler.callbacks.insert(0, Readers(self))

    # What cannot be kept is refused

    def _check(self) -> None:
        sharded = "is_deepspeed_enabled is_fsdp_enabled is_model_parallel is_distributed_loading_by_transformers"
        for name in sharded.split():
            if getattr(self, name, False):
                raise ConfigError(
                    "another library shards the model",
                    where="accelerate",
                    got=name,
                    want="a launch by torchrun, without an accelerate configuration",
                )
        for name in ("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    "the optimizer is a part of the step",
                    where="optimizers=, optimizer_cls_and_kwargs=",
                    got=f"{getattr(self, name)!r:.60}",
                    want="step=fds.compose(..., fds.adamw(lr))",
                )
        if home(type(self).create_optimizer) != "transformers":
            raise ConfigError(
                "the optimizer is a part of the step, and a method of yours makes another",
                where=f"{type(self).__name__}.create_optimizer",
                want="step=fds.compose(..., fds.adamw(lr))",
            )
        if isinstance(self._asked, Step):
            for name in ("label_smoother", "compute_loss_func"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        "the step has its own loss",
                        where="step=",
                        got=f"fds.compose(...)(loss_fn), and {name}",
                        want="fds.compose(...), whose loss is then the Trainer's",
                    )
        if self.accelerator.num_processes > 1 and worlds.current() is worlds.SINGLE:
            init_distributed()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # the step scales and casts: a scaler of theirs would do so again
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # The step

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.write_back()
        self.model.train()
        self._trained, self._parts, self._steps, self.step_metrics = self.model, [], {}, {}
        self.step, state = self._composed(max_steps)
        self._check_step(self.step)
        if resume_from_checkpoint is not None:
            del state
            state = self._loaded(resume_from_checkpoint)
        self.step_state, self._is_written = state, resume_from_checkpoint is None
        self.optimizer = self.lr_scheduler = Follower(defaults={"lr": self.args.learning_rate})
        self._created_lr_scheduler = True
        # known to accelerate, and not wrapped by it
        self.model_wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        mine, everyone = events_of(self.callback_handler.callbacks), self.step.dimensions.everyone
        of_ranks = [sorted(mine)] if everyone is None else everyone.exchange(sorted(mine), "events of callbacks")
        self.read_events = set(itertools.chain(*of_ranks))  # the same on all ranks, which write back together
        return self.model, train_dataloader

    def _composed(self, updates: int) -> tuple[Step, State]:
        """Return the step of so many updates, and the state in which it begins."""
        if self._config is not None:
            return self._configured(updates)
        if isinstance(self._asked, Step):
            step, params = self._asked, {name: p.detach() for name, p in self.model.named_parameters()}
        else:
            loss, params = loss_and_params(self.model, self._loss)
            asked = self._translated(updates) if self._asked is None else [self._asked]
            step = compose(*self._frozen(asked), *asked)(loss)
        return step, step.init(params, key=self.args.seed)

    def _translated(self, updates: int) -> list[Any]:
        """Return the transforms that the arguments ask for."""
        args, low = self.args, torch.float16 if self.args.fp16 else torch.bfloat16
        return [
            donate(),
            *([shard_optimizer(make_mesh(dp=-1)["dp"], stage=0)] if args.world_size > 1 else []),
            *([autocast(low)] if args.fp16 or args.bf16 else []),
            *([loss_scale(window=2000, hysteresis=1)] if args.fp16 else []),  # as torch.amp.GradScaler
            clip_by_global_norm(args.max_grad_norm or math.inf),
            optimizer_of(args, self._decayed(), self._rates(updates)),
        ]

    def _configured(self, updates: int) -> tuple[Step, State]:
        """Return step and state of DeepSpeed's JSON; an optimizer or schedule that it has not is the arguments'."""
        data = self._json()
        config = TrainingConfig.of(data)
        auto = training_arguments(self.args, hidden_size=hidden_size_of(self.model), num_training_steps=updates)
        check_json(config, self.args)
        round_trained(self.model, compute_dtype(config.filled(auto)))
        kinds = (config.optimizer, config.scheduler)
        optimizes, schedules = (group is not None and group.type is not None for group in kinds)
        step, state, *_ = initialize(
            self.model,
            self._loss,
            config=config,
            auto=auto,
            optimizer=None if optimizes else functools.partial(optimizer_of, self.args, self._decayed()),
            schedule=None if schedules else self._rates(updates),
            transforms=[donate()],
            key=self.args.seed,
        )
        return step, state

    def _json(self) -> dict[str, Any]:
        config: Any = self._config
        data = dict(config.to_dict() if isinstance(config, TrainingConfig) else read(config))
        for name in _BATCH_SIZES:
            data.setdefault(name, "auto")
        for name in ("fp16", "bf16"):  # as accelerate fills in
            if getattr(self.args, name):
                data.setdefault(name, {"enabled": True})
        return data

    def _rates(self, updates: int) -> Rates:
        """Return the rates of the scheduler that the arguments name, or a method of the user's makes."""
        self.lr_scheduler = None
        follows = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=self.args.learning_rate)
        return rates_of(self.args, self.create_scheduler(updates, follows), updates)

    def _decayed(self) -> dict[str, bool]:
        """Return by name whether a trained parameter decays, as transformers has it."""
        names = set(self.get_decay_parameter_names(self.model))
        return {name: name in names for name, p in self.model.named_parameters() if p.requires_grad}

    def _frozen(self, asked: list[Any]) -> list[Transform]:
        parts = asked[0].parts if len(asked) == 1 and isinstance(asked[0], Composition) else asked
        names = [glob.escape(name) for name, p in self.model.named_parameters() if not p.requires_grad]
        return [freeze(*names)] if names and not any(getattr(part, "name", "") == "freeze" for part in parts) else []

    def _check_step(self, step: Step) -> None:
        """Raise `ComposeError` for a step that takes other microbatches, or other shares of the rows."""
        asked, n = self.args.gradient_accumulation_steps, step.split.num_microbatches
        if "execute" in step.composing.owners or n not in (1, asked):
            raise ComposeError(
                "the arguments say how many microbatches an update has",
                where="args.gradient_accumulation_steps",
                got=f"{asked}, and {step.split!r} in the step",
                want=f"no accumulate in step=, or accumulate({asked}); no pipeline",
            )
        shares, size = step.dimensions.peers, self.args.world_size
        if (1 if shares is None else shares.size) != size or (step.dimensions.sequence is not None):
            raise ComposeError(
                "every rank of a Trainer passes rows of its own",
                where="step=",
                got=f"{1 if shares is None else shares.size} of {size} ranks do so",
                want='fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=...) in step=, and no other axis',
            )

    def _loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return their loss of a microbatch, times what makes the step's mean of them the sum that they add up."""
        inputs = dict(batch["inputs"])
        value = self.compute_loss(StandIn(model, self.model), inputs, num_items_in_batch=batch["num_items"])
        return value.float() * batch["factor"]

    # The loop

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a microbatch; with the last of an update make it. Return the update's loss, and before it 0."""
        model.train()
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts or self.compute_loss_func is not None
        share = 1.0 if is_scaled else 1.0 / self.current_gradient_accumulation_steps
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        if items is not None and items.is_floating_point():
            items = items.double().round().long()  # a transform that lowers precision casts floating point leaves
        self._parts.append({"inputs": dict(self._prepare_inputs(inputs)), "num_items": items, "factor": share})
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._parts = self._parts, []
        assert self.step_state is not None
        batch = [self._part(part, len(parts)) for part in parts]
        self.step_state, metrics = self._of(len(parts))(self.step_state, Microbatches(tuple(batch)))
        self.step_metrics, self._is_written = metrics, False
        rates = [metrics["lr"]] if "lr" in metrics else [x for name, x in metrics.items() if name.startswith("lr/")]
        self.optimizer.rates[:] = map(float, rates)
        return metrics["loss"].detach().float().to(self.args.device).clone()

    def _part(self, part: dict[str, Any], n: int) -> Any:
        inputs = part["inputs"]
        tensors = [x for x in inputs.values() if isinstance(x, Tensor) and x.dim()]
        rows = len(inputs.get("input_ids", tensors[0])) if tensors else 0
        if any(len(x) != rows for x in tensors):  # offsets of packed documents, say, of a microbatch as they are
            inputs = {
                name: whole(x) if isinstance(x, Tensor) and x.dim() and len(x) != rows else x
                for name, x in inputs.items()
            }
        return inputs if isinstance(self._asked, Step) else {**part, "inputs": inputs, "factor": part["factor"] * n}

    def _of(self, n: int) -> Step:
        """Return the step for so many microbatches: the last update of an epoch may have fewer."""
        assert self.step is not None
        if n not in self._steps:
            self._steps[n] = attrs.evolve(self.step, split=Split(n))
        return self._steps[n]

    def _clip_grad_norm(self, model: Any) -> Tensor | None:
        return self.step_metrics.get("grad_norm")

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.step_metrics.get("grad_norm")

    # The module

    def write_back(self) -> None:
        """Write the step's parameters and buffers into the module, if they are not there yet; all ranks call it.

        Evaluations, saves and the events of your callbacks do so by themselves.
        """
        if not self._is_written and self.model is self._trained:
            assert self.step is not None and self.step_state is not None
            with torch.no_grad():
                self.step.into(self.model, self.step_state)
            self._is_written = True

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.write_back()  # so that afterwards one rank may save alone
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate by their loop, with the step's parameters in the module."""
        self.write_back()
        return super().evaluation_loop(*args, **kwargs)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the context of their evaluations: what `bf16` and `fp16` ask for."""
        args = self.args
        if not (args.bf16 or args.fp16) or torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autocast(args.device.type, torch.float16 if args.fp16 else torch.bfloat16)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as they do, with the step's parameters; all ranks call it."""
        self.write_back()
        super().save_model(output_dir, _internal_call=_internal_call)

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.step is not None and self.step_state is not None
        save(os.path.join(output_dir, FOLDER), self.step_state, self.step, TAG, take_over=True)

    def _loaded(self, checkpoint: str) -> State:
        """Return the state in a checkpoint of theirs. Raises `StorageError` for one without it."""
        dir = os.path.join(checkpoint, FOLDER)
        if not os.path.isdir(dir):
            raise StorageError(
                "the checkpoint has no state of a step",
                where=str(checkpoint),
                got="one of transformers' Trainer, or save_only_model=True",
                want=f"the folder {FOLDER!r}, which fds.hf.Trainer writes",
                hint="begin anew with its weights: from_pretrained(checkpoint)",
            )
        assert self.step is not None
        params = {name: p.detach() for name, p in self.model.named_parameters()}
        return load(dir, self.step, params, tag=TAG, take_over=True)[0]

    def _load_best_model(self) -> None:
        self._is_written = True  # what is loaded stays
        super()._load_best_model()
        if self.step is not None and self.step_state is not None:
            params = {name: p.detach() for name, p in self.model.named_parameters()}
            self.step_state = self.step.with_params(self.step_state, params)


@functools.cache
def trainer_class() -> type:
    """Return the class `Trainer`, whose bases are `StepTrainer` and transformers'. Raises `ConfigError` without it."""
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(
            "transformers and accelerate are needed", where="fds.hf.Trainer", got=str(error), want="pip install fds[hf]"
        ) from error
    return type(
        "Trainer", (StepTrainer, transformers.Trainer), {"__doc__": StepTrainer.__doc__, "__module__": "fds.hf"}
    )
