"""What tensor, sequence and context parallelism are told wrongly: every argument, refused before anything is sent."""

import math

import pytest
import torch
from torch import nn

import fds
from fds.collectives import counted
from fds.errors import FdsError

JUNK = {
    "None": None, "str": "junk", "negative": -1, "fraction": 1.5, "flag": True, "list": [], "object": object(),
    "nan": math.nan, "tensor": torch.ones(2), "tuple": (2, -1), "dtype": torch.float32, "infinite": math.inf,
}  # fmt: skip

X = torch.zeros(2, 4, 6, 8)
T = torch.zeros(4, dtype=torch.int64)


def streamed(name, data, devices):
    with fds.random.stream(name, data, devices=devices):
        pass


def heads(count, cross):
    return fds.nn.heads(count, cross=cross)


# function -> (what is right, what of JUNK is right too)
SIZES = {"device": None, "dtype": None}
LOSS = {"label_smoothing": 0.0, "z_loss": 0.0, "ignore_index": -100, "reduction": "mean", "num_classes": None}
KINDS = {"method": "ulysses", "layout": "contiguous"}
OF_LOSS = {"ignore_index": ["negative"], "num_classes": ["None"], "z_loss": ["fraction"]}
OF_FACTORY = {"device": ["None"], "dtype": ["None", "dtype"]}
OF_ATTENTION = {
    "axis": ["None"], "causal": ["flag"], "key_padding": ["None"], "bias": ["None"],
    "scale": ["None", "negative", "fraction"], "seed": ["None", "negative", "tensor"],
}  # fmt: skip
CALLS = {
    "ColumnLinear": (
        fds.nn.ColumnLinear,
        {"in_features": 4, "out_features": 8, "bias": True, "parts": 1, "gather": False} | SIZES,
        {"bias": ["flag"], "gather": ["flag"]} | OF_FACTORY,
    ),
    "RowLinear": (
        fds.nn.RowLinear,
        {"in_features": 4, "out_features": 8, "bias": True} | SIZES,
        {"bias": ["flag"]} | OF_FACTORY,
    ),
    "VocabEmbedding": (
        fds.nn.VocabEmbedding,
        {"num_embeddings": 8, "embedding_dim": 4, "padding_idx": None} | SIZES,
        {"padding_idx": ["None", "negative"]} | OF_FACTORY,
    ),
    "SelfAttention": (
        fds.nn.SelfAttention,
        {"width": 8, "num_heads": 4, "num_kv_heads": 2, "causal": True, "bias": True, "dropout": 0.0, "theta": None}
        | SIZES,
        {"num_kv_heads": ["None"], "causal": ["flag"], "bias": ["flag"], "theta": ["None", "fraction"]} | OF_FACTORY,
    ),
    "MLP": (
        fds.nn.MLP,
        {"width": 8, "hidden": 8, "activation": "gelu", "bias": True, "dropout": 0.0} | SIZES,
        {"bias": ["flag"]} | OF_FACTORY,
    ),
    "column": (fds.nn.column, {"parts": 1, "gather": False, "unit": 1}, {"gather": ["flag"]}),
    "vocab": (fds.nn.vocab, {"gather": True}, {"gather": ["flag"]}),
    "heads": (heads, {"count": "num_heads", "cross": False}, {"count": ["str"], "cross": ["flag"]}),
    "replicated": (fds.nn.replicated, {"grads": "same"}, {}),
    "sequence": (fds.nn.sequence, {"enters": True, "leaves": True}, {"enters": ["flag"], "leaves": ["flag"]}),
    "auto_plan": (fds.nn.auto_plan, {"module": nn.Linear(2, 2)}, {}),
    "attention": (
        fds.nn.attention,
        {"q": X, "k": X, "v": X, "axis": "axis", "causal": False, "key_padding": None, "bias": None, "scale": None}
        | {"p": 0.0, "seed": None, "offset": 0}
        | KINDS,
        OF_ATTENTION,
    ),
    "vocab_cross_entropy": (
        fds.nn.vocab_cross_entropy,
        {"logits": torch.zeros(4, 4), "targets": T, "axis": "axis"} | LOSS,
        OF_LOSS,
    ),
    "linear_cross_entropy": (
        fds.nn.linear_cross_entropy,
        {"hidden": torch.zeros(4, 2), "weight": torch.zeros(3, 2), "targets": T, "bias": None, "axis": "axis"}
        | {"sequence_dim": None, "chunk_tokens": None}
        | LOSS,
        OF_LOSS | {"bias": ["None"], "sequence_dim": ["None"], "chunk_tokens": ["None"]},
    ),
    "zigzag": (
        fds.nn.zigzag,
        {"x": torch.zeros(2, 8), "axis": "axis", "dim": 1},
        {"axis": ["None"], "dim": ["negative"]},
    ),
    "zigzag_positions": (fds.nn.zigzag_positions, {"length": 8, "axis": "axis"}, {"axis": ["None"]}),
    "tensor_parallel": (
        fds.tensor_parallel,
        {"axis": "axis", "plan": "auto", "sequence": False, "overlap": 0},
        {"sequence": ["flag"]},
    ),
    "context_parallel": (fds.context_parallel, {"axis": "axis", "layout": "contiguous"}, {}),
    "checkpoint_activations": (
        fds.checkpoint_activations,
        {"store": "device", "every": 1, "partition": "axis", "contiguous": True, "number": 2},
        {"partition": ["None"], "contiguous": ["flag"], "number": ["None"]},
    ),
    "stream": (streamed, {"name": "a", "data": 1, "devices": None}, {
        "name": ["str"], "data": ["str", "negative", "flag"], "devices": ["None", "list"],
    }),
    "SplitDim": (fds.step.SplitDim, {"dim": 0, "parts": ()}, {}),
    "Replicated": (fds.step.Replicated, {"grads": "same"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_that_is_wrong_is_refused_before_anything_is_sent(name):
    call, right, fine = CALLS[name]

    def job():
        axis = fds.mesh(tp=-1)["tp"]
        given = {key: axis if value == "axis" else value for key, value in right.items()}
        if name != "heads":
            call(**given)
        taken = list[str]()
        with counted() as traffic:
            for key, (kind, junk) in (
                (key, one) for key in given for one in JUNK.items() if one[0] not in fine.get(key, [])
            ):
                try:
                    call(**given | {key: junk})
                    taken.append(f"{key}={kind}")
                except FdsError as error:
                    assert error.what and error.want, f"{key}={kind}: {error}"
        assert not traffic.counts
        return taken

    assert fds.simulate(job, 2) == [[], []]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_right_is_taken(name):
    call, right, fine = CALLS[name]

    def job():
        axis = fds.mesh(tp=-1)["tp"]
        given = {key: axis if value == "axis" else value for key, value in right.items()}
        for key, kinds in fine.items():
            for kind in kinds:
                if (name, key) not in {("attention", "axis")}:
                    call(**given | {key: JUNK[kind]})

    fds.simulate(job, 2)


def test_names_of_arguments_that_layers_do_not_have_are_refused():
    for layer in (fds.nn.ColumnLinear, fds.nn.RowLinear, fds.nn.VocabEmbedding):
        with pytest.raises(FdsError, match="takes no dtyp") as caught:
            layer(4, 4, dtyp=torch.float32)
        assert caught.value.hint == "did you mean 'dtype'?"


def test_an_embedding_whose_gradient_counts_the_uses_of_rows_is_not_divided_by_rows():
    def job():
        apply, *_ = fds.functional(nn.Embedding(8, 4, scale_grad_by_freq=True))
        plan = fds.tensor_parallel(fds.mesh(tp=-1)["tp"], {"*": "vocab"})
        with pytest.raises(FdsError, match="cannot be divided as 'vocab'"):
            fds.compose(plan, fds.sgd(0.1))(lambda params, batch: apply(params, batch).sum())

    fds.simulate(job, 2)
