"""The reader of tensor files: the bytes that were written, or a refusal that says what is wrong with the file."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch

from fds.errors import StorageError
from fds.storage import reader, writer
from fds.storage.reader import Files, touch_fresh
from fds.storage.writer import ALIGN, checksum


@attrs.frozen
class File:
    bytes: int
    header: str


HEADER = (ALIGN - 8).to_bytes(8, "little") + b"{}".ljust(ALIGN - 8)
DATA = bytes(range(256)) * 40
NAME = "rank0.safetensors"


@pytest.fixture(autouse=True)
def no_file_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / NAME).write_bytes(HEADER + DATA)
    return tmp_path / NAME


def files(path: Path, verify: bool = True, size: int = ALIGN + len(DATA), header: bytes = HEADER) -> Files:
    return Files(path.parent, {path.name: File(size, checksum(header))}, verify)


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
    assert error.what == "a tensor file cannot be read" and "cut off" in error.hint
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
