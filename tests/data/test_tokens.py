"""Files of tokens: byte for byte those of DeepSpeed and Megatron, read by rows, windows and documents."""

import os
import pickle
import struct

import numpy as np
import pytest
import torch

from fds.data import DistributedLoader, TokenFile, write_tokens
from fds.errors import DataError, FdsError

ROWS = [[1, 2, 65535], [], [4, 5]]
# what DeepSpeed 0.19.6 writes of ROWS, by add_item and end_document, but for the dtype's code, width and first bytes
HEAD, COUNTS = "4d4d494449445800000100000000000000", "03000000000000000400000000000000"
LENGTHS, BORDERS = "030000000000000002000000", "0000000000000000010000000000000002000000000000000300000000000000"
GOLDEN = {
    "int32": ("04", "0100000002000000ffff00000400000005000000", "00000000000000000c000000000000000c00000000000000"),
    "uint16": ("06", "01000200ffff04000500", "000000000000000006000000000000000600000000000000"),
}


def lists(dataset):
    return [row.tolist() for row in dataset]


@pytest.mark.parametrize("dtype", GOLDEN)
def test_files_are_byte_for_byte_those_of_deepspeed(dtype, tmp_path):
    code, tokens, firsts = GOLDEN[dtype]
    write_tokens(tmp_path / "a", map(np.array, ROWS), dtype=dtype, codes="deepspeed")
    assert (tmp_path / "a.bin").read_bytes().hex() == tokens
    assert (tmp_path / "a.idx").read_bytes().hex() == HEAD + code + COUNTS + LENGTHS + firsts + BORDERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize(("codes", "dtypes"), [("megatron", 6), ("deepspeed", 8)])
def test_every_dtype_comes_back_whoever_is_to_read_it(codes, dtypes, tmp_path):
    names = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
    for dtype in names[:dtypes]:
        rows = [[], [0, np.iinfo(dtype).max if dtype != "uint64" else 2**63 - 1], [7]]
        file = write_tokens(tmp_path / "a.bin", rows, dtype=dtype, codes=codes)
        assert (file.dtype, file.tokens.dtype, lists(file)) == (dtype, dtype, rows)
        empty = write_tokens(tmp_path / "a", [[]], dtype=dtype, codes=codes)
        assert (len(empty), lists(empty), len(empty.tokens)) == (1, [[]], 0)
    assert len(write_tokens(tmp_path / "a", [], codes=codes)) == 0


def test_documents_of_several_sequences_and_windows_over_all(tmp_path):
    """The index is that of DeepSpeed after [1, 2] and [3], end_document, [4, 5], end_document."""
    words = struct.pack("<9sQBQQ3i3q3q", b"MMIDIDX\0\0", 1, 1, 3, 3, 2, 1, 2, 0, 2, 3, 0, 2, 3)
    (tmp_path / "a.idx").write_bytes(words)
    (tmp_path / "a.bin").write_bytes(bytes([1, 2, 3, 4, 5]))
    file = TokenFile(tmp_path / "a.idx")
    assert lists(file) == [[1, 2], [3], [4, 5]] and lists(file.documents()) == [[1, 2, 3], [4, 5]]
    assert lists(file.windows(2)) == [[1, 2, 3], [3, 4, 5]] and lists(file.windows(4)) == [[1, 2, 3, 4, 5]]
    assert file.documents()[-1].dtype == torch.int64 and file[-1].tolist() == [4, 5]
    with pytest.raises(IndexError):
        file.windows(2)[2]


