"""Versions of a leaf: what ranks that train apart between synchronisations each have of the same parameter.

The first has the leaf's own name, so that whoever knows nothing of the others reads that; version r of `params.w` is
`params.w@version1`.
"""

from __future__ import annotations

import re
from collections.abc import Container

_NAME = re.compile(r"(?P<leaf>.*)@version(?P<index>[1-9]\d*)", re.DOTALL)


def versioned(name: str, index: int) -> str:
    """Return the name of version `index` of a leaf."""
    return f"{name}@version{index}" if index else name


def parsed(name: str) -> tuple[str, int]:
    """Return the name of a leaf without its version, and the version.

    >>> parsed("params.w@version3"), parsed("params.w")
    (('params.w', 3), ('params.w', 0))
    """
    found = _NAME.fullmatch(name)
    return (name, 0) if found is None else (found["leaf"], int(found["index"]))


def nearest(name: str, have: Container[str]) -> str:
    """Return which of the versions of a leaf version r goes on from: of n that there are, r modulo n."""
    leaf, index = parsed(name)
    count = 1
    while versioned(leaf, count) in have:
        count += 1
    return versioned(leaf, index % count)
