"""The key `sparse_attention`: which model a step trains, of the one that `fds.initialize` is given."""

from __future__ import annotations

from typing import Any

from torch import nn

from fds.collectives import Mesh
from fds.config.keys import Groups
from fds.errors import ComposeError, ConfigError
from fds.hf import is_sparse, sparsify
from fds.loss import Layers, modules_of
from fds.nn import SparseSelfAttention


def sparse_model(config: Groups, model: Any, mesh: Mesh) -> Any:
    """Return a model whose attention computes the blocks of the key `sparse_attention`, or the model as it is.

    That is a sparse copy of a model of transformers, which shares its weights. A model of the user's own that has
    sparse attention stays as it is, as any model does without the key, and with the mode "dense".

    Raises `ConfigError` for a model of which nobody knows how its attention is computed.
    """
    asked = config.sparse_attention
    if asked is None or asked.mode == "dense":
        return model
    modules = [x.module for x in modules_of(model)] if isinstance(model, Layers) else [model]
    if any(_has_sparse_attention(module) for module in modules if isinstance(module, nn.Module)):
        return model
    axis = mesh["sp"] if mesh.shape.get("sp", 1) > 1 else None
    try:
        return sparsify(model, asked, axis=axis)
    except ComposeError as error:
        raise ConfigError(
            "nobody knows where the attention of this model is, that is to be sparse",
            where="sparse_attention",
            got=error.got,
            want=error.want,
            hint="a model with fds.nn.SparseSelfAttention(config.sparse_attention) in it",
        ) from error


def _has_sparse_attention(module: nn.Module) -> bool:
    return is_sparse(module) or any(isinstance(part, SparseSelfAttention) for part in module.modules())
