"""The laws of all updates of flat slices: one table, one battery."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import only, slices
from fds.kernels._lamb import lamb, reference as lamb_reference
from fds.kernels.elementwise import adam_reference, adamw, lion, lion_reference, sgd, sgd_reference
from fds.kernels.language import jit, tl
from tests.kernels.accuracy import AWKWARD, DTYPES, assert_near, random


def thirds(n: int) -> list[tuple[int, int]]:
    """Cut (0, n) into segments, the second one empty."""
    return [(0, n // 3), (n // 3, 0), (n // 3, n - n // 3)]


@attrs.frozen
class Update:
    """A row of the table: its functions, the names of its slots, and what it takes beside them."""

    run: Callable
    reference: Callable
    slots: tuple[str, ...]
    hyper: dict[str, Any]
    reads_step: bool = True
    segments: Callable | None = None

    def keywords(self, n: int, t: int, **more: Any) -> dict:
        told = dict(self.hyper, lr=torch.tensor(0.1, dtype=torch.float64))
        told |= {"step": torch.tensor(t)} if self.reads_step else {}
        told |= {"segments": self.segments(n)} if self.segments else {}
        return told | more

    def draw(self, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """Return param, gradient and slots; a second moment is positive."""
        tensors = [random(n, dtype=dtype, seed=seed + i) for i in range(2 + len(self.slots))]
        names = ("param", "grad", *self.slots)
        return [x.square() if name == "exp_avg_sq" else x for x, name in zip(tensors, names, strict=True)]


MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
TRUST = {**BETAS, "eps": 1e-6, "min_coeff": 0.01, "max_coeff": 10.0}
UPDATES = {
    "adamw": Update(adamw, adam_reference, MOMENTS, {**BETAS, "eps": 1e-8}),
    "adam": Update(adamw, adam_reference, MOMENTS, {**BETAS, "eps": 1e-8, "decoupled": False}),
    "adamw_uncorrected": Update(adamw, adam_reference, MOMENTS, {**BETAS, "eps": 1e-3, "bias_correction": False}),
    "adamw_beta_zero": Update(adamw, adam_reference, MOMENTS, {**BETAS, "beta1": 0.0, "eps": 1e-8}),
    "lamb": Update(lamb, lamb_reference, MOMENTS, TRUST, segments=thirds),
    "lamb_inside": Update(
        lamb, lamb_reference, MOMENTS, {**TRUST, "eps_inside_sqrt": True, "bias_correction": False}, segments=thirds
    ),
    "lion": Update(lion, lion_reference, ("exp_avg",), BETAS, reads_step=False),
    "sgd": Update(sgd, sgd_reference, (), {"weight_decay": 0.1}),
    "sgd_momentum": Update(sgd, sgd_reference, ("momentum_buffer",), {"momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": Update(sgd, sgd_reference, ("momentum_buffer",), {"momentum": 0.99, "nesterov": True}),
}
MAIN = ["adamw", "lamb", "lion", "sgd_momentum"]
every = pytest.mark.parametrize("name", UPDATES)
main = pytest.mark.parametrize("name", MAIN)


def wide(tensors):
    return [x.double() for x in tensors]


def check_one_update(name: str, n: int, dtype: torch.dtype, low: torch.dtype, t: int, **more: Any) -> None:
    update = UPDATES[name]
    mine = update.draw(n, dtype, seed=n)
    mine[1] = mine[1].to(low)
    theirs = wide(mine)
    keywords = update.keywords(n, t, **more)
    with only("triton"):
        update.run(*mine, **keywords)
    update.reference(*theirs, **keywords)
    for got, want in zip([mine[0], *mine[2:]], [theirs[0], *theirs[2:]], strict=True):
        assert_near(got, want, dtype)


@every
@pytest.mark.parametrize("n", AWKWARD[:-1])
def test_an_update_is_its_reference_at_awkward_lengths(name, n):
    check_one_update(name, n, torch.float32, torch.bfloat16, t=0)


@main
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_is_its_reference_in_every_dtype_of_the_state(name, dtype):
    check_one_update(name, 2500, dtype, dtype, t=2)  # more than one block, less than two and three


@main
def test_a_long_slice_is_updated_to_its_end(name):
    check_one_update(name, 8191, torch.float32, torch.float16, t=1)


@every
def test_whole_blocks_and_a_scale_that_gradients_are_divided_by(name):
    check_one_update(name, 2048, torch.float32, torch.float32, t=7, grad_scale=torch.tensor(1000.0))


@main
@given(st.integers(0, 1100), st.integers(0, 10**6), st.sampled_from(DTYPES), st.floats(1e-6, 1e6))
def test_any_length_at_any_time_under_any_scale(name, n, t, low, scale):
    check_one_update(name, n, torch.float32, low, t, grad_scale=torch.tensor(scale), lr=torch.tensor(0.1))


@every
def test_several_updates_with_skips_between_are_those_of_the_reference(name):
    update, n = UPDATES[name], 431
    mine = update.draw(n)
    theirs, t = wide(mine), 0
    out = torch.full((n,), 7.0, dtype=torch.float16)
    for i in range(7):
        skip = i in (0, 4)
        grad = torch.full((n,), float("nan")) if skip else 8 * random(n, seed=100 + i)
        keywords = update.keywords(n, t, grad_scale=torch.tensor(8.0), skip=torch.tensor(skip))
        before = [x.clone() for x in (mine[0], *mine[2:], out)]
        with only("triton"):
            update.run(mine[0], grad, *mine[2:], out=out, **keywords)
        if skip:
            assert all(torch.equal(a, b) for a, b in zip(before, (mine[0], *mine[2:], out), strict=True))
            continue
        update.reference(theirs[0], grad.double(), *theirs[2:], **keywords)
        assert torch.equal(out, mine[0].half())
        t += 1
    for got, want in zip([mine[0], *mine[2:]], [theirs[0], *theirs[2:]], strict=True):
        assert_near(got, want, factor=5)  # a rounding per update


@every
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_skipped_update_keeps_every_bit(name, kind, value):
    update, n = UPDATES[name], 42
    mine, out = update.draw(n), torch.full((n,), 7.0, dtype=torch.bfloat16)
    mine[0][0] = -0.0
    mine[1].fill_(value)
    before = [x.clone().view(torch.int32) for x in mine]
    with only(kind), np.errstate(invalid="ignore"):  # the interpreter computes with numpy, which warns of inf / inf
        update.run(*mine, out=out, **update.keywords(n, 3, skip=torch.tensor(True)))
    assert all(torch.equal(a, b.view(torch.int32)) for a, b in zip(before, mine, strict=True)) and (out == 7).all()


@main
@pytest.mark.parametrize("edge", [1, 64], ids=["at odd addresses", "at even ones"])
def test_nothing_beside_the_slice_is_read_or_written(name, edge):
    update, n = UPDATES[name], 1100
    mine = update.draw(n)
    around = [x.new_full((n + 2 * edge,), float("nan")) for x in (*mine, mine[0])]
    inner = [x[edge : edge + n] for x in around]
    for x, value in zip(inner, mine, strict=False):
        x.copy_(value)
    *held, out = inner
    with only("triton"):
        update.run(*held, out=out, **update.keywords(n, 3))
        update.run(*mine, **update.keywords(n, 3))
    assert all(torch.equal(a, b) for a, b in zip(held, mine, strict=True)) and torch.equal(out, mine[0])
    assert all(x[:edge].isnan().all() and x[edge + n :].isnan().all() for x in around)


@main
def test_a_gradient_with_gaps_in_memory_is_read_as_it_is(name):
    update, n = UPDATES[name], 123
    mine, theirs = update.draw(n), update.draw(n)
    mine[1] = torch.stack([mine[1], mine[1] * float("nan")], dim=1)[:, 0]
    with only("triton"):
        update.run(*mine, **update.keywords(n, 3))
        update.run(*theirs, **update.keywords(n, 3))
    assert all(torch.equal(a, b) for a, b in zip([mine[0], *mine[2:]], [theirs[0], *theirs[2:]], strict=True))


@every
def test_an_element_is_updated_alike_wherever_it_lies(name):
    update, n, start = UPDATES[name], 1200, 77
    mine = update.draw(n)
    part = [x[start : start + 42].clone() for x in mine]
    same = {} if update.segments is None else {"segments": [(start, 42)]}
    alone = {} if update.segments is None else {"segments": [(0, 42)]}
    with only("triton"):
        update.run(*mine, **update.keywords(n, 3, **same))
        update.run(*part, **update.keywords(42, 3, **alone))
    for x, y in zip([mine[0], *mine[2:]], [part[0], *part[2:]], strict=True):
        assert torch.equal(x[start : start + 42], y)


@every
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_zeros_that_are_no_parameters_stay_zero(name, kind):
    update = UPDATES[name]
    mine = [torch.zeros(6) for _ in range(2 + len(update.slots))]
    more = {"eps": 0.0} if "eps" in update.hyper and update.segments is None else {}
    with only(kind):
        update.run(*mine, **update.keywords(6, 0, **more))
    assert all((x == 0).all() for x in mine)


@every
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_an_empty_slice_is_nothing_to_do(name, kind):
    update = UPDATES[name]
    mine = [torch.empty(0) for _ in range(2 + len(update.slots))]
    with only(kind):
        update.run(*mine, **update.keywords(0, 0))


def test_the_reference_is_what_runs_where_no_kernel_does():
    update = UPDATES["adamw"]
    mine, theirs = update.draw(42), update.draw(42)
    update.run(*mine, **update.keywords(42, 3))
    update.reference(*theirs, **update.keywords(42, 3))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


BAD = [
    ("param", lambda x: x.view(6, 7)),
    ("param", lambda x: x.repeat(2)[::2]),
    ("param", lambda x: x.long()),
    ("grad", lambda x: x[:-1]),
    ("grad", lambda x: x.to("meta")),
    ("grad", lambda x: x.int()),
    ("slot", lambda x: x.repeat(2)[::2]),
]
BAD_SCALARS = [
    ("lr", 0.1),
    ("lr", torch.ones(1)),
    ("lr", torch.ones((), dtype=torch.int64)),
    ("skip", torch.zeros(())),
    ("skip", True),
    ("grad_scale", torch.ones((), dtype=torch.float16)),
    ("grad_scale", 2.0),
    ("out", torch.ones(41)),
    ("grad_scale", torch.ones((), device="meta")),
    ("out", torch.ones(42, dtype=torch.int8)),
    ("out", torch.ones(84)[::2]),
    ("weight_decay", -0.1),
    ("weight_decay", torch.tensor(0.1)),
]


@main
@pytest.mark.parametrize(("where", "spoil"), BAD)
def test_a_bad_tensor_is_refused_by_name(name, where, spoil):
    update = UPDATES[name]
    index, called = {"param": (0, "param"), "grad": (1, "grad"), "slot": (2, update.slots[0])}[where]
    mine = update.draw(42)
    mine[index] = spoil(mine[index])
    with pytest.raises(KernelError) as error:
        update.run(*mine, **update.keywords(42, 3))
    assert error.value.where == called and error.value.got and error.value.want


@main
@pytest.mark.parametrize(("where", "bad"), BAD_SCALARS)
def test_a_bad_scalar_or_copy_is_refused_by_name(name, where, bad):
    update = UPDATES[name]
    with pytest.raises(KernelError) as error:
        update.run(*update.draw(42), **update.keywords(42, 3) | {where: bad})
    assert error.value.where == where and error.value.got and error.value.want


@pytest.mark.parametrize(
    ("name", "where", "bad"),
    [
        ("adamw", "step", torch.tensor(3.0)),
        ("adamw", "step", 3),
        ("adamw", "beta1", 1.0),
        ("adamw", "beta2", -0.1),
        ("adamw", "eps", -1.0),
        ("lamb", "step", torch.tensor([3])),
        ("lamb", "min_coeff", -1.0),
        ("lamb", "max_coeff", True),
        ("lamb", "segments[1]", [(0, 9), (40, 3)]),
        ("lamb", "segments[0]", [(-1, 3)]),
        ("lion", "beta2", 2),
        ("sgd_momentum", "momentum", torch.tensor(0.9)),
        ("sgd_momentum", "dampening", -0.1),
    ],
)
def test_a_bad_hyper_parameter_is_refused_by_name(name, where, bad):
    update = UPDATES[name]
    with pytest.raises(KernelError) as error:
        update.run(*update.draw(42), **update.keywords(42, 3) | {where.partition("[")[0]: bad})
    assert error.value.where == where and error.value.got and error.value.want


@jit
def _corrections(updates_ptr, out_ptr, log_beta):
    i = tl.program_id(0)
    tl.store(out_ptr + i, slices.correction(tl.load(updates_ptr + i), log_beta))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999999])
def test_the_correction_of_moments_does_not_cancel(beta):
    updates = torch.tensor([1, 2, 3, 10, 50, 99, 1000, 10**5, 2**40])
    out = torch.empty(len(updates))
    _corrections[(len(updates),)](updates, out, slices.log_of(beta))
    want = -torch.expm1(updates.double() * slices.log_of(beta))
    # n, log(beta) and their product are rounded, half a unit each; the series or 1 - exp adds two units
    assert ((out.double() - want).abs() <= 3.5 * 2**-23 * want).all()
    assert slices.log_of(beta, corrected=False) == -math.inf
