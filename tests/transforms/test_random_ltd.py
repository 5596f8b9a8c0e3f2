"""Random layerwise token dropping: the loop by hand that gathers the same tokens, wherever a step runs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans
from fds.errors import ComposeError, LossError, ScheduleError
from fds.loss import Block as Named
from fds.nn.kept_tokens import Tokens
from tests import subsets
from tests.bits import assert_same_bits

ROWS, S, WIDTH, HEADS, MICROBATCHES, CALLS, LR = 8, 6, 8, 2, 4, 4, 0.5
KEPT = lambda t: 2 + t  # of the last call almost all


class Attention(nn.Module):
    """A block as transformers writes it: beside its input it is given what it needs by name."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, position_ids=None):
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if position_embeddings is not None:
            cos, sin = (x[:, None] for x in position_embeddings)
            q, k = (x * cos + x.flip(-1) * sin for x in (q, k))
        if position_ids is not None:
            hidden_states = hidden_states + position_ids[..., None] / 10
        y = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=attention_mask is None)
        return hidden_states + self.drop(self.out(y.transpose(1, 2).flatten(2)))


def layers(dropout=0.0):
    torch.manual_seed(0)
    blocks = [Attention(dropout).double() for _ in range(3)]
    first, last = nn.Linear(3, WIDTH).double(), nn.Linear(WIDTH, 2).double()
    return fds.Layers([first, *blocks, last], lambda out, y: (out - y).square().mean())


def batch(call):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(ROWS, S, n, generator=g, dtype=torch.float64) for n in (3, 2)]


def train(*transforms, state=None, calls=range(CALLS), loss=None, keep=KEPT):
    loss = layers(0.1) if loss is None else loss
    step = fds.compose(*transforms, fds.random_ltd([1, 2, 3], keep), fds.sgd(LR))(loss)
    state, data = state or step.init(loss.init, key=3), step.dimensions.data
    for call in calls:
        rows = batch(call)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return step, state


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def plain():
    step, state = train(fds.accumulate(MICROBATCHES))
    return step.params(state), state.slots["random_ltd"]


@pytest.fixture
def drawn(monkeypatch):
    return subsets.noted(monkeypatch)


def test_the_loop_written_by_hand_that_gathers_the_same_tokens(drawn):
    loss = layers()
    step, state = train(fds.accumulate(MICROBATCHES), loss=loss)
    assert len({tuple(index.flatten().tolist()) for index in drawn[:12]}) == 12  # of microbatches and layers
    by_hand = {name: x.clone().requires_grad_() for name, x in step.init(loss.init, key=3).params.items()}
    apply = fds.functional(Attention().double())[0]
    for call in range(CALLS):
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            x = rows[0] @ by_hand["0.weight"].T + by_hand["0.bias"]
            for i in (1, 2, 3):
                own = {name[2:]: p for name, p in by_hand.items() if name[0] == str(i)}
                index = drawn.pop(0) if KEPT(call) < S else torch.arange(S).expand(len(x), -1)
                assert index.shape[1] == KEPT(call) and bool((index.diff(dim=1) > 0).all())
                y = x.clone()
                for row, places in enumerate(index):
                    y[row, places] = apply(own, x[row, places][None])[0]
                x = y
            out = x @ by_hand["4.weight"].T + by_hand["4.bias"]
            ((out - rows[1]).square().mean() / MICROBATCHES).backward()
        with torch.no_grad():
            for x in by_hand.values():
                x -= LR * x.grad
                x.grad = None
    close(step.params(state), {name: x.detach() for name, x in by_hand.items()})


@pytest.mark.parametrize("keep", [lambda t: S, lambda t: 10 * S])
def test_keeping_all_tokens_is_the_identity_bit_for_bit(keep):
    loss = layers(0.5)
    step = fds.compose(fds.accumulate(2), fds.sgd(LR))(loss)
    state, _ = step(step.init(loss.init, key=3), batch(0))
    keeping, new = train(fds.accumulate(2), loss=loss, keep=keep, calls=[0])
    assert_same_bits(keeping.params(new), step.params(state))
    assert {name: int(x) for name, x in new.slots["random_ltd"].items()} == {"dropped": 0, "kept": 3 * ROWS * S}
    evaluated = fds.compose(fds.random_ltd([1], lambda t: 1), fds.sgd(LR))(loss).evaluate(new, batch(1))
    assert_same_bits(evaluated, step.evaluate(state, batch(1)))


