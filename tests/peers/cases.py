"""The configurations that drive both: each value occurs; each stage meets clipping, accumulation and a schedule."""

from __future__ import annotations

import functools
import operator
from typing import Any

from tests.peers.training import ROWS

LR = 4e-3
REPAIRED = ", without the empty update"  # after the name of a run in which DeepSpeed is kept from one


def adam(**params: Any) -> dict[str, Any]:
    """Return AdamW of torch's class: DeepSpeed's own has no build for CPUs."""
    return {"type": "AdamW", "params": {"lr": LR, "torch_adam": True, **params}}


def schedule(type_: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": type_, "params": params}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    more = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}  # or all of this model would stay whole
    return {"zero_optimization": {"stage": stage, **more, **keys}}


def case(stage: int, *more: dict[str, Any], micro: int = 1, clip: float | None = 0.0, **keys: Any) -> dict[str, Any]:
    """Return a JSON, of some groups of keys and some keys; `clip` None leaves it out."""
    batch = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": micro}
    bound = {} if clip is None else {"gradient_clipping": clip}
    return functools.reduce(operator.or_, (batch, bound, {"optimizer": adam()}, zero(stage), *more, keys))


WARM = schedule("WarmupLR", warmup_max_lr=LR, warmup_num_steps=8)
DECAY = schedule("WarmupDecayLR", total_num_steps=18, warmup_num_steps=5, warmup_max_lr=LR, warmup_type="linear")
COSINE = schedule("WarmupCosineLR", total_num_steps=17, warmup_num_steps=4, warmup_min_ratio=0.1)
CYCLE = schedule(
    "OneCycle",
    cycle_min_lr=LR / 8,
    cycle_max_lr=LR,
    cycle_first_step_size=6,
    cycle_second_step_size=8,
    decay_step_size=3,
    decay_lr_rate=0.4,
    decay_mom_rate=0.01,
)
STAIRS = schedule(
    "OneCycle",
    cycle_min_lr=LR / 8,
    cycle_max_lr=LR,
    cycle_first_step_size=8,
    cycle_momentum=False,
    cycle_first_stair_count=3,
)
RANGE = schedule("LRRangeTest", lr_range_test_min_lr=LR / 8, lr_range_test_step_size=5)
BF16 = {"bf16": {"enabled": True}}
# torch's Adam, for DeepSpeed's own is compiled first
OFFLOADED = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_force_ds_cpu_optimizer": False}
BOUND = 1.4  # of the norms here some are above it and some below: Adam would not see a factor that stays
UNTESTED = {"zero_allow_untested_optimizer": True}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}, **UNTESTED}
NESTEROV = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}}, **UNTESTED}
ADAGRAD = {"optimizer": {"type": "Adagrad", "params": {"lr": 0.02}}, **UNTESTED}
L2 = {
    "optimizer": {"type": "Adam", "params": {"lr": LR, "torch_adam": True, "adam_w_mode": False, "weight_decay": 0.02}}
}

