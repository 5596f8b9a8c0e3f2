"""A value that DeepSpeed 0.19.6 refuses is refused here, and one that it takes is taken, but for what is listed.

Of the keys that its pydantic models declare several values are compared, of all others null: what reads those checks
little else. Recorded by tests/golden/config_values.py.
"""

import json
import re
from pathlib import Path

import pytest

from fds.config import TrainingConfig
from fds.config.field import flat_keys
from fds.config.record import Config, record_of
from fds.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/config_values.json").read_text())
TAKEN = {path: [json.dumps(value) for value in taken] for path, taken in GOLDEN["keys"].items()}
GROUPS = tuple(f"{group}." for group in GOLDEN["declared"])
FREE = ("tensor_parallel.partition_config.", "zero_optimization.zeropp_loco_param.")  # any object, to those models
STRICT = {"0", "1", "true"}  # pydantic takes 0 and 1 for a truth value, and true for a number
NARROWER = {  # it takes numbers without meaning: negative sizes and counts, and any word for a mode
    "comet.mode",
    "comet.samples_log_interval",
    "compile.free_activation_threshold",
    "fp16.hysteresis",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
    "hybrid_engine.inference_tp_size",
    "hybrid_engine.max_out_tokens",
    "hybrid_engine.tp_gather_partition_size",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_grain_size",
    "tensor_parallel.tp.tp_size",
    "weight_quantization.num_bits",
    "weight_quantization.q_groups",
}
WIDER = {  # it refuses true without another key, and an old spelling by its new name, as fds does
    "bf16.bf16_optimizer_states",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
}
ELSEWHERE = (  # null for what is needed only where its group is switched on, and for one side of the batch
    "curriculum_learning.",
    "data_efficiency.",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "bfloat16",
)


def takes(path: str, value: object) -> bool:
    """Return whether the group of a key takes this value for it, whatever else it lacks."""
    cls: type[Config] = TrainingConfig
    first, *names = ["a" if name == "*" else name for name in re.sub(r"\[\w+\]", "", path).split(".")]
    if names:
        cls = record_of(flat_keys(TrainingConfig)[first][0]) or cls
    else:
        names = [first]
    data = value
    for name in reversed(names):
        data = {name: data}
    where = ".".join(names)
    try:
        cls.from_dict({"stage": 3, **data} if first == "zero_optimization" and cls is not TrainingConfig else data)
    except ConfigError as error:
        return not any(one == where or one.startswith(f"{where}.") for one in error.where.split(", "))
    return True


@pytest.mark.filterwarnings("ignore:.*old spelling:FutureWarning")
def test_values_of_declared_keys_are_taken_and_refused_as_by_deepspeed():
    declared = [path for path in TAKEN if path.startswith(GROUPS) and not path.startswith(FREE) and path not in WIDER]
    wrong = {}
    for path in declared:
        taken = {json.dumps(value) for value in GOLDEN["values"] if takes(path, value)}
        more, less = taken - {*TAKEN[path]}, {*TAKEN[path]} - taken - STRICT
        if more or (less and path not in NARROWER):
            wrong[path] = more, less
    assert not wrong
    assert len(declared) > 150


def test_null_is_refused_where_deepspeed_refuses_it_and_groups_may_be_null_where_it_takes_them():
    others = [path for path in TAKEN if not path.startswith((*GROUPS, *ELSEWHERE))]
    wider = {path for path in others if not TAKEN[path] and takes(path, None)}
    groups = {path for path in others if "." not in path and record_of(flat_keys(TrainingConfig).get(path, [None])[0])}
    narrower = {path for path in groups if TAKEN[path] and not takes(path, None)}
    assert (wider, narrower) == (set(), set())
    assert len(others) > 250 and len(groups) > 20


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": None}}, "torch_autocast.dtype"),
        ({"optimizer": None}, "optimizer"),
        ({"csv_monitor": {"output_path": None}}, "csv_monitor.output_path"),
    ],
)
def test_a_refused_null_says_to_leave_the_key_out(data, path):
    with pytest.raises(ConfigError) as refused:
        TrainingConfig.of(data)
    assert refused.value.where == path and refused.value.hint == "or leave the key out"
    assert "null" not in refused.value.want


def test_a_group_that_is_null_is_as_if_it_were_absent():
    data = {"train_batch_size": 8, "aio": None, "bf16": None, "optimizer": {"type": "AdamW", "params": None}}
    assert TrainingConfig.of(data) == TrainingConfig.of({"train_batch_size": 8, "optimizer": {"type": "AdamW"}})
