"""Pruned rows, channels and heads: the loop by hand, wherever a step runs, and smaller modules of what is left."""

# much of what is passed here is wrong on purpose

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.compression import Cut, semi_structured, sensitivity, shrink, with_scores
from fds.errors import ComposeError, FdsError, StateError
from fds.step import Call
from tests.bits import assert_same_bits

ROWS, CALLS, LR, HEADS, WIDTH = 8, 6, 0.2, 4, 8


class Attention(nn.Module):
    """Attention with one matrix for queries, keys and values, one after another or head by head."""

    def __init__(self, interleaved=False):
        super().__init__()
        self.num_heads, self.interleaved = HEADS, interleaved
        self.qkv, self.out = nn.Linear(WIDTH, 3 * 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        shape = (self.num_heads, 3, -1) if self.interleaved else (3, self.num_heads, -1)
        qkv = self.qkv(x).unflatten(-1, shape)
        q, k, v = (qkv.transpose(-3, -2) if self.interleaved else qkv).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def multilayer():
    # of sigmoid(0) much is left, unless what takes it is masked too
    return nn.Sequential(nn.Linear(4, 12), nn.Sigmoid(), nn.Linear(12, 8), nn.Sigmoid(), nn.Linear(8, 2))


def convolutions():
    parts = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 2)]
    parts[1].eval()
    return nn.Sequential(*parts)


def transformer(interleaved=False):
    return nn.Sequential(nn.Linear(4, WIDTH), Attention(interleaved), Attention(interleaved), nn.Linear(WIDTH, 2))


INPUTS = {multilayer: (4,), convolutions: (1, 6, 6), transformer: (5, 4)}


def batch(kind, call):
    g = torch.Generator().manual_seed(call)
    out = (5, 2) if kind is transformer else (2,)
    return [torch.randn(ROWS, *n, generator=g, dtype=torch.float64) for n in (INPUTS[kind], out)]


def problem(kind, *scores, zeros=False, **more):
    torch.manual_seed(0)
    module = kind(**more).double()
    for pattern, of in scores:
        heads = {"num_heads": HEADS} if of == "heads" else {}
        module = with_scores(module, pattern, of=of, zeros=zeros, **heads)
    apply, params, _ = fds.functional(module)
    return module, lambda params, rows: (apply(params, rows[0]) - rows[1]).square().mean(), params


def train(kind, step, state, calls=range(CALLS)):
    data = step.dimensions.data
    for call in calls:
        rows = batch(kind, call)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return state


def by_hand(kind, loss, params, gates, optimize=lambda name, p, grad: p - LR * grad):
    """Return parameters after the plain loop; `gates(t, params, leaves)` returns what the loss sees of some leaves."""
    params = {name: x.clone() for name, x in params.items()}
    for t in range(CALLS):
        leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
        loss({**leaves, **gates(t, params, leaves)}, batch(kind, t)).backward()
        grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
        params = {name: optimize(name, x, grads[name]) for name, x in params.items()}
    return params


def keeps(scores, density):
    mask = torch.zeros(len(scores), dtype=torch.float64)
    mask[scores.argsort(descending=True, stable=True)[: math.ceil(density * len(scores))]] = 1
    return mask


class Gates:
    """Rows of two linear layers with their biases, and the columns of what takes them, with masks made at update 2."""

    def __init__(self):
        self.masks = {}

    def __call__(self, t, params, leaves):
        if t == 2:
            self.masks = {i: keeps(params[f"{i}.weight"].abs().sum(1), 0.4) for i in (0, 2)}
        seen = dict(leaves)
        for i, mask in self.masks.items():
            seen[f"{i}.weight"] = seen[f"{i}.weight"] * mask[:, None]
            seen[f"{i}.bias"] = seen[f"{i}.bias"] * mask
            seen[f"{i + 2}.weight"] = seen[f"{i + 2}.weight"] * mask
        return seen


