"""Ownership: which layers each stage has, which rank holds which parameters, and what tied ones need."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import loss as losses, tree
from fds.collectives import Axis
from fds.collectives.traffic import Expected
from fds.errors import LossError
from fds.step import Owned, Placement
from fds.transforms.pipeline.packets import Shape


@attrs.frozen(slots=False, eq=False, repr=False)
class Ownership(Placement):
    """Stages of consecutive layers on the ranks of an axis; without one, all on this process."""

    loss: losses.Layers
    boundaries: tuple[int, ...]  # stage s has the layers from boundaries[s] to boundaries[s + 1]
    placement: Mapping[int, int]  # stage -> rank
    axis: Axis | None
    channel: Axis | None  # of the axis, for tied parameters
    traced: Mapping[str, tuple[int, ...]]  # whole shapes of all parameters

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.boundaries) - 1

    @property
    def index(self) -> int:
        """This rank's coordinate."""
        return 0 if self.axis is None else self.axis.index

    @property
    def device(self) -> torch.device:
        """The device whose tensors ranks send."""
        return torch.device("cpu") if self.axis is None else self.axis.device

    def layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    @functools.cached_property
    def own_stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        everything = range(self.num_stages)
        return tuple(s for s in everything if self.axis is None or self.placement[s] == self.axis.index)

    @functools.cached_property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter, in order; parameters in the order of the whole loss."""
        users: dict[str, tuple[int, ...]] = {}
        for stage in range(self.num_stages):
            for name in dict.fromkeys(name for i in self.layers(stage) for name in self.loss.layer(i).params):
                users[name] = (*users.get(name, ()), stage)
        return users

    @property
    def owns(self) -> bool:
        """Whether ranks hold different parameters."""
        return self.axis is not None

    @property
    def split(self) -> tuple[Axis, ...]:
        """Nothing: what a rank owns it has whole."""
        return ()

    def lies(self, name: str) -> Owned:
        """Say which ranks hold a parameter, or a buffer, the one of its first stage first."""
        return Owned(self.ranks(name) if name in self.stages else self.buffers.get(name, ()))

    def copies(self, name: str | None, *, sliced: bool) -> tuple[int, int]:
        """Say that no other rank along the axis holds the same: of what several own, the first of them speaks."""
        return 0, 1

    def names(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of all parameters of the loss."""
        return tuple(self.stages)

    def shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters of the loss."""
        return {name: shapes.get(name, self.traced[name]) for name in self.stages}

    def holds(self, name: str) -> bool:
        """Say whether a stage of this process has a parameter, or a buffer."""
        return name in self.local_names

    def kind(self, name: str) -> Hashable:
        """Return the stages that have a parameter: buckets mix neither stages nor what other ranks hold too."""
        return self.stages[name]

    def counts(self, names: Sequence[str | None]) -> list[bool]:
        """Say whether this rank is the first that holds each parameter."""
        return [name is None or self.ranks(name)[0] == self.index for name in names]

    @functools.cached_property
    def local_names(self) -> frozenset[str]:
        """The names of the parameters and buffers of this process."""
        layers = [self.loss.layer(i) for stage in self.own_stages for i in self.layers(stage)]
        return frozenset(name for layer in layers for name in (*layer.params, *layer.buffers))

    @functools.cached_property
    def buffers(self) -> dict[str, tuple[int, ...]]:
        """The rank that has each buffer."""

        def rank(stage: int) -> int:
            return 0 if self.axis is None else self.placement[stage]

        each = (
            (name, stage)
            for stage in range(self.num_stages)
            for i in self.layers(stage)
            for name in self.loss.layer(i).buffers
        )
        return {name: (rank(stage),) for name, stage in each}

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks that hold a parameter, the one of its first stage first."""
        if self.axis is None:
            return (0,)
        return tuple(dict.fromkeys(self.placement[stage] for stage in self.stages[name]))

    def check_shared_buffers(self) -> None:
        """Raise `LossError` for a layer with buffers that is tied across stages: they could not be updated in order."""
        seen: dict[str, int] = {}
        for stage in range(self.num_stages):
            for name in {name for i in self.layers(stage) for name in self.loss.layer(i).buffers}:
                if seen.setdefault(name, stage) != stage:
                    raise LossError(
                        "a layer with buffers is tied across stages, which would each have their own",
                        where=name,
                        got=f"stages {seen[name]} and {stage}",
                        want="all its uses in one stage",
                        hint="another partition, or a layer without buffers",
                    )

    def draws(self, loss: losses.Layers) -> list[bool]:
        """Return which calls of the loss this process makes and may draw in: layers, then the criterion."""
        mine = {i for stage in self.own_stages for i in self.layers(stage)}
        last = self.num_stages - 1 in self.own_stages
        return [i in mine and loss.layer(i).draws for i in range(len(loss))] + [last]

    def share(self, name: str, x: Tensor) -> None:
        """Give a tied parameter the values that it has on the first of its ranks, in place."""
        owners = self.ranks(name)
        if len(owners) > 1 and x.numel():
            self._spread(x.view(-1), owners)

    def add_up(self, name: str, grad: Tensor) -> None:
        """Sum the contiguous gradient of a tied parameter over its ranks, in place, on the first and in their order."""
        owners, flat = self.ranks(name), grad.view(-1)
        if len(owners) < 2 or not flat.numel():
            return
        assert self.channel is not None
        if self.index == owners[0]:
            theirs = torch.empty_like(flat)
            for other in owners[1:]:
                self.channel.start_recv(theirs, other).wait()
                flat.add_(theirs)
        else:
            self.channel.start_send(flat, owners[0]).wait()
        self._spread(flat, owners)

    def messages(self, name: str, numel: int, dtype: torch.dtype) -> list[Expected]:
        """Return the messages of `add_up` on this rank: the first takes all gradients, and sends their sum."""
        owners = self.ranks(name)
        if len(owners) < 2 or not numel:
            return []
        assert self.channel is not None
        first = self.index == owners[0]
        others = owners[1:] if first else owners[:1]
        return [Expected.of(self.channel, op, numel, dtype, peer=peer) for op in ("recv", "send") for peer in others]

    def _spread(self, flat: Tensor, owners: Sequence[int]) -> None:
        assert self.channel is not None
        if self.index != owners[0]:
            self.channel.start_recv(flat, owners[0]).wait()
            return
        for work in [self.channel.start_send(flat, other) for other in owners[1:]]:
            work.wait()

    def collect(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters, or the buffers, of all stages on every rank of the axis, given those of this one."""
        if self.axis is None:
            return held
        kinds: dict[str, tuple[int, str, list[int]]] = {}
        descriptions = {name: [str(x.dtype)[6:], list(x.shape)] for name, x in held.items()}
        for rank, theirs in enumerate(self.axis.exchange(descriptions, "params")):
            for name, (dtype, shape) in theirs.items():
                kinds.setdefault(name, (rank, dtype, shape))
        whole: dict[str, Tensor] = {}
        for name in [*(n for n in self.stages if n in kinds), *(n for n in kinds if n not in self.stages)]:
            rank, dtype, shape = kinds[name]
            mine = rank == self.index  # what others send is not written over a state's own memory
            x = held[name] if mine else torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            whole[name] = self._broadcast(x.contiguous(), rank)
        return whole

    def from_last(self, value: Any = None, header: dict[str, Any] | None = None) -> Any:
        """Return on every rank of the axis what the rank of the last stage has, and describes in the header."""
        if self.axis is None:
            return value
        source = self.placement[self.num_stages - 1]
        shape = Shape.of(self.axis.exchange(header, "outputs")[source])
        assert shape is not None
        if self.index == source:
            tensors = [x.contiguous() for x in tree.leaves(value) if isinstance(x, Tensor)]
        else:
            kinds = [kind for kind in shape.tensors if kind is not None]
            tensors = [torch.empty(s, dtype=dtype, device=self.device) for dtype, s, _ in kinds]
        packet = shape.packet([self._broadcast(x, source) for x in tensors])
        return packet.build(packet.leaves)

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        assert self.axis is not None
        if x.numel():
            self.axis.start_broadcast(x.view(-1).view(torch.uint8), source).wait()
        return x

    def __repr__(self) -> str:
        spans = [
            f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
            for layers in map(self.layers, range(self.num_stages))
        ]
        return " | ".join(spans)
