"""The small loss of these tests: a linear model with a nested tree of parameters."""

import torch

import fds

BATCH = {
    "x": torch.randn(8, 3, generator=torch.Generator().manual_seed(1)),
    "y": torch.randn(8, 2, generator=torch.Generator().manual_seed(2)),
}


def make_params():
    g = torch.Generator().manual_seed(0)
    return {"net": {"w": torch.randn(3, 2, generator=g), "b": torch.zeros(2)}, "count": torch.tensor(3)}


def loss_fn(params, batch):
    out = batch["x"] @ params["net"]["w"] + params["net"]["b"]
    return ((out - batch["y"]) ** 2).mean()


def make(*transforms, loss=loss_fn, optimizer=None):
    return fds.compose(*transforms, optimizer or fds.adam(0.1))(loss)
