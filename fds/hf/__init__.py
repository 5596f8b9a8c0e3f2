"""Models of Hugging Face's transformers, which is imported when a function here is called, and not before."""

from fds.hf._positions import extend_position_embedding
from fds.hf._sparse_models import is_sparse, sparsify

__all__ = ["extend_position_embedding", "is_sparse", "sparsify"]
