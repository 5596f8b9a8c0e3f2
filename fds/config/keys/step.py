"""Keys of a step: batch sizes, dtypes and loss scaling, messages, clipping, activations, pipelines, compiling.

Source: DeepSpeed 0.19.6, for defaults and for the order in which missing batch sizes are inferred.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch

from fds.config.field import AUTO, Edition, is_comment, keys
from fds.config.record import Config
from fds.config.rows import MissingKeyError, contradiction, declare
from fds.errors import ConfigError

Message = Literal["fp32", "fp16", "bf16"]
Dtype = Literal[
    "fp32",
    "fp16",
    "bf16",
    "float32",
    "float16",
    "bfloat16",
    "float",
    "half",
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
]
DTYPES = {
    name: dtype
    for dtype, names in (
        (torch.float32, ("fp32", "float32", "float", "torch.float32")),
        (torch.float16, ("fp16", "float16", "half", "torch.float16")),
        (torch.bfloat16, ("bf16", "bfloat16", "torch.bfloat16")),
    )
    for name in names
}

_TABLE = """
@sync: n/a: where ranks wait is for finding faults in the compiler

BatchConfig:
    train_batch_size: int|None = None; rows; > 0; old training_batch_size | rows of the whole batch of one update, of
        all ranks and microbatches | `fds.data.DistributedLoader(dataset, batch_size)`: a rank passes its share of them
        to the step
    train_micro_batch_size_per_gpu: int|None = None; rows; > 0; old train_step_batch_size | rows that one rank computes
        at once | accumulate|pipeline(num_microbatches=): it divides a rank's share
    gradient_accumulation_steps: int|None = None; > 0 | microbatches whose gradients are summed before an update |
        accumulate|pipeline(num_microbatches=)
    managed_gradient_accumulation: bool = True | whether the engine counts microbatches; else every engine.step() is an
        update | n/a: a step takes all microbatches of an update and counts nothing between calls

CommunicationConfig [shard_optimizer(=)]:
    communication_data_type: Message|None = None | dtype in which gradients are sent; null: that
        of the parameters in the step | precision(reduce=)
    seq_parallel_communication_data_type: Message = "fp32" | dtype in which gradients are sent
        where ranks share a sequence, in place of the one above | precision(reduce=): on a mesh with an axis sp
    prescale_gradients: bool = False | divide gradients by the number of ranks before they are summed, not after |
        (predivide=): the number of ranks
    gradient_predivide_factor: float = 1.0; > 0 | divide gradients by this before they are summed, and by the rest after
        | (predivide=)
    gradient_allreduce_op: Literal["mean", "sum"] = "mean" | what the update takes of the ranks' gradients | not yet but
        for 'mean': the sum of the ranks' gradients in place of their mean
    sparse_gradients: bool = False | send only the rows of embeddings' gradients that are not 0, at stages 0 and 1 |
        (gradients=): `transports.rows()` for each embedding of the module
    disable_allgather: bool = False | nothing: 0.19.6 reads it and does not use it | n/a: it has no effect in DeepSpeed
        either

ClippingConfig:
    gradient_clipping: float = 1.0; >= 0 | bound of the norm of all gradients together; 0: none |
        clip_by_global_norm(max_norm=)

FP16Config [loss_scale(=)]:
    enabled: bool = False | compute in float16, from float32 master weights | precision(compute=)
    auto_cast: bool = False | cast the model's floating inputs | n/a: fds.precision always casts them;
        fds.precision(inputs=...) says which
    loss_scale: float = 0.0; >= 0 | fixed factor of the loss; 0: one that adapts itself | static_loss_scale(scale=)
    initial_scale_power: int = 16; >= 0; <= 126 | the first scale is 2 to this power | (initial=): 2.0**n
    loss_scale_window: int = 1000; steps; >= 0 | updates without overflow after which the scale doubles | (window=)
    hysteresis: int = 2; > 0 | overflows until the scale is halved
    consecutive_hysteresis: bool = False | give the free overflows back after every good update
    min_loss_scale: int = 1; >= 0 | smallest scale | (minimum=)
    fp16_master_weights_and_grads: bool = False | keep master weights and gradients in float16 | not yet: master weights
        in 16 bit
    ! scale if enabled

BF16Config:
    enabled: bool = False | compute in bfloat16, from float32 master weights | precision(compute=)
    immediate_grad_update: bool = False | add gradients to their sum in a hook | n/a: gradients are summed as backward
        makes them
    check_grad_overflow: bool = True | skip an update whose gradients are not finite | skip_nonfinite()
    bf16_master_weights_and_grads: bool = False | keep master weights and gradients in bfloat16 | not yet: master
        weights in 16 bit
    bf16_optimizer_states: bool = False | keep the optimizer's state in bfloat16 | not yet: 16-bit optimizer states

