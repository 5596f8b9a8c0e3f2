"""The reader of tensor files: the bytes that were written, or a refusal that says what is wrong with the file."""

import contextlib
import errno
import gc
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import fds
from fds.errors import StorageError
from fds.storage import loading, open_source, verify
from fds.storage.disk import reader, writer
from fds.storage.disk.files import OpenFolder
from fds.storage.disk.reader import Files, touch_fresh
from fds.storage.disk.writer import ALIGN, checksum
from fds.storage.format.manifest import File
from fds.storage.source import blank_like, piece
from tests.storage.states import Template, num_calls, rewrite, small_state

HEADER = (ALIGN - 8).to_bytes(8, "little") + b"{}".ljust(ALIGN - 8)
DATA = bytes(range(256)) * 40
NAME = "rank0.safetensors"


@pytest.fixture(autouse=True)
def no_file_stays_open(few_objects):
    gc.collect()  # what tests before this one held
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()  # what an error's traceback held
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / NAME).write_bytes(HEADER + DATA)
    return tmp_path / NAME


def files(path: Path, verify: bool = True, size: int = ALIGN + len(DATA), header: bytes = HEADER) -> Files:
    return Files({path.name: OpenFolder.of(path.parent)}, {path.name: File(size, checksum(header))}, verify)


def read(opened: Files, start: int = 0, length: int = len(DATA), want: bytes | None = None) -> bytes:
    out = torch.empty(length, dtype=torch.uint8)
    want = DATA[start : start + length] if want is None else want
    opened.read(NAME, ALIGN + start, out, checksum(want), "params.weight")
    return out.numpy().tobytes()


def refusal(opened: Files, **kwargs) -> StorageError:
    with opened, pytest.raises(StorageError) as error:
        read(opened, **kwargs)
    return error.value


def test_bytes_arrive_as_they_were_written(path):
    with files(path) as opened:
        assert read(opened) == DATA
        assert read(opened, 100, 1000) == DATA[100:1100]
        assert read(opened, 5, 0) == b""
        assert len(opened._open) == 1


