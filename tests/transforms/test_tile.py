"""Modules in tiles of tokens: the bits of whole rows, and the bytes of one tile."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fds
from fds import plans
from fds.errors import ComposeError, FdsError, LossError
from tests.bits import assert_same_bits
from tests.memory import peak_bytes

ROWS, LENGTH, WIDTH, TOKENS = 4, 16, 4, 7  # 64 tokens of a call in ten tiles, the last one of a single token


class Block(nn.Module):
    """A layer as those of transformers: what it returns is kept nowhere."""

    def __init__(self, *mlp):
        super().__init__()
        self.norm = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(*(mlp or (nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def layers(*mlp, dtype=torch.float64):
    """Return a loss whose numbers are small integers: sums of them are exact in any order."""
    torch.manual_seed(0)
    mean = lambda y, target: fds.Mean((y - target).square().sum(), torch.tensor(float(y.numel())))
    loss = fds.Layers([Block(*mlp), Block(*mlp)], mean)
    torch.manual_seed(1)
    return loss, {n: torch.randint(-1, 2, p.shape).to(dtype) for n, p in loss.init(fds.random.key(0)).items()}


def batch(call, dtype=torch.float64):
    g = torch.Generator().manual_seed(call)
    return [torch.randint(-1, 2, (ROWS, LENGTH, WIDTH), generator=g).to(dtype) for _ in range(2)]


def train(*transforms, loss=None, dtype=torch.float64):
    """Return parameters after a call, its loss, and that of an evaluation before it: later ones have too many bits."""
    loss, params = loss or layers(dtype=dtype)
    step = fds.compose(*transforms, fds.sgd(2.0**-10))(loss)
    state, data = step.init(params, key=3), step.dimensions.data
    share = lambda rows: rows if data is None else [x.chunk(data.size)[data.index] for x in rows]
    evaluated = step.evaluate(state, share(batch(9, dtype)))["loss"]
    for _ in range(2):  # with the same numbers; the second call may be the recorded one
        after, metrics = step(state, share(batch(0, dtype)))
    return step.params(after), metrics["loss"], evaluated


def tiled():
    return fds.tile("*.mlp", tokens=TOKENS)


@pytest.mark.parametrize(
    "beside",
    [
        list,
        lambda: [fds.checkpoint_activations()],
        lambda: [fds.checkpoint_activations(every=2, store="host")],
        lambda: [fds.accumulate(2), fds.clip_by_global_norm(1e9)],
        lambda: [fds.freeze("*.mlp.0.weight")],
    ],
    ids=["alone", "checkpointed", "on the host", "accumulated", "frozen"],
)
def test_the_bits_are_those_of_whole_rows(beside):
    assert_same_bits(train(tiled(), *beside()), train(*beside()))


def test_gradients_of_bits_that_ranks_share_are_those_of_whole_rows():
    def sharded(*transforms):
        return train(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3), *transforms)

    want = fds.simulate(sharded, 2)
    assert_same_bits(fds.simulate(lambda: sharded(tiled()), 2), want)

    def staged(*transforms):
        pipe = fds.pipeline(plans.one_f_one_b, fds.mesh(pp=-1)["pp"], num_microbatches=2)
        return train(pipe, *transforms)

    assert_same_bits(fds.simulate(lambda: staged(tiled()), 2), fds.simulate(staged, 2))


class ByHand(nn.Module):
    """Tiles by torch's own checkpoint."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        tiles = x.reshape(1, -1, WIDTH).split(TOKENS, 1)
        return torch.cat([checkpoint(self.inner, tile, use_reentrant=False) for tile in tiles], 1).view(x.shape)


def test_what_is_dropped_is_dropped_again_in_backward():
    inner = lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    _, params = loss = layers(inner())
    want = train(loss=(layers(ByHand(inner()))[0], {n.replace(".0.", ".0.inner.", 1): x for n, x in params.items()}))
    renamed = {n.replace(".inner", ""): x for n, x in want[0].items()}
    for others in ([], [fds.checkpoint_activations()]):
        got = train(tiled(), *others, loss=loss)
        assert_same_bits(got[0], {n: renamed[n] for n in got[0]})
        assert torch.equal(got[1], want[1])