def test_any_subset_is_as_likely_for_every_row():
    rows = 4000
    index = Tokens.drawn(7, torch.empty(rows, 5, 1), 2, "batch_seq", Named(1, 1, "1"), first=False).index
    counts = torch.bincount(index[:, 0] * 5 + index[:, 1])
    counts = counts[counts > 0].double()
    assert len(counts) == 10
    assert ((counts - rows / 10).square() / (rows / 10)).sum() < 27.88  # chi-square, 9 degrees of freedom, 0.001


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_recomputed_layers_keep_the_same(plain, place):
    loss, checkpoint, microbatches = layers(0.1), fds.checkpoint_activations(), fds.accumulate(MICROBATCHES)
    drops = fds.random_ltd([1, 2, 3], KEPT)
    parts = (checkpoint, drops) if place == "inside" else (drops, checkpoint)
    step = fds.compose(*parts, microbatches, fds.sgd(LR))(loss)
    state = step.init(loss.init, key=3)
    for call in range(CALLS):
        state, _ = step(state, batch(call))
    assert_same_bits([step.params(state), state.slots["random_ltd"]], list(plain))


@pytest.mark.parametrize("stage", range(4))
def test_ranks_keep_what_one_rank_keeps(plain, stage):
    def body():
        shared = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=stage)
        step, state = train(fds.accumulate(MICROBATCHES // 2), shared)
        return step.params(state), state.slots["random_ltd"]

    for got in fds.simulate(body, 2):
        close(got, plain)


def test_stages_of_a_pipeline_keep_what_one_rank_keeps(plain):
    def body():
        axis = fds.mesh(pp=2)["pp"]
        step, state = train(fds.pipeline(plans.one_f_one_b, axis, num_microbatches=MICROBATCHES))
        return step.params(state), state.slots["random_ltd"]

    for got in fds.simulate(body, 2):
        close(got, plain)


def test_a_run_that_was_stopped_keeps_what_it_would_have(plain, tmp_path):
    """Law 14: bit for bit on as many ranks, to the order of sums on others."""

    def body(calls, save=False):
        shared = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=3)
        parts = fds.accumulate(MICROBATCHES // 2), shared
        if save or calls[0] == 0:
            step, state = train(*parts, calls=calls)
        else:
            step = fds.compose(*parts, fds.random_ltd([1, 2, 3], KEPT), fds.sgd(LR))(layers(0.1))
            step, state = train(*parts, state=fds.load(tmp_path, step, layers(0.1).init)[0], calls=calls)
        if save:
            fds.save(tmp_path, state, step)
        return step.params(state), state.slots["random_ltd"]

    fds.simulate(lambda: body(range(2), save=True), 2)
    whole = fds.simulate(lambda: body(range(CALLS)), 2)[0]
    assert_same_bits(fds.simulate(lambda: body(range(2, CALLS)), 2)[0], whole)
    step = fds.compose(fds.accumulate(MICROBATCHES), fds.random_ltd([1, 2, 3], KEPT), fds.sgd(LR))(layers(0.1))
    state, _ = fds.load(tmp_path, step, layers(0.1).init)
    step, state = train(fds.accumulate(MICROBATCHES), state=state, calls=range(2, CALLS))
    close((step.params(state), state.slots["random_ltd"]), plain)


def encoder(axis=None):
    torch.manual_seed(0)
    block = lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.1, batch_first=True, dtype=torch.float64)
    loss = fds.Layers(
        [nn.Linear(3, WIDTH).double(), block(), block()], lambda out, y: (out[..., :2] - y).square().mean()
    )
    more = [] if axis is None else [fds.tensor_parallel(axis)]
    step = fds.compose(*more, fds.random_ltd("[12]", lambda t: 3), fds.sgd(LR))(loss)
    state, metrics = step(step.init(loss.init, key=1), batch(0))
    return step.params(state), metrics, state.slots


def test_ranks_of_a_tensor_axis_keep_the_same_tokens():
    got = fds.simulate(lambda: encoder(fds.mesh(tp=2)["tp"]), 2)
    close(got[0], encoder())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of its own code
def test_compiled_layers_keep_the_same(plain):
    step, state = train(fds.compile(backend="eager"), fds.accumulate(MICROBATCHES))
    close((step.params(state), state.slots["random_ltd"]), plain)


class Model(nn.Module):
    def __init__(self, dropout=0.0, *, recomputes=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.recomputes = nn.Linear(3, WIDTH), recomputes
        self.blocks = nn.ModuleList([Attention(dropout) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x, arguments):
        x = self.embed(x)
        for block in self.blocks:
            if self.recomputes:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, **arguments)
            else:
                x = block(x, **arguments)
        return self.head(x)


def arguments(kind):
    g = torch.Generator().manual_seed(5)
    document = torch.tensor([0, 0, 1, 1, 1, 2]).expand(ROWS, -1)
    same = (document[:, :, None] == document[:, None, :])[:, None]
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    padding = torch.rand(ROWS, 1, 1, S, generator=g) < 0.8
    padding[..., 0] = True
    angles = torch.arange(S)[None, :, None] / (1.0 + torch.arange(WIDTH // HEADS))
    return {
        "nothing": {},
        "causal": {"attention_mask": causal[None, None]},
        "document": {"attention_mask": same & causal},
        "padding": {"attention_mask": torch.where(padding, 0.0, -torch.inf).double()},
        "heads": {"attention_mask": torch.randn(1, HEADS, S, S, generator=g, dtype=torch.float64)},
        "rotary": {"position_embeddings": (angles.cos().double(), angles.sin().double())},
        "positions": {"position_ids": torch.arange(S).expand(ROWS, -1), "attention_mask": causal.expand(1, 1, S, S)},
    }[kind]


@pytest.mark.parametrize("recomputes", ["", "within", "around"])
@pytest.mark.parametrize("kind", ["nothing", "causal", "document", "padding", "heads", "rotary", "positions"])
def test_modules_are_given_what_belongs_to_their_tokens(kind, recomputes, drawn):
    model, given, (x, y) = Model(recomputes=recomputes == "within"), arguments(kind), batch(0)
    apply, params, _ = fds.functional(model)
    loss = lambda params, rows: (apply(params, rows[0], given) - rows[1]).square().mean()
    more = [fds.checkpoint_activations()] * (recomputes == "around")
    step = fds.compose(fds.random_ltd("blocks.1", lambda t: 3), *more, fds.sgd(1.0))(loss)
    state = step.init(params)
    new, _ = step(state, (x, y))
    blocks, hidden = model.blocks, model.embed(x)
    hidden, rows = blocks[0](hidden, **given), []
    for row, at in enumerate(drawn[0]):
        of_row = lambda x, row=row: x[row : row + 1] if len(x) == ROWS else x
        own = {}
        for name, value in given.items():
            if name == "attention_mask":
                mask = of_row(value)[..., at]
                own[name] = mask if mask.shape[-2] == 1 else mask[..., at, :]
            else:
                own[name] = tuple(of_row(v)[:, at] for v in value) if isinstance(value, tuple) else of_row(value)[:, at]
        rows.append(hidden[row].index_put((at,), blocks[1](hidden[row : row + 1, at], **own)[0]))
    (model.head(blocks[2](torch.stack(rows), **given)) - y).square().mean().backward()
    for name, p in model.named_parameters():
        close(state.params[name] - new.params[name], p.grad)
    assert all(torch.equal(drawn[0], index) for index in drawn)


def tokens(order="batch_seq", rows=ROWS, first=True):
    x = torch.arange(rows * S).view(rows, S, 1)
    return Tokens.drawn(0, x if order == "batch_seq" else x.movedim(0, 1), 3, order, Named(1, 1, "1"), first=first)


def test_containers_of_arguments_are_looked_into_and_what_hides_tensors_is_refused():
    class Hides:
        def __init__(self, x):
            self.mask = x

    x, mask, block = torch.randn(ROWS, S, 4), torch.rand(ROWS, S) < 0.5, Named(1, 1, "1", ("x", "more"))
    kept = Tokens.drawn(0, x, 3, "batch_seq", block, first=True)
    got = []
    forward = lambda x, more: got.append(more) or x
    kept.called(forward, x, (x, {"masks": [mask], "heads": 3}), {})
    assert got[0]["heads"] == 3 and torch.equal(got[0]["masks"][0], mask.gather(1, kept.index))
    with pytest.raises(LossError, match="hides tensors"):
        kept.called(forward, x, (x, Hides(mask)), {})


def test_activations_may_have_tokens_first():
    rows, before = tokens(), tokens("seq_batch")
    x = torch.randn(ROWS, S, 4)
    assert torch.equal(rows.index, before.index)
    assert_same_bits(before.take(x.movedim(0, 1)).movedim(0, 1), rows.take(x))
    assert_same_bits(
        before.put(x.movedim(0, 1), before.take(2 * x.movedim(0, 1))).movedim(0, 1), rows.put(x, rows.take(2 * x))
    )
    angles = torch.randn(S, 1, 1, 4)
    assert_same_bits(before.of(angles, "rotary_pos_emb")[:, :, 0], angles[:, 0, 0][before.index].movedim(0, 1))


@pytest.mark.parametrize(
    ("shape", "name", "want"),
    [
        ((S, S), "src_mask", "cropped"),
        ((ROWS, S), "src_key_padding_mask", "rows"),
        ((1, S), "", "rows"),
        ((ROWS * HEADS, 1, S), "alibi", "keys"),
        ((1, 1, S, 4), "cos", "by head"),
        ((7,), "", "as it is"),
        ((), "", "as it is"),
        ((S,), "position_ids", "refused"),
        ((S, 4), "cos", "refused"),
        ((ROWS, S, S), "", "refused"),
        ((ROWS, 5, S, 7), "attention_mask", "refused"),
        ((ROWS, S, 4), "encoder_hidden_states", "refused"),
    ],
)
def test_arguments_are_known_by_name_and_shape(shape, name, want):
    kept, x = tokens(), torch.randn(shape)
    if want == "refused":
        with pytest.raises(LossError, match="random_ltd"):
            kept.of(x, name)
        return
    x = torch.ones(shape).tril() if want == "cropped" else x
    got = kept.of(x, name)
    if want == "cropped":
        assert_same_bits(got, x[:3, :3])
        with pytest.raises(LossError, match="more than their order"):
            kept.of(torch.randn(S, S), name)
    elif want == "rows":
        assert_same_bits(got, torch.stack([x[min(row, len(x) - 1), at] for row, at in enumerate(kept.index)]))
    elif want == "keys":
        assert_same_bits(got[:, 0], torch.stack([x[i, 0, kept.index[i // HEADS]] for i in range(len(x))]))
    elif want == "by head":
        assert_same_bits(got[:, 0], x[0, 0][kept.index])
    else:
        assert got is x


@functools.cache
def kept_angles(n):
    return torch.arange(n * WIDTH).view(n, WIDTH) / 100


class OfItsOwn(nn.Module):
    """A layer that counts its tokens by itself."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.randn(2 * S, WIDTH), persistent=False)
        self.register_buffer("causal", torch.ones(S, S).tril(), persistent=False)

    def forward(self, x):
        n = x.shape[1]
        if self.how == "arange":
            x = x + torch.arange(n, device=x.device)[:, None]
        elif self.how == "slice":
            x = x + self.angles[:n]
        elif self.how == "cached":
            x = x + kept_angles(n)
        elif self.how == "zeros":
            x = x + torch.zeros(n, WIDTH)
        weights = (x @ x.mT).masked_fill(self.causal[:n, :n] == 0, -torch.inf).softmax(-1)
        return self.linear(weights @ x)


@pytest.mark.parametrize("how", ["arange", "slice", "cached", "mask", "zeros"])
def test_a_layer_that_counts_tokens_by_itself_is_refused(how):
    torch.manual_seed(0)
    loss = fds.Layers([nn.Linear(3, WIDTH), OfItsOwn(how)], lambda out, y: (out[..., :2] - y).square().mean())
    step = fds.compose(fds.random_ltd(1, lambda t: 1 + 2 * t), fds.sgd(0.1))(loss)
    state, rows = step.init(loss.init), [x.float() for x in batch(0)]
    state, _ = step(state, rows)  # of a single token nothing can be told
    kept_angles(3)  # an evaluation may have asked before
    if how in ("mask", "zeros"):  # causal, or alike: right for any tokens
        step(state, rows)
        return
    with pytest.raises(LossError, match="counts tokens by itself"):
        step(state, rows)


def test_what_a_tuple_has_beside_tokens_goes_on_whole():
    torch.manual_seed(0)

    def layer(given):
        x, padding = given
        return x * 2 * padding[..., None], padding

    first, last = lambda x: (x, torch.ones(x.shape[:2], dtype=torch.bool)), lambda given: (given[0], given[1].double())
    loss = fds.Layers(
        [nn.Linear(3, 2).double(), first, layer, last], lambda out, y: (out[0] * out[1][..., None] - y).sum()
    )
    step = fds.compose(fds.random_ltd(2, lambda t: 3), fds.sgd(0.1))(loss)
    _, metrics = step(step.init(loss.init), batch(0))
    assert metrics["loss"].isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 3), "takes a schedule of tokens"),
        (([], KEPT), "names layers"),
        ((-1, KEPT), "names layers"),
        (([1.5], KEPT), "names layers"),
        (([9], KEPT), "no layer of this number"),
        (("block.*", KEPT), "a pattern matches no layer"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ComposeError, match=message):
        fds.compose(fds.random_ltd(*arguments), fds.sgd(0.1))(layers())
    with pytest.raises(ComposeError, match="no such order"):
        fds.random_ltd(1, KEPT, order="rows")


def test_features_are_no_tokens():
    loss = fds.Layers([nn.Linear(3, WIDTH), torch.tanh], lambda out, y: out.square().mean())
    step = fds.compose(fds.random_ltd(1, lambda t: 3), fds.sgd(0.1))(loss)
    with pytest.raises(LossError, match="something else than tokens"):
        step(step.init(loss.init), (torch.ones(4, 3), torch.ones(4)))


@pytest.mark.parametrize("value", [0, 2.5, True, None])
def test_a_schedule_returns_numbers_of_tokens(value):
    loss = layers()
    step = fds.compose(fds.random_ltd(1, lambda t: value), fds.sgd(0.1))(loss)
    with pytest.raises(ScheduleError, match="no number of tokens"):
        step(step.init(loss.init), batch(0))


def test_modules_that_cannot_be_told_or_are_compiled_whole_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Model(), Model()

        def forward(self, x):
            return self.a(x, {}) + self.b(x, {})

    apply, params, _ = fds.functional(Two())
    loss = lambda params, rows: (apply(params, rows[0]) - rows[1]).square().mean()
    with pytest.raises(ComposeError, match="the one list of modules"):
        fds.compose(fds.random_ltd([1], KEPT), fds.sgd(0.1))(loss)
    step = fds.compose(fds.compile(backend="eager"), fds.random_ltd("a.blocks.1", KEPT), fds.sgd(0.1))(loss)
    with pytest.raises(LossError, match="compiled as one function"):
        step(step.init(params), batch(0))
    with pytest.raises(ComposeError, match="finds no module"):
        fds.compose(fds.random_ltd([1], KEPT), fds.sgd(0.1))(lambda params, rows: params["w"].sum())


def test_parts_of_rows_are_refused():
    def body():
        step = fds.compose(fds.context_parallel(fds.mesh(sp=2)["sp"]), fds.random_ltd([1], KEPT), fds.sgd(0.1))(
            layers()
        )
        with pytest.raises(ComposeError, match="ranks pass parts of them"):
            step(step.init(layers().init), batch(0))

    fds.simulate(body, 2)
