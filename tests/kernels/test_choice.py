"""Which runs: by the tensor, or as asked for, in every thread and under torch.compile."""

import random
import sys
import threading

import pytest
import torch

import fds
from fds.autodiff import value_and_grad
from fds.errors import KernelError
from fds.kernels import choice, evidence, language
from fds.kernels._swiglu import swiglu
from fds.kernels.choice import chosen, only, prefer_triton, runs_triton
from tests.kernels.ways import traced

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """Decide anew in every test, where nothing is recorded, and forget what was decided for a machine not there."""
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(evidence, "recorded", dict)


def which(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    return chosen("swiglu", device, dtype)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torchs_operators_run_where_no_kernel_is_recorded(device, dtype):
    for kernel in (*evidence.HOMES, *evidence.SAME):
        assert chosen(kernel, torch.device(device), dtype) == "reference"
    assert not runs_triton("swiglu", torch.ones(3, dtype=dtype))


def test_kernels_that_are_preferred_run_wherever_they_can(monkeypatch):
    monkeypatch.setattr(language, "is_interpreted", True)
    with prefer_triton():
        assert which(CUDA) == which(CUDA, torch.bfloat16) == which(CPU) == "triton"  # the CPU's in the interpreter
        assert which(CUDA, torch.float64) == which(CPU, torch.float64) == "reference"
        assert runs_triton("swiglu", torch.ones(3)) and not runs_triton("swiglu", torch.ones(3).double())
        x = torch.ones(3).double()
        assert torch.equal(swiglu(x, x), torch.nn.functional.silu(x) * x)
    monkeypatch.setattr(language, "is_interpreted", False)
    choice._decided.clear()
    with prefer_triton():
        assert which(CUDA) == "triton" and which(CPU) == "reference"
    monkeypatch.setattr(language, "is_there", False)
    choice._decided.clear()
    with prefer_triton():
        assert which(CUDA) == "reference"


def test_a_machine_without_triton_runs_references(monkeypatch):
    monkeypatch.setattr(language, "is_there", False)
    assert which(CUDA) == "reference"
    with only("triton"), pytest.raises(KernelError, match="cannot run here: Triton is not installed"):
        runs_triton("swiglu", torch.ones(3))


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(KernelError, match="no such kernel") as caught:
        chosen("swigloo", CPU)
    assert caught.value.got == "'swigloo'" and "swiglu" in caught.value.want


def test_scopes_nest_and_the_innermost_decides():
    with prefer_triton(), only("reference"):
        assert which(CUDA) == "reference"
        with only("triton"):
            assert which(CPU) == "triton"
            with only("triton"), only("reference"):
                assert which(CPU) == "reference"
            assert which(CPU) == "triton" and runs_triton("swiglu", torch.ones(3))
        assert which(CUDA) == "reference"
    assert which(CPU) == which(CUDA) == "reference"


def test_a_scope_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), only("triton"):
        _ = 1 / 0
    assert which(CPU) == "reference"


def test_scopes_may_close_in_any_order():
    for seed in range(20):
        kinds = random.Random(seed).choices(["triton", "reference", "preferred"], k=6)
        scopes = [prefer_triton() if kind == "preferred" else only(kind) for kind in kinds]
        for scope in scopes:
            scope.__enter__()
        left = list(zip(kinds, scopes, strict=True))
        random.Random(seed).shuffle(left)
        while left:
            _, scope = left.pop()
            scope.__exit__(None, None, None)
            assert sorted(choice._scopes.kinds) == sorted(kind for kind, _ in left)
        assert choice._scopes.kinds == ()


def test_a_scope_holds_in_every_thread():
    seen, inside, done = [], threading.Event(), threading.Event()

    def other():
        with only("triton"):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with only("reference"):  # opened later, closed earlier
        seen.append(which(CPU))
        done.set()
        thread.join(10)
        seen.append(which(CUDA))
    assert seen == ["reference", "reference"] and choice._scopes.kinds == ()


def test_another_word_is_refused():
    with pytest.raises(KernelError) as caught, only("cuda"):
        pass
    assert caught.value.where == "kind" and caught.value.got == "'cuda'"
    assert choice._scopes.kinds == ()


def test_kernels_on_the_cpu_want_the_interpreter(monkeypatch):
    monkeypatch.setattr(language, "is_interpreted", False)
    with only("triton"), pytest.raises(KernelError, match="cannot run here") as caught:
        swiglu(torch.ones(3), torch.ones(3))
    assert "TRITON_INTERPRET=1" in caught.value.want


def test_kernels_do_not_take_float64():
    with only("triton"), pytest.raises(KernelError, match="do not take this dtype"):
        swiglu(torch.ones(3).double(), torch.ones(3).double())


@traced
def test_a_compiled_function_follows_the_choice():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.code))
        return graph

    f = torch.compile(lambda a, b: swiglu(a, b), backend=backend, fullgraph=True)
    x = torch.ones(4)
    f(x, x)
    with only("triton"):
        f(x, x)
    with only("reference"):
        f(x, x)
    f(x, x)
    assert ["fds.swiglu" in graph for graph in graphs] == [False, True, False]


def test_scopes_of_many_threads_leave_nothing_open():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def often():
        for _ in range(500):
            with only("reference"):
                pass

    threads = [threading.Thread(target=often) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert choice._scopes.kinds == ()


def test_devices_are_strings_as_in_torch():
    with prefer_triton():
        assert chosen("swiglu", "cuda") == chosen("swiglu", torch.device("cuda")) == "triton"
        assert choice.explained("swiglu", "cuda:0") == "kernels were requested"


def test_a_loss_that_differentiates_the_gradient_of_a_kernel_is_refused():
    def loss_fn(params, x):
        normed = lambda x: swiglu(x @ params["in"], x @ params["in"]).square().mean()
        _, slopes = value_and_grad(normed, create_graph=True)(x)
        return slopes.square().mean()

    step = fds.compose(fds.triton_kernels(), fds.sgd(0.1))(loss_fn)
    state, x = step.init({"in": torch.ones(3, 4)}), torch.ones(2, 3)
    with pytest.raises(KernelError, match="no second derivative"):
        step(state, x)
    plain = fds.compose(fds.reference_kernels(), fds.sgd(0.1))(loss_fn)
    assert plain(state, x)


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(KernelError, match="no such kind") as caught:
        only("tritn")
    assert caught.value.got == "'tritn'"
