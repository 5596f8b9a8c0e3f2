"""Mistakes of those who write fillers: each is refused with what is wrong, where, and what is wanted."""

import pytest
import torch
from torch import nn

import fds
from fds import tree
from fds.errors import ComposeError, FdsError, LossError
from fds.step import Dimension, Gradients, Memory, Placement, Replicated, Transport, fill, transform
from tests.bits import assert_same_bits
from tests.unit.step.problem import BATCH, loss_fn, make_params

SLOTS = {"range": lambda params, device: {"a": torch.zeros(2), "deep": {"b": [torch.zeros(2)]}}}


@transform
def mine(**stations):
    return lambda step: fill(step, **stations)


def refused(loss=loss_fn, /, **stations):
    """Return the error of composing and calling a step with these stations, whose state is as it was."""
    try:
        step = fds.compose(mine(**stations), fds.sgd(0.1))(loss)
    except FdsError as error:
        return error
    state = step.init(make_params())
    before = tree.map(torch.clone, state)
    with pytest.raises(FdsError) as caught:
        step(state, BATCH)
    assert_same_bits(state, before)
    return caught.value


def setting(slots):
    slots["range"] = {}


def setting_an_entry(slots):
    slots["range"]["a"] = torch.ones(2)


def deleting(slots):
    del slots["range"]["deep"]["b"]


def updating(slots):
    slots["range"]["deep"].update(c=torch.ones(2))


def extending(slots):
    slots["range"]["deep"] |= {"c": torch.ones(2)}


@pytest.mark.parametrize("write", [setting, setting_an_entry, deleting, updating, extending])
@pytest.mark.parametrize("station", ["batch", "condition"])
def test_slots_of_a_call_are_only_read_at_every_level(write, station):
    def one(x, call):
        write(call.slots)
        return x

    error = refused(**{station: one}, slots=SLOTS)
    assert isinstance(error, ComposeError) and error.where == "call.slots" and "Memory" in error.hint


def test_what_is_appended_to_a_list_of_a_slot_is_not_in_the_state():
    def one(x, call):
        call.slots["range"]["deep"]["b"].append(torch.ones(2))
        return x

    step = fds.compose(mine(batch=one, slots=SLOTS), fds.sgd(0.1))(loss_fn)
    state = step.init(make_params())
    new, _ = step(state, BATCH)
    assert len(state.slots["range"]["deep"]["b"]) == len(new.slots["range"]["deep"]["b"]) == 1


def test_slots_of_a_call_are_read_as_the_dicts_that_they_are():
    seen = {}

    def one(x, call):
        slots, plain = call.slots, {"a": torch.ones(2), "deep": {"b": [torch.ones(2)]}}
        seen["paths"] = list(tree.paths(slots))
        seen["sums"] = [tree.map(torch.add, *pair) for pair in ((slots["range"], plain), (plain, slots["range"]))]
        seen["inside"] = tree.map(torch.add, slots["range"]["deep"], plain["deep"])
        seen["merged"] = ({**slots["range"]}.keys(), (slots["range"] | {"c": 1}).keys(), len(slots), "a" in slots)
        seen["copied"], seen["leaves"] = tree.copied(slots), len(tree.leaves(slots))
        return x

    step = fds.compose(mine(batch=one, slots=SLOTS), fds.sgd(0.1))(loss_fn)
    state = step.init(make_params())
    step(state, BATCH)
    one_each = {"a": torch.ones(2), "deep": {"b": [torch.ones(2)]}}
    assert seen["paths"] == ["range.a", "range.deep.b.0"] and seen["leaves"] == 2
    assert_same_bits(seen["sums"], [one_each, one_each])
    assert_same_bits(seen["inside"], one_each["deep"])
    assert seen["merged"] == ({"a": 0, "deep": 0}.keys(), {"a": 0, "deep": 0, "c": 0}.keys(), 1, False)
    assert type(seen["copied"]) is dict
    assert_same_bits(seen["copied"], state.slots)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_batch_map_that_writes_into_the_rows_is_refused(evaluated):
    kept = lambda batch, call: {**batch, "x": batch["x"] + 1}

    def writes(batch, call):
        batch["y"][2:4].add_(1)
        return batch

    batch = tree.map(torch.clone, BATCH)
    step = fds.compose(
        mine(batch=kept), fds.step.Transform("two", "two()", lambda s: fill(s, batch=writes)), fds.sgd(0.1)
    )(loss_fn)
    state = step.init(make_params())
    with pytest.raises(ComposeError, match="writes over the batch") as caught:
        step.evaluate(state, batch) if evaluated else step(state, batch)
    assert "'batch', writes" in caught.value.where and "batch.y" in caught.value.got


