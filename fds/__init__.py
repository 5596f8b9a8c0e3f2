"""fds: a training step is a pure function, and what large-scale training needs is a transform of it."""

# ruff: noqa: I001  (in data-flow order: a step is read from its loss to its state)

from typing import TYPE_CHECKING

from fds.lazy import lazily

__version__ = "0.2.0"

if TYPE_CHECKING:  # by the table below, when they are first used: `import fds` loads neither torch nor a room
    # the loss is a value
    from fds.loss import Layers, LayerSpec, Mean, TiedLayerSpec, functional, recipe, with_buffers

    # where leaves of a state may live
    from fds.media import disk

    # what a batch is made of
    from fds.step import whole
    from fds.microbatches import Microbatches

    # the ranks that run
    from fds.collectives import init_distributed, mesh, simulate

    # transforms, in the order of the stations that they fill
    from fds.transforms.accumulate import accumulate
    from fds.transforms.freeze import freeze, quantize_frozen
    from fds.transforms.lora import lora
    from fds.transforms.pipeline import pipeline
    from fds.transforms.shard_optimizer import shard_optimizer
    from fds.transforms.tensor_parallel import tensor_parallel
    from fds.transforms.context_parallel import context_parallel
    from fds.transforms.curriculum import curriculum
    from fds.transforms.local_updates import local_updates
    from fds.transforms.precision import autocast, precision
    from fds.transforms.batch_invariant import batch_invariant
    from fds.transforms.quantize_weights import quantize_weights
    from fds.transforms.checkpoint_activations import checkpoint_activations
    from fds.transforms.layer_drop import layer_drop
    from fds.transforms.random_ltd import random_ltd
    from fds.transforms.tile import tile
    from fds.transforms.float8 import float8
    from fds.transforms.quantize_activations import quantize_activations
    from fds.transforms.compile import compile, cuda_graph
    from fds.transforms.loss_scale import loss_scale, skip_nonfinite, static_loss_scale
    from fds.transforms.clip import clip_by_global_norm, clip_by_value
    from fds.optim import (
        Optimizer,
        adagrad,
        adam,
        adamw,
        by_name,
        lamb,
        lion,
        muon,
        onebit_adam,
        onebit_lamb,
        sgd,
        zero_one_adam,
    )
    from fds.transforms.ema import ema
    from fds.transforms.offload import donate, offload
    from fds.transforms.profiled import profiled
    from fds.transforms.kernels import reference_kernels, triton_kernels
    from fds.transforms.prune_structures import prune_channels, prune_heads, prune_rows
    from fds.transforms.prune_weights import prune_weights

    # a parameter that is gathered when it is used, as a plain tensor
    from fds.step.sharding.handles import materialize

    # a step, and what it steps through
    from fds.step import Step, Transform, compose, evaluate
    from fds.state import State

    # models that become smaller
    from fds.compression.bake import bake
    from fds.compression.reduce_layers import reduce_layers

    # what it takes
    from fds.profiling import estimate_memory, profile, profile_memory, profile_model

    # keeping it
    from fds.storage import (
        export_dcp,
        export_weights,
        import_dcp,
        import_deepspeed,
        import_weights,
        load,
        save,
        save_async,
    )

    # what is seen of it
    from fds.monitors import monitor
    from fds.reporting import record_run, report
    from fds.timing import memory_breakdown, messages, timed, trace, watch_ranks

    # how it is best composed
    from fds.tuning import tune

    # what is wrong with it
    from fds.debugging import check_ranks, dump_state, watch

    # what it is fed with
    from fds.data import DistributedLoader, RepeatingLoader

    # for those who come from DeepSpeed
    from fds.config.initialize import add_config_arguments, initialize

    # rooms that are used by name
    from fds import (
        adapters,
        attention_layouts,
        autodiff,
        collectives,
        compression,
        config,
        curvature,
        data,
        debugging,
        distill,
        elastic,
        errors,
        hf,
        kernels,
        monitors,
        nn,
        optim,
        plans,
        random,
        schedules,
        transports,
        tuning,
    )
    from fds import tree as tree
    from fds import command_line as command_line, containers as containers, display as display, layout as layout
    from fds import (
        loss as loss,
        media as media,
        microbatches as microbatches,
        profiling as profiling,
        reporting as reporting,
        state as state,
        step as step,
        storage as storage,
    )
    from fds import timing as timing, trainer as trainer, transforms as transforms
    from fds.errors import FdsError