def test_a_layer_that_is_checkpointed_is_computed_as_often_as_without_tiles():
    """Forward once, and once in backward: the layer's own recomputation ends where its last module would begin."""
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(x.numel() // WIDTH)
            return super().forward(x)

    loss = layers(Counted(WIDTH, WIDTH))
    train(tiled(), fds.checkpoint_activations(), loss=loss)  # the first calls look at a tile too
    step = fds.compose(tiled(), fds.checkpoint_activations(), fds.sgd(0.1))(loss[0])
    state, _ = step(step.init(loss[1]), batch(0))
    calls.clear()
    step(state, batch(0))
    assert sum(calls) == 2 * 2 * ROWS * LENGTH


def test_gradients_of_16_bits_are_summed_in_32():
    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.inner(x)

    apply, _, _ = fds.functional(Ones().to(torch.bfloat16))
    step = fds.compose(fds.tile("inner", tokens=1), fds.sgd(1.0))(lambda p, x: apply(p, x).sum() / 1024)
    state = step.init({"inner.weight": torch.ones(1, 1, dtype=torch.bfloat16)})
    state, _ = step(state, torch.ones(1, 1024, 1, dtype=torch.bfloat16))
    assert float(step.params(state)["inner.weight"]) == 0.0  # a sum in 16 bits ends at 256


@pytest.mark.parametrize("outer", [fds.autocast(torch.bfloat16), fds.precision(torch.bfloat16)], ids=str)
def test_casts_are_those_of_whole_rows(outer):
    start = layers(dtype=torch.float32)[1]
    exact, whole = train(dtype=torch.float32)[0], train(outer, dtype=torch.float32)[0]
    for name, x in train(outer, tiled(), dtype=torch.float32)[0].items():
        if "norm" in name:  # gradients of tokens have the same bits
            assert torch.equal(x, whole[name])
        else:  # sums of ten tiles, and their sum, are rounded: each to 2^-9 of what it is
            assert (x - exact[name]).abs().max() <= 11 * 2.0**-9 * (exact[name] - start[name]).abs().max()


def test_what_lies_in_a_module_is_there_for_one_tile():
    """Of rows of any length: whatever else is in memory has the width of what a module is given."""
    wide = 64 * WIDTH

    def peak(tokens, length):
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        apply, params, _ = fds.functional(nn.Sequential(mlp))
        loss = lambda p, x: apply(p, x).square().sum()
        step = fds.compose(fds.tile("0", tokens=tokens), fds.sgd(0.1), fds.donate())(loss)
        x = torch.randn(1, length, WIDTH)
        state, _ = step(step.init(params), x)
        return peak_bytes(lambda: step(state, x))

    short, long = peak(32, 256), peak(32, 1024)
    assert long - short <= 768 * WIDTH * 4 * 5  # the result, its square's gradient, and some of that width
    assert peak(1024, 1024) - long > 900 * wide * 4


def test_loss_and_head_hold_one_chunk_of_logits():
    vocabulary = 512

    def peak(length):
        hidden, weight = torch.randn(length, WIDTH, requires_grad=True), torch.randn(vocabulary, WIDTH)
        targets = torch.zeros(length, dtype=torch.int64)
        return peak_bytes(lambda: fds.kernels.linear_cross_entropy(hidden, weight, targets, chunk_tokens=32).backward())

    assert peak(1024) - peak(256) <= 768 * (WIDTH * 4 * 3 + 8)


def test_ranks_that_share_rows_have_tiles_of_their_parts():
    def parts(n, *mlp):
        axis = fds.mesh(sp=n)["sp"]
        loss, params = layers(*mlp)
        step = fds.compose(fds.context_parallel(axis), tiled(), fds.sgd(2.0**-10))(loss)
        state = step.init(params)
        state, _ = step(state, [x.chunk(n, 1)[axis.index] for x in batch(0)])
        return step.params(state)

    want = parts(1)
    for got in fds.simulate(lambda: parts(2), 2):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-12, atol=1e-12)
    drops = lambda: parts(2, nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(LossError, match="drawn for a tile"):
        fds.simulate(drops, 2)


class Reads(nn.Module):
    """A module of which a function says what it does."""

    def __init__(self, function, *more):
        super().__init__()
        self.function, self.more = function, more
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self, x)


OUTSIDE = torch.ones((), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: m.inner(x.cumsum(1)), "does not treat every token by itself"),
        (lambda m, x: m.inner(x.flip(1)), "does not treat every token by itself"),
        (lambda m, x: m.inner(x) - m.inner(x).mean(1, keepdim=True), "does not treat every token by itself"),
        (lambda m, x: m.inner(x) + torch.arange(x.shape[1])[:, None], "does not treat every token by itself"),
        (lambda m, x: (m.inner(x), x), "does not return one tensor"),
        (lambda m, x: m.inner(x).flatten(0, 1), "does not return one tensor"),
        (lambda m, x: m.inner(x.relu_()), "writes over what it is given"),
        (lambda m, x: m.inner(x) * OUTSIDE, "neither its own nor an argument"),
    ],
    ids=["sums before", "turns round", "means", "numbers", "two", "other dims", "writes", "other parameters"],
)
def test_a_module_that_cannot_be_cut_is_refused(function, words):
    loss, params = layers(Reads(function))
    with pytest.raises(LossError, match=words):
        train(tiled(), loss=(loss, params))


def test_what_a_module_is_given_has_its_tokens():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Bilinear(WIDTH, WIDTH, WIDTH)

        def forward(self, x, other):
            return self.inner(x, other)

    apply, params, _ = fds.functional(Two())
    run = lambda *t: fds.compose(*t, fds.sgd(0.1))(lambda p, b: apply(p, *b).square().sum())
    x, other = torch.randn(2, ROWS, LENGTH, WIDTH)
    want, got = run(), run(fds.tile("inner", tokens=TOKENS))
    (a, _), (b, _) = want(want.init(params), (x, other)), got(got.init(params), (x, other))
    torch.testing.assert_close(a.params, b.params)
    with pytest.raises(LossError, match="has other tokens"):
        got(got.init(params), (x, fds.whole(other[:1, :1])))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fds.tile("*.mlp", tokens=0), "tokens is that of a tile"),
        (lambda: fds.tile([]), "modules names modules"),
        (lambda: train(fds.tile("*.mlpp")), "matches no module"),
        (lambda: train(tiled(), tiled()), "in tiles twice"),
        (lambda: train(fds.tile(["0.mlp", "0.mlp.0"])), "in tiles twice"),
    ],
)
def test_a_bad_argument_is_an_error(call, words):
    with pytest.raises(ComposeError, match=words):
        call()


def test_a_graph_draws_nothing_again():
    loss = layers(nn.Dropout(0.5))
    with pytest.raises(FdsError, match="drawn again"):
        train(fds.compile(whole=True, backend="eager"), tiled(), loss=loss)
