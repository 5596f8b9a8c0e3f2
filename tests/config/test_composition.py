"""What each key becomes: the exact calls of a table of configurations, and a law for every key that is an argument."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.config.composition import axes_of, calls
from fds.config.field import Argument, keys
from fds.config.function_call import FUNCTIONS, AxisOf, FunctionCall
from fds.config.keys import optimizer
from fds.config.modules import Parts
from fds.config.record import Config, record_of
from fds.errors import ConfigError, MeshError, NotSupportedError

DP2, PP2, TP2, SP2 = {"dp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "sp": 2}
TENSOR: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
LAYERS, ROWS_OF = 'fds.tensor_parallel(mesh["tp"])', 'fds.shard_optimizer(mesh["dp", "sp"], stage={})'
CONTEXT = 'fds.context_parallel(mesh["sp"])'
PIPELINE = 'fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=1)'
PARTITION = 'fds.checkpoint_activations({}partition=mesh["tp"])'
CONTIGUOUS = {"contiguous_memory_optimization": True, "number_checkpoints": 4}
REPLICAS = {"replicate": 2, "dp": 2}
NODES = {"node": 2, "dp": 2}
ZEROPP: dict[str, Any] = {
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
BATCH: dict[str, Any] = {"train_batch_size": 8, "gradient_clipping": 0}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": params}}


def update(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def rate(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON with more keys; groups are merged."""
    out = dict(base)
    for name, value in more.items():
        out[name] = merged(out[name], value) if isinstance(value, dict) and name in out else value
    return out


def texts(said: dict[str, Any], axes: dict[str, int] = DP2) -> list[str]:
    """Return the calls of JSON, without an unsharded `shard_optimizer` that has nothing to say."""
    made = map(str, calls(TrainingConfig.of(merged(BATCH, said)), axes))
    return [text for text in made if text != 'fds.shard_optimizer(mesh["dp"], stage=0)']


