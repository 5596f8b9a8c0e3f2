"""LAMB's kernels where they differ from other updates: norms of parameters that share a slice, or are cut."""

import pytest
import torch
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels import only, slices
from fds.kernels._lamb import _moments_kernel, _params_kernel, _sum_kernel, lamb, reference, tiles_of
from tests.kernels.accuracy import assert_near, random

BETAS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
BOUNDS = {"min_coeff": 0.01, "max_coeff": 10.0}


def now():
    return {"step": torch.tensor(3), "lr": torch.tensor(0.1, dtype=torch.float64)}


def draw(n):
    p, g, m, v = (random(n, seed=i) for i in range(4))
    return [p, g, m, v.square()]


def squares_of(mine, segments, **more):
    """Return the squared norms that an update hands on between its passes, and leave everything as it was."""
    handed_on = []
    mine = [x.clone() for x in mine] if isinstance(mine[0], torch.Tensor) else [[x.clone() for x in xs] for xs in mine]
    lamb(*mine, segments=segments, **BETAS | BOUNDS | now() | more, reduce=lambda x: (handed_on.append(x), x)[1])
    return handed_on[0].clone()


def lay(gaps_and_lengths):
    """Return the segments that lie in a slice after these gaps, and its length."""
    segments, end = [], 0
    for gap, length in gaps_and_lengths:
        segments.append((end + gap, length))
        end += gap + length
    return segments, end + 3


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 6, 42, 431, 1024, 1500])), min_size=1, max_size=4))
def test_every_parameter_has_its_own_norms_and_gaps_are_left_alone(gaps_and_lengths):
    segments, n = lay(gaps_and_lengths)
    mine = draw(n)
    theirs = [x.double() for x in mine]
    inside = torch.zeros(n, dtype=torch.bool)
    for offset, length in segments:
        mine[0][offset : offset + length] *= 1 + offset  # norms that differ
        theirs[0][offset : offset + length] *= 1 + offset
        inside[offset : offset + length] = True
    mine = [torch.where(inside, x, torch.nan) for x in mine]
    with only("triton"):
        lamb(*mine, segments=segments, **BETAS, **BOUNDS, **now())
    reference(*theirs, segments=segments, **BETAS, **BOUNDS, **now())
    for got, want in zip(mine, theirs, strict=True):
        assert_near(got[inside], want[inside], torch.float32)
        assert got[~inside].isnan().all()


@pytest.mark.parametrize("coefficients", [(0.0, 1e9), (0.5, 0.5), (3.0, 4.0), (0.0, float("1e38"))])
def test_the_trust_ratio_is_clamped_and_is_one_where_a_norm_is_zero(coefficients):
    low, high = coefficients
    segments = [(0, 10), (10, 10), (20, 10)]
    p, g, m, v = (torch.ones(30) for _ in range(4))
    p[:10], m[10:20], g[10:20] = 0.0, 0.0, 0.0  # of p no norm, then of u none
    theirs = [x.double() for x in (p, g, m, v)]
    more = {**BETAS, "weight_decay": 0.0, "min_coeff": low, "max_coeff": high}
    with only("triton"):
        lamb(p, g, m, v, segments=segments, **more, **now())
    reference(*theirs, segments=segments, **more, **now())
    assert_near(p, theirs[0])
    assert torch.equal(p[10:20], torch.ones(10))


def test_slices_of_two_ranks_add_their_squares_to_the_norms_of_whole_parameters():
    n, cut = 2600, 1300
    whole, parts = draw(n), [draw(n), draw(n)]
    segments = [(0, 1200), (1200, 1400)]
    mine = [[(0, 1200), (1200, 100)], [(0, 0), (0, 1300)]]
    parts = [[x[:cut].clone() for x in parts[0]], [x[cut:].clone() for x in parts[1]]]
    with only("triton"):
        lamb(*whole, segments=segments, **BETAS, **BOUNDS, **now())
        squares = sum(squares_of(part, s) for part, s in zip(parts, mine, strict=True))
        for part, s in zip(parts, mine, strict=True):
            lamb(*part, segments=s, **BETAS, **BOUNDS, **now(), reduce=lambda own: squares)
    for x, *xs in zip(whole, *parts, strict=True):
        assert torch.equal(x, torch.cat(xs))  # float64 sums: where a parameter is cut is not seen