def close(got, want, atol=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


ROW_ARGUMENTS = {"density": 0.4, "offset": 2}


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [None, 0, 2, 3])
@pytest.mark.parametrize("related", ["next", "names"])
def test_rows_biases_and_the_columns_that_take_them(stage, related):
    _, loss, params = problem(multilayer)
    wanted = by_hand(multilayer, loss, params, Gates())
    if related == "next":
        prune = [fds.prune_rows("0.weight", "2.weight", **ROW_ARGUMENTS, related="next")]
    else:
        more = fds.prune_rows("2.*", **ROW_ARGUMENTS, related="4.*", excluded=["2.bias"], name="pruned_more")
        prune = [fds.prune_rows("0.weight", **ROW_ARGUMENTS, related=["2.weight"]), more]

    def run(*transforms):
        step = fds.compose(*transforms, *prune, fds.sgd(LR))(loss)
        close(step.params(train(multilayer, step, step.init(params))), wanted)

    if stage is None:
        run()
    else:
        fds.simulate(lambda: run(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)), 2)


@pytest.mark.parametrize("density", [0.1, 0.3])
def test_rows_are_chosen_as_the_state_holds_them_whatever_masks_come_before(density):
    _, loss, params = problem(multilayer)
    with torch.no_grad():
        params["0.weight"][0] = torch.tensor([2.0, 0, 0, 0])  # the largest number, of no large row
        params["0.weight"][1:6] = 0.9
    weights = fds.prune_weights("0.weight", density=density)
    step = fds.compose(weights, fds.prune_rows("0.weight", density=0.4, related="next"), fds.sgd(LR))(loss)
    begun = step.init(params)
    state, rows = train(multilayer, step, begun, range(1)), keeps(params["0.weight"].abs().sum(1), 0.4)
    words = state.slots["pruned_rows"]["0.weight"]
    assert_same_bits(fds.compression.masks.unpack(words, 12).double(), rows.view(1, -1))
    for seen in (fds.step.seen_parameters(step, begun), fds.step.seen_parameters(step, state)):
        assert not seen["0.weight"][rows == 0].any()
        assert_same_bits((seen["2.weight"] != 0).any(0), rows != 0)


