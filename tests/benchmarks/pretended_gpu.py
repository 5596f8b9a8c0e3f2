"""The CPU in the place of a GPU, for the code around a clock: what it calls of `torch.cuda`, in its order."""

import time
import types

import torch


class Event:
    """Time as the processor has it, in milliseconds."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def pretend(monkeypatch):
    """Let `torch.cuda` answer, and return the names of what was called of it."""
    called = []
    answers = {
        "Event": Event,
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "_sleep": lambda cycles: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=1024),
        "reset_peak_memory_stats": lambda *_: None,
        "memory_allocated": lambda *_: 100,
        "memory_reserved": lambda *_: 2000,
        "max_memory_allocated": lambda *_: 1000,
    }
    for name, answer in answers.items():
        noted = lambda *given, name=name, answer=answer, **more: (called.append(name), answer(*given, **more))[1]
        monkeypatch.setattr(torch.cuda, name, noted)
    return called