def test_squares_are_the_same_bits_every_time_and_exact_to_float64():
    mine = draw(8191)
    with only("triton"):
        squares = [squares_of(mine, [(0, 8191)]) for _ in range(2)]
    assert torch.equal(*squares)
    want = mine[0].double().square().sum()
    assert (squares[0][0, 0] - want).abs() <= 1e-14 * want


def test_the_squares_of_more_tiles_than_a_chunk_are_all_added():
    sums = random(2, 2600).double()  # of a parameter of 2.5 million elements, and one of a hundred thousand
    squares = torch.full((2, 2), torch.nan, dtype=torch.float64)
    _sum_kernel[(2, 2)](sums, torch.tensor([[0, 2500], [2500, 2600]], dtype=torch.int32), squares, 2600, CHUNK=1024)
    want = torch.stack([sums[:, :2500].sum(1), sums[:, 2500:].sum(1)], dim=1)
    assert torch.allclose(squares, want, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_lanes_beyond_a_parameter_add_nothing_to_its_norms():
    """The interpreter reads zeros there, of which 0 / 0 would be NaN; a GPU reads anything."""
    p, g, m, v = draw(42)
    with only("triton"):
        squares = squares_of([p, g, m, v], [(1, 30), (31, 11)], eps=0.0)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    u = m / v.sqrt() + BETAS["weight_decay"] * p
    for row, x in zip(squares, (p, u), strict=True):
        assert_near(row, torch.stack([x[1:31].square().sum(), x[31:].square().sum()]), torch.float32)


def test_what_is_handed_on_between_the_passes_may_be_changed():
    p, g, m, v = draw(42)
    q = p.clone()
    with only("triton"):
        lamb(p, g, m.clone(), v.clone(), segments=[(0, 42)], **BETAS, **BOUNDS, **now())
        lamb(q, g, m, v, segments=[(0, 42)], **BETAS, **BOUNDS, **now(), reduce=lambda squares: 4 * squares)
    assert torch.equal(p, q)


def test_a_default_device_has_no_part_in_it():
    mine, theirs, segments = draw(431), draw(431), [(3, 100), (123, 0), (125, 300)]  # a layout of this test alone
    given = {"segments": segments, **BETAS, **BOUNDS, **now()}
    reference(*theirs, **given)
    with only("triton"), torch.device("meta"):
        lamb(*mine, **given)
    for got, want in zip(mine, theirs, strict=True):
        assert_near(got, want)


def test_a_captured_graph_copies_no_tables(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="CUDA graph") as error:
        tiles_of((((0, 7),),), (((0,), 1024),), torch.device("cuda", 0))
    assert error.value.where == "segments" and error.value.want == "a step before the capture"


LENGTHS = [1200, 7, 0, 2600, 1024]
SEGMENTS = [[(0, 1100), (1100, 100)], [(3, 4)], [(0, 0)], [(0, 2600)], [(24, 1000)]]


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched, one after another."""
    names = []
    for kernel in (_moments_kernel, _sum_kernel, _params_kernel):
        run = kernel.run
        noted = lambda *args, kernel=kernel, run=run, **kw: (names.append(kernel.fn.__name__), run(*args, **kw))[1]
        monkeypatch.setattr(kernel, "run", noted)
    return names


def several():
    """Return the tensors of several slices, a list of each."""
    columns = [list(column) for column in zip(*map(draw, LENGTHS), strict=True)]
    return [[x * (1 + i) for i, x in enumerate(column)] for column in columns]


def one_by_one(columns, out):
    for *row, segments, low in zip(*columns, SEGMENTS, out, strict=True):
        lamb(*row, segments=segments, **BETAS, **BOUNDS, **now(), out=low)


def test_slices_together_take_three_launches_and_get_the_bits_of_each_by_itself(launched):
    mine, theirs = several(), several()
    out, want = ([torch.full((n,), 7.0, dtype=torch.bfloat16) for n in LENGTHS] for _ in range(2))
    with only("triton"):
        lamb(*mine, segments=SEGMENTS, **BETAS, **BOUNDS, **now(), out=out)
        assert launched == ["_moments_kernel", "_sum_kernel", "_params_kernel"]
        one_by_one(theirs, want)
    for got, column in zip([*mine, out], [*theirs, want], strict=True):
        assert all(map(torch.equal, got, column))


def test_squares_are_in_the_order_of_the_segments_whatever_is_launched_together():
    mine = several()
    other = [list(column) for column in mine]
    for column in other:
        column[0] = torch.cat([column[0].new_zeros(1), column[0]])[1:]  # at an odd address: a group of its own
    other[1][3] = other[1][3].double()  # and another
    with only("triton"):
        assert torch.equal(squares_of(mine, SEGMENTS), squares_of(other, SEGMENTS))
        want = torch.cat([squares_of(row, s) for *row, s in zip(*mine, SEGMENTS, strict=True)], dim=1)
        assert torch.equal(squares_of(mine, SEGMENTS), want) and want.shape == (2, 6)


@pytest.mark.parametrize("way", ["captured", "large"])
def test_large_slices_and_those_of_a_captured_graph_are_launched_one_by_one(way, launched, monkeypatch):
    mine, theirs, none = several(), several(), [None] * len(LENGTHS)
    with only("triton"):
        lamb(*several(), segments=SEGMENTS, **BETAS, **BOUNDS, **now())  # makes the tables
        launched.clear()
        if way == "captured":
            monkeypatch.setattr(slices, "is_capturing", lambda device: True)
        else:
            monkeypatch.setattr(slices, "LARGE", 1)
        lamb(*mine, segments=SEGMENTS, **BETAS, **BOUNDS, **now())
        assert launched == ["_moments_kernel"] * 4 + ["_sum_kernel"] + ["_params_kernel"] * 4
        one_by_one(theirs, none)
    for got, column in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, got, column))


def test_references_take_lists_too():
    mine, theirs = several(), several()
    lamb(*mine, segments=SEGMENTS, **BETAS, **BOUNDS, **now())
    one_by_one(theirs, [None] * len(LENGTHS))
    for got, column in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, got, column))


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_no_segments_are_nothing_to_do(kind):
    mine, before = draw(6), draw(6)
    with only(kind):
        lamb(*mine, segments=[], **BETAS, **BOUNDS, **now())
        lamb(*mine, segments=[(0, 0), (6, 0)], **BETAS, **BOUNDS, **now())
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_segments_that_overlap_are_refused_by_name(kind):
    for segments in ([(0, 4), (3, 3)], [(3, 3), (0, 6)], [(2, 1), (2, 1)]):
        with only(kind), pytest.raises(KernelError, match="overlaps") as error:
            lamb(*draw(6), segments=segments, **BETAS, **BOUNDS, **now())
        assert error.value.where in ("segments[0]", "segments[1]")
    with only(kind):
        lamb(*draw(6), segments=[(3, 3), (3, 0), (4, 0), (0, 3)], **BETAS, **BOUNDS, **now())


def test_lists_of_segments_are_refused_by_name_and_place():
    for segments, where in ((SEGMENTS[:4], "segments"), ([*SEGMENTS[:4], [(24, 1001)]], "segments[4][0]")):
        with pytest.raises(KernelError) as error:
            lamb(*several(), segments=segments, **BETAS, **BOUNDS, **now())
        assert error.value.where == where and error.value.got and error.value.want
