"""Layers built from the kernels, and layers and functions of which the ranks of an axis compute parts."""

from fds.nn.bert_weights import from_bert
from fds.nn.parallel.attention import attention
from fds.nn.parallel.auto import auto_plan
from fds.nn.parallel.embedding import VocabEmbedding
from fds.nn.parallel.linear import ColumnLinear, RowLinear
from fds.nn.parallel.linear_cross_entropy import linear_cross_entropy
from fds.nn.parallel.mixing import allow_mixing
from fds.nn.parallel.mlp import MLP
from fds.nn.parallel.plan import column, heads, replicated, row, sequence, vocab
from fds.nn.parallel.self_attention import SelfAttention
from fds.nn.parallel.split import split
from fds.nn.parallel.vocab_cross_entropy import vocab_cross_entropy
from fds.nn.parallel.zigzag import zigzag, zigzag_positions
from fds.nn.transformer_config import TransformerConfig
from fds.nn.transformer_layer import TransformerLayer

__all__ = [
    "MLP",
    "ColumnLinear",
    "RowLinear",
    "SelfAttention",
    "TransformerConfig",
    "TransformerLayer",
    "VocabEmbedding",
    "allow_mixing",
    "attention",
    "auto_plan",
    "column",
    "from_bert",
    "heads",
    "linear_cross_entropy",
    "replicated",
    "row",
    "sequence",
    "split",
    "vocab",
    "vocab_cross_entropy",
    "zigzag",
    "zigzag_positions",
]
