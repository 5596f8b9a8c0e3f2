"""Record what DeepSpeed 0.19.6 does, as numbers that fds is tested against.

The values are kept beside this file, so the tests never need DeepSpeed. To make them again:

    python -m venv /tmp/ds-venv
    /tmp/ds-venv/bin/pip install torch==2.13.0
    /tmp/ds-venv/bin/pip install deepspeed==0.19.6 numpy transformers==5.23.0
    DS_ACCELERATOR=cpu /tmp/ds-venv/bin/python tests/golden/generate.py

0.19.6 is the last version that still has every feature that fds re-makes. Its classes are only driven from
outside: constructed, stepped and read. Floats are written by `repr`, so reading them gives the same bits.

lr_schedules.json, per case: `lr[0]` is the learning rate that the constructor leaves in the parameter group
(t = -1), `lr[1 + t]` what it holds once t is reached; `beta1` likewise, where momentum is cycled.
loss_scale.json, per case: `scale_after[i]` is the loss scale after the update that saw `overflow[i]`.
pipeline_schedules.json, per case: `buffers[i]` and `ticks[i]` are those of stage i. A tick is a word (`.` where nothing
is done) of letters, which LETTERS explains, with the number of the buffer. The edition "0.3.0" is the documented one,
in force up to 0.8.2: the same class but for the two things that `documented` puts back. It was compared with the class
of 0.8.2 itself, over all of these sizes.
difficulties.json, per case: `values` are those of the schedule of this index in `difficulty_schedules()`, which draws
them from a seed, in its steps, each times how often it follows itself; `stays` what a scheduler has that is told of
these steps in turn, where that differs.
deepspeed_checkpoints.tar.xz: whole checkpoints; deepspeed_checkpoints.py says what of them.
bert_layer.json: what Hugging Face's BertLayer computes; bert_layer.py says of what.
config_defaults.json, config_batches.json: what is taken where a key of the JSON is absent, and what the batch numbers
become; config_defaults.py says how they are read.
config_values.json: which values of keys are taken; config_values.py says of which.
config_losses.json: the losses of small trainings by a JSON; config_losses.py says of which.
attention_layouts.json: layouts of sparse attention; attention_layouts.py says of which.
curriculum_samples.json: how often a curriculum draws each sample; curriculum_samples.py says of which.
weight_grids.json: what quantizers of DeepSpeed and torchao make of weights; weight_grids.py says of which.
curriculum_losses.json: those of trainings with a curriculum by length; curriculum_losses.py says of which.
pruning_masks.json: the masks of its compressed modules, and what these return; pruning_masks.py says of which.
quantized_activations.json: what modules make of quantized inputs; quantized_activations.py says of which.
compressed_modules.json: outputs and masks of compressed models; compressed_modules.py says of which.
float16_scales.json: the loss scale of every step of small trainings in float16; float16_scales.py says of which.
partitions.json, per case: `spread` is what 0.19.6 returns; `bottleneck` what the versions before 0.12.5 did, which
are asked where a file of theirs is given, and else kept as they were:

    git show v0.12.4:deepspeed/runtime/utils.py > /tmp/utils.py  # in a clone of DeepSpeed
    DS_ACCELERATOR=cpu /tmp/ds-venv/bin/python tests/golden/generate.py /tmp/utils.py
"""

import ast
import json
import os
import random
import sys
from bisect import bisect_left
from itertools import groupby, product
from pathlib import Path

HERE = Path(__file__).parent
NUM_STEPS = 48
NUM_UPDATES = 60
MAX_STAGES, MAX_MICROBATCHES = 8, 24
LETTERS = {
    "LoadMicroBatch": "L",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "S",
    "RecvActivation": "R",
    "SendGrad": "s",
    "RecvGrad": "r",
    "ReduceTiedGrads": "T",
    "ReduceGrads": "G",
    "OptimizerStep": "O",
}


