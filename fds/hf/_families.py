"""Families of models that are known: how their attention is called, and where they hold positions."""

from __future__ import annotations

import copy
from typing import Any

import attrs
from torch import nn

from fds.errors import ComposeError


@attrs.frozen
class Family:
    """What is known of the models of a family.

    Attributes:
        attention: the class of attention of a sequence to itself, by name.
        holder: the class that holds the table of positions; empty where there is none.
        table: under which name.
        after_padding: whether positions begin after the number of the padding token.
    """

    attention: str
    holder: str = ""
    table: str = "position_embeddings"
    after_padding: bool = False


FAMILIES = {
    "bert": Family("BertSelfAttention", "BertEmbeddings"),
    "roberta": Family("RobertaSelfAttention", "RobertaEmbeddings", after_padding=True),
    "gpt2": Family("GPT2Attention", "GPT2Model", "wpe"),
    "llama": Family("LlamaAttention"),
}


def family_of(model: Any, function: str) -> Family:
    """Return the family of a model. Raises `ComposeError` for what is no model of one that is known."""
    config = getattr(model, "config", None)
    family = FAMILIES.get(str(getattr(config, "model_type", None)))
    if not isinstance(model, nn.Module) or family is None:
        raise ComposeError(
            f"{function} knows no such model",
            where="model",
            got=f"{type(model).__name__}, model_type {getattr(config, 'model_type', None)!r:.40}",
            want=f"a model of transformers, of {', '.join(FAMILIES)}",
            hint="fds.nn.SparseSelfAttention in a model of your own" * (function == "sparsify"),
        )
    return family


def parts_of(model: nn.Module, name: str) -> list[tuple[str, Any]]:
    """Return paths and modules of a class of transformers, by its name."""
    return [(path, part) for path, part in model.named_modules() if type(part).__name__ == name]


def sharing_copy(model: Any) -> Any:
    """Return a copy of a model that shares parameters and buffers with it."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
