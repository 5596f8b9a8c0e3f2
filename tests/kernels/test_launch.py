"""Launches that are looked up: what Triton would run, with what it would pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from triton import JITFunction, knobs
from triton.runtime import driver

from benchmarks.absent_gpu import AbsentGpu
from fds.kernels.launch import Kernel


def _update(first_ptr, second_ptr, n, size, rate, BLOCK, WIDE):
    """Take pointers, numbers and constants; never compiled."""


def _mixed(first_ptr, n, second_ptr, size, rate, BLOCK, WIDE):
    """Take the same in another order."""


_update.__annotations__ = _mixed.__annotations__ = {"BLOCK": "tl.constexpr", "WIDE": "tl.constexpr"}


class Compiled:
    """What Triton would have compiled for one kind of arguments; keeps what it is launched with."""

    function, packed_metadata = "function", "packed"

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def launch_metadata(self, grid: Any, stream: Any, *args: Any) -> Any:
        """Say of what a launch is, where a hook asks."""
        return None if knobs.runtime.launch_enter_hook is None else ("metadata", grid, stream, *map(id, args))

    def run(self, *args: Any) -> None:
        """Keep the arguments."""
        self.calls.append((self, *args))


@contextlib.contextmanager
def kernel(function: Any = _update) -> Iterator[tuple[Kernel, list]]:
    """Yield a kernel that is compiled for no GPU, and the list of its launches."""
    calls: list = []

    def compiled(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Compiled:
        return self.device_caches[device][0].setdefault(key, Compiled(calls))

    made: Any = Kernel(function, do_not_specialize=["size"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", AbsentGpu())
        patch.setattr(JITFunction, "_do_compile", compiled)
        yield made, calls


NUMBERS = st.sampled_from([0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**62, 2**63])
MEMORY = torch.zeros(64)
TENSORS = st.one_of(
    st.none(),
    st.builds(
        lambda first, dtype: MEMORY[first:].view(dtype), st.sampled_from([0, 1, 2, 4]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int32]),
    ),
)  # fmt: skip
KINDS = (
    TENSORS, TENSORS, NUMBERS, NUMBERS, st.sampled_from([0.5, 1.0, 16.0, 1, 16]), st.sampled_from([1, 16, 32]),
    st.booleans(), st.sampled_from([1, 4]), st.booleans(),
)  # fmt: skip
CHANGES = st.one_of(*[st.tuples(st.just(i), kind) for i, kind in enumerate(KINDS)])


@hypothesis.given(st.tuples(*KINDS), st.lists(CHANGES, min_size=1, max_size=12))
@hypothesis.settings(deadline=None)
def test_a_launch_runs_what_triton_would(first: tuple, changes: list) -> None:
    with kernel() as (made, calls):
        for i, change in [(0, first[0]), *changes]:  # one argument after another, and back again
            for given in (first, changed := (*first[:i], change, *first[i + 1 :])):
                *args, block, wide, warps, is_reversed = given
                named = {"BLOCK": block, "WIDE": wide, "num_warps": warps}
                named = dict(reversed(named.items())) if is_reversed else named
                made[(3, 2)](*args, **named)
                made.run(*args, grid=(3, 2), warmup=False, **named)
                assert _same(calls[-1], calls[-2])
            first = changed


def _same(one: tuple, other: tuple) -> bool:
    same = lambda a, b: a is b or (type(a) is type(b) and a == b)
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def test_a_launch_that_is_known_is_not_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernel() as (made, calls):
        launch = lambda: made[(3,)](MEMORY, None, 5, 6, 0.5, BLOCK=16, WIDE=True)
        launch()
        monkeypatch.setattr(made, "run", None)
        launch()
        assert len(calls) == 2 and calls[0] == calls[1]


@pytest.mark.parametrize("change", ["debug", "instrumentation", "hook", "order"])
def test_what_only_triton_knows_goes_through_triton(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with kernel(_mixed if change == "order" else _update) as (made, calls):
        launch = lambda: made[(3,)](MEMORY, 5, 5, 6, 0.5, BLOCK=16, WIDE=True)
        if change != "order":
            launch = lambda: made[(3,)](MEMORY, None, 5, 6, 0.5, BLOCK=16, WIDE=True)
        launch()
        seen: list = []
        if change == "debug":
            monkeypatch.setattr(knobs.runtime, "debug", True)
        elif change == "instrumentation":
            monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "fpsan")
        elif change == "hook":
            made.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))
        monkeypatch.setattr(made, "run", lambda *args, **kwargs: seen.append(args))
        launch()
        assert len(seen) == 1 and len(calls) == 1


def test_hooks_of_profilers_hear_of_known_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernel() as (made, calls):
        launch = lambda: made[(3,)](MEMORY, None, 5, 6, 0.5, BLOCK=16, WIDE=True)
        launch()
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", enter := lambda data: None)
        launch()
        metadata, given = calls[-1][-10], calls[-1][-9]
        assert metadata == ("metadata", (3,), 0, *map(id, calls[-1][-7:])) and given is not None and enter
