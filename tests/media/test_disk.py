"""Leaves on a real disk: values, neighbours, memory, space, threads."""

import fcntl
import gc
import os
import struct
import threading
import time

import torch
from hypothesis import given, settings, strategies as st

import fds
from fds import media
from fds.media.drive import PIECE
from fds.media.mapping import leaves as living
from fds.step.pool import Buffers

CPU = torch.device("cpu")


def drive(disk):
    return disk._open[0]


def fill(disk, values):
    made = [disk.make(x) for x in values]
    disk.write(values, made)()
    return made


def allocated(disk) -> int:
    """Return the bytes of the disk that the file takes, without what the file system takes to know where they are.

    ext4 counts the latter in `st_blocks`, and gives a block of it back when extents become one: 1 run in 20.
    """
    fd, most = drive(disk).arena.file.fd, 4096
    found = bytearray(struct.pack("QQIIII", 0, 2**64 - 1, 1, 0, most, 0) + bytes(56 * most))
    try:
        fcntl.ioctl(fd, 0xC020660B, found)  # FS_IOC_FIEMAP, synchronised
    except OSError:  # a file system in memory
        return os.fstat(fd).st_blocks * 512
    count = struct.unpack_from("I", found, 20)[0]
    assert count < most
    return sum(struct.unpack_from("QQQ", found, 32 + 56 * i)[2] for i in range(count))


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Counted:
    """Threads that count what they are given."""

    def __init__(self, inner):
        self.inner, self.clock, self.pieces = inner, inner.clock, []

    def start(self, pieces):
        self.pieces += [(one.offset, len(one.memory)) for one in pieces]
        self.inner.start(pieces)


def test_leaves_of_all_sizes_read_as_they_were_written(tmp_path):
    disk = fds.disk(tmp_path, queue_depth=3)
    sizes = [1, 3, 1023, 1024, 1025, PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, 2 * PIECE]
    values = [torch.randn(n) for n in sizes] + [torch.tensor(True), torch.randn(5).to(torch.float8_e4m3fn)]
    made = fill(disk, values)
    for x, leaf, copy in zip(values, made, disk.read(made, CPU)(), strict=True):
        for y in (leaf, copy):
            assert torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
    assert str(disk) == f"disk {tmp_path}"


@settings(max_examples=25)
@given(
    orders=st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "set", "look", "part", "remake"]), st.integers(0, 4), st.integers(0, 99)
        ),
        max_size=25,
    )
)
def test_the_mapping_and_direct_requests_see_each_other(tmp_path_factory, orders):
    disk = fds.disk(tmp_path_factory.getbasetemp())
    values = [torch.full((size,), float(size)) for size in (1, 1000, 1024, 3000, 70000)]
    made = fill(disk, values)
    for what, i, seed in orders:
        new = torch.arange(values[i].numel()) * 100.0 + seed
        if what == "write":
            disk.write([new], [made[i]])()
            values[i] = new
        elif what == "set":
            made[i].copy_(new)
            values[i] = new
        elif what == "part":
            half = new.numel() // 2
            disk.write([new[half:]], [made[i][half:]])()
            values[i] = torch.cat([values[i][:half], new[half:]])
            (read,) = disk.read([made[i][half:]], CPU)()
            assert torch.equal(read, new[half:])
        elif what == "remake":
            made[i] = disk.make(new)
            disk.write([values[i]], [made[i]])()
        elif what == "read":
            assert all(map(torch.equal, disk.read(made, CPU)(), values))
        else:
            assert torch.equal(made[i], values[i])
    assert all(map(torch.equal, disk.read(made, CPU)(), values)) and all(map(torch.equal, made, values))


def test_many_small_leaves_are_one_request(tmp_path):
    disk = fds.disk(tmp_path)
    values = list(torch.randn(500_001)[1:].view(500, 1000))  # none of which begins with a page
    made = [disk.make(x) for x in values]
    drive(disk).threads = counted = Counted(drive(disk).threads)
    disk.write(values, made)()
    assert len(counted.pieces) == 1
    read = disk.read(made, CPU)()
    assert len(counted.pieces) == 2 and all(map(torch.equal, read, values))
    disk.write(read, made[:250] + [disk.make(x) for x in values[250:]])()
    assert len(counted.pieces) == 4


def test_what_was_read_is_written_without_a_copy(tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=2**20, buffers=1)
    old, new = fill(disk, [torch.randn(2**18)]), [disk.make(torch.empty(2**18))]
    read = disk.read(old, CPU)()
    before = drive(disk).buffers._slab._ranges.nbytes
    disk.write(read, new)()
    assert before == drive(disk).buffers._slab._ranges.nbytes == 0
    assert torch.equal(read[0], new[0])


def test_a_leaf_is_held_by_nobody_but_its_tensor(tmp_path):
    disk = fds.disk(tmp_path)
    (leaf,) = fill(disk, [torch.randn(10, 10)])
    disk.read([leaf], CPU)()
    assert Buffers.of([leaf]).counts() == Buffers.of([torch.empty(10, 10)]).counts()


def test_space_that_nobody_holds_is_used_again(tmp_path):
    disk = fds.disk(tmp_path)
    kept = fill(disk, [torch.randn(1000)])
    made = fill(disk, [torch.randn(2**18) for _ in range(8)])
    taken = allocated(disk)
    for _ in range(5):
        made.clear()
        made += fill(disk, [torch.randn(2**18) for _ in range(8)])
        assert allocated(disk) == taken
    assert kept[0].abs().sum() > 0


