"""Every contradiction of DeepSpeed is decided, every decision is held by a test that exists, and these are some."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import fds
from fds.config import TrainingConfig
from fds.config.decisions import CONTRADICTIONS, INTENDED
from fds.config.field import flat_keys
from fds.config.record import Config, record_of
from fds.config.schema import differing, parameters

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "config_defaults.json").read_text())["keys"]
DIFFERING = dict(differing())
TOPICS = [  # features.md 0.2, row by row: what the page names it
    "order of instructions in `TrainSchedule`",
    "`TrainSchedule.num_pipe_buffers`",
    "`partition_balanced`",
    "`gradient_clipping`",
    "steps_per_print",
    "timeout of `init_distributed`",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.sub_group_size",
    "zero_optimization.overlap_comm",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.nvme_path",
    "`zero_optimization.grad_hooks`",
    "`aio.thread_count`",
    "autotuning.tuner_type",
    "autotuning.overwrite",
    "compression_training.activation_quantization.shared_parameters.range_calibration",
    *(
        f"compression_training.{technique}.shared_parameters.schedule_offset"
        for technique in ("activation_quantization", "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")
    ),
    "`elasticity.prefer_large_batch`",
    "sparse_attention.num_different_global_patterns",
    "optimizer type `Adam`",
    "first dynamic loss scale",
]


@pytest.mark.parametrize("topic", TOPICS)
def test_a_contradiction_is_decided(topic):
    assert topic in DIFFERING or topic in [one.topic for one in CONTRADICTIONS]


def test_all_ten_defects_are_there():
    assert len(INTENDED) >= 10  # features.md 0.3 has ten


@pytest.mark.parametrize("test", sorted({one.test for one in (*CONTRADICTIONS, *INTENDED)}))
def test_the_test_that_is_named_exists(test):
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions and name.startswith("test_")


@pytest.mark.parametrize("one", [*CONTRADICTIONS, *INTENDED], ids=lambda one: one.test.partition("::")[2])
def test_a_name_of_fds_in_a_decision_exists(one):
    for name in re.findall(r"`fds\.([a-z_.]+)", one.here):
        value = fds
        for part in name.split("."):
            value = getattr(value, part)


def key_of(path: str, edition: str) -> tuple[object, object]:
    """Return what a record of an edition has for a key, and the edition's default."""
    found = re.fullmatch(r"(optimizer|scheduler)\[(\w+)\]\.params\.(\w+)", path)
    cls: type[Config] = dict(parameters()[found[1]])[found[2]] if found else TrainingConfig
    *groups, name = [found[3]] if found else path.split(".")
    for group in groups:
        cls = record_of(flat_keys(cls)[group][0])
    return cls(defaults=edition)[name]


@pytest.mark.parametrize("path", DIFFERING)
def test_a_default_is_that_of_its_edition(path):
    known = DIFFERING[path]
    assert key_of(path, "0.19.6") == known.default != known.documented == key_of(path, "docs")


@pytest.mark.parametrize("path", DIFFERING)
def test_the_code_column_is_what_deepspeed_was_seen_to_do(path):
    recorded = path.replace("sparse_attention.", "sparse_attention[fixed].")
    assert GOLDEN[recorded]["default"] == DIFFERING[path].default


def transforms(data: dict, edition: str = "0.19.6") -> str:
    return str(TrainingConfig.of({"train_batch_size": 4, **data}, defaults=edition).transforms(fds.mesh(dp=1)))


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


@pytest.mark.parametrize("edition", ["0.19.6", "docs"])
def test_gradients_are_clipped_at_1_unless_the_json_says_0(edition):
    assert "clip_by_global_norm(1.0)" in transforms(ADAM, edition)
    assert "clip_by_global_norm" not in transforms({**ADAM, "gradient_clipping": 0}, edition)
    assert GOLDEN["gradient_clipping"]["default"] == 1.0
    config = TrainingConfig.of({"train_batch_size": 4, **ADAM}, defaults=edition)
    assert "fds.clip_by_global_norm(1.0)" in config.explain({"dp": 1})


def test_ranks_wait_for_each_other_for_half_an_hour():
    assert inspect.signature(fds.init_distributed).parameters["timeout"].default == 30 * 60


def test_grad_hooks_are_taken_and_listed_as_without_meaning():
    data = {"train_batch_size": 4, **ADAM, "zero_optimization": {"stage": 1, "grad_hooks": False}}
    assert "zero_optimization.grad_hooks" not in GOLDEN
    assert "zero_optimization.grad_hooks = false" in TrainingConfig.of(data).explain({"dp": 1})


def test_thread_count_is_an_old_spelling_that_counts():
    assert "aio.thread_count" not in GOLDEN
    with pytest.warns(FutureWarning, match="'intra_op_parallelism'"):
        assert TrainingConfig.of({"aio": {"thread_count": 4}})["aio.intra_op_parallelism"] == 4


def test_adam_is_adamw_unless_told_otherwise():
    assert "adamw(lr=0.1" in transforms(ADAM)
    l2 = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}}
    assert "adam(lr=0.1" in transforms(l2)


def test_the_first_loss_scale_is_65536():
    data = {"train_batch_size": 4, "fp16": {"enabled": True}, "optimizer": {"type": "SGD"}}
    step = fds.compose(*TrainingConfig.of(data).transforms(fds.mesh(dp=1)))(lambda params, batch: params["w"].sum())
    _, metrics = step(step.init({"w": torch.ones(1)}), torch.zeros(4))
    assert float(metrics["loss_scale"]) == 2**16