__getattr__, __dir__ = lazily(
    __name__,
    {
        "fds.loss": "Layers LayerSpec Mean TiedLayerSpec functional recipe with_buffers",
        "fds.media": "disk",
        "fds.step": "whole Step Transform compose evaluate",
        "fds.microbatches": "Microbatches",
        "fds.collectives": "init_distributed mesh simulate",
        "fds.transforms.accumulate": "accumulate",
        "fds.transforms.freeze": "freeze quantize_frozen",
        "fds.transforms.lora": "lora",
        "fds.transforms.pipeline": "pipeline",
        "fds.transforms.shard_optimizer": "shard_optimizer",
        "fds.transforms.tensor_parallel": "tensor_parallel",
        "fds.transforms.context_parallel": "context_parallel",
        "fds.transforms.curriculum": "curriculum",
        "fds.transforms.local_updates": "local_updates",
        "fds.transforms.precision": "autocast precision",
        "fds.transforms.batch_invariant": "batch_invariant",
        "fds.transforms.quantize_weights": "quantize_weights",
        "fds.transforms.checkpoint_activations": "checkpoint_activations",
        "fds.transforms.layer_drop": "layer_drop",
        "fds.transforms.random_ltd": "random_ltd",
        "fds.transforms.tile": "tile",
        "fds.transforms.float8": "float8",
        "fds.transforms.quantize_activations": "quantize_activations",
        "fds.transforms.compile": "compile cuda_graph",
        "fds.transforms.loss_scale": "loss_scale skip_nonfinite static_loss_scale",
        "fds.transforms.clip": "clip_by_global_norm clip_by_value",
        "fds.optim": "Optimizer adagrad adam adamw by_name lamb lion muon onebit_adam onebit_lamb sgd zero_one_adam",
        "fds.transforms.ema": "ema",
        "fds.transforms.offload": "donate offload",
        "fds.transforms.profiled": "profiled",
        "fds.transforms.kernels": "reference_kernels triton_kernels",
        "fds.transforms.prune_structures": "prune_channels prune_heads prune_rows",
        "fds.transforms.prune_weights": "prune_weights",
        "fds.step.sharding.handles": "materialize",
        "fds.state": "State",
        "fds.compression.bake": "bake",
        "fds.compression.reduce_layers": "reduce_layers",
        "fds.profiling": "estimate_memory profile profile_memory profile_model",
        "fds.storage": "export_dcp export_weights import_dcp import_deepspeed import_weights load save save_async",
        "fds.monitors": "monitor",
        "fds.timing": "memory_breakdown messages timed trace watch_ranks",
        "fds.tuning": "tune",
        "fds.debugging": "check_ranks dump_state watch",
        "fds.reporting": "record_run report",
        "fds.data": "DistributedLoader RepeatingLoader",
        "fds.config.initialize": "add_config_arguments initialize",
        "fds.errors": "FdsError",
    },
    submodules="adapters attention_layouts autodiff collectives command_line compression config containers curvature "
    "data debugging display distill elastic errors hf kernels layout loss media microbatches monitors nn optim plans "
    "profiling random reporting schedules state step storage timing trainer transforms transports tree tuning",
    elsewhere={"fds.monitors": "CSV Comet Console JSONL TensorBoard WandB", "fds.display": "Progress"},
)

__all__ = [
    "DistributedLoader",
    "FdsError",
    "LayerSpec",
    "Layers",
    "Mean",
    "Microbatches",
    "Optimizer",
    "RepeatingLoader",
    "State",
    "Step",
    "TiedLayerSpec",
    "Transform",
    "accumulate",
    "adagrad",
    "adam",
    "adamw",
    "adapters",
    "add_config_arguments",
    "attention_layouts",
    "autocast",
    "autodiff",
    "bake",
    "batch_invariant",
    "by_name",
    "check_ranks",
    "checkpoint_activations",
    "clip_by_global_norm",
    "clip_by_value",
    "collectives",
    "compile",
    "compose",
    "compression",
    "config",
    "context_parallel",
    "curvature",
    "cuda_graph",
    "curriculum",
    "data",
    "debugging",
    "disk",
    "distill",
    "donate",
    "dump_state",
    "elastic",
    "ema",
    "errors",
    "estimate_memory",
    "evaluate",
    "export_dcp",
    "export_weights",
    "float8",
    "freeze",
    "functional",
    "hf",
    "import_dcp",
    "import_deepspeed",
    "import_weights",
    "init_distributed",
    "initialize",
    "kernels",
    "lamb",
    "layer_drop",
    "lion",
    "load",
    "local_updates",
    "lora",
    "loss_scale",
    "materialize",
    "memory_breakdown",
    "mesh",
    "messages",
    "monitor",
    "monitors",
    "muon",
    "nn",
    "offload",
    "onebit_adam",
    "onebit_lamb",
    "optim",
    "pipeline",
    "plans",
    "precision",
    "profile",
    "profile_memory",
    "profile_model",
    "profiled",
    "prune_channels",
    "prune_heads",
    "prune_rows",
    "prune_weights",
    "quantize_activations",
    "quantize_frozen",
    "quantize_weights",
    "random",
    "random_ltd",
    "recipe",
    "record_run",
    "reduce_layers",
    "reference_kernels",
    "report",
    "save",
    "save_async",
    "schedules",
    "sgd",
    "shard_optimizer",
    "simulate",
    "skip_nonfinite",
    "static_loss_scale",
    "tensor_parallel",
    "tile",
    "timed",
    "trace",
    "transports",
    "tree",
    "triton_kernels",
    "tune",
    "tuning",
    "watch",
    "watch_ranks",
    "whole",
    "with_buffers",
    "zero_one_adam",
]
