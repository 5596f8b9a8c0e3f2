"""A row has the same bits alone, in any batch, at any place in it and with any padding after it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import ComposeError, LossError
from fds.transforms.batch_invariant import products

VOCABULARY = 53


class Block(nn.Module):
    """Attention by torch, or written out; norms and widths of odd sizes."""

    def __init__(self, width, heads, how):
        super().__init__()
        self.heads, self.how = heads, how
        self.before, self.between = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width + 5), nn.Linear(3 * width + 5, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.how == "torch":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / (w // self.heads) ** 0.5
            hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
            y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh") * 0.5)


class Model(nn.Module):
    """Two blocks, and logits."""

    def __init__(self, how="torch", width=36):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 3, how) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(F.silu(x)))


def log_probs_of(*transforms, how="torch", dtype=torch.float32):
    """Return an evaluation of a batch's log-probabilities (rows, tokens - 1), and the plain model's logits."""
    torch.manual_seed(0)
    model = Model(how).to(dtype)
    apply, params, _ = fds.functional(model)

    def loss(params, tokens):
        logits = apply(params, tokens)
        return -fds.nn.log_probs(logits[:, :-1], tokens[:, 1:]).mean()

    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    state = step.init(params)
    return lambda tokens: step.evaluate(state, tokens, outputs=True)["outputs"], model


TOKENS = torch.randint(VOCABULARY, (7, 21), generator=torch.Generator().manual_seed(1))


def others(evaluate):
    """Return the log-probabilities of TOKENS, and the same by way of other batches."""
    whole = evaluate(TOKENS)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    ways = {
        "alone": torch.cat([evaluate(TOKENS[i : i + 1]) for i in range(7)]),
        "in two batches": torch.cat([evaluate(TOKENS[:4]), evaluate(TOKENS[4:])]),
        "in another order": evaluate(TOKENS[order])[order.argsort()],
        "among many": evaluate(torch.cat([TOKENS.flip(0), TOKENS, TOKENS]))[7:14],
        "padded": evaluate(F.pad(TOKENS, (0, 50)))[:, :20],
        "cut short": torch.cat([evaluate(TOKENS[:, :9]), whole[:, 8:]], 1),
    }
    return whole, ways


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["torch", "written out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_its_bits_in_every_batch(how, dtype):
    low = [fds.precision(dtype)] if dtype is torch.bfloat16 else []
    held = torch.float32 if dtype is torch.bfloat16 else dtype
    evaluate, model = log_probs_of(fds.batch_invariant(), *low, how=how, dtype=held)
    whole, ways = others(evaluate)
    for way, got in ways.items():
        assert torch.equal(got, whole), way
    want = F.log_softmax(model(TOKENS)[:, :-1], -1).gather(2, TOKENS[:, 1:, None])[..., 0]
    bound = 0.1 if dtype is torch.bfloat16 else 1e4 * torch.finfo(dtype).eps
    assert (whole - want).abs().max() < bound


def test_without_it_some_batch_changes_bits():
    whole, ways = others(log_probs_of()[0])
    assert not all(torch.equal(got, whole) for got in ways.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_and_stages_give_the_bits_of_one(stage):
    want = log_probs_of(fds.batch_invariant())[0](TOKENS)

    def body():
        axis = fds.mesh(dp=-1)["dp"]
        evaluate, _ = log_probs_of(fds.batch_invariant(), fds.shard_optimizer(axis, stage=stage, bucket_bytes=9_000))
        return evaluate(TOKENS[axis.index :: axis.size])

    for rank, got in enumerate(fds.simulate(body, 2)):
        assert torch.equal(got, want[rank::2])


def test_a_policys_ratio_to_itself_is_one_in_training():
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Model())
    log_probs = lambda params, tokens: fds.nn.log_probs(apply(params, tokens)[:, :-1], tokens[:, 1:])

    def loss(params, batch):
        ratio = (log_probs(params, batch["tokens"]) - batch["old"]).exp()
        return -ratio.mean(), {"apart": (ratio != 1).sum()}

    step = fds.compose(fds.batch_invariant(), fds.accumulate(2), fds.sgd(0.1))(
        loss, lambda params, tokens: -log_probs(params, tokens).mean()
    )
    state = step.init(params)
    old = torch.cat([step.evaluate(state, TOKENS[i : i + 1], outputs=True)["outputs"] for i in range(6)])
    new, metrics = step(state, {"tokens": TOKENS[:6], "old": old})
    assert metrics["apart"] == 0
    assert step(new, {"tokens": TOKENS[:6], "old": old})[1]["apart"] > 0


def test_gradients_are_those_of_the_plain_step_to_rounding():
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Model().double())
    loss = lambda p, tokens: F.cross_entropy(apply(p, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    got, want = (
        fds.compose(*more, fds.sgd(1.0))(loss) for more in ([fds.batch_invariant(), fds.checkpoint_activations()], [])
    )
    for (name, x), y in zip(
        got(got.init(params), TOKENS)[0].params.items(), want(want.init(params), TOKENS)[0].params.values(), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12, msg=name)


torch.manual_seed(3)
GRU = nn.GRU(11, 5, batch_first=True).requires_grad_(False)
ROWWISE = {
    "a convolution": lambda x: F.conv1d(x[:, None], torch.linspace(-1, 1, 15).view(3, 1, 5)),
    "a pool": lambda x: x.view(len(x), 4, -1).mean(1),
    "sums": lambda x: x.view(len(x), 2, -1).sum((1, 2)).exp(),
    "variances": lambda x: torch.cat([x.var(1), x.std(1, correction=0)]).view(2, -1).T,
    "norms": lambda x: F.normalize(x) + x.norm(1, dim=1, keepdim=True),
    "functions in place": lambda x: x.clone().sigmoid_().tanh_().add_(x, alpha=0.3),
    "of columns": lambda x: (torch.linspace(-1, 1, 96).view(3, 32) @ x[:, :32].T).T,
    "a softmax of another dim": lambda x: x.view(len(x), 4, -1).softmax(1).logsumexp(2),
    "powers": lambda x: x.abs() ** 1.7 + torch.atan2(x, x + 1),
    "group norm": lambda x: F.group_norm(x.view(len(x), 4, -1), 2, torch.arange(4.0), torch.ones(4)),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(44), torch.linspace(1, 2, 44), torch.ones(44), torch.ones(44)),
    "a recurrence": lambda x: GRU(x.view(len(x), 4, 11))[0],
    "the largest of windows": lambda x: F.max_pool1d(x[:, None].exp(), 3),
    "a gate": lambda x: F.hardswish(F.glu(x, 1)) + F.logsigmoid(F.glu(x.view(len(x), 2, -1), 1))[:, 0],
    "products": lambda x: x.cumprod(1),
    "means of windows": lambda x: F.avg_pool1d(x[:, None], 5, 3) + F.adaptive_avg_pool1d(x[:, None], 14),
    "of images": lambda x: F.adaptive_max_pool2d(x.view(-1, 2, 2, 11), 2).flatten(1),
    "instance norm": lambda x: F.instance_norm(x.view(len(x), 4, -1), weight=torch.arange(4.0), bias=torch.ones(4)),
    "vectors": lambda x: x @ torch.linspace(-1, 1, x.shape[1]),
}


@pytest.mark.parametrize("function", ROWWISE.values(), ids=ROWWISE)
def test_operators_compute_a_row_by_itself(function):
    x = torch.randn(37, 44, generator=torch.Generator().manual_seed(2))
    eval_fn = lambda params, x: (show(function(x)), x.new_zeros(()))[1]
    show = fds.loss.show
    step = fds.compose(fds.batch_invariant(), fds.sgd(0.1))(lambda params, x: params["w"].sum(), eval_fn)
    state = step.init({"w": torch.ones(1)})
    evaluate = lambda x: step.evaluate(state, x, outputs=True)["outputs"]
    whole = evaluate(x)
    torch.testing.assert_close(whole, function(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([evaluate(x[i : i + 1]) for i in range(37)]), whole)
    assert torch.equal(evaluate(x.flip(0)).flip(0), whole)


@pytest.mark.parametrize("k", [1, 64, 100])
def test_where_tiles_are_not_alike_elements_are_multiplied_one_by_one(k, monkeypatch):
    monkeypatch.setattr(products, "_is_alike", lambda like, inner: False)
    monkeypatch.setattr(products, "_are_alike", lambda like: False)
    a, b = (torch.randn(2, 5, k), torch.randn(2, k, 7))
    torch.testing.assert_close(products.bmm(a, b), a @ b)
    assert torch.equal(products.mm(a[0], b[0]), products.bmm(a, b)[0])


BAD = {
    "an operator of which nothing is known": (lambda x: torch.linalg.inv(x.T @ x), "nothing is known"),
    "batch norm in training": (lambda x: F.batch_norm(x, None, None, training=True), "by all others"),
    "running statistics": (lambda x: nn.InstanceNorm1d(2, track_running_stats=True)(x.view(2, 2, 4)), "instance norm"),
    "a norm of another order": (lambda x: x.norm(3), "no such norm"),
}


@pytest.mark.parametrize(("function", "what"), BAD.values(), ids=BAD)
def test_what_it_cannot_promise_is_refused(function, what):
    step = fds.compose(fds.batch_invariant(), fds.sgd(0.1))(lambda p, x: (function(x) * p["w"]).sum())
    state = step.init({"w": torch.ones(1)})
    with pytest.raises(LossError, match=what):
        step.evaluate(state, torch.randn(4, 4))


def test_a_compiler_that_would_choose_other_operators_is_refused():
    with pytest.raises(ComposeError, match="cannot be one graph") as caught:
        fds.compose(fds.batch_invariant(), fds.compile(whole=True), fds.sgd(0.1))(lambda p, x: p["w"].sum())
    assert "batch_invariant" in caught.value.got


def test_what_a_loss_shows_is_not_covered_by_a_module_called_after_it():
    """Also where the criterion of layers is a module, whose own output is shown by nobody."""
    targets = torch.arange(4) % 3

    def criterion(logits, targets):
        return fds.functional(torch.nn.Identity())[0]({}, -fds.nn.log_probs(logits, targets).mean())

    layers = fds.Layers([torch.nn.Linear(5, 3)], criterion)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    step = fds.compose(fds.sgd(0.1))(layers)
    state = step.init(layers.init)
    want = fds.nn.log_probs(torch.nn.functional.linear(x, *state.params.values()), targets)
    torch.testing.assert_close(step.evaluate(state, (x, targets), outputs=True)["outputs"], want)