def test_a_batch_map_may_write_into_what_another_one_made():
    made = lambda batch, call: {**batch, "x": batch["x"].clone()}
    write = lambda batch, call: {**batch, "x": batch["x"].add_(1)}
    added = lambda batch, call: {**batch, "x": batch["x"] + 1}
    second = fds.step.Transform("two", "two()", lambda s: fill(s, batch=write))
    with torch.inference_mode():
        unversioned = tree.map(torch.clone, BATCH)
    for batch in (BATCH, unversioned):
        one, two = (
            fds.compose(*parts, fds.sgd(0.1))(loss_fn) for parts in ((mine(batch=made), second), (mine(batch=added),))
        )
        assert_same_bits(*(step(step.init(make_params()), batch) for step in (one, two)))


@pytest.mark.parametrize("layered", [False, True])
def test_a_layer_map_that_returns_more_calls_is_refused(layered):
    layers = fds.Layers([nn.Linear(3, 2)], lambda out, y: (out - y).square().mean())
    step = fds.compose(mine(layer=lambda calls, call: [*calls, *calls]), fds.sgd(0.1))(layers if layered else loss_fn)
    state = step.init(layers.init if layered else make_params())
    with pytest.raises(ComposeError, match="more calls than it was given") as caught:
        step(state, (BATCH["x"], BATCH["y"]) if layered else BATCH)
    assert "'layer'" in caught.value.where and caught.value.got == "2 calls" and "1 to 1" in caught.value.want


class On(Placement):
    def __init__(self, axis):
        self.axis = axis


class Narrow(On):
    def lies(self):
        return Replicated()


def test_a_dimension_and_its_placement_are_checked_together():
    def run():
        mesh = fds.mesh(dp=2, tp=2)
        a, b = mesh["tp"], mesh["dp"]
        for role in ("tensor", "stage", "data"):
            with pytest.raises(ComposeError, match="another axis than its dimension") as caught:
                Dimension(a, role, On(b))
            assert "'dp'" in caught.value.got and "'tp'" in caught.value.want
        Dimension(a, "tensor", On(a.channel("own")))
        with pytest.raises(ComposeError, match="cannot be called") as caught:
            fds.compose(mine(topology=Dimension(a, "tensor", Narrow(a))), fds.sgd(0.1))(loss_fn)
        assert caught.value.got == "Narrow.lies()" and "lies(name)" in caught.value.want

    fds.simulate(run, 4)


def test_a_dimension_of_swapped_arguments_or_a_class_is_refused():
    def run():
        axis = fds.mesh(tp=2)["tp"]
        with pytest.raises(ComposeError) as caught:
            Dimension("tensor", axis, On(axis))
        assert "Dimension(axis, role, placement)" in caught.value.want and "changed places" in caught.value.hint
        with pytest.raises(ComposeError) as caught:
            Dimension(axis, "tensor", On)
        assert caught.value.want == "an fds.step.Placement" and "not the class" in caught.value.hint

    fds.simulate(run, 2)


@pytest.mark.parametrize(
    "made",
    [
        lambda g: Gradients(g.leaves, 2.0),
        lambda g: Gradients(g.leaves, torch.ones(2)),
        lambda g: Gradients(g.leaves, None, 1.0),
    ],
)
def test_gradients_of_another_scale_or_norm_are_refused(made):
    error = refused(condition=lambda grads, call: made(grads))
    assert "'condition'" in error.where and "() tensor" in error.want and error.got[:5] in ("scale", "norm:")


def nothing(segments, *, params):
    return {}


def same(grads, opt, params, *, step, lr, grad_scale, skip, segments, axes, values=None):
    return params, opt


