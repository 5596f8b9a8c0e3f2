"""Masks of the momentum: which elements of a parameter an optimizer never moves, by patterns of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from fds.errors import OptimizerError, did_you_mean
from fds.layout import Segment


@attrs.frozen(eq=False)
class Masks:
    """Tensors of 0 and 1 by pattern, for the momentum of the parameters whose names match."""

    factory: str  # the optimizer, in errors
    by_pattern: Mapping[str, Tensor]

    @classmethod
    def of(cls, factory: str, masks: Any) -> Masks:
        """Return the masks of an argument `exp_avg_mask`. Raises `OptimizerError` for anything but tensors by name."""
        if masks is None:
            return cls(factory, {})
        good = isinstance(masks, Mapping) and all(
            isinstance(x, Tensor) and isinstance(k, str) for k, x in masks.items()
        )
        if not good:
            raise OptimizerError(
                f"{factory}: exp_avg_mask is not tensors by name",
                where="exp_avg_mask",
                got=repr(masks)[:80],
                want="{pattern: tensor of 0 and 1, ...}",
            )
        return cls(factory, {pattern: mask.detach() for pattern, mask in masks.items()})

    def masked(self, x: Tensor, segment: Segment) -> Tensor:
        """Return x (n,), the momentum of a parameter, times the mask of the first pattern that its name matches."""
        mask = self._of(segment)
        return x if mask is None else x * _flat(mask, segment).to(x)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `OptimizerError` for a pattern that no parameter's name matches."""
        for pattern in self.by_pattern:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise OptimizerError(
                    f"{self.factory}: a pattern matches no parameter",
                    where=f"exp_avg_mask, {pattern!r}",
                    got=f"{len(names)} parameters",
                    want="the name of a parameter, with * for any part of it",
                    hint=did_you_mean(pattern, names) if names else "there is no trainable parameter",
                )

    def check_shapes(self, segments: Sequence[Sequence[Segment]]) -> None:
        """Raise `OptimizerError` for a mask of a shape that does not expand to its parameter's."""
        for segment in (s for inside in segments for s in inside):
            mask = self._of(segment)
            if mask is None:
                continue
            try:
                _flat(mask, segment)
            except RuntimeError as error:
                raise OptimizerError(
                    f"{self.factory}: a mask has another shape than its parameter",
                    where=f"exp_avg_mask, {segment.name}",
                    got=str(tuple(mask.shape)),
                    want=f"a shape that expands to {tuple(segment.shape)}",
                ) from error

    def _of(self, segment: Segment) -> Tensor | None:
        matching = (mask for pattern, mask in self.by_pattern.items() if fnmatch.fnmatchcase(segment.name, pattern))
        return next(matching, None)


def _flat(mask: Tensor, segment: Segment) -> Tensor:
    """Return a mask for every element of a parameter (n,)."""
    return mask.expand(segment.shape).reshape(-1)