RECORDED = (  # of which the normal tests have DeepSpeed's numbers
    "0 clip absent",
    "1 clip accumulate cosine",
    "2 clip accumulate cycle",
    "3 clip accumulate warm",
    "decay log",
    "range in stairs",
    "adam's l2",
    "adagrad",
    "sgd",
    "predivide by a third",
    "2 bf16 messages",
    "1 bf16 clip accumulate",
    "2 bf16",
    "3 bf16 float sums",
)
CASES: dict[str, dict[str, Any]] = {
    # what each stage meets in float32
    "0": case(0),
    "0 clip absent": case(0, WARM, clip=None),
    "0 clip accumulate decay": case(0, DECAY, clip=BOUND, micro=4),
    "1": case(1),
    "1 clip accumulate cosine": case(1, SGD, COSINE, clip=BOUND, micro=4),
    "1 cycle": case(1, CYCLE, clip=None),
    "2 accumulate": case(2, micro=4),
    "2 clip accumulate cycle": case(2, CYCLE, clip=BOUND, micro=4),
    "2 range": case(2, RANGE),
    "3": case(3),
    "3 clip accumulate warm": case(3, WARM, clip=BOUND, micro=4),
    "3 whole": case(3, zero(3, stage3_param_persistence_threshold=100000), clip=None),
    # schedules
    "warm without its peak": case(0, schedule("WarmupLR", warmup_min_lr=1e-4, warmup_num_steps=6)),
    "warm linear": case(2, schedule("WarmupLR", warmup_num_steps=6, warmup_max_lr=LR, warmup_type="linear")),
    "decay log": case(3, schedule("WarmupDecayLR", total_num_steps=15, warmup_num_steps=1, warmup_max_lr=LR)),
    "cosine linear": case(
        0, schedule("WarmupCosineLR", total_num_steps=30, warmup_num_steps=10, warmup_type="linear", cos_min_ratio=0.2)
    ),
    "stairs": case(2, STAIRS),
    "range in stairs": case(
        3,
        schedule(
            "LRRangeTest",
            lr_range_test_min_lr=LR / 8,
            lr_range_test_step_size=5,
            lr_range_test_step_rate=2.0,
            lr_range_test_staircase=True,
        ),
    ),
    # optimizers
    "adam with decay": case(2, clip=BOUND, optimizer=adam(weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)),
    "adam's l2": case(1, L2, micro=4),
    "adagrad": case(2, ADAGRAD, clip=None),
    "sgd": case(3, SGD, micro=4, clip=None),
    "sgd cycle": case(0, NESTEROV, CYCLE),
    # messages
    "prescale": case(0, micro=4, prescale_gradients=True),
    "prescale 2": case(2, zero(2, reduce_scatter=False), clip=BOUND, prescale_gradients=True),
    "predivide": case(0, gradient_predivide_factor=4.0),
    "predivide by a third": case(0, gradient_predivide_factor=3.0),
    "predivide 2": case(2, zero(2, reduce_scatter=False), gradient_predivide_factor=4.0),
    "0 bf16 messages": case(0, communication_data_type="bf16"),
    "1 fp16 messages": case(1, micro=4, communication_data_type="fp16"),
    "2 bf16 messages": case(2, clip=BOUND, communication_data_type="bf16"),
    "3 bf16 messages": case(3, communication_data_type="bf16"),
    "2 bf16 messages accumulate": case(2, micro=4, communication_data_type="bf16"),
    # bfloat16
    "0 bf16": case(0, BF16),
    "0 bf16 clip warm": case(0, BF16, WARM, clip=BOUND, micro=4),
    "0 bf16 sgd": case(0, BF16, SGD, WARM, clip=BOUND, micro=4),
    "1 bf16": case(1, BF16),
    "1 bf16 clip accumulate": case(1, BF16, CYCLE, clip=BOUND, micro=4),
    "1 bf16 float sums": case(1, BF16, micro=4, data_types={"grad_accum_dtype": "fp32"}),
    "1 bf16 float sums offloaded": case(1, BF16, zero(1, offload_optimizer={"device": "cpu"}), OFFLOADED, micro=4),
    "1 bf16 float messages": case(1, BF16, micro=4, communication_data_type="fp32"),
    "2 bf16": case(2, BF16),
    "2 bf16 sums": case(2, BF16, micro=4),
    "2 bf16 accumulate": case(2, BF16, COSINE, micro=4, clip=None),
    "2 bf16 float sums": case(2, BF16, micro=4, data_types={"grad_accum_dtype": "fp32"}),
    "2 bf16 float messages": case(2, BF16, micro=4, communication_data_type="fp32"),
    "3 bf16": case(3, BF16),
    "3 bf16 clip accumulate": case(3, BF16, DECAY, clip=BOUND, micro=4),
    "3 bf16 float sums": case(3, BF16, micro=4, data_types={"grad_accum_dtype": "fp32"}),
    "3 bf16 float messages": case(3, BF16, micro=4, communication_data_type="fp32"),
}