@pytest.mark.parametrize("wrong", ["x", True, (0.1,), torch.ones(2), torch.tensor(True), 1j])
def test_an_optimizer_whose_numbers_are_none_is_refused(wrong):
    for name, options in (("lr", {"lr": wrong}), ("beta", {"hyper": {"beta": wrong}})):
        with pytest.raises(fds.errors.OptimizerError) as caught:
            fds.Optimizer(nothing, same, **options)
        assert name in caught.value.where and "schedule" in caught.value.want


@pytest.mark.parametrize("station", ["loss", "eval_loss"])
@pytest.mark.parametrize("wrong", [3, lambda params: params])
def test_a_transform_that_fills_the_loss_with_something_else_is_refused(station, wrong):
    error = refused(**{station: wrong})
    assert error.where == station and "(params, batch)" in error.want


class Half(Transport):
    bound = 0.5

    def __repr__(self):
        return "Half()"


class ShortLeg(Transport):
    def gather(self, axis, part):
        pass


class Files:
    kinds = ("opt",)

    def __repr__(self):
        return "Files()"

    updates_on = "device"

    def holds(self, leaf): ...
    def medium(self, leaf): ...
    def chunks(self, structure): ...
    def make(self, x, leaf): ...
    def read(self, old): ...
    def write(self, worked, new): ...


class Late:
    slot = "range"

    def __call__(self, slot, params, skip):
        return slot


IN_WORDS = {
    "a transport": ({"reduce": Half()}, "reduce={'transport': Half()}"),
    "a residency": ({"place": Files()}, "place={'residency': Files()}"),
    "a dtype": ({"sum": torch.float32}, "sum={'dtype': torch.float32}"),
    "a flag": ({"place": True}, "place={'donate': True}"),
    "nothing": ({"gather": None}, "the fields are"),
    "a leg": ({"gather": {"transport": ShortLeg()}}, "ShortLeg.gather(axis, part)\n  want:  gather(axis, part, whole)"),
    "a method": ({"place": {"residency": Files()}}, "Files.read(old)\n  want:  read(old, device)"),
    "an after": ({"after": Late(), "slots": SLOTS}, "got:   Late.__call__(slot, params, skip)"),
    "a class": ({"reduce": {"transport": Half}}, "an object of it"),
    "a flag of a transport": ({"reduce": {"transport": type("Odd", (Transport,), {"keeps": "yes"})()}}, "keeps: 'yes'"),
}


@pytest.mark.parametrize(("stations", "words"), IN_WORDS.values(), ids=IN_WORDS)
def test_an_error_says_what_to_write(stations, words):
    assert words in str(refused(**stations))


def test_a_view_that_writes_is_not_blamed_on_the_loss():
    def doubles(x, leaf, call):
        x.data.mul_(2)
        return x

    step = fds.compose(mine(view=doubles), fds.sgd(0.1))(loss_fn)
    with pytest.raises(LossError, match="a view writes over what it is given") as caught:
        step(step.init(make_params()), BATCH)
    assert "params.net.w" in caught.value.where and "a view" in caught.value.want


@pytest.mark.parametrize("loss", [loss_fn, lambda p, b: loss_fn(p, b).detach() + 0 * p["net"]["b"].sum()])
def test_views_that_detach_everything_are_in_the_hint(loss):
    assert "views" in refused(loss, view=lambda x, leaf, call: x.detach()).hint
    assert "views" not in refused(lambda p, b: loss_fn(p, b).detach()).hint


@pytest.mark.parametrize(("lies", "first"), [("parameters", "params"), ("named", "shapes"), ("partial", "shapes")])
def test_what_the_init_of_a_memory_takes_follows_how_it_lies(lies, first):
    with pytest.raises(ComposeError, match="a function that makes its slot") as caught:
        Memory("slot", lambda one: {}, lies)
    assert f"({first}, device)" in caught.value.want


def test_one_leaf_is_a_leaf():
    error = refused(condition=lambda grads, call: Gradients(grads.leaves[:1], grads.scale))
    assert error.got.startswith("1 leaf: ") and error.want.startswith("2 leaves: ")


def test_a_transform_is_no_scope():
    with (
        pytest.raises(ComposeError, match=r"not a scope(?s:.)*fds\.kernels\.prefer_triton\(\)") as error,
        fds.triton_kernels(),
    ):
        pass
    assert error.value.want == "fds.compose(triton_kernels(), ...)(loss)"
