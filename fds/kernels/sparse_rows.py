"""Attention over listed blocks in plain torch, in memory of what is listed: the reference of `sparse_attention`.

A row is a block of queries of a head; it sees the blocks of keys that its list names. Rows are taken by the lengths of
their lists, gathered, and multiplied as a batch, some at a time, so that what is gathered stays in the cache. With the
notation of fds.kernels.flash, for a row and its keys::

    s = scale * q k^T + bias       p = softmax(s)         out = (p * keep * c) v       c = 1 / (1 - ratio)
    ds = p * (dp - sum(p * dp))    dp = keep * c * dout v^T                            dq = scale * ds k
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
from fds.attention_layouts.layout import by_key
from fds.kernels import arguments, philox, sparse_lists
from fds.kernels.flash_blocks import empty_rows
from fds.kernels.language import cdiv
from fds.kernels.operators import operator

GATHERED = 2**18  # numbers of the keys that are gathered at once, 1 MB: 2 MB took 6% more time, 512 KB 10%
READ_ON = ("cpu",)  # devices of which the host reads how many blocks are chosen; for others it would have to wait


@attrs.frozen
class Rows:
    """The rows that list something, the shortest lists first, and in which parts they are taken.

    Attributes:
        lists: (H,) or (B * H,), starts (lists, blocks + 1), columns: as `sparse_lists.by_row` returns them.
        at: (n,) int64, of each row (b * H + h) * blocks + r.
        parts: of each part how many rows, and the fewest and the most columns that one of them lists.
    """

    lists: Tensor
    starts: Tensor
    columns: Tensor
    at: Tensor
    parts: list[tuple[int, int, int]]


@functools.lru_cache(maxsize=32)
def rows_of_layout(
    layout: AttentionLayout, batch: int, heads: int, causal: bool, gathered: int, device: torch.device
) -> Rows:
    """Return the rows of a layout, in parts of at most so many columns."""
    return _in_parts(sparse_lists.of_layout(layout, heads, causal, False, device), batch * heads, gathered)


def rows_of_selection(q: Tensor, chosen: Tensor, block: int, together: int, causal: bool, gathered: int) -> Rows:
    """Return the rows of a selection likewise."""
    lists = sparse_lists.by_row(q, chosen, 0, block, together, causal)
    num, blocks = q.shape[0] * q.shape[1], cdiv(q.shape[2], block)
    if q.device.type in READ_ON:
        return _in_parts(lists, num, gathered)
    most = len(lists[2]) // (num * blocks)  # as many as there is room for
    n = max(1, gathered // most)
    parts = [(min(n, num * blocks - first), 0, most) for first in range(0, num * blocks, n)]
    return Rows(*lists, torch.arange(num * blocks, device=q.device), parts)


def _in_parts(lists: tuple[Tensor, Tensor, Tensor], heads: int, gathered: int) -> Rows:
    counts = lists[1].diff(dim=1).cpu().numpy()[np.resize(lists[0].cpu().numpy(), heads)]
    together = max(1, gathered // counts.shape[1])  # heads whose keys stay in the cache
    rows: list[np.ndarray] = []
    parts: list[tuple[int, int, int]] = []
    for head in range(0, heads, together):
        of_heads = counts[head : head + together].ravel()
        order = np.argsort(of_heads, kind="stable")[np.count_nonzero(of_heads == 0) :]
        rows.append(order + head * counts.shape[1])
        of_heads, first = of_heads[order], 0
        while first < len(order):
            least = int(of_heads[first])
            # at most an eighth of what is gathered is in vain
            last = int(np.searchsorted(of_heads, least + least // 8, "right"))
            last = min(last, first + max(1, gathered // int(of_heads[last - 1])))
            parts.append((last - first, least, int(of_heads[last - 1])))
            first = last
    return Rows(*lists, torch.from_numpy(np.concatenate(rows)).to(lists[0].device), parts)


@attrs.frozen
class Inputs:
    """What rows are gathered from: blocks of q, k and v, and of what masks.

    Attributes:
        q: (B * H * blocks, block, D).
        k: (B * G * blocks, block * D).
        v: as k.
        rows: which there are, and what they list.
        hidden: (B * blocks, block) bool, True of keys that no query sees; None where there are none.
        hides: whether a query may see no key of the listed blocks.
        documents: (B * blocks, block), or None.
        bias: (x, rows, columns) a block of the bias each, or None; `bias_sizes` says how they are numbered.
        distances: (x, block, block) likewise, of the bias by distance.
        chosen: (B * H * blocks, block / together, most) what tokens choose of what their row lists, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Rows
    hidden: Tensor | None
    hides: bool
    documents: Tensor | None
    bias: Tensor | None
    distances: Tensor | None
    bias_sizes: list[int]
    chosen: Tensor | None
    seed: Tensor | None
    heads: int
    key_heads: int
    tokens: int
    blocks: int
    block: int
    causal: bool
    scale: float
    p: float
    offset: int

    def unlisted_zero(self) -> Tensor:
        """Return memory for all rows, like q, with zeros where there is a row that lists nothing."""
        return torch.empty_like(self.q) if len(self.rows.at) == len(self.q) else torch.zeros_like(self.q)


@attrs.frozen
class Batch:
    """Some rows, with what they see.

    Attributes:
        inputs: from which they are gathered.
        at: (n,) in q.
        batch: (n,) of each row.
        heads: (n,).
        rows: (n,).
        columns: (n, most), of which those from `counts` on repeat the last.
        counts: (n,) how many are listed.
        least: the fewest of them.
        keys: (n * most,) in k and v.
    """

    inputs: Inputs
    at: Tensor
    batch: Tensor
    heads: Tensor
    rows: Tensor
    columns: Tensor
    counts: Tensor
    least: int
    keys: Tensor

    def queries(self) -> Tensor:
        """Return the queries, (n, block, D), times the scale."""
        return self.inputs.q.index_select(0, self.at).mul_(self.inputs.scale)

    def gathered(self, x: Tensor) -> Tensor:
        """Return keys or values, (n, most * block, D)."""
        return x.index_select(0, self.keys).view(len(self.rows), -1, self.inputs.q.shape[-1])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (n, block, most * block) of q (n, block, D), -inf where a query does not see a key."""
        x, (n, most) = self.inputs, self.columns.shape
        scores = q @ k.mT
        by_block = scores.view(n, x.block, most, x.block)
        for table, indices in ((x.bias, self.bias_indices), (x.distances, self.distance_indices)):
            if table is not None:
                of_rows = table.index_select(0, indices().flatten())
                by_block += of_rows.view(n, -1, *table.shape[1:]).transpose(1, 2)
        if self.least < most:
            place = torch.arange(self.least, most, device=scores.device)
            by_block[:, :, self.least :].masked_fill_((place >= self.counts[:, None])[:, None, :, None], -math.inf)
        if x.hidden is not None:
            scores.masked_fill_(x.hidden.index_select(0, self.token_blocks().flatten()).view(n, 1, -1), -math.inf)
        if x.documents is not None:
            of_queries = x.documents.index_select(0, self.batch * x.blocks + self.rows)
            of_keys = x.documents.index_select(0, self.token_blocks().flatten()).view(n, 1, -1)
            scores.masked_fill_(of_queries[:, :, None] != of_keys, -math.inf)
        if x.chosen is not None:
            chosen = x.chosen.index_select(0, self.at)
            unseen = (chosen[:, :, None] != self.columns[:, None, :, None]).all(-1)
            by_choice = scores.view(n, chosen.shape[1], -1, most, x.block)
            by_choice.masked_fill_(unseen[:, :, None, :, None], -math.inf)
        if x.causal:  # the last column that a row lists is its own, or comes before it
            last, each = self.counts - 1, torch.arange(n, device=scores.device)
            later = torch.ones(x.block, x.block, dtype=torch.bool, device=scores.device).triu(1)
            hidden = later & (self.columns[each, last] == self.rows)[:, None, None]
            by_block[each, :, last] = by_block[each, :, last].masked_fill(hidden, -math.inf)
        return scores

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the softmax of the scores, zeros where a query sees no key."""
        scores = self.scores(q, k)
        if not self.inputs.hides:
            return scores.softmax(-1)  # a row lists a block, of which a query sees a key at least
        unseen = scores.amax(-1, keepdim=True) == -math.inf
        return scores.masked_fill_(unseen, 0.0).softmax(-1).masked_fill_(unseen, 0.0)

    def token_blocks(self) -> Tensor:
        """Return which blocks of the batch's tokens the columns are, (n, most)."""
        return self.batch[:, None] * self.inputs.blocks + self.columns

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
        return heads + (self.columns - self.rows[:, None] + x.blocks - 1)

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
    seed: Tensor | None, documents: Tensor | None, chosen: Tensor | None, layout: int, bias_sizes: list[int],
    block: int, together: int, causal: bool, scale: float, p: float, offset: int,
) -> Inputs:
    (b, h, tokens, d), blocks = q.shape, cdiv(q.shape[2], block)
    missing = blocks * block - tokens
    hidden = None
    if key_padding is not None or missing:
        hidden = q.new_ones(b, blocks * block, dtype=torch.bool)
        hidden[:, :tokens] = False if key_padding is None else ~key_padding
        hidden = hidden.view(-1, block)
    if documents is not None:
        documents = torch.nn.functional.pad(documents, (0, missing)).view(-1, block)
    gathered = max(1, GATHERED // max(block * d, 1))
    hides = any(y is not None for y in (key_padding, documents, bias, distances))
    if chosen is None:
        rows, finer = rows_of_layout(by_key(layout), b, h, causal, gathered, q.device), None
    else:
        rows = rows_of_selection(q, chosen, block, together, causal, gathered)
        finer = sparse_lists.of_blocks(chosen, blocks, block // together)
        sees_itself = (finer == torch.arange(blocks, device=q.device)[:, None, None]).any(3)
        hides = hides or q.device.type not in READ_ON or not sees_itself.all()
        finer = None if together == block else finer.flatten(0, 1)
    flat = lambda x: _in_blocks(x, blocks, block).view(-1, block * d)
    return Inputs(
        q=_in_blocks(q, blocks, block).view(-1, block, d), k=flat(k), v=flat(v), rows=rows, hidden=hidden,
        hides=hides, documents=documents, bias=bias, distances=distances, bias_sizes=bias_sizes, chosen=finer,
        seed=seed, heads=h, key_heads=k.shape[1], tokens=tokens, blocks=blocks, block=block, causal=causal,
        scale=scale, p=p, offset=offset,
    )


def _in_blocks(x: Tensor, blocks: int, block: int) -> Tensor:
    """Return x (B, H, S, D), wide and contiguous, with zeros after the last token; x itself where it is that."""
    wide, tokens = arguments.width(x), blocks * block
    if x.dtype == wide and x.shape[2] == tokens:
        return x.contiguous()
    padded = x.new_zeros(*x.shape[:2], tokens, x.shape[3], dtype=wide)
    padded[:, :, : x.shape[2]].copy_(x)
    return padded


def _batches(x: Inputs) -> Iterator[Batch]:
    listed, sizes = x.rows, [n for n, _, _ in x.rows.parts]
    heads, rows = listed.at // x.blocks, listed.at % x.blocks
    lists = listed.lists[heads % len(listed.lists)]
    starts = listed.starts.flatten()[lists * (x.blocks + 1) + rows]
    counts = listed.starts.flatten()[lists * (x.blocks + 1) + rows + 1] - starts
    firsts = heads // (x.heads // x.key_heads) * x.blocks  # of a head's keys
    of_rows = (listed.at, heads // x.heads, heads % x.heads, rows, counts, starts, firsts)
    parts = zip(*(y.split(sizes) for y in of_rows), strict=True)
    for (_, least, most), (at, batch, head, row, count, start, first) in zip(listed.parts, parts, strict=True):
        place = torch.arange(most, device=at.device)
        place = torch.minimum(place, (count[:, None] - 1).clamp(min=0)) if least < most else place
        columns = listed.columns[start[:, None] + place].long()
        yield Batch(x, at, batch, head, row, columns, count, least, (first[:, None] + columns).flatten())


@operator("sparse_attention_rows", lambda q, *_: empty_rows(q))
def forward(
    q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None, distances: Tensor | None,
    seed: Tensor | None, documents: Tensor | None, chosen: Tensor | None, layout: int, bias_sizes: list[int],
    block: int, together: int, causal: bool, scale: float, p: float, offset: int,
) -> Tensor:
    """Return out."""
    x = _inputs(
        q, k, v, key_padding, bias, distances, seed, documents, chosen, layout, bias_sizes, block, together, causal,
        scale, p, offset,
    )
    out = x.unlisted_zero()
    with torch.autocast(q.device.type, enabled=False):  # q, k and v are cast already
        for batch in _batches(x):
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
    distances: Tensor | None, seed: Tensor | None, documents: Tensor | None, chosen: Tensor | None, layout: int,
    bias_sizes: list[int], block: int, together: int, causal: bool, scale: float, p: float, offset: int,
    wants_bias: bool, wants_distances: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients with respect to q, k, v, and to the tables of bias and of distances, empty without them."""
    x = _inputs(
        q, k, v, key_padding, bias, distances, seed, documents, chosen, layout, bias_sizes, block, together, causal,
        scale, p, offset,
    )
    douts = _in_blocks(dout, x.blocks, block).view(-1, block, dout.shape[3])
    wanted = (bias if wants_bias else None, distances if wants_distances else None)
    tables = [None if y is None else torch.zeros_like(y) for y in wanted]
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = _gradients(x, douts, tables)
    dbias, ddistances = (q.new_empty(0) if y is None else y for y in tables)
    return _tokens(dq, q), _tokens(dk, k), _tokens(dv, v), dbias, ddistances


def _gradients(x: Inputs, douts: Tensor, tables: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x.q, x.k and x.v, and add to those of the tables of bias and of distances."""
    dq, dk, dv = x.unlisted_zero(), torch.zeros_like(x.k), torch.zeros_like(x.v)
    for batch in _batches(x):
        queries, d, keys = batch.queries(), douts.index_select(0, batch.at), batch.gathered(x.k)
        weights = batch.weights(queries, keys)
        dweights = d @ batch.gathered(x.v).mT
        kept = batch.kept(weights)
        dropped = weights if kept is None else weights * kept
        dv.index_add_(0, batch.keys, (dropped.mT @ d).view(-1, dv.shape[1]))
        if kept is not None:
            dweights *= kept
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
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