AmpConfig:
    enabled: bool = False | choose the dtype of every operator by a list | autocast|loss_scale(): float16, with a loss
        that is scaled
    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1" | Apex's policy | not yet but for 'O1': Apex's O0, O2 and O3:
        write fp16 instead of O2
    loss_scale: float|Literal["dynamic"]|None = None | fixed factor of the loss, or dynamic | static_loss_scale(scale=)
    cast_model_type: Any = None | Apex's dtype of parameters | not yet: Apex's own choices
    patch_torch_functions: bool|None = None | let Apex patch torch | n/a: torch.autocast does this
    keep_batchnorm_fp32: bool|str|None = None | norms in float32 | n/a: torch.autocast runs norms in float32
    master_weights: bool|None = None | float32 master weights | n/a: parameters stay float32
    verbosity: int = 1 | what Apex prints | n/a: a step prints nothing
    min_loss_scale: float|None = None | smallest scale | loss_scale(minimum=)
    max_loss_scale: float = 16777216.0 | largest scale | not yet but for 16777216.0: a largest loss scale

TorchAutocastConfig:
    enabled: bool = False | run the loss under torch.autocast | autocast()
    dtype: Literal["bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"]|None = None; no
        null | what operators compute in; absent: bfloat16 | autocast(=)
    lower_precision_safe_modules: tuple[str, ...]|None = None; no null | modules whose gradients are sent in `dtype`;
        absent: none, in 0.19.6 linear layers and convolutions | not yet: a dtype of messages per module

DataTypesConfig:
    grad_accum_dtype: Dtype|None = None | dtype of the sum of microbatches' gradients; null: that of the parameters in
        the step | precision(accumulate=)
    param_dtype: Dtype|None = None | dtype of parameters in the step | n/a: it may say again what fp16 and bf16 say, no
        other
    buffer_dtype: Dtype|None = None | dtype of buffers; null: their own | not yet: buffers in another dtype

ActivationCheckpointingConfig [checkpoint_activations(=)]: `activation_checkpointing`: how the inputs of recomputed
        layers are kept.
    partition_activations: bool = False | share kept inputs between tensor-parallel ranks | (partition=): over
        mesh["tp"], where the mesh has it
    cpu_checkpointing: bool = False | keep inputs in host memory | (store=)
    contiguous_memory_optimization: bool = False | copy kept inputs into one buffer | (contiguous=): where layers are
        computed again
    number_checkpoints: int|None = None; >= 0 | how many groups of layers have a place in the buffer | (number=): 0 is
        all; without that buffer it has no effect
    synchronize_checkpoint_boundary: bool = False | wait for the GPU at the borders of each | n/a: nothing of fds runs
        beside the computing stream there that would have to be waited for
    profile: bool = False | measure how long they take, forward and backward | `config.timed(mesh)`: of every layer:
        forward, computed again, and backward, as `fds.timed(layers=True)`

PipelineConfig [n/a: each rank of a tensor axis sends to its own neighbour]: `pipeline`; used if the mesh has an axis
        `pp`.
    stages: int|str = "auto" | how many stages | n/a: the mesh says it: fds.mesh(pp=2, dp=-1)
    partition: str = "best" | which stage has which layers: best, uniform, parameters or type:REGEX | pipeline(=): best
        is parameters
    seed_layers: bool = False | seed each layer by its number | n/a: layers are always made from keys of their own
    activation_checkpoint_interval: int = 0; >= 0 | layers per group that is computed again in backward; 0: none |
        checkpoint_activations(every=)
    pipe_partitioned: bool = True | share messages between tensor-parallel ranks
    grad_partitioned: bool = True | share gradients' messages between tensor-parallel ranks
    use_reentrant: bool = True | how torch computes again | n/a: never: it breaks torch.autograd.grad

CompileConfig [part of deepcompile]:
    deepcompile: bool = False | run these passes | not yet: passes over a compiled model
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...]|None = None | which passes; null: by stage
    free_activation: bool = False | free large activations as soon as they are used
    free_activation_threshold: int = 10_485_760; bytes; >= 0 | which are large
    offload_activation: bool = False | keep activations in the host's memory until backward
    offload_activation_pin_memory: bool = True | in page-locked memory
    offload_opt_states: bool = False | keep optimizer state in the host's memory until the update
    offload_parameters: bool = False | keep parameters in the host's memory until they are used
    double_buffer: bool = True | fill one buffer while the other is sent
    symmetric_memory: bool = False | gather by torch's symmetric memory
    keep_int_input_tensors: bool = True | keep integer inputs for later passes, not only their shapes
    keep_all_input_tensors: bool = False | keep all inputs
    sync_before_reduce: bool = False | wait before gradients are reduced | @sync
    sync_after_reduce: bool = False | wait after gradients are reduced | @sync
    sync_before_allgather: bool = False | wait before parameters are gathered | @sync
    sync_after_allgather: bool = False | wait after parameters are gathered | @sync
    debug_log: bool = False | write the graphs | n/a: there are no graphs to write
    ! memory

