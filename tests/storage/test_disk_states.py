"""States on a disk: saved by copying extents and loaded to them, with the bits and the memory of a few blocks."""

import os

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.media import extent_of, medium_of
from fds.storage.disk import writer
from fds.storage.disk.writer import BLOCK
from fds.storage.format.tensors import copy_to, in_memory, span_of
from tests import ranks
from tests.bits import assert_same_bits
from tests.laws import problems
from tests.storage.disk_memory import measure
from tests.storage.test_residency import PLACES, run

RANDOM = torch.Generator().manual_seed(0)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc that forgets a peak")
def test_saves_and_loads_of_204_mib_on_a_disk_take_two_blocks_of_memory(tmp_path):
    status, told = ranks.alone(measure, tmp_path)
    assert status == 0, told
    beyond = {line.partition(" ")[2]: int(line.split()[0]) for line in told.splitlines()}
    most = {
        "save": 2 * BLOCK,
        "save_async": 2**20,  # of this process; the one that writes has two blocks
        "load": 2 * BLOCK,
        "export": 4 * BLOCK,  # each block once more as it is cast, and malloc need not give either back
        "load and save on two ranks": 2 * 5 * BLOCK,  # each rank two to load and two to save, which stay with malloc
    }
    assert beyond.keys() == most.keys()
    assert all(num_bytes <= most[way] for way, num_bytes in beyond.items()), told


@pytest.mark.parametrize("name", PLACES)
def test_a_state_on_a_disk_is_loaded_to_a_disk_and_to_memory(tmp_path, name):
    place, problem = PLACES[name], problems.layers(3, torch.float32, 0.0, False)
    (tmp_path / "leaves").mkdir()

    def body():
        disk = fds.disk(tmp_path / "leaves")
        parts = [*(place.transforms() if place else []), fds.ema(0.9), fds.adamw(0.01)]
        plain = fds.compose(*parts)(problem.loss)
        step = fds.compose(fds.offload(moments=disk, masters=disk, averages=disk), *parts)(problem.loss)
        batch = problem.batch if place is None else place.batch(problem, plain)
        state, _ = step(step.init(problem.params, key=1), batch)
        want, _ = plain(plain.init(problem.params, key=1), batch)
        fds.save(tmp_path / "there", state, step)
        fds.save(tmp_path / "here", want, plain)
        for saved in ("there", "here"):
            assert_same_bits(fds.load(tmp_path / saved, plain, problem.params)[0], want)
            loaded, _ = fds.load(tmp_path / saved, step, problem.params)
            assert_same_bits(loaded, want)
            assert any(medium_of(x) is disk for x in tree.leaves(loaded.opt))
            assert [medium_of(x) for x in tree.leaves(loaded)] == [medium_of(x) for x in tree.leaves(state)]
        assert_same_bits(step(loaded, batch), plain(attrs.evolve(want), batch))

    run(place, body)


def test_a_save_in_the_background_copies_no_leaf_and_reads_what_donating_steps_leave_alone(tmp_path):
    disk = fds.disk(tmp_path)
    problem = problems.layers(3, torch.float32, 0.0, False)
    step = fds.compose(fds.offload(moments=disk, masters=disk), fds.donate(), fds.adamw(0.01))(problem.loss)
    state, _ = step(step.init(problem.params), problem.batch)
    want = tree.map(torch.clone, state)
    saving = fds.save_async(tmp_path / "run", state, step)
    for _ in range(3):
        state, _ = step(state, problem.batch)
    saving.wait()
    assert_same_bits(fds.load(tmp_path / "run", step, problem.params)[0], want)


@pytest.mark.parametrize("size", [1, 1023, 1024, 3_000_001])
def test_a_part_of_a_leaf_is_read_and_written_wherever_it_begins(tmp_path, size):
    leaf = fds.disk(tmp_path).make(torch.empty(size + 5, dtype=torch.bfloat16))
    values = torch.randn(size + 5, generator=RANDOM)
    copy_to(leaf, values)
    copy_to(leaf[3 : 3 + size], -values[3 : 3 + size])
    values[3 : 3 + size] *= -1
    assert torch.equal(in_memory(leaf[2:-1]), values[2:-1].bfloat16())
    assert torch.equal(leaf, values.bfloat16())  # through the mapping too
    assert extent_of(in_memory(leaf)) is None


def test_memory_and_extents_are_written_to_one_file_in_the_order_of_their_spans(tmp_path):
    disk, sizes = fds.disk(tmp_path), [3, BLOCK + 5, 0, 4096, BLOCK, 7]
    parts = [torch.randint(256, (n,), dtype=torch.uint8, generator=RANDOM) for n in sizes]
    held = [disk.make(x) if i % 2 else x for i, x in enumerate(parts)]
    for x, values in zip(held, parts, strict=True):
        copy_to(x, values)
    spans = [span_of(x) for x in held]
    assert [len(span) for span in spans] == [2, 3, 2, 3, 2, 3]
    chunks = writer.write(tmp_path / "file", bytes(4096), spans)
    data = (tmp_path / "file").read_bytes()
    assert data[4096:] == b"".join(x.numpy().tobytes() for x in parts)
    for found, n in zip(chunks, sizes, strict=True):
        assert sum(length for _, length, _ in found) == n
        assert all(writer.checksum(data[at : at + length]) == check for at, length, check in found)
