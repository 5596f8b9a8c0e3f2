"""Pieces of parameters in saves: boxes that any product of axes reads, reading no more than it needs."""

from __future__ import annotations

import collections
import json
import os
import threading
from typing import Any
from unittest import mock

import attrs
import pytest
import safetensors
import torch

import fds
from fds import storage, tree
from fds.errors import StorageError
from fds.storage.disk.reader import Files
from fds.storage.source import Source
from tests.bits import assert_same_bits
from tests.storage.page import assert_read, page_reader
from tests.tensor_axis.splitting import Place, model, share

HALVES, FUSED = [[0, 8], [8, 8]], [[0, 2], [2, 2], [4, 1], [5, 1], [6, 3], [9, 2]]
SPLIT = {  # over two ranks: the dim, and the ranges of its boxes
    "up.weight": (0, HALVES),
    "up.bias": (0, HALVES),
    "down.weight": (1, HALVES),
    "seen": (0, HALVES),
    "wide": (0, FUSED),
    "narrow": (1, FUSED),
    "odd": (0, [[0, 2], [2, 1]]),
}
PLACES = [
    Place(2),
    Place(data=2, zero=3),
    Place(2, stages=2),
    Place(2, data=2, zero=3),
    Place(4),
    Place(2, data=2, zero=1),
    Place(2, data=2, stages=2, zero=2),
    Place(stages=2),
    Place(2, data=2, zero=1, replicas=2),
]
PAIRS = list(zip(PLACES, [*PLACES[1:], PLACES[0]], strict=True))


def composed(place: Place, *more: Any) -> fds.Step:
    return place.step(fds.ema(0.9), *more, optimizer=fds.adamw(0.01))


def trained(place: Place, *more: Any, calls: int = 1) -> tuple[fds.Step, fds.State]:
    """Return this rank's step, and a state after some calls."""
    step = composed(place, *more)
    state = step.init(model(None).init, key=3)
    for call in range(calls):
        state, _ = step(state, share(step, call))
    return step, state


def leaves(source: Source) -> dict[str, torch.Tensor]:
    """Return all leaves of a source."""
    found = {}
    for name, leaf in source.leaves.items():
        found[name] = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype))
        source.read(name, 0, found[name].view(-1))
    return found


@pytest.mark.parametrize(("place", "other"), PAIRS, ids=str)
def test_any_product_of_axes_saves_what_any_other_loads(tmp_path, place, other):
    """What one rank, and many others, load and save again is the same bits."""

    def save():
        step, state = trained(place)
        fds.save(tmp_path / "many", state, step, "a")
        whole = {"params": step.params(state), "averages": step.params(attrs.evolve(state, params=state.slots["ema"]))}
        return tree.paths(whole), step.dimensions.collect(state.buffers)

    def again():
        step = composed(other)
        state, _ = fds.load(tmp_path / "many", step, model(None).init)
        fds.save(tmp_path / "again", state, step, "a")

    for whole, buffers in fds.simulate(save, place.ranks):
        saved = leaves(storage.open_source(tmp_path / "many"))
        assert_same_bits(whole, {name: saved[name.replace("averages", "slots.ema")] for name in whole})
        assert_same_bits(buffers, {name: saved[f"buffers.{name}"] for name in buffers})
    assert storage.verify(tmp_path / "many") == []
    assert_same_bits(tree.paths(fds.load(tmp_path / "many", composed(Place()), model(None).init)[0]), saved)
    fds.simulate(again, other.ranks)
    assert storage.differences(tmp_path / "many", tmp_path / "again") == []


def test_the_pages_reader_puts_boxes_together(tmp_path):
    place = Place(2, data=2, zero=1)

    def body():
        step, state = trained(place)
        fds.save(tmp_path, state, step)

    fds.simulate(body, place.ranks)
    assert_read(page_reader()(tmp_path)[0], leaves(storage.open_source(tmp_path)))


def test_chunks_say_their_boxes_and_whole_leaves_have_none(tmp_path):
    fds.simulate(lambda: fds.save(tmp_path, *reversed(trained(Place(2))), "a"), 2)
    record = json.loads((tmp_path / "a" / "manifest.json").read_text())
    for name, leaf in record["leaves"].items():
        dim, ranges = next((one for end, one in SPLIT.items() if name.endswith(end)), (None, []))
        whole = [[0, n] for n in leaf["shape"]]
        want = [[*whole[:dim], one, *whole[dim + 1 :]] for one in ranges] if dim is not None else [None]
        assert [chunk["box"] for chunk in leaf["chunks"]] == want, name
    with safetensors.safe_open(tmp_path / "a" / "rank0.safetensors", "pt") as file:  # the boxes of a leaf are one
        assert file.get_slice("params.1.wide").get_shape() == [6 * 6]
    sizes = [(tmp_path / "a" / f"rank{i}.safetensors").stat().st_size for i in range(2)]
    assert abs(sizes[0] - sizes[1]) <= 2 * 4096  # what both hold they write in shares


