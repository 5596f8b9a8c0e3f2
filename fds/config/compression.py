"""`compression_training` as calls of fds, and what it needs of parameters: a student's layers, scores.

Source: `compression/basic_layer.py`, `compress.py` and `scheduler.py`, and `runtime/quantize.py` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from fds import tree
from fds.compression import scores
from fds.compression.masks import Block
from fds.compression.reduce_layers import reduce_layers
from fds.compression.scores import SUFFIXES, Of
from fds.config.function_call import FunctionCall
from fds.config.keys import Groups
from fds.config.modules import ROOT, Group, Parts, groups_of, guessed_of, patterns_of, with_related
from fds.errors import ConfigError, FdsError, StateError, is_a
from fds.transforms.quantize_weights import Factors

_COMPUTING = ("linear", "transposed", "convolution")
_WEIGHTS = (*_COMPUTING, "embedding")
_TECHNIQUES = (
    *("weight_quantization", "activation_quantization"),
    *("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"),
)


def asks_for_modules(config: Groups) -> str:
    """Return the path of a key that compresses modules of a model; "" where there is none."""
    techniques = ((key, getattr(config.compression_training, key)) for key in _TECHNIQUES)
    asking = (key for key, technique in techniques if technique.shared_parameters.enabled)
    return next((f"{ROOT}.{key}.shared_parameters.enabled" for key in asking), "")


def bits_fall(config: Groups) -> bool:
    """Say whether bits of weights fall as training goes on (MoQ)."""
    technique = config.compression_training.weight_quantization
    shared, groups = technique.shared_parameters, technique.different_groups.values()
    falling = any(group.params.start_bits != group.params.target_bits for group in groups)
    return shared.enabled and not shared.quantize_weight_in_forward and falling


def parts_of(config: Groups, model: Any, factors: Factors | None = None) -> Parts | None:
    """Return what groups may name in a module, or in `Layers`; None where nothing asks for it, and without a model.

    Raises `ConfigError` for factors that nothing takes, for what is no dict of them, and for those of no parameter.
    """
    if factors and not (tree.is_dict(factors) and bits_fall(config)):
        raise ConfigError(
            "factors are of weights whose bits fall",
            where=f"factors=, {ROOT}.weight_quantization",
            got=repr(factors)[:80],
            want='{"h.0.*": 0.5}, with start_bits above target_bits, and without quantize_weight_in_forward',
        )
    if model is None or not asks_for_modules(config):
        return None
    parts = Parts.of(model)
    for block in factors or {}:
        if not (is_a(block, str) and fnmatch.filter(parts.names, block)):
            raise ConfigError(
                "a factor is of no parameter",
                where="factors=",
                got=repr(block)[:80],
                want=f"a pattern of names: {tree.named(sorted(parts.names))}",
            )
    return attrs.evolve(parts, factors=factors or {})


def weight_quantization(config: Groups, model: Parts | None) -> Iterator[FunctionCall]:
    """Yield the calls that round weights, for each group one, and one for its embeddings."""
    technique = config.compression_training.weight_quantization
    shared = technique.shared_parameters
    if not shared.enabled:
        return
    check_signs(config, model)
    in_forward, mixed = shared.quantize_weight_in_forward, shared.fp16_mixed_quantize
    if not in_forward and not config.fp16.enabled:
        raise ConfigError(
            "weights are quantized where they are updated in float16 alone",
            where=f"{ROOT}.weight_quantization.shared_parameters.quantize_weight_in_forward, fp16.enabled",
            got="false and false",
            want="true in one of them",
        )
    for group in groups_of(technique, "weight_quantization", model, *_WEIGHTS):
        start, target, period = group.params.start_bits, group.params.target_bits, group.params.quantization_period
        falls = not in_forward and start != target
        if falls and period == 0:
            raise ConfigError(
                "bits would fall in each call",
                where=f"{group.path}.params.quantization_period",
                got="0, and start_bits above target_bits",
                want="1 or more calls for the first bit to go",
            )
        per_row = in_forward and model is not None  # of embeddings, as they compute; where updated all are cut alike
        kinds = _COMPUTING if per_row else _WEIGHTS
        cuts = [(group.weights(model, *kinds), shared.quantize_groups)]
        if per_row:
            cuts.append((group.weights(model, "embedding"), "rows"))
        for names, cut in cuts:
            if names:
                yield FunctionCall.of(
                    "quantize_weights",
                    *names,
                    bits=(start, target) if falls else target,
                    groups=None if cut == 1 else cut,
                    symmetric=shared.quantization_type == "symmetric",
                    rounding=shared.rounding,
                    offset=shared.schedule_offset,
                    period=period if falls else 1,
                    factors=_factors(names, model) if falls and model is not None else None,
                    mixing=mixed.quantize_change_ratio if mixed.enabled and not in_forward else None,
                )


def _factors(patterns: Sequence[str], model: Parts) -> dict[str, Any] | None:
    """Return the factors of weights that match these patterns, None for none."""
    weights = [name for pattern in patterns for name in fnmatch.filter(model.names, pattern)]
    number = lambda x: [*map(number, x)] if tree.is_sequence(x) else getattr(x, "normalized", x)
    return {block: number(x) for block, x in model.factors.items() if fnmatch.filter(weights, block)} or None


def activation_quantization(config: Groups, model: Parts | None) -> Iterator[FunctionCall]:
    """Yield the calls that round what modules are given."""
    technique = config.compression_training.activation_quantization
    shared = technique.shared_parameters
    if not shared.enabled:
        return
    for group in groups_of(technique, "activation_quantization", model, *_COMPUTING):
        slot = _slot("activation_ranges", group, technique) if shared.range_calibration == "static" else {}
        yield FunctionCall.of(
            "quantize_activations",
            group.paths(model, *_COMPUTING),
            bits=group.params.bits,
            symmetric=shared.quantization_type == "symmetric",
            range=shared.range_calibration,
            offset=shared.schedule_offset,
            **slot,
        )


def pruning(config: Groups, model: Parts | None, method: str) -> Iterator[FunctionCall]:
    """Yield the calls that prune by size, "l1", or by learned scores, "topk": masks of the first are of weights."""
    yield from _sparse(config, model, method)
    yield from _structured(config, model, method)


def _sparse(config: Groups, model: Parts | None, method: str) -> Iterator[FunctionCall]:
    """Yield the calls that make single weights zero."""
    technique = config.compression_training.sparse_pruning
    shared = technique.shared_parameters
    if not shared.enabled or shared.method != method:
        return
    for group in groups_of(technique, "sparse_pruning", model, *_COMPUTING):
        yield FunctionCall.of(
            "prune_weights",
            *group.weights(model, *_COMPUTING),
            method=method,
            density=group.params.dense_ratio,
            offset=shared.schedule_offset,
            initial=method == "l1",
            **_slot("pruned_weights", group, technique),
        )


def sums_scores(config: Groups) -> bool:
    """Say whether scores are summed, by an optimizer of their own."""
    shared = config.compression_training.sparse_pruning.shared_parameters
    return shared.enabled and shared.method == "snip_momentum"


_LEAST = 0.02  # share of a weight that stays at least: `max_sparsity_ratio_per_op` of neural_compressor 2.6


def by_sensitivity(config: Groups, model: Parts | None) -> Iterator[FunctionCall]:
    """Yield the call that makes blocks of weights zero by sums of weight times gradient (`snip_momentum`).

    Raises `ConfigError` for groups, for blocks that there are none of, and where no weight is made of them.
    """
    if not sums_scores(config):
        return
    technique = config.compression_training.sparse_pruning
    shared = technique.shared_parameters
    if technique.different_groups:
        raise ConfigError(
            "this method has no groups",
            where=f"{ROOT}.sparse_pruning.different_groups",
            got=", ".join(technique.different_groups),
            want="none: it takes all linear layers and convolutions but excluded_modules; or another method",
        )
    offset, stride, last = shared.schedule_offset, shared.schedule_offset_stride, shared.schedule_offset_end
    end = offset + ((offset if last is None else last) - offset) // stride * stride  # of the last mask
    several = {"end": end, "stride": stride, "curve": "exponential"} if end > offset else {}
    block = _block(shared.block_pattern)
    density = max(shared.dense_ratio, _LEAST)
    guessed = {} if model is not None else {"excluded": tuple(f"*{guessed_of(x)}*" for x in shared.excluded_modules)}
    yield FunctionCall.of(
        "prune_weights",
        *(("*.weight",) if model is None else patterns_of(_scored(config, model), model.names)),
        method=shared.method,
        block=shared.block_pattern,
        **({} if block.keep else {"scope": "global", "density": density, "least": _LEAST, **several}),
        offset=offset,
        **guessed,
    )


def _block(pattern: str) -> Block:
    try:
        return Block.parse(pattern)
    except FdsError as error:
        where = f"{ROOT}.sparse_pruning.shared_parameters.block_pattern"
        raise ConfigError(error.what, where=where, got=error.got, want=error.want) from None


def _scored(config: Groups, model: Parts) -> list[str]:
    """Return the names of weights that `snip_momentum` prunes: of all modules that compute, made of such blocks.

    Those of `excluded_modules` stay, and those of a last layer, a classifier's, as neural_compressor has it.
    """
    shared = config.compression_training.sparse_pruning.shared_parameters
    block = _block(shared.block_pattern)
    parts = [
        part
        for part in model.parts
        if part.kind in _COMPUTING
        and part.path != model.last
        and not any(_is_in(word, part.path) for word in shared.excluded_modules)
    ]
    names = [part.weight for part in parts if block.fits(part.shape)]
    if not names:
        raise ConfigError(
            "there is no weight to prune",
            where=f"{ROOT}.sparse_pruning.shared_parameters.block_pattern, excluded_modules",
            got=f"{shared.block_pattern!r}, and {len(parts)} modules that are not excluded, nor the last",
            want="a linear layer or a convolution whose weight is made of such blocks",
        )
    return names


def _is_in(word: str, path: str) -> bool:
    """Say whether a regular expression is in a path. Raises `ConfigError` for what is none."""
    try:
        return re.search(word, path) is not None
    except re.error as error:
        where = f"{ROOT}.sparse_pruning.shared_parameters.excluded_modules"
        raise ConfigError("not a regular expression", where=where, got=repr(word), want=f"one: {error}") from None


_STRUCTURES: dict[str, tuple[str, str, str, Of]] = {  # technique -> function, its slot, kind of module, of scores
    "row_pruning": ("prune_rows", "pruned_rows", "linear", "rows"),
    "head_pruning": ("prune_heads", "pruned_heads", "linear", "heads"),
    "channel_pruning": ("prune_channels", "pruned_channels", "convolution", "rows"),
}


def _structured(config: Groups, model: Parts | None, method: str) -> Iterator[FunctionCall]:
    """Yield the calls that make outputs of layers zero, and heads of attention, with what is related."""
    for key, (function, slot, kind, _) in _STRUCTURES.items():
        technique = config.compression_training[key]
        shared = technique.shared_parameters
        asked = shared.enabled and shared.method == method
        groups = groups_of(technique, key, model, kind) if asked else []
        sets = [(group, *names) for group in groups for names in with_related(group, model, kind)]
        for i, (group, weights, related) in enumerate(sets, 1):
            yield FunctionCall.of(
                function,
                *weights,
                **({"num_heads": shared.num_heads} if key == "head_pruning" else {}),
                density=group.params.dense_ratio,
                method=method,
                offset=shared.schedule_offset,
                initial=method == "l1",
                related=related,
                name=slot if len(sets) == 1 else f"{slot}_{i}",
            )


def with_scores(config: Groups, model: nn.Module) -> nn.Module:
    """Return a module with the scores that pruning learns; see `TrainingConfig.with_scores`."""
    parts, names = Parts.of(model), {name for name, _ in model.named_parameters()}
    learned: dict[str, tuple[tuple[str, ...], Of]] = {"sparse_pruning": (_COMPUTING, "weights")}
    learned |= {key: ((kind,), of) for key, (_, _, kind, of) in _STRUCTURES.items()}
    for key, (kinds, of) in learned.items():
        technique = config.compression_training[key]
        shared = technique.shared_parameters
        if not shared.enabled or shared.method != "topk":
            continue
        heads = {"num_heads": shared.num_heads} if key == "head_pruning" else {}
        weights = [part.weight for group in groups_of(technique, key, parts, *kinds) for part in group.parts or ()]
        if missing := [glob.escape(name) for name in weights if name + SUFFIXES[of] not in names]:
            model = scores.with_scores(model, *missing, of=of, **heads)
    if sums_scores(config):
        summed = [glob.escape(name) for name in _scored(config, parts) if name + SUFFIXES["weights"] not in names]
        model = scores.with_scores(model, *summed, zeros=True) if summed else model
    return model


def check_signs(config: Groups, model: Parts | None) -> None:
    """Raise `ConfigError` for weights that are made zero by size and then rounded to a sign, or a grid without zero."""
    asked = config.compression_training
    if model is None:
        return
    pruned: dict[str, str] = {}
    kinds = {"sparse_pruning": _COMPUTING} | {key: (kind,) for key, (_, _, kind, _) in _STRUCTURES.items()}
    for key, of in kinds.items():
        shared = asked[key].shared_parameters
        groups = groups_of(asked[key], key, model, *of) if shared.enabled and shared.method == "l1" else []
        pruned |= {part.weight: group.path for group in groups for part in group.parts or ()}
    shifted = asked.weight_quantization.shared_parameters.quantization_type != "symmetric"
    for group in groups_of(asked.weight_quantization, "weight_quantization", model, *_WEIGHTS):
        lost = shifted or group.params.target_bits == 1
        both = [part for part in group.parts or () if part.weight in pruned and lost]
        if both:
            raise ConfigError(
                "a weight of a shifted grid may have no zero" if shifted else "a weight of one bit is never zero",
                where=f"{group.path}.params.target_bits, {pruned[both[0].weight]}",
                got=f"{'asymmetric' if shifted else 1}, and pruning by size, of {both[0].path}",
                want='2 bits or more, symmetric, which have a zero, "topk", or other modules',
            )


def _slot(usual: str, group: Group, technique: Any) -> dict[str, str]:
    """Return a name of a group's slot, where there are several groups."""
    several = len(technique.different_groups) > 1
    return {"name": f"{usual}_{re.sub(r'[^a-zA-Z0-9_]', '_', group.name)}"} if several else {}