def main(before: str | None = None) -> None:
    """Write every file; `before` is runtime/utils.py of a version before 0.12.5, if there is one."""
    import bert_layer  # beside this file, as the next eight
    import config_defaults
    import config_losses
    import config_values
    import curriculum_losses
    import curriculum_samples
    import deepspeed_checkpoints
    import float16_scales
    import quantized_activations

    files = {
        "lr_schedules": lr_cases(),
        "loss_scale": loss_scale_cases(),
        "difficulties": difficulty_cases(),
        "pipeline_schedules": pipeline_cases(),
        "partitions": partition_cases(before),
        "quantized_activations": quantized_activations.cases(),
    }
    for name, cases in files.items():
        lines = ",\n".join(json.dumps(case) for case in cases)
        (HERE / f"{name}.json").write_text(f'{{"versions": {json.dumps(versions())}, "cases": [\n{lines}\n]}}\n')
        print(f"{name}.json: {len(cases)} cases")
    deepspeed_checkpoints.main()
    bert_layer.main()
    config_defaults.main()
    config_values.main()
    config_losses.main()
    float16_scales.main()
    curriculum_losses.main()  # which joins a group, of one rank
    curriculum_samples.main()


def versions() -> dict:
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch

    return {"deepspeed": deepspeed.__version__, "torch": torch.__version__}


def lr_grid() -> list[tuple[str, dict]]:
    """Return (class, arguments), argument names being DeepSpeed's."""
    grid = []
    for kind, steps, (low, high) in product(("log", "linear"), (1, 2, 3, 4, 17, 30), ((0.0, 1e-3), (1e-5, 0.3))):
        arguments = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": steps, "warmup_type": kind}
        grid.append(("WarmupLR", arguments))
    for kind, (steps, total) in product(
        ("log", "linear"), ((1, 10), (3, 30), (2, 2), (4, 5), (4, 40), (10, 6), (20, 60), (12, 12))
    ):
        arguments = {"total_num_steps": total, "warmup_num_steps": steps, "warmup_type": kind}
        grid.append(("WarmupDecayLR", arguments | {"warmup_min_lr": 2e-5, "warmup_max_lr": 7e-4}))
        grid.append(("WarmupDecayLR", arguments | {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1}))
        grid.append(("WarmupCosineLR", arguments))
        grid.append(("WarmupCosineLR", arguments | {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}))
        grid.append(("WarmupCosineLR", arguments | {"cos_min_ratio": 0.0}))
    for first, second in ((10, None), (1, 1), (7, 13), (20, 10), (12, 8), (30, 40)):
        sizes = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-2, "cycle_first_step_size": first}
        sizes |= {"cycle_second_step_size": second}
        decay = {"decay_step_size": 5, "decay_lr_rate": 0.3, "decay_mom_rate": 0.002}
        momenta = {"cycle_min_mom": 0.7, "cycle_max_mom": 0.95}
        grid.append(("OneCycle", sizes))
        grid.append(("OneCycle", sizes | decay | momenta))
        grid.append(("OneCycle", sizes | decay | {"decay_step_size": 0}))
        for up, down in ((1, None), (3, 5), (5, None), (4, 0), (0, 4)):
            stairs = {"cycle_first_stair_count": up, "cycle_second_stair_count": down}
            grid.append(("OneCycle", sizes | decay | stairs))
    for size, rate, staircase in product((1, 3, 7, 10, 49), (0.5, 1.0, 7.0), (False, True)):
        arguments = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": size}
        arguments |= {"lr_range_test_step_rate": rate, "lr_range_test_staircase": staircase}
        grid.append(("LRRangeTest", arguments))
    return grid


def lr_cases() -> list[dict]:
    return [{"class": name, "arguments": arguments} | follow(name, arguments) for name, arguments in lr_grid()]


def follow(name: str, arguments: dict, group_lr: float = 3e-4) -> dict:
    """Return the parameter group's numbers after construction and after each of NUM_STEPS steps."""
    import torch
    from deepspeed.runtime import lr_schedules  # pyright: ignore[reportMissingImports]

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=group_lr)
    scheduler = getattr(lr_schedules, name)(optimizer, **arguments)
    group = optimizer.param_groups[0]
    lr, beta1 = [group["lr"]], [group["betas"][0]]
    for _ in range(NUM_STEPS):
        scheduler.step()
        lr.append(group["lr"])
        beta1.append(group["betas"][0])
    return {"group_lr": group_lr, "lr": lr} | ({"beta1": beta1} if name == "OneCycle" else {})


