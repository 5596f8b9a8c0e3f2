"""An embedding of which every rank of a tensor axis has some rows of the vocabulary.

    y = leave(rows of ids that this rank has, 0 for others)

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import LossError, is_int
from fds.nn.parallel import checking
from fds.nn.parallel.linear import Piece
from fds.nn.parallel.region import joined_features, ranges


class VocabEmbedding(Piece, nn.Embedding):
    """An embedding whose rows are divided over the tensor axis of `fds.tensor_parallel`; a plain one without it.

    Args:
        num_embeddings: how many rows, on all ranks together.
        embedding_dim: how long each is.
        padding_idx: of the row that is 0 and gets no gradient, from -num_embeddings on; None for none.

    Raises `LossError` for anything else.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **factory: Any):
        checking.sizes("VocabEmbedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not (is_int(padding_idx) and -num_embeddings <= padding_idx < num_embeddings):
            raise LossError(
                "VocabEmbedding: there is no such row",
                where="padding_idx",
                got=repr(padding_idx)[:80],
                want=f"an int in [-{num_embeddings}, {num_embeddings}), or None",
            )
        checking.factory("VocabEmbedding", factory)
        super().__init__(num_embeddings, embedding_dim, padding_idx, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows (..., features) of ids (...) int64."""
        region = self.region
        if region is None:
            return super().forward(input)
        first, count = ranges(sum(self.cut), region.axis)[region.axis.index]
        local = input - first
        elsewhere = (local < 0) | (local >= count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        own = padding if padding is not None and 0 <= padding < count else None
        weight, ids = self.weight, local.masked_fill(elsewhere, 0)
        found = F.embedding(ids, weight, own, sparse=self.sparse)
        return region.leave(found.masked_fill(elsewhere[..., None], 0.0), run=self.run)


class ColumnEmbedding(Piece, nn.Embedding):
    """A copy of an embedding of which every rank has some of the features."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's features (..., features / ranks) of ids (...) int64, or all where they are gathered."""
        region, y = self.region, super().forward(input)
        assert region is not None
        if self.gather:
            return joined_features(y, region.axis, self.cut)
        if region.heads is None:
            region.inside_of(self.cut, y)
        return y