def test_trained_scores_choose_rows_and_learn_by_weights_and_biases():
    _, loss, params = problem(multilayer, ("0.weight", "rows"))

    class Top(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            return keeps(scores, 0.4)

        @staticmethod
        def backward(ctx, grad):
            return grad

    def gates(t, params, leaves):
        gate = Top.apply(leaves["0.weight_row_scores"].flatten()) if t >= 2 else 1
        weight = leaves["0.weight"] * (gate[:, None] if t >= 2 else 1)
        related = leaves["2.weight"] * (gate.detach() if t >= 2 else 1)
        return {"0.weight": weight, "0.bias": leaves["0.bias"] * gate, "2.weight": related}

    wanted = by_hand(multilayer, loss, params, gates)
    step = fds.compose(
        fds.prune_rows("0.weight", method="topk", **ROW_ARGUMENTS, related="2.weight"), fds.accumulate(2), fds.sgd(LR)
    )(loss)
    close(step.params(train(multilayer, step, step.init(params))), wanted)


def test_sensitive_heads_stay():
    score = "1.out.weight_head_scores"
    _, loss, params = problem(transformer, ("1.out.weight", "heads"), zeros=True)
    mask, sums, before = torch.ones(HEADS, dtype=torch.float64), torch.zeros(HEADS, dtype=torch.float64), {}

    def gates(t, params, leaves):
        nonlocal mask
        if t == 3:
            mask = keeps(sums, 0.5)
        before.update(params)
        return {"1.out.weight": leaves["1.out.weight"] * mask.repeat_interleave(3)}

    def optimize(name, p, grad):
        nonlocal sums
        if name == "1.out.weight":
            sums = 0.9 * sums + (before[name] * grad).view(WIDTH, HEADS, 3).sum((0, 2)).abs()
        return sums.view(1, -1) if name == score else p - LR * grad

    wanted = by_hand(transformer, loss, params, gates, optimize)
    step = fds.compose(
        fds.prune_heads("1.out.weight", method="sensitivity", num_heads=HEADS, density=0.5, offset=3),
        fds.by_name({"*_scores": sensitivity(), "*": fds.sgd(LR)}),
    )(loss)
    got = step.params(train(transformer, step, step.init(params)))
    wanted[score] = sums.view(1, -1)
    close(got, wanted, atol=1e-9)
    assert mask.sum() == 2


CASES = {
    "rows": (multilayer, {}, lambda: fds.prune_rows("[02].weight", density=0.4)),
    "next rows": (multilayer, {}, lambda: fds.prune_rows("0.weight", "2.weight", density=0.4, related="next")),
    "channels": (
        convolutions,
        {},
        lambda: fds.prune_channels("0.weight", "3.weight", density=0.5, offset=1, end=3, related="next"),
    ),
    "heads": (
        transformer,
        {},
        lambda: fds.prune_heads("*.out.weight", num_heads=HEADS, density=0.5, related="*.qkv.weight"),
    ),
    "interleaved heads": (
        transformer,
        {"interleaved": True},
        lambda: fds.prune_heads("*.out.weight", num_heads=HEADS, density=0.3, related="*.qkv.weight", interleaved=True),
    ),
}
SMALLER = {
    "rows": {},
    "next rows": {"0": (5, 4), "2": (4, 5), "4": (2, 4)},
    "channels": {"0": (3, 1, 3, 3), "1": (3,), "3": (2, 3, 3, 3), "5": (2, 8)},
    "heads": {f"{i}.{n}": size for i in (1, 2) for n, size in (("qkv", (18, 8)), ("out", (8, 6)))},
    "interleaved heads": {f"{i}.{n}": size for i in (1, 2) for n, size in (("qkv", (18, 8)), ("out", (8, 6)))},
}


def removed(step, state):
    (view,) = step.view
    return view.removed(step.params(state), Call.with_state(state, step.dimensions, training=False))


@pytest.mark.parametrize("name", CASES)
def test_a_smaller_module_computes_what_the_loss_sees(name):
    kind, more, prune = CASES[name]
    module, loss, params = problem(kind, **more)
    step = fds.compose(prune(), fds.sgd(LR))(loss)
    state = train(kind, step, step.init(params))
    module.load_state_dict(step.params(state), strict=False)
    untouched = copy.deepcopy(module.state_dict())
    small = shrink(module, removed(step, state))
    assert {n: tuple(m.weight.shape) for n, m in small.named_modules() if f"{n}" in SMALLER[name]} == SMALLER[name]
    assert_same_bits(module.state_dict(), untouched)
    if SMALLER[name]:
        for x, y in [batch(kind, 99)]:
            close((small(x) - y).square().mean(), step.evaluate(state, [x, y])["loss"])
    else:
        assert not removed(step, state)


def test_a_resumed_run_is_the_run(tmp_path):
    kind, _, prune = CASES["channels"]
    _, loss, params = problem(kind)
    step = fds.compose(prune(), fds.ema(0.9), fds.adamw(0.01))(loss)
    whole = train(kind, step, step.init(params))
    fds.save(tmp_path, train(kind, step, step.init(params), range(2)), step)
    state, _ = fds.load(tmp_path, step, params)
    assert_same_bits(train(kind, step, state, range(2, CALLS)), whole)


TRANSFORMS = {
    "prune_rows": lambda *patterns, **more: fds.prune_rows(*patterns, **more),
    "prune_channels": lambda *patterns, **more: fds.prune_channels(*patterns, **more),
    "prune_heads": lambda *patterns, **more: fds.prune_heads(*patterns, **{"num_heads": 2, **more}),
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"density": 0},
        {"density": None},
        {"method": "l2"},
        {"method": "topk", "end": 3},
        {"method": "sensitivity", "initial": True},
        {"offset": -1},
        {"offset": 4, "end": 3},
        {"stride": 0},
        {"curve": "square"},
        {"initial": "yes"},
        {"related": 3},
        {"related": [""]},
        {"related": "*.b?"},
        {"related": "x"},
        {"excluded": "x"},
        {"name": "a b"},
        {"sparsity": 0.5},
    ],
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_arguments_that_are_none_are_refused(name, arguments):
    with pytest.raises(ComposeError, match=name):
        TRANSFORMS[name]("*.a", **{"density": 0.5, **arguments})
    with pytest.raises(ComposeError, match="patterns"):
        TRANSFORMS[name](density=0.5)


