"""Every example of the reference's configuration page, by section: parsed, explained, and run for a step or refused.

The copy of the page has lost lines, brackets and whole examples; each stands here whole.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fds
from fds.config import TrainingConfig
from fds.errors import ConfigError, NotSupportedError
from tests.golden.compressed_modules import MODELS, filled

LOSS = fds.Layers([nn.Linear(4, 8), *[torch.tanh] * 22, nn.Linear(8, 3)], nn.MSELoss())  # layers 1 to 22 keep tokens


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return the example of ZeRO's section as far as a stage has its keys."""
    always = {
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "sub_group_size": 1e12,
        "elastic_checkpoint": False,
        "ignore_unused_parameters": True,
        "round_robin_gradients": False,
    }
    third = {
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e6,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    }
    return {"zero_optimization": {"stage": stage, **always, **(third if stage == 3 else {}), **more}}


def compressed(kind: str, shared: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "compression_training": {kind: {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}}
    }


def group(params: dict[str, Any], modules: list[str], related: list[list[str]] | None = None) -> dict[str, Any]:
    return {"params": params, "modules": modules} | ({} if related is None else {"related_modules": related})


CURRICULUM = {
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 1024,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 40000, "difficulty_step": 8},
}
LTD = {
    "enabled": True,
    "total_layer_num": 24,
    "random_ltd_layer_num": 22,
    "random_ltd_layer_id": list(range(1, 23)),
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "seq_batch_dim",
    "random_ltd_schedule": {
        "min_value": 128,
        "max_value": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
    },
}
RARITY = {
    "index_to_sample_path": "/path/to/index_to_sample",
    "index_to_metric_path": "/path/to/index_to_metric",
    "difficulty_type": "percentile",
    "clustering_type": "schedule_based",
    "min_difficulty": 1,
    "max_difficulty": 100,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 1, "root_degree": 2},
}
SAMPLING = {
    "enabled": True,
    "num_epochs": 1,
    "num_workers": 0,
    "curriculum_learning": {
        "enabled": True,
        "data_cluster_path": "/path/to/data_clusters",
        "curriculum_metrics": {"vocabularyrarity": RARITY},
    },
}
OFFLOADED = {"nvme_path": "/local_nvme", "pin_memory": True}  # another folder where a step is run
TUNING = {
    "results_dir": "autotuning_results",
    "exps_dir": "autotuning_exps",
    "overwrite": False,
    "metric": "throughput",
    "start_profile_step": 3,
    "end_profile_step": 5,
    "fast": True,
    "max_train_batch_size": None,
    "mp_size": 1,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "arg_mappings": None,
}
SPARSE = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
}
OPS = {"verbose": False, "prof_all": True, "debug": False}
COMET = {
    "workspace": "my_workspace",
    "project": "my_project",
    "samples_log_interval": 50,
    "experiment_name": "llama-fine-tuning",
    "experiment_key": "0c4a1c4a90664f2a8084e600b19a9d7",
    "online": False,
    "mode": "get",
}
HALF = {"dense_ratio": 0.5}
METHOD = {"schedule_offset": 20, "method": "topk"}

