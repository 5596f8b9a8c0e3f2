"""Tests that are swept over a product of cases: `make test` runs some of them, `make sweeps` all.

    @pytest.mark.sweep       # every value of every parameter is in one of the cases that run
    @pytest.mark.sweep(2)    # every pair of values
    @pytest.mark.whole       # of a test or a row: others hold what it holds, and it runs in `make sweeps` alone

Hypothesis draws half as many examples in `make test` as in `make sweeps`, and Triton compiles a part of the launches.
Of the requests that a save makes of the file system every third fails in `make test`, every one in `make sweeps`; what
takes `STRIDE` is marked too, so that it runs there.
`FDS_SWEEPS=whole` asks for all. What is named on the command line, or chosen by -k, is thinned among itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from tests import devices
from tests.pairs import covering

# Mutants, other processors and a GPU have all cases: there a case that is missing would be evidence that is missing.
WHOLE = os.environ.get("FDS_SWEEPS") == "whole" or devices.NAME == "cuda"
STRIDE = 1 if WHOLE else 3  # from one request that fails to the next


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of swept tests that a cover of the others' values, or pairs of values, does without."""
    swept: dict[str, list[pytest.Item]] = {}
    out: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("whole"):
            out.append(item)
        elif item.get_closest_marker("sweep") and hasattr(item, "callspec"):
            swept.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in swept.values():
        marker = cases[0].get_closest_marker("sweep")
        assert marker is not None
        rows = [(case, tuple(_key(value) for value in case.callspec.params.values())) for case in cases]
        kept = set(covering([row for _, row in rows], *(marker.args or (1,))))
        out += [case for case, row in rows if row not in kept]
    return out


def _key(value: Any) -> tuple[type, Any]:
    """Return what is equal for equal values of one type, and for one object."""
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value
