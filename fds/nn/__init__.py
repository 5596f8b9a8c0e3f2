"""Layers built from the kernels."""

from fds.nn.bert_weights import from_bert
from fds.nn.transformer_config import TransformerConfig
from fds.nn.transformer_layer import TransformerLayer

__all__ = ["TransformerConfig", "TransformerLayer", "from_bert"]
