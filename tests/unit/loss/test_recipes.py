"""Recipes: what a factory does to tensors, done again a layer at a time, against the factory run for real."""

import copy
import itertools
import math
import random as python_random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds import random
from fds.errors import LossError
from fds.loss.recorder import record
from tests.bits import assert_same_bits
from tests.memory import peak_bytes

KEY = random.key(7)


class SeededDraws(TorchDispatchMode):
    """Runs every draw from the generator that a recipe would give it: the oracle."""

    def __init__(self):
        super().__init__()
        self.count = itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(random.seed(KEY, "draw", next(self.count)))
        return func(*args, **(kwargs or {}))


def run_for_real(factory):
    with random.scope([]), SeededDraws():
        return {name: p.detach() for name, p in factory().named_parameters()}


def shapes(params):
    return {name: (x.shape, x.stride(), x.dtype) for name, x in params.items()}


def generators():
    return torch.get_rng_state().tolist(), python_random.getstate(), repr(np.random.get_state())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(4, 4).tril())


class GPT(nn.Module):
    """Tied embedding, scaled residual projections, a padding row: what transformer code does."""

    def __init__(self, width=12, layers=3, words=17):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.positions = nn.Parameter(torch.zeros(5, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.rates = [x.item() for x in torch.linspace(0, 0.1, layers)]
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) * self.rates[-1])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.init)
        for name, p in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def init(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
            module.weight.data[module.padding_idx].zero_()


def changed(module, change):
    """Return the module after `change(module)` in no_grad."""
    with torch.no_grad():
        change(module)
    return module


def with_parameter(make):
    module = nn.Module()
    module.p = nn.Parameter(make())
    return module


def mlp(width=6, layers=3):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def copied():
    module = mlp()
    module[1].load_state_dict(module[0].state_dict())
    module[2].weight.data = module[0].weight.data.t() * 2
    return module


def flat():
    module = mlp()
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector / vector.norm(), module.parameters())
    return module


def written_in_place(p):
    p[2] = 0
    p[:, 1] = torch.arange(6.0)
    p[p.shape[0] - 1, 0] = 5.0
    p.add_(torch.eye(6)).clamp_(-0.3, 0.3)


def drawn_into_views(p):
    p.t()[1:3].normal_()
    nn.init.xavier_uniform_(p[3:])
    torch._foreach_mul_([p[0], p[1]], 2.0)


def positive():
    while not ((x := torch.randn(3)) > 0).all():
        pass
    return x