FP16, BF16, AMP = ({name: {"enabled": True}} for name in ("fp16", "bf16", "amp"))
HALF = "fds.precision(torch.float16, accumulate=torch.float16)"
GRAD_SCALER = "fds.loss_scale(window=2000, hysteresis=1)"
BRAIN = "fds.precision(torch.bfloat16, accumulate=torch.bfloat16)"
HOST: dict[str, Any] = {"device": "cpu"}
NVME: dict[str, Any] = {"device": "nvme", "nvme_path": "/local_nvme"}
FINITE = "fds.skip_nonfinite()"
OVERLAP = merged(TENSOR, {"tensor_parallel": {"tp_overlap_comm": True}})
LATE = "fds.schedules.delayed(fds.schedules."
STAGE_3 = 'fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001)'
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4}
ROWS: list[tuple[dict[str, Any], dict[str, int], list[str]]] = [
    # batch and pipeline
    ({}, DP2, []),
    ({"train_micro_batch_size_per_gpu": 2}, DP2, ["fds.accumulate(2)"]),
    ({"gradient_accumulation_steps": 4}, DP2, ["fds.accumulate(4)"]),
    (
        {"train_micro_batch_size_per_gpu": 2},
        REPLICAS,
        ['fds.shard_optimizer(mesh["dp"], stage=0, replicate=mesh["replicate"])'],
    ),
    ({}, PP2, ['fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=1)']),
    (
        {"gradient_accumulation_steps": 4, "pipeline": {"partition": "uniform"}},
        PP2,
        ["fds.pipeline(fds.plans.one_f_one_b, mesh[\"pp\"], num_microbatches=4, partition='uniform')"],
    ),
    (
        {"pipeline": {"partition": "type:Linear"}},
        PP2,
        ["fds.pipeline(fds.plans.one_f_one_b, mesh[\"pp\"], num_microbatches=1, partition='type:Linear')"],
    ),
    (
        {"pipeline": {"partition": "parameters"}},
        PP2,
        ['fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=1)'],
    ),
    ({"pipeline": {"partition": "uniform"}}, {"pp": 1, "dp": 2}, []),
    # ranks that share layers, and those that share rows, over which ZeRO slices too
    (TENSOR, TP2, [LAYERS]),
    (OVERLAP, TP2, ['fds.tensor_parallel(mesh["tp"], overlap=1)']),
    ({"tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": True, "partition_config": {}}}, TP2, []),
    ({"tensor_parallel": {"autotp_size": 2, "preset_model": "llama", "tp": {"tp_size": 2}}}, TP2, [LAYERS]),
    ({"train_micro_batch_size_per_gpu": 2} | TENSOR, TP2, ["fds.accumulate(2)", LAYERS]),
    ({"train_micro_batch_size_per_gpu": 2}, SP2, ["fds.accumulate(2)", ROWS_OF.format(0), CONTEXT]),
    ({"sequence_parallel_size": 2}, SP2, [ROWS_OF.format(0), CONTEXT]),
    (zero(2, mics_shard_size=4) | TENSOR, SP2 | TP2, [ROWS_OF.format(2), CONTEXT, LAYERS]),
    (zero(0) | {"prescale_gradients": True}, SP2, [ROWS_OF.format("0, predivide=4.0"), CONTEXT]),
    (  # gradients in the dtype of the key for sequences, not in the one of the other
        zero(1) | BF16 | {"communication_data_type": "fp16"},
        SP2,
        [ROWS_OF.replace(", stage={}", ""), CONTEXT, BRAIN.replace("16, ", "16, reduce=torch.float32, "), FINITE],
    ),
    (
        zero(3, mics_shard_size=4, stage3_param_persistence_threshold=0),
        SP2,
        [ROWS_OF.format("3, persist_below=1"), CONTEXT],
    ),
    (
        zero(3, zero_hpz_partition_size=4, stage3_param_persistence_threshold=0),
        NODES | SP2,
        [
            'fds.shard_optimizer(mesh["node", "dp", "sp"], stage=3, persist_below=1, secondary=mesh["dp", "sp"])',
            CONTEXT,
        ],
    ),
    # recomputation
    ({"pipeline": {"activation_checkpoint_interval": 1}}, DP2, ["fds.checkpoint_activations()"]),
    ({"pipeline": {"activation_checkpoint_interval": 3}}, DP2, ["fds.checkpoint_activations(every=3)"]),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, DP2, ["fds.checkpoint_activations(store='host')"]),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}, "pipeline": {"activation_checkpoint_interval": 2}},
        DP2,
        ["fds.checkpoint_activations(store='host', every=2)"],
    ),
    # over the tensor axis, where there is one; a buffer alone has no layer computed again
    ({"activation_checkpointing": {"partition_activations": True}}, TP2, [PARTITION.format("")]),
    ({"activation_checkpointing": {"partition_activations": True}}, DP2, []),
    (
        {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
        TP2 | {"pp": 2},
        [PIPELINE, PARTITION.format("store='host', ")],
    ),
    ({"activation_checkpointing": CONTIGUOUS}, TP2, []),
    (
        {"activation_checkpointing": CONTIGUOUS, "pipeline": {"activation_checkpoint_interval": 1}},
        DP2,
        ["fds.checkpoint_activations(contiguous=True, number=4)"],
    ),
    (
        {
            "activation_checkpointing": {"number_checkpoints": 4, "profile": True},
            "pipeline": {"activation_checkpoint_interval": 1},
        },
        DP2,
        ["fds.checkpoint_activations()"],
    ),
    (
        {
            "activation_checkpointing": CONTIGUOUS | {"number_checkpoints": 0},
            "pipeline": {"activation_checkpoint_interval": 1},
        },
        DP2,
        ["fds.checkpoint_activations(contiguous=True)"],
    ),
    # sharding: the sizes of messages are elements of 4 bytes, those that stay whole have the step's
    (zero(1), DP2, ['fds.shard_optimizer(mesh["dp"])']),
    (zero(2), DP2, ['fds.shard_optimizer(mesh["dp"], stage=2)']),
    (zero(2, reduce_bucket_size=1000), DP2, ['fds.shard_optimizer(mesh["dp"], stage=2, bucket_bytes=4000)']),
    (
        zero(1, reduce_bucket_size=1000, allgather_bucket_size=600),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], bucket_bytes=2400)'],
    ),
    (zero(1, allgather_bucket_size=0), DP2, ['fds.shard_optimizer(mesh["dp"])']),
    (zero(0, reduce_bucket_size=1000), DP2, []),
    (zero(3), DP2, ['fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001)']),
    (zero(3, stage3_param_persistence_threshold=0), DP2, ['fds.shard_optimizer(mesh["dp"], stage=3, persist_below=1)']),
    (
        zero(3, reduce_bucket_size=1000, stage3_prefetch_bucket_size=2001),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=4000, prefetch=3, persist_below=100001)'],
    ),
    (
        zero(3, stage3_prefetch_bucket_size=0),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, prefetch=0, persist_below=100001)'],
    ),
    (
        zero(3, stage3_prefetch_bucket_size=2**23),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001)'],
    ),
    (
        zero(3, stage3_max_live_parameters=10**8),
        DP2,
        [  # has room for three buckets as they are
            'fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001)'
        ],
    ),
    (zero(3, stage3_max_live_parameters=0), DP2, ['fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001)']),
    (
        zero(3, stage3_max_live_parameters=3000, stage3_prefetch_bucket_size=0),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=4000, prefetch=0, persist_below=100001)'],
    ),
    (
        zero(3, stage3_max_live_parameters=3000, reduce_bucket_size=900, stage3_prefetch_bucket_size=9000),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=3600, persist_below=100001)'],
    ),
    (
        zero(3, stage3_max_live_parameters=3000) | BF16,
        DP2,
        [
            'fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=4000, persist_below=100001)',
            BRAIN,
            "fds.skip_nonfinite()",
        ],
    ),
    (zero(1), REPLICAS, ['fds.shard_optimizer(mesh["dp"], replicate=mesh["replicate"])']),
    (
        zero(3, mics_shard_size=2),
        REPLICAS,
        ['fds.shard_optimizer(mesh["dp"], stage=3, replicate=mesh["replicate"], persist_below=100001)'],
    ),
    # ZeRO++: in two hops where there are nodes, and at stage 3 alone, as in 0.19.6
    (
        zero(3, zero_quantized_weights=True),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001, weights=fds.transports.quantized(8))'],
    ),
    (
        zero(3, zero_quantized_gradients=True, zero_hpz_partition_size=8),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=3, persist_below=100001, gradients=fds.transports.quantized(4))'],
    ),
    (zero(3, zero_hpz_partition_size=0), DP2, [STAGE_3]),
    (zero(3, zero_quantized_nontrainable_weights=True), DP2, [STAGE_3, "fds.quantize_frozen()"]),
    (zero(2, zero_quantized_nontrainable_weights=True), DP2, ['fds.shard_optimizer(mesh["dp"], stage=2)']),
    (zero(2, **ZEROPP), DP2, ['fds.shard_optimizer(mesh["dp"], stage=2)']),
    (zero(2, **ZEROPP), NODES, ['fds.shard_optimizer(mesh["node", "dp"], stage=2)']),
    (
        zero(3, **ZEROPP),
        NODES | {"replicate": 2},
        [
            'fds.shard_optimizer(mesh["node", "dp"], stage=3, replicate=mesh["replicate"], persist_below=100001, '
            "weights=fds.transports.hierarchical(fds.transports.quantized(8)), "
            'gradients=fds.transports.hierarchical(fds.transports.quantized(4)), secondary=mesh["dp"])'
        ],
    ),
    # what lives elsewhere: masters too where the loss computes in 16 bit, and where `offload_param` says so
    (
        zero(2, offload_optimizer=HOST),
        DP2,
        ['fds.shard_optimizer(mesh["dp"], stage=2)', "fds.offload(moments='host', gradients='host')"],
    ),
    (
        BF16 | zero(1, offload_optimizer=HOST),
        DP2,
        [
            'fds.shard_optimizer(mesh["dp"])',
            BRAIN,
            "fds.offload(moments='host', masters='host', gradients='host')",
            "fds.skip_nonfinite()",
        ],
    ),
    (zero(3, offload_param=HOST), DP2, [STAGE_3, "fds.offload(masters='host')"]),
    (
        zero(3, offload_optimizer=NVME, offload_param=HOST),
        DP2,
        [STAGE_3, "fds.offload(moments=fds.disk('/local_nvme'), masters='host', gradients=fds.disk('/local_nvme'))"],
    ),
    (
        BF16 | zero(3, offload_optimizer=HOST | {"ratio": 0.3}, offload_param=NVME),
        DP2,
        [
            STAGE_3,
            BRAIN,
            "fds.offload(moments='host', masters=fds.disk('/local_nvme'), gradients='host', ratio=0.3)",
            "fds.skip_nonfinite()",
        ],
    ),
    # sizes of disks become smaller, never larger
    (zero(3, offload_param=NVME, sub_group_size=10**9), DP2, [STAGE_3, "fds.offload(masters=fds.disk('/local_nvme'))"]),
    (
        zero(3, offload_param=NVME | {"buffer_size": 10**7}, sub_group_size=2**19)
        | {"aio": {"queue_depth": 4, "intra_op_parallelism": 2}},
        DP2,
        [STAGE_3, "fds.offload(masters=fds.disk('/local_nvme', buffer_bytes=8388608))"],
    ),
    (
        zero(3, offload_param=NVME | {"buffer_size": 0}, sub_group_size=1) | {"aio": {"queue_depth": 32}},
        DP2,
        [STAGE_3, "fds.offload(masters=fds.disk('/local_nvme', buffer_bytes=1048576, queue_depth=32))"],
    ),
    # gradients on their way
    ({"gradient_predivide_factor": 4.0}, DP2, ['fds.shard_optimizer(mesh["dp"], stage=0, predivide=4.0)']),
    ({"prescale_gradients": True}, DP2, ['fds.shard_optimizer(mesh["dp"], stage=0, predivide=2.0)']),
    (
        {"prescale_gradients": True, "gradient_predivide_factor": 8},
        REPLICAS,
        ['fds.shard_optimizer(mesh["dp"], stage=0, replicate=mesh["replicate"], predivide=4.0)'],
    ),
    ({"communication_data_type": "fp16"}, DP2, ["fds.precision(torch.float32, reduce=torch.float16)"]),
    ({"communication_data_type": "fp32"}, DP2, []),
    ({"gradient_clipping": 0.5}, DP2, ["fds.clip_by_global_norm(0.5)"]),
    # what is measured
    ({"flops_profiler": {"enabled": True}}, DP2, ["fds.profiled(1)"]),
    ({"flops_profiler": {"module_depth": 1}}, DP2, []),
    # precision
    (BF16, DP2, [BRAIN, "fds.skip_nonfinite()"]),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}}, DP2, [BRAIN]),
    (
        BF16 | {"communication_data_type": "fp32"},
        DP2,
        ["fds.precision(torch.bfloat16, reduce=torch.float32, accumulate=torch.bfloat16)", "fds.skip_nonfinite()"],
    ),
    (
        BF16 | {"data_types": {"grad_accum_dtype": "fp32"}},
        DP2,
        ["fds.precision(torch.bfloat16, reduce=torch.bfloat16)", "fds.skip_nonfinite()"],
    ),
    (
        BF16 | {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
        DP2,
        ["fds.precision(torch.bfloat16)", "fds.skip_nonfinite()"],
    ),
    (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        DP2,
        ["fds.precision(torch.float32, reduce=torch.float32, accumulate=torch.bfloat16)"],
    ),
    ({"data_types": {"param_dtype": "bf16"}} | BF16, DP2, [BRAIN, "fds.skip_nonfinite()"]),
    (FP16, DP2, [HALF, "fds.loss_scale()"]),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, DP2, [HALF, "fds.static_loss_scale(128.0)"]),
    (
        {
            "fp16": {
                "enabled": True,
                "initial_scale_power": 8,
                "loss_scale_window": 7,
                "hysteresis": 3,
                "consecutive_hysteresis": True,
                "min_loss_scale": 2,
            }
        },
        DP2,
        [HALF, "fds.loss_scale(initial=256.0, window=7, hysteresis=3, consecutive_hysteresis=True, minimum=2)"],
    ),
    ({"fp16": {"enabled": False, "loss_scale": 128}}, DP2, []),
    (AMP, DP2, ["fds.autocast(torch.float16)", GRAD_SCALER]),
    (
        {"amp": {"enabled": True, "loss_scale": "dynamic", "min_loss_scale": 2.0}},
        DP2,
        ["fds.autocast(torch.float16)", "fds.loss_scale(window=2000, hysteresis=1, minimum=2.0)"],
    ),
    ({"amp": {"enabled": True, "loss_scale": 64}}, DP2, ["fds.autocast(torch.float16)", "fds.static_loss_scale(64.0)"]),
    ({"torch_autocast": {"enabled": True}}, DP2, ["fds.autocast(torch.bfloat16)"]),
    ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, DP2, ["fds.autocast(torch.float16)", GRAD_SCALER]),
    # optimizers: Adam is AdamW, and decays nothing unless told
    (adam(), DP2, ["fds.adamw(0.001, weight_decay=0.0)"]),
    (update("AdamW", lr=3e-4, weight_decay=0.01), DP2, ["fds.adamw(0.0003)"]),
    (
        update("adamw", betas=[0.8, 0.99], eps=1e-6, bias_correction=False, weight_decay=0.1),
        DP2,
        ["fds.adamw(0.001, betas=(0.8, 0.99), eps=1e-06, bias_correction=False, weight_decay=0.1)"],
    ),
    (adam(torch_adam=True), DP2, ["fds.adamw(0.001)"]),
    (adam(torch_adam=True, weight_decay=0.0), DP2, ["fds.adamw(0.001, weight_decay=0.0)"]),
    (adam(adam_w_mode=False), DP2, ["fds.adam(0.001)"]),
    (adam(adam_w_mode=False, torch_adam=True), DP2, ["fds.adam(0.001)"]),
    (adam(adam_w_mode=False, weight_decay=0.1), DP2, ["fds.adam(0.001, weight_decay=0.1)"]),
    (update("AdamW", adam_w_mode=False, weight_decay=0.1), DP2, ["fds.adamw(0.001, weight_decay=0.1)"]),
    (update("Lamb"), DP2, ["fds.lamb(0.001)"]),
    (
        update(
            "Lamb",
            betas=[0.8, 0.99],
            eps=1e-6,
            weight_decay=0.1,
            min_coeff=0.1,
            max_coeff=3.0,
            bias_correction=False,
            eps_inside_sqrt=True,
        ),
        DP2,
        [
            "fds.lamb(0.001, betas=(0.8, 0.99), eps=1e-06, weight_decay=0.1, min_coeff=0.1, max_coeff=3.0, "
            "bias_correction=False, eps_inside_sqrt=True)"
        ],
    ),
    (update("Lion", weight_decay=0.1), DP2, ["fds.lion(0.001, betas=(0.9, 0.999), weight_decay=0.1)"]),
    (
        update("Adagrad", lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3, eps=1e-6),
        DP2,
        ["fds.adagrad(0.01, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3, eps=1e-06)"],
    ),
    (
        update("SGD", momentum=0.9, dampening=0.1, weight_decay=0.2),
        DP2,
        ["fds.sgd(0.001, momentum=0.9, weight_decay=0.2, dampening=0.1)"],
    ),
    (update("SGD", momentum=0.9, nesterov=True), DP2, ["fds.sgd(0.001, momentum=0.9, nesterov=True)"]),
    # schedulers
    (adam(lr=0.02) | rate("WarmupLR"), DP2, [f"fds.adamw({LATE}warmup(0.02, kind='log')), weight_decay=0.0)"]),
    (
        update("SGD", lr=0.02)
        | rate("WarmupLR", warmup_max_lr=0.3, warmup_min_lr=0.1, warmup_num_steps=9, warmup_type="linear"),
        DP2,
        [f"fds.sgd({LATE}warmup(0.3, warmup_steps=9, start=0.1, kind='linear')))"],
    ),
    (
        update("SGD")
        | rate(
            "WarmupDecayLR",
            total_num_steps=50,
            warmup_max_lr=0.3,
            warmup_min_lr=0.1,
            warmup_num_steps=9,
            warmup_type="linear",
        ),
        DP2,
        [f"fds.sgd({LATE}warmup_decay(0.3, total_steps=50, warmup_steps=9, start=0.1, kind='linear')))"],
    ),
    (
        update("SGD", lr=0.3)
        | rate(
            "WarmupCosineLR",
            total_num_steps=50,
            warmup_min_ratio=0.1,
            cos_min_ratio=0.2,
            warmup_num_steps=9,
            warmup_type="linear",
        ),
        DP2,
        [
            f"fds.sgd({LATE}warmup_cosine(0.3, total_steps=50, warmup_steps=9, start_ratio=0.1, end_ratio=0.2, "
            "kind='linear')))"
        ],
    ),
    (
        update("SGD")
        | rate(
            "LRRangeTest",
            lr_range_test_min_lr=0.01,
            lr_range_test_step_size=20,
            lr_range_test_step_rate=5.0,
            lr_range_test_staircase=True,
        ),
        DP2,
        [f"fds.sgd({LATE}lr_range_test(0.01, steps=20, rate=5.0, staircase=True)))"],
    ),
    (
        update("SGD", momentum=0.9) | rate("OneCycle", **CYCLE),
        DP2,
        [f"fds.sgd({LATE}one_cycle(0.1, 0.4)), momentum=0.9)"],
    ),
    (
        update("Lion") | rate("OneCycle", **CYCLE),
        DP2,
        [f"fds.lion({LATE}one_cycle(0.1, 0.4)), betas=({LATE}one_cycle_momentum(0.8, 0.9), before=0.8), 0.99))"],
    ),
    (
        update("Lion") | rate("OneCycle", cycle_momentum=False, **CYCLE),
        DP2,
        [f"fds.lion({LATE}one_cycle(0.1, 0.4)), betas=(0.9, 0.999))"],
    ),
    (
        update("Lamb", betas=[0.5, 0.6])
        | rate(
            "OneCycle",
            **CYCLE,
            cycle_first_step_size=20,
            cycle_second_step_size=10,
            cycle_first_stair_count=4,
            cycle_second_stair_count=2,
            decay_step_size=5,
            decay_lr_rate=0.1,
            cycle_min_mom=0.7,
            cycle_max_mom=0.95,
            decay_mom_rate=0.2,
        ),
        DP2,
        [
            f"fds.lamb({LATE}one_cycle(0.1, 0.4, first_steps=20, second_steps=10, first_stairs=4, second_stairs=2, "
            f"decay_steps=5, decay_rate=0.1)), "
            f"betas=({LATE}one_cycle_momentum(0.7, 0.95, first_steps=20, second_steps=10, "
            "first_stairs=4, second_stairs=2, decay_steps=5, decay_rate=0.2), before=0.7), 0.99))"
        ],
    ),
]


