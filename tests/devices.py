"""The device of the tests: the CPU, or a GPU where the same tests are held on one (FDS_TEST_DEVICE=cuda)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._device import DeviceContext

NAME = os.environ.get("FDS_TEST_DEVICE", "cpu")  # "cpu", "cuda", or "pretended": CUDA as tests/pretending.py has it
DEVICE = torch.device("cpu") if NAME == "cpu" else torch.device("cuda", 0)


def begin() -> Callable[[], None]:
    """Make the device of the tests the default one, and return what undoes that."""
    stack = contextlib.ExitStack()
    if NAME == "pretended":
        from tests.pretending import pretended

        stack.enter_context(pretended())
    if NAME == "cuda":  # laws are of bits: sums in one order, and no products rounded to 10 bits
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.allow_tf32 = False
    if DEVICE.type != "cpu":
        stack.enter_context(DefaultDevice(DEVICE))
        from fds.collectives.turns import Turns

        stack.enter_context(mock.patch.object(Turns, "_run", _on_the_device(Turns._run)))
    if os.environ.get("FDS_TEST_KERNELS") == "triton":  # where a law does not say which, rather than torch's operators
        from fds.kernels import prefer_triton

        stack.enter_context(prefer_triton())
    return stack.close


def _on_the_device(run: Callable[..., None]) -> Callable[..., None]:
    """Let the thread of a simulated rank have the device of the tests too: torch's default is of a thread."""

    def begun(*args: Any) -> None:
        with contextlib.ExitStack() as stack:
            if NAME == "pretended":
                from tests.pretending import modes

                stack.enter_context(modes())
            stack.enter_context(DefaultDevice(DEVICE))
            run(*args)

    return begun


def rng_state() -> torch.Tensor:
    """Return the state of the generator that functions on the device of the tests draw from."""
    return torch.get_rng_state() if DEVICE.type == "cpu" else torch.cuda.get_rng_state()


class DefaultDevice(DeviceContext):
    """Make tensors on a device, as torch's own default device does; what is random are the numbers of the CPU.

    A test that draws from a `torch.Generator()`, or makes a tensor of numbers, means the same tensor on every device.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None:
            generator = kwargs.get("generator")
            drawn = generator is not None and generator.device.type == "cpu" and func in _DRAWING
            if drawn or func in _OF_NUMBERS:
                wanted = kwargs.get("requires_grad", False)
                kwargs = {name: x for name, x in kwargs.items() if name != "requires_grad"}
                return func(*args, **{**kwargs, "device": "cpu"}).to(self.device).requires_grad_(wanted)
        return super().__torch_function__(func, types, args, kwargs)


_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm}
_OF_NUMBERS = {torch.tensor}