def test_what_the_writer_wrote_is_read(tmp_path):
    x = torch.arange(3 * writer.BLOCK // 8 + 5)
    chunks = writer.write(tmp_path / NAME, HEADER, [(x.data_ptr(), 8 * x.numel())])[0]
    out = torch.empty_like(x)
    touch_fresh(out)
    with files(tmp_path / NAME, size=ALIGN + 8 * x.numel()) as opened:
        for first, nbytes, check in chunks:
            into = out.view(torch.uint8)[first - ALIGN : first - ALIGN + nbytes]
            opened.read(NAME, first, into, check, "x")
    assert torch.equal(out, x) and len(chunks) == 4


def test_short_reads_are_continued(path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, place: preadv(fd, [buffers[0][:1000]], place))
    with files(path) as opened:
        assert read(opened) == DATA


@pytest.mark.parametrize("block", [1, 9, ALIGN // 2, ALIGN])
def test_a_header_is_checked_block_by_block(path, block):
    with mock.patch.object(writer, "BLOCK", block), files(path) as opened:
        assert read(opened) == DATA


def test_a_byte_that_flipped_is_seen_unless_nobody_looks(path):
    flipped = bytearray(HEADER + DATA)
    flipped[ALIGN + 77] ^= 4
    path.write_bytes(flipped)
    error = refusal(files(path))
    assert "was changed after it was written" in error.what and error.where == "params.weight"
    assert error.want == checksum(DATA) and error.got == checksum(flipped[ALIGN:])
    with files(path) as opened:
        assert read(opened, 100, 500) == DATA[100:600]
    with files(path, verify=False) as opened:
        assert read(opened) == flipped[ALIGN:]


def test_a_file_that_is_missing_is_said_to_be(path):
    path.unlink()
    error = refusal(files(path))
    assert error.what == "a tensor file is missing" and error.where == str(path)


@pytest.mark.parametrize(
    "change",
    [lambda b: b[:-1], lambda b: b[:ALIGN], lambda b: b[:7], lambda b: b"", lambda b: b + b"x"],
    ids=["one byte less", "no data", "no header", "empty", "one byte more"],
)
def test_a_file_of_another_size_is_refused(path, change):
    path.write_bytes(change(HEADER + DATA))
    error = refusal(files(path))
    assert error.what == "a tensor file cannot be read" and "truncated" in error.hint
    assert error.want == f"{ALIGN + len(DATA)} bytes"


def test_a_header_that_was_changed_is_refused(path):
    path.write_bytes(HEADER.replace(b"{}", b"[]") + DATA)
    error = refusal(files(path))
    assert "was changed after it was written" in error.what and "its header" in error.where


@pytest.mark.parametrize("length", [0, ALIGN + len(DATA) - 7, 2**40, 2**63, 2**64 - 1])
def test_an_absurd_header_is_refused_and_takes_no_memory(path, length):
    path.write_bytes(length.to_bytes(8, "little") + HEADER[8:] + DATA)
    assert "cannot be read" in refusal(files(path)).what


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_manifest_and_a_file_that_are_both_too_short_are_refused(path, size):
    path.write_bytes(HEADER[:size])
    assert "cannot be read" in refusal(files(path, size=size)).what


def test_a_place_beyond_the_file_is_refused(path):
    assert "cannot be read" in refusal(files(path), start=len(DATA) - 5, length=10).what
    assert "cannot be read" in refusal(files(path), start=2**40, length=10).what


def test_a_file_that_is_cut_off_while_it_is_open_is_refused_and_kills_nobody(path):
    opened = files(path)
    read(opened, 0, 10)
    path.write_bytes(HEADER)
    assert "cannot be read" in refusal(opened).what


@pytest.mark.parametrize("offset", [0, 8, ALIGN - 1])
def test_a_chunk_in_the_header_is_refused(path, offset):
    want = (HEADER + DATA)[offset : offset + 100]
    error = refusal(files(path), start=offset - ALIGN, length=100, want=want)
    assert error.what == "a chunk inside the header of its file"
    assert (error.where, error.got, error.want) == ("params.weight", f"byte {offset}", f"{ALIGN} or more")


def test_few_of_many_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MOST", 3)
    names, folder = [f"rank{i}.safetensors" for i in range(8)], OpenFolder.of(tmp_path)
    before = len(os.listdir("/dev/fd"))
    for name in names:
        (tmp_path / name).write_bytes(HEADER + name.encode())
    known = {name: File(ALIGN + len(name), checksum(HEADER)) for name in names}
    with Files(dict.fromkeys(names, folder), known) as opened:
        for name in [*names, *names, *reversed(names), *names]:
            out = torch.empty(len(name), dtype=torch.uint8)
            opened.read(name, ALIGN, out, checksum(name.encode()), "x")
            assert len(opened._open) <= 3 >= len(os.listdir("/dev/fd")) - before
        assert list(opened._open) == names[-3:]
        opened.check_file(names[5])
        opened.check_file(names[0])
        assert list(opened._open) == [names[7], names[5], names[0]], "what was read longest ago is closed"
    del opened, folder


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_no_fault_of_the_save(path, code):
    opened = files(path)
    with mock.patch.object(os, "open", side_effect=OSError(code, os.strerror(code))):
        error = refusal(opened)
        assert error.got == os.strerror(code) and "ulimit" in error.hint and "another tag" not in error.hint
        with pytest.raises(StorageError) as error:
            OpenFolder.of(path.parent)
    assert "ulimit" in error.value.hint and error.value.where == str(path.parent)


def replaced(folder: Path, by: Path) -> None:
    """Put another save in the place of one, as a save does."""
    folder.rename(folder.with_name("old"))
    by.rename(folder)


@pytest.mark.parametrize("removed", [False, True])
def test_a_folder_that_is_replaced_is_still_the_one_that_was_opened(tmp_path, removed):
    names, folder = ["rank0.safetensors", "rank1.safetensors"], tmp_path / "tag"
    for into, raw in ((folder, b"old"), (tmp_path / "newer", b"new")):
        into.mkdir()
        for name in names:
            (into / name).write_bytes(HEADER + raw)
    known = {name: File(ALIGN + 3, checksum(HEADER)) for name in names}
    with Files(dict.fromkeys(names, OpenFolder.of(folder)), known, verify=False) as opened:
        out = torch.empty(3, dtype=torch.uint8)
        opened.read(names[0], ALIGN, out, "", "x")
        replaced(folder, tmp_path / "newer")
        if not removed:
            opened.read(names[1], ALIGN, out, "", "x")
            assert out.numpy().tobytes() == b"old"
            return
        shutil.rmtree(tmp_path / "old")
        with pytest.raises(StorageError, match="a tensor file is missing") as error:
            opened.read(names[1], ALIGN, out, "", "x")
        assert "may have replaced it meanwhile" in error.value.hint and error.value.where == str(folder / names[1])


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("when", ["before its manifest is read", "before its first file is read"])
def test_a_save_that_is_replaced_while_it_is_opened_is_not_mixed(tmp_path, monkeypatch, when, verify):
    for name, calls in (("run", 1), ("other", 2)):
        fds.save(tmp_path / name, small_state(calls), Template(small_state()), "best")
    plain, seen = loading.read_manifest, []

    def read_manifest(held):
        found = None if when == "before its manifest is read" else plain(held)
        seen.append(held)
        if len(seen) == 1:
            replaced(tmp_path / "run" / "best", tmp_path / "other" / "best")
        return found or plain(held)

    monkeypatch.setattr(loading, "read_manifest", read_manifest)
    state, _ = fds.load(tmp_path / "run", Template(small_state()), {}, verify=verify)
    assert num_calls(state) == 1
    monkeypatch.undo()
    assert num_calls(fds.load(tmp_path / "run", Template(small_state()), {}, tag="best", take_over=True)[0]) == 2


@pytest.mark.parametrize("length", [2**28, 2**40, 2**58])
def test_sizes_are_compared_before_memory_is_taken(tmp_path, length):
    folder = fds.save(tmp_path, small_state(1), Template(small_state()), "a")

    def edit(record):
        record["files"]["rank0.safetensors"]["bytes"] = 2**62
        leaf = record["leaves"]["params.in.weight"]
        leaf["shape"], leaf["chunks"] = [length], [{**leaf["chunks"][0], "length": length}]

    rewrite(folder, edit)
    taken, empty = [], torch.empty

    def counted(*args, **kwargs):
        taken.append(args)
        return empty(*args, **kwargs)

    with mock.patch.object(torch, "empty", counted):
        (line,) = verify(tmp_path)
        assert "a tensor file cannot be read" in line and f"want {2**62} bytes" in line
        source = open_source(tmp_path)
        with pytest.raises(StorageError, match="cannot be read"):
            source.read("params.in.weight", 5, blank_like(source.leaves["params.in.weight"], 3))
        with pytest.raises(StorageError, match=r"cannot be read|File too large"):
            fds.export_weights(tmp_path, tmp_path / "x.safetensors")
    assert max(args[0] for args in taken) < 100


def test_a_file_that_really_is_absurd_is_refused_too(tmp_path):
    folder, length = fds.save(tmp_path, small_state(1), Template(small_state()), "a"), 2**42
    with open(folder / "rank0.safetensors", "r+b") as file:
        file.truncate(2**43)  # full of holes

    def edit(record):
        record["files"]["rank0.safetensors"]["bytes"] = 2**43
        leaf = record["leaves"]["params.out"]
        leaf["shape"], leaf["chunks"] = [length // 2], [{**leaf["chunks"][0], "length": length // 2}]

    rewrite(folder, edit)
    with mock.patch.object(torch, "empty", side_effect=[*map(torch.empty, [0]), RuntimeError("can't allocate")]):
        source = open_source(tmp_path)
        with pytest.raises(StorageError, match="not enough memory") as error:
            piece(source, "params.out", 0, length // 2)
    assert error.value.got == f"{length} bytes at once"


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [link, pipe, folder])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(path, replace):
    replace(path)
    error = refusal(files(path))
    assert error.what == "a tensor file cannot be read" and error.want == "a regular file"


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_what_the_file_system_refuses_is_a_storage_error(path, name):
    opened = files(path)
    with mock.patch.object(os, name, side_effect=PermissionError(1, "Operation not permitted")):
        assert "Operation not permitted" in refusal(opened).got


def test_files_are_closed_with_whoever_held_them(path):
    opened = files(path)
    read(opened)
    del opened
    with contextlib.suppress(StorageError), files(path, header=b"another") as opened:
        read(opened)


@pytest.mark.parametrize("length", [0, 1, 3 * 2**20])
def test_advice_about_fresh_memory_changes_no_value(length):
    x = torch.full((length,), 7, dtype=torch.uint8)
    touch_fresh(x)
    touch_fresh(x[1:])
    assert x.eq(7).all()
    touch_fresh(torch.empty(3 * 2**20, device="meta"))


def test_advice_is_asked_for_whole_pages_within_the_tensor():
    x = torch.empty(2**23, dtype=torch.uint8)
    with mock.patch.object(reader, "_LIBC") as libc:
        touch_fresh(x[5:-5])
    start, length, _ = libc.madvise.call_args.args
    assert start.value % 4096 == 0 == length.value % 4096 and start.value >= x.data_ptr() + 5
    assert length.value > 2**23 - 3 * 4096 and start.value + length.value <= x.data_ptr() + 2**23 - 5
