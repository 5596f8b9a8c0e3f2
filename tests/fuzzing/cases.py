"""A case: a number, and what is drawn from it: a JSON, how many ranks train by it, and what happens on the way."""

from __future__ import annotations

import random
from typing import Any

import attrs

STEPS = 8


@attrs.frozen
class Case:
    """One training by a JSON, the same for the same number for ever.

    Attributes:
        json: the configuration.
        ranks: how many train.
        rows: of a microbatch on a rank.
        steps: updates that the optimizer is asked for.
        loud: numbers of the steps whose rows are multiplied by `factor`, so that 16 bits overflow.
        frozen, unused: whether the model has a parameter that is not trained, and one that the loss does not use.
        saved: the step after which both save, and fds goes on from both saves; 0 for none.
    """

    number: int
    json: dict[str, Any]
    ranks: int
    rows: int
    steps: int
    loud: tuple[int, ...]
    factor: float
    frozen: bool
    unused: bool
    saved: int

    @property
    def microbatches(self) -> int:
        """How many make an update."""
        batch = self.json
        if "gradient_accumulation_steps" in batch:
            return batch["gradient_accumulation_steps"]
        return batch.get("train_batch_size", self.rows * self.ranks) // (self.rows * self.ranks)


def drawn(number: int) -> Case:
    """Return the case of a number."""
    draw = random.Random(f"fds {number}")
    ranks, rows, microbatches = 1 + number % 2, draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 3, 4, 8))
    kind = draw.choice(("fp32", "fp32", "fp16", "fp16", "bf16", "autocast"))
    json = _batch(draw, ranks, rows, microbatches)
    json |= {"zero_allow_untested_optimizer": True, "zero_optimization": _zero(draw)}
    json |= {"optimizer": _optimizer(draw)} | _scheduler(draw) | _dtype(draw, kind) | _messages(draw, ranks)
    _leave_out_what_is_refused_there(json)
    clip = draw.choice((None, None, 0.0, round(10 ** draw.uniform(-2, 1), 4)))
    json |= {} if clip is None else {"gradient_clipping": clip}
    loud = tuple(sorted(draw.sample(range(STEPS), draw.choice((0, 1, 2))))) if kind != "fp32" else ()
    factor = 2.0**127 if kind == "bf16" else draw.choice((4.0, 16.0, 2.0**40))  # the largest: never finite in 16 bits
    saved = draw.choice((0, 0, draw.randrange(1, STEPS - 1)))
    return Case(number, json, ranks, rows, STEPS, loud, factor, draw.random() < 0.2, draw.random() < 0.2, saved)


def _batch(draw: random.Random, ranks: int, rows: int, microbatches: int) -> dict[str, Any]:
    """Return two sides of the triangle or all, or one where that is enough."""
    sides = {
        "train_batch_size": ranks * rows * microbatches,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": microbatches,
    }
    left_out = draw.choice((None, *sides))
    if microbatches == 1 and draw.random() < 0.3:
        return {"train_micro_batch_size_per_gpu": rows}
    return {name: size for name, size in sides.items() if name != left_out}


def _some(draw: random.Random, share: float = 0.3, **choices: Any) -> dict[str, Any]:
    """Return some of the keys, with one of their values each."""
    return {name: draw.choice(values) for name, values in choices.items() if draw.random() < share}


def _zero(draw: random.Random) -> dict[str, Any]:
    stage = draw.randrange(4)
    keys = _some(
        draw,
        reduce_bucket_size=(7, 50, 333, 10**6),
        allgather_bucket_size=(12, 64, 10**6),
        reduce_scatter=(True, False),
        contiguous_gradients=(True, False),
        overlap_comm=(True, False),
        round_robin_gradients=(True, False),
        allgather_partitions=(True, False),
        stage3_max_live_parameters=(0, 100, 10**6),
        stage3_prefetch_bucket_size=(0, 50, 10**5),
        stage3_max_reuse_distance=(0, 100, 10**6),
        stage3_gather_16bit_weights_on_model_save=(True, False),
        sub_group_size=(40, 10**9),
    )
    if stage == 3:
        keys["stage3_param_persistence_threshold"] = draw.choice((0, 10, 100000))
        keys["overlap_comm"] = False  # with it 0.19.6 waits for a stream that a CPU has not got
    return {"stage": stage, **keys}