FACTORIES = {
    "linear": lambda: nn.Linear(5, 3),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "convolution": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.PReLU()),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "attention of two widths": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
    "lstm": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "gpt": GPT,
    "deep copies": lambda: nn.ModuleList(copy.deepcopy(m) for m in [mlp()] * 2),
    "orthogonal": lambda: changed(nn.Linear(5, 8), lambda m: nn.init.orthogonal_(m.weight, 1.4)),
    "wide orthogonal": lambda: changed(nn.Linear(8, 5), lambda m: nn.init.orthogonal_(m.weight)),
    "sparse": lambda: changed(nn.Linear(6, 8), lambda m: nn.init.sparse_(m.weight, 0.3)),
    "dirac": lambda: changed(nn.Conv1d(4, 4, 3), lambda m: nn.init.dirac_(m.weight)),
    "eye": lambda: changed(nn.Linear(4, 4), lambda m: nn.init.eye_(m.weight)),
    "kaiming": lambda: changed(nn.Linear(4, 4), lambda m: nn.init.kaiming_normal_(m.weight)),
    "scaled": lambda: changed(nn.Linear(4, 4), lambda m: m.weight.data.mul_(3).sub_(m.weight.data.mean())),
    "in place": lambda: changed(nn.Linear(6, 6), lambda m: written_in_place(m.weight)),
    "views": lambda: changed(nn.Linear(6, 6), lambda m: drawn_into_views(m.weight)),
    "log of uniform": lambda: with_parameter(lambda: torch.log(torch.rand(7) * 15 + 1)),
    "other draws": lambda: with_parameter(lambda: torch.randn(5).exponential_() + torch.full((5,), 0.5).bernoulli()),
    "permutation": lambda: with_parameter(lambda: torch.randn(6)[torch.randperm(6)]),
    "constants": lambda: with_parameter(lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()),
    "numpy": lambda: with_parameter(lambda: torch.from_numpy(np.arange(6.0)).view(2, 3)),
    "legacy": lambda: with_parameter(lambda: torch.FloatTensor(3, 2).uniform_(-1, 1)),
    "chunks of one draw": lambda: nn.ParameterList(torch.randn(6, 2).chunk(3)),
    "truncated by erfinv": lambda: with_parameter(lambda: torch.empty(50).uniform_(-0.9, 0.9).erfinv_().mul_(0.02)),
    "copied": copied,
    "flat": flat,
    "tied": lambda: (lambda m: (setattr(m[2], "weight", m[0].weight), m)[1])(mlp()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "dtype and device": lambda: nn.Linear(4, 3, dtype=torch.float64, device="cpu"),
    "device of another": lambda: with_parameter(lambda: torch.ones(3, device=nn.Linear(2, 2).weight.device)),
    "half": lambda: mlp().half(),
    "to": lambda: GPT().to(torch.bfloat16).to("cpu"),
    "channels last": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "complex": lambda: with_parameter(lambda: torch.view_as_complex(torch.randn(3, 2))),
    "nothing": lambda: nn.ReLU(),
    "zero elements": lambda: nn.Sequential(nn.Linear(3, 3), with_parameter(lambda: torch.empty(0, 3))),
    "value of a draw": lambda: changed(nn.Linear(4, 4), lambda m: m.weight.mul_(1 / m.weight.std().item())),
    "loop on draws": lambda: with_parameter(positive),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_a_recipe_makes_what_the_factory_makes_when_every_draw_is_seeded(factory):
    before = generators()
    made, real = fds.recipe(factory)(KEY), run_for_real(factory)
    assert record(factory, KEY) is not None
    assert list(made) == list(real)
    assert shapes(made) == shapes(real)
    assert_same_bits(made, real)
    assert generators() == before


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_the_trace_says_what_is_made(factory):
    recipe = fds.recipe(factory)
    traced = recipe.trace()
    assert shapes(traced) == shapes(recipe(KEY))
    assert list(traced) == list(recipe(KEY))
    assert {x.device.type for x in traced.values()} <= {"meta"}


# --- distributions ---


def assert_standard_deviation(x, want, kurtosis):
    """The standard error of a standard deviation of n numbers is sqrt((kurtosis - 1) / 4n) of it; 5 of them allowed."""
    error = want * math.sqrt((kurtosis - 1) / (4 * x.numel()))
    assert abs(x.double().std().item() - want) < 5 * error
    assert abs(x.double().mean().item()) < 5 * want / math.sqrt(x.numel())


def test_a_linear_layer_is_uniform_within_its_bounds():
    params = fds.recipe(lambda: nn.Linear(400, 300))(KEY)
    assert_standard_deviation(params["weight"], 1 / 20 / math.sqrt(3), 1.8)
    assert_standard_deviation(params["bias"], 1 / 20 / math.sqrt(3), 1.8)
    assert all(x.abs().max() <= 1 / 20 for x in params.values())


def test_draws_are_not_those_of_another_layer_or_key():
    recipe = fds.recipe(lambda: mlp(layers=2))
    a, b = recipe(KEY), recipe(random.key(8))
    assert not torch.equal(a["0.weight"], a["1.weight"])
    assert not any(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("std", "bound"), [(0.02, 2.0), (1.0, 2.0), (1.0, 0.3)])
def test_a_truncated_normal_stays_within_its_bounds(std, bound):
    recipe = fds.recipe(
        lambda: changed(nn.Linear(300, 200), lambda m: nn.init.trunc_normal_(m.weight, std=std, a=-bound, b=bound))
    )
    x = recipe(KEY)["weight"]
    z = bound / std
    inside = math.erf(z / math.sqrt(2))
    variance = 1 - 2 * z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / inside
    assert x.abs().max() <= bound
    assert_standard_deviation(x, std * math.sqrt(variance), 3.0)
    assert_same_bits(x, recipe(KEY)["weight"])


def test_an_orthogonal_matrix_is_orthogonal():
    x = fds.recipe(FACTORIES["wide orthogonal"])(KEY)["weight"]
    assert torch.allclose(x @ x.t(), torch.eye(5), atol=1e-5)


def test_what_is_never_written_is_zero():
    assert fds.recipe(lambda: with_parameter(lambda: torch.empty(1000)))(KEY)["p"].eq(0).all()


# --- pieces ---


def test_a_piece_is_the_parameters_of_one_submodule():
    pieces = [list(piece) for piece in fds.recipe(lambda: nn.TransformerEncoderLayer(8, 2)).pieces(KEY)]
    assert pieces[:2] == [
        ["self_attn.in_proj_weight", "self_attn.in_proj_bias"],
        ["self_attn.out_proj.weight", "self_attn.out_proj.bias"],
    ]
    assert len(pieces) == 6


def test_pieces_do_not_depend_on_what_is_drawn_between_them():
    recipe, before = fds.recipe(mlp), torch.get_rng_state()
    made = {}
    for piece in recipe.pieces(KEY):
        made |= piece
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        before = torch.get_rng_state()
    assert_same_bits(made, recipe(KEY))


def reinitialized(width, layers):
    module = mlp(width, layers)
    for layer in module:
        nn.init.trunc_normal_(layer.weight, std=0.02)
        layer.weight.data.mul_(2)
    return module


@pytest.mark.parametrize("factory", [mlp, reinitialized])
def test_no_more_than_one_layer_is_whole(factory):
    width, layers = 256, 12
    recipe = fds.recipe(lambda: factory(width, layers))

    def keep_slices():
        kept = []
        for piece in recipe.pieces(KEY):
            kept += [x.flatten()[:4].clone() for x in piece.values()]
            del piece
        return kept

    layer = 4 * (width * width + width)
    needed = 2 if factory is reinitialized else 0  # trunc_normal_ compares: two masks of a byte each, or three
    assert layer <= peak_bytes(keep_slices) <= layer + (needed + 1) * width * width + 2**14
    assert peak_bytes(lambda: [x.to("meta") for x in factory(width, layers).parameters()]) >= layers * 4 * width * width


def test_tracing_allocates_nothing():
    recipe = fds.recipe(lambda: reinitialized(2**22, 2))  # 64 TiB a layer
    assert recipe.trace()["1.weight"].shape == (2**22, 2**22)
    assert peak_bytes(fds.recipe(GPT).trace) < 2**14


def test_tied_parameters_come_once_under_their_first_name():
    recipe = fds.recipe(GPT)
    assert "head.weight" not in recipe.trace()
    assert sum("embedding.weight" in piece for piece in recipe.pieces(KEY)) == 1


def test_a_module_that_was_built_before_keeps_its_values():
    module = mlp()
    made = fds.recipe(lambda: module)(KEY)
    assert_same_bits(made, {name: p.detach() for name, p in module.named_parameters()})
    assert all(made[name] is not p for name, p in module.named_parameters())


def test_values_from_outside_are_those_of_the_time():
    outside, array = torch.randn(4), np.ones(4, np.float32)

    def factory():
        module = with_parameter(lambda: outside * 2 + torch.from_numpy(array))
        array[:] = 100
        return module

    want = outside * 2 + 1
    recipe = fds.recipe(factory)
    assert_same_bits(recipe(KEY)["p"], want)


def test_another_process_makes_the_same():
    source = (
        "import fds, torch; make = fds.recipe(lambda: torch.nn.MultiheadAttention(8, 2))\n"
        "print([x.tolist() for x in make(fds.random.key(7)).values()])"
    )
    there = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    here = fds.recipe(lambda: nn.MultiheadAttention(8, 2))(KEY)
    assert there.strip() == str([x.tolist() for x in here.values()])


def test_ranks_get_what_one_process_gets():
    recipe = fds.recipe(GPT)
    made = fds.simulate(lambda: recipe(KEY), world_size=2)
    for params in made:
        assert_same_bits(params, recipe(KEY))


# --- what cannot be recorded is built for real ---


def draws_from_its_own():
    generator = torch.Generator().manual_seed(3)
    return changed(nn.Linear(3, 3), lambda m: m.weight.normal_(generator=generator))


def seeds_itself():
    torch.manual_seed(3)
    return nn.Linear(3, 3)


def seeds_itself_in_private():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(3, 3)


def swallows():
    module = nn.Linear(3, 3)
    try:
        module.weight.detach().numpy()
    except TypeError:
        module.weight.data.zero_()
    return module


def draws_into_a_tensor_from_outside():
    outside = torch.nn.Parameter(OUTSIDE)
    nn.init.normal_(outside)
    return with_parameter(lambda: outside.detach() + 0)


OUTSIDE = torch.zeros(4)
UNRECORDABLE = {
    "numpy": lambda: with_parameter(lambda: torch.from_numpy(torch.rand(3).numpy() * 2)),
    "mask": lambda: changed(nn.Linear(3, 3), lambda m: m.weight.copy_(m.weight[m.weight > 0].mean())),
    "own generator": draws_from_its_own,
    "own seed": seeds_itself,
    "own seed in private": seeds_itself_in_private,
    "swallowed error": swallows,
    "from outside": draws_into_a_tensor_from_outside,
    "no shape function": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "resized": lambda: with_parameter(lambda: torch.Tensor().resize_(3).uniform_()),
}


@pytest.mark.parametrize("factory", UNRECORDABLE.values(), ids=UNRECORDABLE)
def test_what_cannot_be_recorded_is_built_for_real(factory):
    recipe, before = fds.recipe(factory), generators()
    assert record(factory, KEY) is None
    assert len(list(recipe.pieces(KEY))) == 1
    made = recipe(KEY)
    assert_same_bits(made, recipe(KEY))
    with random.seeded(KEY):
        assert_same_bits(made, {name: p.detach() for name, p in factory().named_parameters()})
    assert shapes(recipe.trace()) == shapes(made)
    assert generators() == before


def test_weights_from_a_file_are_those_of_the_file(tmp_path):
    module = mlp()
    torch.save(module.state_dict(), tmp_path / "weights.pt")

    def factory():
        other = mlp()
        other.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return other

    assert_same_bits(fds.recipe(factory)(KEY), {name: p.detach() for name, p in module.named_parameters()})


def test_a_factory_that_builds_on_meta_gets_what_it_asked_for():
    assert {x.device.type for x in fds.recipe(lambda: nn.Linear(3, 2, device="meta"))(KEY).values()} == {"meta"}
    assert {x.device.type for x in fds.recipe(lambda: nn.Linear(3, 2).to("meta"))(KEY).values()} == {"meta"}

    def late():
        with torch.device("meta"):
            module = nn.Linear(3, 2)
        return changed(module.to_empty(device="cpu"), lambda m: [p.fill_(2) for p in m.parameters()])

    assert fds.recipe(late)(KEY)["weight"].eq(2).all()


def test_the_default_device_is_the_one_in_force():
    recipe = fds.recipe(mlp)
    with torch.device("meta"):
        assert {x.device.type for x in recipe(KEY).values()} == {"meta"}
        assert {x.device.type for x in recipe.trace().values()} == {"meta"}


def test_generators_of_python_and_numpy_follow_the_key():
    factory = lambda: with_parameter(lambda: torch.tensor([python_random.random(), np.random.rand()]))
    recipe, before = fds.recipe(factory), generators()
    a, b, c = recipe(KEY), recipe(KEY), recipe(random.key(8))
    assert_same_bits(a, b)
    assert not (a["p"] == c["p"]).any()
    assert generators() == before


# --- errors ---


class Broken(Exception):
    pass


def broken():
    nn.Linear(3, 3)
    torch.manual_seed(3), python_random.seed(3), np.random.seed(3)
    raise Broken("as it is")


@pytest.mark.parametrize("use", [lambda r: r(KEY), lambda r: r.trace(), lambda r: next(r.pieces(KEY))])
def test_the_error_of_a_factory_surfaces_and_the_generators_are_as_they_were(use):
    before = generators()
    with pytest.raises(Broken, match="as it is"):
        use(fds.recipe(broken))
    assert generators() == before


def test_a_factory_that_returns_no_module_is_refused():
    with pytest.raises(LossError, match="builds a module"):
        fds.recipe(lambda: {"w": torch.ones(3)})(KEY)
