"""The losses of distillation against their formulas in float64: values, gradients, masks, pieces."""

import math

import pytest
import torch
import torch.nn.functional as F

from fds import distill
from fds.distill import _logits
from fds.errors import LossError
from tests.memory import peak_bytes

T, K, V = 2.5, 4, 23


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(params=["in one piece", "in pieces of two rows"])
def pieces(request, monkeypatch):
    if request.param != "in one piece":
        monkeypatch.setattr(_logits, "_PIECE", 2 * V)


def mean(value):
    return value.total / value.weight


def by_formula(s, t, mask):
    p, q = (t / T).softmax(-1), (s / T).softmax(-1)
    per_token = T**2 * (p * (p.log() - q.log())).sum(-1)
    return (per_token * mask).sum() / mask.sum()


def with_rest(s, t, mask, *, rest):
    values, at = t.topk(K)
    q = (s / T).softmax(-1).gather(-1, at)
    p = (t / T).softmax(-1).gather(-1, at) if rest else (values / T).softmax(-1)
    loss = (p * (p / q).log()).sum(-1)
    if rest:
        p_rest, q_rest = 1 - p.sum(-1), 1 - q.sum(-1)
        loss = loss + p_rest * (p_rest / q_rest).log()
    return (T**2 * loss * mask).sum() / mask.sum()


def stored(s, t, mask, *, rest):
    values, at = t.topk(K)
    log_sum = torch.logsumexp(t.to(torch.promote_types(t.dtype, torch.float32)) / T, -1) if rest else None
    return mean(distill.top_k(s, at, values, log_sum=log_sum, temperature=T, mask=mask))