def _optimizer(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(("AdamW", "AdamW", "Adam", "adamw", "SGD", "SGD", "Adagrad"))
    decay = _some(draw, weight_decay=(0.0, 0.01, 0.1))
    if kind == "SGD":
        params = {"lr": draw.choice((0.3, 0.05, 0.01)), **_some(draw, 0.5, momentum=(0.0, 0.5, 0.9)), **decay}
        momentum = params.get("momentum", 0)
        params |= {"nesterov": True} if momentum and draw.random() < 0.4 else _some(draw, dampening=(0.0, 0.25))
        return {"type": kind, "params": params}
    if kind == "Adagrad":
        return {
            "type": kind,
            "params": {
                "lr": draw.choice((0.1, 0.02)),
                **decay,
                **_some(draw, lr_decay=(0.0, 0.1), initial_accumulator_value=(0.1, 0.5), eps=(1e-6,)),
            },
        }
    params = {"lr": draw.choice((1e-2, 3e-3)), "torch_adam": True, "eps": draw.choice((1e-3, 1e-4)), **decay}
    params |= _some(draw, betas=([0.8, 0.95], [0.0, 0.9], [0.9, 0.999]))
    params |= _some(draw, adam_w_mode=(True, False)) if kind == "Adam" else {}
    return {"type": kind, "params": params}


def _scheduler(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice((None, None, "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"))
    if kind is None:
        return {}
    rise = _some(draw, 0.7, warmup_num_steps=(1, 2, 3, 6, 30), warmup_type=("log", "linear"))
    peak = _some(draw, 0.7, warmup_min_lr=(0.0, 1e-3, [2e-3]), warmup_max_lr=(0.02, 5e-3, [0.01]))
    params = {
        "WarmupLR": {**rise, **peak},
        "WarmupDecayLR": {"total_num_steps": draw.choice((4, 9, 40)), **rise, **peak},
        "WarmupCosineLR": {
            "total_num_steps": draw.choice((7, 9, 40)),
            **rise,
            **_some(draw, warmup_min_ratio=(0.0, 0.3), cos_min_ratio=(0.0, 0.2)),
        },
        "OneCycle": {
            "cycle_min_lr": draw.choice((1e-3, [2e-3])),
            "cycle_max_lr": draw.choice((0.02, 5e-3)),
            "cycle_first_step_size": draw.choice((1, 2, 3, 9)),
            **_some(
                draw,
                0.5,
                cycle_second_step_size=(0, 1, 4),
                cycle_first_stair_count=(0, 2),
                decay_step_size=(0, 2),
                decay_lr_rate=(0.0, 0.5),
                cycle_momentum=(True, False),
                cycle_min_mom=(0.7,),
                cycle_max_mom=(0.95,),
                decay_mom_rate=(0.0, 0.001),
            ),
        },
        "LRRangeTest": _some(
            draw,
            0.7,
            lr_range_test_min_lr=(1e-3, 0.01, 0, [5e-3]),
            lr_range_test_step_size=(1, 3, 2000),
            lr_range_test_step_rate=(0.0, 1.0, 2.5),
            lr_range_test_staircase=(True, False),
        ),
    }[kind]
    return {"scheduler": {"type": kind, "params": params}}


def _dtype(draw: random.Random, kind: str) -> dict[str, Any]:
    if kind == "fp32":
        return {}
    if kind == "bf16":
        sums = draw.choice(({}, {}, {"data_types": {"grad_accum_dtype": draw.choice(("fp32", "float32"))}}))
        return {"bf16": {"enabled": True, **_some(draw, check_grad_overflow=(True, False))}, **sums}
    if kind == "autocast":
        return {"torch_autocast": {"enabled": True, "dtype": draw.choice(("bfloat16", "bf16", "float16", "half"))}}
    if draw.random() < 0.3:
        return {"fp16": {"enabled": True, "loss_scale": 2.0 ** draw.randrange(0, 15), "loss_scale_window": 0}}
    rule = _some(
        draw,
        0.6,
        initial_scale_power=(4, 8, 12, 16),
        loss_scale_window=(2, 3, 1000),
        hysteresis=(1, 2, 3),
        consecutive_hysteresis=(True, False),
        min_loss_scale=(1, 4),
    )
    return {"fp16": {"enabled": True, **rule}}


def _messages(draw: random.Random, ranks: int) -> dict[str, Any]:
    if ranks == 1:
        return {}
    factor = {"gradient_predivide_factor": draw.choice((2.0, 3.0))}
    divided = draw.choice(({}, {}, {}, {"prescale_gradients": True}, factor))
    return {**divided, **_some(draw, 0.15, communication_data_type=("fp32", "bf16", "fp16"))}


def _leave_out_what_is_refused_there(json: dict[str, Any]) -> None:
    """Change what DeepSpeed's engine refuses, and fds takes: `decisions` says that it does."""
    zero = json["zero_optimization"]
    if zero["stage"] > 1 and {"prescale_gradients", "gradient_predivide_factor"} & json.keys():
        zero["reduce_scatter"] = False
    if zero["stage"] == 0:
        json.pop("data_types", None)
