"""Microbatches bounded by tokens, documents packed into rows, learning rates that follow the rows of a batch."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pad_sequence

import fds
from fds.data import DistributedLoader, batches_by_tokens, pack, packed
from fds.data.packing import _best_fit
from fds.data.token_batches import ORDERS
from fds.errors import DataError
from tests.bits import assert_same_bits
from tests.data.loaders import Noisy, as_lists

LENGTHS = np.random.default_rng(0).integers(1, 33, 300)
DOCUMENTS = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(LENGTHS.tolist())]


@given(
    st.lists(st.integers(1, 12), min_size=8, max_size=60),
    st.integers(24, 60),
    st.sampled_from(ORDERS),
    st.integers(1, 2),
    st.sampled_from([None, 2, 5]),
    st.integers(1, 3),
)
def test_every_row_is_in_one_microbatch_and_none_is_too_large(lengths, max_tokens, order, min_rows, max_rows, size):
    try:
        batches = batches_by_tokens(lengths, max_tokens, order=order, min_rows=min_rows, max_rows=max_rows)
        number = batches.num_batches(size)
    except DataError as error:
        assert "do not divide" in error.what or "do not fill" in error.what
        return
    for epoch in range(2):
        parts = [part for batch in range(number) for part in batches.rows(epoch * number + batch, size)]
        assert len(parts) == number * size
        assert sorted(chain(*parts)) == list(range(len(lengths)))
        for part in parts:
            assert len(part) * max(lengths[i] for i in part) <= max_tokens
            assert min_rows <= len(part) <= (max_rows or len(lengths))
    assert sum(batches.num_rows(1, size)) == len(lengths)


def test_orders_are_what_they_are_called():
    def parts(order, batch=slice(None), size=2):
        batches = batches_by_tokens(LENGTHS, 200, order=order)
        return [[part.tolist() for part in batches.rows(i, size)] for i in range(batches.num_batches(size))][batch]

    assert list(chain(*chain(*parts("dataloader")))) == list(range(300))
    sorted_lengths = [LENGTHS[i] for i in chain(*chain(*parts("seqlen")))]
    assert sorted_lengths == sorted(LENGTHS)
    padding = {o: sum(len(p) * max(LENGTHS[p]) for batch in parts(o) for p in batch) / LENGTHS.sum() for o in ORDERS}
    assert padding["bucketed"] < 1.1 < 1.4 < padding["random"]
    starts = [min(LENGTHS[batch[0]]) for batch in parts("bucketed")]
    assert starts != sorted(starts)


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_found_without_those_before_and_epochs_differ_where_they_should(order):
    batches = batches_by_tokens(LENGTHS, 200, order=order, key=3)
    number = batches.num_batches(4)
    epochs = [[[p.tolist() for p in batches.rows(e * number + i, 4)] for i in range(number)] for e in range(2)]
    again = batches_by_tokens(LENGTHS, 200, order=order, key=3)
    assert [p.tolist() for p in again.rows(number + 1, 4)] == epochs[1][1]
    assert (epochs[0] == epochs[1]) == (order in ("dataloader", "seqlen"))
    assert sorted(epochs[0]) == sorted(epochs[1])


def padded(rows):
    return pad_sequence(rows, batch_first=True, padding_value=-1)


def test_ranks_read_their_own_microbatches_and_any_number_of_them_reads_the_same():
    batches = batches_by_tokens(LENGTHS, 200)
    whole = [batch.parts for batch in DistributedLoader(DOCUMENTS, 4, sampler=batches, collate=padded)]
    shapes = {tuple(part.shape) for parts in whole for part in parts}
    assert len(shapes) > 4 and all(rows * tokens <= 200 for rows, tokens in shapes)
    for ranks in (2, 4):
        shares = fds.simulate(
            lambda: [
                batch.parts
                for batch in DistributedLoader(
                    DOCUMENTS, 4, fds.mesh(dp=-1)["dp"], sampler=batches, collate=padded, num_workers=0
                )
            ],
            ranks,
        )
        for parts, *of_ranks in zip(whole, *shares, strict=True):
            assert_same_bits(list(chain(*of_ranks)), list(parts))


def test_what_is_drawn_follows_from_batch_and_microbatch_on_any_number_of_ranks():
    batches = batches_by_tokens([1, 2, 3, 1, 2, 3], 4)
    loader = DistributedLoader(Noisy(6), 2, sampler=batches, collate=as_lists)
    whole = stream_of_parts(loader)
    assert whole == stream_of_parts(loader) and len({row[1:] for row in whole}) == len(whole)
    shares = fds.simulate(
        lambda: stream_of_parts(
            DistributedLoader(Noisy(6), 2, fds.mesh(dp=-1)["dp"], sampler=batches, collate=as_lists)
        ),
        2,
    )
    assert sorted(chain(*shares)) == sorted(whole)


def stream_of_parts(loader):
    return [row for batch in loader for part in batch.parts for row in part]


def loss_fn(params, batch):
    """Sum the tokens' losses; totals and weights of integers are exact in any order."""
    seen = batch >= 0
    return fds.Mean((params["w"] * (batch % 7) * seen).sum(), seen.sum())


