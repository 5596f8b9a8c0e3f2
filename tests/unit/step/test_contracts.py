"""What fills a station: a wrong filler is refused where it is written, and one that breaks its promise by its name."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fds
from fds import tree
from fds.errors import ComposeError, FdsError
from fds.step import Gradients, Measure, fill, transform
from tests.bits import assert_same_bits
from tests.unit.step.problem import BATCH, loss_fn, make_params


def filled(optimizer=None, /, **stations):
    """Return a step with stations filled by hand."""
    by_hand = fds.step.Transform("mine", "mine()", lambda step: fill(step, **stations))
    return fds.compose(by_hand, optimizer or fds.sgd(0.1))(loss_fn)


class Noted:
    """An `after` that returns what it is told to."""

    slot = "noted"

    def __init__(self, returns):
        self.returns = returns

    def __call__(self, slot, params, skip, call):
        return self.returns


class Half:
    """An executor that lacks methods."""

    def train(self, run):
        pass

    evaluate = agree = train


class Three:
    """An `after` as they were before they were given the call."""

    slot = "noted"

    def __call__(self, slot, params, skip):
        return slot


class Scale:
    def __init__(self, scale, metrics):
        self.returns = scale, metrics

    def scale(self, slots, device):
        return self.returns[0]

    def metrics(self, slots, device):
        return self.returns[1]


ONE = torch.ones((), dtype=torch.float64)


NOTED = {"noted": lambda params, device: torch.zeros(2)}
measured = {"measure": Measure(norm=True)}
empty = lambda segments, *, params: {}
BROKEN = {
    "condition: a list": ({"condition": lambda grads, call: grads.leaves}, "condition", "Gradients"),
    "condition: nothing": ({"condition": lambda grads, call: None}, "condition", "Gradients"),
    "condition: fewer": ({"condition": lambda g, call: Gradients(g.leaves[:1], g.scale)}, "condition", "2 leaves"),
    "condition: others": (
        {"condition": lambda g, call: Gradients([x.sum() for x in g.leaves], None)},
        "condition",
        "(3, 2)",
    ),
    "split: nothing": ({"split": lambda batch: None}, "split", "list"),
    "split: none": ({"split": lambda batch: []}, "split", "list"),
    "context: a dtype": ({"context": lambda call: torch.float16}, "context", "context manager"),
    "layer: nothing": ({"layer": lambda calls, call: None}, "layer", "list"),
    "layer: none": ({"layer": lambda calls, call: []}, "layer", "list"),
    "scale: a float": ({"scale": Scale(2.0, {})}, "scale", "0-d"),
    "scale: no metrics": ({"scale": Scale(ONE, None)}, "scale", "metrics"),
    "scale: metrics that are none": ({"scale": Scale(ONE, {"loss_scale": 2.0})}, "scale", "metrics"),
    "batch: nothing": ({"batch": lambda batch, call: None}, "batch", "batch"),
    "view: nothing": ({"view": lambda x, leaf, call: None}, "view", "tensor"),
    "view: a tree": ({"view": lambda x, leaf, call: {leaf.name: x}}, "view", "tensor"),
    "after: nothing": ({"after": Noted(None), "slots": NOTED}, "after", "(2,)"),
    "after: wider": ({"after": Noted(torch.zeros(2).double()), "slots": NOTED}, "after", "float32"),
    "after: larger": ({"after": Noted(torch.zeros(3)), "slots": NOTED}, "after", "(2,)"),
    "optimizer: nothing": ({"optimizer": fds.Optimizer(empty, lambda *a, **k: None)}, "optimizer", "(params, opt)"),
    "optimizer: fewer": ({"optimizer": fds.Optimizer(empty, lambda *a, **k: ([], {}))}, "optimizer", "2 leaves"),
}


@pytest.mark.parametrize(("stations", "where", "want"), BROKEN.values(), ids=BROKEN)
def test_a_filler_that_returns_something_else_is_named_and_the_state_stays(stations, where, want):
    optimizer = stations.get("optimizer")
    step = filled(optimizer, **{name: x for name, x in stations.items() if name != "optimizer"})
    state = step.init(make_params())
    before = tree.map(torch.clone, state)
    with pytest.raises(ComposeError) as caught:
        step(state, BATCH)
    assert f"'{where}'" in caught.value.where and want in caught.value.want and caught.value.got
    assert_same_bits(state, before)


MAKING = {
    "kernels: nothing": ({"kernels": lambda: None}, "kernels", "context manager"),
    "slots: nothing": ({"slots": {"noted": lambda params, device: None}}, "memory", "tensors"),
    "slots: a number": ({"slots": {"noted": lambda params, device: {"a": [0.5]}}}, "memory", "tensors"),
}


@pytest.mark.parametrize(("stations", "where", "want"), MAKING.values(), ids=MAKING)
def test_what_the_first_state_is_made_with_is_named_too(stations, where, want):
    for make in (filled(**stations).init, filled(**stations).structure):
        with pytest.raises(ComposeError) as caught:
            make(make_params())
        assert f"'{where}'" in caught.value.where and want in caught.value.want and caught.value.got


def test_defaults_behind_the_call_or_of_the_call_are_as_they_are():
    class Scaled:
        def __call__(self, x, leaf, call=None, scale=2.0):
            return x * scale

    for view in (Scaled(), lambda *args: args[0] * 2.0, functools.partial(lambda x, leaf, call, by: x * by, by=2.0)):
        step = filled(view=view)
        assert_same_bits(*(one(one.init(make_params()), BATCH)[0].params for one in (step, filled(view=Scaled()))))


UNFIT = {
    "batch: one argument": ({"batch": lambda batch: batch}, "(batch)", "(batch, call) -> batch"),
    "batch: a default": ({"batch": lambda batch, scale=1.0: batch}, "scale=1.0", "(batch, call) -> batch"),
    "view: a default": ({"view": lambda x, leaf, scale=1.0: x}, "scale=1.0", "(x, leaf, call) -> tensor"),
    "context: a default": ({"context": lambda enabled=True: None}, "enabled=True", "(call) -> context manager"),
    "layer: a default": ({"layer": lambda calls, every=2: calls}, "every=2", "call) -> list of LayerCalls"),
    "condition: a default": ({"condition": lambda grads, by=2.0: grads}, "by=2.0", "(Gradients, call) -> Gradients"),
    "view: one argument": ({"view": lambda params: params}, "(params)", "(x, leaf, call) -> tensor"),
    "context: no argument": ({"context": lambda: None}, "()", "(call) -> context manager"),
    "layer: one argument": ({"layer": lambda calls: calls}, "(calls)", "call) -> list of LayerCalls"),
    "after: three arguments": ({"after": Three()}, "Three", "(slot, params, skip, call) -> slot"),
    "kernels: an argument": ({"kernels": lambda device: None}, "(device)", "() -> context"),
    "condition: one argument": ({"condition": lambda grads: grads}, "(grads)", "(Gradients, call) -> Gradients"),
    "slots: one argument": ({"slots": {"noted": lambda params: params}}, "noted", "device"),
    "a station that is gone: commit": ({"commit": lambda slots, skip: slots}, "commit", "skips=True"),
    "a station that is gone: hold": ({"hold": lambda x, leaf: x}, "hold", "encode"),
    "a station that is gone: draw": ({"draw": lambda layer, given: None}, "draw", "around_layer"),
    "a station that is gone: synchronize": ({"synchronize": lambda: None}, "synchronize", "writes"),
    "context: around one argument": ({"context": SimpleNamespace(around_layer=lambda x: x)}, "around_layer", "context"),
    "a typo": ({"conditon": lambda grads: grads}, "conditon", "condition"),
    "a field of the step": ({"composition": ()}, "composition", "condition"),
    "a field of a station": ({"gather": {"dtyp": torch.bfloat16}}, "dtyp", "dtype"),
    "condition: a number": ({"condition": 3}, "3", "Gradients"),
    "frozen: a list": ({"frozen": ["a"]}, "['a']", "pattern"),
    "measure: a flag": ({"measure": True}, "True", "Measure"),
    "scale: a number": ({"scale": 2.0}, "2.0", "metrics"),
    "optimizer: a factory": ({"optimizer": fds.sgd}, "sgd", "Optimizer"),
    "after: no slot": ({"after": lambda slot, params, skip, call: slot}, "lambda", "slot"),
    "after: a slot that nobody makes": ({"after": Noted(None)}, "noted", "slots"),
    "gather: nothing": ({"gather": None}, "None", "Gather"),
    "sum: a dtype": ({"sum": torch.float64}, "float64", "Sum"),
    "place: a flag": ({"place": True}, "True", "Place"),
    "run: one argument": ({"run": lambda program: program}, "(program)", "program.work"),
    "execute: nothing": ({"execute": None}, "None", "InTurn"),
    "execute: half of one": ({"execute": Half()}, "Half", "InTurn"),
    "topology: an unknown role": ({"topology": fds.step.Dimension(None, "tensors")}, "tensors", "'sequence', 'tensor'"),
    "slots: tensors": ({"slots": {"noted": torch.zeros(2)}}, "noted", "function"),
}


@pytest.mark.parametrize(("stations", "got", "want"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_fill_a_station_is_refused_where_it_is_composed(stations, got, want):
    with pytest.raises(ComposeError) as caught:
        filled(**stations)
    assert got in caught.value.got and want in caught.value.want + caught.value.hint


def test_a_map_may_return_new_leaves_in_any_memory_and_dtype():
    twice = lambda x: (x.t().contiguous().t() * 2).double()
    step = filled(condition=lambda g, call: Gradients([twice(x) for x in g.leaves], g.scale))
    plain = fds.compose(fds.sgd(0.2))(loss_fn)
    state = step.init(make_params())
    assert_same_bits(step(state, BATCH)[0].params, plain(state, BATCH)[0].params)


@transform
def returning(value):
    return lambda step: value


@transform
def misshapen(rewrite):
    return rewrite


@pytest.mark.parametrize(
    "part",
    [returning(None), returning(3), misshapen(None), misshapen(lambda: None), misshapen(lambda step, loss: step)],
    ids=str,
)
def test_a_transform_that_returns_no_step_is_named(part):
    step = fds.compose(fds.sgd(0.1))(loss_fn)
    for use in (lambda: fds.compose(part, fds.sgd(0.1))(loss_fn), lambda: part(step)):
        with pytest.raises(ComposeError) as caught:
            use()
        assert caught.value.where == str(part) and "fill(step" in caught.value.want and caught.value.got


sgd = fds.compose(fds.sgd(0.1))
MISTAKEN = {
    "a loss of one argument": (lambda: sgd(lambda params: 0), "(params, batch)"),
    "an eval_fn of three": (lambda: sgd(loss_fn, lambda p, b, c: 0), "(params, batch)"),
    "a loss without buffers": (
        lambda: sgd(fds.with_buffers(loss_fn, {"n": torch.zeros(1)})),
        "(params, batch, buffers)",
    ),
    "buffers of none": (lambda: fds.with_buffers(loss_fn, None), "name -> tensor"),
    "a class of modules": (lambda: fds.functional(nn.Linear), "an nn.Module"),
    "a recipe of a module": (lambda: fds.recipe(nn.Linear(3, 2)), "fds.recipe(lambda"),
    "a factory without a key": (lambda: sgd(loss_fn).init(lambda: make_params()), "key -> params"),
    "a list of optimizers": (lambda: fds.by_name([fds.sgd(0.1)]), "{pattern: optimizer"),
    "a load without its step": (lambda: fds.load("run", make_params(), make_params()), "a Step"),
    "a save without its step": (lambda: fds.save("run", sgd(loss_fn).init(make_params()), None), "a Step"),
}


@pytest.mark.parametrize(("mistaken", "want"), MISTAKEN.values(), ids=MISTAKEN)
def test_what_cannot_be_called_or_read_is_refused_where_it_is_given(mistaken, want):
    with pytest.raises(FdsError) as caught:
        mistaken()
    assert want in caught.value.want and caught.value.got