WAYS = {
    "logits": (by_formula, lambda s, t, mask: mean(distill.logits(s, t, temperature=T, mask=mask))),
    "top-k": (lambda *x: with_rest(*x, rest=False), lambda *x: stored(*x, rest=False)),
    "top-k and the rest": (lambda *x: with_rest(*x, rest=True), lambda *x: stored(*x, rest=True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_divergence_and_its_gradient_are_those_of_the_formula(way, pieces):
    expected, ours = WAYS[way]
    s, t = draw(3, 5, V).requires_grad_(), draw(3, 5, V, seed=1).requires_grad_()
    mask = torch.arange(15).view(3, 5) % 3 / 2.0
    want, got = expected(s, t.detach(), mask), ours(s, t, mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (want_grad,) = torch.autograd.grad(want, s)
    (grad,) = torch.autograd.grad(got, s, retain_graph=True)
    torch.testing.assert_close(grad, want_grad, rtol=1e-12, atol=1e-13)
    assert torch.autograd.grad(got, t, allow_unused=True) == (None,)
    of_function = torch.func.grad(lambda x: ours(x, t, mask))(s.detach())
    assert torch.equal(of_function, grad)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_fewer_bits_are_computed_in_float32(way, dtype, pieces):
    expected, ours = WAYS[way]
    s, t = draw(6, V, dtype=dtype).requires_grad_(), draw(6, V, seed=1, dtype=dtype)
    got, want = ours(s, t, torch.ones(6)), expected(s.double(), t.double(), torch.ones(6))
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), want, rtol=V * 2**-23, atol=1e-6)
    (grad,), (want_grad,) = torch.autograd.grad(got, s), torch.autograd.grad(want, s)
    assert grad.dtype is dtype
    torch.testing.assert_close(grad.double(), want_grad.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_all_of_a_vocabulary_as_its_largest_logits_is_the_whole():
    s, t = draw(6, V), draw(6, V, seed=1)
    values, at = t.topk(V)
    torch.testing.assert_close(mean(distill.top_k(s, at, values)), mean(distill.logits(s, t)), rtol=1e-12, atol=0)


def test_what_a_mask_leaves_out_may_be_anything(pieces):
    s, t, mask = draw(6, V), draw(6, V, seed=1), torch.tensor([True, False] * 3)
    want = torch.func.grad(lambda x: mean(distill.logits(x, t[mask])))(s[mask])
    s[1], t[3] = math.nan, math.inf
    grad, value = torch.func.grad_and_value(lambda x: mean(distill.logits(x, t, mask=mask)))(s)
    assert value.isfinite()
    torch.testing.assert_close(grad[mask], want, rtol=1e-12, atol=0)
    assert not grad[~mask].any()
    nothing = distill.logits(s, t, mask=torch.zeros(6))
    assert (nothing.total, nothing.weight) == (0, 0)


def test_a_teacher_that_rules_words_out_and_one_that_is_sure():
    s, t = draw(6, V), draw(6, V, seed=1)
    t[:, V // 2 :] = -math.inf
    want = by_formula(s, t.clamp(min=-1e4), torch.ones(6))  # of which exp is 0, in float64 too
    got = mean(distill.logits(s, t, temperature=T))
    p = (t / T).softmax(-1)[:, : V // 2]
    want = T**2 * (p * (p.log() - (s / T).log_softmax(-1)[:, : V // 2])).sum(-1).mean()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    sure = torch.full((2, V), -1e4, dtype=torch.float64).scatter(1, torch.tensor([[3], [7]]), 1e4)
    values, at = sure.topk(K)
    cross_entropy = F.cross_entropy(s[:2], torch.tensor([3, 7]))
    for log_sum in (None, sure.logsumexp(-1)):
        torch.testing.assert_close(mean(distill.top_k(s[:2], at, values, log_sum=log_sum)), cross_entropy)


@pytest.mark.parametrize("way", WAYS)
def test_beside_logits_and_their_gradient_there_is_a_piece(way, monkeypatch):
    monkeypatch.setattr(_logits, "_PIECE", 1 << 16)
    s, t = torch.randn(64, 1 << 14, requires_grad=True), torch.randn(64, 1 << 14)  # 4 MB each, in 16 pieces
    values, at = t.topk(K)
    log_sum = t.logsumexp(-1) if way == "top-k and the rest" else None

    def step():
        if way == "logits":
            value = distill.logits(s, t)
        else:
            value = distill.top_k(s, at, values, log_sum=log_sum)
        return torch.autograd.grad(mean(value), s)

    step()
    assert peak_bytes(step) < (4 + 2) * 2**20


def test_hidden_states_are_projected_and_compared():
    s, t, w = draw(3, 5, 4).requires_grad_(), draw(3, 5, 6, seed=1), draw(6, 4, seed=2).requires_grad_()
    mask = torch.arange(15).view(3, 5) % 2
    want = F.mse_loss((s @ w.T)[mask == 1], t[mask == 1])
    got = mean(distill.hidden(s, t, projection=w, mask=mask))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(got, [s, w]), torch.autograd.grad(want, [s, w]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(mean(distill.hidden(t + 1, t)), torch.tensor(1.0, dtype=torch.float64))


def test_attention_scores_are_compared_where_both_attend():
    s, t = draw(2, 3, 5, 5).requires_grad_(), draw(2, 3, 5, 5, seed=1)
    torch.testing.assert_close(mean(distill.attention(s, t)), F.mse_loss(s, t), rtol=1e-12, atol=0)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    causal = [x.masked_fill(later, -math.inf) for x in (s, t)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    got = mean(distill.attention(*causal, mask=mask))
    rows = [(s - t)[b, :, i, : i + 1].square().mean() for b in range(2) for i in range(5 if b == 0 else 3)]
    torch.testing.assert_close(got, torch.stack(rows).mean(), rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(got, s)
    assert grad.isfinite().all() and not grad[..., later].any() and not grad[1, :, 3:].any()
    both_ways = [(s - t)[0].square().mean((0, 2)).sum(), (s - t)[1, :, :3, :3].square().mean((0, 2)).sum()]
    got = mean(distill.attention(s, t, mask=mask))
    torch.testing.assert_close(got, sum(both_ways) / 8, rtol=1e-12, atol=0)  # neither are tokens of padding keys


def test_relations_of_models_of_different_widths():
    s, t, mask = draw(2, 5, 4).requires_grad_(), draw(2, 5, 8, seed=1), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    got = mean(distill.relations(s, t, heads=2, mask=mask))
    of_rows = []
    for b, length in ((0, 5), (1, 3)):
        for h in range(2):
            x, y = s[b, :length, 2 * h : 2 * h + 2], t[b, :length, 4 * h : 4 * h + 4]
            q, p = (x @ x.T / 2**0.5).softmax(-1), (y @ y.T / 2).softmax(-1)
            of_rows += (p * (p / q).log()).sum(-1)
    want = torch.stack(of_rows).sum() / 2 / 8
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert torch.autograd.grad(got, s)[0].isfinite().all()


def test_what_a_mask_leaves_out_has_a_gradient_of_zero_also_where_it_is_nan():
    mask, w = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]), draw(8, 4, seed=2).requires_grad_()
    clean, t = draw(2, 5, 4), draw(2, 5, 8, seed=1)
    spoiled = [x.masked_fill((mask == 0)[..., None], math.nan) for x in (clean, t)]
    for way in (
        lambda s, t: mean(distill.hidden(s, t, projection=w, mask=mask)),
        lambda s, t: mean(distill.relations(s, t, heads=2, mask=mask)) + 0 * w.sum(),
    ):
        want, got = ((way(s.requires_grad_(), t), s) for s, t in ((clean, t), spoiled))
        assert torch.equal(got[0], want[0])
        for a, b in zip(*(torch.autograd.grad(loss, [s, w]) for loss, s in (got, want)), strict=True):
            assert torch.equal(a, b)


S, M = torch.randn(2, 3, 4), torch.ones(2, 3)
AT = torch.zeros(2, 3, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: distill.logits(S, S[..., :2]),
        lambda: distill.logits(S, S[:1]),
        lambda: distill.logits(S.long(), S),
        lambda: distill.logits(S, "teacher"),
        lambda: distill.logits(torch.tensor(1.0), S),
        lambda: distill.logits(S, S, temperature=0),
        lambda: distill.logits(S, S, temperature=math.inf),
        lambda: distill.logits(S, S, temperature=torch.ones(())),
        lambda: distill.logits(S, S, mask=M[:1]),
        lambda: distill.logits(S, S, mask=1),
        lambda: distill.top_k(S, AT[..., 0], S[..., :1]),
        lambda: distill.top_k(S, AT.int(), S[..., :1]),
        lambda: distill.top_k(S, AT + 4, S[..., :1]),
        lambda: distill.top_k(S, AT - 1, S[..., :1]),
        lambda: distill.top_k(S, AT, S[:1, :, :1]),
        lambda: distill.top_k(S, AT, S[..., :1], log_sum=M[:1]),
        lambda: distill.top_k(S, torch.arange(4).expand(2, 3, 4), S, log_sum=M),
        lambda: distill.hidden(S, S[..., :2]),
        lambda: distill.hidden(S, S, projection=torch.ones(4, 5)),
        lambda: distill.hidden(S, S, projection=2),
        lambda: distill.hidden(S, S, mask=S),
        lambda: distill.logits(S[..., :0], S[..., :0]),
        lambda: distill.top_k(S, AT[..., :0], S[..., :0]),
        lambda: distill.attention(S, S),
        lambda: distill.attention(S[None, None], S[None, None]),
        lambda: distill.relations(S[None], S[None], heads=2),
        lambda: distill.attention(S[None], S[None, :, :1]),
        lambda: distill.attention(S[None], S[None], mask=M),
        lambda: distill.relations(S, S, heads=3),
        lambda: distill.relations(S, S, heads=0),
        lambda: distill.relations(S, S[:, :2], heads=2),
        lambda: distill.relations(S, S, heads=2, mask=M[0]),
    ],
)
def test_other_arguments_are_refused(call):
    with pytest.raises(LossError) as caught:
        call()
    assert caught.value.what.startswith("distill.") and caught.value.got and caught.value.want