@pytest.mark.parametrize(("said", "axes", "expected"), ROWS, ids=str)
def test_keys_become_these_calls(said, axes, expected):
    assert texts(said, axes) == expected


def test_everything_at_once_stands_in_the_order_of_the_program():
    said = merged(
        adam(weight_decay=0.1) | FP16 | {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2},
        zero(2) | {"pipeline": {"activation_checkpoint_interval": 1}},
    )
    assert texts(said) == [
        "fds.accumulate(2)",
        'fds.shard_optimizer(mesh["dp"], stage=2)',
        HALF,
        "fds.checkpoint_activations()",
        "fds.loss_scale()",
        "fds.clip_by_global_norm(1.0)",
        "fds.adamw(0.001, weight_decay=0.1)",
    ]


def test_gradients_are_clipped_at_1_where_nothing_is_said():
    made = calls(TrainingConfig.of({"train_batch_size": 2}), DP2)
    assert [str(call) for call in made][1:] == ["fds.clip_by_global_norm(1.0)"]


@pytest.mark.parametrize("axes", [{}, {"pp": 2}, {"replicate": 2}])
def test_a_mesh_without_data_ranks_is_refused(axes):
    with pytest.raises(MeshError, match="no axis for data ranks") as e:
        calls(TrainingConfig.of(BATCH), axes)
    assert e.value.hint == "fds.mesh(dp=-1)"


