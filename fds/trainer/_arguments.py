"""transformers' `TrainingArguments` as transforms, and a JSON beside them: optimizer, rates, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from fds.errors import ConfigError
from fds.optim import Optimizer, adagrad, adamw, by_name, sgd

_ABSENT = (None, False, "", 0, "no")

# attribute of the arguments -> what is written instead of it
_REFUSED = {
    "deepspeed": 'Trainer(config="ds_config.json"), with the same JSON',
    "fsdp": 'zero_optimization in config=, or fds.shard_optimizer(mesh["dp"], stage=3) in step=',
    "parallelism_config": "the axes of fds.mesh, in step=",
    "torch_compile": "fds.compile() in step=",
    "auto_find_batch_size": "a per_device_train_batch_size that fits: fds.estimate_memory",
    "neftune_noise_alpha": "no noise, or a model that adds it in its forward",
    "use_liger_kernel": "fds.nn's layers, which have kernels",
    "debug": "fds.watch, or fds.debugging",
    "enable_jit_checkpoint": "save_steps",
    "torch_empty_cache_steps": "torch.cuda.empty_cache() in a callback",
    "activation_offloading": 'fds.checkpoint_activations(store="host") in step=, of Layers',
    "optim_args": "an optimizer in step=",
    "optim_target_modules": "an optimizer in step=",
    "ddp_bucket_cap_mb": 'fds.shard_optimizer(mesh["dp"], bucket_bytes=...) in step=',
    "ddp_broadcast_buffers": "fds.with_buffers, whose statistics are averaged",
    "ddp_static_graph": "nothing: there is no DDP",
    "save_on_each_node": "one file system for all nodes, or fds.save(..., local=True)",
}

# what a composition says itself, so that arguments may not
_OF_A_STEP = (
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon max_grad_norm bf16 fp16"
)

_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw_torch": lambda rates, decay, **adam: adamw(rates, weight_decay=decay, **adam),
    "adamw_torch_fused": lambda rates, decay, **adam: adamw(rates, weight_decay=decay, **adam),
    "sgd": lambda rates, decay, **_: sgd(rates, weight_decay=decay),
    "adagrad": lambda rates, decay, **_: adagrad(rates, weight_decay=decay),
}


def check_arguments(args: Any, *, composed: bool) -> None:
    """Raise `ConfigError` for arguments that ask for what is not done, or that a composition says itself."""
    for name, want in _REFUSED.items():
        value = getattr(args, name, None)
        if value not in _ABSENT and value not in ([], {}):
            raise ConfigError(
                "an argument that fds does not follow", where=f"args.{name}", got=_shown(value), want=want
            )
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(
            "one process has several GPUs, which share no step",
            where="args.n_gpu",
            got=f"{args.n_gpu} GPUs",
            want="one process for each: torchrun --nproc-per-node=N, or CUDA_VISIBLE_DEVICES=0",
        )
    loading = getattr(args, "accelerator_config", None)
    for name, good in (("even_batches", True), ("gradient_accumulation_kwargs", None)):
        value = getattr(loading, name, good)
        if value not in (good, {}) and not (isinstance(value, Mapping) and set(value) <= {"num_steps"}):
            raise ConfigError(
                "ranks pass equally many batches, and one call takes those of an update",
                where=f"args.accelerator_config.{name}",
                got=_shown(value),
                want=f"{good}",
            )
    if composed:
        _check_composed(args)


def _check_composed(args: Any) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in _OF_A_STEP.split():
        value = getattr(args, name)
        if value != defaults[name] and value not in _ABSENT:
            raise ConfigError(
                "the step says this itself",
                where=f"args.{name}",
                got=_shown(value),
                want=f"{_shown(defaults[name])}, the default, and the value in step=",
                hint="without step= the arguments are translated",
            )


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))[:60]


@attrs.frozen(eq=False, repr=False)
class Rates:
    """The learning rates of a scheduler of transformers: f(t) of every update, a table on the step's device."""

    text: str
    table: Tensor  # (updates + 1,) float64
    draws: ClassVar = False
    placed: dict[torch.device, Tensor] = attrs.field(factory=dict)

    def __call__(self, t: Tensor) -> Tensor:
        """Return the rate of update t, counted from 0, and after the last that of the end."""
        if t.device not in self.placed:
            self.placed[t.device] = self.table.to(t.device)
        return self.placed[t.device][t.long().clamp(0, len(self.table) - 1)]

    def __repr__(self) -> str:
        return self.text


