"""A Llama of transformers whose ranks pass parts of rows: what the guide writes is one rank's step."""

import threading

import pytest
import torch
import torch.nn.functional as F

import fds
from fds.errors import LossError
from tests.peers.test_tensor_parallel import model

pytestmark = pytest.mark.peers

TOKENS, NOW = 16, threading.local()  # ranks of a simulation are threads, and transformers knows attention by name


def over_ranks(module, q, k, v, mask, scaling=None, dropout=0.0, **options):
    y = fds.nn.attention(q, k, v, axis=NOW.axis, causal=True, scale=scaling, p=dropout, **NOW.how)
    return y.transpose(1, 2), None


def trained(n, how, attention="over_ranks", positions=True, labels=False):
    """Return the loss and parameters after two calls of a rank."""
    import transformers

    transformers.AttentionInterface.register("over_ranks", over_ranks)
    axis = fds.mesh(sp=n)["sp"]
    NOW.axis, NOW.how = axis, how
    apply, params, _ = fds.functional(model("llama", attn_implementation=attention, attention_dropout=0.0))
    rows = torch.randint(37, (4, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    targets = rows[:, 1:].clone()
    targets[:, :3] = -100
    whole = {"ids": rows[:, :-1], "targets": targets, "positions": torch.arange(TOKENS).expand(4, -1)}
    cut = (lambda x: fds.nn.zigzag(x, axis)) if how else (lambda x: x.chunk(n, 1)[axis.index])

    def loss(params, batch):
        options = {"position_ids": batch["positions"]} if positions else {}
        if labels:
            return apply(params, batch["ids"], labels=batch["ids"], **options).loss
        logits, targets = apply(params, batch["ids"], **options).logits, batch["targets"].flatten()
        return fds.Mean(F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), (targets != -100).sum())

    step = fds.compose(fds.context_parallel(axis, layout=how.get("layout", "contiguous")), fds.sgd(0.3))(loss)
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, {name: cut(x) for name, x in whole.items()})
    return {"loss": metrics["loss"], **step.params(state)}


@pytest.mark.parametrize("how", [{}, {"method": "ring", "layout": "zigzag"}], ids=str)
def test_a_llama_over_two_ranks_is_that_of_one(how):
    want = trained(1, {}, "sdpa")
    for found in fds.simulate(lambda: trained(2, how), 2):
        for name, x in want.items():
            assert torch.allclose(found[name], x, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"attention": "eager"}, ("modeling_llama.py", "matmul", "set_attn_implementation")),
        ({"attention": "sdpa"}, ("sdpa_attention.py", "this rank's tokens alone")),
        ({"positions": False}, ("modeling_llama.py", "position_ids")),
        ({"labels": True}, ("loss_utils.py", "labels=")),
    ],
    ids=str,
)
def test_what_a_llama_would_compute_of_a_part_is_refused(options, names):
    def body():
        with pytest.raises(LossError) as error:
            trained(2, {}, **options)
        assert all(name in str(error.value) for name in (*names, "called in test_sequence.py:"))

    fds.simulate(body, 2)
