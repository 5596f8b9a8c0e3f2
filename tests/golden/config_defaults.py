"""Record what DeepSpeed 0.19.6 takes where a key of its JSON is absent, and how it fills in the batch numbers.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/config_defaults.py

config_defaults.json: by JSON path, every key that is read. `*` stands for a name of the user's or for a list's element,
`[AdamW]` for the type or mode under which the keys after it are read. Of a key:

    default: what is taken where it is absent (no such field: there is none)
    type: a word of Python's, "section" (an object whose keys are listed), "object" (one whose keys are the user's),
        "any", with "|null" where null may be given
    ge, gt, le, lt: bounds that are enforced
    values: what may be given;  enforced: whether others are refused;  any_case: capitals and small letters are one
    required: the section, switched on, is refused without it
    resolved: null stands for another value, which depends on `by`
    also: further spellings that are accepted in silence
    deprecated: a warning is given;  becomes: by the value given, the defaults that are then different
    refused: known, and refused wherever it is given
    unknown: of a section, what happens to a key that it does not know
    source: the file, inside deepspeed, where it is declared or read

Pydantic's models are asked for their fields, constructors for their signatures, and everything else is watched while it
reads a dictionary, so that no key can be missing that is read on the way.
config_batches.json, per case: the world's size, what was given, and [train, micro, accumulation] that it becomes, or
"refused". Floats are written by `repr`, so reading them gives the same bits.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from copy import deepcopy
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

HERE = Path(__file__).parent
NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
REAL = ("lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "initial_accumulator_value")
BATCH = {"train_batch_size": 1}
GROUP = {"modules": ["a"], "related_modules": [["b"]]}
METRIC = {"index_to_sample_path": "", "index_to_metric_path": "", "difficulty_type": "value", "clustering_type": ""}
CURRICULA = {
    "fixed_linear": {"total_curriculum_step": 10, "difficulty_step": 8},
    "fixed_root": {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2},
    "fixed_discrete": {"difficulty": [1, 2], "max_step": [5]},
}
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "layer_token_lr_schedule": {"enabled": False},
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
}


def technique(params: dict, **shared: object) -> dict:
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"*": {"params": params, **GROUP}}}


def curriculum(kind: str) -> dict:
    scale = {"min_difficulty": 8, "max_difficulty": 16, "schedule_type": kind, "schedule_config": CURRICULA[kind]}
    new = {"enabled": True, "data_cluster_path": "", "curriculum_metrics": {"*": scale | METRIC}}
    old = {"enabled": True, "curriculum_type": "seqlen", **scale}
    return BATCH | {"curriculum_learning": old, "data_efficiency": {"data_sampling": {"curriculum_learning": new}}}


COMPRESSION = {
    "weight_quantization": technique({"start_bits": 8, "target_bits": 4}, fp16_mixed_quantize={}),
    "activation_quantization": technique({"bits": 8}),
    "sparse_pruning": technique({"dense_ratio": 0.5}, method="snip_momentum"),
    "row_pruning": technique({"dense_ratio": 0.5}),
    "head_pruning": technique({"dense_ratio": 0.5}, num_heads=2),
    "channel_pruning": technique({"dense_ratio": 0.5}),
    "layer_reduction": {
        "enabled": True,
        "keep_number_layer": 1,
        "module_name_prefix": "",
        "teacher_layer": [0],
        "other_module_name": ["b"],
    },
}
PROBES: dict[str, dict] = {  # sections that are valid, switched on, and say no more than they must
    "": BATCH,
    "accumulation": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
    "old": BATCH | {"zero_optimization": True, "bfloat16": {}},
    "sections": BATCH
    | {
        **{name: {} for name in ("activation_checkpointing", "flops_profiler", "data_types", "aio", "nebula")},
        **{name: {} for name in ("pipeline", "optimizer", "scheduler", "comms_logger", "compile", "hybrid_engine")},
        **{name: {} for name in ("fp16", "bf16", "tensorboard", "wandb", "csv_monitor", "comet")},
        "weight_quantization": {},
        "amp": {"enabled": True},
        "progressive_layer_drop": {"enabled": True},
        "zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
        "autotuning": {"model_info": {}},
        "checkpoint": {"parallel_write": {}, "writer": {}},
        "torch_autocast": {"dtype": "bf16", "lower_precision_safe_modules": []},
        "timers": {"throughput": {}},
        "tensor_parallel": {},
        "expert_parallel": {"enabled": True},
    },
    "named": BATCH | {"optimizer": {"type": "Adam", "params": {}}, "scheduler": {"type": "WarmupLR", "params": {}}},
    "data": BATCH
    | {
        "data_efficiency": {
            "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 8, "metrics_path": ""}},
            "data_routing": {"random_ltd": LTD},
        }
    },
    "compression": BATCH | {"compression_training": COMPRESSION},
    "eigenvalue": BATCH
    | {"compression_training": {"shared_parameters": {"enabled": True}}, "quantize_training": {"eigenvalue": {}}},
    "elasticity": {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}},
    "no elasticity": BATCH | {"elasticity": {"enabled": False}},
    "autotp": BATCH | {"tensor_parallel": {"partition_config": {"layer_specs": [{}]}}},
    **{
        f"sparse_attention[{mode}]": BATCH | {"sparse_attention": {"mode": mode}}
        for mode in ("dense", "fixed", "variable", "bigbird", "bslongformer")
    },
    **{f"schedule_config[{kind}]": curriculum(kind) for kind in CURRICULA},
}
# read by `in` or [] rather than with a default, or by what needs a model, data or a compiler: (default, type)
KNOWN = {
    "optimizer.type": (None, "str|null"),
    "optimizer.params": (None, "section|null"),
    "optimizer.legacy_fusion": (False, "bool"),
    "scheduler.type": (None, "str|null"),
    "scheduler.params": (None, "section|null"),
    "pipeline.stages": ("auto", "int|str"),
    "pipeline.partition": ("best", "str"),
    "pipeline.seed_layers": (False, "bool"),
    "pipeline.activation_checkpoint_interval": (0, "int"),
    "pipeline.pipe_partitioned": (True, "bool"),
    "pipeline.grad_partitioned": (True, "bool"),
    "pipeline.use_reentrant": (True, "bool"),
    "torch_autocast.dtype": (None, "str|null"),
    "torch_autocast.lower_precision_safe_modules": (None, "list[str]|null"),
    "data_efficiency.data_sampling.dynamic_batching.max_batch_size": (None, "int|null"),
    "sparse_attention.mode": ("fixed", "str"),
    "sequence_parallel_size": (None, "int|null"),
    "data_parallel_size": (None, "int|null"),
    "expert_parallel.load_balance_coeff": (None, "null"),
    "expert_parallel.expert_w3": (None, "str|null"),
}
TYPES = {  # of what is null where it is absent
    "int|null": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
        vocabulary_size autotuning.max_train_batch_size autotuning.model_info.num_params
        autotuning.model_info.hidden_size autotuning.model_info.num_layers activation_checkpointing.number_checkpoints
        expert_parallel.num_expert_groups expert_parallel.num_limited_groups""",
    "str|null": """communication_data_type data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype
        log_level checkpoint.writer.data_parallel flops_profiler.output_file nebula.nebula_load_path
        nebula.persistent_storage_path autotuning.metric_path autotuning.model_info_path expert_parallel.preset_model
        expert_parallel.moe_layer_pattern expert_parallel.expert_pattern expert_parallel.router_pattern
        expert_parallel.expert_w1 expert_parallel.expert_w2 expert_parallel.num_experts_attr expert_parallel.top_k_attr
        expert_parallel.shared_experts_pattern expert_parallel.shared_experts_gate_pattern""",
    "bool|null": "expert_parallel.route_norm expert_parallel.has_shared_experts",
    "object|null": "autotuning.arg_mappings",
    "object|bool": "datastates_ckpt",
    "list[int]|null": """sparse_attention[variable].global_block_end_indices
        sparse_attention[bslongformer].global_block_end_indices""",
}
ENDS = {  # what one default does not tell
    ".modules": "list[str]|str",
    ".related_modules": "list[list[str]]|null",
    "zero_optimization": "section|bool",
    ".layer_specs": "list[section]",
    ".shape": "list|null",
    ".partition_dim": "int|null",
    ".model_types": "list[str]|null",
    ".prof_ops": "list[str]",
    ".patterns": "list[str]",
    ".excluded_modules": "list[str]",
    ".top_k": "int|str",
    ".routed_scaling_factor": "float|str",
}
SOURCES = {  # of what only a model, data or a compiler asks for; the first that fits
    "curriculum_type": "runtime/engine.py",
    "random_ltd_layer_id": "runtime/engine.py",
    "random_ltd.random_ltd_schedule": "runtime/data_pipeline/data_routing/scheduler.py",
    "random_ltd": "runtime/data_pipeline/data_routing/basic_layer.py",
    "dynamic_batching": "runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py",
    "data_sampling": "runtime/data_pipeline/data_sampling/data_sampler.py",
    "layer_reduction": "compression/compress.py",
    "zeropp_loco_param": "runtime/comm/coalesced_collectives.py",
    "use_reentrant": "runtime/pipe/engine.py",
    "pipeline": "runtime/config.py",
}
VALUES = {  # of keys that no class of values declares
    "communication_data_type": ["bf16", "fp16", "fp32"],
    "seq_parallel_communication_data_type": ["bf16", "fp16", "fp32"],
    "gradient_allreduce_op": ["mean", "sum"],
    "checkpoint.tag_validation": ["FAIL", "IGNORE", "WARN"],
    "checkpoint.writer.type": ["FAST", "MOCK", "PYTHON"],
    "checkpoint.writer.data_parallel": ["MACHINE", "REPLICA", "SOCKET"],
    "torch_autocast.dtype": [
        "bf16",
        "bfloat16",
        "float",
        "float16",
        "float32",
        "fp16",
        "fp32",
        "half",
        "int8",
        "torch.bfloat16",
        "torch.float16",
        "torch.float32",
        "torch.int8",
    ],
    "data_types.grad_accum_dtype": ["bf16", "fp16", "fp32"],
    "autotuning.metric": ["flops", "latency", "throughput"],
    "autotuning.tuner_type": ["gridsearch", "model_based", "random"],
    "sparse_attention.mode": ["bigbird", "bslongformer", "dense", "fixed", "variable"],
    "sparse_attention[fixed].attention": ["bidirectional", "unidirectional"],
    "sparse_attention[variable].attention": ["bidirectional", "unidirectional"],
    "curriculum_learning.schedule_type": ["custom", *sorted(CURRICULA)],
    "compression_training.weight_quantization.shared_parameters.quantization_type": ["asymmetric", "symmetric"],
    "compression_training.weight_quantization.shared_parameters.rounding": ["nearest", "stochastic"],
    "compression_training.activation_quantization.shared_parameters.quantization_type": ["asymmetric", "symmetric"],
    "compression_training.activation_quantization.shared_parameters.range_calibration": ["dynamic", "static"],
    "compression_training.sparse_pruning.shared_parameters.method": ["l1", "snip_momentum", "topk"],
    **{
        f"compression_training.{part}_pruning.shared_parameters.method": ["l1", "topk"]
        for part in ("row", "head", "channel")
    },
    "data_efficiency.data_sampling.dynamic_batching.lr_scaling_method": ["linear", "none", "sqrt"],
    "data_efficiency.data_sampling.dynamic_batching.sequence_picking_order": ["dataloader", "random", "seqlen"],
    "expert_parallel.combine_impl": ["auto", "legacy_bmm", "weighted_sum"],
    "expert_parallel.score_apply": ["auto", "post", "pre"],
    "expert_parallel.score_func": ["auto", "sigmoid", "softmax"],
    "elasticity.version": [0.1, 0.2],
    "zero_optimization.zenflow.select_strategy": ["auto", "epoch", "step"],
}
MISREAD = "compression_training.shared_parameters"  # asked for, where weight_quantization's was meant


