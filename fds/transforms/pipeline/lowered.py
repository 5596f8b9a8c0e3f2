"""A plan as one rank runs it: lowered, with what must be known of it beforehand."""

from __future__ import annotations

import functools

import attrs

from fds.plans import Action, Op, Plan, assign_buffers, communicate, forwards_of, linear, overlap, simulate


@attrs.frozen(slots=False, eq=False)
class Lowered:
    """A plan, and this rank's part of it; `index` is None where one process does all."""

    plan: Plan
    index: int | None
    early: bool  # receives may begin before they are needed

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a batch is cut into."""
        return self.plan.num_microbatches

    @functools.cached_property
    def whole(self) -> Plan:
        """The plan of all ranks with its messages and buffers."""
        plan = communicate(self.plan)
        return assign_buffers(overlap(plan) if self.early else plan)

    @functools.cached_property
    def row(self) -> tuple[Action, ...]:
        """What this rank does."""
        assert self.index is not None
        return self.whole.rows[self.index]

    @functools.cached_property
    def places(self) -> dict[Action, int]:
        """Of every action of the plan, its place in an order of all."""
        return {action: place for place, (_, action) in enumerate(linear(self.whole))}

    @functools.cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch)s whose backward is in two halves."""
        actions = (a for row in self.plan.rows for a in row)
        return frozenset((a.stage, a.microbatch) for a in actions if a.op is Op.BACKWARD_WEIGHT)  # type: ignore[misc]

    @functools.cached_property
    def final(self) -> Action | None:
        """The last backward that completes a sum on this rank."""
        actions = [a for _, a in linear(self.plan)] if self.index is None else self.row
        ends = [a for a in actions if a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
        return ends[-1] if ends else None

    @property
    def reads(self) -> bool:
        """Whether this rank has the first or the last stage, which need the batch."""
        ends = {self.plan.placement[0], self.plan.placement[self.plan.num_stages - 1]}
        return self.index is None or self.index in ends

    @functools.cached_property
    def bubble(self) -> float:
        """The bubble's share of the time, if all stages cost the same."""
        return simulate(self.plan).bubble_fraction

    def forwards(self, num_microbatches: int) -> Lowered:
        """Return the plan of forwards alone, for stages that lie where this plan has them."""
        return Lowered(forwards_of(self.plan.placement, num_microbatches), self.index, self.early)
