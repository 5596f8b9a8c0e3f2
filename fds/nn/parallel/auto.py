"""Plans that are found by the structure of a module: torch's own layers, and models of Hugging Face's transformers.

transformers itself is never imported. A class of a model that has parameters and stands in no row here is refused, so
that a family that changes, or one that looks like another, is never divided by what was true of something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from torch import nn

from fds.errors import ComposeError, LossError, is_a
from fds.nn.parallel.plan import Column, Heads, Part, Row, Sequence as Block, Vocab, Whole, consecutive, drops, wrap
from fds.nn.parallel.region import Region

Rule = Callable[[Any], dict[str, Part]]  # what a module says of its submodules, by their paths in it

_LLAMA_LIKE = ("Llama", "Mistral", "Qwen2", "Qwen3")
_BERT_LIKE = ("Bert", "Roberta")


@attrs.frozen
class Holder(Part):
    """Said of a module that has a parameter of a submodule by another name, and computes nothing with it."""


@attrs.frozen
class Model(Part):
    """Said of a model, which is asked for nothing that a rank has but pieces of."""

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Have the copy refuse such requests."""
        wrap(module, functools.partial(_whole_outputs, region, getattr(module, "config", None)))


def _parts(root: nn.Module, path: str, module: nn.Module) -> dict[str, Part]:
    """Return what is divided of a module by itself and its submodules, by paths in the root.

    Raises `ComposeError` for one of transformers that has no rule here.
    """
    of_models = [cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models.")]
    is_model = any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)
    if not of_models and not is_model:
        return {}
    family = of_models[0].__module__.split(".")[2] if of_models else ""
    if family not in FAMILIES:
        raise _unknown(root, path, module, "a model of no family that is known")
    at = f"{path}." if path else ""
    if is_model:
        return {path: Model()} | _vocabularies(root, module)
    name = type(module).__name__
    if of_models[0] is not type(module) or (name not in RULES and any(True for _ in module.parameters())):
        raise _unknown(root, path, module, "a part of a model of which nothing is known")
    _check_attention(path, module)
    parts = RULES[name](module) if name in RULES else {}
    return {f"{at}{relative}".rstrip("."): part for relative, part in parts.items()}


def _vocabularies(root: nn.Module, model: Any) -> dict[str, Part]:
    """Return embeddings and heads, as the model names them."""
    ends: Iterable[Any] = (model.get_input_embeddings(), model.get_output_embeddings())
    wanted = {id(module) for module in ends if type(module) in (nn.Embedding, nn.Linear)}
    return {path: Vocab() for path, module in root.named_modules() if id(module) in wanted}


def _gpt2_attention(module: Any) -> dict[str, Part]:
    cross = module.is_cross_attention
    parts: dict[str, Part] = {"": Heads(("num_heads", "split_size"), cross=cross), "c_proj": Row()}
    fused = {"q_attn": Column(), "c_attn": Column(2)} if cross else {"c_attn": Column(3)}
    return parts | fused


def _bert_attention(module: Any) -> dict[str, Part]:
    attention = Heads(("num_attention_heads", "all_head_size"), cross=module.is_cross_attention)
    projections = {f"self.{name}": Column() for name in ("query", "key", "value")}
    return {"self": attention, **projections, "output.dense": Row()}


def _llama_attention(module: Any) -> dict[str, Part]:
    parts: dict[str, Part] = {"": Heads(), "o_proj": Row()}
    parts |= {f"{x}_proj": Column(unit=module.head_dim) for x in "qkv"}
    return parts | {name: Whole("sum") for name in ("q_norm", "k_norm") if hasattr(module, name)}


def _t5_attention(module: Any, *, cross: bool = False) -> dict[str, Part]:
    parts: dict[str, Part] = {"": Heads(("n_heads", "inner_dim"), cross=cross), "o": Row()}
    parts |= {x: Column() for x in "qkv"}
    return parts | ({"relative_attention_bias": Column()} if module.has_relative_attention_bias else {})


def _t5_cross_attention(module: Any) -> dict[str, Part]:
    parts = _t5_attention(module.EncDecAttention, cross=True)
    return {f"EncDecAttention.{path}".rstrip("."): part for path, part in parts.items()}


def _rule_of(**parts: Part) -> Rule:
    return lambda module: {name.replace("__", "."): part for name, part in parts.items()}


def _block(module: Any) -> dict[str, Part]:
    return {"": Block()}


def _whole(module: Any) -> dict[str, Part]:
    return {}


def _bert_layer(module: Any) -> dict[str, Part]:
    return {"": Block(), "intermediate.dense": Column(), "output.dense": Row()}


def _head_with_bias(module: Any) -> dict[str, Part]:
    return {"": Holder()}


