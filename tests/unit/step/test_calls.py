"""What fillers are given of the call, and layer maps of its layers; nothing that they do with it goes unseen."""

import pytest
import torch
from torch import nn

import fds
from fds import tree
from fds.errors import LossError
from tests.bits import assert_same_bits

ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 3)


def layers(count=6):
    return fds.Layers([fds.LayerSpec(nn.Linear, 3, 3) for _ in range(count)], nn.MSELoss())


def filled(**stations):
    return fds.step.Transform("mine", "mine()", lambda step: fds.step.fill(step, **stations))


def noisy(one):
    return lambda x: one(x + torch.rand_like(x))


def into_its_list(calls, call):
    for i, one in enumerate(calls):
        calls[i] = one.replaced(noisy(one.run))
    return calls


def functions_into_its_list(calls, call):
    for i, one in enumerate(calls):
        calls[i] = noisy(one)
    return calls


def a_new_list(calls, call):
    return [one.replaced(noisy(one)) for one in calls]


def trained(*transforms):
    loss = layers()
    step = fds.compose(*transforms, fds.sgd(1.0))(loss)
    return step(step.init(loss.init, key=1), ROWS)


@pytest.mark.parametrize("more", [(), (fds.checkpoint_activations(),)], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("way", [into_its_list, functions_into_its_list])
def test_a_layer_map_may_write_into_its_list(way, more):
    assert_same_bits(trained(filled(layer=way), *more), trained(filled(layer=a_new_list)))


def test_functions_for_several_layers_draw_apart_on_every_stage():
    drawn = []

    def pair(one, two):
        def run(x):
            drawn.append(float(torch.rand(())))
            return two(one(x))

        return run

    pairs = filled(layer=lambda calls, call: [pair(calls[i], calls[i + 1]) for i in range(0, len(calls), 2)])
    loss = layers(8)
    step = fds.compose(fds.pipeline(fds.plans.gpipe, 2, num_microbatches=1), pairs, fds.sgd(0.1))(loss)
    step(step.init(loss.init), ROWS)
    assert len(set(drawn)) == len(drawn) == 4


class Counts:
    slot = "counts"

    def __call__(self, slot, params, skip, call):
        return slot.add_(1)


class Reads:
    """Adds up what the slot `counts` is when it is called."""

    slot = "reads"

    def __call__(self, slot, params, skip, call):
        return slot.add_(call.slots["counts"])


@pytest.mark.parametrize("more", [(), (fds.donate(),)], ids=["pure", "donated"])
def test_what_follows_an_update_reads_the_new_slots_donated_or_not(more):
    zero = lambda params, device: torch.zeros(())
    step = fds.compose(
        filled(after=Counts(), slots={"counts": zero}),
        fds.step.Transform("second", "second()", lambda s: fds.step.fill(s, after=Reads(), slots={"reads": zero})),
        *more,
        fds.sgd(0.1),
    )(lambda p, x: (p["w"] * x).sum())
    state = step.init({"w": torch.ones(3)})
    for _ in range(3):
        state, _ = step(state, torch.ones(3))
    assert float(state.slots["reads"]) == 1 + 2 + 3


@pytest.mark.parametrize("what", ["slots", "step"])
def test_a_view_that_writes_into_what_the_call_shows_is_refused(what):
    def view(x, leaf, call):
        (call.slots["n"] if what == "slots" else call.step).add_(1)
        return x

    step = fds.compose(filled(view=view, slots={"n": lambda params, device: torch.zeros(())}), fds.sgd(0.1))(
        lambda p, x: (p["w"] * x).sum()
    )
    with pytest.raises(LossError, match="writes over what it is given") as caught:
        step(step.init({"w": torch.ones(3)}), torch.ones(3))
    assert caught.value.where == {"slots": "slots.n", "step": "step"}[what]
    assert tree.leaves(step.init({"w": torch.ones(3)}).slots) == [0]
