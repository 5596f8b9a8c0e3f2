"""Composing: data about stations, refused with a picture."""

import attrs
import pytest
import torch
from torch import nn

import fds
from fds.errors import ComposeError
from tests.bits import assert_same_bits
from tests.unit.step.problem import BATCH, loss_fn, make_params


def result(step):
    return step(step.init(make_params()), BATCH)


@pytest.mark.parametrize("bad", [loss_fn, 3, "adam", None, nn.Linear(2, 2), torch.ones(1), [fds.sgd(0.1)]])
def test_what_is_no_transform_is_refused_by_its_position(bad):
    with pytest.raises(ComposeError, match="no transform") as caught:
        fds.compose(fds.sgd(0.1), bad)
    assert caught.value.where == "position 1"


@fds.step.transform
def mine(rate):
    return lambda step: step


@pytest.mark.parametrize(
    ("factory", "want"),
    [
        (fds.sgd, "fds.sgd(...)"),
        (fds.adamw, "fds.adamw(...)"),
        (fds.by_name, "fds.by_name(...)"),
        (fds.donate, "fds.donate()"),
        (fds.skip_nonfinite, "fds.skip_nonfinite()"),
        (fds.accumulate, "fds.accumulate(...)"),
        (mine, "mine(...)"),
    ],
)
def test_a_factory_that_was_not_called_is_refused_with_the_call(factory, want):
    with pytest.raises(ComposeError) as caught:
        fds.compose(factory, fds.sgd(0.1))
    assert (caught.value.where, caught.value.want) == ("position 0", want)


WEIGHT = torch.zeros(1, requires_grad=True)
NONE = {
    "a function": (lambda step: step, "@fds.step.transform"),
    "an optimizer of torch": (torch.optim.SGD, "fds.sgd("),
    "one that was made": (torch.optim.AdamW([WEIGHT], 0.1), "fds.adamw("),
    "one that fds has not": (torch.optim.Rprop, "write-your-own"),
    "a scheduler of torch": (torch.optim.lr_scheduler.StepLR, "fds.schedules"),
    "a list": ([fds.donate(), fds.sgd(0.1)], "compose(*parts)"),
    "a loss": (loss_fn, "second call"),
}


@pytest.mark.parametrize(("bad", "hint"), NONE.values(), ids=NONE)
def test_what_is_no_transform_is_refused_with_what_to_write(bad, hint):
    with pytest.raises(ComposeError) as caught:
        fds.compose(bad, fds.sgd(0.1))
    assert hint in caught.value.hint


@pytest.mark.parametrize("parts", [(), (lambda: fds.accumulate(2),), (lambda: fds.ema(0.9), lambda: fds.donate())])
def test_a_composition_without_an_optimizer_is_refused_with_one_shown(parts):
    with pytest.raises(ComposeError, match="no optimizer") as caught:
        fds.compose(*(p() for p in parts))(loss_fn)
    assert "adamw" in caught.value.want


@pytest.mark.parametrize(
    "loss", [fds.accumulate(2), fds.sgd(0.1), fds.compose(fds.sgd(0.1)), None, 3, torch.ones(1), fds.accumulate]
)
def test_what_is_no_loss_is_refused(loss):
    with pytest.raises(ComposeError, match="loss"):
        fds.compose(fds.adam(0.1))(loss)


def test_a_module_is_no_loss():
    with pytest.raises(ComposeError) as caught:
        fds.compose(fds.adam(0.1))(nn.Linear(3, 2))
    assert "functional" in caught.value.hint


def test_two_optimizers_are_refused():
    with pytest.raises(ComposeError, match="optimizer") as caught:
        fds.compose(fds.sgd(0.1), fds.accumulate(2), fds.adam(0.2))(loss_fn)
    assert caught.value.where == "position 2"
    assert "position 0" in caught.value.what


def test_a_station_filled_twice_shows_what_was_written_and_what_to_write():
    with pytest.raises(ComposeError) as caught:
        fds.compose(fds.accumulate(4), fds.sgd(0.1), fds.accumulate(2))(loss_fn)
    assert caught.value.got == "compose(accumulate(4), sgd(lr=0.1), accumulate(2))"
    assert "accumulate(8)" in caught.value.want
    assert caught.value.want.count("accumulate") == 1


def test_two_slots_of_one_name_are_refused():
    with pytest.raises(ComposeError, match="slot") as caught:
        fds.compose(fds.ema(0.9), fds.ema(0.99), fds.sgd(0.1))(loss_fn)
    assert "name=" in caught.value.want


