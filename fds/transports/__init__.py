"""Transports: how flat buckets travel between ranks in fewer bytes, each with a stated bound of what is lost.

    fds.shard_optimizer(axis, stage=1, gradients=fds.transports.quantized(8), weights=fds.transports.quantized(8))

`cast`, `quantized`, `onebit` and `topk` say how numbers become bytes; `hierarchical` sends them by way of two
axes, inside a node and between nodes; `rows` sends the rows that are not 0, and loses nothing. What a rank sends to
itself is never coded, so nothing of it is lost.
"""

from fds.transports._code import cast, onebit, quantized, topk
from fds.transports._hierarchical import hierarchical
from fds.transports._rows import rows

__all__ = ["cast", "hierarchical", "onebit", "quantized", "rows", "topk"]