def rates_of(args: Any, scheduler: Any, updates: int) -> Rates:
    """Return what a scheduler of transformers sets in each of so many updates. Raises `ConfigError` for other ones."""
    factors = getattr(scheduler, "lr_lambdas", None)
    if not factors:
        raise ConfigError(
            "a scheduler that follows a metric, or is no function of the number of updates",
            where="args.lr_scheduler_type",
            got=f"{_shown(args.lr_scheduler_type)}, {type(scheduler).__name__}",
            want='"linear", "cosine", "constant_with_warmup", ..., or a schedule in step=',
        )
    table = [args.learning_rate * factors[0](t) for t in range(updates + 1)]
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    warmup = args.get_warmup_steps(updates)
    text = f"transformers.{kind}({args.learning_rate!r}, warmup_steps={warmup}, total_steps={updates})"
    return Rates(text, torch.tensor(table, dtype=torch.float64, device="cpu"))


def optimizer_of(args: Any, decayed: Mapping[str, bool], rates: Any = None) -> Optimizer:
    """Return the optimizer that the arguments name, given by name which of the parameters that are trained decay.

    Raises `ConfigError` for an optimizer that fds has not, or not under that name.
    """
    kind = getattr(args.optim, "value", args.optim)
    if kind not in _OPTIMIZERS:
        raise ConfigError(
            "fds does not translate this optimizer",
            where="args.optim",
            got=repr(kind),
            want=", ".join(map(repr, _OPTIMIZERS)),
            hint="fds.lion, fds.lamb, fds.muon, ... are for step=",
        )
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    make = lambda decay: _OPTIMIZERS[kind](args.learning_rate if rates is None else rates, decay, **adam)
    kinds = set(decayed.values())
    if not args.weight_decay or kinds != {True, False}:
        return make(args.weight_decay if kinds == {True} else 0.0)

    def decays(name: str, shape: tuple[int, ...]) -> bool:
        return decayed.get(name, False)

    return by_name({decays: make(args.weight_decay), "*": make(0.0)})


def hidden_size_of(model: Any) -> int | None:
    """Return the width that a model's configuration tells, the largest of several."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None)
    for of, name in ((config, "hidden_size"), (config, "hidden_sizes"), (text, "hidden_size"), (text, "hidden_sizes")):
        if (size := getattr(of, name, None)) is not None:
            return max(size) if isinstance(size, list | tuple) else size
    return None


def check_json(config: Any, args: Any) -> None:
    """Raise `ConfigError` for a JSON that asks for what their loop does, or says other things than the arguments."""
    clips = config.clipping
    if "gradient_clipping" not in clips.given and args.max_grad_norm != clips.gradient_clipping:
        raise ConfigError(
            "the arguments clip otherwise than DeepSpeed does without the key",
            where="args.max_grad_norm, gradient_clipping",
            got=f"{args.max_grad_norm}, and {clips.gradient_clipping} by default",
            want='"gradient_clipping": "auto"',
        )
    for key in ("curriculum_learning", "dynamic_batching"):
        if config[f"data_efficiency.data_sampling.{key}.enabled"]:
            raise ConfigError(
                "the Trainer's loader draws the rows",
                where=f"data_efficiency.data_sampling.{key}.enabled",
                got="true",
                want="fds.initialize(..., training_data=...), which draws them so",
            )


@torch.no_grad()
def round_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Round what is trained, in place, as DeepSpeed's engine does: its master weights are of a model in 16 bits."""
    if dtype.itemsize == 2:
        for p in model.parameters():
            if p.requires_grad and p.is_floating_point():
                p.copy_(p.to(dtype))
