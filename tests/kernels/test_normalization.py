"""layer_norm and rms_norm are near float64: for any shape, with and without each argument, for numbers that hurt."""

import pytest
import torch
from hypothesis import given, strategies as st

from fds.kernels import normalization_backward, only
from tests.kernels.accuracy import DTYPES, NAMES, TOLERANCE, distance, random, strided
from tests.kernels.normalized import KINDS, NORMS, check, example, normalized
from tests.kernels.ways import poisoned


@pytest.mark.sweep(2)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("shape", "returns_sum"), [((6, 42), True), ((123, 6), False), ((2, 3, 431), True)])
def test_outputs_and_gradients_are_those_of_float64(norm, dtype, shape, returns_sum):
    among = "x residual weight bias" if returns_sum else "x weight bias"
    with only("triton"):
        check(norm, example(norm, *shape, dtype=dtype, among=among), returns_sum=returns_sum)
        check(norm, example(norm, *shape, dtype=dtype, among=among), returns_sum=returns_sum, invertible=True)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=NAMES.get)
@pytest.mark.parametrize("invertible", [False, True])
def test_the_reference_is_that_of_float64(norm, dtype, invertible):
    of = example(norm, 6, 431, dtype=dtype, among="x residual weight bias")
    check(norm, of, returns_sum=True, invertible=invertible)
    check(norm, example(norm, 6, 431, dtype=dtype, params=dtype), invertible=invertible)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize("among", ["x", "x weight", "x bias", "x residual", "x residual weight", "x residual bias"])
def test_each_argument_may_be_left_out(norm, invertible, among):
    for kind in KINDS:
        with only(kind):
            of = example(norm, 5, 42, among=among)
            check(norm, of, invertible=invertible, factor=2)
            if "residual" in of:
                check(norm, of, returns_sum=True, invertible=invertible, factor=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("columns", [8191, 8208])  # in registers, backward in tiles; in chunks, the last one short
@pytest.mark.parametrize("invertible", [False, True])
def test_long_rows_are_walked_in_chunks(norm, columns, invertible):
    of = example(norm, 2, columns, dtype=[torch.float32, torch.bfloat16][invertible], among="x residual weight bias")
    with only("triton"):
        check(norm, of, returns_sum=columns == 8191 or not invertible, invertible=invertible)


def test_rows_beyond_the_widest_tables_are_right_too():
    with only("triton"):
        check("layer_norm", example("layer_norm", 1, 33_001))


@pytest.mark.parametrize("norm", NORMS)
def test_weights_of_float64_keep_their_dtype(norm):
    of = example(norm, 2, 42, params=torch.float64)
    with only("triton"):
        y = normalized(norm, of)[0]
        dweight = torch.autograd.grad(y.square().sum(), of["weight"])[0]
    single = {name: t.detach().float().requires_grad_() for name, t in of.items()}
    with only("triton"):
        want = torch.autograd.grad(normalized(norm, single)[0].square().sum(), single["weight"])[0]
    assert torch.equal(dweight, want.double())


def test_programs_walk_over_more_rows_than_they_are():
    with only("triton"):
        check("layer_norm", example("layer_norm", 300, 63))
        check("rms_norm", example("rms_norm", 33, 8208, dtype=torch.bfloat16))


@pytest.mark.sweep
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("columns", "invertible"), [(8200, True), (12288, False), (4099, False)])
def test_slabs_of_long_rows_are_summed_apart(norm, columns, invertible, monkeypatch):
    # a slab of four rows and one of a single row; chunks that end within a row, that end with it, unaligned ones
    monkeypatch.setattr(normalization_backward, "SLAB", 4)
    among = "x residual weight bias" if invertible else "x weight bias"
    with only("triton"):
        check(norm, example(norm, 5, columns, among=among), returns_sum=invertible, invertible=invertible)


def test_the_sums_of_more_programs_than_one_walks_over_are_all_added(monkeypatch):
    # a GPU runs so many; the interpreter five, here
    monkeypatch.setitem(normalization_backward.SUM, 4096, {"PROGRAMS": 2, "COLUMNS": 16, "num_warps": 8})
    with only("triton"):
        check("layer_norm", example("layer_norm", 150, 63))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_with_gaps_and_transposed_ones_are_read_as_they_are(norm, kind):
    whole = example(norm, 6, 42, among="x residual weight bias")
    of = {name: strided(t.detach()).requires_grad_() for name, t in whole.items()}
    assert not any(t.is_contiguous() for t in of.values())
    with only(kind):
        check(norm, of, returns_sum=True)
        check(norm, of, invertible=True)
        out = normalized(norm, of)[0]
        dy = strided(random(6, 42))
        there, here = (torch.autograd.grad(out, of["x"], d, retain_graph=True)[0] for d in (dy, dy.contiguous()))
        assert distance(there, here) <= TOLERANCE[torch.float32]  # torch may add what has gaps in another order
        assert torch.equal(there, here) or kind == "reference"