def test_the_mean_over_tokens_is_exact_over_ranks_and_microbatches():
    batches = batches_by_tokens(LENGTHS[:120], 128, order="random")

    def train(ranks):
        axis = fds.mesh(dp=-1)["dp"] if ranks > 1 else None
        way = [fds.shard_optimizer(axis, stage=2)] if ranks > 1 else []
        step = fds.compose(fds.accumulate(8 // ranks), *way, fds.sgd(1.0))(loss_fn)
        state, losses = step.init({"w": torch.ones(())}), []
        for batch in DistributedLoader(DOCUMENTS[:120], 8, axis, sampler=batches, collate=padded):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return torch.stack(losses), step.params(state)["w"]

    w, losses = torch.ones(()), []
    for i in range(batches.num_batches(8)):
        tokens = torch.cat([DOCUMENTS[row] for part in batches.rows(i, 8) for row in part]) % 7
        losses.append((tokens * w).sum() / len(tokens))
        w = w - tokens.sum() / len(tokens)
    alone = train(1)
    torch.testing.assert_close(alone, (torch.stack(losses), w))
    for ranks in (2, 4):
        for run in fds.simulate(lambda n=ranks: train(n), ranks):
            torch.testing.assert_close(run, alone, rtol=1e-6, atol=0)
    first = [train(1)[0][0], *(run[0][0] for run in fds.simulate(lambda: train(2), 2))]
    assert all(torch.equal(x, losses[0]) for x in first)


@pytest.mark.parametrize("method", ["linear", "sqrt"])
def test_a_learning_rate_follows_the_rows_of_each_batch(method):
    batches = batches_by_tokens(LENGTHS, 200, key=1)
    number = batches.num_batches(2)
    rows = [sum(map(len, batches.rows(i, 2))) for i in range(20 * number)]
    rate = batches.rate(fds.schedules.warmup(0.1, warmup_steps=5), 2, base=20, method=method)
    factor = (lambda x: x) if method == "linear" else math.sqrt
    for t in (0, 1, number, number + 1, 16 * number + 2):
        expected = fds.schedules.warmup(0.1, warmup_steps=5)(t) * factor(rows[t] / 20)
        assert rate(t) == pytest.approx(expected, rel=1e-12)
        assert float(rate(torch.tensor(float(t), dtype=torch.float64))) == rate(t)
    step = fds.compose(fds.accumulate(2), fds.sgd(batches.rate(0.5, 2, base=20, method=method)))(loss_fn)
    state, rates = step.init({"w": torch.ones(())}), []
    for batch in DistributedLoader(DOCUMENTS, 2, sampler=batches, collate=padded):
        state, metrics = step(state, batch)
        rates.append(float(metrics["lr"]))
    assert rates == pytest.approx([0.5 * factor(x / 20) for x in rows[:number]])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 16))
