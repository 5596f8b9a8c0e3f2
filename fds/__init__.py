"""fds: a training step is a pure function, and what large-scale training needs is a transform of it."""

# ruff: noqa: I001  (in data-flow order: a step is read from its loss to its state)

# the loss is a value
from fds.loss import Layers, LayerSpec, Mean, TiedLayerSpec, functional, recipe, with_buffers

# what a batch is made of
from fds.step import whole
from fds.microbatches import Microbatches

# the ranks that run
from fds.collectives import init_distributed, mesh, simulate

# transforms, in the order of the stations that they fill
from fds.transforms.accumulate import accumulate
from fds.transforms.freeze import freeze
from fds.transforms.pipeline import pipeline
from fds.transforms.shard_optimizer import shard_optimizer
from fds.transforms.precision import precision
from fds.transforms.autocast import autocast
from fds.transforms.checkpoint_activations import checkpoint_activations
from fds.transforms.loss_scale import loss_scale
from fds.transforms.static_loss_scale import static_loss_scale
from fds.transforms.skip_nonfinite import skip_nonfinite
from fds.transforms.clip_by_global_norm import clip_by_global_norm
from fds.transforms.clip_by_value import clip_by_value
from fds.optim import Optimizer, adagrad, adam, adamw, by_name, lamb, lion, muon, sgd
from fds.transforms.ema import ema
from fds.transforms.donate import donate
from fds.transforms.reference_kernels import reference_kernels

# a parameter that is gathered when it is used, as a plain tensor
from fds.step.sharding.handles import materialize

# a step, and what it steps through
from fds.step import Step, Transform, compose, evaluate
from fds.state import State

# keeping it
from fds.storage import export_weights, import_deepspeed, import_weights, load, save, save_async

# what it is fed with
from fds.data import DistributedLoader, RepeatingLoader

# for those who come from DeepSpeed
from fds.config.arguments import add_config_arguments
from fds.config.initialize import initialize

# rooms that are used by name
from fds import autodiff, collectives, config, data, errors, kernels, nn, optim, plans, random, schedules, tree
from fds.errors import FdsError

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
    "add_config_arguments",
    "autocast",
    "autodiff",
    "by_name",
    "checkpoint_activations",
    "clip_by_global_norm",
    "clip_by_value",
    "collectives",
    "compose",
    "config",
    "data",
    "donate",
    "ema",
    "errors",
    "evaluate",
    "export_weights",
    "freeze",
    "functional",
    "import_deepspeed",
    "import_weights",
    "init_distributed",
    "initialize",
    "kernels",
    "lamb",
    "lion",
    "load",
    "loss_scale",
    "materialize",
    "mesh",
    "muon",
    "nn",
    "optim",
    "pipeline",
    "plans",
    "precision",
    "random",
    "recipe",
    "reference_kernels",
    "save",
    "save_async",
    "schedules",
    "sgd",
    "shard_optimizer",
    "simulate",
    "skip_nonfinite",
    "static_loss_scale",
    "tree",
    "whole",
    "with_buffers",
]
