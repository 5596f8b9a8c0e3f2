"""The state of a run: one frozen record, a pytree of tensors. Nothing about the run lives anywhere else."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import attrs
from torch import Tensor

from fds import _html, tree
from fds.errors import DonatedStateError

_GIVEN_UP = (
    "a later state",
    (
        "use the result (`state, metrics = step(state, batch)`), leave out fds.donate, or copy first: "
        "fds.tree.map(torch.clone, state)"
    ),
)
_LOST = (
    "parts of one: the step that wrote over them has not returned",
    ("if it failed, load the last save; without fds.donate a step that fails leaves its state as it was"),
)


@attrs.define(eq=False)
class Token:
    """Whether a state's buffers may be read: a donating step marks the token as spent at its first write."""

    spent_at: int | None = None  # the value of `calls` of the donated state
    became: bool = False  # whether the step that it was given to returned
    readers: set[object] = tree.new(set)  # saves that still read the buffers; they are not overwritten until then
    memory: Any = attrs.field(default=None, repr=False)  # a donating step's cache about the buffers
    before: list[weakref.ref[State]] = tree.new(list, repr=False)  # donated states with the same tensors

    @classmethod
    def after(cls, old: State, memory: Any) -> Token:
        """Return the token of the state that takes over the tensors of a donated one."""
        return cls(memory=memory, before=[ref for ref in old.token.before if ref() is not None] + [weakref.ref(old)])

    def __reduce__(self) -> tuple[type[Token], tuple[int | None, bool]]:
        return Token, (self.spent_at, self.became)  # a copy has tensors of its own


@tree.record
class State:
    """Everything that a step reads and writes.

    Its leaves are tensors, and the dotted key path of a leaf is its name in files and in errors.
    `attrs.evolve` makes a state that shares memory with the original, so that donating one donates both;
    `fds.tree.map(torch.clone, state)` makes an independent copy.
    """

    step: Tensor  # () int64, on the device: updates applied
    calls: Tensor  # () int64, on the CPU: calls made, skipped ones included
    params: Any  # the user's tree, master precision
    opt: dict[str, dict[str, Tensor]]  # slot of the optimizer -> parameter name -> tensor of its shape
    buffers: dict[str, Tensor]  # module statistics by name
    slots: dict[str, Any]  # name of a transform -> what it keeps between steps
    key: Tensor  # (2,) int64, on the CPU
    token: Token = tree.fresh(factory=Token, repr=False)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return what a notebook shows; without it one would ask for the `repr` too, which reads every element."""
        given_up = self.token.spent_at is not None
        size = "given to a donating step" if given_up else _html.num_bytes(tree.num_bytes(self))
        return {"text/plain": f"State({size})", "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        """Return what it holds, by names, shapes, dtypes and bytes: no element is read, and no device waited for."""
        given_up = self.token.spent_at is not None
        if given_up:
            return _html.box("State", _html.text("given to a donating step, which wrote over it: use what it returned"))
        leaves = tree.paths(self)
        groups: dict[str, dict[str, Tensor]] = {}
        for path, leaf in leaves.items():
            words = path.split(".")
            groups.setdefault(".".join(words[: 2 if words[0] in ("opt", "slots") else 1]), {})[path] = leaf
        rows = [(name, f"{len(group)}", *_summary(group.values())) for name, group in groups.items()]
        each = [(path, tuple(leaf.shape), *_summary([leaf])[1:]) for path, leaf in leaves.items()]
        return _html.box(
            "State",
            _html.table(rows, head=("", "leaves", "elements", "bytes", "dtype", "device"), right=(1, 2, 3)),
            _html.closed("leaves", _html.table(each, head=("leaf", "shape", "bytes", "dtype", "device"), right=(2,))),
        )

    def check(self, doing: str) -> None:
        """Raise `DonatedStateError` if a donating step has written over this state."""
        if self.token.spent_at is not None:
            holds, hint = _GIVEN_UP if self.token.became else _LOST
            raise DonatedStateError(
                f"{doing}: this state was donated, and its buffers now hold {holds}",
                where=f"call {self.token.spent_at}",
                got="a state that was already passed to a donating step",
                want="the state which that step returned",
                hint=hint,
            )


def _summary(leaves: Iterable[Tensor]) -> tuple[str, str, str, str]:
    """Return elements, bytes, dtypes and devices of tensors, as text."""
    leaves = list(leaves)
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in leaves)
    devices = dict.fromkeys(str(x.device) for x in leaves)
    size = _html.num_bytes(sum(x.numel() * x.itemsize for x in leaves))
    return f"{sum(x.numel() for x in leaves):,}", size, ", ".join(dtypes), ", ".join(devices)
