"""A model of fewer layers: built by hand from the layers that are kept, it computes the same."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import fds
from fds.errors import FdsError, LossError, StateError

KEEP = [1, 3, 4]


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.mix, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x):
        return x + sum(expert(self.norm(self.mix(x))) for expert in self.experts)


class Model(nn.Module):
    def __init__(self, blocks=5):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.h = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 7))  # no list of layers: their names differ

    def forward(self, x):
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return self.head(x)


def mean(out, y):
    return (out - y).square().mean()


def test_parameters_under_new_numbers_compute_what_the_layers_that_are_kept_do():
    teacher = Model()
    params = fds.functional(teacher)[1]
    before = {name: x.clone() for name, x in params.items()}
    smaller = fds.reduce_layers(params, KEEP)
    apply, fresh, _ = fds.functional(Model(len(KEEP)))
    assert {name: x.shape for name, x in smaller.items()} == {name: x.shape for name, x in fresh.items()}
    assert list(smaller) == list(fresh)
    tokens = torch.randint(0, 7, (3, 5))
    teacher.h = nn.ModuleList([teacher.h[i] for i in KEEP])
    assert torch.equal(apply(smaller, tokens), teacher(tokens))
    for x in smaller.values():
        x.detach().zero_()
    assert all(torch.equal(params[name], x) for name, x in before.items())


def test_a_prefix_says_which_of_several_lists_is_meant():
    both = nn.ModuleDict({"encoder": Model(3), "decoder": Model(4)})
    params = dict(both.named_parameters())
    with pytest.raises(StateError, match="which list of layers is meant") as caught:
        fds.reduce_layers(params, [0])
    assert "'encoder.h': 3 layers" in str(caught.value) and "experts" not in str(caught.value)
    smaller = fds.reduce_layers(params, [3, 0], prefix="decoder.*")
    assert torch.equal(smaller["decoder.h.0.mix.weight"], params["decoder.h.3.mix.weight"])
    assert torch.equal(smaller["encoder.h.2.mix.weight"], params["encoder.h.2.mix.weight"])
    assert "decoder.h.2.mix.weight" not in smaller
    inner = fds.reduce_layers(params, [1], prefix="decoder.h.2.experts")
    assert torch.equal(inner["decoder.h.2.experts.0.weight"], params["decoder.h.2.experts.1.weight"])


@pytest.mark.parametrize("kind", ["specs", "modules", "sequential", "tied"])
def test_layers_become_fewer_and_so_do_their_parameters(kind):
    spec = lambda cls, *args: fds.LayerSpec(cls, *args)
    first, last, blocks = spec(nn.Embedding, 7, 4), spec(nn.Linear, 4, 2), [spec(Block) for _ in range(5)]
    if kind == "tied":
        blocks = [fds.TiedLayerSpec("even" if i % 2 == 0 else f"b{i}", Block) for i in range(5)]
    layers = [first, *blocks, torch.tanh, last]
    if kind in ("modules", "sequential"):
        layers = [x.build() if isinstance(x, fds.LayerSpec) else nn.Tanh() for x in layers]
    names = ["in", *(f"block{i}" for i in range(5)), "act", "out"]
    source = nn.Sequential(OrderedDict(zip(names, layers, strict=True))) if kind == "sequential" else layers
    whole = fds.Layers(source, mean)
    params = whole.init(fds.random.key(0))
    smaller, fewer = fds.reduce_layers(whole, KEEP, params=params)
    assert len(smaller) == 6 and fewer.keys() == smaller.init.trace().keys()
    if kind == "sequential":
        assert smaller.names == ("in", "block0", "block1", "block2", "act", "out")
    tokens, y = torch.randint(0, 7, (3, 5)), torch.randn(3, 5, 2)
    x = tokens
    for i in (0, *(1 + k for k in KEEP), 6, 7):
        x = whole.layer(i)(params, {}, x)[0]
    assert torch.equal(smaller(fewer, (tokens, y)), mean(x, y))
    step = fds.compose(fds.sgd(0.1))(fds.reduce_layers(whole, KEEP))
    step(step.init(fewer), (tokens, y))


@pytest.mark.parametrize("keep", [[], [5], [-1], [0, 0], [True], "01", 3, None, [1.0]])
def test_other_numbers_are_refused(keep):
    for source in (fds.functional(Model())[1], fds.Layers([Block() for _ in range(5)], mean)):
        with pytest.raises(StateError, match="these are not numbers of layers"):
            fds.reduce_layers(source, keep)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fds.reduce_layers(nn.Linear(2, 2), [0]),
        lambda: fds.reduce_layers({"a": 1}, [0]),
        lambda: fds.reduce_layers(dict(nn.Linear(2, 2).named_parameters()), [0]),
        lambda: fds.reduce_layers(fds.functional(Model())[1], [0], prefix="layers"),
        lambda: fds.reduce_layers(fds.functional(Model())[1], [0], params={}),
        lambda: fds.reduce_layers(fds.Layers([nn.Linear(2, 2), nn.Tanh()], mean), [0]),
        lambda: fds.reduce_layers(fds.Layers([Block(), Block()], mean), [0], prefix="h"),
        lambda: fds.reduce_layers(fds.Layers([Block(), Block()], mean), [0], params={"a": torch.ones(1)}),
    ],
)
def test_what_has_no_list_of_layers_is_refused(call):
    with pytest.raises((StateError, LossError)) as caught:
        call()
    assert isinstance(caught.value, FdsError) and caught.value.want