@pytest.mark.parametrize("said", [rate("WarmupLR"), rate("WarmupCosineLR", total_num_steps=9)])
def test_a_peak_that_is_the_optimizers_needs_one(said):
    config = TrainingConfig.of(BATCH | said)
    with pytest.raises(ConfigError, match="takes its peak from the optimizer") as e:
        config.schedule()
    assert e.value.where == "scheduler.params, optimizer.params.lr"
    assert TrainingConfig.of(BATCH | rate("WarmupLR", warmup_max_lr=0.1)).schedule() is not None


@pytest.mark.parametrize("axes", [DP2, REPLICAS])
def test_shards_that_the_mesh_does_not_have_are_refused(axes):
    with pytest.raises(ConfigError, match="another size") as e:
        texts(zero(3, mics_shard_size=4), axes)
    assert e.value.where == "zero_optimization.mics_shard_size" and e.value.got == "4, and the mesh has 2"


@pytest.mark.parametrize(
    ("said", "axes", "where"),
    [
        ({"data_parallel_size": 4}, DP2, "data_parallel_size"),
        (zero(3, zero_hpz_partition_size=2), {"dp": 4}, "zero_optimization.zero_hpz_partition_size"),
        (zero(3, zero_hpz_partition_size=4), NODES, "zero_optimization.zero_hpz_partition_size"),
        (zero(3, mics_shard_size=2), NODES, "zero_optimization.mics_shard_size"),
        ({"sequence_parallel_size": 2}, DP2, "sequence_parallel_size"),
        ({"sequence_parallel_size": 1}, SP2, "sequence_parallel_size"),
        ({"data_parallel_size": 4}, SP2, "data_parallel_size"),
        (zero(3, mics_shard_size=2), SP2, "zero_optimization.mics_shard_size"),
        (zero(3, zero_hpz_partition_size=2), NODES | SP2, "zero_optimization.zero_hpz_partition_size"),
        (TENSOR, DP2, "tensor_parallel.autotp_size"),
        (TENSOR, {"dp": 2, "tp": 4}, "tensor_parallel.autotp_size"),
        ({"pipeline": {"stages": 4}}, DP2, "pipeline.stages"),
        ({"pipeline": {"stages": 4}}, {"pp": 2, "dp": 2}, "pipeline.stages"),
    ],
)
def test_sizes_that_the_mesh_does_not_have_are_refused(said, axes, where):
    with pytest.raises(ConfigError, match="another size") as e:
        texts(said, axes)
    assert e.value.where == where


