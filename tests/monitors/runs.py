"""A small run that is logged, stopped and gone on with."""

import torch

import fds


def loss_fn(params, batch):
    loss = ((params["w"] * batch) ** 2).mean()
    return loss, {"half": loss / 2}


def step_and_state():
    step = fds.compose(fds.skip_nonfinite(), fds.clip_by_global_norm(1.0), fds.adamw(0.1), fds.donate())(loss_fn)
    return step, step.init({"w": torch.arange(8.0)}, key=3)


def batch(state):
    return torch.full((4, 8), float(int(state.calls) + 1))


def trained(step, state, calls, monitor):
    """Return the state after more calls, each of which the monitor is given."""
    for _ in range(calls):
        state, metrics = step(state, batch(state))
        monitor(state, metrics)
    return state


class Kept:
    """A sink of one's own, which keeps what it is given."""

    def __init__(self):
        self.events = []

    def write(self, events):
        self.events += events


def values(kept, tag):
    """Return the values of a tag by `x`."""
    return [(event.x, event.value) for event in kept.events if event.tag == tag]
