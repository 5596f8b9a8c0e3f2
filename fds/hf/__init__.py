"""Models of Hugging Face's transformers, which is imported when a function here is called, and not before."""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:
    from fds.hf._lazy import LazyModel, init, lazy
    from fds.hf._long_rows import context_parallel, part
    from fds.hf._positions import extend_position_embedding
    from fds.hf._saving import file_names, save
    from fds.hf._sparse_models import is_sparse, sparsify

__getattr__, __dir__ = lazily(
    __name__,
    {
        "fds.hf._lazy": "LazyModel init lazy",
        "fds.hf._long_rows": "context_parallel part",
        "fds.hf._positions": "extend_position_embedding",
        "fds.hf._saving": "file_names save",
        "fds.hf._sparse_models": "is_sparse sparsify",
        "fds.trainer": "Trainer",  # a room above this one, which builds the class from transformers'
    },
)

__all__ = [
    "LazyModel", "context_parallel", "extend_position_embedding", "file_names", "init", "is_sparse", "lazy", "part",
    "save", "sparsify",
]  # fmt: skip
