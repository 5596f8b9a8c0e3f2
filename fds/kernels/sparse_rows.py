"""Attention over listed blocks in plain torch, in memory of what is listed: the reference of `sparse_attention`.

A row is a block of queries of a head; it sees the listed blocks of keys. Rows that list about as many are gathered, and
multiplied as a batch, some at a time, so that what is gathered stays in the cache. With the notation of
fds.kernels.flash, for a row and its keys::

    s = scale * q k^T + bias       p = softmax(s)         out = (p * keep * c) v       c = 1 / (1 - ratio)
    ds = p * (keep * c * dout v^T - delta)                dq = scale * ds k
    dk and dv are summed over the rows that list a block, in the order of rows: results are deterministic.

Rows without a key give zeros. All is computed in float32, or in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import attrs
import numpy as np
import torch
from torch import Tensor

from fds.attention_layouts import AttentionLayout
from fds.kernels import arguments, philox
from fds.kernels.flash_blocks import empty_rows
from fds.kernels.language import cdiv
from fds.kernels.operators import operator

GATHERED = 2**19  # numbers of the keys that are gathered at once: 2 MB, of a cache


@torch._disable_dynamo  # NumPy makes it, once
@functools.lru_cache(maxsize=32)
def batches(layout: AttentionLayout, causal: bool, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return rows that list about as many blocks, batch after batch, as one int64 tensor, and the sizes of its parts.

    The sizes are, of each batch: rows, heads' rows, most columns of a row, whether a row lists fewer. Its parts: heads
    (n,) and rows (n,) of its members, where their columns are listed (n,), and columns (m, most), of which the unused
    ones are `blocks`.
    """
    if causal:
        layout = layout.causal()
    parts: list[np.ndarray] = []
    sizes: list[int] = []
    blocks = layout.blocks
    heads_of = [np.flatnonzero(np.array(layout.heads) == i) for i in range(len(layout.patterns))]
    for pattern, heads in zip(layout.patterns, heads_of, strict=True):
        counts = np.diff(pattern.starts)
        # Rounded up to three leading bits of the count: at most an eighth of what is gathered is in vain.
        step = 2 ** np.maximum(np.floor(np.log2(np.maximum(counts, 1))) - 3, 0).astype(np.int64)
        rounded = -(-counts // step) * step
        for size in np.unique(rounded[counts > 0]):
            rows = np.flatnonzero((rounded == size) & (counts > 0))
            most = int(counts[rows].max())
            within = np.arange(most)
            at = pattern.starts[rows][:, None] + within
            is_listed = within < counts[rows][:, None]
            columns = np.where(is_listed, pattern.columns[np.where(is_listed, at, 0)], blocks)
            n = len(rows) * len(heads)
            which = np.tile(np.arange(len(rows)), len(heads))
            parts += [np.repeat(heads, len(rows)), rows[which], which, columns.ravel()]
            sizes += [len(rows), n, most, int(not is_listed.all())]
    flat = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
    return torch.from_numpy(flat).to(device), sizes


@attrs.frozen
class Inputs:
    """What all rows are gathered from: blocks of q, k and v, and of what masks.

    Attributes:
        q: (B * H * blocks, block, D).
        k: (B * G * slots, block * D), with a block of zeros for columns that are not used, where there are such.
        v: as k.
        hidden: (B * (blocks + 1), block) bool, True of keys that no query sees.
        has_hidden: whether there are such among the listed ones.
        hides: whether a query may see no key of the listed blocks.
        documents: (B, blocks + 1, block), or None.
        bias: (x, rows, columns) a block of the bias each, or None; `bias_sizes` says how they are numbered.
        distances: (x, block, block) likewise, of the bias by distance.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor
    has_hidden: bool
    hides: bool
    documents: Tensor | None
    bias: Tensor | None
    distances: Tensor | None
    bias_sizes: list[int]
    seed: Tensor | None
    heads: int
    key_heads: int
    tokens: int
    blocks: int
    slots: int
    block: int
    causal: bool
    scale: float
    p: float
    offset: int


@attrs.frozen
class Batch:
    """Some rows, with what they see.

    Attributes:
        inputs: from which they are gathered.
        batch: (n,) of each row.
        heads: (n,).
        rows: (n,).
        columns: (n, most).
        at: (n,) in q.
        keys: (n * most,) in k and v.
        is_padded: whether some columns are not used.
    """

    inputs: Inputs
    batch: Tensor
    heads: Tensor
    rows: Tensor
    columns: Tensor
    at: Tensor
    keys: Tensor
    is_padded: bool

    def queries(self) -> Tensor:
        """Return the queries, (n, block, D), times the scale."""
        return self.inputs.q.index_select(0, self.at).mul_(self.inputs.scale)

    def gathered(self, x: Tensor) -> Tensor:
        """Return keys or values, (n, most * block, D)."""
        return x.index_select(0, self.keys).view(len(self.rows), -1, self.inputs.q.shape[-1])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (n, block, most * block) of q (n, block, D), -inf where a query does not see a key."""
        x, n = self.inputs, len(self.rows)
        scores = q @ k.mT
        by_block = scores.view(n, x.block, -1, x.block)
        for table, indices in ((x.bias, self.bias_indices), (x.distances, self.distance_indices)):
            if table is not None:
                of_rows = table.index_select(0, indices().flatten())
                by_block += of_rows.view(n, -1, *table.shape[1:]).transpose(1, 2)
        if x.has_hidden or self.is_padded:
            hidden = x.hidden.index_select(0, (self.batch[:, None] * (x.blocks + 1) + self.columns).flatten())
            scores.masked_fill_(hidden.view(n, 1, -1), -math.inf)
        if x.documents is not None:
            of_queries = x.documents[self.batch, self.rows]
            of_keys = x.documents[self.batch[:, None], self.columns].view(n, 1, -1)
            scores.masked_fill_(of_queries[:, :, None] != of_keys, -math.inf)
        if x.causal:  # columns after a row's own are not listed
            is_own = self.columns == self.rows[:, None]
            place, each = is_own.to(torch.uint8).argmax(1), torch.arange(n, device=scores.device)
            later = torch.ones(x.block, x.block, dtype=torch.bool, device=scores.device).triu(1)
            hidden = later & is_own.any(1)[:, None, None]
            by_block[each, :, place] = by_block[each, :, place].masked_fill(hidden, -math.inf)
        return scores

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the softmax of the scores, zeros where a query sees no key."""
        scores = self.scores(q, k)
        if not self.inputs.hides:
            return scores.softmax(-1)  # a row lists a block, of which a query sees a key at least
        unseen = scores.amax(-1, keepdim=True) == -math.inf
        return scores.masked_fill_(unseen, 0.0).softmax(-1).masked_fill_(unseen, 0.0)

    def bias_indices(self) -> Tensor:
        """Return the blocks of the bias of each row and column, (n, most)."""
        batch, heads, rows, columns = self.inputs.bias_sizes
        at = self.batch % batch * heads + self.heads % heads
        at = (at * rows + self.rows.clamp(max=rows - 1))[:, None] * columns
        return at + self.columns.clamp(max=columns - 1)

    def distance_indices(self) -> Tensor:
        """Return the blocks of the bias by distance of each row and column, (n, most)."""
        x = self.inputs
        many = 2 * x.blocks - 1
        heads = 0 if x.distances is not None and len(x.distances) == many else self.heads[:, None] * many
        return heads + (self.columns.clamp(max=x.blocks - 1) - self.rows[:, None] + x.blocks - 1)

    def kept(self, like: Tensor) -> Tensor | None:
        """Return the factors of dropout, (n, block, most * block); None without dropout."""
        x = self.inputs
        if x.seed is None:
            return None
        tokens = torch.arange(x.block, device=like.device)
        rows = (self.batch * x.heads + self.heads) * x.tokens + self.rows * x.block
        groups = self.columns[:, :, None] * (x.block // 4) + tokens[: x.block // 4]
        rows, groups = rows[:, None] + tokens, groups.flatten(1)
        kept = philox.kept(x.seed, x.offset, rows[:, :, None], groups[:, None, :], x.p)
        return kept.view(like.shape).to(like.dtype) / (1 - x.p)


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None, distances: Tensor | None,
    seed: Tensor | None, documents: Tensor | None, sizes: list[int], bias_sizes: list[int], block: int, causal: bool,
    scale: float, p: float, offset: int,
) -> Inputs:
    (b, h, tokens, _), blocks = q.shape, cdiv(q.shape[2], block)
    hidden = q.new_ones(b, (blocks + 1) * block, dtype=torch.bool)
    hidden[:, :tokens] = False if key_padding is None else ~key_padding
    if documents is not None:
        documents = torch.nn.functional.pad(documents, (0, (blocks + 1) * block - tokens)).view(b, blocks + 1, block)
    slots = blocks + any(sizes[3::4])
    flat = lambda x: _in_blocks(x, slots, block).view(-1, block * x.shape[3])
    return Inputs(
        q=_in_blocks(q, blocks, block).view(-1, block, q.shape[3]), k=flat(k), v=flat(v),
        hidden=hidden.view(-1, block), has_hidden=key_padding is not None or tokens % block != 0,
        hides=any(y is not None for y in (key_padding, documents, bias, distances)), documents=documents,
        bias=bias, distances=distances, bias_sizes=bias_sizes, seed=seed, heads=h, key_heads=k.shape[1], tokens=tokens,
        blocks=blocks, slots=slots, block=block, causal=causal, scale=scale, p=p, offset=offset,
    )


def _in_blocks(x: Tensor, blocks: int, block: int) -> Tensor:
    """Return x (B, H, S, D), wide and contiguous, with zeros after the last token; x itself where it is that."""
    wide, tokens = arguments.width(x), blocks * block
    if x.dtype == wide and x.shape[2] == tokens:
        return x.contiguous()
    padded = x.new_zeros(*x.shape[:2], tokens, x.shape[3], dtype=wide)
    padded[:, :, : x.shape[2]].copy_(x)
    return padded


def _batches(x: Inputs, table: Tensor, sizes: list[int]) -> Iterator[Batch]:
    num = len(x.k) // (x.key_heads * x.slots)
    first = 0
    for rows, n, most, is_padded in zip(*(sizes[i::4] for i in range(4)), strict=True):
        heads, members, which, columns = table[first : first + 3 * n + rows * most].split([n, n, n, rows * most])
        first += 3 * n + rows * most
        columns = columns.view(rows, most)
        each = torch.arange(num * n, device=table.device)
        batch, each = each // n, each % n
        heads, members, columns = heads[each], members[each], columns[which[each]]
        of_keys = batch * x.key_heads + heads // (x.heads // x.key_heads)
        indices = (
            batch, heads, members, columns, (batch * x.heads + heads) * x.blocks + members,
            of_keys[:, None] * x.slots + columns,
        )
        at_once = max(1, GATHERED // (most * x.k.shape[1]))
        for batch, heads, members, columns, at, keys in zip(*(y.split(at_once) for y in indices), strict=True):
            yield Batch(x, batch, heads, members, columns, at, keys.flatten(), bool(is_padded))


@operator("sparse_attention_rows", lambda q, *_: empty_rows(q))
def forward(
    q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None, distances: Tensor | None,
    seed: Tensor | None, documents: Tensor | None, table: Tensor, sizes: list[int], bias_sizes: list[int], block: int,
    causal: bool, scale: float, p: float, offset: int,
) -> Tensor:
    """Return out."""
    x = _inputs(
        q, k, v, key_padding, bias, distances, seed, documents, sizes, bias_sizes, block, causal, scale, p, offset
    )
    out = torch.zeros_like(x.q)
    with torch.autocast(q.device.type, enabled=False):  # q, k and v are cast already
        for batch in _batches(x, table, sizes):
            weights = batch.weights(batch.queries(), batch.gathered(x.k))
            kept = batch.kept(weights)
            out.index_copy_(0, batch.at, (weights if kept is None else weights * kept) @ batch.gathered(x.v))
    return _tokens(out, q)


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    """Return the tokens of blocks, of the shape and dtype of `like`, laid out so that heads merge."""
    return empty_rows(like).copy_(x.view(*like.shape[:2], -1, like.shape[3])[:, :, : like.shape[2]])


def _fake_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None,
    distances: Tensor | None, *rest: object,
) -> tuple[Tensor, ...]:
    wanted = (bias if rest[-2] else None, distances if rest[-1] else None)
    tables = [q.new_empty(0) if x is None else torch.empty_like(x) for x in wanted]
    return empty_rows(q), empty_rows(k), empty_rows(v), *tables


@operator("sparse_attention_rows_backward", _fake_gradients)
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None,
    distances: Tensor | None, seed: Tensor | None, documents: Tensor | None, out: Tensor, table: Tensor,
    sizes: list[int], bias_sizes: list[int], block: int, causal: bool, scale: float, p: float, offset: int,
    wants_bias: bool, wants_distances: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients with respect to q, k, v, and to the tables of bias and of distances, empty without them."""
    x = _inputs(
        q, k, v, key_padding, bias, distances, seed, documents, sizes, bias_sizes, block, causal, scale, p, offset
    )
    in_blocks = lambda y: _in_blocks(y, x.blocks, block).view(-1, block, y.shape[3])
    douts = in_blocks(dout)
    deltas = (douts * in_blocks(out)).sum(-1, keepdim=True)
    wanted = (bias if wants_bias else None, distances if wants_distances else None)
    tables = [None if y is None else torch.zeros_like(y) for y in wanted]
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = _gradients(x, table, sizes, douts, deltas, tables)
    dbias, ddistances = (q.new_empty(0) if y is None else y for y in tables)
    return _tokens(dq, q), _tokens(dk, k), _tokens(dv, v), dbias, ddistances


def _gradients(
    x: Inputs, table: Tensor, sizes: list[int], douts: Tensor, deltas: Tensor, tables: list[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x.q, x.k and x.v, and add to those of the tables of bias and of distances."""
    dq, dk, dv = torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v)
    for batch in _batches(x, table, sizes):
        queries, d, keys = batch.queries(), douts.index_select(0, batch.at), batch.gathered(x.k)
        weights = batch.weights(queries, keys)
        dweights = d @ batch.gathered(x.v).mT
        kept = batch.kept(weights)
        dropped = weights if kept is None else weights * kept
        dv.index_add_(0, batch.keys, (dropped.mT @ d).view(-1, dv.shape[1]))
        if kept is not None:
            dweights *= kept
        dscores = dweights.sub_(deltas.index_select(0, batch.at)).mul_(weights)
        dq.index_copy_(0, batch.at, (dscores @ keys).mul_(x.scale))
        dk.index_add_(0, batch.keys, (dscores.mT @ queries).view(-1, dk.shape[1]))
        for dtable, indices in zip(tables, (batch.bias_indices, batch.distance_indices), strict=True):
            if dtable is not None:
                _add_blocks(dtable, indices(), dscores.view(len(queries), x.block, -1, x.block))
    return dq, dk, dv


def _add_blocks(table: Tensor, indices: Tensor, dscores: Tensor) -> None:
    """Add gradients of scores (n, block, most, block) to blocks of a table, summed over what it is broadcast."""
    blocks = dscores.transpose(1, 2)
    for dim in (2, 3):
        if table.shape[dim - 1] == 1:
            blocks = blocks.sum(dim, keepdim=True)
    table.index_add_(0, indices.flatten(), blocks.reshape(-1, *table.shape[1:]))
