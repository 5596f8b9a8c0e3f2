"""The bytes that a configuration holds by formula are those that a step of it holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.config.composition import compose_supported
from fds.config.memory import rank_memory
from fds.layout import ALIGN

WIDTH, LAYERS = 256, 8
LAYER = WIDTH * WIDTH + WIDTH  # elements: a bucket is one layer, and a half of it a multiple of ALIGN, so no padding
PART_OF = {  # what `rank_memory` calls it -> the parts of `step.describe(state).num_bytes`
    "master weights and optimizer state": ("params", "opt"),
    "16-bit parameters": ("low",),
    "whole parameters": ("whole",),
    "parameters that are whole at once": ("whole",),
    "second slices of parameters": ("secondary",),
    "sums of gradients": ("gradients",),
    "two buckets of gradients": ("buckets",),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16, fp32 messages": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    "fp16": {"fp16": {"enabled": True}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW"},
    "lion": {"type": "Lion"},
    "sgd": {"type": "SGD"},
    "sgd with momentum": {"type": "SGD", "params": {"momentum": 0.9}},
    "lamb": {"type": "Lamb"},
    "adagrad": {"type": "Adagrad"},
}


def layers(width: int = WIDTH, depth: int = LAYERS) -> dict[str, Any]:
    return {"h": [{"weight": torch.zeros(width, width), "bias": torch.zeros(width)} for _ in range(depth)]}


def loss_fn(params: Any, batch: Any) -> Any:
    """Return nothing: what a step holds is known without running it."""
    raise AssertionError


def said(stage: int, optimizer: str, precision: str, **zero: Any) -> dict[str, Any]:
    sizes = (
        {"reduce_bucket_size": LAYER, "stage3_param_persistence_threshold": 0}
        if stage == 3
        else {"reduce_bucket_size": LAYER}
    )
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {"stage": stage, **sizes, **zero},
        **PRECISIONS[precision],
    }


def by_formula(data: dict[str, Any], axes: dict[str, int], num_parameters: int) -> dict[str, int]:
    calls, config = compose_supported(TrainingConfig.of(data), axes)
    return {part.what.split(",")[0]: part.num_bytes(num_parameters) for part in rank_memory(config, calls, axes)}


def by_step(data: dict[str, Any], axes: dict[str, int], params: Any) -> dict[str, int]:
    def run() -> dict[str, int]:
        step = fds.compose(*TrainingConfig.of(data).transforms(fds.mesh(**axes)))(loss_fn)
        return step.describe(step.init(params)).num_bytes

    all_ranks = fds.simulate(run, math.prod(axes.values()))
    assert all(one == all_ranks[0] for one in all_ranks)
    return all_ranks[0]


def assert_equal(told: dict[str, int], is_: dict[str, int], *, padding: dict[str, int] | None = None) -> None:
    """Hold each part of the formula against the step's, and say that the step has no other of any size."""
    for what, num_bytes in told.items():
        more = sum(is_[part] for part in PART_OF[what]) - num_bytes
        assert 0 <= more <= (padding or {}).get(what, 0), f"{what}: {num_bytes:,} told, {more:,} more held"
    others = {part: n for part, n in is_.items() if part not in {p for what in told for p in PART_OF[what]}}
    assert sum(others.values()) <= 64, others  # the loss scale's counters


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16, fp32 sums"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_formula_is_what_a_step_holds(stage, optimizer, precision):
    data, axes = said(stage, optimizer, precision), {"dp": 2}
    assert_equal(by_formula(data, axes, LAYERS * LAYER), by_step(data, axes, layers()))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"dp": 1}, {"replicate": 2, "dp": 2}, {"dp": 1, "sp": 2}], ids=str)
def test_it_is_so_on_other_meshes(axes, stage, precision):
    data = said(stage, "adamw", precision)
    assert_equal(by_formula(data, axes, LAYERS * LAYER), by_step(data, axes, layers()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 2 * LAYER},
        {"stage3_max_live_parameters": 4 * LAYER},
    ],
    ids=str,
)
def test_what_is_whole_at_once_follows_its_keys(zero, precision):
    data, axes = said(3, "adamw", precision, **zero), {"dp": 2}
    assert_equal(by_formula(data, axes, LAYERS * LAYER), by_step(data, axes, layers()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("axes", [{"node": 2, "dp": 2}, {"node": 2, "dp": 1, "sp": 2}], ids=str)
def test_a_second_copy_inside_a_node_is_told(axes, precision):
    data = said(3, "adamw", precision, zero_hpz_partition_size=2)
    told = by_formula(data, axes, LAYERS * LAYER)
    assert "second slices of parameters" in told
    assert_equal(told, by_step(data, axes, layers()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_of_less_than_two_buckets_holds_no_more_than_itself(stage):
    data, axes = said(stage, "adamw", "bf16"), {"dp": 2}
    assert_equal(by_formula(data, axes, LAYER), by_step(data, axes, layers(depth=1)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_padding_is_all_that_odd_sizes_add(stage):
    """Every parameter begins at a multiple of ALIGN elements, and so does every rank's slice of a bucket."""
    width, depth, ranks = 251, 8, 2
    layer = width * width + width
    data = said(stage, "adamw", "bf16")
    told = by_formula(data, {"dp": ranks}, depth * layer)
    per_layer = 2 * (ALIGN - 1) + ranks * (ALIGN - 1)  # elements, of two parameters and of its bucket's slices
    bucket = LAYER - layer  # elements that a layer is smaller than the bucket that the bound counts
    bytes_per_element = {"master weights and optimizer state": 12, "two buckets of gradients": 2}
    padding = {what: bytes_per_element.get(what, 2) * depth * per_layer for what in told}
    is_ = by_step(data, {"dp": ranks}, layers(width))
    for what in ("two buckets of gradients", "parameters that are whole at once"):
        if what in told:  # bounds by the size of buckets, which layers do not fill
            actual = is_[PART_OF[what][0]]
            assert 0 <= told.pop(what) - actual <= 3 * 2 * bucket
            is_ = {part: n for part, n in is_.items() if part not in PART_OF[what]}
    assert_equal(told, is_, padding=padding)


def test_stages_of_a_pipeline_hold_what_is_theirs():
    loss = fds.Layers([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], nn.MSELoss())
    data, axes = said(2, "adamw", "bf16") | {"pipeline": {"partition": "uniform"}}, {"pp": 2, "dp": 2}

    def run() -> dict[str, int]:
        step = fds.compose(*TrainingConfig.of(data).transforms(fds.mesh(**axes)))(loss)
        return step.describe(step.init(loss.init)).num_bytes

    told = by_formula(data, axes, LAYERS * LAYER // 2)
    for is_ in fds.simulate(run, 4):
        assert_equal(told, is_)