def test_more_space_than_is_held_goes_back_to_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("fds.media.arena._KEEP", 2**20)
    disk = fds.disk(tmp_path)
    values = torch.randn(1000)
    kept = fill(disk, [values])
    made = fill(disk, [torch.randn(2**20) for _ in range(4)])
    before = allocated(disk)
    assert before >= 2**24
    del made
    gc.collect()
    assert allocated(disk) <= 2**21
    again = fill(disk, [torch.arange(2**20) * 1.0 for _ in range(4)])
    assert before - 2**21 <= allocated(disk) <= before
    assert torch.equal(kept[0], values) and all(torch.equal(x, torch.arange(2**20) * 1.0) for x in again)


def test_the_file_is_gone_with_the_last_leaf_and_the_disk(tmp_path):
    disk = fds.disk(tmp_path)
    made = fill(disk, [torch.randn(5)])
    fd, alive = drive(disk).arena.file.fd, len(living)
    del disk
    gc.collect()
    assert os.listdir(tmp_path) == ["fds.lock-0"] and os.fstat(fd).st_nlink == 0
    del made
    gc.collect()
    assert os.listdir(tmp_path) == [] and len(living) == alive - 1
    again = fds.disk(tmp_path)
    assert fill(again, [torch.ones(2)])[0].sum() == 2


def test_the_memory_of_a_stream_is_that_of_the_buffers(tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=2**24, buffers=3)
    chunks = [[disk.make(torch.empty(2**20)) for _ in range(4)] for _ in range(8)]
    for i, chunk in enumerate(chunks):
        disk.write([torch.full((2**20,), i + j / 4) for j in range(4)], chunk)()
    gc.collect()
    before, most = resident(), 0
    reading = disk.read(chunks[0], CPU)
    writing = None
    for i in range(len(chunks)):
        read = reading()
        if i + 1 < len(chunks):
            reading = disk.read(chunks[i + 1], CPU)
        for x in read:
            x.add_(1)
        if writing is not None:
            writing()
        writing = disk.write(read, chunks[i])
        most = max(most, resident())
    writing()
    assert most - before < 3 * 2**24 + 2**22
    del read, reading, writing, x
    assert drive(disk).buffers._slab.take([2**24] * 3) is not None  # all of it is free again
    got = [[float(x[0]) for x in chunk] for chunk in chunks]
    assert got == [[i + j / 4 + 1 for j in range(4)] for i in range(len(chunks))]


def test_results_beyond_the_buffers_get_memory_of_their_own(tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=2**16, buffers=2)
    values = [torch.randn(2**14) for _ in range(6)]
    made = fill(disk, values)
    held = [disk.read([x], CPU)() for x in made]
    assert all(torch.equal(x, y) for (x,), y in zip(held, values, strict=True))
    assert len({x.data_ptr() for (x,) in held}) == 6
    (large,) = fill(disk, [torch.randn(2**16)])
    assert torch.equal(disk.read([large], CPU)()[0], large)


def test_what_one_looked_at_does_not_stay_in_memory(tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=2**25, buffers=1)
    made = fill(disk, [torch.ones(2**23)])
    disk.read(made, CPU)()
    before = resident()
    assert made[0].sum() == 2**23 and resident() - before > 2**24
    disk.read(made, CPU)()
    assert resident() - before < 2**22


def test_threads_read_and_write_at_once(tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=2**16, buffers=2)
    wrong = []

    def work(number):
        try:
            torch.manual_seed(number)
            made = fill(disk, [torch.full((5000 + number,), float(number)) for _ in range(3)])
            for _ in range(10):
                read = disk.read(made, CPU)()
                made = [disk.make(x) for x in read] if number % 2 else made
                disk.write([x.add_(1) for x in read], made)()
            assert all(torch.equal(x, torch.full_like(x, number + 10.0)) for x in disk.read(made, CPU)())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_disks_of_one_directory_share_its_file(tmp_path):
    one, two = fds.disk(tmp_path), fds.disk(str(tmp_path), queue_depth=1)
    made = fill(one, [torch.ones(3)]) + fill(two, [torch.zeros(3)])
    assert drive(one).arena is drive(two).arena
    assert [x.sum() for x in media.read(made, CPU)()] == [3, 0]
    assert [media.medium_of(x) for x in made] == [one, two]


def test_leaves_that_are_dropped_while_they_are_written_are_not_given_away(tmp_path):
    disk = fds.disk(tmp_path)
    for _ in range(20):
        leaf = disk.make(torch.empty(2**18))
        disk.write([torch.ones(2**18)], [leaf])
        del leaf
        other = fill(disk, [torch.full((2**18,), 2.0)])
        assert torch.equal(disk.read(other, CPU)()[0], torch.full((2**18,), 2.0))


def test_threads_end_with_the_disk(tmp_path):
    def ours():
        return [one for one in threading.enumerate() if one.name == "fds-disk"]

    before = len(ours())
    disk = fds.disk(tmp_path, queue_depth=5)
    fill(disk, [torch.ones(1)])
    assert len(ours()) == before + 5
    del disk
    gc.collect()
    end = time.monotonic() + 20
    while len(ours()) > before and time.monotonic() < end:
        time.sleep(0.001)
    assert len(ours()) <= before
