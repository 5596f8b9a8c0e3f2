"""Record checkpoints of DeepSpeed 0.19.6, what it reads from them itself, and how it goes on from them.

`generate.py` runs this. deepspeed_checkpoints.tar.xz holds a directory a case: what `engine.save_checkpoint` wrote (but
for the script that it adds) and expected.json:

    params, exp_avg, exp_avg_sq, ...: by parameter, as DeepSpeed gathers them from a running engine, in float32
    consolidated: what its zero_to_fp32 makes of the directory (ZeRO only)
    buffers: as the module had them
    losses: of the steps after the checkpoint, over all rows
    after: the parameters behind those steps

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/deepspeed_checkpoints.py [DIR]

with DIR leaves the directories there and makes no archive.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ARCHIVE = HERE / "deepspeed_checkpoints.tar.xz"
ADAMW = ("exp_avg", "exp_avg_sq")

# name: (ranks, stages of the pipeline or 0, ZeRO stage, more configuration)
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}}
CASES: dict[str, tuple[int, int, int, dict]] = {
    **{f"zero{stage}_ranks{n}": (n, 0, stage, {}) for stage in (1, 2, 3) for n in (1, 2, 3)},
    "zero0": (2, 0, 0, {}),
    "zero0_trainable": (1, 0, 0, {"trainable": True}),
    "zero0_bf16": (2, 0, 0, BF16),
    "zero0_fp16": (1, 0, 0, FP16),
    "zero1_bf16": (2, 0, 1, BF16),
    "zero1_bf16_float32_sums": (2, 0, 1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2_bf16": (2, 0, 2, BF16),
    "zero3_bf16": (2, 0, 3, BF16),
    "zero1_fp16": (2, 0, 1, FP16),
    "zero3_fp16": (2, 0, 3, FP16),
    "zero2_round_robin": (3, 0, 2, {"zero": {"round_robin_gradients": True}}),
    "zero2_elastic": (2, 0, 2, {"zero": {"elastic_checkpoint": True}}),
    "zero3_subgroups": (2, 0, 3, {"zero": {"sub_group_size": 20}}),
    "zero1_sgd": (2, 0, 1, {"torch": "SGD", "momentum": 0.9}),
    "zero2_adagrad": (2, 0, 2, {"torch": "Adagrad"}),
    "zero2_rmsprop": (2, 0, 2, {"torch": "RMSprop"}),
    "pipe_zero0": (2, 2, 0, {"untied": True}),
    "pipe_zero0_tied": (2, 2, 0, {}),
    "pipe_zero1": (2, 2, 1, {}),
    "pipe_zero1_ranks4": (4, 2, 1, {}),
    "pipe_zero1_bf16": (4, 2, 1, BF16),
    "pipe_zero0_bf16": (2, 2, 0, BF16),
}


def main(into: str | None = None) -> None:
    """Record every case."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(into or temporary)
        for pipelined in (False, True):
            for ranks in sorted({case[0] for case in CASES.values() if bool(case[1]) == pipelined}):
                launch(root, [n for n, c in CASES.items() if c[0] == ranks and bool(c[1]) == pipelined], ranks)
        for name in ("zero1_ranks3", "zero3_ranks3"):
            make_universal(root / name, root / f"{name}_universal")
        for script in root.glob("*/zero_to_fp32.py"):
            script.unlink()
        if into is None:
            with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
                for path in sorted(root.rglob("*")):
                    archive.add(path, path.relative_to(root), recursive=False, filter=anonymous)
            print(f"{ARCHIVE.name}: {len(CASES)} cases, {ARCHIVE.stat().st_size} bytes")


