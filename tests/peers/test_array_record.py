"""Records of ArrayRecord files, which Grain's own package writes and reads: as rows of a loader, in other processes."""

import multiprocessing
import pickle

import pytest

from fds.data import ArrayRecords, DistributedLoader
from fds.errors import DataError

pytestmark = pytest.mark.peers


def test_records_are_the_rows_of_a_loader_in_any_process(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    for name, numbers in (("a", range(7)), ("b", range(7, 10))):
        writer = ArrayRecordWriter(str(tmp_path / name), "group_size:1")
        for number in numbers:
            writer.write(number.to_bytes(2, "little"))
        writer.close()
    records = ArrayRecords([tmp_path / "a", tmp_path / "b"], decode=decoded)
    assert list(records) == list(range(10)) and records[-1] == 9
    assert list(pickle.loads(pickle.dumps(records))) == list(range(10))
    batches = [batch.tolist() for batch in DistributedLoader(records, 4, seed=1)]
    assert len({row for batch in batches for row in batch}) == 8
    with pytest.raises(Exception, match="cannot read in a forked process"):
        list(DistributedLoader(records, 4, seed=1, num_workers=2))
    spawned = multiprocessing.get_context("spawn").Pool(1)
    assert spawned.map(records.__getitem__, range(10)) == list(range(10))
    spawned.terminate()
    (tmp_path / "c").write_bytes(b"no records" * 10_000)
    with pytest.raises(DataError, match="no ArrayRecord files"):
        ArrayRecords(tmp_path / "c")


def decoded(record: bytes) -> int:
    """Return the number of a record; a function of a module, which goes to other processes."""
    return int.from_bytes(record, "little")
