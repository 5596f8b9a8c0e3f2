"""A dispatch mode that looks at the operations of a loss, and leaves compiled functions alone."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """Sees every operation that is run inside it, but for what compiled functions do."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # to skip it, torch would import torch._dynamo, which takes seconds
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions run unchanged, and are not looked into."""
        return True