@given(rows=st.integers(1, 70), columns=st.integers(2, 300), dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_shape_is_near_float64(rows, columns, dtype, data):
    norm, params = data.draw(st.sampled_from(NORMS)), data.draw(st.sampled_from([dtype, torch.float32]))
    among = data.draw(st.sampled_from(["x", "x weight", "x residual weight bias", "x weight bias"]))
    of = example(norm, rows, columns, dtype=dtype, among=among, params=params)
    returns_sum = "residual" in of and data.draw(st.booleans())
    with only("triton"):
        # weights from 1/2 on: what comes back from an output is magnified by |y / weight|, some 4
        check(norm, of, returns_sum=returns_sum, invertible=data.draw(st.booleans()), factor=4)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_dimension_no_rows_and_no_columns_are_shapes_too(norm, kind):
    with only(kind):
        check(norm, example(norm, 42))
        for shape in [(0, 5), (3, 0), (2, 0, 7)]:
            of = example(norm, *shape)
            out = normalized(norm, of)[0]
            grads = torch.autograd.grad(out, list(of.values()), torch.zeros_like(out))
            assert out.shape == shape
            assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(grads, of.values(), strict=True))


@pytest.mark.parametrize(
    ("norm", "kind", "columns"),
    [*((norm, kind, 64) for norm in NORMS for kind in KINDS), ("layer_norm", "triton", 8200)],
)
def test_a_weight_of_zero_costs_its_own_column_alone(norm, kind, columns):
    of = example(norm, 4, columns)
    with torch.no_grad():
        of["weight"][3], of["weight"][5] = 0, 1e-38
    dy = random(4, columns, seed=9)
    grads = []
    for invertible in (False, True):
        with only(kind):
            out = normalized(norm, of, invertible=invertible)[0]
            grads.append(dict(zip(of, torch.autograd.grad(out, list(of.values()), dy), strict=True)))
    plain, recovered = grads
    others = torch.ones(columns, dtype=torch.bool).index_fill(0, torch.tensor([3, 5]), False)
    assert all(g.isfinite().all() for g in recovered.values())
    assert recovered["weight"][3] == 0
    # float32: x_hat comes back with the rounding of y, magnified by |y / weight|, here at most some 10
    assert distance(recovered["x"][:, others], plain["x"][:, others]) < 10 * TOLERANCE[torch.float32]
    assert distance(recovered["weight"][others], plain["weight"][others]) < 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rounding_of_a_bias_is_not_taken_for_an_input(kind):
    of = example("layer_norm", 4, 64, dtype=torch.float16)
    with torch.no_grad():
        of["weight"][3], of["weight"][5] = 0, 1e-30
        of["bias"][3], of["bias"][5] = 0.1, 0.1  # which float16 does not hold: y - bias is not 0
    with only(kind):
        out = normalized("layer_norm", of, invertible=True)[0]
    dy = random(4, 64, seed=9).half()
    dx, dweight = torch.autograd.grad(out, [of["x"], of["weight"]], dy)
    assert dx.isfinite().all() and dweight[3] == 0
    assert dweight[5].abs() <= 1.01 * 64**0.5 * dy[:, 5].abs().sum()  # no x_hat exceeds the root of the columns


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("invertible", [False, True])
def test_a_row_that_is_not_finite_leaves_the_others_alone(norm, invertible):
    of = example(norm, 6, 42)
    dirty = of | {"x": of["x"].detach().index_fill(0, torch.tensor(2), float("nan")).requires_grad_()}
    with only("triton"):
        pairs = []
        for given in (of, dirty):
            y = normalized(norm, given, invertible=invertible)[0]
            pairs.append((y, torch.autograd.grad(y.sum(), given["x"])[0]))
    others = [0, 1, 3, 4, 5]
    for clean, soiled in zip(*pairs, strict=True):
        assert soiled[2].isnan().all()
        assert torch.equal(clean[others], soiled[others])


@pytest.mark.parametrize(("norm", "columns"), [*((norm, n) for norm in NORMS for n in (42, 64)), ("rms_norm", 8208)])
def test_nothing_is_written_or_read_outside(norm, columns):
    of = {}
    for name, t in example(norm, 3, columns, among="x residual weight bias").items():
        wide = torch.full((t.numel() + 64,), float("nan"))
        of[name] = wide[32:-32].view(t.shape).copy_(t.detach()).requires_grad_()
    for modes in [{"returns_sum": True}, {"invertible": True}]:
        with only("triton"), poisoned():
            out = normalized(norm, of, **modes)[0]
            grads = torch.autograd.grad(out.square().sum(), list(of.values()))
        assert all(t.isfinite().all() for t in (out, *grads))
