"""The native writer: the same bytes and chunks by every way, an error for every refusal, and nothing left behind."""

import contextlib
import errno
import fcntl
import gc
import os
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fds.storage.disk import aside, writer
from fds.storage.disk.writer import ALIGN, checksum, memory_of, write

ROOT = Path(__file__).parents[2]
HEADER = b"header  " * (ALIGN // 8)


@pytest.fixture(autouse=True)
def nothing_is_left(few_objects):
    gc.collect()  # what tests before this one held
    threads, fds = threading.active_count(), os.listdir("/proc/self/fd")
    yield
    while aside._idle:
        aside._idle.pop().close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= len(fds)


@contextlib.contextmanager
def small_blocks(nbytes=2 * ALIGN):
    """Write in small blocks, with no block of another size at hand before or after."""
    with mock.patch.object(writer, "BLOCK", nbytes), mock.patch.object(writer, "_idle_slots", []):
        yield


def memory(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def spans_of(data: np.ndarray, lengths: list[int]) -> list[tuple[int, int]]:
    """Lay spans over memory one after another, starting at an odd address."""
    starts = np.cumsum([1, *lengths])
    return [(data.ctypes.data + int(start), n) for start, n in zip(starts, lengths, strict=False)]


def laid_out(lengths: list[int]) -> tuple[list[tuple[int, int]], bytes, np.ndarray]:
    data = memory(sum(lengths) + 2)
    return spans_of(data, lengths), data[1 : 1 + sum(lengths)].tobytes(), data


def assert_chunks_tile(chunks, lengths, file: bytes, header: int, block: int) -> None:
    at = header
    for some, nbytes in zip(chunks, lengths, strict=True):
        for first, length, check in some:
            assert first == at and length > 0
            assert first // block == (first + length - 1) // block, "a chunk lies in one block"
            assert first + length == header + sum(lengths) or not (first + length) % block or some[-1][0] == first
            assert check == checksum(file[first : first + length])
            at += length
        assert sum(length for _, length, _ in some) == nbytes
    assert at == len(file)


@given(
    lengths=st.lists(st.one_of(st.sampled_from([0, 1, ALIGN, 2 * ALIGN]), st.integers(0, 30_000)), max_size=12),
    header=st.integers(0, 5),
    fetch=st.sampled_from([writer.own_memory, memory_of(os.getpid())]),
    blocks=st.integers(1, 3),
)
def test_a_file_is_its_header_and_the_spans_and_chunks_tile_them(tmp_path_factory, lengths, header, fetch, blocks):
    path = tmp_path_factory.mktemp("w") / "file"
    spans, want, data = laid_out(lengths)
    with small_blocks(blocks * ALIGN):
        chunks = write(path, HEADER * header, spans, fetch=fetch)
    file = path.read_bytes()
    assert file == HEADER * header + want
    assert_chunks_tile(chunks, lengths, file, header * ALIGN, blocks * ALIGN)
    del data


def test_spans_of_the_real_block_size_are_cut_at_its_borders(tmp_path):
    lengths = [2 * writer.BLOCK, 0, 5, writer.BLOCK - ALIGN - 5, 70_001]
    spans, want, data = laid_out(lengths)
    chunks = write(tmp_path / "file", HEADER, spans)
    file = (tmp_path / "file").read_bytes()
    assert file == HEADER + want and [len(some) for some in chunks] == [3, 0, 1, 1, 1]
    assert_chunks_tile(chunks, lengths, file, ALIGN, writer.BLOCK)
    del data


def test_more_spans_in_a_block_than_the_kernel_takes_in_one_call(tmp_path):
    lengths = [n % 7 for n in range(5000)]
    spans, want, data = laid_out(lengths)
    chunks = write(tmp_path / "a", HEADER, spans, fetch=memory_of(os.getpid()))
    assert (tmp_path / "a").read_bytes() == HEADER + want
    assert chunks == write(tmp_path / "b", HEADER, spans)
    del data


def test_nothing_is_a_file_too(tmp_path):
    assert write(tmp_path / "file", b"", []) == [] and (tmp_path / "file").read_bytes() == b""
    assert write(tmp_path / "other", HEADER, [(0, 0)]) == [[]] and (tmp_path / "other").read_bytes() == HEADER


def test_the_mode_is_that_of_any_new_file(tmp_path):
    (tmp_path / "usual").write_bytes(b"")
    write(tmp_path / "file", HEADER, [])
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_file_that_exists_is_not_written_over(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError) as error:
        write(tmp_path / "file", HEADER, [])
    assert error.value.filename == str(tmp_path / "file") and (tmp_path / "file").read_bytes() == b"mine"
    with aside.process() as other, pytest.raises(FileExistsError) as error:
        other.write(tmp_path / "file", HEADER, [])
    assert error.value.filename == str(tmp_path / "file") and (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("way", [write, lambda *args: aside.WriterProcess().write(*args)], ids=["here", "aside"])
def test_a_header_that_is_not_aligned_is_refused(tmp_path, way):
    with pytest.raises(ValueError, match="not a multiple of 4096"):
        way(tmp_path / "file", b"x", [])
    assert not (tmp_path / "file").exists()


def refuse_direct_at_once(fd, command, flags=0):
    if command == fcntl.F_SETFL and flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return fcntl_fcntl(fd, command, flags)


def refuse_direct_writes(fd, data, place):
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os_pwrite(fd, data, place)


def write_short(fd, data, place):
    return os_pwrite(fd, data[: max(1, len(data) // 3)], place)


fcntl_fcntl, os_pwrite = fcntl.fcntl, os.pwrite


@pytest.mark.parametrize(
    ("where", "name", "other"),
    [(fcntl, "fcntl", refuse_direct_at_once), (os, "pwrite", refuse_direct_writes), (os, "pwrite", write_short)],
    ids=["no direct writes", "no direct writes after all", "short writes"],
)
def test_file_systems_differ_and_files_do_not(tmp_path, monkeypatch, where, name, other):
    lengths = [100, 3 * ALIGN, 20_000, 1]
    spans, want, data = laid_out(lengths)
    monkeypatch.setattr(where, name, other)
    with small_blocks():
        chunks = write(tmp_path / "file", HEADER, spans)
    assert (tmp_path / "file").read_bytes() == HEADER + want
    assert_chunks_tile(chunks, lengths, HEADER + want, ALIGN, 2 * ALIGN)
    del data


def test_a_file_in_memory_is_written_too():
    path = Path("/dev/shm") / f"fds-test-{os.getpid()}"
    spans, want, data = laid_out([50_000])
    try:
        write(path, HEADER, spans)
        assert path.read_bytes() == HEADER + want
    finally:
        path.unlink()
    del data


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("name", ["open", "pwrite", "ftruncate", "fsync", "close"])
def test_every_request_that_fails_is_an_error_and_leaves_nothing(tmp_path, name, code):
    spans, _, data = laid_out([5 * ALIGN, 9, 3 * ALIGN])
    real, made, n = getattr(os, name), 0, 0

    def failing(*args, **kwargs):
        nonlocal made
        made += 1
        if made == n + 1:
            if name == "close":
                real(*args, **kwargs)  # closed all the same, as Linux does
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    while True:
        made, path = 0, tmp_path / str(n)
        with small_blocks(), mock.patch.object(os, name, failing):
            try:
                write(path, HEADER, spans)
            except OSError as error:
                assert error.errno == code and error.filename == str(path) and not path.exists()
            else:
                break
        n += 1
    assert n == (5 if name == "pwrite" else 1)
    del data


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path):
    with mock.patch.object(os, "pwrite", return_value=0), pytest.raises(OSError, match="wrote nothing"):
        write(tmp_path / "file", HEADER, [])


def test_an_interrupt_while_reading_stops_writing_too(tmp_path):
    def interrupted(spans, destination):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "file", HEADER, [(0, 5)], fetch=interrupted)
    assert not (tmp_path / "file").exists()


def test_what_is_given_up_is_removed_where_it_was_made(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path)

    def leaving(spans, destination):
        os.chdir("there")
        raise OSError(errno.EPERM, "no")

    with pytest.raises(PermissionError):
        write("file", HEADER, [(0, 5)], fetch=leaving)
    assert os.listdir(tmp_path) == ["there"] and (tmp_path / "there" / "file").read_bytes() == b"mine"


def test_memory_that_is_not_there_is_an_error_and_no_crash(tmp_path):
    spans, _, data = laid_out([100])
    for path, bad in (("a", [(ALIGN, 10)]), ("b", [*spans, (ALIGN, 10)])):
        with pytest.raises(OSError, match="Bad address") as error:
            write(tmp_path / path, HEADER, bad, fetch=memory_of(os.getpid()))
        assert error.value.errno == errno.EFAULT
        with aside.process() as other, pytest.raises(OSError, match="Bad address") as error:
            other.write(tmp_path / f"{path} aside", HEADER, bad)
        assert error.value.errno == errno.EFAULT and error.value.filename == str(tmp_path / f"{path} aside")
    del data


def test_threads_write_at_the_same_time(tmp_path):
    spans, want, data = laid_out([100_000, 30_000])

    def work(n: int) -> None:
        write(tmp_path / f"here{n}", HEADER, spans)
        with aside.process() as other:
            other.write(tmp_path / f"aside{n}", HEADER, spans)

    with small_blocks():
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(writer._idle_slots) <= 2
    assert [path.read_bytes() == HEADER + want for path in tmp_path.iterdir()] == [True] * 6
    del data
