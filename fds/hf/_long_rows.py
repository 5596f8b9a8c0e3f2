"""Models of transformers of whose rows each rank has a part: their attention, what they are given, and their loss.

An implementation named `fds_parts` is registered, of attention and of its masks. The modules of attention say by an
attribute of their own which ranks share their rows, so that models of one process may have different ones.

Sources: Jacobs et al. 2023, arXiv:2309.14509; Bekman et al. 2025, arXiv:2506.13996.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from fds.collectives import Axis
from fds.errors import ComposeError, KernelError, LossError, Rule, instance, is_a, is_int
from fds.hf._families import parts_of, sharing_copy
from fds.hf._lazy import LazyModel
from fds.kernels import linear_cross_entropy
from fds.loss import Mean, functional
from fds.nn import allow_mixing, attention, zigzag
from fds.nn.parallel.attention import METHODS, Method
from fds.nn.parallel.zigzag import LAYOUTS, Layout

NAME = "fds_parts"  # of the implementation
_SHARED = "fds_shared_rows"  # of the attribute
IGNORED = -100  # a target that is none
# causal models whose loss is that of a linear head of their last hidden state, and the class of their attention
FAMILIES = {
    "gpt2": "GPT2Attention",
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
}
_GIVEN = ("input_ids", "labels", "attention_mask", "position_ids", "documents")
_RULES = {
    "axis": instance(Axis, ": {name} is not an axis", 'fds.mesh(sp=-1)["sp"]'),
    "method": Rule(tuple(METHODS).__contains__, ": no such {name}", " or ".join(map(repr, METHODS))),
    "layout": Rule(LAYOUTS.__contains__, ": no such {name}", " or ".join(map(repr, LAYOUTS))),
    "chunk_tokens": Rule(lambda x: is_int(x, 1), ": {name} counts tokens", "an int >= 1").or_none(),
}


@attrs.frozen(eq=False)
class SharedRows:
    """What a model is told: which ranks have parts of its rows, and in which way they attend to each other's."""

    axis: Axis
    method: Method
    layout: Layout
    chunk_tokens: int | None


def context_parallel(
    model: Any, axis: Axis, *, method: Method = "ulysses", layout: Layout = "contiguous",
    chunk_tokens: int | None = None,
) -> Any:  # fmt: skip
    """Return a copy of a causal model of transformers, of whose rows each rank of an axis has a part.

    Weights and their names are shared with the model, which stays as it is. `fds.context_parallel(axis, layout=)` in
    the composition belongs to it, and `fds.hf.part` makes what its calls take::

        model(input_ids, position_ids, shift_labels, documents, attention_mask) -> fds.Mean, the loss of the model

    All are (B, S/N); the first two are needed. The loss is that of all of the row's tokens, of which the head's logits
    are made `chunk_tokens` at a time. Without `shift_labels` it returns what the model returns for this rank's tokens.

    Attention is `fds.nn.attention`: causal, with the model's groups of heads and windows, in each of `documents` alone,
    without keys that `attention_mask` hides. On an axis of one rank it is the same.

    Args:
        model: of Llama, Mistral, Qwen2, Qwen3 or GPT-2, `...ForCausalLM` or `GPT2LMHeadModel`, or what `fds.hf.lazy`
            returns of one.
        axis: of `fds.mesh`, N ranks in the order of their parts.
        method: "ulysses", for which N divides the heads, or "ring".
        layout: as `fds.context_parallel` and `fds.hf.part` are told.
        chunk_tokens: as of `fds.kernels.linear_cross_entropy`, by default chosen from the number of tokens.

    Raises `ComposeError` for other models and arguments, heads that N does not divide, and what parts of rows cannot
    have: dropout of attention, positions that are scaled by the length of a row, cross-attention.
    """
    for name, value in (("axis", axis), ("method", method), ("layout", layout), ("chunk_tokens", chunk_tokens)):
        _RULES[name].check("hf.context_parallel", name, value, ComposeError)
    axis.check_current()
    if is_a(model, LazyModel):
        module = context_parallel(model.module, axis, method=method, layout=layout, chunk_tokens=chunk_tokens)
        return attrs.evolve(model, module=module, apply=functional(module)[0])
    config = getattr(model, "config", None)
    kind = FAMILIES.get(str(getattr(config, "model_type", None)))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(model, nn.Module) or kind is None or not isinstance(head, nn.Linear):
        raise ComposeError(
            "hf.context_parallel knows no such model",
            where="model",
            got=f"{type(model).__name__}, model_type {getattr(config, 'model_type', None)!r:.40}",
            want=f"a causal language model of transformers, of {', '.join(FAMILIES)}",
            hint="another model's attention: fds.nn.attention(..., axis=axis), registered with AttentionInterface",
        )
    _check(config, axis, method)
    _register()
    copied = sharing_copy(model)
    copied.set_attn_implementation(NAME)
    modules = [part for _, part in parts_of(copied, kind)]
    shared = SharedRows(axis, method, layout, chunk_tokens)
    for part in (copied, *modules):
        setattr(part, _SHARED, shared)
    copied.__class__ = _class(type(model))
    return copied


