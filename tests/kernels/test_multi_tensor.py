"""Updates of lists of slices: one launch, and the bits of each slice by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import only, slices
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES
from tests.kernels.test_flat import UPDATES

LENGTHS = [1, 1024, 0, 6, 2500, 42, 123, 0, 431]
LISTS = {name: update for name, update in UPDATES.items() if update.segments is None}
every = pytest.mark.parametrize("name", LISTS)
main = pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "sgd_nesterov"])
Columns = list[list[Any]]


@pytest.fixture
def launched(monkeypatch):
    """What was launched, one after another."""
    found, launches = [], slices.launches
    monkeypatch.setattr(slices, "launches", lambda rows: (found.append(at) or at for at in launches(rows)))
    return found


def draw(name: str, lengths: list[int], dtype: torch.dtype = torch.float32) -> Columns:
    """Return params, gradients and slots, each a list."""
    drawn = [LISTS[name].draw(n, dtype, seed=7 * i) for i, n in enumerate(lengths)]
    return [list(column) for column in zip(*drawn, strict=True)]


def copies(columns: Columns) -> Columns:
    return [[x.clone() for x in column] for column in columns]


def one_by_one(name: str, columns: Columns, out: list[Tensor] | None = None, **keywords) -> None:
    for i, row in enumerate(zip(*columns, strict=True)):
        LISTS[name].run(*row, **keywords, out=None if out is None else out[i])


def assert_equal(a: Columns, b: Columns) -> None:
    for column, other in zip(a, b, strict=True):
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(column, other, strict=True))


@every
def test_many_slices_take_one_launch_and_get_the_bits_of_each_by_itself(name, launched):
    mine, out = draw(name, LENGTHS), [torch.full((n,), 7.0, dtype=torch.bfloat16) for n in LENGTHS]
    theirs, want = copies(mine), [x.clone() for x in out]
    keywords = LISTS[name].keywords(0, 3, grad_scale=torch.tensor(8.0), skip=torch.tensor(False))
    with only("triton"):
        LISTS[name].run(*mine, out=out, **keywords)
        assert len(launched) == 1 and launched[0].aligned
        one_by_one(name, theirs, want, **keywords)
    assert_equal([*mine, out], [*theirs, want])


@main
@given(st.data())
def test_any_lengths_at_any_addresses_in_any_dtypes(name, data):
    lengths = data.draw(st.lists(st.integers(0, 1100), max_size=5))
    dtype, low = (data.draw(st.sampled_from(DTYPES)) for _ in range(2))
    mine = draw(name, lengths, dtype)
    mine = mine or [[] for _ in range(2 + len(LISTS[name].slots))]
    mine[1] = [x.to(low) for x in mine[1]]
    edges = [data.draw(st.sampled_from([0, 1, 2, 4, 8])) for _ in lengths]
    mine = [[torch.cat([x.new_zeros(e), x])[e:] for e, x in zip(edges, column, strict=True)] for column in mine]
    theirs, keywords = copies(mine), LISTS[name].keywords(0, 3)
    with only("triton"):
        LISTS[name].run(*mine, **keywords)
        one_by_one(name, theirs, **keywords)
    assert_equal(mine, theirs)


@main
def test_slices_at_odd_addresses_have_their_own_launch_and_nothing_beside_them_is_touched(name, launched):
    lengths, edge = [1100, 42, 1100, 42], [64, 64, 1, 1]
    mine = draw(name, lengths)
    mine.append([x.clone() for x in mine[0]])  # out
    nan = lambda x, n: x.new_full((n,), torch.nan)
    around = [[torch.cat([nan(x, e), x, nan(x, 64)]) for e, x in zip(edge, xs, strict=True)] for xs in mine]
    held = [[x[e : e + n] for e, n, x in zip(edge, lengths, xs, strict=True)] for xs in around]
    with only("triton"):
        LISTS[name].run(*held[:-1], out=held[-1], **LISTS[name].keywords(0, 3))
        assert [at.aligned for at in launched] == [True, False]
        one_by_one(name, mine[:-1], mine[-1], **LISTS[name].keywords(0, 3))
    assert_equal(held, mine)
    assert all(x[:e].isnan().all() and x[-64:].isnan().all() for xs in around for e, x in zip(edge, xs, strict=True))


@main
def test_slices_of_the_same_dtypes_share_a_launch(name, launched):
    mine = draw(name, [42, 123, 6, 431, 1100])
    for column in mine:
        column[1], column[3] = column[1].bfloat16(), column[3].bfloat16()
    mine[1][4] = mine[1][4].half()
    theirs, keywords = copies(mine), LISTS[name].keywords(0, 3)
    with only("triton"):
        LISTS[name].run(*mine, **keywords)
        sizes = [[at.size] if at.table is None else at.table[:, 0].tolist() for at in launched]
        assert sizes == [[42, 6], [123, 431], [1100]]
        one_by_one(name, theirs, **keywords)
    assert_equal(mine, theirs)


@main
def test_a_skipped_update_of_many_keeps_every_bit(name):
    mine, out = draw(name, LENGTHS), [torch.full((n,), 7.0) for n in LENGTHS]
    for grad in mine[1]:
        grad.fill_(torch.nan)
    before = copies([mine[0], *mine[2:], out])
    with only("triton"):
        LISTS[name].run(*mine, out=out, **LISTS[name].keywords(0, 3, skip=torch.tensor(True)))
    assert_equal([mine[0], *mine[2:], out], before)


@main
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_update_is_nothing_to_launch(name, kind, lengths, launched):
    mine = draw(name, lengths) or [[] for _ in range(2 + len(LISTS[name].slots))]
    with only(kind):
        LISTS[name].run(*mine, **LISTS[name].keywords(0, 3))
    assert not launched


@main
def test_large_slices_and_those_of_a_captured_graph_are_launched_one_by_one(name, launched, monkeypatch):
    mine, keywords = draw(name, [300, 0, 100]), LISTS[name].keywords(0, 3)
    theirs = copies(mine)
    with only("triton"):
        LISTS[name].run(*mine, **keywords)
        monkeypatch.setattr(slices, "LARGE", 201)
        LISTS[name].run(*mine, **keywords)
        assert [at.table is None for at in launched] == [False, False]
        monkeypatch.setattr(slices, "LARGE", 200)
        LISTS[name].run(*mine, **keywords)
        monkeypatch.undo()
        monkeypatch.setattr(slices, "is_capturing", lambda device: True)
        LISTS[name].run(*mine, **keywords)
        for _ in range(4):
            one_by_one(name, theirs, **keywords)
    assert [(at.size, at.table, at.tiles) for at in launched[2:4]] == [(300, None, None), (100, None, None)]
    assert_equal(mine, theirs)


@main
def test_references_take_lists_too(name):
    mine, theirs, keywords = draw(name, [42, 0, 6]), draw(name, [42, 0, 6]), LISTS[name].keywords(0, 3)
    LISTS[name].run(*mine, **keywords)
    one_by_one(name, theirs, **keywords)
    assert_equal(mine, theirs)


@main
def test_gradients_with_gaps_in_memory_are_read_as_they_are(name):
    mine, theirs, keywords = draw(name, [42, 6]), draw(name, [42, 6]), LISTS[name].keywords(0, 3)
    mine[1][1] = torch.stack([mine[1][1], mine[1][1] * torch.nan], dim=1)[:, 0]
    with only("triton"):
        LISTS[name].run(*mine, **keywords)
        LISTS[name].run(*theirs, **keywords)
    assert_equal([mine[0], *mine[2:]], [theirs[0], *theirs[2:]])


@main
def test_tensors_but_param_may_have_any_shape_of_as_many_elements(name):
    mine, theirs, keywords = draw(name, [42, 6]), draw(name, [42, 6]), LISTS[name].keywords(0, 3)
    for column in mine[1:]:
        column[0] = column[0].view(6, 7)
    for kind in ("triton", "reference"):
        with only(kind):
            LISTS[name].run(*mine, **keywords)
            LISTS[name].run(*theirs, **keywords)
    assert_equal([[x.view(-1) for x in column] for column in (mine[0], *mine[2:])], [theirs[0], *theirs[2:]])


def test_tables_are_made_once_for_the_same_memory_and_tiles_once_for_the_same_lengths():
    ones, others = ([[torch.ones(n) for n in (5, 2000, 3)] for _ in range(2)] for _ in range(2))
    made = [slices.columns({"out": None}, param=xs[0], grad=xs[1]) for xs in (ones, ones, others)]
    (first,), (again,), (other,) = (list(slices.launches(x)) for x in made)
    assert again.table is first.table and again.tiles is first.tiles
    assert first.table is not None and first.tiles is not None
    assert other.table is not first.table and other.tiles is first.tiles
    assert first.tiles.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0]] and first.grid == (4,)
    assert first.table.tolist() == [[p.numel(), p.data_ptr(), g.data_ptr(), 0] for p, g in zip(*ones, strict=True)]


BAD = [
    ("grad[1]", 1, lambda xs: [xs[0], xs[1][:-1]]),
    ("grad[1]", 1, lambda xs: [xs[0], xs[1].to("meta")]),
    ("grad[0]", 1, lambda xs: [xs[0].int(), xs[1]]),
    ("grad", 1, lambda xs: xs[:1]),
    ("grad", 1, lambda xs: xs[0]),
    ("grad[1]", 1, lambda xs: [xs[0], None]),
    ("grad", 1, lambda xs: None),
    ("param", 0, lambda xs: None),
    ("param[0]", 0, lambda xs: [xs[0].view(6, 7), xs[1]]),
    ("param[1]", 0, lambda xs: [xs[0], xs[1].repeat(2)[::2]]),
    ("param[1]", 0, lambda xs: [xs[0], 3.0]),
    ("slot[1]", 2, lambda xs: [xs[0], xs[1].repeat(2)[::2]]),
    ("slot[0]", 2, lambda xs: [xs[0].long(), xs[1]]),
]


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd_momentum"])
@pytest.mark.parametrize(("where", "index", "spoil"), BAD)
def test_a_bad_tensor_in_a_list_is_refused_by_name_and_place(name, where, index, spoil):
    mine = draw(name, [42, 6])
    before = copies(mine)
    given = list(mine)
    given[index] = spoil(mine[index])
    with pytest.raises(KernelError) as error, only("triton"):
        LISTS[name].run(*given, **LISTS[name].keywords(0, 3))
    assert error.value.where == where.replace("slot", LISTS[name].slots[0]) and error.value.got and error.value.want
    assert_equal(mine, before)


@pytest.mark.parametrize(
    ("name", "index", "where"), [("adamw", 2, "exp_avg[1]"), ("adam", 3, "exp_avg_sq[1]"), ("lion", 2, "exp_avg[1]")]
)
def test_a_moment_that_is_missing_is_refused(name, index, where):
    mine = draw(name, [42, 6])
    mine[index][1] = None
    with pytest.raises(KernelError, match="missing") as error:
        LISTS[name].run(*mine, **LISTS[name].keywords(0, 3))
    assert error.value.where == where


def test_a_gradient_that_is_missing_is_refused():
    p, _, m, v = LISTS["adamw"].draw(42)
    with pytest.raises(KernelError, match="missing") as error:
        LISTS["adamw"].run(p, None, m, v, **LISTS["adamw"].keywords(42, 3))
    assert error.value.where == "grad"


def test_momentum_and_copies_may_be_there_for_some_slices_only(launched):
    mine, keywords = draw("sgd_momentum", [42, 6, 431, 123]), LISTS["sgd_momentum"].keywords(0, 3)
    theirs = copies(mine)
    mine[2][1] = theirs[2][1] = mine[2][2] = theirs[2][2] = None
    out, want = ([torch.zeros(42), torch.zeros(6), torch.zeros(431), None] for _ in range(2))
    with only("triton"):
        LISTS["sgd_momentum"].run(*mine, out=out, **keywords)
        assert [at.grid for at in launched] == [(1,), (2,), (1,)]
        one_by_one("sgd_momentum", theirs, want, **keywords)
    assert_equal([*mine[:2], [mine[2][0], mine[2][3]], out[:3]], [*theirs[:2], [theirs[2][0], theirs[2][3]], want[:3]])


def test_slices_on_several_devices_are_refused():
    mine = draw("adamw", [42, 6])
    with pytest.raises(KernelError, match="another device") as error:
        LISTS["adamw"].run(*[[x, y.to("meta")] for x, y in mine], **LISTS["adamw"].keywords(0, 3))
    assert error.value.where == "param[1]" and error.value.got == "meta" and error.value.want == str(DEVICE)