def test_an_axis_that_nothing_uses_is_refused():
    with pytest.raises(MeshError, match="does not use these axes"):
        texts({}, {"dp": 2, "other": 2})


@pytest.mark.parametrize("axes", [None, "dp", {"dp": 0}, {"dp": True}, {"dp": 2.0}])
def test_what_is_no_mesh_is_refused(axes):
    for explains in (lambda: TrainingConfig.of(BATCH).explain(axes), lambda: TrainingConfig.of(BATCH).transforms(axes)):
        with pytest.raises(MeshError):
            explains()


def test_batches_that_do_not_divide_among_data_ranks_are_refused():
    with pytest.raises(ConfigError, match="do not multiply"):
        texts({"train_batch_size": 9})


def test_rules_of_ones_own_for_layers_are_refused_where_layers_are_shared():
    said = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": [".*"]}]}}}
    with pytest.raises(NotSupportedError, match="takes as a plan") as e:
        texts(said, TP2)
    assert e.value.where == "tensor_parallel.partition_config"


@pytest.mark.parametrize(
    ("said", "num_ranks", "expected"),
    [
        ({}, 4, {"dp": 4}),
        (TENSOR, 4, {"dp": 2, "tp": 2}),
        (TENSOR, 2, {"dp": 1, "tp": 2}),
        ({"sequence_parallel_size": 4}, 8, {"dp": 2, "sp": 4}),
        (TENSOR | {"sequence_parallel_size": 2}, 8, {"dp": 2, "sp": 2, "tp": 2}),
        (zero(3, zero_hpz_partition_size=2), 4, {"node": 2, "dp": 2}),
        (zero(3, zero_hpz_partition_size=2) | TENSOR, 8, {"node": 2, "dp": 2, "tp": 2}),
        (zero(3, zero_hpz_partition_size=4) | {"sequence_parallel_size": 2}, 8, {"node": 2, "dp": 2, "sp": 2}),
        (zero(3, zero_hpz_partition_size=2) | {"sequence_parallel_size": 4}, 8, {"dp": 2, "sp": 4}),
    ],
    ids=str,
)
def test_a_json_says_the_axes_of_a_mesh_whose_neighbours_share_layers(said, num_ranks, expected):
    found = axes_of(TrainingConfig.of(said), num_ranks)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("num_ranks", [1, 2, 6])
def test_ranks_that_cannot_share_layers_and_rows_are_told_so(num_ranks):
    with pytest.raises(ConfigError, match="cannot be divided") as e:
        axes_of(TrainingConfig.of(TENSOR | {"sequence_parallel_size": 2}), num_ranks)
    assert e.value.where == "tensor_parallel.autotp_size, sequence_parallel_size"


def test_optimizers_and_schedulers_that_are_not_there_are_refused_together():
    said = {"optimizer": {"type": "RMSprop"}, "scheduler": {"type": "CosineAnnealingLR"}}
    with pytest.raises(NotSupportedError) as e:
        texts(said)
    assert e.value.where == "optimizer.type, scheduler.type"


def test_a_schedule_without_an_optimizer_that_is_known_has_no_peak_and_one_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="takes its peak from the optimizer"):
        TrainingConfig.of(BATCH | {"optimizer": {"type": "RMSprop"}} | rate("WarmupLR")).schedule()
    with pytest.raises(NotSupportedError) as e:
        TrainingConfig.of(BATCH | rate("CosineAnnealingLR")).schedule()
    assert e.value.where == "scheduler.type"


@pytest.mark.parametrize("ahead", [0, 1, 3, 8])
@pytest.mark.parametrize("live", [1, 3, 5, 20])
def test_what_is_whole_stays_within_the_bound_of_live_parameters(live, ahead):
    """In buckets of one layer each. A bound of less than three layers gives way: DeepSpeed's is as soft."""
    layer = 1024
    config = TrainingConfig.of(
        BATCH
        | zero(
            3,
            reduce_bucket_size=layer,
            stage3_max_live_parameters=live * layer,
            stage3_param_persistence_threshold=0,
            stage3_prefetch_bucket_size=ahead * layer,
        )
    )

    def whole_bytes() -> int:
        step = fds.compose(*config.transforms(fds.mesh(dp=2)), fds.sgd(0.1))(lambda params, batch: params["h"])
        state = step.init({"h": [torch.zeros(layer) for _ in range(16)]})
        return step.describe(state).num_bytes["whole"]

    most = max(live, 3)
    assert fds.simulate(whole_bytes, 2) == [4 * layer * min(2 + ahead, most, 16)] * 2


