"""How far rounding moves two runs of the same training apart.

Every number of a step is made by at most N additions, each of which rounds by eps, to either side: a walk of N steps,
sqrt(N) eps long. STEPS updates are as many walks, each from where the last one ended.

A number that is then rounded to 16 bits is the same for both, unless a boundary lies between them: of two that are d
apart, a share d / ulp differs, by ulp (relative to the number). In the 2-norm of all numbers that is sqrt(d ulp). These
do not walk: a parameter on the other side of a boundary is still there in the steps that follow, and moves them the
same way again, so that STEPS of them add up. Measured, on trainings that begin one rounding of float32 apart (20 of
each in 16 bits, without AVX-512): 9.5e-4 and 1.1e-3 at most, where a walk would end at 6.4e-4 and the sum is 2.9e-3.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.peers.training import CLASSES, INPUTS, RANKS, ROWS, STEPS, WIDTH

ULP = torch.finfo(torch.bfloat16).eps


def of_a_step(json: dict[str, Any]) -> float:
    """Return the relative distance after one step, whose parameters are still the same."""
    forward = INPUTS + WIDTH + WIDTH + WIDTH + CLASSES  # two hidden layers, the norm, the head, the softmax
    rows = RANKS * json["gradient_accumulation_steps"] * ROWS
    return (2 * forward + rows) ** 0.5 * torch.finfo(torch.float32).eps


def of_a_training(json: dict[str, Any]) -> float:
    """Return the relative distance after all steps."""
    one = of_a_step(json)
    return STEPS * (one * ULP) ** 0.5 if in_sixteen_bits(json) else STEPS**0.5 * one


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
