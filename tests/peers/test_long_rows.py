"""Models of transformers of whose rows ranks have parts: against the same model with whole rows on one rank."""

import pytest
import torch

import fds
from fds.errors import ComposeError, KernelError, LossError
from tests.peers.test_tensor_parallel import model as made

pytestmark = pytest.mark.peers

ROWS, LENGTH = 2, 19  # which no number of ranks divides
WITHOUT = {"attention_dropout": 0.0}
CASES = {
    "llama": WITHOUT,
    "llama-tied": {**WITHOUT, "tie_word_embeddings": True, "attention_bias": True},
    "mistral": WITHOUT,  # windows of 4
    "qwen2": {**WITHOUT, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": WITHOUT,
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def model(case, **changes):
    return made(case.partition("-")[0], **CASES[case], **changes)


def batch(kind):
    g = torch.Generator().manual_seed(1)
    out = {"input_ids": torch.randint(3, 37, (ROWS, LENGTH), generator=g)}
    if kind == "padded":
        out["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])).long()
    if kind == "documents":
        lengths = [[4, 9, 6], [12, 1, 6]]
        out["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    out["labels"] = out["input_ids"].clone()
    if kind == "prompts":
        out["labels"][:, :7] = -100
    if kind == "padded":
        out["labels"][out["attention_mask"] == 0] = -100
    if kind == "documents":
        out["labels"][out["position_ids"] == 0] = -100  # as transformers' own collator has it
    return out


def by_transformers(case, kind):
    """Return loss and gradients of transformers' own model and loss, of whole rows."""
    module = model(case)
    data = batch(kind)
    loss = module(**data, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters()}


def on_parts(case, kind, size, *transforms, layout="contiguous", method="ulysses", prepare=lambda m: None):
    """Return loss and gradients of a rank that has a part."""
    axis = fds.mesh(sp=size)["sp"]
    module = model(case)
    prepare(module)
    module = fds.hf.context_parallel(module, axis, method=method, layout=layout, chunk_tokens=3)
    apply, params, _ = fds.functional(module)
    step = fds.compose(
        fds.context_parallel(axis, layout=layout), *(f(axis) for f in transforms), fds.sgd(1.0)
    )(lambda p, part: apply(p, **part))  # fmt: skip
    state = step.init(params)
    after, metrics = step(state, fds.hf.part(batch(kind), axis, layout=layout))
    before, after = step.params(state), step.params(after)
    return metrics["loss"], {name: x - after[name] for name, x in before.items()}


def assert_equal(got, want):
    torch.testing.assert_close(
        got[0].double(), want[0].double(), rtol=1e-6, atol=0
    )  # transformers computes its loss in float32
    for name, x in want[1].items():
        scale = float(x.abs().max())
        torch.testing.assert_close(
            got[1][name], x, rtol=0, atol=2e-6 * max(scale, 1e-3), msg=lambda m, n=name: f"{n} {m}"
        )


WAYS = [{}, {"method": "ring", "layout": "zigzag"}]


@pytest.mark.parametrize(
    ("case", "kind", "how"),
    [
        ("llama", "prompts", WAYS[0]),
        ("llama", "documents", WAYS[1]),
        ("llama-tied", "padded", WAYS[1]),
        ("mistral", "documents", WAYS[0]),
        ("mistral", "padded", {"method": "ring"}),
        ("qwen2", "whole", {"layout": "zigzag"}),
        ("qwen3", "padded", WAYS[0]),
        ("gpt2", "documents", WAYS[0]),
    ],
    ids=str,
)
def test_ranks_with_parts_are_one_with_whole_rows(case, kind, how):
    want = by_transformers(case, kind)
    assert_equal(on_parts(case, kind, 1, **how), want)
    for got in fds.simulate(lambda: on_parts(case, kind, 2, **how), 2):
        assert_equal(got, want)


def test_the_recipe_of_long_rows_is_one_rank_with_whole_rows():
    """Tiles, the loss in chunks, layers that are computed again, and slices of the state at once."""
    checkpointed = lambda m: m.activation_checkpointing_enable({"use_reentrant": False})
    recipe = (lambda axis: fds.tile("*.mlp", tokens=3), lambda axis: fds.shard_optimizer(axis, stage=3))
    want = by_transformers("llama", "documents")
    for got in fds.simulate(lambda: on_parts("llama", "documents", 2, *recipe, prepare=checkpointed), 2):
        assert_equal(got, want)


def test_without_targets_it_returns_logits():
    whole = model("llama").eval()
    want = whole(batch("whole")["input_ids"]).logits

    def body():
        axis = fds.mesh(sp=1)["sp"]
        part = fds.hf.part({"input_ids": batch("whole")["input_ids"]}, axis)
        del part["shift_labels"]
        torch.testing.assert_close(fds.hf.context_parallel(whole, axis)(**part).logits, want)

    fds.simulate(body, 1)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "rope_type"),
        ({"output_attentions": True, "attn_implementation": "eager"}, {}, "output_attentions"),
        ({}, {"method": "rings"}, "no such method"),
        ({}, {"layout": ["zigzag"]}, "no such layout"),
        ({}, {"chunk_tokens": 0}, "counts tokens"),
        ({}, {"axis": 2}, "not an axis"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 12}, {}, "as many heads"),
    ],
    ids=str,
)
def test_what_parts_of_rows_cannot_have_is_refused(changes, options, words):
    def body():
        axis = fds.mesh(sp=2)["sp"]
        llama = made("llama", **{**WITHOUT, **changes})
        with pytest.raises(ComposeError, match=words):
            fds.hf.context_parallel(llama, **{"axis": axis, **options})

    fds.simulate(body, 2)


def test_a_model_of_another_kind_is_refused():
    axis = fds.mesh(sp=1)["sp"]
    for other in (made("bert"), made("gpt2-classes"), torch.nn.Linear(2, 2), None):
        with pytest.raises(ComposeError, match="knows no such model"):
            fds.hf.context_parallel(other, axis)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"labels": torch.zeros(2, 8, dtype=torch.int64)}, "shifted before rows are cut"),
        ({"position_ids": None}, "position_ids"),
        ({"past_key_values": 1}, "past_key_values"),
        ({"cut": "part 1 of 2, zigzag"}, "another part"),
        ({"attention_mask": torch.ones(2, 8)}, "not boolean"),
        ({"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)}, "attention_mask"),
        ({"position_ids": torch.arange(4).repeat(2, 2)}, "begin anew"),
        ({"documents": torch.zeros(2, 16, dtype=torch.int64)}, "documents"),
    ],
    ids=str,
)
def test_what_is_no_part_is_refused(given, words):
    module = fds.hf.context_parallel(model("llama"), fds.mesh(sp=1)["sp"])
    part = fds.hf.part({"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, fds.mesh(sp=1)["sp"])
    with pytest.raises(LossError, match=words):
        module(**part | given)


def test_a_module_that_was_told_nothing_is_refused():
    fds.hf.context_parallel(model("llama"), fds.mesh(sp=1)["sp"])
    stranger = model("llama")
    stranger.set_attn_implementation("fds_parts")
    with pytest.raises(KernelError, match="was not told"):
        stranger(torch.zeros(2, 4, dtype=torch.int64))
