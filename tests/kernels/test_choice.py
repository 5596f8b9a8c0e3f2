"""Which runs: by the tensor, or as asked for, in every thread and under torch.compile."""

import random
import sys
import threading

import pytest
import torch

from fds.errors import KernelError
from fds.kernels import choice, language
from fds.kernels.activations._swiglu import swiglu
from fds.kernels.choice import chosen, only, runs_triton
from tests.kernels.ways import traced

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_tensors_on_a_gpu_take_kernels_and_others_references():
    assert chosen(CPU) == "reference" and chosen(torch.device("meta")) == "reference"
    assert chosen(CUDA) == "triton" and chosen(CUDA, torch.bfloat16) == "triton"
    assert chosen(CUDA, torch.float64) == "reference"  # which no kernel takes
    assert not runs_triton(torch.ones(3))


def test_a_machine_without_triton_runs_references(monkeypatch):
    monkeypatch.setattr(language, "is_there", False)
    assert chosen(CUDA) == "reference"
    with only("triton"), pytest.raises(KernelError, match="cannot run here"):
        runs_triton(torch.ones(3))


def test_scopes_nest_and_the_innermost_decides():
    with only("reference"):
        assert chosen(CUDA) == "reference"
        with only("triton"):
            assert chosen(CPU) == "triton"
            with only("triton"), only("reference"):
                assert chosen(CPU) == "reference"
            assert chosen(CPU) == "triton" and runs_triton(torch.ones(3))
        assert chosen(CUDA) == "reference"
    assert chosen(CPU) == "reference" and chosen(CUDA) == "triton"


def test_a_scope_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), only("triton"):
        _ = 1 / 0
    assert chosen(CPU) == "reference"


def test_scopes_may_close_in_any_order():
    for seed in range(20):
        kinds = random.Random(seed).choices(["triton", "reference"], k=6)
        scopes = [only(kind) for kind in kinds]
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
        seen.append(chosen(CPU))
        done.set()
        thread.join(10)
        seen.append(chosen(CUDA))
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