# the law: a key whose meaning is an argument changes that argument


def arguments_in(cls: type[Config], path: str = "") -> dict[str, Argument]:
    """Return JSON path -> meaning of the keys of a record that become arguments."""
    out = {}
    for name, (type_, known) in keys(cls).items():
        here = path if known.flat else f"{path}{name}"
        inner = record_of(type_)
        out |= {here: known.meaning} if isinstance(known.meaning, Argument) else {}
        out |= arguments_in(inner, here if known.flat else f"{here}.") if inner is not None else {}
    return out


KINDS = {
    f"{group}[{kind}]": (group, kind, cls)
    for group, kinds in (("optimizer", optimizer.OPTIMIZERS), ("scheduler", optimizer.SCHEDULERS))
    for kind, cls in kinds.items()
    if kind != "adamw"
}
ARGUMENTS = arguments_in(TrainingConfig)
for _name, (_, _, _cls) in KINDS.items():
    ARGUMENTS |= arguments_in(_cls, f"{_name}.params.")
AGAIN = {"pipeline": {"activation_checkpoint_interval": 1}}
MESHES = {
    "seq_parallel_communication_data_type": SP2,
    "tensor_parallel.autotp_size": TP2,
    "tensor_parallel.tp_overlap_comm": TP2,
    "pipeline.partition": PP2,
    "zero_optimization.zero_hpz_partition_size": NODES,
    "activation_checkpointing.partition_activations": TP2,
}
ELASTIC = {"max_train_batch_size": 48, "micro_batch_sizes": [3], "ignore_non_elastic_batch_info": True}
ON: dict[str, tuple[dict[str, Any], Any, Any]] = {  # path -> where it counts, another value, the argument then
    "train_micro_batch_size_per_gpu": ({}, 1, 4),
    "gradient_accumulation_steps": ({}, 2, 2),
    "elasticity.enabled": ({"elasticity": ELASTIC}, True, 6),  # 36 rows
    "optimizer.type": (adam(), "Lamb", None),
    "optimizer.params": (adam(), {"eps": 0.5}, None),
    "scheduler.type": (adam() | rate("WarmupLR"), "LRRangeTest", None),
    "scheduler.params": (adam() | rate("WarmupLR"), {"warmup_min_lr": 0.5}, None),
    "communication_data_type": (BF16, "fp16", torch.float16),
    "seq_parallel_communication_data_type": (BF16, "fp16", torch.float16),
    "tensor_parallel.autotp_size": ({}, 2, None),
    "tensor_parallel.tp_overlap_comm": (TENSOR, True, 1),
    "prescale_gradients": ({}, True, 2.0),
    "gradient_predivide_factor": ({}, 4.0, 4.0),
    "sparse_gradients": ({}, True, {"embed.weight": FunctionCall("transports.rows")}),
    "gradient_clipping": ({"gradient_clipping": 1.0}, 2.0, 2.0),
    "fp16.enabled": ({}, True, torch.float16),
    "fp16.loss_scale": (FP16, 64, 64.0),
    "fp16.initial_scale_power": (FP16, 8, 256.0),
    "fp16.loss_scale_window": (FP16, 7, 7),
    "fp16.hysteresis": (FP16, 3, 3),
    "fp16.consecutive_hysteresis": (FP16, True, True),
    "fp16.min_loss_scale": (FP16, 2, 2),
    "bf16.enabled": ({}, True, torch.bfloat16),
    "bf16.check_grad_overflow": (BF16, False, None),
    "amp.enabled": ({}, True, None),
    "amp.loss_scale": (AMP, 64, 64.0),
    "amp.min_loss_scale": (AMP, 2.0, 2.0),
    "torch_autocast.enabled": ({}, True, None),
    "torch_autocast.dtype": ({"torch_autocast": {"enabled": True}}, "float16", torch.float16),
    "data_types.grad_accum_dtype": (BF16, "fp32", torch.float32),
    "zero_optimization.stage": (zero(1), 2, 2),
    "zero_optimization.reduce_bucket_size": (zero(1), 1000, 4000),
    "zero_optimization.allgather_bucket_size": (zero(1), 1000, 4000),
    "zero_optimization.stage3_prefetch_bucket_size": (zero(3), 2**24, 2),
    "zero_optimization.stage3_param_persistence_threshold": (zero(3), 10, 11),
    "zero_optimization.stage3_max_live_parameters": (zero(3), 3 * 10**6, 4 * 10**6),
    "zero_optimization.zero_hpz_partition_size": (zero(3), 2, AxisOf("dp")),
    "zero_optimization.zero_quantized_weights": (zero(3), True, "transports.quantized"),
    "zero_optimization.zero_quantized_nontrainable_weights": (zero(3), True, None),
    "zero_optimization.zero_quantized_gradients": (zero(3), True, "transports.quantized"),
    "zero_optimization.offload_param.device": (zero(3), "cpu", "host"),
    "zero_optimization.offload_param.nvme_path": (zero(3, offload_param=NVME), "/another", "/another"),
    "zero_optimization.offload_param.buffer_size": (zero(3, offload_param=NVME), 2**20, 2**22),
    "zero_optimization.offload_optimizer.device": (zero(2), "cpu", "host"),
    "zero_optimization.offload_optimizer.nvme_path": (zero(3, offload_optimizer=NVME), "/another", "/another"),
    "zero_optimization.offload_optimizer.ratio": (zero(3, offload_optimizer=HOST), 0.25, 0.25),
    "zero_optimization.offload_optimizer.super_offload": (zero(3, offload_optimizer=HOST), True, True),
    "zero_optimization.sub_group_size": (zero(3, offload_optimizer=NVME), 2**18, 2**22),
    "aio.queue_depth": (zero(3, offload_param=NVME), 16, 16),
    "aio.intra_op_parallelism": (zero(3, offload_param=NVME), 4, 32),
    "activation_checkpointing.cpu_checkpointing": (AGAIN, True, "host"),
    "activation_checkpointing.partition_activations": (AGAIN, True, AxisOf("tp")),
    "activation_checkpointing.contiguous_memory_optimization": (AGAIN, True, True),
    "activation_checkpointing.number_checkpoints": (
        AGAIN | {"activation_checkpointing": {"contiguous_memory_optimization": True}},
        8,
        8,
    ),
    "pipeline.partition": ({}, "uniform", "uniform"),
    "pipeline.activation_checkpoint_interval": ({}, 2, 2),
}
ON |= {
    f"flops_profiler.{name}": ({} if name == "enabled" else {"flops_profiler": {"enabled": True}}, value, then)
    for name, value, then in (
        ("enabled", True, None),
        ("profile_step", 3, 3),
        ("module_depth", 2, 2),
        ("top_modules", 4, 4),
        ("detailed", False, False),
        ("output_file", "profile.txt", "profile.txt"),
    )
}
LINE = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}
STRETCHES = {"schedule_config": {"difficulty": [8, 64, 32], "max_step": [10, 20]}}
CURRICULA = {
    "fixed_linear": {"curriculum_learning": LINE},
    "fixed_root": {
        "curriculum_learning": merged(LINE, {"schedule_type": "fixed_root", "schedule_config": {"root_degree": 2}})
    },
    "fixed_discrete": {"curriculum_learning": LINE | {"schedule_type": "fixed_discrete"} | STRETCHES},
}
ON |= {
    f"curriculum_learning.{name}": (merged(CURRICULA[base], {"curriculum_learning": before}), value, then)
    for name, base, before, value, then in (
        ("enabled", "fixed_linear", {"enabled": False}, True, None),
        ("curriculum_type", "fixed_linear", {}, "rarity", None),
        ("min_difficulty", "fixed_linear", {}, 16, 16),
        ("max_difficulty", "fixed_root", {}, 128, 128),
        ("schedule_type", "fixed_root", {}, "fixed_linear", None),
        ("schedule_config.total_curriculum_step", "fixed_root", {}, 50, 50),
        ("schedule_config.difficulty_step", "fixed_linear", {}, 16, 16),
        ("schedule_config.root_degree", "fixed_root", {}, 3, 3),
        ("schedule_config.difficulty", "fixed_discrete", {}, [8, 64, 16], (8, 64, 16)),
        ("schedule_config.max_step", "fixed_discrete", {}, [10, 30], (10, 30)),
    )
}
LTD = {"enabled": True, "random_ltd_layer_id": [1, 2], "total_layer_num": 4, "hidden_state_order": "batch_seq_dim"}
LTD["random_ltd_schedule"] = {"min_value": 16, "max_value": 64}
LTD["random_ltd_schedule"]["schedule_config"] = {"require_steps": 100, "seq_per_step": 8}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}}
WARMUP["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
ON |= {
    f"data_efficiency.data_routing.random_ltd.{name}": (
        WARMUP | {"data_efficiency": {"data_routing": {"random_ltd": merged(LTD, before)}}},
        value,
        then,
    )
    for name, before, value, then in (
        ("enabled", {"enabled": False}, True, None),
        ("total_layer_num", {"layer_token_lr_schedule": {"enabled": True}}, 6, 6),
        ("random_ltd_layer_id", {}, [1, 3], (1, 3)),
        ("hidden_state_order", {}, "seq_batch_dim", "seq_batch"),
        ("random_ltd_schedule.min_value", {}, 32, 32),
        ("random_ltd_schedule.max_value", {}, 128, 128),
        ("random_ltd_schedule.schedule_config.require_steps", {}, 50, 50),
        ("random_ltd_schedule.schedule_config.seq_per_step", {}, 16, 16),
        ("layer_token_lr_schedule.enabled", {"layer_token_lr_schedule": {"enabled": False}}, True, None),
    )
}
ON |= {
    f"progressive_layer_drop.{name}": ({"progressive_layer_drop": before}, value, then)
    for name, before, value, then in (
        ("enabled", {"enabled": False}, True, None),
        ("theta", {"enabled": True}, 0.25, 0.25),
        ("gamma", {"enabled": True}, 0.01, 0.01),
    )
}
MODULES = Parts.of(nn.ModuleDict({"a": nn.Linear(4, 4), "ab": nn.Conv2d(2, 2, 1)}))


def technique(key, params, shared):
    groups = {"g": {"params": params, "modules": ["a"]}}
    return {
        "compression_training": {key: {"shared_parameters": {"enabled": True} | shared, "different_groups": groups}}
    }


FLOAT16 = {"fp16": {"enabled": True}}
FALLING = {"start_bits": 8, "target_bits": 4, "quantization_period": 10}
MIXED = {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.5}}
WEIGHTS = {"quantize_weight_in_forward": True}
ON |= {
    f"compression_training.{key}.shared_parameters.{name}": (technique(key, params, shared) | FLOAT16, value, then)
    for key, params, name, shared, value, then in (
        ("weight_quantization", FALLING, "enabled", {"enabled": False}, True, None),
        ("weight_quantization", FALLING, "schedule_offset", {}, 5, 5),
        ("weight_quantization", FALLING, "quantize_groups", {}, 2, 2),
        ("weight_quantization", FALLING, "quantization_type", {}, "asymmetric", False),
        ("weight_quantization", FALLING, "rounding", {}, "stochastic", "stochastic"),
        ("weight_quantization", FALLING | {"quantization_period": 1}, "quantize_weight_in_forward", {}, True, 4),
        ("weight_quantization", FALLING, "fp16_mixed_quantize.enabled", {}, True, 0.001),
        ("weight_quantization", FALLING, "fp16_mixed_quantize.quantize_change_ratio", MIXED, 0.25, 0.25),
        ("activation_quantization", {"bits": 8}, "enabled", {"enabled": False}, True, None),
        ("activation_quantization", {"bits": 8}, "quantization_type", {}, "asymmetric", False),
        ("activation_quantization", {"bits": 8}, "range_calibration", {}, "static", "static"),
        ("activation_quantization", {"bits": 8}, "schedule_offset", {}, 5, 5),
        ("sparse_pruning", {"dense_ratio": 0.5}, "enabled", {"enabled": False}, True, None),
        ("sparse_pruning", {"dense_ratio": 0.5}, "schedule_offset", {}, 5, 5),
        ("sparse_pruning", {"dense_ratio": 0.5}, "method", {}, "topk", "topk"),
        *(
            (key, {"dense_ratio": 0.5}, name, before | heads, value, then)
            for key, heads in (("row_pruning", {}), ("channel_pruning", {}), ("head_pruning", {"num_heads": 4}))
            for name, before, value, then in (
                ("enabled", {"enabled": False}, True, None),
                ("schedule_offset", {}, 5, 5),
                ("method", {"method": "topk"}, "l1", "l1"),
            )
        ),
        ("head_pruning", {"dense_ratio": 0.5}, "num_heads", {"num_heads": 4}, 2, 2),
    )
}
SUMMED = {"method": "snip_momentum", "schedule_offset": 2, "schedule_offset_end": 9}
for name, value in (
    ("block_pattern", "2x1"),
    ("dense_ratio", 0.5),
    ("schedule_offset_end", 12),
    ("schedule_offset_stride", 7),
):
    section = technique("sparse_pruning", {}, SUMMED)
    section["compression_training"]["sparse_pruning"]["different_groups"] = {}
    ON[f"compression_training.sparse_pruning.shared_parameters.{name}"] = section, value, value
