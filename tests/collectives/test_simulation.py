"""Simulated ranks: whose turn it is, what each draws, and what is said when they cannot go on."""

import _thread
import random
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fds
from fds import collectives as c
from fds.errors import FdsError, RankError
from tests.collectives.cases import axis


def test_results_come_in_rank_order():
    assert c.simulate(lambda: c.mesh(dp=-1).rank, 4) == [0, 1, 2, 3]


def test_a_rank_runs_until_it_waits_or_ends():
    events = []

    def run():
        a = axis()
        events.append(f"{a.index} starts")
        work = a.start_all_reduce(torch.ones(1))
        events.append(f"{a.index} waits")
        work.wait()
        events.append(f"{a.index} goes on")

    c.simulate(run, 3)
    assert events == [
        "0 starts",
        "0 waits",
        "1 starts",
        "1 waits",
        "2 starts",
        "2 waits",
        "2 goes on",
        "0 goes on",
        "1 goes on",
    ]


def test_what_is_in_flight_on_several_axes_is_matched_by_order():
    def run():
        mesh = c.mesh(pp=2, dp=2)
        x, y, z = (torch.full((2,), float(10**i * (mesh.rank + 1))) for i in range(3))
        works = [mesh["dp"].start_all_reduce(x), mesh["pp"].start_all_reduce(y), mesh["dp"].start_all_reduce(z)]
        for work in reversed(works):
            work.wait()
        return [x[0].item(), y[0].item(), z[0].item()]

    assert c.simulate(run, 4) == [[3, 40, 300], [3, 60, 300], [7, 40, 700], [7, 60, 700]]


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_each_rank_draws_as_if_it_were_alone_and_the_caller_draws_on(size, seed):
    def run():
        drawn = [torch.rand(3)]
        for _ in range(3):
            axis().barrier()
            drawn.append(torch.rand(3))
        return torch.cat(drawn)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        alone = torch.cat([torch.rand(3) for _ in range(4)])
        torch.manual_seed(seed)
        results = c.simulate(run, size)
        assert torch.equal(torch.rand(3), alone[:3])
    assert all(torch.equal(result, alone) for result in results)


def test_dropout_is_recomputed_as_it_was_while_ranks_take_turns():
    def run():
        a = axis()
        x = torch.full((20,), float(a.index + 1), requires_grad=True)
        with fds.random.seeded(fds.random.key(a.index)):
            layer = lambda x: torch.nn.functional.dropout(c.all_reduce(torch.nn.functional.dropout(x), a))
            out = checkpoint(layer, x, use_reentrant=False)
            return out.detach(), torch.autograd.grad(out, x, out.detach())[0]

    results = c.simulate(run, 2)
    plain = c.simulate(run_without_checkpoint, 2)
    for got, want in zip(results, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def run_without_checkpoint():
    a = axis()
    x = torch.full((20,), float(a.index + 1), requires_grad=True)
    with fds.random.seeded(fds.random.key(a.index)):
        out = torch.nn.functional.dropout(c.all_reduce(torch.nn.functional.dropout(x), a))
    return out.detach(), torch.autograd.grad(out, x, out.detach())[0]


def test_the_gradient_mode_is_the_callers():
    with torch.no_grad():
        assert c.simulate(torch.is_grad_enabled, 2) == [False, False]
    assert c.simulate(torch.is_grad_enabled, 2) == [True, True]


def refused(run, size=2) -> str:
    before = set(threading.enumerate())  # those of disks, say, that other tests have left to this process
    with pytest.raises(RankError) as error:
        c.simulate(run, size)
    assert len(set(threading.enumerate()) - before) < 19
    return str(error.value)


def test_a_deadlock_says_where_each_rank_waits():
    def run():
        mesh = c.mesh(pp=2, dp=2)
        if mesh.rank == 3:
            return
        if mesh.rank == 2:
            mesh["pp"].start_all_gather(torch.empty(6, dtype=torch.int64), torch.ones(3, dtype=torch.int64)).wait()
        mesh["dp"].start_all_reduce(torch.ones(4), "max").wait()
        if mesh.rank == 0:
            mesh["pp"].start_recv(torch.empty(2), 1).wait()

    text = refused(run, 4)
    assert "rank 0 waits in recv from 1 of (2,) float32 on axis 'pp', message 1 from 1 to 0, for rank 2" in text
    assert "rank 1 has ended" in text and "rank 3 has ended" in text
    assert "rank 2 waits in all_gather of (3,) int64 on axis 'pp', number 1, for rank 0" in text


def test_two_ranks_that_both_send_first_deadlock():
    def run():
        a = axis()
        a.start_send(torch.ones(1), 1 - a.index).wait()
        a.start_recv(torch.ones(1), 1 - a.index).wait()

    assert "rank 1 waits in send to 0" in refused(run)


def test_a_deadlock_in_a_backward_pass_is_found():
    def run():
        x = torch.ones(2, requires_grad=True)
        y = c.all_reduce(x, axis()).sum()
        if axis().index == 0:
            torch.func.grad(lambda x: c.all_gather(x, axis()).sum())(torch.ones(2))
        return torch.autograd.grad(y, x)

    assert "all_gather of (2,)" in refused(run)

    def one():
        x = torch.ones(2, requires_grad=True)
        y = c.all_reduce(x, axis()).sum()
        return torch.autograd.grad(y, x) if axis().index else None

    text = refused(one)
    assert "rank 0 has ended" in text and "rank 1 waits in all_reduce (sum) of (2,)" in text


DIFFERENT = {
    "op": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_broadcast(torch.ones(2), 0)),
    "reduction": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_all_reduce(torch.ones(2), "max")),
    "shape": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_all_reduce(torch.ones(3))),
    "dtype": (lambda a: a.start_all_reduce(torch.ones(2)), lambda a: a.start_all_reduce(torch.ones(2).int())),
    "source": (lambda a: a.start_broadcast(torch.ones(2), 0), lambda a: a.start_broadcast(torch.ones(2), 1)),
    "message": (lambda a: a.start_send(torch.ones(2), 1), lambda a: a.start_recv(torch.ones(3), 0)),
}


