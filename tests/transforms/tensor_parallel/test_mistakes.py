"""Mistakes of a plan are told as such, with what to write; what is a user's own fault keeps its type and its text."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm, remove_weight_norm

import fds
from fds.errors import ComposeError, LossError
from tests.transforms.tensor_parallel.models import check, steps

column, heads = fds.nn.column, fds.nn.heads
PAIR = {"up": "column", "down": "row"}
WHOLE, PIECES = "the whole of its input", "fails with this rank's pieces"


class MLP(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(self.between(F.gelu(self.up(x)), x))

    def between(self, y, x):
        return y


class Normed(MLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def between(self, y, x):
        return self.norm(y)


class NanoGPT(nn.Module):
    """Its attention, word for word but for dropout."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = 4, 8
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoGPTOfHeads(NanoGPT):
    """The same, as the errors advise to write it."""

    def __init__(self):
        super().__init__()
        self.head_dim = 2

    def forward(self, x):
        B, T, _ = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(B, T, self.n_head, self.head_dim).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class NanoGPTOfWidth(NanoGPTOfHeads):
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.c_attn(x).split(self.n_embd, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Bloom(nn.Module):
    """Queries, keys and values head by head."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 2
        self.query_key_value, self.dense = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        fused = self.query_key_value(x).view(*x.shape[:2], self.num_heads, 3, self.head_dim)
        q, k, v = fused.permute(3, 0, 2, 1, 4)
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Config:
    def __init__(self):
        self.num_attention_heads = 4


class Phi3(nn.Module):
    """Queries, and fewer keys and values, one after the other; how many queries its configuration says."""

    def __init__(self):
        super().__init__()
        self.config, self.num_key_value_heads, self.head_dim = Config(), 2, 2
        self.qkv_proj, self.o_proj = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        return self.attend(x, self.config.num_attention_heads * self.head_dim)

    def attend(self, x, queries):
        qkv, shape = self.qkv_proj(x), (*x.shape[:2], -1, self.head_dim)
        keys = queries + self.num_key_value_heads * self.head_dim
        q, k, v = (y.view(shape).transpose(1, 2) for y in qkv.tensor_split((queries, keys), -1))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Phi3OfHeads(Phi3):
    def __init__(self):
        super().__init__()
        self.num_heads = 4

    def forward(self, x):
        return self.attend(x, self.num_heads * self.head_dim)


NANO = {"": heads("n_head", "n_embd"), "c_attn": column(parts=3), "c_proj": "row"}
BLOOM = {"": heads("num_heads"), "query_key_value": column(unit=6), "dense": "row"}
PHI3 = {"": heads("num_heads", "num_key_value_heads"), "qkv_proj": column(parts=(8, 4, 4)), "o_proj": "row"}
NANO_BARE, PHI3_BARE = NANO | {"": "replicated"}, PHI3 | {"": heads("num_key_value_heads")}
MISTAKES = [  # a module, a plan, what is said of it and where, the advice, and what follows it
    (MLP, {"down": "row"}, f"{WHOLE}.*down", "'column' for the layer that makes", (MLP, PAIR)),
    (MLP, {"up": "row", "down": "column"}, f"{WHOLE}.*up", "swapped, 'column' is the first", (MLP, PAIR)),
    (MLP, {"up": "column"}, f"{PIECES}.*down", "'row' for it", (MLP, PAIR)),
    (Normed, {"up": "column"}, f"{PIECES}.*norm", r"gather=True", (Normed, {"up": column(gather=True)})),
    (
        NanoGPT,
        {"c_attn": "column", "c_proj": "row"},
        f"{PIECES}.*NanoGPT",
        r"column\(parts=\) for c_attn.*heads\(...\).*: n_embd = 8, n_head = 4\n",
        (NanoGPTOfHeads, NANO),
    ),
    (
        NanoGPT,
        NANO | {"": heads("n_head")},
        f"{PIECES}.*NanoGPT",
        r"heads\(...\).*: n_embd = 8\n",
        (NanoGPTOfHeads, NANO),
    ),
    (NanoGPT, NANO, "computed from an attribute.*n_head", "an attribute of its own", (NanoGPTOfHeads, NANO)),
    (NanoGPTOfWidth, NANO, f"{PIECES}.*NanoGPTOfWidth", "-1 in the place of", (NanoGPTOfHeads, NANO)),
    (
        Bloom,
        {"query_key_value": "column", "dense": "row"},
        f"{PIECES}.*Bloom",
        r"column\(unit=\).*num_heads = 4",
        (Bloom, BLOOM),
    ),
    (Phi3, PHI3_BARE, f"{PIECES}.*Phi3", r"of config, .*: num_attention_heads = 4\n", (Phi3OfHeads, PHI3)),
    (Phi3OfHeads, PHI3_BARE, f"{PIECES}.*Phi3", r"heads\(...\).*num_heads = 4\n", (Phi3OfHeads, PHI3)),
]


@pytest.mark.parametrize(("make", "plan", "said", "advice", "better"), MISTAKES)
def test_a_mistake_of_a_plan_is_told_with_what_to_write(make, plan, said, advice, better):
    def job():
        for _ in range(2):  # the second try too
            with pytest.raises(LossError, match=f"(?s){said}.*{advice}"):
                steps(make, plan, size=2)

    fds.simulate(job, 2)
    check(*better)


@pytest.mark.parametrize(
    "parts", [(fds.checkpoint_activations(),), (fds.autocast(torch.bfloat16),), (fds.compile(backend="aot_eager"),)]
)
def test_a_mistake_is_told_beside_other_transforms(parts):
    def job():
        with pytest.raises(LossError, match=f"(?s){PIECES}.*down"):
            steps(MLP, {"up": "column"}, *parts, size=2)

    fds.simulate(job, 2)


@pytest.mark.parametrize(("plan", "said"), [({"0": "column"}, f"{PIECES}.*2"), ({"2": "row"}, f"{WHOLE}.*2")])
def test_a_mistake_in_layers_is_told(plan, said):
    def job():
        with pytest.raises(LossError, match=f"(?s){said}"):
            steps(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), plan, size=2)

    fds.simulate(job, 2)


class Checked(MLP):
    """A module that looks at its batch after its column."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.ids = wrong, nn.Embedding(3, 16)

    def between(self, y, x):
        if self.wrong == "length" and x.shape[1] > 4:
            raise ValueError("sequences are too long")
        if self.wrong == "value" and (x > 1).any():
            raise ValueError("a value is too large")
        if self.wrong == "nan" and not (y * float("inf")).isfinite().all():
            raise ValueError("not finite")
        if self.wrong == "index":
            return y + self.ids(torch.tensor(7))[: y.shape[-1]]
        if self.wrong == "view":
            return y.view(2, 6, 5, -1).flatten(2)
        return y.float() if self.wrong == "dtype" else y


FAULTS = [
    (lambda: Checked("length"), ValueError, "too long"),
    (lambda: Checked("value"), ValueError, "too large"),
    (lambda: Checked("nan"), ValueError, "not finite"),
    (lambda: Checked("index"), IndexError, "index out of range"),
    (lambda: Checked("view"), RuntimeError, "is invalid for input of size"),
    (lambda: Checked("dtype"), RuntimeError, "same dtype"),
    (lambda: MLP(14), RuntimeError, "cannot be multiplied"),
]


@pytest.mark.parametrize(("make", "kind", "text"), FAULTS)
@pytest.mark.parametrize("plan", [PAIR, {"up": "column"}])
def test_a_fault_of_the_module_itself_keeps_its_type_and_text(make, kind, text, plan):
    if plan is not PAIR and text == "same dtype":
        plan = {"up": column(gather=True)}

    def job():
        with pytest.raises(kind, match=text) as raised:
            steps(make, plan, size=2)
        assert type(raised.value) is kind

    fds.simulate(job, 2)


def computed(norm, remove=None):
    module = MLP()
    norm(module.up)
    if remove is not None:
        remove(module.up)
    return module


def weight_norm(module):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(module)


NORMS = [
    (weight_norm, remove_weight_norm),
    (nn.utils.spectral_norm, remove_spectral_norm),
    (lambda m: prune.l1_unstructured(m, "weight", amount=0.5), lambda m: prune.remove(m, "weight")),
    (lambda m: prune.l1_unstructured(m, "bias", amount=0.5), lambda m: prune.remove(m, "bias")),
    (parametrizations.weight_norm, lambda m: parametrize.remove_parametrizations(m, "weight")),
]


@pytest.mark.parametrize(("norm", "remove"), NORMS)
def test_a_weight_that_is_computed_is_refused_and_trains_without(norm, remove):
    def job():
        with pytest.raises(ComposeError, match=r"(?s)up.*hint: .*remove.*no entry: then it is whole"):
            steps(lambda: computed(norm), PAIR, size=2)

    fds.simulate(job, 2)
    check(lambda: computed(norm, remove), PAIR)


def test_an_error_of_values_stays_the_users_own():
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            y = self.down(torch.tanh(self.up(x)))
            if float(y.detach().abs().max()) > 0:  # never of zeros, by which the whole is tried
                raise RuntimeError("activations exploded")
            return y

    def job():
        apply, params, _ = fds.functional(Guarded())
        tp = fds.tensor_parallel(fds.mesh(tp=2)["tp"], {"up": "column", "down": "row"})
        step = fds.compose(tp, fds.sgd(0.1))(lambda params, x: apply(params, x).square().mean())
        step(step.init(params), torch.ones(4, 8))

    with pytest.raises(RuntimeError, match="activations exploded") as caught:
        fds.simulate(job, 2)
    assert not isinstance(caught.value, fds.FdsError)
