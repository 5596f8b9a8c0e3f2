"""Files that were damaged or made to harm: refused, or read as what is in them; nothing of theirs runs."""

import io
import os
import pickle
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from fds.errors import StorageError
from fds.storage.foreign import deepspeed, weights
from fds.storage.foreign.foreign_leaf import Inert, open_torch
from tests.storage.foreign.reading import read_all


class Calls:
    """What calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def hostile(mark: Path) -> dict[str, tuple]:
    """Return objects that would leave a mark, or do worse, and the name in the refusal."""
    text = f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": (Calls(os.system, f"touch {mark}"), "system"),
        "eval": (Calls(eval, text), "eval"),
        "exec": (Calls(exec, text), "exec"),
        "subprocess": (Calls(subprocess.Popen, ["touch", str(mark)]), "Popen"),
        "open": (Calls(open, str(mark), "w"), "open"),
        "getattr": (Calls(getattr, "x", "upper"), "getattr"),
        "torch.load": (Calls(torch.load, str(mark)), "torch"),
        "a class of this test": (Calls(Calls, print), "Calls"),
        "path": (Path(mark), "Path"),
    }


@pytest.mark.parametrize("case", hostile(Path()))
def test_a_pickle_that_calls_something_is_refused_by_name_and_nothing_runs(golden, tmp_path, case):
    mark = tmp_path / "mark"
    held, name = hostile(mark)[case]
    torch.save({"a": torch.ones(1), "b": held}, tmp_path / "x.pt")
    with pytest.raises(StorageError, match=name):
        weights(tmp_path / "x.pt")
    folder = Path(shutil.copytree(golden / "zero2_ranks2", tmp_path / "run"))
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        before = (folder / "global_step3" / file).read_bytes()
        shutil.copy(tmp_path / "x.pt", folder / "global_step3" / file)
        with pytest.raises(StorageError, match=name):
            deepspeed(folder)
        (folder / "global_step3" / file).write_bytes(before)
    assert not mark.exists()
    assert isinstance(deepspeed(folder).leaves, dict)


def test_what_is_admitted_for_deepspeed_is_inert_and_admitted_nowhere_else(golden):
    path, before = next((golden / "zero1_fp16").glob("*/*rank_0*optim*")), torch.serialization.get_safe_globals()
    with pytest.raises(StorageError, match=r"deepspeed\.runtime"):
        open_torch(path)
    deepspeed(golden / "zero1_fp16")
    assert set(torch.serialization.get_safe_globals()) == set(before)
    with pytest.raises(StorageError, match=r"deepspeed\.runtime"):
        open_torch(path)
    with pytest.raises(StorageError, match="admitted"):
        weights(path)
    assert not [name for name in dir(Inert) if not name.startswith("__")]
    assert "deepspeed" not in sys.modules


def test_a_plain_pickle_is_refused(tmp_path):
    for raw in (pickle.dumps({"a": 1}), pickle.dumps(Calls(os.system, "true")), b""):
        (tmp_path / "x.pt").write_bytes(raw)
        with pytest.raises(StorageError):
            weights(tmp_path / "x.pt")


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, raw in entries.items():
            file.writestr(f"archive/{name}", raw)
    return out.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        zipped({}),
        zipped({"data.pkl": b""}),
        zipped({"data.pkl": b"."}),
        zipped({"data.pkl": b"N."}),
        zipped({"data.pkl": b"\x80\x02}q\x00.", "version": b"3"}),
        zipped({"version": b"3"}),
        zipped({"data.pkl": b"\x80\x02" + b"(" * 10**5 + b"."}),
        zipped({"data.pkl": b"\x80\x02" + b"]" * 10**5 + b"."}),
        zipped({"data.pkl": b"\x80\x02}."}, zipfile.ZIP_DEFLATED),
        zipped({"../../etc/passwd": b"x"}),
        zipped({"data.pkl": b"\x80\x02\x8a\xff" + b"\xff" * 255 + b"."}),
    ],
    ids=range(11),
)
def test_zip_files_that_torch_never_writes_are_refused(tmp_path, raw):
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(StorageError):
        weights(tmp_path / "x.pt")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"a": torch.arange(8.0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    for length in (0, 4, 31, 33):
        (tmp_path / "y.pt").write_bytes(zipped({**entries, "data/0": (entries["data/0"] + b"x")[:length]}))
        with pytest.raises(StorageError):
            read_all(weights(tmp_path / "y.pt"))
    (tmp_path / "y.pt").write_bytes(zipped(entries, zipfile.ZIP_DEFLATED))
    with pytest.raises(StorageError, match="compressed"):
        weights(tmp_path / "y.pt")
    (tmp_path / "y.pt").write_bytes(zipped({name: raw for name, raw in entries.items() if name != "data/0"}))
    with pytest.raises(StorageError):
        read_all(weights(tmp_path / "y.pt"))


DEEPSPEED = ["zero1_fp16", "zero3_ranks2", "pipe_zero1", "zero0"]
edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)
quietly = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def changed(raw: bytes, edits: list[tuple[float, int]], low: int = 0, high: int | None = None) -> bytes:
    """Return these bytes with some between `low` and `high` replaced; places are fractions of the way."""
    out, high = bytearray(raw), len(raw) if high is None else high
    for place, byte in edits:
        out[low + int(place * (high - low))] = byte
    return bytes(out)


def refused_or_read(open_, path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, and of optimizer state that is left out
        try:
            source = open_(path)
            if all(torch.Size(leaf.shape).numel() < 10**7 for leaf in source.leaves.values()):
                read_all(source)
        except StorageError:
            pass


@quietly
@given(edits=edits, cut=st.floats(0, 1) | st.none())
def test_any_changed_byte_of_a_torch_file_is_refused_or_read(tmp_path, edits, cut):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(8.0), "b": {"c": [torch.ones(2, 3).t()]}, "d": (1, "x")}, path)
    raw = changed(path.read_bytes(), edits)
    path.write_bytes(raw if cut is None else raw[: int(cut * len(raw))])
    refused_or_read(weights, path)


@quietly
@given(edits=edits)
def test_any_changed_byte_of_a_pickle_is_refused_or_read(tmp_path, edits):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(8.0), "b": torch.ones(2, 3).t()}, path)
    with zipfile.ZipFile(path) as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    path.write_bytes(zipped({**entries, "data.pkl": changed(entries["data.pkl"], edits)}))
    refused_or_read(weights, path)


@quietly
@given(edits=edits, number=st.integers(0, 10), case=st.sampled_from(DEEPSPEED))
def test_any_changed_byte_of_a_pickle_of_deepspeed_is_refused_or_read(golden, tmp_path, edits, number, case):
    folder = tmp_path / case
    shutil.copytree(golden / case / "global_step3", folder, dirs_exist_ok=True)
    files = sorted(folder.glob("*.pt"))
    path = files[number % len(files)]
    with zipfile.ZipFile(path) as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    path.write_bytes(zipped({**entries, "data.pkl": changed(entries["data.pkl"], edits)}))
    refused_or_read(deepspeed, folder)


@quietly
@given(edits=edits)
def test_any_changed_byte_of_a_safetensors_header_is_refused_or_read(tmp_path, edits):
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(8.0), "b": torch.ones(2, 3)}, path)
    raw = path.read_bytes()
    path.write_bytes(changed(raw, edits, 0, 8 + int.from_bytes(raw[:8], "little")))
    refused_or_read(weights, path)