def test_sequences_that_lie_in_another_order_are_read_by_the_index(tmp_path):
    words = struct.pack("<9sQBQQ3i3q2q", b"MMIDIDX\0\0", 1, 1, 3, 2, 1, 2, 1, 0, 0, 3, 0, 3)
    (tmp_path / "a.idx").write_bytes(words)
    (tmp_path / "a.bin").write_bytes(bytes([1, 2, 3, 4]))
    with pytest.raises(DataError, match="does not fit"):  # by the first two, tokens would be of no bytes
        TokenFile(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(struct.pack("<9sQBQQ3i3q2q", b"MMIDIDX\0\0", 1, 1, 3, 2, 1, 1, 1, 0, 1, 3, 0, 3))
    tokens, places = TokenFile(tmp_path / "a").rows(0, 3)
    assert (tokens.tolist(), places.tolist()) == ([1, 2, 4], [0, 1, 2, 3])


def test_a_raw_stream_is_read_by_windows_in_a_loader_of_any_ranks(tmp_path):
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    windows = TokenFile(tmp_path / "raw.bin", dtype="uint16").windows(3)
    loader = DistributedLoader(windows, 2, shuffle=False, num_workers=1)
    assert len(windows) == 6 and next(iter(loader)).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert lists(pickle.loads(pickle.dumps(windows))) == [list(range(i, i + 4)) for i in range(0, 18, 3)]


def test_opening_a_file_reads_none_of_it(tmp_path):
    """A file with holes of 64 GB is opened and read in its middle, where nothing of that size could be held."""
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(64 << 30)
    windows = TokenFile(tmp_path / "huge", dtype="uint16").windows(1 << 20)
    assert len(windows) == 2**15 - 1 and windows[2**14].sum() == 0


DAMAGE = {
    "nothing but tokens": (lambda idx, data: (idx[:18] + bytes(8) + b"\1" + bytes(15), data), "no sequences"),
    "no index": (lambda idx, data: (b"", data), "not an index"),
    "another file": (lambda idx, data: (b"TNTIDX\0\0" + idx[8:], data), "not an index"),
    "another version": (lambda idx, data: (idx[:9] + b"\2" + idx[10:], data), "version 2"),
    "floats": (lambda idx, data: (idx[:17] + b"\x0a" + idx[18:], data), "dtype 10"),
    "floats of Megatron": (lambda idx, data: (idx[:17] + b"\6" + idx[18:], data), "does not fit"),
    "a cut index": (lambda idx, data: (idx[:-1], data), "truncated"),
    "cut tokens": (lambda idx, data: (idx, data[:-4]), "does not fit"),
    "tokens of a longer file": (lambda idx, data: (idx, data * 2), "does not fit"),
    "more sequences than bytes": (lambda idx, data: (idx[:18] + b"\xff" * 8 + idx[26:], data), "truncated"),
    "a length below 0": (lambda idx, data: (idx[:34] + b"\xff\xff\xff\xff" + idx[38:], data), "does not fit"),
    "a row out of the file": (lambda idx, data: (idx[:54] + b"\xff" * 8 + idx[62:], data), "damaged"),
    "a document out of it": (lambda idx, data: (idx[:-8] + b"\xff" * 7 + b"\x7f", data), "damaged"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_refused(damage, words, tmp_path):
    write_tokens(tmp_path / "a", ROWS)
    idx, data = damage((tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes())
    (tmp_path / "a.idx").write_bytes(idx)
    (tmp_path / "a.bin").write_bytes(data)
    read = lambda file: [lists(file), lists(file.documents())]
    with pytest.raises(DataError, match=words):
        read(TokenFile(tmp_path / "a"))


REFUSED = {
    "text": (["abc"], {}, "document 0"),
    "fractions": ([[1], [0.5]], {}, "document 1"),
    "two dimensions": ([[[1]]], {}, "of one dimension"),
    "ragged": ([[[1], [1, 2]]], {}, "document 0"),
    "nothing": ([None], {}, "document 0"),
    "too large": ([[1], [70000]], {"dtype": "uint16"}, "tokens from 70000 to 70000"),
    "below 0": ([[-1]], {"dtype": "uint16"}, "0 to 65535"),
    "a dtype": ([], {"dtype": "float32"}, "not a dtype of tokens"),
    "a dtype that Megatron lacks": ([], {"dtype": "uint32"}, 'codes="deepspeed"'),
    "codes": ([], {"codes": "megatorn"}, "did you mean 'megatron'"),
}


@pytest.mark.parametrize(("rows", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_the_files_that_were_there(rows, options, words, tmp_path):
    write_tokens(tmp_path / "a", ROWS)
    with pytest.raises(DataError) as caught:
        write_tokens(tmp_path / "a", rows, **options)
    assert words in str(caught.value)
    assert lists(TokenFile(tmp_path / "a")) == ROWS and len(list(tmp_path.iterdir())) == 2


def test_a_path_that_leads_nowhere_and_arguments_that_are_none(tmp_path):
    (tmp_path / "raw").write_bytes(b"abc")
    os.mkfifo(tmp_path / "pipe")
    write_tokens(tmp_path / "a", ROWS)
    for call in (
        lambda: TokenFile(tmp_path / "b"),
        lambda: TokenFile(tmp_path / "raw"),
        lambda: TokenFile(tmp_path / "raw", "uint16"),
        lambda: TokenFile(tmp_path / "a.bin", "uint16"),
        lambda: TokenFile(tmp_path, "uint8"),
        lambda: TokenFile(3),
        lambda: TokenFile(""),
        lambda: TokenFile(tmp_path / "pipe", "uint8"),
        lambda: write_tokens("/", ROWS),
        lambda: TokenFile(tmp_path / "raw", "uint8").documents(),
        lambda: TokenFile(tmp_path / "raw", "uint8").windows(3),
        lambda: TokenFile(tmp_path / "raw", "uint8").windows(0),
        lambda: write_tokens(tmp_path / "none" / "a", ROWS, dtype="int2"),
    ):
        with pytest.raises(FdsError):
            call()


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["int32", "uint16", "uint64"])
def test_deepspeed_reads_what_is_written_here_and_is_read(dtype, tmp_path):
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
        MMapIndexedDataset,
        MMapIndexedDatasetBuilder,
    )

    write_tokens(tmp_path / "ours", ROWS, dtype=dtype, codes="deepspeed")
    theirs = MMapIndexedDataset(str(tmp_path / "ours"), skip_warmup=True)
    assert theirs.dtype == np.dtype(dtype) and [theirs[i].tolist() for i in range(len(theirs))] == ROWS
    assert theirs.doc_idx.tolist() == [0, 1, 2, 3]
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.dtype(dtype).type)
    for row in ROWS:
        builder.add_item(torch.tensor(row, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "b.idx"))
    assert lists(TokenFile(tmp_path / "b")) == lists(TokenFile(tmp_path / "b").documents()) == ROWS
    for end in ("bin", "idx"):
        assert (tmp_path / f"b.{end}").read_bytes() == (tmp_path / f"ours.{end}").read_bytes()