@pytest.mark.parametrize("arguments", [{"num_heads": 0}, {"num_heads": 2.0}, {"num_heads": 2, "interleaved": 1}])
def test_heads_are_counted(arguments):
    with pytest.raises(ComposeError, match="prune_heads"):
        fds.prune_heads("*", density=0.5, **arguments)


@pytest.mark.parametrize(
    ("kind", "prune", "words"),
    [
        (multilayer, lambda: fds.prune_rows("9.weight", density=0.5), "matches no"),
        (multilayer, lambda: fds.prune_rows("*.bias", density=0.5), "no weight(?s:.*)they match 0.bias"),
        (multilayer, lambda: fds.prune_channels("*", density=0.5), "choose no weight"),
        (convolutions, lambda: fds.prune_rows("*", density=0.5), "has a bias and no such rows"),
        (multilayer, lambda: fds.prune_rows("0.weight", density=0.5, related="9.weight"), "does not fit"),
        (multilayer, lambda: fds.prune_rows("0.weight", density=0.5, related="4.weight"), "does not fit"),
        (multilayer, lambda: fds.prune_rows("0.weight", density=0.5, method="topk"), "no scores"),
        (multilayer, lambda: fds.prune_heads("2.weight", num_heads=5, density=0.5), "so many heads"),
        (transformer, lambda: fds.prune_heads("1.out.weight", num_heads=2, density=0.5, related="3.weight"), "not fit"),
    ],
)
def test_weights_that_do_not_fit_are_refused(kind, prune, words):
    _, loss, params = problem(kind)
    with pytest.raises(StateError, match=words):
        fds.compose(prune(), fds.sgd(LR))(loss).init(params)


def test_what_comes_next_is_told_of_chains_alone():
    _, loss, _ = problem(transformer)
    with pytest.raises(ComposeError, match="cannot be told") as error:
        fds.compose(fds.prune_rows("0.weight", density=0.5, related="next"), fds.sgd(LR))(loss)
    assert "related=" in error.value.want


SHARED = nn.Linear(6, 6)


@pytest.mark.parametrize(
    "chain",
    [
        [nn.Linear(8, 6), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)],
        [nn.Linear(8, 6), nn.MaxPool1d(3, 1, 1), nn.Linear(6, 4)],
        [nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)],
        [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(8, 8)],
        [nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Linear(64, 8)],
        [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.MaxPool1d(3, 1, 1), nn.Linear(512, 8)],
        [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.Conv2d(8, 8, 3)],
        [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3)],
        [nn.Conv1d(3, 8, 3), nn.MaxPool2d(3, 1, 1), nn.Conv1d(8, 8, 3)],
        [nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3)],
        [SHARED, nn.ReLU(), SHARED, nn.Tanh(), nn.Linear(6, 4)],
        [nn.Linear(8, 6), nn.ReLU(), SHARED, nn.Tanh(), SHARED],
        [nn.Embedding(8, 6), nn.Linear(6, 4)],
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Layers", "Sequential"])
def test_what_takes_outputs_and_cannot_be_told_is_refused(chain, kind):
    module = nn.Sequential(*chain)
    apply, _, _ = fds.functional(module)
    loss = fds.Layers(chain, nn.MSELoss()) if kind == "Layers" else lambda params, x: apply(params, x).sum()
    prune = fds.prune_channels if chain[0].weight.dim() > 2 else fds.prune_rows
    with pytest.raises(ComposeError, match="cannot be told"):
        fds.compose(prune("0.weight", density=0.5, related="next"), fds.sgd(LR))(loss)


