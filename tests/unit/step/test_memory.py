"""What a filler remembers: how its slot begins, and how it lies over ranks."""

import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from fds.errors import ComposeError
from fds.step import Memory, fill
from tests.bits import assert_same_bits

SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (3, 3), "1.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}


def layers():
    return fds.Layers(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)), nn.MSELoss())


def remembers(*memories):
    def apply(step):
        for memory in memories:
            step = fill(step, memory=memory)
        return step

    return fds.step.Transform("remembers", "remembers()", apply)


def drawn(shapes, device):
    """Return a random number for every parameter, whoever holds it."""
    return {name: torch.rand((), device=device) * len(shape) for name, shape in shapes.items()}


PLACES = {
    "one process": (1, lambda: ()),
    "stage 0": (2, lambda: (fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0),)),
    "stage 3": (2, lambda: (fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3),)),
    "stages in one process": (1, lambda: (fds.pipeline(plans.gpipe, 2, num_microbatches=2),)),
    "stages": (2, lambda: (fds.pipeline(plans.gpipe, fds.mesh(pp=-1)["pp"], num_microbatches=2),)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_slot_by_name_begins_alike_on_every_rank_with_all_parameters(place):
    ranks, transforms = PLACES[place]

    def begin():
        step = fds.compose(*transforms(), remembers(Memory("by name", drawn, "named")), fds.adam())(layers())
        state = step.init(step.loss.init, key=5)
        traced = step.structure(step.loss.init).slots
        assert tree.map(lambda x: (x.shape, x.dtype), traced) == tree.map(lambda x: (x.shape, x.dtype), state.slots)
        batch = torch.ones(4, 2), torch.ones(4, 1)
        return state.slots, step(state, batch)[0].slots, step.describe(state).memory

    plain = fds.compose(remembers(Memory("by name", drawn, "named")), fds.adam())(layers())
    want = plain.init(plain.loss.init, key=5).slots
    assert {name: tuple(x.shape) for name, x in want["by name"].items()} == dict.fromkeys(SHAPES, ())
    for first, after, held in fds.simulate(begin, world_size=ranks):
        assert_same_bits([first, after], [want, want])
        assert held == {"by name": 4 * len(SHAPES)}


def test_it_is_told_the_whole_shapes():
    told = []
    memory = Memory("n", lambda shapes, device: told.append(shapes) or torch.zeros(()), "replicated")
    step = fds.compose(remembers(memory), fds.pipeline(plans.gpipe, 2, num_microbatches=1), fds.sgd(0.1))(layers())
    step.init(step.loss.init)
    assert told == [SHAPES]


def test_a_description_says_what_is_remembered():
    step = fds.compose(remembers(Memory("by name", drawn, "named")), fds.ema(0.9), fds.sgd(0.1))(layers())
    told = step.describe(step.init(step.loss.init))
    assert told.stations["memory"] == "by name (named), ema (parameters)"
    assert told.memory == {"by name": 24, "ema": 4 * 25} and sum(told.memory.values()) == told.num_bytes["slots"]
    assert "24 bytes in by name" in str(told)


zero = lambda params, device: torch.zeros((), device=device)
REFUSED = {
    "no name": (lambda: Memory("", zero, "named"), "a string"),
    "a path": (lambda: Memory("a.b", zero, "named"), "without dots"),
    "one argument": (lambda: Memory("a", lambda params: params, "named"), "(shapes, device) -> slot"),
    "elsewhere": (lambda: Memory("a", zero, "sliced"), "'parameters', 'named', 'replicated'"),
    "no memory": (lambda: fds.compose(remembers({"a": zero}), fds.sgd(0.1))(layers()), "Memory(slot, init, lies"),
    "no dict": (
        lambda: fds.compose(remembers(Memory("a", zero, "named")), fds.sgd(0.1))(layers()).init(layers().init),
        "a dict: name -> tensor",
    ),
    "twice": (
        lambda: fds.compose(remembers(Memory("ema", zero, "named")), fds.ema(0.9), fds.sgd(0.1))(layers()),
        "name='ema_2'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_memory_is_refused_with_what_is_wanted(name):
    make, want = REFUSED[name]
    with pytest.raises(ComposeError) as caught:
        make()
    assert want in caught.value.want