EXAMPLES: dict[str, tuple[dict[str, Any], list[str]]] = {  # section -> (the example, the keys that are not there yet)
    "batch sizes": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
        [],
    ),
    "optimizer, Adam": (optimizer("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7), []),
    "optimizer, 1-bit Adam": (
        optimizer(
            "OneBitAdam",
            lr=0.001,
            betas=[0.8, 0.999],
            eps=1e-8,
            weight_decay=3e-7,
            freeze_step=400,
            cuda_aware=False,
            comm_backend_name="nccl",
        ),
        [],
    ),
    "optimizer, 0/1 Adam": (
        optimizer(
            "ZeroOneAdam",
            lr=1e-3,
            weight_decay=0.01,
            bias_correction=False,
            var_freeze_step=1000,
            var_update_scaler=16,
            local_step_scaler=1000,
            local_step_clipper=16,
            cuda_aware=False,
            comm_backend_name="nccl",
        ),
        [],
    ),
    "optimizer, 1-bit LAMB": (
        optimizer(
            "OneBitLamb",
            lr=11e-3,
            weight_decay=0.01,
            bias_correction=False,
            max_coeff=0.3,
            min_coeff=0.01,
            freeze_step=1000,
            cuda_aware=False,
            comm_backend_name="nccl",
            coeff_beta=0.9,
            factor_max=4.0,
            factor_min=0.5,
            factor_threshold=0.1,
        ),
        [],
    ),
    "scheduler": (
        optimizer("AdamW")
        | {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            }
        },
        [],
    ),
    "communication options": (
        {
            "communication_data_type": "fp16",
            "prescale_gradients": False,
            "gradient_predivide_factor": 1.0,
            "sparse_gradients": False,
        },
        [],
    ),
    "fp16": (
        {
            "fp16": {
                "enabled": True,
                "auto_cast": False,
                "loss_scale": 0,
                "initial_scale_power": 16,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            }
        },
        [],
    ),
    "bf16": ({"bf16": {"enabled": True}}, []),
    "amp": ({"amp": {"enabled": True, "opt_level": "O1"}}, []),
    "gradient clipping": ({"gradient_clipping": 1.0}, []),
    "ZeRO, stage 0": (zero(0), []),
    "ZeRO, stage 1": (zero(1), []),
    "ZeRO, stage 2": (zero(2), []),
    "ZeRO, stage 3": (zero(3), []),
    "ZeRO, stage 3, otherwise": (
        zero(
            3,
            ignore_unused_parameters=False,
            zero_hpz_partition_size=8,
            zero_quantized_weights=True,
            zero_quantized_gradients=True,
        ),
        ["zero_optimization.ignore_unused_parameters"],
    ),
    "parameter offloading, cpu": (
        zero(3, offload_param={"device": "cpu", **OFFLOADED, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}),
        [],
    ),
    "parameter offloading, nvme": (
        zero(
            3, offload_param={"device": "nvme", **OFFLOADED, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
        ),
        [],
    ),
    "optimizer offloading, cpu": (
        zero(3, offload_optimizer={"device": "cpu", **OFFLOADED, "ratio": 0.3, "buffer_count": 4, "fast_init": False}),
        [],
    ),
    "optimizer offloading, nvme": (
        zero(3, offload_optimizer={"device": "nvme", **OFFLOADED, "ratio": 0.3, "buffer_count": 4, "fast_init": False}),
        [],
    ),
    "asynchronous I/O": (
        {
            "aio": {
                "block_size": 1048576,
                "queue_depth": 8,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            }
        },
        [],
    ),
    "logging": ({"steps_per_print": 10, "wall_clock_breakdown": False, "dump_state": False}, []),
    "autotuning": ({"autotuning": {"enabled": False, **TUNING}}, []),
    "autotuning, on": ({"autotuning": {"enabled": True, **TUNING}}, []),
    "flops profiler": (
        {
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
                "output_file": None,
            }
        },
        [],
    ),
    "activation checkpointing": (
        {
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            }
        },
        [],
    ),
    "sparse attention": ({"sparse_attention": SPARSE}, []),
    "data efficiency": (
        {
            "data_efficiency": {
                "enabled": True,
                "seed": 1234,
                "data_routing": {"enabled": True, "random_ltd": LTD},
                "data_sampling": SAMPLING,
            }
        },
        [],
    ),
    "curriculum learning": ({"curriculum_learning": {"enabled": True, **CURRICULUM}}, []),
    "TensorBoard": ({"tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}}, []),
    "WandB": ({"wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"}}, []),
    "Comet": ({"comet": {"enabled": True, **COMET}}, []),
    "CSV": ({"csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}}, []),
    "elastic training": (
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 2000,
                "micro_batch_sizes": [2, 4, 6],
                "min_gpus": 1,
                "max_gpus": 10000,
                "min_time": 20,
                "prefer_large_batch": True,
                "version": 0.1,
                "ignore_non_elastic_batch_info": True,
                "num_gpus_per_node": 1,
                "model_parallel_size": 1,
            }
        },
        [],
    ),
    "communication logging": ({"comms_logger": {"enabled": True, **OPS}}, []),
    "communication logging, some operations": (
        {"comms_logger": {"enabled": True, **OPS, "prof_all": False, "prof_ops": ["all_reduce", "all_gather"]}},
        [],
    ),
    "layer reduction": (
        {
            "compression_training": {
                "layer_reduction": {
                    "enabled": True,
                    "keep_number_layer": 5,
                    "module_name_prefix": "bert.encoder.layer",
                    "teacher_layer": [2, 4, 6, 8, 10],
                    "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
                }
            }
        },
        [],
    ),
    "weight quantization": (
        compressed(
            "weight_quantization",
            {
                "quantizer_kernel": False,
                "schedule_offset": 50,
                "quantize_groups": 1,
                "quantize_verbose": False,
                "quantization_type": "symmetric",
                "rounding": "nearest",
                "quantize_weight_in_forward": False,
                "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
            },
            {
                "wq1": group(
                    {"start_bits": 8, "target_bits": 8, "quantization_period": 50}, ["attention.self", "intermediate"]
                ),
                "wq2": group({"start_bits": 4, "target_bits": 4, "quantization_period": 50}, ["attention.output"]),
            },
        ),
        [],
    ),
    "activation quantization": (
        compressed(
            "activation_quantization",
            {"quantization_type": "asymmetric", "range_calibration": "dynamic", "schedule_offset": 50},
            {"aq1": group({"bits": 8}, ["attention.output"])},
        ),
        [],
    ),
    "sparse pruning": (
        compressed(
            "sparse_pruning",
            {
                "schedule_offset": 30,
                "schedule_offset_end": 90,
                "schedule_offset_stride": 15,
                "method": "snip_momentum",
                "block_pattern": "4x1",
                "dense_ratio": 0.4,
                "excluded_modules": ["classifier", "pooler"],
            },
            {},
        ),
        [],
    ),
    "row pruning": (
        compressed("row_pruning", METHOD, {"rp1": group(HALF, ["intermediate.dense"], [["layer.\\w+.output.dense"]])}),
        [],
    ),
    "head pruning": (
        compressed(
            "head_pruning",
            {**METHOD, "schedule_offset": 10, "num_heads": 12},
            {"rp1": group(HALF, ["attention.output.dense"], [["self.query", "self.key", "self.value"]])},
        ),
        [],
    ),
    "channel pruning": (
        compressed(
            "channel_pruning",
            {**METHOD, "schedule_offset": 0},
            {"cp1": group(HALF, ["layer....conv1"], [["layer....conv2", "layer....bn1"]])},
        ),
        [],
    ),
    "checkpoint options": (
        {
            "checkpoint": {
                "tag_validation": "Warn",
                "load_universal": False,
                "use_node_local_storage": False,
                "parallel_write": {"pipeline_stage": False},
            }
        },
        [],
    ),
    "data types": ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, []),
    "0.3.0: BatchConfig": ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, []),
    "0.3.0: FP16Config": ({"fp16": {"enabled": True}}, []),
}
OLD = {"thread_count": "intra_op_parallelism", "prefer_large_batch": "prefer_larger_batch"}  # the page -> 0.19.6
OF_MODULES = {  # which the model must have
    *("weight quantization", "activation quantization", "sparse pruning", "row pruning", "head pruning"),
    "channel pruning",
}
RUN = [name for name, (_, keys) in EXAMPLES.items() if not keys and name not in OF_MODULES]