def test_a_tied_weight_takes_other_outputs_too():
    tied = Tied()
    apply, _, _ = fds.functional(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), tied.a, nn.ReLU(), tied.b))
    prune = fds.prune_rows("0.weight", density=0.5, related="next")
    with pytest.raises(ComposeError, match="cannot be told"):
        fds.compose(prune, fds.sgd(LR))(lambda params, x: apply(params, x).sum())


def test_what_stands_in_two_places_does_not_become_smaller():
    twice = nn.Sequential(SHARED, nn.ReLU(), SHARED)
    with pytest.raises(StateError, match="smaller"):
        shrink(twice, [Cut("0.weight", 1, torch.arange(6) > 1)])
    some = torch.ones(4, dtype=torch.bool)
    for wrong in ((3, 0, some), ("w", -1, some), ("w", 0, [True]), ("w", 0, some.long()), ("w", 0, some, 3)):
        with pytest.raises(StateError, match="not a cut of a parameter"):
            Cut(*wrong)
    for cuts in (3, [3], [Cut("0.weight", 0, some), Cut("0.weight", 0, some[1:])]):
        with pytest.raises(StateError):
            shrink(nn.Sequential(nn.Linear(4, 4)), cuts)
    with pytest.raises(StateError, match="a module and cuts"):
        shrink(None, [])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


@pytest.mark.parametrize(
    ("module", "cut", "words"),
    [
        (nn.Linear(4, 4), ("wait", 0, 4), "not there"),
        (nn.Linear(4, 4), ("a.weight", 0, 4), "not there"),
        (nn.Linear(4, 4), ("weight", 0, 5), "smaller"),
        (nn.Linear(4, 4), ("weight", 2, 4), "smaller"),
        (nn.Linear(4, 4), ("weight", 0, 4), "smaller"),  # whose bias is as long as before
        (nn.LayerNorm(4), ("weight", 0, 4), "smaller"),
        (nn.Conv2d(4, 4, 1, groups=2), ("weight", 0, 4), "smaller"),
        (Tied(), ("a.weight", 1, 4), "tied"),
    ],
)
def test_what_cannot_be_smaller_is_refused(module, cut, words):
    name, dim, length = cut
    with pytest.raises(StateError, match=words):
        shrink(module, [Cut(name, dim, torch.arange(length) > 1)])


def test_somebody_says_how_many_heads_there_are():
    cut = Cut("out_proj.weight", 1, torch.arange(8) > 3, (2, 1))
    with pytest.raises(StateError, match="smaller"):
        shrink(nn.MultiheadAttention(8, 2), [cut])
    with pytest.raises(StateError, match="how many heads"):
        shrink(nn.Sequential(nn.Linear(8, 8)), [Cut("0.weight", 1, torch.arange(8) > 3, (2, 1))])


def two_of_four(dtype=torch.float32):
    module = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)
    with torch.no_grad():
        module[0].weight *= fds.compression.masks.sparse(module[0].weight, block="2:4")
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_of_four_numbers_stay_a_plain_weight_on_a_cpu_and_say_their_bytes(dtype):
    module = two_of_four(dtype)
    same, (report,) = semi_structured(module, "0.*")
    assert_same_bits(same.state_dict(), module.state_dict())
    numbers, size = 64 * 32, dtype.itemsize
    assert (report.dense_bytes, report.held_bytes) == (numbers * size, numbers * size)
    assert report.least_bytes == numbers // 2 * size + numbers // 2 * 2 // 8


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["*.weight"], "in 4 of a row"),  # of 2.weight all stay
        (["*.bias"], "no weight of a linear layer"),
        (["4.weight"], "matches no parameter"),
        ([], "patterns of parameter names"),
        ([["0.weight"]], "patterns of parameter names"),
    ],
)
def test_other_weights_are_not_semi_structured(patterns, words):
    with pytest.raises(FdsError, match=words) as error:
        semi_structured(two_of_four(), *patterns)
    assert "smaller" not in str(error.value) and "shrink" not in str(error.value)


