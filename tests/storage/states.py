"""States made by hand, and steps that know only their structure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from fds import tree
from fds.state import State
from fds.step import Dimensions, Memory, Place
from fds.storage.format import manifest
from fds.storage.format.tensors import DTYPES


@attrs.frozen
class Template:
    """Stands where a step would: a structure and a composition."""

    state: State
    composition: tuple = ("adamw(0.1)",)
    dimensions: Dimensions = Dimensions()
    everyone: None = None
    place: Place = Place()
    memory: Mapping[str, Memory] = MappingProxyType({})

    def check(self, state: State) -> None:
        pass

    def structure(self, params: Any) -> State:
        return tree.map(lambda x: x.to("meta"), self.state)


def state_of(params: Any, *, calls: int = 0, opt=None, buffers=None, slots=None) -> State:
    return State(
        step=torch.tensor(calls),
        calls=torch.tensor(calls),
        params=params,
        opt=opt or {},
        buffers=buffers or {},
        slots=slots or {},
        key=torch.tensor([1, -2]),
    )


def small_state(calls: int = 0, width: int = 3) -> State:
    """Return a state whose every element says at which call it was reached."""
    weight, out = torch.full((4, width), float(calls)), torch.full((5,), calls, dtype=torch.bfloat16)
    params = {"in": {"weight": weight}, "out": out}
    return state_of(params, calls=calls, slots={"ema": tree.map(torch.clone, params)})


def num_calls(state: State) -> int:
    """Return the call at which a small state was reached; fail if its leaves disagree."""
    calls = {float(v) for name, x in tree.paths(state).items() if name != "key" for v in x.unique()}
    assert len(calls) == 1, f"leaves of several calls: {calls}"
    return int(calls.pop())


def rewrite(folder: Path, edit) -> None:
    """Change a manifest and give it the checksum that belongs to the change."""
    record = json.loads((folder / manifest.NAME).read_text())
    del record["checksum"]
    record = edit(record) or record
    (folder / manifest.NAME).write_text(json.dumps({**record, "checksum": manifest._checksum(record)}))


@st.composite
def tensors(draw) -> Tensor:
    """Draw a tensor of any dtype that fds saves, any bits, 0 to 3 dims, contiguous or not."""
    dtype = draw(st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
    if dtype is torch.bool:
        raw = bytearray(b & 1 for b in raw)
    flat = torch.frombuffer(raw, dtype=torch.uint8).clone() if raw else torch.empty(0, dtype=torch.uint8)
    x = flat.view(dtype).view(shape)
    if x.dim() > 1 and draw(st.booleans()):
        x = x.transpose(0, -1)
    if x.dim() and x.dtype.itemsize > 1 and not x.dtype.is_complex and draw(st.booleans()):
        x = torch.stack([x, x])[:, ::2].select(0, 1) if x.shape[0] else x
    return x


names = st.sampled_from(["a.b", "0", "", "__metadata__", '…é\n"\\', ".", "weight"]) | st.text(
    st.characters(codec="utf-8"), max_size=5
)


def trees(leaves=None) -> st.SearchStrategy[Any]:
    """Draw nested dicts, lists and tuples of tensors."""
    return st.recursive(
        tensors() if leaves is None else leaves,
        lambda t: st.dictionaries(names, t, max_size=3) | st.lists(t, max_size=3) | st.tuples(t, t),
        max_leaves=6,
    )


@st.composite
def states(draw) -> State:
    """Draw a state; its key paths are distinct."""
    calls = draw(st.integers(0, 2**40))
    tables = st.dictionaries(names, tensors(), max_size=2)
    return state_of(
        draw(trees()),
        calls=calls,
        opt=draw(st.dictionaries(names, tables, max_size=2)),
        buffers=draw(tables),
        slots=draw(st.dictionaries(names, trees(), max_size=2)),
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
    max_leaves=6,
)
