"""Python's garbage collector, off while something is counted."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect, and then nothing more until the end: what it would free meanwhile may be of other tests."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
