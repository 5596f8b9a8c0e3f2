"""Packets: what a stage passes to another, and the header that says what is in it.

A header has for every leaf dtype, shape and whether it wants a gradient, or the value itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import BatchError, LossError


@attrs.frozen(eq=False)
class Packet:
    """An activation: the leaves of a pytree, and which of them want a gradient."""

    leaves: list[Any]
    structure: Any
    wants: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Packet:
        """Return the packet of what a layer returned, or of a part of the batch."""
        leaves, structure = tree.parts(value)
        return cls(leaves, structure, tuple(isinstance(x, Tensor) and x.requires_grad for x in leaves))

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return a pytree of this structure."""
        return self.structure.unflatten(leaves)

    def loose(self) -> Packet:
        """Return the packet without its graph."""
        free = [x.detach() if isinstance(x, Tensor) else x for x in self.leaves]
        return Packet(free, self.structure, self.wants)

    def header(self, where: str) -> dict[str, Any]:
        """Return what the receiver must know, as JSON. Raises `LossError` for what cannot be sent."""
        try:
            structure = tree.dump_structure(self.structure)
        except Exception as error:  # whatever a container's own way to be written raises
            raise LossError(
                "a layer returned a container that cannot be sent to the next stage",
                where=where,
                got=str(error)[:200],
                want="tuples, lists, dicts, records of fds.tree.record",
            ) from error
        leaves = [_described(x, want, where) for x, want in zip(self.leaves, self.wants, strict=True)]
        return {"structure": structure, "leaves": leaves}


@attrs.frozen
class Shape:
    """What is known of a packet before it comes: of every leaf dtype, shape and whether it wants a gradient."""

    structure: Any
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], bool] | None, ...]  # None: the leaf is the value itself
    values: tuple[Any, ...]

    @classmethod
    def of(cls, header: dict[str, Any]) -> Shape | None:
        """Read a header; None where it says that the stage has failed."""
        if "failed" in header:
            return None
        tensors = tuple(
            (getattr(torch, leaf["dtype"]), tuple(leaf["shape"]), leaf["wants"]) if "dtype" in leaf else None
            for leaf in header["leaves"]
        )
        values = tuple(leaf.get("value") for leaf in header["leaves"])
        return cls(tree.load_structure(header["structure"]), tensors, values)

    def packet(self, tensors: Sequence[Tensor]) -> Packet:
        """Return the packet with these tensors in their places."""
        left = iter(tensors)
        leaves = [value if kind is None else next(left) for kind, value in zip(self.tensors, self.values, strict=True)]
        return Packet(leaves, self.structure, tuple(kind is not None and kind[2] for kind in self.tensors))


def _described(x: Any, wants: bool, where: str) -> dict[str, Any]:
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            raise LossError(
                "a layer returned a tensor that cannot be sent to the next stage",
                where=where,
                got=str(x.layout),
                want="a dense tensor",
                hint="x.to_dense() as the last layer of the stage",
            )
        return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "wants": wants}
    if x is None or isinstance(x, bool | int | float | str):
        return {"value": x}
    raise LossError(
        "a layer returned a value that cannot be sent to the next stage",
        where=where,
        got=repr(x)[:80],
        want="tensors, numbers, strings, None",
    )


def text_of(header: Any) -> str:
    """Return a header as it is sent: NaN is NaN, and 1 is not True."""
    return json.dumps(header)


def other_shape(header: Any, first: Any) -> BatchError:
    """Return the error of a packet whose header is another than that of the first."""

    def show(header: Any, other: Any) -> str:
        leaf: Callable[[Any], str] = lambda x: (
            f"{x['dtype']} {tuple(x['shape'])}" + ("" if x["wants"] else " without gradient")
            if "dtype" in x
            else repr(x["value"])
        )
        text = ", ".join(map(leaf, header["leaves"]))
        alike = text_of(header["structure"]) == text_of(other["structure"])
        return text if alike else f"{text} in {text_of(header['structure'])}"

    return BatchError(
        "microbatches make activations of different shapes or kinds",
        got=show(header, first),
        want=f"{show(first, header)}, as the first",
        hint="pipeline(..., dynamic_shapes=True)",
    )