def loss_scale_cases() -> list[dict]:
    draw = random.Random(20240806)
    cases = []
    for (initial, minimum), window, hysteresis, consecutive in product(
        ((256.0, 1.0), (100.0, 30.0)), (1, 2, 7, 25), (1, 2, 4), (False, True)
    ):
        runs = [[int(draw.random() < p) for _ in range(NUM_UPDATES)] for p in (0.05, 0.2, 0.5)]
        if minimum == 1.0:
            runs += [[0] * NUM_UPDATES, [1] * NUM_UPDATES]
        settings = {"initial": initial, "window": window, "hysteresis": hysteresis}
        settings |= {"consecutive_hysteresis": consecutive, "minimum": minimum}
        cases += [settings | {"overflow": bits, "scale_after": scales(settings, bits)} for bits in runs]
    return cases


def scales(settings: dict, overflow: list[int]) -> list[float]:
    """Return the scale of DeepSpeed's dynamic loss scaler after each update."""
    from unittest import mock

    from deepspeed.runtime.fp16 import loss_scaler  # pyright: ignore[reportMissingImports]

    scaler = loss_scaler.DynamicLossScaler(
        init_scale=settings["initial"],
        scale_window=settings["window"],
        min_scale=settings["minimum"],
        delayed_shift=settings["hysteresis"],
        consecutive_hysteresis=settings["consecutive_hysteresis"],
        raise_error_at_min_scale=False,
    )
    after = []
    with mock.patch.object(loss_scaler.dist, "get_rank", return_value=0):  # asked only to decide whether to log
        for bit in overflow:
            scaler.update_scale(bool(bit))
            after.append(float(scaler.loss_scale))
    return after