def part(batch: Mapping[str, Tensor], axis: Axis, *, layout: Layout = "contiguous") -> dict[str, Any]:
    """Return this rank's part of a batch of whole rows, as a model of `fds.hf.context_parallel` takes it.

    Targets are shifted before rows are cut, so that the last token of a part predicts the first of the next one; none
    of them crosses from one document into another. Rows are filled up at their end to a length that the ranks divide.

    Args:
        batch: `input_ids` (B, S) int64, and if need be, of the same shape: `labels` int64, not shifted, -100 where
            nothing is learned, by default `input_ids`; `attention_mask` of ones and zeros, or bool; `position_ids`;
            `documents`, integers. Positions that begin anew say where documents begin, and documents where positions
            do, where only one of both is given; without a mask, as transformers has it.
        axis: of `fds.mesh`.
        layout: "contiguous", or "zigzag".

    Returns `input_ids`, `position_ids`, `shift_labels`, and `attention_mask` and `documents` where there are any, each
    (B, S/N); and as `cut` whose part it is, which the model compares with what it was told. Raises `LossError` for
    other tensors; `ComposeError` for other arguments.
    """
    for name, value in (("axis", axis), ("layout", layout)):
        _RULES[name].check("hf.part", name, value, ComposeError)
    batch = _checked(batch)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    rows, length = ids.shape
    positions, documents = batch.get("position_ids"), batch.get("documents")
    labels = batch.get("labels", ids)
    if mask is not None:
        mask = mask.bool()
        labels = labels if "labels" in batch else labels.masked_fill(~mask, IGNORED)
    count = torch.arange(length, device=ids.device).expand(rows, -1)
    if positions is not None and documents is None and mask is None:
        begins = positions.diff(dim=1) != 1
        documents = nn.functional.pad(begins, (1, 0)).cumsum(1) if bool(begins.any()) else None
    if positions is None and documents is not None:
        begins = nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
        positions = count - torch.where(begins, count, 0).cummax(1).values
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if documents is not None:
        targets[:, :-1].masked_fill_(documents.diff(dim=1) != 0, IGNORED)
    out = {"input_ids": ids, "position_ids": count if positions is None else positions, "shift_labels": targets}
    out |= {} if mask is None else {"attention_mask": mask}
    out |= {} if documents is None else {"documents": documents}
    more = -length % (axis.size * (1 + (layout == "zigzag")))
    fill = {"shift_labels": IGNORED}
    cut: dict[str, Any] = {"cut": _cut(axis, layout)}
    for name, x in out.items():
        whole = nn.functional.pad(x, (0, more), value=fill.get(name, 0)) if more else x
        if more and name == "position_ids":  # the last one again, which tables of positions have
            whole[:, length:] = x[:, -1:]
        if more and name == "documents":  # another one's, as an int64: a fill value passes through float64
            whole[:, length:] = x.max() + 1
        piece = zigzag(whole, axis) if layout == "zigzag" else whole.chunk(axis.size, 1)[axis.index]
        cut[name] = piece.contiguous()
    return cut


def _cut(axis: Axis, layout: Layout) -> str:
    """Say whose part of a row it is."""
    return f"part {axis.index} of {axis.size}" + f", {layout}" * (axis.size > 1)


