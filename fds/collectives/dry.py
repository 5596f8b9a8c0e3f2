"""Calls that run dry: nothing is sent, nobody is waited for, and no disk is read or written.

So what fails on one rank alone holds no other up. What ranks tell each other on the host, and act upon, is what they
told when the call was last made in earnest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fds.collectives.links import DONE, Collective, Exchange, Work
from fds.errors import FdsError

# In a thread that runs a call dry: what is left of the exchanges that were heard when it last ran in earnest.
dry: ContextVar[Iterator[Exchange] | None] = ContextVar("fds_dry", default=None)


def again(heard: Iterator[Exchange], collective: Collective) -> list[Any]:
    """Return what all ranks said in the next exchange that was heard. Raises `FdsError` where that was another."""
    known = next(heard, None)
    if known is None or known.collective != collective:
        raise FdsError(
            "a dry run takes another course than the call did",
            got=str(collective),
            want="no exchange" if known is None else str(known.collective),
        )
    return copy.deepcopy(known.replies)


def alone(op: str, how: str, out: Tensor, x: Tensor, index: int, size: int) -> Work:
    """Write what a collective would where all ranks had the values of this one; what is received stays as it is."""
    out, x = out.detach(), x.detach()
    if op == "all_reduce" and how == "sum":
        out.mul_(size)
    elif op == "reduce_scatter":
        out.copy_(x.chunk(size)[index]).mul_(size)
    elif op in ("all_gather", "all_to_all"):
        for piece in out.chunk(size):
            piece.copy_(x if op == "all_gather" else x.chunk(size)[index])
    return DONE
