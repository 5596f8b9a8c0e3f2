"""What a checkpoint of torch.distributed.checkpoint (DCP) holds, and its writing by torch's own writer."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fds.errors import StorageError, did_you_mean
from fds.layout import Box
from fds.optim import Optimizer, torch_groups
from fds.storage.format import boxes
from fds.storage.format.manifest import SavedLeaf
from fds.storage.format.tensors import DTYPES, in_memory
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.sharing import LeafPiece

Keys = tuple[str | int, ...]  # that lead to something in a state dict


def as_keys(text: str) -> Keys:
    """Return the keys that a text has with dots between."""
    return tuple(text.split(".")) if text else ()


def writer_of(folder: str) -> FileSystemWriter:
    """Return torch's writer of files in a folder."""
    return FileSystemWriter(folder, overwrite=False)


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys))


@attrs.frozen(eq=False)
class Plan:
    """What a checkpoint will hold: the same on all ranks.

    Attributes:
        keys: where a leaf goes in the state dict, by key path; a tied one goes to several places.
        leaves: dtype and shape of what is written, by name in the checkpoint.
        values: other values, which the first rank writes.
    """

    keys: dict[str, list[Keys]] = attrs.field(factory=dict)
    leaves: dict[Keys, tuple[torch.dtype, tuple[int, ...]]] = attrs.field(factory=dict)
    values: dict[Keys, Any] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls, leaves: Mapping[str, SavedLeaf], dtype: torch.dtype | None, model: Keys, tied: Mapping[str, str]
    ) -> Plan:
        """Return the plan for a model's parameters and buffers; `tied` has more names, each with the one that it is of.

        Raises `StorageError` for a name of nothing, and a further name that something has already.
        """
        plan = cls()
        names = {path.partition(".")[2] for path in leaves if path.startswith(("params.", "buffers."))}
        for other, name in tied.items():
            if name not in names:
                hint = did_you_mean(name, sorted(names))
                raise StorageError("a name is tied to one that the model has not", where=f"tied[{other!r:.60}]",
                                   got=name[:80], hint=hint)  # fmt: skip
            if other in names:
                raise StorageError(
                    "two things would have one name", where=other[:80], want="other names than the model's"
                )
        for path, leaf in leaves.items():
            kind, _, name = path.partition(".")
            kept = DTYPES[leaf.dtype]
            if kind in ("params", "buffers"):
                as_ = dtype if dtype is not None and kept.is_floating_point else kept
                for each in (name, *(other for other, of in tied.items() if of == name)):
                    plan._add(path, (*model, each), as_, leaf.shape)
        return plan

    def _add(self, path: str, keys: Keys, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.keys.setdefault(path, []).append(keys)
        self.leaves[keys] = dtype, shape

    def add_optimizer(
        self,
        leaves: Mapping[str, SavedLeaf],
        optimizer: Optimizer,
        trained: Collection[str],
        updates: int,
        keys: Keys,
        *,
        flat: bool,
    ) -> None:
        """Plan an optimizer's slots, counts and groups. Raises `OptimizerError` for one that is not torch's."""
        shapes = {name: leaves[f"params.{name}"].shape for name in _in_order(leaves, trained)}
        state = lambda name, slot: (*keys, f"state.{name}.{slot}") if flat else (*keys, "state", name, slot)
        for path, leaf in leaves.items():
            _, slot, name = [*path.split(".", 2), "", ""][:3]
            if path.startswith("opt.") and name in shapes and leaf.shape == shapes[name]:
                self._add(path, state(name, slot), DTYPES[leaf.dtype], leaf.shape)
        for i, (group, counts) in enumerate(torch_groups(optimizer, shapes, updates)):
            for name in group["params"] if counts else ():
                self.leaves[state(name, "step")] = torch.float32, ()
                self.values[state(name, "step")] = torch.tensor(float(updates))
            each = [(("param_groups", i, key), x) for key, x in group.items()]
            if flat:
                pairs = ((key, x) for key, x in group.items() if key != "params")
                each = [((f"param_groups.{name}.{key}",), x) for key, x in pairs for name in group["params"]]
            self.values.update({(*keys, *at): x for at, x in each})

    def check(self) -> None:
        """Raise `StorageError` where two things would have one name."""
        names = [*self.leaves, *(keys for keys in self.values if keys not in self.leaves)]
        if twice := [name for name, count in Counter(map(_name, names)).items() if count > 1]:
            raise StorageError("two things would have one name", where=twice[0][:80], want="other keys for one of them")

    def write(self, writer: FileSystemWriter, pieces: Sequence[LeafPiece], ranks: Ranks) -> list[Any]:
        """Write what this rank has to a file; return for each item its name, box and place, as JSON."""
        tensors: dict[MetadataIndex, tuple[Tensor, Box]] = {}
        values: dict[MetadataIndex, bytes] = {}
        items: list[WriteItem] = []

        def add(keys: Keys, x: Tensor, box: Box) -> None:
            dtype, shape = self.leaves[keys]
            index = MetadataIndex(_name(keys), torch.Size(i for i, _ in box))
            chunk = ChunkStorageMetadata(torch.Size(i for i, _ in box), torch.Size(boxes.sizes(box)))
            about = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
            tensors[index] = x, box

        for piece in pieces:
            places, flat = self.keys[piece.name], piece.tensor.detach().reshape(-1)
            box = boxes.whole(self.leaves[places[0]][1]) if piece.box is None else piece.box
            for at, rectangle in boxes.rectangles(box, piece.start, piece.start + len(flat)):
                for keys in places:
                    add(keys, flat[at : at + boxes.numel(rectangle)], rectangle)
        for keys, value in self.values.items() if ranks.index == 0 else ():
            if keys in self.leaves:
                add(keys, value, ())
                continue
            index, data = MetadataIndex(_name(keys)), io.BytesIO()
            torch.save(value, data)
            values[index] = data.getvalue()
            items.append(WriteItem(index, WriteItemType.BYTE_IO, BytesIOWriteData(len(values[index]))))
        plan = writer.prepare_global_plan([SavePlan(items) for _ in range(ranks.size)])[ranks.index]
        dtypes = {_name(keys): dtype for keys, (dtype, _) in self.leaves.items()}
        written = writer.write_data(plan, _Pieces(tensors, values, dtypes)).wait() if items else []
        rows = []
        for result in written:
            box = tensors[result.index][1] if result.index in tensors else None
            rows.append([result.index.fqn, box, dataclasses.asdict(result.storage_data), result.size_in_bytes])
        return rows

    def finish(self, writer: FileSystemWriter, rows: Sequence[Sequence[Any]]) -> None:
        """Write `.metadata`, given what all ranks have written."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        results: list[WriteResult] = []
        for name, box, info, num_bytes in (row for of_rank in rows for row in of_rank):
            offset = None if box is None else torch.Size(i for i, _ in box)
            if box is not None:
                chunk = ChunkStorageMetadata(torch.Size(i for i, _ in box), torch.Size(n for _, n in box))
                chunks.setdefault(name, []).append(chunk)
            results.append(WriteResult(MetadataIndex(name, offset), num_bytes, StorageInfo(**info)))
        saved: dict[str, Any] = {}
        for keys, (dtype, shape) in self.leaves.items():
            name = _name(keys)
            about = TensorProperties(dtype=dtype), torch.Size(shape)
            saved[name] = TensorStorageMetadata(*about, chunks.get(name, []))
        others = [keys for keys in self.values if keys not in self.leaves]
        saved |= {_name(keys): BytesStorageMetadata() for keys in others}
        writer.finish(Metadata(saved, {_name(keys): keys for keys in (*self.leaves, *others)}), [results])


def _in_order(leaves: Mapping[str, SavedLeaf], trained: Collection[str]) -> list[str]:
    """Return the names of trained parameters in the order of the leaves."""
    names = (path.removeprefix("params.") for path in leaves if path.startswith("params."))
    return [name for name in names if name in trained]


@attrs.frozen(eq=False)
class _Pieces(SavePlanner):
    """What torch's writer asks for the data of an item, one at a time."""

    tensors: Mapping[MetadataIndex, tuple[Tensor, Box]]
    values: Mapping[MetadataIndex, bytes]
    dtypes: Mapping[str, torch.dtype]

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the elements of a box, in its shape and on the host, or the bytes of another value."""
        if write_item.index in self.values:
            return io.BytesIO(self.values[write_item.index])
        x, box = self.tensors[write_item.index]
        x = in_memory(x).to(self.dtypes[write_item.index.fqn]).resolve_conj().resolve_neg()
        return x.to("cpu").contiguous().view(boxes.sizes(box))

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: what is written is known."""

    def create_local_plan(self) -> SavePlan:
        """Return nothing: `Plan.write` plans."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans as they are: `Plan.finish` makes the metadata."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan
