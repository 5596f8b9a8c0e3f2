"""Blocks that queries choose: against a dense mixture of block attention in float64, written by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fds.errors import FdsError
from fds.kernels import block_selection, sparse_lists, sparse_rows
from fds.kernels.block_selection import BlockSelection, select_blocks
from fds.kernels.choice import only
from fds.kernels.sparse import sparse_attention
from tests.devices import DEVICE
from tests.kernels.accuracy import assert_near
from tests.kernels.test_sparse import OF_KERNELS
from tests.kernels.ways import WAYS, plain, traced

TOKENS, BLOCK = 43, 8  # the last block is partly empty
PADDING = torch.arange(TOKENS) < torch.tensor([[43], [29]])
DOCUMENTS = torch.arange(TOKENS).expand(2, -1) // torch.tensor([[19], [50]]) + 3
CASES: dict[str, dict[str, Any]] = {
    "each token": {"together": 1},
    "some tokens": {"together": 2, "top": 1},
    "a block": {"together": BLOCK},
    "none but its own": {"top": 0},
    "later blocks too": {"causal": False, "together": 4},
    "padding": {"key_padding": PADDING},
    "documents": {"documents": DOCUMENTS, "together": 4},
    "padding, documents, later blocks": {"key_padding": PADDING, "documents": DOCUMENTS, "causal": False},
}


def qkv(b=2, h=4, s=TOKENS, d=5, g=2, dtype=torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(b, n, s, d, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for n in (h, g, g)]


def seen_blocks(q, k, i, causal, together, top, key_padding, documents) -> list[int]:
    """Return which blocks query i (of one head and batch entry) sees, by the definition."""
    blocks = -(-len(q) // BLOCK)
    row, own = i // together, i // BLOCK
    query = q[row * together : (row + 1) * together].mean(0)
    scores = {}
    for j in range(blocks):
        part = slice(j * BLOCK, (j + 1) * BLOCK)
        is_real = key_padding[part]
        is_shared = bool((documents[part] == documents[row * together]).any())
        if j != own and not (causal and j > own) and is_real.any() and is_shared:
            scores[j] = float((query @ k[part][is_real].mean(0)).detach())
    return [own, *sorted(scores, key=lambda j: -scores[j])[:top]]


def mixture(q, k, v, *, causal=True, together=1, top=2, key_padding=None, documents=None) -> Tensor:
    """Return attention of each query over all keys of the blocks that it sees, with all scores in memory."""
    b, h, s = q.shape[:3]
    key_padding = torch.ones(b, s, dtype=torch.bool) if key_padding is None else key_padding
    documents = torch.zeros(b, s) if documents is None else documents
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    mask = torch.zeros(b, h, s, s, dtype=torch.bool)
    for x in range(b):
        for y in range(h):
            for i in range(s):
                for j in seen_blocks(q[x, y], k[x, y], i, causal, together, top, key_padding[x], documents[x]):
                    mask[x, y, i, j * BLOCK : (j + 1) * BLOCK] = True
    mask = mask.tril() if causal else mask
    mask = mask & key_padding[:, None, None] & (documents[:, :, None] == documents[:, None])[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def chosen_and_attended(q, k, v, *, causal=True, together=1, top=2, key_padding=None, documents=None, **rest) -> Tensor:
    masks = {"causal": causal, "key_padding": key_padding, "documents": documents}
    selection = select_blocks(q, k, top=top, block=rest.get("block", BLOCK), together=together, **masks)
    return sparse_attention(q, k, v, selection, **masks)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("read_on", [("cpu",), ()], ids=["read", "not read"])
def test_values_and_gradients_are_those_of_a_dense_mixture(case, read_on, monkeypatch):
    monkeypatch.setattr(block_selection, "SCORES", 100)  # rows of queries in many parts
    monkeypatch.setattr(sparse_rows, "READ_ON", read_on)
    args = qkv()
    out, want = chosen_and_attended(*args, **CASES[case]), mixture(*args, **CASES[case])
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    got, wanted = torch.autograd.grad(out, args, dout), torch.autograd.grad(want, args, dout)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("together", "causal"), [(1, True), (4, False), (16, True)])
def test_kernels_compute_what_the_reference_does(together, causal):
    args = [x.to(DEVICE) for x in qkv(1, 2, TOKENS, 5, 1, dtype=torch.float32)]
    options = {"block": 16, "top": 1, "together": together, "causal": causal, "key_padding": PADDING[1:].to(DEVICE)}
    results = []
    for kind in ("triton", "reference"):
        with only(kind):
            out = chosen_and_attended(*args, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), args)))
    for x, y in zip(*results, strict=True):
        assert_near(x, y, factor=2)


@pytest.mark.parametrize("together", [1, BLOCK])
def test_all_blocks_are_dense_attention(together):
    q, k, v = qkv(g=4)
    out = chosen_and_attended(q, k, v, top=100, together=together)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_layer_that_is_computed_again_selects_the_same(monkeypatch):
    selections, select = [], block_selection._chosen
    monkeypatch.setattr(block_selection, "_chosen", lambda *args: selections.append(select(*args)) or selections[-1])
    q, k, v = qkv(dtype=torch.float32)
    q = torch.cat([q, q[:, :, :1]], 2).detach()[:, :, :TOKENS].requires_grad_()
    k = k.detach().index_fill(2, torch.arange(16), 0.5).requires_grad_()  # two blocks that are liked as much
    loss = lambda *args: chosen_and_attended(*args).square().sum()
    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(checkpoint(loss, q, k, v, use_reentrant=False), (q, k, v))
    assert len(selections) == 3 and all(torch.equal(x, selections[0]) for x in selections)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@traced
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_take_gradients_agree(way):
    loss = lambda q, k, v: chosen_and_attended(q, k, v).square().sum()
    args = qkv(dtype=torch.float32)
    torch.testing.assert_close(WAYS[way](loss, args), plain(loss, args))


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_selection_is_given_back_and_what_is_no_block_in_it_is_none(kind):
    q, k, v = (x.to(DEVICE) for x in qkv(1, 2, TOKENS, 5, 2, dtype=torch.float32))
    first = select_blocks(q, k, top=1, block=16)
    mask = torch.zeros(1, 2, TOKENS, 4, dtype=torch.bool, device=DEVICE)
    mask = mask.scatter_(3, first.chosen.long() % 4, True)[..., :3].repeat_interleave(16, 3)[..., :TOKENS].tril()
    other = torch.roll(q, 1, dims=1)
    want = F.scaled_dot_product_attention(other, k, v, attn_mask=mask)
    junk = torch.tensor([-7, 3, 2**31 - 1], dtype=torch.int32, device=DEVICE).expand(1, 2, TOKENS, 3)
    replayed = BlockSelection(torch.cat([first.chosen.flip(3), junk, first.chosen], 3).long(), TOKENS, 16)
    with only(kind):
        for selection in (first, replayed):
            assert_near(sparse_attention(other, k, v, selection, causal=True), want, factor=2)


@pytest.mark.parametrize("read_on", [("cpu",), ()], ids=["read", "not read"])
def test_a_row_that_chooses_nothing_gives_zeros(read_on, monkeypatch):
    monkeypatch.setattr(sparse_rows, "READ_ON", read_on)
    q, k, v = qkv(1, 1, TOKENS, 5, 1)
    chosen = select_blocks(q, k, top=2, block=BLOCK, together=BLOCK).chosen.clone()
    want = sparse_attention(q, k, v, BlockSelection(chosen.clone(), TOKENS, BLOCK, BLOCK), causal=True)
    chosen[:, :, [0, 2, 5]] = -1
    out = sparse_attention(q, k, v, BlockSelection(chosen, TOKENS, BLOCK, BLOCK), causal=True)
    is_none = torch.isin(torch.arange(TOKENS) // BLOCK, torch.tensor([0, 2, 5]))
    torch.testing.assert_close(out, want.masked_fill(is_none[:, None], 0.0))
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    assert not dq[:, :, is_none].any() and dq[:, :, ~is_none].any() and not dq.isnan().any()


def test_the_load_says_how_often_each_block_is_chosen():
    chosen = torch.tensor([[0, -1, -1], [1, 0, -1], [2, 0, 1], [3, 0, 2]]).expand(1, 1, 4, 3)
    selection = BlockSelection(torch.cat([chosen, chosen], 1), 4 * BLOCK - 3, BLOCK, BLOCK)
    torch.testing.assert_close(selection.load(), torch.tensor([[0.6, 0.2, 0.2, 0.0]]).expand(2, -1))
    metrics = selection.metrics()
    shares = torch.tensor([0.6, 0.2, 0.2])
    torch.testing.assert_close(metrics["block_entropy"], -(shares * shares.log()).sum() / torch.tensor(4.0).log())
    assert float(metrics["most_chosen_block"]) == pytest.approx(0.6)
    assert float(BlockSelection(chosen[:, :, :1, :1], 8, 8, 8).metrics()["block_entropy"]) == 0


def test_no_number_is_read_from_the_device():
    q = torch.empty(2, 4, 100, 16, device="meta")
    for together in (1, 32):
        chosen = block_selection._chosen(q, q[:, :2], 2, 32, together, True, None, None)
        for lists in (sparse_lists.by_row, sparse_lists.by_column):
            starts = lists(q, chosen, 0, 32, together, True)[1]
            assert starts.shape == (8, 5) and starts.device.type == "meta"


WRONG: Any = "wrong"
OPTIONS: dict[str, dict[str, Any]] = {
    "no blocks": {"top": -1},
    "a fraction": {"top": 1.5},
    "a flag of words": {"causal": WRONG},
    "a block of nothing": {"block": 0},
    "rows that do not divide": {"together": 3},
    "padding of integers": {"key_padding": PADDING.long()},
    "documents of one row": {"documents": DOCUMENTS[0]},
}
CHOSEN = torch.zeros(2, 4, TOKENS, 1, dtype=torch.int32)
SELECTIONS = {
    "fractions": BlockSelection(CHOSEN.float(), TOKENS, BLOCK),
    "no tensor": BlockSelection(WRONG, TOKENS, BLOCK),
    "other heads": BlockSelection(CHOSEN[:, :2], TOKENS, BLOCK),
    "other rows": BlockSelection(CHOSEN, TOKENS, BLOCK, 2),
    "other tokens": BlockSelection(CHOSEN, TOKENS + 1, BLOCK),
    "nothing": BlockSelection(CHOSEN[..., :0], TOKENS, BLOCK),
    "no rows": BlockSelection(CHOSEN[0], TOKENS, BLOCK),
    "rows that do not divide": BlockSelection(CHOSEN, TOKENS, BLOCK, 3),
    "words": BlockSelection(CHOSEN, WRONG, BLOCK),
    "another device": BlockSelection(CHOSEN.to("meta"), TOKENS, BLOCK),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bad_arguments_are_refused(options):
    q, k, _ = qkv()
    with pytest.raises(FdsError):
        select_blocks(q, k, **{"top": 2, "block": BLOCK, **options})


def test_other_tensors_are_refused():
    q, k, _ = qkv()
    for wrong in ((q, k[:, :, 1:]), (q.long(), k.long()), (q, k.float()), (q[0], k)):
        with pytest.raises(FdsError):
            select_blocks(wrong[0], wrong[1], top=2, block=BLOCK)


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_bad_selections_are_refused(selection):
    q, k, v = qkv()
    with pytest.raises(FdsError):
        sparse_attention(q, k, v, selection)


@pytest.mark.parametrize(
    "kind", ["fractions", "no tensor", "other rows", "no rows", "rows that do not divide", "words"]
)
def test_what_is_no_selection_has_no_load(kind):
    with pytest.raises(FdsError):
        SELECTIONS[kind].metrics()


@pytest.mark.parametrize(("kind", "together"), [("reference", 16), ("reference", 1), ("triton", 1)])
def test_a_selection_of_what_a_layout_lists_is_that_layout_with_masks_of_all_kinds(kind, together):
    layout, options = OF_KERNELS["everything"]
    args = [x.to(DEVICE) for x in qkv(dtype=torch.float32)]
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    listed = torch.from_numpy(layout.as_array()).to(DEVICE)
    chosen = torch.where(listed, torch.arange(3, device=DEVICE), -1).repeat_interleave(16 // together, 1)
    chosen = chosen[:, : -(-TOKENS // together)].expand(2, -1, -1, -1)
    results = []
    with only(kind):
        for blocks in (layout, BlockSelection(chosen, TOKENS, 16, together)):
            out = sparse_attention(args[0], args[1], args[2], blocks, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), args)))
    torch.testing.assert_close(*results)