def _checked(batch: Any) -> dict[str, Tensor]:
    """Return a batch, in int64. Raises `LossError` for what is no batch of whole rows."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or (others := batch.keys() - set(_GIVEN)):
        got = f"{', '.join(sorted(map(str, others)))}" if isinstance(batch, Mapping) and "input_ids" in batch else ""
        want = f"a dict with input_ids, and of {', '.join(_GIVEN[1:])}"
        hint = "tokens of documents that fds.data.packed returns are input_ids" * ("tokens" in got)
        raise LossError(
            "hf.part takes whole rows", where="batch", got=got or type(batch).__name__, want=want, hint=hint
        )
    ids: Any = batch["input_ids"]
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else ()
    for name, x in cast("Mapping[str, Any]", batch).items():
        is_whole = isinstance(x, Tensor) and len(shape) == 2 and tuple(x.shape) == shape and x.numel() > 0
        is_whole = is_whole and not (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided
        if not is_whole or (name != "attention_mask" and x.dtype == torch.bool):
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            want = "(B, S) integers" if not shape or name == "input_ids" else f"{shape} integers, as input_ids"
            raise LossError("hf.part takes whole rows", where=f"batch[{name!r}]", got=got, want=want)
    return {name: x.long() for name, x in batch.items()}


def _check(config: Any, axis: Axis, method: Method) -> None:
    """Raise `ComposeError` for what a configuration asks for and parts of rows cannot have."""
    refused = {
        name: getattr(config, name)
        for name in ("add_cross_attention", "output_attentions", "output_hidden_states", "is_encoder_decoder")
        if getattr(config, name, False)
    }
    if getattr(config, "is_causal", True) is False:
        refused["is_causal"] = False
    if axis.size > 1:
        refused |= {n: getattr(config, n) for n in ("attention_dropout", "attn_pdrop") if getattr(config, n, 0)}
        rope = getattr(config, "rope_parameters", None) or {}
        if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
            refused["rope_type"] = kind
        heads = config.num_attention_heads
        if method == "ulysses" and heads % axis.size:
            raise ComposeError(
                "each rank computes as many heads",
                where="hf.context_parallel",
                got=f"{heads} heads on {axis.size} ranks",
                want=f"a multiple of {axis.size} heads",
                hint='method="ring"',
            )
    for name, value in refused.items():
        raise ComposeError(
            "parts of rows cannot have what a model's configuration asks for",
            where=f"config.{name}",
            got=repr(value),
            want="default, linear, llama3 or yarn" if name == "rope_type" else f"config.{name} = {_WITHOUT.get(name)}",
        )


_WITHOUT = {"attention_dropout": 0.0, "attn_pdrop": 0.0, "is_causal": True, **dict.fromkeys(
    ("add_cross_attention", "output_attentions", "output_hidden_states", "is_encoder_decoder"), False)}  # fmt: skip


@functools.cache
def _class(base: type) -> type:
    """Return the class of a copy: a model of rows of which it is given a part."""

    def forward(
        self: Any, input_ids: Any = None, position_ids: Any = None, shift_labels: Any = None, documents: Any = None,
        attention_mask: Any = None, cut: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        shared: SharedRows = getattr(self, _SHARED)
        if cut not in (None, want := _cut(shared.axis, shared.layout)):
            raise LossError("a model is given another part of rows", where="hf.context_parallel", got=str(cut)[:80],
                            want=want, hint="fds.hf.part with the axis and layout of the model")  # fmt: skip
        _check_call(shared, input_ids, position_ids, shift_labels, documents, attention_mask, others)
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        arguments |= {"use_cache": False} | ({} if documents is None else {"documents": documents})
        if shift_labels is None:
            return base.forward(self, **arguments)  # pyright: ignore[reportAttributeAccessIssue]
        head = self.get_output_embeddings()
        if type(head) is not nn.Linear or "forward" in vars(head):
            raise LossError(
                "the head is computed in another way than by its weight, which the loss in chunks takes",
                where="hf.context_parallel",
                got=f"{type(head).__name__}, changed by a transform",
                want="patterns that leave the head as it is",
            )
        hidden = self.base_model(**arguments).last_hidden_state
        total = linear_cross_entropy(
            hidden, head.weight, shift_labels, head.bias, reduction="sum", chunk_tokens=shared.chunk_tokens,
            ignore_index=IGNORED,
        )  # fmt: skip
        return Mean(total, (shift_labels != IGNORED).sum())

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__})


def _check_call(
    shared: SharedRows, ids: Any, positions: Any, labels: Any, documents: Any, mask: Any, others: dict[str, Any]
) -> None:
    """Raise `LossError` for what `part` does not make."""
    where, hint = "hf.context_parallel", "model(**fds.hf.part(batch, axis, layout=...))"
    others = {name: x for name, x in others.items() if x is not None}
    if others:
        got = ", ".join(others)
        want = "labels that are shifted before rows are cut: shift_labels" if "labels" in others else "none of it"
        raise LossError("a model of parts of rows is given something else", where=where, got=got, want=want, hint=hint)
    arguments = {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "documents": documents}
    for name, x in (arguments | {"attention_mask": mask}).items():
        is_part = isinstance(x, Tensor) and isinstance(ids, Tensor) and x.shape == ids.shape and x.dim() == 2
        if not is_part and not (x is None and name not in ("input_ids", "position_ids")):
            got = f"{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            want = "(B, S/N), as input_ids" + ", of the places in whole rows" * (name == "position_ids")
            raise LossError("a model of parts of rows lacks something", where=f"{where}: {name}", got=got, want=want,
                            hint=hint)  # fmt: skip
    if mask is not None and mask.dtype != torch.bool:
        raise LossError("a mask of keys is not boolean", where=where, got=str(mask.dtype), want="bool", hint=hint)
    if documents is None and not torch.compiler.is_compiling() and positions.device.type == "cpu":
        chunks = positions.chunk(2, 1) if shared.layout == "zigzag" and shared.axis.size > 1 else (positions,)
        with allow_mixing():  # of what is looked at alone
            steps = [chunk.diff(dim=1) for chunk in chunks]
        begins = mask is None and any(bool(((x != 1) & (x != 0)).any()) for x in steps)
        if begins:
            raise LossError(
                "positions begin anew in a row, and nothing says that documents do",
                where=where,
                got="position_ids without documents, or of another layout",
                want=f"documents, and layout={shared.layout!r}",
                hint=hint,
            )


def _register() -> None:
    try:
        interface = importlib.import_module("transformers").AttentionInterface
        masks = importlib.import_module("transformers.masking_utils").AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        want = "transformers 4.53 or later"
        raise ComposeError(
            "attention cannot be registered", where="hf.context_parallel", got=str(error), want=want
        ) from error
    interface.register(NAME, attend)
    masks.register(NAME, mask_of)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, documents: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention (B, S/N, H, D) of this rank's queries to the keys of all ranks, as transformers calls it.

    Raises `KernelError` for what is not computed.
    """
    shared: SharedRows | None = getattr(module, _SHARED, None)
    if shared is None:
        raise KernelError(
            "a module of attention was not told which ranks share its rows",
            where=f"{type(module).__name__}, attn_implementation={NAME!r}",
            want="a model that fds.hf.context_parallel(model, axis) returns",
        )
    refused = [name for name in ("output_attentions", "position_bias", "softcap", "s_aux") if options.get(name)]
    if attention_mask is not None and attention_mask.dim() != 2:
        refused.append(f"a mask {tuple(attention_mask.shape)}")
    if query.shape[2] != key.shape[2]:
        refused.append("a cache of keys")
    if refused or options.get("is_causal") is False:
        got = ", ".join(refused) or "is_causal=False"
        raise KernelError("attention over parts of rows has no such thing", where=type(module).__name__, got=got)
    seed = torch.randint(2**62, (), device=query.device) if dropout else None
    window = None if sliding_window is None or sliding_window >= query.shape[2] * shared.axis.size else sliding_window
    out = attention(
        query, key, value, axis=shared.axis, method=shared.method, layout=shared.layout, causal=True,
        key_padding=attention_mask, documents=documents, window=window, scale=scaling, p=dropout, seed=seed,
    )  # fmt: skip
    return out.transpose(1, 2), None


def mask_of(*_: Any, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """Return which keys of this rank are no padding, (B, S/N) bool, or None: `attend` knows the rest."""
    return attention_mask