CapturingConfig: Keys of the top level on CUDA graphs and shapes.
    graph_harvesting: bool = False | capture the optimizer's kernels of bf16 as one CUDA graph | n/a: an update is one
        or two launches already
    vocabulary_size: int|None = None; > 0 | rows of the embedding | n/a: it is only warned of where 8 does not divide it
"""


class BatchConfig(Config):
    """Batch sizes: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks."""

    def resolve(self, *, world_size: int = 1, **others: object) -> Self:
        """Return the record with all three sizes, for a number of data ranks.

        Two of them determine the third; one size alone means one microbatch. Raises `ConfigError`, with all keys
        involved, if they do not multiply or neither size is given.
        """
        if type(world_size) is not int or world_size < 1:
            raise ConfigError("not a number of data ranks", where="world_size", got=repr(world_size), want="1 or more")
        sizes = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        train, micro, steps = (None if n == AUTO else n for n in sizes)
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


class CommunicationConfig(Config):
    """Keys of the top level on the communication of gradients."""


class ClippingConfig(Config):
    """The key of the top level on gradient clipping."""


class FP16Config(Config):
    """`fp16`: training in float16, with loss scaling."""


class BF16Config(Config):
    """`bf16`: training in bfloat16, which needs no loss scaling."""


class AmpConfig(Config):
    """`amp`: mixed precision by Apex in DeepSpeed, by torch.autocast here."""


class TorchAutocastConfig(Config):
    """`torch_autocast`: mixed precision by torch.autocast."""


class DataTypesConfig(Config):
    """`data_types`: dtypes other than that of the parameters in the step."""


class CompileConfig(Config):
    """`compile`: passes over the graph of a model that schedule gathers, reductions and copies to the host."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, defaults: Edition = "0.19.6") -> Self:
        """Return the record of a group of the JSON; unknown keys, of other releases, are left out with a warning."""
        if isinstance(data, Mapping):
            for name in [key for key in data if key not in keys(cls) and not is_comment(str(key))]:
                warnings.warn(f"compile.{name} is a key of another release, and is left out", UserWarning, stacklevel=6)
            data = {name: value for name, value in data.items() if name in keys(cls)}
        return super().from_dict(data, defaults=defaults)


def _check_scale(config: Any) -> None:
    for name in ("loss_scale_window", "min_loss_scale") if config.loss_scale == 0 else ():
        if config[name] == 0:
            want = f"{name} more than 0, or a fixed loss_scale"
            raise contradiction(config, "a dynamic loss scale needs this number", name, "loss_scale", want=want)


def _check_memory(config: Any) -> None:
    moved = [
        name for name in ("offload_activation", "offload_opt_states", "offload_parameters") if config[name] is True
    ]
    if len(moved) > 1:
        raise contradiction(config, "only one of these can be kept in the host's memory", *moved, want="one of them")


def check_one_precision(config: Any) -> None:
    """Raise `ConfigError` if two kinds of mixed precision are enabled, or dtypes contradict each other."""
    enabled = [
        name
        for name in ("fp16", "bf16", "amp", "torch_autocast")
        if config[f"{name}.enabled"] is not False and config[f"{name}.enabled"] != AUTO
    ]
    if len(enabled) > 1:
        where = ", ".join(f"{name}.enabled" for name in enabled)
        raise ConfigError(
            "only one kind of mixed precision can be enabled", where=where, got="all of them", want="one of them true"
        )
    named = config["data_types.param_dtype"]
    usual = "fp16" if "fp16" in enabled else "bf16" if "bf16" in enabled else "fp32"
    if named not in (None, AUTO) and DTYPES[named] != DTYPES[usual]:
        raise ConfigError(
            "parameters have two dtypes",
            where="data_types.param_dtype, fp16.enabled, bf16.enabled",
            got=f"{named}, and {usual} by the others",
            want=f"{usual!r}, or null",
        )
    if "amp" in enabled and config["zero_optimization.stage"] not in (0, AUTO):
        raise ConfigError(
            "Apex's amp cannot be used with ZeRO",
            where="amp.enabled, zero_optimization.stage",
            got=f"true, {config['zero_optimization.stage']}",
            want="stage 0, or torch_autocast for amp",
        )


declare(globals(), _TABLE)
