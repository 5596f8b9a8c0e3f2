"""Who trains in `benchmarks/losses.py`: the main job of `examples/train_gpt.py` on two ranks, sent in fewer bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import attrs
import torch
import train_gpt
from gpt.text import read

import fds
from fds import transports

EIGHT, FOUR = transports.quantized(8), transports.quantized(4)
BETAS = (0.9, 0.95)
TURN = 16  # steps from one agreement of local updates to the next


@attrs.frozen
class Way:
    """How ranks train together: the transforms that say so and the optimizer, given the options and the ranks.

    `beside` is the way that sends without loss, and `within` what the held-out loss may be above that of it.
    """

    make: Callable[[argparse.Namespace, fds.collectives.Axis], list[Any]]
    beside: str = "lossless"
    within: float = 0.01


def rate(options: argparse.Namespace) -> Any:
    """Return the learning rate of the main job."""
    warm_up = options.steps // 20
    return fds.schedules.warmup_cosine(
        options.lr, warmup_steps=warm_up, total_steps=options.steps, kind="linear", end_ratio=0.02
    )


def grouped(adam: Callable[..., Any], options: argparse.Namespace) -> Any:
    """Return an Adam that decays all but norms."""
    return fds.by_name({"*norm*": adam(weight_decay=0.0), "*": adam(weight_decay=options.weight_decay)})


def adamw(options: argparse.Namespace) -> list[Any]:
    """Return the clip and the optimizer."""
    adam = lambda weight_decay: fds.adamw(rate(options), BETAS, weight_decay=weight_decay)
    return [fds.clip_by_global_norm(1.0), grouped(adam, options)]


def sent(stage: int, **ways: Any) -> Callable[..., list[Any]]:
    """Return AdamW on shards whose messages are sent by these transports."""
    return lambda options, axis: [fds.shard_optimizer(axis, stage=stage, **ways), *adamw(options)]


def onebit_adam(share: float) -> Callable[..., list[Any]]:
    """Return 1-bit Adam whose warm-up is a share of all steps: that sums without loss; there is no clip."""

    def make(options: argparse.Namespace, axis: fds.collectives.Axis) -> list[Any]:
        freeze = max(1, round(share * options.steps))
        adam = lambda weight_decay: fds.onebit_adam(rate(options), freeze, BETAS, weight_decay=weight_decay)
        return [fds.shard_optimizer(axis, stage=0), grouped(adam, options)]

    return make


def apart(**more: Any) -> Callable[..., list[Any]]:
    """Return AdamW on ranks that agree now and then."""
    return lambda options, axis: [fds.local_updates(axis, every=TURN, **more), *adamw(options)]


WAYS = {
    "lossless": Way(sent(0)),
    "16 bits": Way(sent(0, gradients=transports.cast(torch.bfloat16))),
    "8 bits": Way(sent(0, gradients=EIGHT)),
    "4 bits": Way(sent(0, gradients=FOUR)),
    "4 bits, feedback": Way(sent(0, gradients=transports.quantized(4, feedback=True))),
    "1 bit": Way(sent(0, gradients=transports.onebit())),
    "top 1%": Way(sent(0, gradients=transports.topk(0.01))),
    "stage 3, 8 bits both ways": Way(sent(3, weights=EIGHT, gradients=EIGHT)),
    "stage 3, weights 8, gradients 4": Way(sent(3, weights=EIGHT, gradients=FOUR)),
    "1-bit Adam, all warm-up": Way(onebit_adam(2.0)),
    "1-bit Adam": Way(onebit_adam(0.25), beside="1-bit Adam, all warm-up"),
    "local updates": Way(apart(transport=EIGHT), within=0.02),
    "local updates, outer sgd(1)": Way(apart(transport=EIGHT, outer=fds.sgd(1.0)), within=0.02),
}


def learn(name: str, words: list[str]) -> list[tuple[int, float]]:
    """Run on every rank: train, and return the held-out bits per byte after so many steps, every `--eval-every`."""
    fds.init_distributed()
    options = train_gpt.parse(words)
    text, axis = read(options.data, context=options.context), fds.mesh(dp=-1)["dp"]
    step = fds.compose(*WAYS[name].make(options, axis), fds.donate())(train_gpt.model(options))
    state = step.init(train_gpt.initial_params(step, options), key=options.seed)
    curve = []
    for done in range(1, options.steps + 1):
        state, _ = step(state, train_gpt.next_batch(text, state, options, axis))
        if done % options.eval_every == 0 or done == options.steps:
            curve.append((done, train_gpt.held_out_bits(step, state, text, options, axis)))
    return curve
