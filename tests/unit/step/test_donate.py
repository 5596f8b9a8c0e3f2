"""A donated state: written over, and refused from then on."""

import dataclasses
from collections import UserDict, namedtuple

import attrs
import pytest
import torch
from torch.utils import _pytree

import fds
from fds import tree
from fds.errors import ComposeError, DonatedStateError, LossError, ScheduleError
from tests.bits import assert_same_bits, snapshot
from tests.unit.step.problem import BATCH, loss_fn, make, make_params


def addresses(state):
    trained = (state.params["net"], state.opt, state.slots)
    return [x.data_ptr() for x in tree.leaves(trained)]


def test_the_new_state_is_in_the_memory_of_the_old():
    step = make(fds.donate(), fds.ema(0.9))
    state = step.init(make_params())
    new, _ = step(state, BATCH)
    assert addresses(new) == addresses(state)
    assert not step.runtime.pool.sets


def test_the_users_own_parameters_are_never_written():
    step, params = make(fds.donate()), make_params()
    before = snapshot(params)
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert_same_bits(params, before)


def test_every_entry_refuses_a_state_that_was_given_up(tmp_path):
    step = make(fds.donate())
    state = step.init(make_params())
    evaluate = step.evaluator(state)
    step(state, BATCH)
    for entry in (
        lambda: step(state, BATCH),
        lambda: step.evaluate(state, BATCH),
        lambda: step.evaluator(state),
        lambda: evaluate(BATCH),
        lambda: step.params(state),
        lambda: step.describe(state),
        lambda: step.describe(state, BATCH),
        lambda: fds.save(tmp_path, state, step),
        lambda: make()(state, BATCH),
    ):
        with pytest.raises(DonatedStateError):
            entry()


def test_a_pure_step_gives_nothing_up():
    step = make()
    state = step.init(make_params())
    step(state, BATCH)
    step(state, BATCH)


def test_the_state_that_came_back_goes_in_again():
    step = make(fds.donate())
    state = step.init(make_params())
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert state.step == 3


def _vector(params, batch):
    return batch["x"] @ params["net"]["w"]


def _raising(params, batch):
    raise KeyError("in the loss")


@pytest.mark.parametrize(("loss", "error"), [(_vector, LossError), (_raising, KeyError)])
def test_an_error_before_the_first_write_leaves_the_state(loss, error):
    broken, good = make(fds.donate(), loss=loss), make(fds.donate())
    state = broken.init(make_params())
    before = snapshot(state)
    with pytest.raises(error):
        broken(state, BATCH)
    assert_same_bits(state, before)
    good(state, BATCH)


def test_a_schedule_that_raises_leaves_the_state():
    def schedule(t):
        raise KeyError("in the schedule")

    step = make(fds.donate(), optimizer=fds.sgd(schedule))
    state = step.init(make_params())
    before = snapshot(state)
    with pytest.raises(ScheduleError):
        step(state, BATCH)
    assert_same_bits(state, before)
    state.check("be used again")


def test_parameters_in_another_layout_are_stepped_or_left():
    step, pure = make(fds.donate(), optimizer=fds.sgd(0.1)), make(optimizer=fds.sgd(0.1))
    make_state = lambda: attrs.evolve(
        step.init(make_params()), params={**make_params(), "net": {"w": torch.ones(2, 3).t(), "b": torch.zeros(2)}}
    )
    want, _ = pure(make_state(), BATCH)
    state = make_state()
    try:
        got, _ = step(state, BATCH)
    except RuntimeError:
        state.check("be used again: nothing was written")
    else:
        assert_same_bits(got, want)


def test_averages_put_in_place_of_the_parameters_are_stepped_as_in_the_pure_step():
    results = []
    for more in ((), (fds.donate(),)):
        step = make(fds.ema(0.5), *more)
        state, _ = step(step.init(make_params()), BATCH)
        state, _ = step(attrs.evolve(state, params=state.slots["ema"]), BATCH)
        results.append(state)
    assert_same_bits(results[1], results[0])


def test_a_map_over_a_state_makes_it_independent():
    step = make(fds.donate())
    state = step.init(make_params())
    other = tree.map(torch.clone, state)
    step(state, BATCH)
    assert_same_bits(step.evaluate(other, BATCH)["loss"], loss_fn(make_params(), BATCH))


def test_metrics_and_parameters_that_are_held_never_change():
    step = make(fds.donate(), fds.clip_by_global_norm(1.0))
    state, told = step.init(make_params()), []
    for _ in range(4):
        state, metrics = step(state, BATCH)
        params = step.params(state)
        told.append((metrics, params, snapshot((metrics, params))))
    for metrics, params, kept in told:
        assert_same_bits((metrics, params), kept)


def test_giving_up_twice_is_refused_at_composing():
    with pytest.raises(ComposeError):
        make(fds.donate(), fds.donate())


