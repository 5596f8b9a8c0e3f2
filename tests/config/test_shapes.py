"""Configurations that people use: parsed, explained, composed, and one step run on two ranks; or refused by name."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import fds
from fds.config import TrainingConfig, training_arguments
from fds.config.reading import auto_paths
from fds.errors import ConfigError, NotSupportedError

SHAPES = {path.stem: path for path in sorted((Path(__file__).parent / "shapes").glob("*.json"))}
PIPELINES = {"alexnet_pipeline", "pipeline_3d"}  # two stages on two ranks
REFUSED = {  # shape -> the keys that ask for what is not there
    "autocast_zero1": ["torch_autocast.lower_precision_safe_modules"]
}
UNKNOWN = {  # shape -> (the first key that 0.19.6 drops in silence, one that is near)
    "llama_factory_zero2": ("comms_config", "comms_logger"),
    "moq": ("quantize_training.enabled", ""),
}
OLD = {  # old spelling -> new; values stay, but for `cpu_offload`, which is false in all of these
    "bfloat16": "bf16",
    "cpu_offload": "offload_optimizer",
    "thread_count": "intra_op_parallelism",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
LOSS = fds.Layers(  # two layers in a row are of one class, which may be skipped
    [nn.Linear(4, 8), torch.tanh, torch.tanh, nn.Linear(8, 8), torch.tanh, nn.Linear(8, 3)], nn.MSELoss()
)
OF_MODULES = {"bert_compression", "bing_bert_sparse"}  # whose model must have them: test_compressed_training.py
RUN = [name for name in SHAPES if name not in {*REFUSED, *UNKNOWN, *OF_MODULES}]


@attrs.frozen
class Arguments:
    """What transformers' `TrainingArguments` know of the keys that are `"auto"`."""

    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 2
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-7
    weight_decay: float = 0.01
    warmup_steps: int = 10
    max_steps: int = 100
    fp16: bool = False
    bf16: bool = True


ARGUMENTS = {  # those that do not contradict what a shape says itself
    "accelerate_zero1": Arguments(gradient_accumulation_steps=1, fp16=True, bf16=False),
    "accelerate_zero2_offload": Arguments(gradient_accumulation_steps=1, fp16=True, bf16=False),
    "accelerate_zero3_offload": Arguments(gradient_accumulation_steps=1, fp16=True, bf16=False),
    "hf_autotuning": Arguments(fp16=True, bf16=False),
    "openrlhf": Arguments(gradient_accumulation_steps=4),
}


def rows(n: int, mesh: Any, tokens: bool = False) -> tuple[Any, Tensor]:
    """Return n rows (n, 4) and targets (n, 3) of this data rank; the stages of a pipeline have the same.

    With tokens there are 16 a row too, of which a curriculum cuts the ends.
    """
    g = torch.Generator().manual_seed(mesh["dp"].index)
    x = torch.randn(n, 4, generator=g)
    return {"x": x, "tokens": torch.arange(16).repeat(n, 1)} if tokens else x, torch.randn(n, 3, generator=g)


def features(batch: dict[str, Tensor]) -> Tensor:
    assert batch["tokens"].shape[1] == 8
    return batch["x"]


def axes_of(name: str) -> list[dict[str, int]]:
    """Return the meshes of two ranks that fit a shape; on the last one a step is run."""
    return [{"dp": 2}, {"pp": 2, "dp": 1}] if name in PIPELINES else [{"dp": 2}]


def composition(text: str, own: tuple) -> str:
    """Return the composition of the program that `explain` prints, run here, with one's own optimizer as last line."""
    names: dict[str, Any] = {"loss_fn": LOSS, "own": own}
    exec(text.replace("\n)(loss_fn)\n", "\n    *own,\n)(loss_fn)\n") if own else text, names)
    return repr(fds.compose(*names["step"].composition))


def said(name: str) -> dict[str, Any]:
    return json.loads(SHAPES[name].read_text())


