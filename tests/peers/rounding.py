"""How far rounding moves two runs of the same training apart.

Every number of a step is made by at most N additions, each of which rounds by eps, to either side: a walk of N steps,
sqrt(N) eps long. STEPS updates are as many walks, each from where the last one ended.

A number that is then rounded to 16 bits is the same for both, unless a boundary lies between them: of two that are d
apart, a share d / ulp differs, by ulp (relative to the number). In the 2-norm of all numbers that is sqrt(d ulp). These
do not walk: a parameter on the other side of a boundary is still there in the steps that follow, and moves them the
same way again, so that after k updates k of them have added up. Measured, on trainings that begin one rounding of
float32 apart (without AVX-512): 0.6 of that sum at most, which is twice what a walk, sqrt(k), would have come to.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.peers.training import CLASSES, INPUTS, RANKS, ROWS, WIDTH

ULP = torch.finfo(torch.bfloat16).eps


def of_a_step(json: dict[str, Any]) -> float:
    """Return the relative distance after one step, whose parameters are still the same."""
    forward = INPUTS + WIDTH + WIDTH + WIDTH + CLASSES  # two hidden layers, the norm, the head, the softmax
    rows = RANKS * json["gradient_accumulation_steps"] * ROWS
    return (2 * forward + rows) ** 0.5 * torch.finfo(torch.float32).eps


def after(json: dict[str, Any], updates: int) -> float:
    """Return the relative distance of what is computed after so many updates."""
    one = of_a_step(json)
    return updates * (one * ULP) ** 0.5 + one if in_sixteen_bits(json) else (updates + 1) ** 0.5 * one


def beyond(json: dict[str, Any], one: list, other: list) -> float:
    """Return the largest distance of two lists, a number a step, in bounds of its own step: up to 1 is rounding."""
    pairs = enumerate(zip(one, other, strict=True))
    return max(distance([a], [b]) / after(json, updates) for updates, (a, b) in pairs)


def in_sixteen_bits(json: dict[str, Any]) -> bool:
    """Say whether anything is rounded to 16 bits."""
    return "bf16" in json or json.get("communication_data_type", "fp32") != "fp32"


def distance(one: list, other: list) -> float:
    """Return the largest relative distance of two lists of numbers, where both have one."""
    return max(
        (
            abs(a - b) / max(abs(a), abs(b))
            for a, b in zip(one, other, strict=True)
            if a is not None and b is not None and a != b
        ),
        default=0.0,
    )
