"""What forward leaves in plain attributes: a state is refused, and what nobody would find is warned of."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import LossError, LossWarning

X = torch.arange(12.0).view(4, 3)


class Net(nn.Module):
    """A linear layer that calls `keep(self, its output)`."""

    def __init__(self, keep, **attributes):
        super().__init__()
        self.inner, self.keep = nn.Linear(3, 3), keep
        for name, x in attributes.items():
            setattr(self, name, x)

    def forward(self, x):
        y = self.inner(x)
        kept = self.keep(self, y)
        return y if kept is None else y + kept


def train(module, calls=3, evaluates=False):
    apply, params, _ = fds.functional(module)
    step = fds.compose(fds.sgd(0.1))(lambda p, x: apply(p, x).pow(2).mean())
    state = step.init(params)
    for _ in range(calls):
        if evaluates:
            step.evaluate(state, X)
        else:
            state, _ = step(state, X)


def ema(m, y):
    m.ema = 0.9 * m.ema + 0.1 * y.detach().mean(0)


def ema_in_place(m, y):
    m.ema.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)


def ema_by_data(m, y):
    m.ema = m.ema.data.lerp(y.data.mean(0), 0.1).data


def ema_in_a_dict(m, y):
    m.held["ema"] = m.held["ema"].lerp(y.detach().mean(0), 0.1)


def clock(m, y):
    m.ema = m.ema + 1


def recurrent(m, y):
    m.ema = torch.tanh(y.detach() if m.ema is None else m.inner(m.ema).detach() + y.detach())


STATES = {
    "ema": Net(ema, ema=torch.zeros(3)),
    "in place": Net(ema_in_place, ema=torch.zeros(3)),
    "data": Net(ema_by_data, ema=torch.zeros(3)),
    "dict": Net(ema_in_a_dict, held={"ema": torch.zeros(3)}),
    "clock": Net(clock, ema=torch.zeros(())),
    "from the second call on": Net(recurrent, ema=None),
    "of a part": nn.Sequential(nn.Linear(3, 3), Net(ema, ema=torch.zeros(3))),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a_state_in_a_plain_attribute_is_refused_by_name(name, evaluates):
    with pytest.raises(LossError, match=r"register_buffer\(\"ema\"") as error:
        train(STATES[name], evaluates=evaluates)
    assert error.value.where == {"dict": "held.ema", "of a part": "1.ema"}.get(name, "ema")


def looked_at(m, y):
    m.last = F.softmax(y + m.slopes, 1)
    m.mean = y.detach().mean()


def cached(m, y):
    if m.table is None or len(m.table) < len(y):
        m.table, m.size = torch.arange(len(y)).float(), len(y)
    m.slopes = m.slopes.to(torch.float64)
    m.grown = torch.cat([m.grown, torch.ones(1)]) if len(m.grown) < 3 else m.grown[:3]
    return m.table[:, None] * m.slopes.float() + m.grown.sum()


def used(m, y):
    m.aux = y.pow(2).mean()
    return m.aux


def sizes(m, y):
    m.rows, m.scale = len(y), float(len(y)) ** -0.5


HARMLESS = {
    "what is looked at": Net(looked_at, slopes=torch.ones(3)),
    "caches": Net(cached, table=None, size=0, slopes=torch.ones(1), grown=torch.ones(1)),
    "a part of the output": Net(used),
    "sizes": Net(sizes, rows=0),
    "a buffer": Net(lambda m, y: None, counts=nn.Buffer(torch.zeros(3), persistent=False)),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", HARMLESS)
def test_caches_and_what_is_looked_at_are_as_they_were(name, evaluates):
    train(HARMLESS[name], evaluates=evaluates)  # any warning is an error here


@pytest.mark.parametrize("harmless", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_it_is_the_same_of_parameters_that_are_sharded(stage, harmless):
    def run():
        net = Net(looked_at, slopes=torch.ones(3)) if harmless else Net(ema, ema=torch.zeros(3))
        apply, params, _ = fds.functional(net)
        sharding = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=stage)
        step = fds.compose(sharding, fds.sgd(0.1))(lambda p, x: apply(p, x).pow(2).mean())
        step(step.init(params), X)

    with contextlib.nullcontext() if harmless else pytest.raises(LossError, match="keeps a state"):
        fds.simulate(run, 2)


def auxiliary(m, y):
    m.aux = y.pow(2).mean()


@pytest.mark.parametrize("at", ["", "1."])
def test_an_auxiliary_loss_that_is_only_kept_is_warned_of(at):
    net = Net(auxiliary)
    with pytest.warns(LossWarning, match=rf"keeps a scalar in {at}aux, .* return it"):
        train(nn.Sequential(nn.Linear(3, 3), net) if at else net)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(net, evaluates=True)
    assert not told, "without a graph it is no loss"


def test_a_number_that_every_call_changes_is_warned_of():
    def count(m, y):
        m.calls, m.mean = m.calls + 1, 0.9 * m.mean + 1.0

    with pytest.warns(LossWarning, match="changes numbers in every call: calls, mean"):
        train(Net(count, calls=0, mean=0.0))


def test_sizes_of_inputs_are_no_counts():
    def sizes(m, x):
        m.rows = len(x)

    apply, params, _ = fds.functional(Net(sizes, rows=0))
    for rows in (2, 3, 4):
        apply(params, X[:rows])