def test_a_rank_reads_its_own_boxes_alone(tmp_path):
    def save():
        fds.save(tmp_path, *reversed(trained(Place(2))), "a")

    seen: dict[int, list] = {}
    plain = Files.read

    def reading(self, file, offset, out, checksum, where):
        seen.setdefault(threading.get_ident(), []).append((where.rpartition(": ")[2], out.numel()))
        return plain(self, file, offset, out, checksum, where)

    def load():
        state, _ = fds.load(tmp_path, composed(Place(2)), model(None).init)
        return seen[threading.get_ident()], {name: x.nbytes for name, x in tree.paths(state).items()}

    fds.simulate(save, 2)
    with mock.patch.object(Files, "read", reading):
        ranks = fds.simulate(load, 2)
    for found, held in ranks:
        read = collections.Counter[str]()
        for name, num_bytes in found:
            read[name] += num_bytes
        assert read == held


@pytest.mark.parametrize("place", [Place(2), Place(2, data=2, zero=1)], ids=str)
def test_parts_that_ranks_keep_to_themselves(tmp_path, place):
    def save():
        step, state = trained(place)
        fds.save(tmp_path / "local", state, step, "a", local=True)
        fds.save(tmp_path / "whole", state, step, "a")
        return tree.paths(state)

    def load(place):
        state, _ = fds.load(tmp_path / "local", step := composed(place), model(None).init, local=True)
        return tree.paths(state), step

    states = fds.simulate(save, place.ranks)
    for (found, _), want in zip(fds.simulate(lambda: load(place), place.ranks), states, strict=True):
        assert_same_bits(found, want)
    assert_same_bits(load(Place())[0], leaves(storage.open_source(tmp_path / "whole")))
    os.rename(tmp_path / "local" / "rank1", tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="this part of the save belongs to another rank"):
        load(Place())
    assert storage.verify(tmp_path / "local" / "rank0") == []


@pytest.mark.parametrize("place", [Place(2), Place(2, data=2, zero=1)], ids=str)
def test_weights_are_exported_and_imported_in_pieces(tmp_path, place):
    def save():
        step, state = trained(place)
        fds.save(tmp_path / "run", state, step)
        fds.export_weights(state, tmp_path / "ranks.safetensors", torch.float32, step=step)

    def load():
        step = composed(place)
        return step.params(fds.import_weights(tmp_path / "one.safetensors", step, model(None).init))

    fds.simulate(save, place.ranks)
    fds.export_weights(tmp_path / "run", tmp_path / "one.safetensors", torch.float32)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "ranks.safetensors").read_bytes()
    want = leaves(storage.open_source(tmp_path / "run"))
    for params in fds.simulate(load, place.ranks):
        assert_same_bits(params, {name: want[f"params.{name}"].float().double() for name in params})


def test_a_save_aside_has_boxes_too(tmp_path):
    def body():
        step, state = trained(Place(2))
        fds.save_async(tmp_path / "aside", state, step, "a").wait()
        fds.save(tmp_path / "here", state, step, "a")

    fds.simulate(body, 2)
    assert storage.differences(tmp_path / "aside", tmp_path / "here") == []


@pytest.mark.parametrize("place", [Place(2), Place(2, data=2, zero=3)], ids=str)
def test_pieces_on_a_disk_are_saved_and_loaded(tmp_path, place):
    places = fds.offload(*[fds.disk(tmp_path)] * 4)

    def body():
        fds.save(tmp_path / "memory", *reversed(trained(place)), "a")
        step, state = trained(place, places)
        fds.save(tmp_path / "disk", state, step, "a")
        again, _ = fds.load(tmp_path / "memory", step, model(None).init)
        assert_same_bits(tree.paths(again), tree.paths(state))

    fds.simulate(body, place.ranks)
    assert storage.differences(tmp_path / "memory", tmp_path / "disk") == []


def test_ranks_that_claim_one_box_are_refused(tmp_path):
    def body():
        step, state = trained(Place(2))
        with pytest.raises(StorageError, match="chunks that do not tile their leaf"):
            fds.save(tmp_path, state, step)

    cells = fds.step.Dimensions.cells
    first = lambda shape: ((*shape[:-1], 2 * shape[-1]), tuple(((0, n),) for n in shape))
    wrong = lambda self, name, shape: first(shape) if name.endswith("down.weight") else cells(self, name, shape)
    with mock.patch.object(fds.step.Dimensions, "cells", wrong):
        fds.simulate(body, 2)
    assert not any(tmp_path.glob("*/manifest.json"))


def test_what_is_remembered_of_a_piece_in_another_shape_is_refused(tmp_path):
    @fds.step.transform
    def row_sums():
        init = lambda params, device: tree.map(lambda x: x.sum(-1) if len(x) == 8 else x.clone(), params)
        return lambda step: fds.step.fill(step, memory=fds.step.Memory("rows", init, "parameters"))

    def body():
        step = Place(2).step(row_sums(), optimizer=fds.sgd(0.1))
        state = step.init(model(None).init)
        with pytest.raises(StorageError, match="nothing says how this lies") as caught:
            fds.save(tmp_path, state, step)
        return caught.value.where

    assert fds.simulate(body, 2) == ["slots.rows.1.up.weight"] * 2