def launch(root: Path, names: list[str], ranks: int) -> None:
    """Run the cases on this many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks)}
    subprocess.run([*command, "--record", str(root), *names], check=True, env=environment)


def make_universal(folder: Path, into: Path) -> None:
    """Let DeepSpeed put the slices of a checkpoint together, by parameter."""
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options]
    tag = (folder / "latest").read_text()
    subprocess.run(
        [*command, "--input_folder", str(folder / tag), "--output_folder", str(into / tag)],
        check=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
    )
    shutil.copy(folder / "expected.json", into)


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def record(root: Path, names: list[str]) -> None:
    """Run on every rank."""
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch
    from deepspeed.accelerator import get_accelerator  # pyright: ignore[reportMissingImports]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True  # it computes on the CPU, only nobody offers it
    dtypes = get_accelerator().supported_dtypes()
    kind.supported_dtypes = lambda self: [*dtypes, torch.half]
    deepspeed.init_distributed("gloo")
    for name in names:
        run(root / name, *CASES[name])
        torch.distributed.barrier()


def run(folder: Path, ranks: int, stages: int, zero: int, more: dict) -> None:
    """Train, save, look at what was saved, and train on."""
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch
    import torch.distributed as dist
    import trained
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # pyright: ignore[reportMissingImports]

    more = dict(more)
    trainable, kind, momentum = more.pop("trainable", False), more.pop("torch", "AdamW"), more.pop("momentum", 0.0)
    tied = not more.pop("untied", False)
    data_ranks = ranks // max(stages, 1)
    config = {
        "train_micro_batch_size_per_gpu": trained.ROWS // data_ranks // max(stages, 1),
        "gradient_accumulation_steps": max(stages, 1),
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 10, **more.pop("zero", {})},
        **more,
    }
    torch.manual_seed(1)
    if stages:
        specs = trained.layers(LayerSpec, TiedLayerSpec if tied else None)
        model = PipelineModule(specs, num_stages=stages, loss_fn=trained.loss_of, partition_method="uniform")
    else:
        model = trained.Net()
    groups = groups_of(model, zero and kind != "Adagrad", trainable)  # two groups are too many for it
    given = {"lr": trained.LR, "weight_decay": trained.WEIGHT_DECAY}
    if kind == "AdamW":
        given |= {"betas": trained.BETAS, "eps": trained.EPS}
    if momentum:
        given |= {"momentum": momentum}
    engine, *_ = deepspeed.initialize(model=model, optimizer=getattr(torch.optim, kind)(groups, **given), config=config)

    def step(i: int) -> float:
        data_rank = engine.grid.get_data_parallel_rank() if stages else dist.get_rank()
        rows = slice(data_rank * trained.ROWS // data_ranks, (data_rank + 1) * trained.ROWS // data_ranks)
        x, y = (part[rows] for part in trained.batch(i))
        x = x.to(next((p.dtype for p in model.parameters()), x.dtype))
        if stages:
            size = len(x) // stages
            return float(engine.train_batch(iter(list(zip(x.split(size), y.split(size), strict=True)))))
        loss = trained.loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        return float(mean / ranks)

    for i in range(trained.STEPS_BEFORE):
        step(i)
    client = {"epoch": 2, "note": "as it was", "history": [0.5, None, {"a": True}], "odd": torch.ones(2)}
    engine.save_checkpoint(str(folder), client_state=client)
    slots = {"AdamW": ADAMW, "SGD": ("momentum_buffer",), "Adagrad": ("sum",)}.get(kind, ())
    expected = {"params": gathered(engine, model, stages)} | {s: gathered(engine, model, stages, s) for s in slots}
    expected["buffers"] = merged({n: b.tolist() for n, b in model.named_buffers()})
    expected["scale"] = scale_of(engine)
    readable = zero and not stages and "data_types" not in config  # else its zero_to_fp32 says that it is not ZeRO
    if readable and dist.get_rank() == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # pyright: ignore[reportMissingImports]

        found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        expected["consolidated"] = {n: x.tolist() for n, x in found.items()}
    dist.barrier()
    expected["losses"] = [step(trained.STEPS_BEFORE + i) for i in range(trained.STEPS_AFTER)]
    expected["after"] = gathered(engine, model, stages)
    expected |= {"calls": trained.STEPS_BEFORE, "skipped": engine.skipped_steps}
    if dist.get_rank() == 0:
        (folder / "expected.json").write_text(json.dumps(expected))
    engine.destroy()


def groups_of(model, several: bool, trainable: bool) -> list:
    """Return what the optimizer is given: two groups where files name parameters, else one."""
    params = [p for p in model.parameters() if p.requires_grad or not trainable]
    if not several:
        return params
    return [{"params": [p for p in params if p.dim() == 1]}, {"params": [p for p in params if p.dim() > 1]}]


def gathered(engine, model, stages: int, slot: str | None = None) -> dict[str, list]:
    """Return whole float32 parameters, or a slot of the optimizer, by name; all ranks call this."""
    from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # pyright: ignore[reportMissingImports]

    found = {}
    zero3 = engine.zero_optimization_stage() == 3
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # it looked before there was a state
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            if slot is None:
                with GatheredParameters([p], enabled=zero3):
                    found[name] = p.detach().float().tolist()
        elif hasattr(p, "_hp_mapping") or hasattr(p, "ds_id"):
            x = safe_get_full_fp32_param(p) if slot is None else safe_get_full_optimizer_state(p, slot)
            if x is not None:
                found[name] = x.reshape(p.ds_shape if zero3 else p.shape).float().tolist()
        elif hasattr(engine.optimizer, "fp32_groups"):  # float32 masters one by one, in the order of the parameters
            place = [n for n, q in model.named_parameters() if q.requires_grad].index(name)
            master = engine.optimizer.fp32_groups[0][place]
            x = master if slot is None else engine.optimizer.optimizer.state[master][slot]
            found[name] = x.detach().tolist()
        else:
            x = p if slot is None else engine.optimizer.state[p][slot]
            found[name] = x.detach().float().tolist()
    return merged(found) if stages else found


def merged(found: dict[str, list]) -> dict[str, list]:
    """Return what all ranks have."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: x for one in everyone for name, x in one.items()}


def scale_of(engine) -> list | None:
    """Return what the dynamic loss scaler of ZeRO remembers: scale, steps since the last overflow, hysteresis."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return None
    return [scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1, scaler.cur_hysteresis]


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "storage" / "foreign"))
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(*sys.argv[1:])
