"""Offloading, as a JSON asks for it: the same numbers, elsewhere, and as many bytes there as it is told to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

import fds
from fds.config import TrainingConfig
from fds.config.composition import compose_supported
from fds.config.memory import rank_memory
from tests.bits import assert_same_bits
from tests.config.test_memory import LAYER, LAYERS, layers, loss_fn, said
from tests.config.test_shapes import LOSS, SHAPES, parsed, rows

OFFLOADING = [
    "accelerate_zero2_offload",
    "accelerate_zero3_offload",
    "hf_zero2_auto",
    "hf_zero3_auto",
    "fastchat_zero2",
]


def without(data: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON that offloads nothing."""
    zero = {name: value for name, value in data["zero_optimization"].items() if not name.startswith("offload_")}
    return {**data, "zero_optimization": zero}


def trained(data: dict[str, Any]) -> Any:
    """Return the state and the metrics after two steps on each of two ranks, and where the state lives."""

    def run() -> tuple[Any, ...]:
        mesh, config = fds.mesh(dp=2), TrainingConfig.of(data)
        own = () if config.optimizer else (fds.adamw(1e-3),)
        step = fds.compose(*config.transforms(mesh), *own)(LOSS)
        state = step.init(LOSS.init, key=1)
        batch = rows(config.resolve(world_size=2)["train_batch_size"] // 2, mesh)
        for _ in range(2):
            state, metrics = step(state, batch)
        return state, metrics, step.params(state), step.describe(state).lives

    found = fds.simulate(run, 2)
    return [one[:3] for one in found], found[0][3]


@pytest.mark.parametrize("name", OFFLOADING)
def test_a_template_that_offloads_trains_as_it_would_without(name):
    data = parsed(name).to_dict()
    found, lives = trained(data)
    want, device = trained(without(data))
    assert_same_bits(found, want)
    assert set(lives.values()) == {"host"} and "opt" in lives and not device


def test_both_on_a_disk_train_as_they_would_without(tmp_path):
    """ZeRO-Infinity, as DeepSpeed's example of it has it."""
    with pytest.warns(FutureWarning, match="thread_count"):
        data = TrainingConfig.of(
            json.loads(SHAPES["megatron_infinity"].read_text().replace("/tmp/nvme", str(tmp_path)))
            | {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
        ).to_dict()
    found, lives = trained(data)
    want, _ = trained(without(data))
    assert_same_bits(found, want)
    assert lives == dict.fromkeys(("opt", "params", "gradients"), f"disk {tmp_path}")
    assert list(tmp_path.glob("*swp*")) == []


def test_the_template_with_auto_values_trains_on_a_disk_too(tmp_path):
    """As transformers' documentation has it for NVMe, with all that it tunes."""
    there = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True, "buffer_count": 4}
    data = parsed("hf_zero3_auto").to_dict()
    data["zero_optimization"] |= {
        "offload_optimizer": {**there, "fast_init": False},
        "offload_param": {**there, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000},
    }
    aio = {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False}
    config = TrainingConfig.of(data | {"aio": aio | {"overlap_events": True}})
    assert "queue_depth=64" in config.explain({"dp": 2})
    found, lives = trained(config.to_dict())
    want, _ = trained(without(data))
    assert_same_bits(found, want)
    assert lives == dict.fromkeys(("opt", "params", "gradients"), f"disk {tmp_path}")


@pytest.mark.parametrize(
    ("old", "stage", "call"), [("cpu_offload", 2, "moments"), ("cpu_offload_params", 3, "masters")]
)
def test_the_oldest_spelling_offloads_too(old, stage, call):
    with pytest.warns(FutureWarning, match=f"{old!r} is an old spelling"):
        config = TrainingConfig.of({"train_batch_size": 8, "zero_optimization": {"stage": stage, old: True}})
    assert f"fds.offload({call}='host'" in config.explain({"dp": 2})


def test_what_only_tunes_deepspeed_is_listed_with_the_reason():
    host = {"device": "cpu", "pin_memory": False, "fast_init": True, "buffer_count": 8, "cpuadam_cores_perc": 0.5}
    zero = {"stage": 3, "offload_optimizer": host, "offload_param": {"device": "cpu", "max_in_cpu": 5}}
    text = TrainingConfig.of({"train_batch_size": 8, "zero_optimization": zero}).explain({"dp": 2})
    _, _, listed = text.partition("# not applicable")
    for name in ("pin_memory", "fast_init", "buffer_count", "cpuadam_cores_perc"):
        assert f"zero_optimization.offload_optimizer.{name} = " in listed
    assert "zero_optimization.offload_param.max_in_cpu = 5: " in listed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
    ],
    ids=str,
)
def test_the_bytes_of_each_place_are_those_of_the_formula(tmp_path, zero, optimizer, precision):
    named = {k: {**v, "nvme_path": str(tmp_path)} if isinstance(v, dict) else v for k, v in zero.items()}
    data = said(zero["stage"], optimizer, precision)
    data = {**data, "zero_optimization": {**data["zero_optimization"], **named}}
    calls, config = compose_supported(TrainingConfig.of(data), {"dp": 2})
    told = {one.what: one.num_bytes(LAYERS * LAYER) for one in rank_memory(config, calls, {"dp": 2})}

    def body() -> dict[str, int]:
        step = fds.compose(*TrainingConfig.of(data).transforms(fds.mesh(dp=2)))(loss_fn)
        return step.describe(step.init(layers())).places

    where = "a disk" if zero["offload_optimizer"]["device"] == "nvme" else "the host"
    sums = {what: n for what, n in told.items() if what.startswith("sums of gradients")}
    part, sliced = zero["offload_optimizer"].get("ratio", 1), ", among 2 ranks" * (zero["stage"] > 1)
    assert sums[f"sums of gradients{sliced}, on {where}"] == part * sum(sums.values()) > 0
    ends = {"on the host": "host", "on a disk": f"disk {tmp_path}"}
    for places in fds.simulate(body, 2):
        for end, place in ends.items():
            held = sum(n for what, n in told.items() if what.endswith(end) and "gradients" not in what)
            assert places.get(place, 0) == held
        state = sum(n for what, n in told.items() if "master" in what or "state" in what)
        assert state == sum(places.values())
