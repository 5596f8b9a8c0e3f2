"""Law 6: orders that agree inside each tuple station are bit-equal; illegal compositions are refused."""

import random

import pytest
from hypothesis import given, strategies as st

import fds
from fds.errors import ComposeError
from fds.transforms.kernels import reference_kernels, triton_kernels
from tests.bits import assert_same_bits
from tests.laws.problems import TRANSFORMS, compositions, optimizers, problems


def _shuffled(names: list[str], seed: int) -> list[str]:
    """Return another order of the names that keeps the order inside each tuple station."""
    order = names[:]
    random.Random(seed).shuffle(order)
    for station in {TRANSFORMS[n].station for n in names} - {""}:
        places = [i for i, n in enumerate(order) if TRANSFORMS[n].station == station]
        for place, name in zip(places, [n for n in names if TRANSFORMS[n].station == station], strict=True):
            order[place] = name
    return order


@given(problems(), optimizers(), compositions(), st.integers(0, 2**16), st.booleans())
def test_order_between_stations_is_invisible(problem, optimizer, names, seed, nested):
    parts = {n: TRANSFORMS[n].make() for n in names}
    one = fds.compose(*(parts[n] for n in names), optimizer)(problem.loss)
    other = [parts[n] for n in _shuffled(names, seed)]
    where = seed % (len(other) + 1)
    other.insert(where, optimizer)
    two = fds.compose(fds.compose(*other[:where]), *other[where:]) if nested else fds.compose(*other)
    a = b = one.init(problem.params)
    for _ in range(2):
        (a, metrics_a), (b, metrics_b) = one(a, problem.batch), two(problem.loss)(b, problem.batch)
    assert_same_bits((b, metrics_b), (a, metrics_a))


ONCE = (
    fds.accumulate(2),
    fds.loss_scale(),
    fds.static_loss_scale(),
    fds.skip_nonfinite(),
    fds.precision(),
    fds.sgd(0.1),
    fds.adamw(0.1),
    fds.ema(0.9),
    fds.donate(),
    reference_kernels(),
    triton_kernels(),
)
CLASHES = [
    (a, b)
    for i, a in enumerate(ONCE)
    for j, b in enumerate(ONCE)
    if i == j or {i, j} in ({1, 2}, {1, 3}, {2, 3}, {5, 6}, {9, 10})
]


@pytest.mark.parametrize("pair", CLASHES, ids=str)
def test_a_station_filled_twice_is_refused(pair):
    first, second = pair
    rest = [] if isinstance(first, fds.Optimizer) else [fds.adam(0.3)]
    with pytest.raises(ComposeError) as caught:
        fds.compose(first, fds.clip_by_value(1.0), second, *rest)(lambda params, batch: params.sum())
    error = caught.value
    assert repr(first) in error.what and error.where == "position 2"
    assert error.got.startswith("compose(") and error.want.startswith("compose(") and error.want != error.got