class Watched(dict):
    """A section that notes what is asked of it: by path, (where the question stands, the default if it names one)."""

    def __init__(self, values: dict, log: dict, path: str = "") -> None:
        self.log, self.path = log, path
        super().__init__({k: self._wrap(v, self._below(k)) for k, v in values.items()})

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _wrap(self, value, path: str):
        if isinstance(value, dict):
            return Watched(value, self.log, path)
        return [self._wrap(v, f"{path}.*") for v in value] if isinstance(value, list) else value

    def _note(self, key: str, *default) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename.endswith(("config_utils.py", "copy.py", "config_defaults.py")):
            frame = frame.f_back
        kept = self.log.setdefault(self._below(key), (within(frame.f_code.co_filename), *default))
        if default and len(kept) == 1:
            self.log[self._below(key)] = (within(frame.f_code.co_filename), *default)

    def __copy__(self) -> Watched:
        return Watched(self, self.log, self.path)

    def __contains__(self, key) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self._note(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self._note(key, default)
        return super().get(key, default)

    def pop(self, key, *default):
        self._note(key, *default)
        return super().pop(key, *default)

    def keys(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self  # `x in section.keys()` is a question too


def within(file: str) -> str:
    return file.rpartition("/deepspeed/")[2] if "/deepspeed/" in file else "torch"


def drive(config: dict) -> None:
    """Let everything that reads a dictionary read this one."""
    from deepspeed.elasticity.config import ElasticityConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.module_inject.autotp_config import AutoTPConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.config import DeepSpeedConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler  # pyright: ignore[reportMissingImports]

    curricula = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
    DeepSpeedConfig(config)
    for schedule in filter(None, [at(config, "curriculum_learning"), *dict.values(at(config, curricula))]):
        CurriculumScheduler(schedule)
    if ltd := at(config, "data_efficiency.data_routing.random_ltd"):
        ltd["global_batch_size"] = 8  # as the engine does
        ltd.setdefault("layer_token_lr_schedule", {"enabled": False})  # as the configuration does
        RandomLTDScheduler(ltd)
    if dict.__contains__(config, "elasticity"):
        ElasticityConfig(at(config, "elasticity"))
    if partition := at(config, "tensor_parallel.partition_config"):
        AutoTPConfig.from_dict(partition)


def at(config: dict, path: str) -> dict:
    for key in path.split("."):
        config = dict.get(config, key) or {}
    return config


def drives(config: dict) -> bool:
    try:
        drive(deepcopy(config))
    except Exception:
        return False
    return True


def altered(config: dict, path: str, *value: object) -> dict:
    """Return it with the key given a value, or taken away where there is none."""
    config = deepcopy(config)
    *sections, key = path.split(".")
    section: Any = config
    for name in sections:
        section = section[0] if name == "*" and isinstance(section, list) else section.setdefault(name, {})
    if value:
        section[key] = value[0]
    else:
        section.pop(key, None)
    return config


def leaves(config: Any, path: str = ""):
    """Yield (path, value) of all that is in there, sections included."""
    for key, value in config.items():
        below = f"{path}.{key}" if path else key
        yield below, value
        if isinstance(value, dict):
            yield from leaves(value, below)


def labelled(path: str, probe: str) -> str:
    """Return the path as it is recorded: under the mode that the probe is named after."""
    section = probe.partition("[")[0] + "."
    if section == probe + "." or path == "sparse_attention.mode" or "random_ltd" in path:
        return path
    return path.replace(section, probe + ".")


def watched_entries() -> dict[str, dict]:
    """Return what the probes show: which keys are read, and which are required, bounded or restricted."""
    types = {path: kind for kind, paths in TYPES.items() for path in paths.split()}
    found: dict[str, dict] = {}
    for name, probe in PROBES.items():
        log: dict[str, tuple] = {}
        drive(Watched(probe, log))
        given = dict(leaves(probe))
        for raw in sorted({*log, *given}):
            path, (source, *default) = labelled(raw, name), log.get(raw, ("",))
            if MISREAD in path or path.endswith((".global_batch_size", ".params.max_grad_norm")):  # see engine_entries
                continue
            new, entry = path not in found, found.setdefault(path, {})
            if source and ("source" not in entry or (default and "default" not in entry)):
                entry["source"] = source
            if path in KNOWN:
                entry |= dict(zip(("default", "type"), KNOWN[path], strict=True))
            elif isinstance(given.get(raw), dict):
                entry["type"] = "section"
            elif default:
                entry |= {"default": default[0], "type": types.get(path, word_of(default[0]))}
            elif "default" not in entry and raw in given:
                entry["type"] = word_of(given[raw])
            alone = raw in (*NUMBERS, "elasticity", "elasticity.enabled")  # where the probe's batch numbers come from
            if raw in given and not alone and not drives(altered(probe, raw)):
                entry["required"] = True
            if new or raw in given:
                entry |= restrictions(probe, raw, path, entry)
    return found


def restrictions(probe: dict, raw: str, path: str, entry: dict) -> dict:
    """Return the bounds and the values that are enforced while the dictionary is read."""

    def takes(value: object) -> bool:
        return drives(altered(probe, raw, value))

    found: dict = {}
    kind = entry.get("type", "").removesuffix("|null")
    if path not in VALUES and kind in ("int", "float") and not takes(-1):
        found = {"ge": 0} if takes(0) else {"ge": 1} if kind == "int" else {"gt": 0}
        if kind == "float" and takes(0.5) and not takes(1):
            found["lt"] = 1
    if path in VALUES:
        assert path.endswith("schedule_type") or all(map(takes, VALUES[path])), path  # each has its own schedule_config
        found |= {"values": VALUES[path], "enforced": not takes("no such value")}
        if found["enforced"] and all(isinstance(v, str) and takes(v.swapcase()) for v in VALUES[path]):
            found["any_case"] = True
    return found


def word_of(value: Any) -> str:
    return f"list[{word_of(value[0])}]" if isinstance(value, list) and value else word(type(value))


def word(kind: Any) -> str:
    """Return a type's word: `int | None` is "int|null"."""
    from enum import Enum

    import torch
    from pydantic import BaseModel  # pyright: ignore[reportMissingImports]

    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return "|".join(sorted(map(word, parts), key=lambda w: (w == "null", w)))
    if origin is Literal:
        return "|".join(sorted({word(type(part)) for part in parts}))
    if origin in (list, tuple):
        return f"list[{word(parts[0])}]"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return word(kind.__mro__[1])
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    names = {type(None): "null", dict: "object", tuple: "list", Path: "str", object: "any", torch.dtype: "dtype"}
    return names.get(origin or kind, getattr(kind, "__name__", "any"))


def models() -> dict[str, type]:
    """Return the pydantic models by the section that they read."""
    from deepspeed.comm.config import CommsLoggerConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.compile.config import CompileConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.inference.config import WeightQuantConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.monitor import config as monitor  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.config import HybridEngineConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # pyright: ignore[reportMissingImports]
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig  # pyright: ignore[reportMissingImports]

    return {
        "bf16": DeepSpeedBF16Config,
        "comet": monitor.CometConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "csv_monitor": monitor.CSVConfig,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "wandb": monitor.WandbConfig,
        "weight_quantization": WeightQuantConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }


def model_entries(section: str, model: Any) -> dict[str, dict]:
    """Return what a pydantic model declares."""
    from pydantic import BaseModel  # pyright: ignore[reportMissingImports]

    found: dict[str, dict] = {}
    source = within(inspect.getfile(model))
    for name, field in model.model_fields.items():
        path = f"{section}.{field.alias or name}"
        default = field.get_default(call_default_factory=True)
        inner = next(
            (
                t
                for t in (field.annotation, *get_args(field.annotation))
                if inspect.isclass(t) and not get_args(t) and issubclass(t, BaseModel)
            ),
            None,
        )
        entry: dict = {} if inner and default is not None else {"default": plain(default)}
        entry |= {"type": word(field.annotation), "source": source}
        for bound in field.metadata:
            entry |= {k: getattr(bound, k) for k in ("ge", "gt", "le", "lt") if hasattr(bound, k)}
        if options := values(field.annotation) or VALUES.get(path):
            entry |= {"values": options, "enforced": True}
        elif entry["type"] in ("int", "float") and not {"ge", "gt"} & {*entry} and refuses(model, name, -1):
            entry |= {"ge": 1 if refuses(model, name, 0) else 0}
        if field.alias:
            entry["also"] = [name]
        if (field.json_schema_extra or {}).get("deprecated"):
            entry |= {"deprecated": True, "becomes": {str(v).lower(): change(model, name, v) for v in (True, False)}}
        found |= {path: entry} | (model_entries(path, inner) if inner else {})
    return found


def refuses(model: Any, name: str, value: object) -> bool:
    try:
        model(**({"enabled": True} if "enabled" in model.model_fields else {}) | {name: value})
    except ValueError:
        return True
    return False


def plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    return str(value) if type(value).__module__ == "torch" else getattr(value, "value", value)


def values(annotation: Any) -> list:
    """Return what an enumeration or a literal lists, if the annotation is one or holds one."""
    from enum import Enum

    if get_origin(annotation) is Literal:
        return sorted(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return sorted({member.value for member in annotation})
    return next(filter(None, map(values, get_args(annotation))), [])


def change(model: Any, name: str, value: bool) -> dict:
    """Return the fields that a deprecated one sets, where they differ from the defaults."""
    before, after = (model(**given).model_dump(mode="json", exclude={name}) for given in ({}, {name: value}))
    shown = {n: field.alias or n for n, field in model.model_fields.items()}
    return {shown[n]: v for n, v in after.items() if v != before[n]}


def signature_entries() -> dict[str, dict]:
    """Return what constructors take."""
    import torch
    from deepspeed.ops.adam import FusedAdam  # pyright: ignore[reportMissingImports]
    from deepspeed.ops.lamb import FusedLamb  # pyright: ignore[reportMissingImports]
    from deepspeed.ops.lion import FusedLion  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime import lr_schedules  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.fp16 import onebit  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop  # pyright: ignore[reportMissingImports]

    kinds: dict[str, Any] = {"Adam": FusedAdam, "AdamW": FusedAdam, "Lamb": FusedLamb, "Lion": FusedLion}
    kinds |= {"OneBitAdam": onebit.OnebitAdam, "OneBitLamb": onebit.OnebitLamb, "ZeroOneAdam": onebit.ZeroOneAdam}
    kinds |= {"Adagrad": torch.optim.Adagrad, "SGD": torch.optim.SGD}
    found = {}
    for name, kind in kinds.items():
        found |= arguments(f"optimizer[{name}].params", kind)
    for name in lr_schedules.VALID_LR_SCHEDULES:
        found |= arguments(f"scheduler[{name}].params", getattr(lr_schedules, name))
        if kind := found.get(f"scheduler[{name}].params.warmup_type"):
            kind |= {"values": ["linear", "log"], "enforced": False}  # "log" is put for what it does not know
    for name in ("cycle_second_step_size", "cycle_second_stair_count"):
        found[f"scheduler[OneCycle].params.{name}"]["resolved"] = name.replace("second", "first")
    found["scheduler[WarmupLR].params.warmup_max_lr"]["resolved"] = "the group's lr"
    return found | arguments("progressive_layer_drop", ProgressiveLayerDrop) | engine_entries(found)


def arguments(section: str, kind: Any) -> dict[str, dict]:
    """Return the arguments of a constructor, but for what the engine passes itself."""
    source = within(inspect.getfile(kind))
    found: dict[str, dict] = {section: {"type": "section", "unknown": "refused", "source": source}}
    for name, argument in inspect.signature(kind).parameters.items():
        if name in ("params", "optimizer", "deepspeed"):
            continue
        given = argument.default
        entry: dict = {} if given is argument.empty else {"default": given}
        number = "int" if "step" in name or "count" in name else "float"
        if name in ("foreach", "fused"):
            entry["type"] = "bool|null"
        elif given is argument.empty:
            entry |= {"type": number, "required": True}
        elif given is None:
            entry["type"] = f"{number}|null"
        else:
            entry["type"] = "float" if name in REAL else "list[float]" if name == "betas" else word(type(given))
        found[f"{section}.{name}"] = entry | {"source": source}
    return found


def engine_entries(found: dict[str, dict]) -> dict[str, dict]:
    """Return what the engine itself takes out of the optimizer's arguments."""
    import torch
    from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam  # pyright: ignore[reportMissingImports]

    engine = "runtime/engine.py"
    more: dict[str, dict] = {}
    taken = {"torch_adam": (False, "bool"), "adam_w_mode": (True, "bool"), "fp32_optimizer_states": (None, "bool|null")}
    for name, (argument, (default, kind)) in product(("Adam", "AdamW", "Muon"), taken.items()):
        more[f"optimizer[{name}].params.{argument}"] = {"default": default, "type": kind, "source": engine}
    rates = {}
    for muon in (True, False):
        log: dict[str, tuple] = {}
        MuonWithAuxAdam([Watched({"params": [torch.zeros(1)], "use_muon": muon}, log)])
        asked = {name: default[0] for name, (_, *default) in log.items() if default}
        rates["muon" if muon else "other"] = asked.pop("lr")
        for name, default in asked.items():
            kind = "list[float]" if name == "betas" else "float" if name in REAL else word(type(default))
            more[f"optimizer[Muon].params.{name}"] = {"default": default, "type": kind, "source": log[name][0]}
    for name in ("lr", "muon_lr", "adam_lr"):
        more[f"optimizer[Muon].params.{name}"] = {"default": None, "type": "float|null", "source": engine}
    more["optimizer[Muon].params.lr"] |= {"resolved": rates, "by": "the parameter's use_muon"}
    more["optimizer[Muon].params"] = {"type": "section", "unknown": "ignored", "source": engine}
    for name in {path.partition(".")[0] for path in found if path.startswith("optimizer[")} | {"optimizer[Muon]"}:
        more[f"{name}.params.max_grad_norm"] = {"type": "float", "refused": True, "source": engine}
    return more


def entries() -> dict[str, dict]:
    """Return every key's entry, by path."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, get_pipeline_config  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES  # pyright: ignore[reportMissingImports]

    found = watched_entries()
    for section, model in models().items():
        declared = model_entries(section, model)
        strange = {p for p in found if p.startswith(section + ".")} - {*declared}
        assert all(".zeropp_loco_param." in p or ".partition_config." in p for p in strange), strange
        found |= {p: found.get(p, {}) | entry for p, entry in declared.items()}
        found[section] = found.get(section, {}) | {"type": "section", "source": within(inspect.getfile(model))}
    for path, entry in signature_entries().items():
        found[path] = found.get(path, {}) | entry
    for path in KNOWN.keys() - found.keys():
        found[path] = dict(zip(("default", "type"), KNOWN[path], strict=True))
    seen = {f"pipeline.{k}": v for k, v in get_pipeline_config({}).items()}
    assert seen == {p: KNOWN[p][0] for p in seen}, seen
    found["data_parallel_size"]["source"] = "__init__.py"
    end = found["compression_training.sparse_pruning.shared_parameters.schedule_offset_end"]
    end |= {"default": None, "type": "int|null", "resolved": "schedule_offset"}
    del end["ge"]  # it may not lie before schedule_offset
    for kind, own in (("optimizer", DEEPSPEED_OPTIMIZERS), ("scheduler", VALID_LR_SCHEDULES)):
        found[f"{kind}.type"] |= {"values": sorted(own), "enforced": False}  # other names are torch's
    found["zero_optimization.overlap_comm"] |= {"resolved": overlaps(), "by": "zero_optimization.stage"}
    old = {flag: change_of_zero(flag) for flag in (True, False)}
    found["zero_optimization"] |= {"deprecated": True, "becomes": {str(k).lower(): v for k, v in old.items()}}
    found["allgather_size"] |= {"deprecated": True, "becomes": {"*": "zero_optimization.allgather_bucket_size"}}
    found["amp"]["unknown"] = "passed to apex"
    found["bfloat16"] |= {"deprecated": True, "becomes": {"*": "bf16"}, "type": "section"}
    for path, entry in found.items():
        finish(path, entry, found)
    return dict(sorted(found.items()))


def finish(path: str, entry: dict, found: dict) -> None:
    """Say of a section what it does to strangers, and of a key that has no default that it is required."""
    null = "|null" * entry["type"].endswith("|null")
    if any(other.startswith(f"{path}.*") for other in found):
        entry["type"] = "object"
    elif any(other.startswith((f"{path}.", f"{path}[")) for other in found):
        entry["type"] = f"section{null}"
    if entry["type"] in ("section", "object"):
        entry.pop("default", None)
    elif "default" not in entry and "refused" not in entry:
        entry["required"] = True
    if entry["type"].startswith("section") and "unknown" not in entry and not path.endswith("r.params"):
        entry["unknown"] = unknown(path)
    entry["type"] = next((kind for end, kind in ENDS.items() if path.endswith(end)), entry["type"])
    entry.setdefault("source", next((file for part, file in SOURCES.items() if part in path), ""))
    assert entry["source"], path


def overlaps() -> dict[str, bool]:
    zero: Any = models()["zero_optimization"]
    return {str(stage): zero(stage=stage).overlap_comm for stage in range(4)}


def change_of_zero(flag: bool) -> dict:
    """Return the fields that differ from the defaults where the whole section is a truth value."""
    from deepspeed.runtime.zero.config import get_zero_config  # pyright: ignore[reportMissingImports]

    before, after = (get_zero_config(c).model_dump(mode="json") for c in ({}, {"zero_optimization": flag}))
    return {name: value for name, value in after.items() if value != before[name]}


def unknown(path: str) -> str:
    """Return what happens to a key of the section that nobody knows."""
    label, raw = path[: path.find("]") + 1], path
    if label:
        raw = path.partition("[")[0] + path.partition("]")[2]
    fits = [n for n in PROBES if isinstance(dict(leaves(PROBES[n])).get(raw), dict)]
    name = next((n for n in fits if label.endswith(n)), fits[0] if fits else "sections")
    return "ignored" if drives(altered(PROBES[name], f"{raw}.no_such_key", 1)) else "refused"


def batches() -> list[dict]:
    """Return the batch numbers that are made of what is given, for every size of the world."""
    grid = [(world, *given) for world, *given in product(range(1, 9), (None, 6, 8, 24), (None, 1, 2, 3), (None, 1, 2))]
    grid += [(2, 0, None, None), (2, -4, None, None), (2, None, 0, 1), (2, None, 2, 0), (2, 8, -2, -2), (2, 8, 0, None)]
    return [dict(zip(("world", *NUMBERS), case, strict=True)) | {"becomes": resolve(*case)} for case in grid]


def resolve(world: int, *given: int | None) -> list[int] | str:
    from deepspeed.runtime.config import DeepSpeedConfig  # pyright: ignore[reportMissingImports]

    with mock.patch("deepspeed.comm.get_world_size", return_value=world):
        try:
            config = DeepSpeedConfig({k: v for k, v in zip(NUMBERS, given, strict=True) if v is not None})
        except (AssertionError, ZeroDivisionError):
            return "refused"
    assert config.world_size == world
    return [getattr(config, name) for name in NUMBERS]


def main() -> None:
    """Write both files."""
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    with mock.patch("deepspeed.comm.get_rank", return_value=0):
        files = {
            "config_defaults": ("keys", [f"{json.dumps(p)}: {json.dumps(e)}" for p, e in entries().items()], "{}"),
            "config_batches": ("cases", [json.dumps(case) for case in batches()], "[]"),
        }
    for name, (title, rows, (opening, closing)) in files.items():
        inside = ",\n".join(rows)
        text = f'{{"versions": {json.dumps(versions)}, "{title}": {opening}\n{inside}\n{closing}}}\n'
        (HERE / f"{name}.json").write_text(text)
        print(f"{name}.json: {len(rows)} {title}")


if __name__ == "__main__":
    main()