def test_compositions_nest():
    flat = fds.compose(fds.accumulate(2), fds.clip_by_global_norm(1.0), fds.ema(0.9), fds.sgd(0.1))
    nested = fds.compose(
        fds.compose(fds.accumulate(2), fds.compose(fds.clip_by_global_norm(1.0))),
        fds.compose(),
        fds.compose(fds.ema(0.9), fds.sgd(0.1)),
    )
    assert repr(nested) == repr(flat)
    assert_same_bits(result(nested(loss_fn)), result(flat(loss_fn)))


def test_a_composition_serves_many_losses():
    composition = fds.compose(fds.accumulate(2), fds.sgd(0.1))
    first = result(composition(loss_fn))
    composition(lambda p, b: loss_fn(p, b) * 2)
    assert_same_bits(result(composition(loss_fn)), first)


def test_a_transform_rewrites_a_finished_step_and_leaves_it():
    plain = fds.compose(fds.sgd(0.1))(loss_fn)
    rewritten = fds.accumulate(2)(plain)
    assert plain.split.num_microbatches == 1
    assert_same_bits(result(rewritten), result(fds.compose(fds.accumulate(2), fds.sgd(0.1))(loss_fn)))
    assert [str(t) for t in rewritten.composition] == ["sgd(lr=0.1)", "accumulate(2)"]


def test_a_composition_rewrites_a_finished_step():
    plain = fds.compose(fds.sgd(0.1))(loss_fn)
    more = fds.compose(fds.ema(0.9), fds.accumulate(2))
    assert_same_bits(result(more(plain)), result(fds.compose(more, fds.sgd(0.1))(loss_fn)))


def test_a_finished_step_refuses_what_it_has():
    for more in (fds.accumulate(2), fds.compose(fds.accumulate(2)), fds.compose(fds.adam(0.1))):
        with pytest.raises(ComposeError, match="already filled"):
            more(fds.compose(fds.accumulate(4), fds.sgd(0.1))(loss_fn))


def test_the_state_is_sharded_once():
    def run():
        dp = fds.mesh(dp=-1)["dp"]
        fds.compose(fds.shard_optimizer(dp), fds.sgd(0.1), fds.shard_optimizer(dp, stage=3))(loss_fn)

    words = r"already filled by shard_optimizer(?s:.*)want:  compose\(sgd\(lr=0.1\), shard_optimizer\(.*stage=3\)\)"
    with pytest.raises(ComposeError, match=words):
        fds.simulate(run, 2)


def test_a_transform_reads_as_it_was_written():
    assert repr(fds.accumulate(num_microbatches=4)) == "accumulate(num_microbatches=4)"
    text = repr(fds.compose(fds.accumulate(4), fds.ema(0.9, name="slow"), fds.sgd(0.1)))
    assert text == "compose(accumulate(4), ema(0.9, name='slow'), sgd(lr=0.1))"


def test_a_state_of_a_smaller_composition_is_refused():
    plain, more = fds.compose(fds.sgd(0.1))(loss_fn), fds.compose(fds.ema(0.9), fds.sgd(0.1))(loss_fn)
    with pytest.raises(fds.FdsError, match="another composition"):
        more(plain.init(make_params()), BATCH)


def test_a_station_can_be_set_by_hand():
    step = attrs.evolve(fds.compose(fds.sgd(0.1))(loss_fn), optimizer=fds.sgd(0.0))
    assert_same_bits(result(step)[0].params, make_params())


def test_a_topology_is_filled_and_not_replaced():
    """What follows from it (who meets whom) would stay as it was."""
    step = fds.compose(fds.sgd(0.1))(loss_fn)
    with pytest.raises(ComposeError, match="what follows from it") as caught:
        attrs.evolve(step, topology=(fds.step.Dimension(None, "data"),))
    assert "fill(step, topology=" in caught.value.hint


FACTORIES = [make for name in fds.__all__ if hasattr(make := getattr(fds, name), "is_transform_factory")]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda one: one.__name__)
def test_an_argument_that_a_transform_does_not_take_is_refused_with_those_that_it_does(factory):
    with pytest.raises(ComposeError, match=f"^{factory.__name__}: .*(unexpected|missing)") as caught:
        factory(nonsense=1)
    assert caught.value.want.startswith(f"{factory.__name__}(") and isinstance(caught.value, TypeError)


def test_arguments_by_position_are_refused_with_their_names():
    with pytest.raises(ComposeError) as caught:
        fds.checkpoint_activations("matmuls")
    names = "policy, store, every, partition, contiguous, number"
    assert caught.value.want.startswith(
        "checkpoint_activations(*, policy=None, store='device', every=1, partition=None"
    )
    assert caught.value.hint == f"by name: {names}"