_GPT2: dict[str, Rule] = {
    "GPT2Block": _block,
    "GPT2Attention": _gpt2_attention,
    "GPT2MLP": _rule_of(c_fc=Column(), c_proj=Row()),
    "GPT2SequenceSummary": _whole,
}
_BERT: dict[str, Rule] = {
    "Embeddings": _whole,
    "Encoder": _whole,
    "Layer": _bert_layer,
    "Attention": _bert_attention,
    "SelfAttention": _whole,  # said by the one around it
    "CrossAttention": _whole,
    "SelfOutput": _whole,
    "Intermediate": _whole,
    "Output": _whole,
    "Pooler": _whole,
    "PredictionHeadTransform": _whole,
    "LMPredictionHead": _head_with_bias,
    "OnlyMLMHead": _whole,
    "OnlyNSPHead": _whole,
    "PreTrainingHeads": _whole,
    "LMHead": _head_with_bias,
    "ClassificationHead": _whole,
}
_LLAMA: dict[str, Rule] = {
    "DecoderLayer": _block,
    "Attention": _llama_attention,
    "MLP": _rule_of(gate_proj=Column(), up_proj=Column(), down_proj=Row()),
    "RMSNorm": _whole,
}
_T5: dict[str, Rule] = {
    "T5Block": _block,
    "T5LayerSelfAttention": lambda module: {},
    "T5LayerCrossAttention": _t5_cross_attention,
    "T5Attention": _t5_attention,
    "T5LayerFF": _whole,
    "T5DenseActDense": _rule_of(wi=Column(), wo=Row()),
    "T5DenseGatedActDense": _rule_of(wi_0=Column(), wi_1=Column(), wo=Row()),
    "T5LayerNorm": _whole,
    "T5ClassificationHead": _whole,
}
RULES: dict[str, Rule] = {
    **_GPT2,
    **{f"{family}{name}": rule for family in _BERT_LIKE for name, rule in _BERT.items()},
    **{f"{family}{name}": rule for family in _LLAMA_LIKE for name, rule in _LLAMA.items()},
    **_T5,
}
FAMILIES = ("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3", "roberta", "t5")


def _check_attention(path: str, module: Any) -> None:
    """Raise `ComposeError` for attention that draws where it cannot be told what one rank would draw."""
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if kind in (None, "eager", "sdpa") or "Attention" not in type(module).__name__ or not drops(module):
        return
    raise ComposeError(
        "this attention draws its dropout itself, which would be another on several ranks",
        where=f"tensor_parallel: {path}",
        got=f"attn_implementation={kind!r}, with dropout",
        want="no dropout of attention, or attn_implementation='sdpa'",
    )


def _whole_outputs(region: Region, config: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name, pieces in (("output_attentions", True), ("output_hidden_states", region.blocks)):
        asked = kwargs.get(name)
        if pieces and (getattr(config, name, False) if asked is None else asked):
            raise LossError(
                "every rank has but a piece of this",
                where="tensor_parallel",
                got=f"{name}=True",
                want=f"{name}=False",
                hint="" if name == "output_attentions" else "or tensor_parallel(..., sequence=False)",
            )
    return forward(*args, **kwargs)


def _unknown(root: nn.Module, path: str, module: nn.Module, what: str) -> ComposeError:
    return ComposeError(
        f"tensor_parallel finds {what}",
        where=f"plan='auto': {path or type(root).__name__}",
        got=f"{type(module).__module__}.{type(module).__qualname__}",
        want=f"one of transformers' {', '.join(FAMILIES)}, or a plan of your own",
        hint='{"*.q_proj": "column", "*.o_proj": "row", "*.self_attn": fds.nn.heads(), ...}; fds.nn.auto_plan(module) '
        "of a model that is known shows one",
    )


def auto_plan(module: nn.Module) -> dict[str, Part]:
    """Return what `fds.tensor_parallel(axis, "auto")` divides of a module: a plan, to be read and changed.

    It maps paths of submodules to what `fds.nn.column`, `row`, `vocab`, `heads`, `replicated` and `sequence` return.
    Everything else is whole on every rank. Known are `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and
    `nn.TransformerDecoderLayer`, and of transformers GPT-2, BERT, RoBERTa, Llama, Mistral, Qwen2, Qwen3 and T5.

    Raises `ComposeError` for modules of transformers that are not known, and for what is not a module.
    """
    if not is_a(module, nn.Module):
        raise ComposeError("auto_plan takes a module", where="module", got=repr(module)[:80], want="an nn.Module")
    plan: dict[str, Part] = {}
    blocks: list[str] = []
    for path, child in module.named_modules():
        at = f"{path}." if path else ""
        if type(child) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            plan |= {f"{at}linear1": Column(), f"{at}linear2": Row(), path: Block()}
        if type(child) is nn.TransformerDecoderLayer:
            plan[f"{at}multihead_attn"] = Heads(cross=True)
        if type(child) in (nn.TransformerEncoder, nn.TransformerDecoder):
            blocks += [f"{at}layers.{i}" for i in range(child.num_layers)]  # pyright: ignore[reportArgumentType]
        if type(child) is nn.MultiheadAttention:
            plan.setdefault(path, Heads())
        of_family = _parts(module, path, child)
        blocks += [path for path, part in of_family.items() if isinstance(part, Block)]
        plan = of_family | plan  # what a module says of a submodule stands
    return plan | {path: block for path, block in consecutive(blocks).items() if isinstance(plan.get(path), Block)}


def unknown(modules: Iterable[nn.Module]) -> ComposeError:
    """Return the error for modules of which nothing is known."""
    return ComposeError(
        "tensor_parallel knows no plan for this",
        where="plan='auto'",
        got=", ".join(type(module).__name__ for module in modules)[:120],
        want='{"blocks.*.up": "column", "blocks.*.down": "row"}',
    )