def student_of(config: Groups, params: Mapping[str, Tensor], student: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the parameters of a student that begins with layers of a teacher: see `TrainingConfig.reduce_layers`."""
    asked = config.compression_training.layer_reduction
    if not asked.enabled:
        return dict(params if student is None else student)
    where = f"{ROOT}.layer_reduction"
    if asked.teacher_layer is None or asked.module_name_prefix is None:
        missing = "teacher_layer" if asked.teacher_layer is None else "module_name_prefix"
        raise ConfigError("nobody knows which layers are kept", where=f"{where}.{missing}", got="null", want="a value")
    try:
        reduced = reduce_layers(params, asked.teacher_layer, prefix=glob.escape(asked.module_name_prefix))
    except StateError as error:
        raise ConfigError(
            error.what, where=f"{where}.teacher_layer, module_name_prefix", got=error.got, want=error.want
        ) from None
    if student is None:
        return reduced
    copied = tuple(f"{path}." for path in (asked.module_name_prefix, *(asked.other_module_name or ())))
    begun = {name: reduced.get(name, x) if name.startswith(copied) else x for name, x in student.items()}
    for name, x in student.items():
        if begun[name].shape != x.shape or (name.startswith(copied) and name not in reduced):
            raise ConfigError(
                "the student is not one of this teacher",
                where=f"{where}, {name}",
                got=f"{tuple(x.shape)}" + ("" if name in reduced else ", and the teacher has no such parameter"),
                want=f"{tuple(begun[name].shape)}, as the teacher has",
            )
    return {name: x.detach().clone() for name, x in begun.items()}