def test_documents_are_packed_whole_into_rows_that_hold_them(lengths, row_tokens):
    packing = pack(lengths, row_tokens)
    pieces = [packing.pieces(row) for row in range(len(packing))]
    assert all(0 < sum(length for *_, length in row) <= row_tokens for row in pieces)
    tokens = [(document, begin + i) for row in pieces for document, begin, length in row for i in range(length)]
    assert sorted(tokens) == [(document, i) for document, length in enumerate(lengths) for i in range(length)]
    assert len(tokens) == round(packing.fill * len(packing) * row_tokens)
    assert sum(map(len, pieces)) == sum(-(-length // row_tokens) for length in lengths)  # cut where it must be


@given(st.lists(st.integers(1, 15), min_size=1, max_size=50), st.integers(15, 30))
def test_the_rows_are_those_of_best_fit_decreasing(sizes, room):
    sizes, left = sorted(sizes, reverse=True), []
    for size in sizes:
        fitting = [(x, i) for i, x in enumerate(left) if x >= size]
        if fitting:
            left[min(fitting)[1]] -= size
        else:
            left.append(room - size)
    rows = _best_fit(np.array(sizes), room)
    assert sorted(room - np.bincount(rows, weights=sizes)) == sorted(left)


def test_a_packed_row_is_attended_as_its_documents_are_alone():
    rows = packed(DOCUMENTS[:20], 64)
    loader = DistributedLoader(rows, len(rows), shuffle=False)
    (batch,) = loader
    tokens, targets, positions, documents = (batch[name] for name in ("tokens", "targets", "positions", "documents"))
    assert sorted(tokens[documents >= 0].tolist()) == sorted(torch.cat(DOCUMENTS[:20]).tolist())
    q = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[tokens][:, None]
    out = fds.kernels.attention(q, q, q, causal=True, documents=documents)[:, 0]
    for row in range(len(rows)):
        lengths = np.diff(rows.packing.cumulative_lengths(row)).tolist()
        for document, length in enumerate(lengths):
            at = documents[row] == document
            assert at.sum() == length and positions[row, at].tolist() == list(range(length))
            assert targets[row, at].tolist() == [*tokens[row, at].tolist()[1:], -100]
            alone = fds.kernels.attention(*[q[row][:, at][None]] * 3, causal=True)[0, 0]
            torch.testing.assert_close(out[row, at], alone)
    assert (targets[documents < 0] == -100).all() and (tokens[documents < 0] == 0).all()


def test_a_document_that_is_cut_keeps_its_next_token_as_the_target_and_goes_on_with_its_positions():
    rows = packed([torch.arange(10), torch.arange(20, 22)], 4, pad=9)
    by_first = {int(rows[i]["tokens"][0]): rows[i] for i in range(len(rows))}
    assert by_first[4]["targets"].tolist() == [5, 6, 7, 8] and by_first[4]["positions"].tolist() == [4, 5, 6, 7]
    assert by_first[8]["tokens"].tolist() == [8, 9, 20, 21] and by_first[8]["targets"].tolist() == [9, -100, 21, -100]


def test_a_token_file_is_packed_by_the_lengths_that_it_knows(tmp_path):
    fds.data.write_tokens(tmp_path / "corpus", DOCUMENTS[:9])
    rows = packed(fds.data.TokenFile(tmp_path / "corpus"), 64)
    assert_same_bits([*rows], [*packed(DOCUMENTS[:9], 64)])


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [1.5]}, "lengths"),
        ({"lengths": [[1]]}, "lengths"),
        ({"lengths": [1, 0]}, "lengths"),
        ({"lengths": [1, 9]}, "lengths"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_rows": 0}, "min_rows"),
        ({"min_rows": 3}, "lengths"),
        ({"max_rows": 0}, "max_rows"),
        ({"min_rows": 2, "max_rows": 1}, "min_rows, max_rows"),
        ({"lengths": [4], "min_rows": 2}, "min_rows"),
        ({"order": "length"}, "order"),
    ],
)
def test_what_are_no_batches_is_refused(wrong, where):
    with pytest.raises(DataError) as refused:
        batches_by_tokens(**{"lengths": [1, 2, 4], "max_tokens": 8, **wrong})
    assert refused.value.where == where


BATCHES = batches_by_tokens([1, 2, 3], 3)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda: BATCHES.num_batches(4), "batch_size"),
        (lambda: DistributedLoader([1, 2, 3], 1, sampler=BATCHES, collate=fds.data.per_microbatch(len, 1)), "collate"),
        (lambda: DistributedLoader([1, 2, 3, 4], 1, sampler=BATCHES), "sampler"),
        (lambda: BATCHES.rate("0.1", 1, base=2), "schedule"),
        (lambda: BATCHES.rate(0.1, 1, base=0), "base"),
        (lambda: BATCHES.rate(0.1, 1, base=2, method="cubic"), "method"),
        (lambda: BATCHES.rate(0.1, 1, base=2, method=["sqrt"]), "method"),
        (lambda: BATCHES.rate(math.nan, 1, base=2), "schedule"),
        (lambda: BATCHES.rate(0.1, 0, base=2), "size"),
        (lambda: BATCHES.rows(-1, 1), "batch"),
        (lambda: pack([1, 2], 0), "row_tokens"),
        (lambda: pack([0], 2), "lengths"),
        (lambda: packed([[1], [2]], 2, lengths=[1]), "lengths"),
        (lambda: packed([[1], [2]], 2, pad=None), "pad"),
        (lambda: packed([1, 2], 2), "dataset"),
        (lambda: packed({"a": [1]}, 2), "dataset"),
        (lambda: packed([[1]], 2, lengths=5), "lengths"),
        (lambda: packed([[1]], 2, lengths=(1 for _ in "a")), "lengths"),
        (lambda: packed([np.array([2**63], np.uint64)], 2)[0], "dataset[0]"),
        (lambda: packed([[1], [2]], 2, lengths=[1, 2])[0], "dataset[1]"),
    ],
)
def test_what_cannot_be_packed_or_scaled_is_refused(wrong, where):
    with pytest.raises(DataError) as refused:
        wrong()
    assert refused.value.where == where


@pytest.mark.parametrize("documents", [[[1.5, 2.5]], ["ab"], [torch.tensor([1.0, 2.0], requires_grad=True)]])
def test_documents_that_are_no_integers_are_refused_and_not_rounded(documents):
    with pytest.raises(DataError, match="not a sequence of tokens"):
        packed(documents, 4)[0]


def test_a_token_for_padding_that_is_too_large_is_refused():
    with pytest.raises(DataError, match="not a token"):
        packed([[1]], 4, pad=2**70)
