"""Layers built from the kernels, and layers and functions of which the ranks of an axis compute parts."""

from fds.nn._log_probs import log_probs
from fds.nn.block_padding import pad_to_block, unpad
from fds.nn.block_select_attention import BlockSelectAttention
from fds.nn.parallel.attention import attention, document_mask
from fds.nn.parallel.auto import auto_plan
from fds.nn.parallel.cross_entropy import linear_cross_entropy, vocab_cross_entropy
from fds.nn.parallel.layers import MLP, SelfAttention
from fds.nn.parallel.linear import ColumnLinear, RowLinear, VocabEmbedding
from fds.nn.parallel.mixing import allow_mixing
from fds.nn.parallel.plan import column, heads, replicated, row, sequence, vocab
from fds.nn.parallel.sparse_attention import sparse_attention
from fds.nn.parallel.split import split
from fds.nn.parallel.zigzag import zigzag, zigzag_positions
from fds.nn.sparse_self_attention import BertSparseSelfAttention, SparseSelfAttention
from fds.nn.transformer_config import TransformerConfig
from fds.nn.transformer_layer import TransformerLayer, from_bert

__all__ = [
    "MLP", "BertSparseSelfAttention", "BlockSelectAttention", "ColumnLinear", "RowLinear", "SelfAttention",
    "SparseSelfAttention", "TransformerConfig", "TransformerLayer", "VocabEmbedding", "allow_mixing", "attention",
    "auto_plan", "column", "document_mask", "from_bert", "heads", "linear_cross_entropy", "log_probs",
    "pad_to_block", "replicated", "row", "sequence", "sparse_attention", "split", "unpad", "vocab",
    "vocab_cross_entropy", "zigzag", "zigzag_positions",
]  # fmt: skip
