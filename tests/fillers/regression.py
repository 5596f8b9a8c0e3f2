"""A small regression in float64 whose batches are the same for every composition: one of them is not finite."""

import torch

MICROBATCHES, ROWS, BAD = 4, 8, 3


def loss_fn(params, batch):
    x, y = batch
    return (torch.tanh(x @ params["first"] + params["bias"]) @ params["last"] - y).square().mean()


def batch(call):
    g = torch.Generator().manual_seed(call)
    x, y = (torch.randn(ROWS, n, generator=g, dtype=torch.float64) for n in (3, 2))
    return (x * torch.inf if call == BAD else x), y


def train(step, state, calls):
    """Return the state after some calls, each data rank with its rows."""
    data = step.dimensions.data
    for call in calls:
        rows = batch(call)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return state
