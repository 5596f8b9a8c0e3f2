"""The five real configurations with `autotuning` that are to be found, each searched with a script of transformers.

Four are of microsoft/DeepSpeedExamples, one of Azure's example of pretraining BERT. Values are theirs; the script and
its model are ours, and the memory of a rank is small, so that the search tries few microbatches.
"""

import json
import warnings
from pathlib import Path

import pytest

from fds.command_line import main

pytestmark = pytest.mark.peers

SCRIPT = str(Path(__file__).parent / "train_clm.py")
OPTIONS = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps ": "--gradient_accumulation_steps",
}
AUTO = {"train_micro_batch_size_per_gpu": "auto"}
SECTION = {"enabled": True, "overwrite": False, "arg_mappings": OPTIONS}
FILES = {
    "autotuning/hf/dsconfigs/ds_config_tune.json": {**AUTO, "autotuning": {**SECTION, "fast": True}},
    "autotuning/hf/dsconfigs/ds_config_fp16_tune.json": {
        **AUTO,
        "fp16": {"enabled": True},
        "autotuning": {**SECTION, "fast": True},
    },
    "autotuning/hf/bert-base/ds_config_tune.json": {**AUTO, "autotuning": {**SECTION, "max_train_batch_size": 4096}},
    "BERT of Azure": {
        **AUTO,
        "autotuning": {
            "enabled": True,
            "fast": False,
            "arg_mappings": OPTIONS,
            "results_dir": "outputs/autotuning_results/results",
            "exps_dir": "outputs/autotuning_results/exps",
        },
    },
    "autotuning/ds_config.json": {
        "train_micro_batch_size_per_gpu": [8],
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
            "cpu_offload": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "autotuning": {
            "enabled": True,
            "start_step": 5,
            "end_step": 10,
            "num_nodes": 1,
            "num_gpus": [2, 4],
            "metric": "latency",
            "arg_mappings": {"train_micro_batch_size_per_gpu": "per_device_train_batch_size"},
        },
    },
}
NUM_PARAMS = 64 * 16 + 16 * 16 + (12 * 16**2 + 13 * 16) + 2 * 16


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_is_searched_with_a_script(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = FILES[name]
    Path("ds_config.json").write_text(json.dumps(config))
    half = ["--fp16"] if "fp16" in config else []
    memory = str(NUM_PARAMS * (20 if half else 16) + 60_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old spellings and unknown keys
        script = [SCRIPT, "--deepspeed", "ds_config.json", *half]
        assert main(["tune", "ds_config.json", "--memory", memory, "--unknown", "warn", *script]) == 0
    section = config["autotuning"]
    best = json.loads(Path(section.get("results_dir", "autotuning_results"), "ds_config_optimal.json").read_text())
    size = json.loads(Path(section.get("exps_dir", "autotuning_exps"), "model_info/found.json").read_text())
    out = capsys.readouterr().out
    assert size["num_params"] == NUM_PARAMS
    assert "autotuning" not in best and best["train_micro_batch_size_per_gpu"] >= 1
    stage = config.get("zero_optimization", {}).get("stage", 0)
    assert f"best: z{stage}_gas" in out and "does not run" not in out