def spelled_anew(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {OLD.get(name, name): None if name == "cpu_offload" else spelled_anew(value) for name, value in data.items()}


def old_in(data: Any) -> list[str]:
    inner = [one for value in data.values() for one in old_in(value)] if isinstance(data, dict) else []
    return sorted([*(name for name in data if name in OLD), *inner]) if isinstance(data, dict) else []


def parsed(name: str, world_size: int = 2, disk: str = "/tmp/nvme") -> TrainingConfig:
    """Return a shape's record, its `"auto"` filled in as transformers would, and another directory for its disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config = TrainingConfig.of(json.loads(SHAPES[name].read_text().replace("/tmp/nvme", disk)))
    if not auto_paths(config.to_dict()):
        return config
    told = training_arguments(ARGUMENTS.get(name, Arguments()), hidden_size=8)
    return config.resolve(world_size=world_size, auto=told)


def test_there_are_enough_of_them_and_every_expectation_has_its_file():
    assert len(RUN) >= 22
    assert {*REFUSED, *UNKNOWN, *PIPELINES, *ARGUMENTS} <= set(SHAPES)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in UNKNOWN])
def test_a_shape_is_parsed_and_gives_its_json_back(name):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = TrainingConfig.of(SHAPES[name])
    assert all(w.category is FutureWarning for w in warned)
    messages = [str(w.message) for w in warned]
    assert sorted(messages) == sorted(f"{old!r} is an old spelling: write {OLD[old]!r}" for old in old_in(said(name)))
    back = json.loads(json.dumps(config.to_dict()))
    assert back == spelled_anew(said(name))
    assert TrainingConfig.of(back) == config and TrainingConfig.of(back).given == config.given
    assert TrainingConfig.of(config.to_dict(full=True)) == config


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_key_that_deepspeed_drops_in_silence_is_refused_with_the_nearest(name):
    key, near = UNKNOWN[name]
    with pytest.raises(ConfigError, match="there is no such key") as e:
        TrainingConfig.of(SHAPES[name])
    assert e.value.where == key and e.value.hint.startswith(f"did you mean {near!r}?" if near else "leave it out")


@pytest.mark.parametrize("name", RUN)
def test_what_explain_prints_is_the_composition(name):
    for axes in axes_of(name):
        config = parsed(name, axes["dp"])
        text = config.explain(axes)

        def both(config=config, axes=axes, text=text) -> tuple[str, str]:
            mesh = fds.mesh(**axes)
            own = () if config.optimizer else (fds.adamw(1e-3),)
            return repr(fds.compose(*config.transforms(mesh), *own)), composition(text, own)

        for composed, printed in fds.simulate(both, 2):
            assert printed == composed


@pytest.mark.parametrize("name", RUN)
def test_one_step_runs_on_two_ranks(name, tmp_path):
    axes = axes_of(name)[-1]
    config = parsed(name, axes["dp"], str(tmp_path))

    def run() -> float:
        mesh = fds.mesh(**axes)
        own = () if config.optimizer else (fds.adamw(1e-3),)
        shortens = name == "megatron_curriculum"
        loss = fds.Layers([features, *LOSS.layers], nn.MSELoss()) if shortens else LOSS
        step = fds.compose(*config.transforms(mesh), *own)(loss)
        batch = config.resolve(world_size=axes["dp"])["train_batch_size"]
        state, metrics = step(step.init(loss.init), rows(batch // axes["dp"], mesh, shortens))
        assert int(state.calls) == 1
        return float(metrics["loss"])

    first, second = fds.simulate(run, 2)
    assert math.isfinite(first) and first == second and first > 0


@pytest.mark.parametrize("name", [name for name in REFUSED if name in SHAPES])
def test_what_is_not_there_is_refused_by_all_of_its_keys(name):
    config = parsed(name)
    with pytest.raises(NotSupportedError) as e:
        config.transforms(fds.mesh(dp=1))
    assert e.value.where.split(", ") == REFUSED[name]
    _, _, below = config.explain({"dp": 2}).partition("# not supported yet")
    listed = itertools.takewhile(lambda line: line.startswith("#   "), below.splitlines()[1:])
    assert [line.split(":")[0].removeprefix("#   ") for line in listed] == REFUSED[name]
