"""Curricula beside steps on batches that were cut by hand."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import schedules, tree
from fds.errors import BatchError, ComposeError, ScheduleError
from tests.bits import assert_same_bits

GROWING = schedules.fixed_linear(2, 8, 5, difficulty_step=2)  # 2, 4, 4, 6, 8, 8, ...
TOKENS = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))
ROWS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()


def of_tokens(out, targets):
    return fds.Mean(F.cross_entropy(out.flatten(0, -2), targets.view(-1), reduction="sum"), targets.numel())


def layers(width=8):
    hidden = fds.LayerSpec(nn.Linear, width, width)
    ends = fds.LayerSpec(nn.Embedding, 11, width), fds.LayerSpec(nn.Linear, width, 11)
    return fds.Layers([ends[0], fds.LayerSpec(nn.Dropout, 0.1), hidden, ends[1]], of_tokens)


def trained(step, batches):
    state, seen = step.init(step.loss.init), []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(metrics)
    return step.params(state), seen


@functools.cache
def plain():
    """Return what the step without a curriculum makes of rows that were cut by hand."""
    curve = schedules.warmup(0.01, warmup_steps=4)
    consumed = [0, 2 / 8, 6 / 8, 10 / 8, 2.0, 3.0, 4.0]
    lr = lambda t: curve(torch.stack([torch.tensor(x, dtype=torch.float64) for x in consumed])[t.long()])
    step = fds.compose(fds.accumulate(2), fds.adamw(lr))(layers())
    return trained(step, [tuple(x[:, : GROWING(t)].contiguous() for x in ROWS) for t in range(1, 8)])


def by_tokens():
    return fds.adamw(schedules.by_tokens(schedules.warmup(0.01, warmup_steps=4), GROWING, 8))


def test_sequences_and_learning_rates_grow_as_by_hand_bit_for_bit():
    step = fds.compose(fds.curriculum("seqlen", GROWING), fds.accumulate(2), by_tokens())(layers())
    assert_same_bits(trained(step, [ROWS] * 7), plain())


@pytest.mark.parametrize(("stages", "data", "stage"), [(1, 2, 1), (1, 2, 2), (1, 2, 3), (2, 1, 0), (2, 2, 1)])
def test_ranks_that_slice_the_state_or_the_layers_train_as_one(stages, data, stage):
    def train():
        mesh = fds.mesh(pp=stages, dp=data)
        mine = [x.chunk(data)[mesh["dp"].index] for x in ROWS]
        count = 2 // data
        divided = fds.accumulate(count)
        if stages > 1:
            divided = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=count)
            if mesh["pp"].index:
                mine[0] = None  # what only the first stage reads
            else:
                mine[1] = None
        share = fds.shard_optimizer(mesh["dp"], stage=stage)
        step = fds.compose(fds.curriculum("seqlen", GROWING), divided, share, by_tokens())(layers())
        return trained(step, [tuple(mine)] * 7)

    for params, seen in fds.simulate(train, stages * data):
        torch.testing.assert_close(params, plain()[0], rtol=0, atol=1e-5)
        assert [float(m["lr"]) for m in seen] == [float(m["lr"]) for m in plain()[1]]
        torch.testing.assert_close([m["loss"] for m in seen], [m["loss"] for m in plain()[1]], rtol=1e-6, atol=0)


def shown(how, batch, *, length, dims=None, more=()):
    """Return what the loss of one call is given."""
    seen = []

    def loss(params, batch):
        seen.append(tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, batch))
        return params["w"].sum()

    step = fds.compose(fds.curriculum(how, lambda t: length, dims=dims), *more, fds.sgd(0.1))(loss)
    tensors = [x for x in tree.leaves(batch) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    step(step.init({"w": torch.ones(2)}), batch)
    assert all(map(torch.equal, tensors, before))
    return seen[0] if len(seen) == 1 else seen


def numbered(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


BATCH = {
    "tokens": numbered(4, 6, dtype=torch.long),
    "weights": numbered(4, 6),
    "features": numbered(4, 6, 3),
    "attention": numbered(4, 1, 6, 6),
    "padding": numbered(4, 1, 1, 6, dtype=torch.bool),
    "sees": numbered(4, 6, 6, dtype=torch.bool),
    "square": numbered(4, 6, 6),  # features, as many as there are tokens
    "heads": numbered(4, 6, 6, 2),
    "keys": numbered(4, 1, 6),
    "label": numbered(4, dtype=torch.long),
    "one": numbered(4, 1, dtype=torch.long),
    "image": numbered(4, 3, 6, 6),
    "scalar": torch.tensor(3.0),
    "word": "text",
    "positions": fds.whole(numbered(6)),
}
CUT = {
    "tokens": (slice(4),),
    "weights": (slice(4),),
    "features": (slice(4),),
    "attention": (slice(None), slice(4), slice(4)),
    "padding": (slice(None), slice(None), slice(4)),
    "sees": (slice(4), slice(4)),
    "square": (slice(4),),
    "heads": (slice(4),),
    "keys": (slice(None), slice(4)),
}


def test_without_dims_all_that_is_as_long_as_the_tokens_is_cut_and_the_rest_stays_whole():
    seen = shown("seqlen", BATCH, length=4)
    for name, x in BATCH.items():
        x = x.value if isinstance(x, fds.step.Whole) else x
        want = x[:, *CUT[name]] if name in CUT else x
        assert seen[name] == x if isinstance(x, str) else torch.equal(seen[name], want), name
    assert seen["tokens"].is_contiguous() and seen["tokens"].view(-1).shape == (16,)


def test_rows_become_rows_of_their_pieces_and_masks_what_a_piece_sees_of_itself():
    seen = shown("seqlen_reshape", BATCH, length=2)
    pieces = [(row, slice(2 * piece, 2 * piece + 2)) for row in range(4) for piece in range(3)]
    for name, x in BATCH.items():
        if name not in ("scalar", "word", "positions"):
            parts = [x[row, *(at if part.stop else part for part in CUT.get(name, ()))] for row, at in pieces]
            assert torch.equal(seen[name], torch.stack(parts)), name
    assert seen["word"] == "text" and torch.equal(seen["positions"], torch.arange(6.0))
    assert torch.equal(seen["tokens"].view(-1), BATCH["tokens"].view(-1))  # nothing is lost
    assert shown("seqlen_reshape", BATCH, length=4)["tokens"].tolist() == BATCH["tokens"][:, :4].tolist()
    assert shown("seqlen_reshape", {"x": BATCH["tokens"]}, length=5)["x"].shape == (4, 5)


def test_sequences_of_one_token_are_whole_whatever_else_has_one():
    batch = {"tokens": BATCH["tokens"][:, :1], "mask": numbered(4, 1, 1, 1), "label": numbered(4, 1)}
    for how in ("seqlen", "seqlen_reshape"):
        assert all(map(torch.equal, shown(how, batch, length=1).values(), batch.values()))


def test_dims_name_leaves_by_patterns_and_whole_ones_too():
    batch = (BATCH["tokens"], {"target": numbered(4, 9, dtype=torch.long), "at": fds.whole(numbered(9, 2))})
    seen = shown("seqlen", batch, length=4, dims={"1.t*": 1, "*.at": 0})
    assert torch.equal(seen[0], batch[0]) and torch.equal(seen[1]["target"], batch[1]["target"][:, :4])
    assert torch.equal(seen[1]["at"], batch[1]["at"].value[:4])
    seen = shown("seqlen", BATCH, length=4, dims={"features": (-1,), "image": (2, 3), "tokens": (), "t*": 1})
    assert (
        seen["features"].shape == (4, 6, 3) and seen["image"].shape == (4, 3, 4, 4) and seen["tokens"].shape == (4, 6)
    )
    seen = shown("seqlen_reshape", BATCH, length=3, dims={"features": 1, "attention": (3, 2)})
    assert seen["features"].shape == (8, 3, 3) and seen["tokens"].shape == (8, 6)
    assert torch.equal(seen["attention"][1], BATCH["attention"][0, :, 3:, 3:])


def test_a_length_of_the_whole_or_more_changes_nothing_and_microbatches_are_cut_each_by_itself():
    for length in (6, 7, 100):
        for how in ("seqlen", "seqlen_reshape"):
            assert shown(how, BATCH, length=length)["attention"].shape == (4, 1, 6, 6)
    parts = fds.Microbatches(({"x": BATCH["tokens"]}, {"x": BATCH["tokens"][:2, :3]}))
    first, second = shown("seqlen", parts, length=4, more=[fds.accumulate(2)])
    assert first["x"].shape == (4, 4) and second["x"].shape == (2, 3)
    first, second = shown("seqlen_reshape", parts, length=2, more=[fds.accumulate(2)])
    assert first["x"].shape == (12, 2) and second["x"].shape == (2, 2)


def test_a_function_makes_of_a_batch_what_it_likes_and_several_curricula_follow_one_another():
    def noisy(batch, difficulty):
        return {**batch, "weights": batch["weights"] + torch.rand(()) * 0 + difficulty}

    first = fds.curriculum(noisy, lambda t: 10 * t)
    targets = fds.curriculum("seqlen", lambda t: 3, dims={"attention": 3})
    seen = shown("seqlen", BATCH, length=4, more=[first, targets], dims={"tokens": 1, "attention": 2})
    assert torch.equal(seen["weights"], BATCH["weights"] + 10)  # call 1
    assert seen["tokens"].shape == (4, 4) and seen["attention"].shape == (4, 1, 4, 3)


def test_evaluations_get_whole_batches():
    step = fds.compose(fds.curriculum("seqlen", GROWING), fds.sgd(0.1))(layers())
    state = step.init(step.loss.init)
    other = fds.compose(fds.sgd(0.1))(step.loss)
    assert torch.equal(step.evaluate(state, ROWS)["loss"], other.evaluate(state, ROWS)["loss"])


@pytest.mark.parametrize(("dynamic", "most"), [(False, 4), (None, 2)])
def test_a_compiled_loss_is_compiled_for_as_many_lengths_as_the_schedule_has_or_once_for_all(dynamic, most):
    count = []

    def backend(module, inputs):
        count.append(module)
        return module.forward

    def loss(params, batch):
        return (params["w"][batch["tokens"]] ** 2).mean()

    torch.compiler.reset()
    compiled = fds.compile(backend=backend, dynamic=dynamic)
    step = fds.compose(fds.curriculum("seqlen", GROWING), compiled, fds.sgd(0.1))(loss)
    state = step.init({"w": torch.ones(24)})
    for _ in range(9):
        state, _ = step(state, {"tokens": BATCH["tokens"].repeat(1, 2)})
    assert len(count) <= most < 9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fds.curriculum("length", GROWING), "no such curriculum"),
        (lambda: fds.curriculum(["seqlen"], GROWING), "no such curriculum"),
        (lambda: fds.curriculum("seqlen", 8), "function of the step"),
        (lambda: fds.curriculum("seqlen"), "missing"),
        (lambda: fds.curriculum("seqlen", GROWING, dims={"tokens": "1"}), "dims"),
        (lambda: fds.curriculum("seqlen", GROWING, dims={1: 1}), "dims"),
        (lambda: fds.curriculum("seqlen", GROWING, dims=1), "dims"),
        (lambda: fds.curriculum(lambda batch, d: batch, GROWING, dims={"a": 1}), "no dims"),
    ],
)
def test_bad_arguments_are_refused_where_they_are_composed(make, words):
    with pytest.raises(ComposeError, match=words):
        make()


@pytest.mark.parametrize(
    ("how", "batch", "dims", "words"),
    [
        ("seqlen", {"x": numbered(4, 6)}, None, "nobody knows"),
        ("seqlen", {"x": numbered(4, 6), "y": None}, None, "nobody knows"),
        ("seqlen", {**BATCH, "other": numbered(4, 7, dtype=torch.int)}, None, "(?s)several lengths.*other 7"),
        ("seqlen", BATCH, {"token": 1}, "'token'"),
        ("seqlen", (BATCH["tokens"], None), {"0.tokens": 1}, "'0.tokens'"),
        ("seqlen", BATCH, {"label": 1}, "label"),
        ("seqlen", BATCH, {"tokens": 0}, "not dim 0"),
        ("seqlen", BATCH, {"tokens": (1, -1)}, "each once"),
        ("seqlen", BATCH, {"word": 1}, "str"),
        ("seqlen", {"x": BATCH["tokens"].to_sparse()}, {"x": 1}, "dense"),
        ("seqlen_reshape", BATCH | {"x": numbered(4, 3).to_sparse()}, None, "layout"),
        ("seqlen_reshape", BATCH, {"tokens": 1, "image": 1}, "in common"),
        ("seqlen_reshape", {"x": numbered(4, 6, 6, 6)}, {"x": (1, 2, 3)}, "one or two dims"),
        ("seqlen", {"x": {torch.ones(2)}}, None, "hides tensors"),
    ],
)
def test_leaves_that_cannot_be_cut_are_refused(how, batch, dims, words):
    with pytest.raises(BatchError, match=words):
        shown(how, batch, length=2, dims=dims)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, torch.tensor(2)])
def test_what_is_no_length_is_refused_with_its_call_and_the_state_stays(value):
    step = fds.compose(fds.curriculum("seqlen", lambda t: 3 if t < 2 else value), fds.donate(), fds.sgd(0.1))(layers())
    state = step.init(step.loss.init)
    state, _ = step(state, ROWS)
    with pytest.raises(ScheduleError, match="call 2"):
        step(state, ROWS)
    assert float(step.evaluate(state, ROWS)["loss"]) > 0


def test_rows_of_no_length_and_no_rows_meet_the_errors_of_the_step():
    assert shown("seqlen", {"x": BATCH["tokens"], "y": numbered(4, 0)}, length=4)["y"].shape == (4, 0)
    for how in ("seqlen", "seqlen_reshape"):
        with pytest.raises(BatchError, match="has no rows"):
            shown(how, {"x": BATCH["tokens"][:0], "m": numbered(0, 1, 6, 6), "l": numbered(0)}, length=2)


def test_ranks_that_pass_parts_of_rows_and_steps_in_one_graph_are_refused():
    def loss(params, batch):
        return params["w"].sum() * batch["x"].float().mean()

    def train():
        shared = fds.context_parallel(fds.mesh(sp=2)["sp"])
        step = fds.compose(fds.curriculum("seqlen", GROWING), shared, fds.sgd(0.1))(loss)
        step(step.init({"w": torch.ones(2)}), {"x": BATCH["tokens"]})

    with pytest.raises(ComposeError, match="parts of sequences"):
        fds.simulate(train, 2)
    step = fds.compose(fds.curriculum("seqlen", GROWING), fds.compile(whole=True, backend="eager"), fds.sgd(0.1))(loss)
    state, _ = step(step.init({"w": torch.ones(2)}), {"x": BATCH["tokens"]})
    with pytest.raises(ComposeError, match=r"call\.calls"):
        step(state, {"x": BATCH["tokens"]})