def difficulty_schedules() -> list[tuple[dict, list[int]]]:
    """Return 2,000 random (configuration of a curriculum, steps); one of type `custom` has its `values`, by step."""
    draw = random.Random(20211207)
    schedules = []
    for i in range(2000):
        kind = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")[i % 4]
        total, steps = draw.randint(1, 40), list(range(1, 51))
        if i % 20 < 2:  # long ones, of which some steps are asked
            total = draw.randint(1000, 100_000)
            steps = sorted(draw.sample(range(1, 2 * total), 20))
        numbers = {"total_curriculum_step": total, "difficulty_step": draw.choice((1, 3, 8, 8, 16, 16, 64))}
        low, high = sorted((draw.randint(0, 200), draw.randint(0, draw.choice((20, 300, 4096)))))
        if kind == "fixed_root":
            numbers["root_degree"] = draw.choice((1, 2, 2, 3, 5, 10))
        if kind == "fixed_discrete":
            ends = sorted(draw.sample(range(1, 50), draw.randint(1, 6)))
            numbers = {"difficulty": [draw.randint(1, 9) for _ in range(len(ends) + 1)], "max_step": ends}
            low, high = 0, draw.randint(1, 10)
        config = {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": numbers}
        if kind == "custom":
            low, high = 0, draw.randint(1, 50)
            blocks = [draw.randint(0, 9) + block // 2 for block in range(steps[-1] // 7 + 1)]
            values = [blocks[t // 7] for t in range(steps[-1] + 1)]
            config = {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "values": values}
        schedules.append((config, steps))
    return schedules


def difficulty_cases() -> list[dict]:
    from deepspeed.runtime.data_pipeline import curriculum_scheduler  # pyright: ignore[reportMissingImports]

    cases = []
    for config, steps in difficulty_schedules():
        function, told = (curriculum_scheduler.CurriculumScheduler(config) for _ in range(2))
        for scheduler in (function, told):
            if "values" in config:
                scheduler.set_custom_get_difficulty(config["values"].__getitem__)
        values, stays = map(function.get_difficulty, steps), map(told.update_difficulty, steps)
        case = {"values": in_runs(values), "stays": in_runs(stays)}
        cases.append(case if case["stays"] != case["values"] else {"values": case["values"]})
    return cases


def in_runs(values) -> str:
    return " ".join(f"{value}*{len(list(run))}" for value, run in groupby(values))


def pipeline_cases() -> list[dict]:
    from deepspeed.runtime.pipe import schedule  # pyright: ignore[reportMissingImports]

    train, inference, data_parallel = schedule.TrainSchedule, schedule.InferenceSchedule, schedule.DataParallelSchedule
    both, cases = ["0.3.0", "0.19.6"], []
    for stages, microbatches in product(range(1, MAX_STAGES + 1), range(1, MAX_MICROBATCHES + 1)):
        size = {"num_stages": stages, "num_microbatches": microbatches}
        kinds = [(documented(train), ["0.3.0"]), (train, ["0.19.6"]), (inference, both)]
        for kind, editions in kinds + [(data_parallel, both)] * (stages == 1):
            name = next(c.__name__ for c in (train, inference, data_parallel) if issubclass(kind, c))
            streams = [kind(microbatches, stages, stage) for stage in range(stages)]
            case = {"class": name, "editions": editions} | size
            case["buffers"] = [stream.num_pipe_buffers() for stream in streams]
            case["ticks"] = [" ".join(map(letters, stream.steps())) for stream in streams]
            cases.append(case)
    return cases


def documented(train: type) -> type:
    """Return the schedule as it is documented: each tick's exchange the other way round, and one buffer more."""

    class Documented(train):
        def steps(self):
            for tick in super().steps():
                exchange = [c for c in tick if c.name.startswith(("Send", "Recv"))]
                yield exchange[::-1] + tick[len(exchange) :]  # the exchange comes first

        def num_pipe_buffers(self):
            return max(2, min(self.stages - self.stage_id + 1, self.micro_batches))

    return Documented


def letters(tick: list) -> str:
    return "".join(LETTERS[c.name] + str(c.kwargs.get("buffer_id", "")) for c in tick) or "."


def partition_cases(before: str | None = None) -> list[dict]:
    from deepspeed.runtime import utils  # pyright: ignore[reportMissingImports]

    cases = [
        {"num_items": items, "num_parts": parts, "uniform": utils.partition_uniform(items, parts)}
        for items, parts in product(range(1, 31), range(1, 11))
    ]
    ask = old_partition(before) if before else kept_partition()
    for weights, parts in partition_problems():
        spread = [int(i) for i in utils.partition_balanced(weights, parts)]
        case = {"weights": weights, "num_parts": parts, "spread": spread}
        cases.append(case | {"bottleneck": ask(weights, parts)})
    return cases


def partition_problems() -> list[tuple[list, int]]:
    """Return (weights, number of parts)."""
    draw = random.Random(20231208)
    kinds = [
        lambda: draw.randint(0, 1),
        lambda: draw.randint(0, 9),
        lambda: draw.choice((1, 1, 1, 50)),
        lambda: draw.randint(0, 10**8),
        lambda: round(draw.random() * 100, 3),
        lambda: draw.randint(0, 640) / 64,
    ]
    problems: list[tuple[list, int]] = [([52734976] + [12596224] * 24 + [2048, 0], 4)]  # BERT
    problems += [([7, *[1] * 8, 7], parts) for parts in range(1, 13)]
    for i in range(3000):
        kind, parts = draw.choice(kinds), draw.randint(2, 8)
        size = draw.randint(parts, parts + (8 if i % 20 else 30))
        problems.append(([kind() for _ in range(size)], parts))
    return problems


def old_partition(path: str):
    """Return `partition_balanced` of that file, without the imports that stand around it."""
    names = {"prefix_sum_inc", "partition_uniform", "_lprobe", "_rb_partition_balanced", "partition_balanced"}
    tree = ast.parse(Path(path).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    namespace = {"bisect_left": bisect_left}
    exec(compile(tree, path, "exec"), namespace)
    return namespace["partition_balanced"]


def kept_partition():
    """Return a look-up of what is kept."""
    cases = json.loads((HERE / "partitions.json").read_text())["cases"]
    kept = {(str(c["weights"]), c["num_parts"]): c["bottleneck"] for c in cases if "weights" in c}
    return lambda weights, parts: kept[str(weights), parts]


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(*sys.argv[1:])