@pytest.mark.parametrize("calls", DIFFERENT.values(), ids=DIFFERENT)
def test_different_calls_are_shown_side_by_side(calls):
    text = refused(lambda: calls[axis().index](axis()).wait())
    assert "rank 0: " in text and "rank 1: " in text and "axis 'dp'" in text
    assert text.partition("rank 0: ")[2].partition("\n")[0] != text.partition("rank 1: ")[2].partition("\n")[0]


def test_a_collective_that_others_never_join_is_reported_though_nobody_waits():
    def run():
        if axis().index == 1:
            axis().start_all_reduce(torch.ones(2))

    assert "rank 1 started all_reduce (sum) of (2,) float32 on axis 'dp', number 1, for rank 0" in refused(run)


class Odd(Exception):
    pass


def test_an_error_of_one_rank_ends_the_others_and_names_it():
    left = []

    def run():
        try:
            if axis().index == 1:
                raise Odd("no")
            axis().barrier()
        except Exception as error:  # an end that is forced is no error of the rank
            left.append(("caught", axis().index, type(error)))
            raise
        finally:
            left.append(("left", axis().index))

    with pytest.raises(Odd) as error:
        c.simulate(run, 3)
    assert error.value.__notes__ == ["in rank 1 of 3, simulated"]
    assert left == [("caught", 1, Odd), ("left", 1), ("left", 0)]


def test_an_error_in_a_collective_of_a_gradient_reaches_the_caller():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            axis().barrier()
            if axis().index == 0:
                raise Odd("no")
            return c.all_reduce(g, axis())

    def run():
        x = torch.ones(1, requires_grad=True)
        return torch.autograd.grad(Fails.apply(x), x)

    with pytest.raises(Odd, match="no"):
        c.simulate(run, 2)


def test_a_key_ends_it():
    def press():
        time.sleep(0.2)
        _thread.interrupt_main()

    def run():
        while True:
            axis().barrier()

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        c.simulate(run, 2)


def test_dispatch_modes_are_a_ranks_own():
    """torch keeps in flags of the process whether one is open, and compiles nothing while they say so."""

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    is_open = _python_dispatch.is_in_any_mode_without_ignore_compile_internals

    def run():
        before = is_open()
        with Looks():
            axis().barrier()
            inside = is_open()
        axis().barrier()  # the first to enter is the first to leave
        return before, inside, is_open()

    assert c.simulate(run, 3) == [(False, True, False)] * 3
    assert not is_open()


def test_the_stance_of_the_compiler_is_a_ranks_own():
    """A dry run of a step makes torch.compile compile nothing, for its own thread; torch keeps that for all."""

    def stance():
        return torch._dynamo.eval_frame._stance.stance

    def run():
        with torch.compiler.set_stance("force_eager"):
            axis().barrier()
            inside = stance()
        axis().barrier()
        return inside, stance()

    assert c.simulate(run, 3) == [("force_eager", "default")] * 3
    assert stance() == "default"


def test_context_variables_are_a_ranks_own():
    from contextvars import ContextVar

    variable = ContextVar("variable", default=0)

    def run():
        before = variable.get()
        variable.set(axis().index + 1)
        axis().barrier()
        return before, variable.get()

    variable.set(7)
    assert c.simulate(run, 3) == [(7, 1), (7, 2), (7, 3)]
    assert variable.get() == 7


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_number_of_ranks_is_at_least_one(size):
    with pytest.raises(FdsError, match="not a number of ranks"):
        c.simulate(lambda: None, size)


def test_a_simulated_rank_cannot_simulate():
    with pytest.raises(FdsError, match="cannot simulate"):
        c.simulate(lambda: c.simulate(lambda: None, 2), 2)
    assert c.simulate(lambda: 1, 1) == [1]


def test_an_axis_is_of_no_use_when_its_ranks_have_ended():
    a = c.simulate(axis, 2)[0]
    with pytest.raises(RankError, match="is over"):
        a.barrier()


def test_a_rank_waits_on_its_own_thread():
    def run():
        a, errors = axis(), []

        def other():
            try:
                a.barrier()
            except RankError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return errors

    with pytest.raises(RankError):  # the barriers that were started are never over
        c.simulate(lambda: run() if axis().index else None, 2)


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn])
def test_ranks_draw_from_pythons_and_numpys_generators_as_if_they_were_alone(draw):
    def body():
        drawn = [draw()]
        for _ in range(3):
            c.barrier(axis())
            drawn.append(draw())
        return drawn

    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(3)
        np.random.seed(3)
        results = fds.simulate(body, 3)
        assert results == [[draw() for _ in range(4)]] * 3  # the caller's stay as they were
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def test_ranks_draw_from_the_generator_of_a_gpu_as_if_they_were_alone(monkeypatch):
    of_a_gpu = torch.Generator().manual_seed(5)  # CUDA's would be one of the device
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (of_a_gpu,))
    before = of_a_gpu.get_state()

    def draws():
        axis, drawn = fds.mesh(dp=-1)["dp"], []
        for _ in range(3):
            drawn += torch.rand(2, generator=of_a_gpu).tolist()
            axis.all_reduce(torch.ones(()))
        return drawn

    (alone,) = fds.simulate(draws, 1)
    assert torch.equal(of_a_gpu.get_state(), before)
    assert fds.simulate(draws, 3) == [alone] * 3
