"""Documents that are packed into rows train as each of them does in a row of its own, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fds

VOCABULARY, WIDTH, HEADS, TOKENS = 13, 8, 2, 24
LENGTHS = [[7, 12, 5], [17, 1, 6]]  # of the documents of two rows
DTYPE = torch.float64
ROUNDING = torch.finfo(DTYPE).eps * 2**12


class Model(nn.Module):
    """One layer of attention and a head; what a token sees is its document's alone."""

    def __init__(self, **how: Any):
        super().__init__()
        self.how = how
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = fds.nn.attention(q, k, v, causal=True, documents=documents, **self.how)
        return self.head(x + y.transpose(1, 2).flatten(2))


def model(**how: Any) -> Any:
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Model(**how).to(DTYPE))

    def loss_fn(params, batch):
        tokens, targets, positions, documents = batch
        logits = apply(params, tokens, positions, documents)
        return fds.Mean(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum())

    return loss_fn, params


def packed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, targets, positions and documents, (2, TOKENS) each; a document's last token has no target."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    documents = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(each)) for each in LENGTHS])
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in LENGTHS])
    targets = torch.where(documents.roll(-1, 1) == documents, tokens.roll(-1, 1), -100)
    targets[:, -1] = -100
    return tokens, targets, positions, documents


def alone() -> dict[str, Tensor]:
    """Return parameters after a step on all documents, each in a row of its own, by hand."""
    loss_fn, params = model()
    params = {name: x.detach().clone().requires_grad_() for name, x in params.items()}
    totals, weights = [], 0
    for row, each in zip(range(2), LENGTHS, strict=True):
        for number, n in enumerate(each):
            if n > 1:
                of = [x[row : row + 1, packed()[3][row] == number] for x in packed()]
                loss = loss_fn(params, (*of[:3], None))
                totals.append(loss.total)
                weights += n - 1
    grads = torch.autograd.grad(sum(totals) / weights, list(params.values()))
    return {name: x.detach() - g for (name, x), g in zip(params.items(), grads, strict=True)}


@pytest.mark.parametrize(
    ("size", "how"),
    [(1, {}), (2, {"method": "ulysses"}), (3, {"method": "ring"}), (2, {"method": "ring", "layout": "zigzag"})],
)
def test_packed_documents_train_as_alone(size, how):
    def body():
        axis = fds.mesh(sp=-1)["sp"]
        layout = how.get("layout", "contiguous")
        cut = lambda x: fds.nn.zigzag(x, axis) if layout == "zigzag" else x.chunk(size, 1)[axis.index]
        loss_fn, params = model(axis=axis, **how)
        step = fds.compose(fds.context_parallel(axis, layout=layout), fds.sgd(1.0))(loss_fn)
        state, _ = step(step.init(params), tuple(map(cut, packed())))
        return step.params(state)

    for got in fds.simulate(body, size):
        for name, want in alone().items():
            assert torch.allclose(got[name], want, rtol=0, atol=ROUNDING), name


def test_the_mask_for_other_attention_is_the_same():
    documents, (q, k, v) = packed()[3], torch.randn(3, 2, HEADS, TOKENS, 4, dtype=DTYPE)
    for causal in (False, True):
        want = fds.nn.attention(q, k, v, causal=causal, documents=documents)
        mask = fds.nn.document_mask(documents, causal=causal)
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        added = fds.nn.document_mask(documents, causal=causal, dtype=DTYPE)
        weights = (q @ k.mT * q.shape[-1] ** -0.5 + added).softmax(-1)  # as eager attention does
        for out in (got, weights @ v):
            assert torch.allclose(out, want, rtol=0, atol=ROUNDING)
    with pytest.raises(fds.FdsError, match="not a dtype of scores"):
        fds.nn.document_mask(documents, dtype=torch.int64)
    with pytest.raises(fds.FdsError, match="not numbers of documents"):
        fds.nn.document_mask(documents.float())