WITH = {  # what goes with it
    **{
        f"compression_training.{key}_pruning.shared_parameters.method": {(f"prune_{function}", "initial")}
        for key, function in (("row", "rows"), ("channel", "channels"), ("head", "heads"), ("sparse", "weights"))
    },
    # gradients travel in the parameters' dtype still, and are summed in it
    "data_types.grad_accum_dtype": {("precision", "reduce")},
}
OTHER: dict[str, Any] = {
    "betas": [0.5, 0.25],
    "warmup_type": "linear",
    "warmup_max_lr": 0.5,
    "factor_min": 0.25,
}  # the rest by type


def base_of(group: str, kind: str) -> dict[str, Any]:
    """Return JSON in which every parameter of a kind counts."""
    if group == "optimizer":
        return update(kind)
    needed = {"WarmupDecayLR": {"total_num_steps": 50}, "WarmupCosineLR": {"total_num_steps": 50}, "OneCycle": CYCLE}
    return update("Lion", lr=0.25) | rate(kind, **needed.get(kind, {}))


def another(name: str, default: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    return not default if isinstance(default, bool) else 7 if isinstance(default, int) or default is None else 0.5


def case(path: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return JSON in which a key counts, the same with another value, and what the argument is then."""
    kind, _, name = path.partition(".params.")
    if kind in KINDS:
        group, type_, cls = KINDS[kind]
        base = base_of(group, type_) if name != "nesterov" else update("SGD", momentum=0.75)  # refused without it
        value = another(name, keys(cls)[name][1].default)
        then = None if name in ("adam_w_mode", "cycle_momentum") else tuple(value) if name == "betas" else value
        then = value - 1 if name == "freeze_step" else then  # DeepSpeed's first call updates nothing
        return base, merged(base, {group: {"params": {name: value}}}), then
    base, value, then = ON[path]
    said: Any = value
    for word in reversed(path.split(".")):
        said = {word: said}
    return base, merged(base, said), then


def _word(value: Any) -> Any:
    return value.path if isinstance(value, FunctionCall) else value


def bound(call: FunctionCall) -> dict[tuple[str, str], Any]:
    """Return (function, argument) -> value of a call and of those in it; (function, "") says that it is called."""
    signature = inspect.signature(FUNCTIONS[call.path]).bind(*call.args, **call.kwargs)
    signature.apply_defaults()
    out: dict[tuple[str, str], Any] = {(call.path, ""): True}
    for name, value in signature.arguments.items():
        values = value if isinstance(value, tuple) else (value,)
        out[call.path, name] = tuple(map(_word, values)) if isinstance(value, tuple) else _word(value)
        for inner in values:
            out |= bound(inner) if isinstance(inner, FunctionCall) else {}
    return out


def found(said: dict[str, Any], axes: dict[str, int]) -> dict[tuple[str, str], Any]:
    made = calls(TrainingConfig.of(merged(BATCH, said)), axes, ["embed.weight"], MODULES)
    return {place: value for call in made for place, value in bound(call).items()}


@pytest.mark.parametrize("path", ARGUMENTS)
def test_a_key_that_is_an_argument_changes_that_argument_and_no_other(path):
    meaning, (before, after, then) = ARGUMENTS[path], case(path)
    axes = MESHES.get(path, DP2)
    old, new = found(before, axes), found(after, axes)
    changed = {place for place in old | new if old.get(place) != new.get(place)}
    meant = {place for place in old | new if place[0] in meaning.of and (not meaning.name or place[1] == meaning.name)}
    assert changed & meant
    assert then is None or all(new[place] == then for place in changed & meant if place in new)
    came_or_went = {f for f, name in changed if not name} | {"schedules.delayed"}  # which hands on what is in it
    assert {place for place in changed - meant if place[0] not in came_or_went} == WITH.get(path, set())


@pytest.mark.parametrize("path", [path for path in ARGUMENTS if "[" in path])
def test_a_parameter_that_is_not_given_is_its_default(path):
    meaning, (kind, _, name) = ARGUMENTS[path], path.partition(".params.")
    default = keys(KINDS[kind][2])[name][1].default
    if default is not None and meaning.name and name != "cycle_momentum":
        now = found(case(path)[0], DP2)
        default = default - 1 if name == "freeze_step" else default
        assert {now[place] for place in now if place[0] in meaning.of and place[1] == meaning.name} == {default}


@pytest.mark.parametrize("path", ARGUMENTS)
def test_a_meaning_names_functions_that_are_there_and_arguments_that_they_take(path):
    meaning = ARGUMENTS[path]
    for f in meaning.of:
        assert f in FUNCTIONS and (f.startswith("schedules.") or FUNCTIONS[f] is getattr(fds, f))
        assert not meaning.name or meaning.name in inspect.signature(FUNCTIONS[f]).parameters


def test_no_case_of_the_law_is_left_over():
    assert set(ON) == {path for path in ARGUMENTS if "[" not in path}