class Layer(nn.Module):
    """A layer in which one pattern matches two matrices, as in BERT's."""

    def __init__(self):
        super().__init__()
        self.inner, self.output, self.attention = nn.Linear(4, 12), nn.Linear(12, 4), nn.Module()
        self.attention.output = nn.Linear(4, 4)

    def forward(self, x):
        return self.attention.output(self.output(F.gelu(self.inner(x))))


def test_a_pattern_of_what_is_related_may_match_other_weights():
    module, loss, params = problem(lambda: nn.Sequential(Layer(), Layer(), nn.Linear(4, 2)))
    prune = fds.prune_rows("*.inner.weight", density=0.25, related="*.output.weight")
    step = fds.compose(prune, fds.sgd(LR))(loss)
    state = train(multilayer, step, step.init(params))
    module.load_state_dict(step.params(state))
    small = shrink(module, removed(step, state))
    assert small[1].output.in_features == 3
    x, y = batch(multilayer, 99)
    close((small(x) - y).square().mean(), step.evaluate(state, [x, y])["loss"])


def test_a_step_composed_anew_prunes_the_weights_of_the_state():
    """Weights are those of the slot: `0.attention.inner.weight`, to which an output would be related, is none."""
    _, loss, params = problem(lambda: nn.Sequential(Layer(), nn.Linear(4, 2)))
    prune = lambda: fds.prune_rows("*.inner.weight", density=0.25, related="*.output.weight")
    step = fds.compose(prune(), fds.sgd(LR))(loss)
    want, _ = step(begun := step.init(params), batch(multilayer, 0))
    assert_same_bits(fds.compose(prune(), fds.sgd(LR))(loss)(begun, batch(multilayer, 0))[0], want)


def test_a_run_of_learned_scores_is_resumed(tmp_path):
    _, loss, params = problem(multilayer, ("0.weight", "rows"))
    prune = lambda: fds.prune_rows("0.weight", method="topk", **ROW_ARGUMENTS, related="2.weight")
    step = fds.compose(prune(), fds.sgd(LR))(loss)
    fds.save(tmp_path, train(multilayer, step, step.init(params), range(2)), step)
    again = fds.compose(prune(), fds.sgd(LR))(loss)
    state, _ = fds.load(tmp_path, again, params)
    assert_same_bits(
        train(multilayer, again, state, range(2, CALLS)), train(multilayer, step, step.init(params), range(CALLS))
    )


def test_a_step_says_what_it_prunes():
    _, loss, params = problem(transformer)
    heads = fds.prune_heads("*.out.weight", num_heads=HEADS, density=0.5, offset=2, end=6, stride=2)
    step = fds.compose(heads, fds.prune_weights("*.qkv.weight", block="2:4"), fds.sgd(LR))(loss)
    text = str(step.describe(step.init(params)))
    assert "masks of 4 heads of *.out.weight by l1: density 0.5 from update 2 to 6, every 2, cubic" in text
    assert "masks of *.qkv.weight by l1: density 0.5 from update 0" in text


def test_a_weight_without_rows_has_nothing_related():
    params = {"a": torch.zeros(0, 4), "b": torch.randn(3, 0)}
    loss = lambda p, x: (x @ p["a"].T @ p["b"].T).square().sum()
    with pytest.raises(StateError, match="does not fit"):
        fds.compose(fds.prune_rows("a", density=0.5, related="b"), fds.sgd(LR))(loss).init(params)
