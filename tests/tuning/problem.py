"""What fresh processes import: a small problem, and a recipe of which some choices go wrong."""

import os
import signal
import time

import torch
from torch import nn

import fds
from fds.collectives.worlds import TorchWorld

WIDTH = 32


def mean_square(out, y):
    return (out - y).square().mean()


def layers():
    return fds.Layers([fds.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)], mean_square)


def batch():
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, x


def recipe(mesh, kind, microbatches=1):
    if kind == "refused":
        raise fds.errors.ComposeError("no such kind")
    if kind == "killed" and isinstance(mesh.world, TorchWorld) and mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if "pp" in mesh.shape:
        piped = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2)
        return fds.compose(piped, fds.checkpoint_activations(), fds.adamw(1e-3))
    large = [fds.precision(torch.bfloat16)] if kind == "less" else []
    sharded = fds.shard_optimizer(mesh["dp"], stage=1) if kind != "whole" else fds.shard_optimizer(mesh["dp"], stage=0)
    return fds.compose(*large, sharded, fds.accumulate(microbatches), fds.adamw(1e-3))


def sleep(tell):
    tell("awake")
    time.sleep(600)


def allows(axes, choices):
    return ("pp" in axes) == (choices["kind"] == "piped")


def fail(tell):
    if int(os.environ["RANK"]) == 1:
        raise ValueError("of the second")
    fds.mesh(all=-1)["all"].barrier()