def parsed(name: str, nvme: Path = Path("/local_nvme")) -> TrainingConfig:
    text = json.dumps({"train_batch_size": 8, **EXAMPLES[name][0]}).replace("/local_nvme", str(nvme))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return TrainingConfig.of(json.loads(text))


def rows(n: int, rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_parsed_and_gives_its_json_back(name):
    text = json.dumps({"train_batch_size": 8, **EXAMPLES[name][0]})
    for old, new in OLD.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    assert json.loads(json.dumps(parsed(name).to_dict())) == json.loads(text)


@pytest.mark.parametrize("name", RUN)
def test_an_example_is_explained_by_its_composition_and_a_step_of_it_runs(name, tmp_path):
    config = parsed(name, tmp_path)
    text = config.explain({"dp": 2})
    own = () if config.optimizer else (fds.adamw(1e-3),)
    source = text.replace("\n)(loss_fn)\n", "\n    *own,\n)(loss_fn)\n")

    def run() -> float:
        mesh = fds.mesh(dp=2)
        names: dict[str, Any] = {"loss_fn": LOSS, "own": own}
        exec(source, names)
        loss = fds.Layers([lambda x: x[0], *LOSS.layers], nn.MSELoss()) if name == "curriculum learning" else LOSS
        step = fds.compose(*config.transforms(mesh), *own)(loss)
        assert repr(step.composition) == repr(names["step"].composition)
        batch = config.resolve(world_size=2)["train_batch_size"] // 2
        x, y = rows(batch, mesh["dp"].index)
        x = x if loss is LOSS else [x, torch.ones(batch, 16, dtype=torch.long)]  # tokens, which a curriculum cuts
        state, metrics = step(step.init(loss.init), (x, y))
        assert int(state.calls) == 1
        return float(metrics["loss"])

    first, second = fds.simulate(run, 2)
    assert first == second and math.isfinite(first) and first > 0


@pytest.mark.filterwarnings("ignore::fds.errors.LossWarning")  # of a residual network in eval mode
@pytest.mark.parametrize("name", sorted(OF_MODULES))
def test_an_example_of_modules_is_composed_for_a_model_that_has_them_and_a_step_of_it_runs(name):
    make, given = MODELS["ResNet" if name == "channel pruning" else "Bert"]
    config = parsed(name)
    half = TrainingConfig.of(config.to_dict() | {"fp16": {"enabled": True, "initial_scale_power": 4}})
    model = half.with_scores(filled(make()))
    apply, params, _ = fds.functional(model)
    transforms = half.transforms(fds.mesh(dp=1), model=model)
    step = fds.compose(*transforms, fds.adamw(1e-3))(lambda params, x: apply(params, x).float().square().mean())
    _, metrics = step(step.init(params), given)
    assert math.isfinite(float(metrics["loss"])) and not metrics["skipped"]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if EXAMPLES[name][1]])
def test_an_example_of_what_is_not_there_is_refused_by_its_keys(name):
    config, (_, refused) = parsed(name), EXAMPLES[name]
    with pytest.raises(NotSupportedError) as e:
        config.transforms(fds.mesh(dp=1))
    assert sorted(e.value.where.split(", ")) == sorted(refused)
    text = config.explain({"dp": 2})
    assert all(f"\n#   {key}: " in text for key in refused)


def test_the_clipping_of_fp16_in_0_3_0_is_refused_as_unknown():
    with pytest.raises(ConfigError, match="there is no such key") as e:
        TrainingConfig.of({"train_batch_size": 8, "fp16": {"enabled": True, "clip": 1.0}})
    assert e.value.where == "fp16.clip"
