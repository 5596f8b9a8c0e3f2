"""Data sets in files of other programs: what MosaicML's writer wrote, read without it; ArrayRecord by its package."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from fds.data import ArrayRecords, DistributedLoader, MDSFolder
from fds.errors import DataError, FdsError

GOLDEN = Path(__file__).parent.parent / "golden" / "mds.json"


@pytest.fixture
def folder(tmp_path):
    """The folder that mosaicml-streaming 0.13.0 wrote of five samples, in files of one or two."""
    for name, content in json.loads(GOLDEN.read_text()).items():
        (tmp_path / name).write_bytes(bytes.fromhex(content))
    return tmp_path


def wanted(i):
    return {
        "text": "é" * i,
        "raw": bytes(range(i)),
        "count": -i,
        "half": i / 2,
        "words": 10**i,
        "more": {"i": [i, None]},
        "tokens": list(range(1, i + 2)),
        "pair": [i, -i],
        "any": [[float(i)] * (i + 1)],
    }


def plain(sample):
    return {name: x.tolist() if isinstance(x, np.ndarray | np.generic) else x for name, x in sample.items()}


def test_samples_of_mds_are_what_was_written(folder):
    samples = MDSFolder(folder)
    assert [plain(sample) for sample in samples] == [wanted(i) for i in range(5)]
    assert plain(pickle.loads(pickle.dumps(samples))[-1]) == wanted(4)
    assert samples[3]["tokens"].dtype == np.uint16 and samples[3]["half"].dtype == np.float16
    rows = DistributedLoader(samples, 2, collate=lambda rows: [row["count"] for row in rows], num_workers=1, seed=3)
    read = [x for batch in rows for x in batch]
    assert len(read) == len(set(read)) == 4 and set(read) < {0, -1, -2, -3, -4}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda index: index.update(shards=3), "no index of MDS"),
        (lambda index: index["shards"][0].update(version=3), "another format"),
        (lambda index: index["shards"][-1]["column_encodings"].__setitem__(1, "pkl"), "a column is not decoded"),
        (lambda index: index["shards"][-1]["column_encodings"].__setitem__(1, "ndarray:uint17"), "is not decoded"),
        (lambda index: index["shards"][0].update(samples=10**6), "is damaged"),
        (lambda index: index["shards"][0]["raw_data"].update(bytes=7), "is damaged"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="other.mds"), "is missing"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="../../index.json"), "is damaged"),
        (
            lambda index: index["shards"][0].update(
                zip_data={"basename": "a.zstd"}, raw_data={"basename": "no", "bytes": 99}
            ),
            "samples are packed",
        ),
    ],
)
def test_what_is_no_folder_of_mds_is_refused(folder, change, what):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=what):
        MDSFolder(folder)
    with pytest.raises(FdsError):
        MDSFolder(folder / "none")


def test_any_byte_of_mds_may_be_damaged(folder):
    (file,) = [path for path in folder.glob("*.mds") if path.name.endswith("1.mds")]
    content = file.read_bytes()
    refused = 0
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        samples = MDSFolder(folder)
        for i in range(len(samples)):
            try:
                samples[i]
            except DataError:
                refused += 1
    assert refused > 50


def test_array_records_say_what_they_need(tmp_path):
    with pytest.raises(FdsError, match="ArrayRecord file"):
        ArrayRecords(tmp_path / "none")
    for bad in ([], 3, [3]):
        with pytest.raises(FdsError):
            ArrayRecords(bad)
    with pytest.raises(DataError, match="decode is not a function"):
        ArrayRecords(tmp_path, decode=3)