HOLDERS = {
    "an identity map": lambda state: tree.map(lambda x: x.cpu(), state),
    "a map to views": lambda state: tree.map(lambda x: x.detach(), state),
    "a state that shares the parameters": lambda state: attrs.evolve(other_state(), params=state.params),
    "one that shares an inner dict": lambda state: attrs.evolve(
        other_state(), params={**state.params, "net": state.params["net"]}
    ),
    "one that shares the moments": lambda state: attrs.evolve(other_state(), opt=dict(state.opt)),
    "an average": lambda state: state.slots["ema"],
    "the slots": lambda state: state.slots,
    "a tensor": lambda state: state.params["net"]["w"],
    "an array": lambda state: state.params["net"]["w"].numpy(),
    "a storage": lambda state: state.opt["exp_avg"]["net.w"].untyped_storage(),
}


def other_state():
    return make(fds.ema(0.9)).init(make_params())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", HOLDERS)
def test_what_somebody_else_holds_is_copied_instead(how, steps):
    donated, pure = make(fds.donate(), fds.ema(0.9)), make(fds.ema(0.9))
    state = donated.init(make_params())
    want = tree.map(torch.clone, state)
    for _ in range(steps):
        (state, _), (want, _) = donated(state, BATCH), pure(want, BATCH)
    held = HOLDERS[how](state)
    is_storage = isinstance(held, torch.UntypedStorage)
    read = lambda: torch.tensor(held.tolist()) if is_storage else tree.map(torch.as_tensor, held)
    before = snapshot(read())
    for _ in range(3):
        (state, _), (want, _) = donated(state, BATCH), pure(want, BATCH)
        assert_same_bits(state, want)
    assert_same_bits(read(), before)


@dataclasses.dataclass
class Data:
    w: torch.Tensor


@attrs.define
class Slotted:
    w: torch.Tensor


@attrs.define(slots=False)
class Open:
    w: torch.Tensor


class Registered:
    def __init__(self, w):
        self.w = w


_pytree.register_pytree_node(
    Registered,
    lambda x: ([x.w], None),
    lambda parts, _: Registered(*parts),
    flatten_with_keys_fn=lambda x: ([(_pytree.GetAttrKey("w"), x.w)], None),
)
CONTAINERS = {
    "dataclass": Data,
    "attrs": Slotted,
    "attrs with a dict": Open,
    "registered": Registered,
    "named tuple": namedtuple("Named", "w"),
    "mapping": lambda w: UserDict(w=w),
    "dict": lambda w: {"w": w},
    "list": lambda w: [w],
}


@pytest.mark.parametrize("inside", [False, True], ids=["outermost", "inside"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_is_held_keeps_its_values_whatever_its_class(name, inside):
    loss = lambda params, batch: sum((x * batch).sum() for x in tree.leaves(params))
    step, pure = (fds.compose(*more, fds.ema(0.5), fds.sgd(0.1))(loss) for more in ((fds.donate(),), ()))
    made = lambda: CONTAINERS[name](torch.ones(2))
    state = step.init({"a": made()} if inside else made())
    for one in (lambda state: state.params, lambda state: state.slots["ema"]):
        tops = one(state)
        held = tops["a"] if inside else tops
        held, tops = vars(held) if name == "attrs with a dict" else held, None
        want, before = snapshot(pure(state, torch.ones(2))[0]), snapshot(tree.leaves(held))
        state, _ = step(state, torch.ones(2))
        assert_same_bits(state, want)
        assert_same_bits(tree.leaves(held), before)


def test_an_identity_map_is_a_state_of_its_own():
    step = make(fds.donate())
    state = step.init(make_params())
    kept = tree.map(lambda x: x, state)
    want = snapshot(step(state, BATCH))
    assert_same_bits(step(kept, BATCH), want)


COMPOSITIONS = {
    "plain": (),
    "average": (fds.ema(0.9),),
    "scale": (fds.loss_scale(), fds.clip_by_global_norm(1.0)),
    "precision": (fds.precision(torch.bfloat16), fds.accumulate(2)),
    "frozen": (fds.freeze("net.b"),),
}


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_loop_stays_in_its_memory_whoever_keeps_states_that_were_given_up(name, keep):
    step = make(fds.donate(), *COMPOSITIONS[name])
    state, spent, seen = step.init(make_params()), [], []
    for _ in range(4):
        old, (state, _) = state, step(state, BATCH)
        spent += [old] if keep else []
        seen.append([x.data_ptr() for x in tree.leaves((state.params, state.opt))])
        del old
    assert seen == [seen[0]] * 4
    assert not step.runtime.pool.sets


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sharded_loop_stays_in_its_memory(stage):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = make(fds.donate(), fds.shard_optimizer(axis, stage=stage))
        state, seen = step.init(make_params()), []
        for _ in range(3):
            state, _ = step(state, BATCH)
            seen.append([x.data_ptr() for x in tree.leaves((state.params, state.opt))])
        assert seen == [seen[0]] * 3

    fds.simulate(run, 2)
