"""Launches of kernels: what a launch runs is looked up by its arguments, which Triton would bind at each.

Triton binds arguments to names, asks of each what it is compiled for, and writes options as text, to look the compiled
kernel up: 10 us of a slow host for a norm's backward, with 20 parameters, of which this leaves 3. A launch that is not
known yet is Triton's own.
"""

from __future__ import annotations

from typing import Any

from triton import JITFunction, knobs
from triton.runtime import driver


class Kernel(JITFunction):
    """A kernel of Triton, launched as any: `kernel[grid](*tensors, *numbers, **constants)`.

    Launches are looked up where the parameters are pointers, named `..._ptr`, then numbers, then constants, and where
    tensors (or None) and numbers are passed by position and constants by name. All others go through Triton.
    """

    def __init__(self, fn: Any, **options: Any) -> None:
        super().__init__(fn, **options)
        of = lambda p: "constant" if p.is_constexpr else "pointer" if p.name.endswith("_ptr") else "value"
        kinds = list(map(of, self.params))
        self._in_order = kinds == sorted(kinds, key=("pointer", "value", "constant").index)
        self._num_pointers, self._num_values = kinds.count("pointer"), len(kinds) - kinds.count("constant")
        self._constants = [p.name for p in self.params[self._num_values :]]
        self._launches: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        """Launch as Triton does, with products and sums fused: Triton 3.9 warns that later releases will not."""
        return super().run(*args, **{"enable_fp_fusion": True, **options})

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return what launches as many programs."""

        def launch(*args: Any, **constants: Any) -> Any:
            if len(args) != self._num_values or self.pre_run_hooks or not self._in_order:
                return self.run(*args, grid=grid, warmup=False, **constants)
            active: Any = driver.active
            runtime = knobs.runtime
            device = active.get_current_device()
            # All that Triton compiles anew for: the alignment of pointers, and integers that are 1, multiples of 16, or
            # too long for 32 bits (`native_specialize_impl`); of those in `do_not_specialize` some for nothing.
            key = (
                device, runtime.debug, knobs.compilation.instrumentation_mode, *constants, *constants.values(),
                *[
                    None if x is None else x.dtype if x.data_ptr() & 15 == 0 else (x.dtype,)
                    for x in args[: self._num_pointers]
                ],
                *[_kind(x) for x in args[self._num_pointers :]],
            )
            launched = self._launches.get(key)
            if launched is None:
                made = self.run(*args, grid=grid, warmup=False, **constants)
                if made is not None and constants.keys() >= {*self._constants}:
                    self._launches[key] = made, [constants[name] for name in self._constants]
                return made
            kernel, rest = launched
            stream, enter = active.get_current_stream(device), runtime.launch_enter_hook
            metadata = None if enter is None else kernel.launch_metadata(grid, stream, *args, *rest)
            kernel.run(
                *grid, *_ONES[len(grid) :], stream, kernel.function, kernel.packed_metadata, metadata, enter,
                runtime.launch_exit_hook, *args, *rest,
            )
            return kernel

        return launch


_ONES = (1, 1, 1)


def _kind(x: float) -> Any:
    if type(x) is int:
        return x == 1, x & 15 == 0, -(2**31) <= x < 2**31, x < 2**63
    return type(x)
