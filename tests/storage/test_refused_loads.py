"""What is not a whole save of this model is refused by a StorageError that says where and what."""

import contextlib
import copy
import json
import os
import shutil

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

import fds
from fds import tree
from fds.command_line import main
from fds.errors import StorageError
from fds.storage import source
from fds.storage.opening import verify
from tests.bits import assert_same_bits
from tests.storage.states import Template, json_values, rewrite, small_state, state_of

STEP = Template(small_state())
MANY = settings(max_examples=4 * settings().max_examples)  # each takes a few milliseconds


@pytest.fixture
def folder(tmp_path):
    return fds.save(tmp_path / "run", small_state(1), STEP, "one", {"position": [1, 2]})


def refused(dir, step=STEP, **kwargs):
    with pytest.raises(StorageError) as error:
        fds.load(dir, step, {}, **kwargs)
    return error.value


def test_a_directory_without_saves(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, got in (("nowhere", "nothing"), ("empty", "a directory"), ("file", "a file")):
        error = refused(tmp_path / name)
        assert (error.what, error.where, error.got) == ("there is no save here", str(tmp_path / name), got)
        assert error.hint == f"looked in {tmp_path / name}; fds storage show DIR lists the saves of a run's directory"


def test_the_folder_above_or_below_the_run_is_pointed_out(folder):
    assert f"load({str(folder.parent)!r}, ..., tag='one')" in refused(folder).hint
    assert str(folder.parent) in refused(folder.parent.parent).hint


def test_a_missing_tag_lists_the_tags(folder):
    fds.save(folder.parent, small_state(2), STEP, "two")
    error = refused(folder.parent, tag="twoo")
    assert (error.got, error.want, error.hint) == ("'twoo'", "one of 'one', 'two'", "did you mean 'two'?")


@pytest.mark.parametrize("tag", ["../run/one", "/etc", "", ".saving", "one/", 3])
def test_a_tag_that_is_a_path_is_no_tag(folder, tag):
    assert refused(folder.parent, tag=tag).what == "there is no save under this tag"


@pytest.mark.parametrize("text", [b"two", b"../run/one\n", b"/etc/passwd", b"", b"one\none", b"o" * 5000])
def test_latest_that_names_no_save(folder, text):
    (folder.parent / "latest").write_bytes(text)
    error = refused(folder.parent)
    assert error.where == str(folder.parent / "latest") and error.want == "one of 'one'" and len(str(error)) < 1000


def test_latest_that_is_lost_or_no_text(folder):
    latest = folder.parent / "latest"
    latest.write_bytes(b"\xff\xfe")
    assert refused(folder.parent).what == "it is not known which save is the last"
    latest.unlink()
    assert refused(folder.parent).hint == "load(..., tag='one')"
    fds.load(folder.parent, STEP, {}, tag="one")


def test_a_file_cut_off_anywhere(folder):
    for path in folder.iterdir():
        whole = path.read_bytes()
        last = len(whole) - (path.suffix == ".json")  # without the line feed at the end a manifest is whole
        for length in {*range(0, last, 9), *range(last - 9, last)}:
            path.write_bytes(whole[:length])
            error = refused(folder.parent)
            assert error.where.startswith(str(path)), error
        path.write_bytes(whole)


def test_a_byte_flipped_anywhere_is_seen_or_harmless(folder):
    state, extra = fds.load(folder.parent, STEP, {})
    seen = {}
    for path in folder.iterdir():
        whole = path.read_bytes()
        for at in range(0, len(whole), 3):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            try:
                found = fds.load(folder.parent, STEP, {})
            except StorageError:
                seen[path.suffix] = seen.get(path.suffix, 0) + 1
            else:
                assert_same_bits(found[0], state)
                assert found[1] == extra
                harmless = path.suffix == ".json" and whole[at : at + 1].isspace()
                assert harmless, (path, at, whole[max(at - 20, 0) : at + 20])
        path.write_bytes(whole)
    assert seen[".safetensors"] > 150 and seen[".json"] > 150


def test_a_flipped_byte_is_a_checksum_error_that_names_the_leaf(folder):
    path = folder / "rank0.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0x10]))
    error = refused(folder.parent)
    assert error.what == "a tensor file was changed after it was written" and error.got != error.want
    assert error.where == f"{path}: slots.ema.out"


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\xff" * 100, b"PK\x03\x04" + bytes(500)])
def test_a_file_that_is_no_safetensors(folder, content):
    path = folder / "rank0.safetensors"
    path.write_bytes(content)
    error = refused(folder.parent)
    assert (error.what, error.where) == ("a tensor file cannot be read", str(path))


def test_a_tensor_file_that_is_missing_or_a_folder(folder):
    path = folder / "rank0.safetensors"
    path.unlink()
    assert refused(folder.parent).what == "a tensor file is missing"
    path.mkdir()
    assert refused(folder.parent).where == str(path)


def test_a_tensor_file_of_another_save(folder, tmp_path):
    record = json.loads((folder / "manifest.json").read_text())
    other = state_of({"in": {"weight": torch.ones(4, 3, dtype=torch.int32)}, "other": torch.ones(3)}, calls=1)
    theirs = fds.save(tmp_path / "other", other, Template(other))
    shutil.copy(theirs / "rank0.safetensors", folder)
    error = refused(folder.parent)
    assert (error.what, error.where) == ("a tensor file cannot be read", str(folder / "rank0.safetensors"))  # its size
    alike = attrs.evolve(small_state(1), slots={"mea": small_state(1).params})  # of the same size
    theirs = fds.save(tmp_path / "alike", alike, Template(alike), "one")
    assert (theirs / "rank0.safetensors").stat().st_size == record["files"]["rank0.safetensors"]["bytes"]
    shutil.copy(theirs / "rank0.safetensors", folder)
    error = refused(folder.parent)
    assert error.what == "a tensor file was changed after it was written"
    assert error.where == f"{folder / 'rank0.safetensors'}: its header"
    shutil.copy(fds.save(tmp_path / "later", small_state(2), STEP, "one") / "rank0.safetensors", folder)
    error = refused(folder.parent)  # the same header
    assert error.what == "a tensor file was changed after it was written" and error.where.endswith(": calls")


def test_a_manifest_that_is_no_json(folder):
    path = folder / "manifest.json"
    for text in (b"{", b"", b"\xff", b"[" * 100_000, b'{"format": 1' + b"0" * 5000 + b"}"):
        path.write_bytes(text)
        error = refused(folder.parent)
        assert (error.what, error.where) == ("the manifest is not JSON", str(path))
    path.unlink()
    path.mkdir()
    assert refused(folder.parent).what == "a save without a readable manifest"


@pytest.mark.parametrize("text", ["3", "null", "[]", '"text"', "{}", '{"format": "1"}', '{"format": true}'])
def test_json_that_is_no_manifest(folder, text):
    (folder / "manifest.json").write_text(text)
    assert refused(folder.parent).what == "this JSON is not a manifest of fds"


def test_a_manifest_of_a_newer_format(folder):
    rewrite(folder, lambda m: {"format": 5, "fds": "9.9", "news": []})
    error = refused(folder.parent)
    assert (error.got, error.want) == ("format 5, written by fds 9.9", "format 2 or 3 or 4")


@pytest.mark.parametrize(
    ("edit", "path"),
    [
        (lambda m: m.update(calls="3"), "expected int @ $.calls"),
        (lambda m: m.update(calls=True), "expected int @ $.calls"),
        (lambda m: m.update(leaves=[]), "@ $.leaves"),
        (lambda m: m["leaves"]["params.out"].update(shape=["5"]), "@ $.leaves['params.out'].shape[0]"),
        (lambda m: m["leaves"]["params.out"].update(shape=[5.0]), "@ $.leaves['params.out'].shape[0]"),
        (lambda m: m["leaves"]["params.out"].__delitem__("dtype"), "@ $.leaves['params.out'].dtype"),
        (lambda m: m["leaves"]["params.out"]["chunks"][0].update(file=None), "@ $.leaves['params.out'].chunks[0].file"),
        (lambda m: m["leaves"]["params.out"]["chunks"][0].update(odd=1), "(odd) @ $.leaves['params.out'].chunks[0]"),
        (
            lambda m: m["leaves"]["params.out"]["chunks"][0].update(offset="0"),
            "$.leaves['params.out'].chunks[0].offset",
        ),
        (
            lambda m: m["leaves"]["params.out"]["chunks"][0].update(box=[[0, 5, 1]]),
            "$.leaves['params.out'].chunks[0].box",
        ),
        (
            lambda m: m["leaves"]["params.out"]["chunks"][0].update(box=[["0", 5]]),
            "$.leaves['params.out'].chunks[0].box",
        ),
        (lambda m: m["leaves"]["params.out"]["chunks"][0].update(box=5), "$.leaves['params.out'].chunks[0].box"),
        (lambda m: m["files"]["rank0.safetensors"].update(bytes=1.5), "@ $.files['rank0.safetensors'].bytes"),
        (lambda m: m.update(part=[0]), "@ $.part"),
        (lambda m: m.update(pickle="gASV"), "extra fields found (pickle) @ $"),
        (lambda m: m.__delitem__("extra"), "required field missing @ $.extra"),
    ],
)
def test_wrong_types_in_a_manifest_are_shown_with_their_path(folder, edit, path):
    rewrite(folder, edit)
    error = refused(folder.parent)
    assert error.what == "the manifest has wrong fields" and path in error.got


def test_a_manifest_that_somebody_edited(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"position": [1, 2]', '"position": [1, 3]'))
    assert refused(folder.parent).what == "the manifest was changed after it was written"


@pytest.mark.parametrize(
    "file",
    [
        "../one/rank0.safetensors",
        "../../etc/passwd",
        "/etc/passwd",
        "/etc/passwd.safetensors",
        "",
        ".",
        "..",
        ".hidden.safetensors",
        "a\\b.safetensors",
        "rank0.safetensors\n",
        "manifest.json",
        "a\0.safetensors",
        "C:a.safetensors",
    ],
)
def test_a_hostile_file_name_is_refused_before_anything_is_opened(folder, file, monkeypatch):
    monkeypatch.setattr(source, "Files", lambda folder, files, verify: pytest.fail(f"opened {files}"))
    whole = (folder / "manifest.json").read_text()
    rewrite(folder, lambda m: m["leaves"]["params.out"]["chunks"][0].update(file=file))
    error = refused(folder.parent)
    assert error.what == "a file that the manifest does not list"
    assert error.where.endswith("$.leaves['params.out'].chunks[0].file")
    (folder / "manifest.json").write_text(whole)

    def list_it(record):
        record["files"][file] = record["files"]["rank0.safetensors"]
        record["leaves"]["params.out"]["chunks"][0].update(file=file)

    rewrite(folder, list_it)
    error = refused(folder.parent)
    assert (error.what, error.where[-7:]) == ("a file name that no save writes", "$.files")


@pytest.mark.parametrize(
    "edit",
    [
        {"shape": [10**30]},
        {"shape": [-5]},
        {"shape": [-1, -5]},
        {"dtype": "pickle"},
        {"dtype": "float99"},
        {"chunks": []},
        {"chunks": [(0, 0, 4)]},
        {"chunks": [(0, 1, 5)]},
        {"chunks": [(0, 0, 10**30)]},
        {"chunks": [(0, 0, -5)]},
        {"chunks": [(0, 0, 10), (0, 10, -5)]},
        {"chunks": [(0, -5, 10)]},
        {"chunks": [(0, 0, 5)] * 2},
        {"chunks": [(0, 0, 0), (0, 0, 5)]},
        {"chunks": [(-1, 0, 5)]},
        {"chunks": [(2**63, 0, 5)]},
        {"chunks": [(10**30, 0, 5)]},
        {"chunks": [(10**6, 0, 5)]},
        {"chunks": [(8192, 0, 5)]},
        {"shape": [10**15], "chunks": [(0, 0, 10**15)]},
        {"shape": [0], "chunks": [(0, 0, 5)]},
        {"chunks": [(4096, 0, 5, [[0, 6]])]},
        {"chunks": [(4096, 0, 5, [[-1, 6]])]},
        {"chunks": [(4096, 0, 5, [])]},
        {"chunks": [(4096, 0, 5, [[0, 5], [0, 1]])]},
        {"chunks": [(4096, 0, 5, [[0, 4]])]},
        {"chunks": [(4096, 0, 4, [[0, 4]])]},
        {"chunks": [(4096, 0, 3, [[0, 3]]), (4096, 0, 2, [[2, 2]])]},
        {"chunks": [(4096, 0, 3, [[0, 3]]), (4096, 0, 3, [[2, 3]])]},
        {"chunks": [(4096, 0, 5, [[10**30, 5]])]},
        {"chunks": [(4096, 0, 3, [[0, 3]]), (4096, 0, 3, [[0, 3]])]},
        {"chunks": [(4096, 0, 0, [[0, 0]])]},
        {"chunks": [(4096, 0, 5, None), (4096, 0, 2, [[3, 2]])]},
    ],
)
def test_absurd_shapes_dtypes_and_chunks(folder, edit):
    rest = {"file": "rank0.safetensors", "checksum": "xxh3:0"}
    if "chunks" in edit:
        names = ("offset", "start", "length", "box")
        edit = {**edit, "chunks": [dict(zip(names, c, strict=False), **rest) for c in edit["chunks"]]}
    rewrite(folder, lambda m: m["leaves"]["params.out"].update(edit))
    error = refused(folder.parent)
    assert "$.leaves['params.out']" in error.where or error.what == "this is a save of another model: params.out"


def nodes(value, at=()):
    yield at
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(part, (*at, key))


@MANY
@given(st.data())
def test_any_change_of_a_manifest_is_refused_or_harmless(tmp_path_factory, data):
    dir = tmp_path_factory.getbasetemp() / "manifests"
    folder = dir / "step00000001"
    if not dir.exists():
        fds.save(dir, small_state(1), STEP)
    whole = (folder / "manifest.json").read_text()
    record = json.loads(whole)
    at = data.draw(st.sampled_from([n for n in nodes(record) if n]))

    def edit(record):
        place = record = copy.deepcopy(record)
        for key in at[:-1]:
            place = place[key]
        match data.draw(st.sampled_from(["replace", "remove", "add"])):
            case "remove":
                del place[at[-1]]
            case "add" if isinstance(place, dict):
                place[data.draw(st.text(max_size=5))] = data.draw(json_values)
            case _:
                place[at[-1]] = data.draw(json_values)
        return record

    if at != ("checksum",):
        rewrite(folder, edit)
    try:
        state, _ = fds.load(dir, STEP, {})
    except StorageError as error:
        assert error.where
    else:
        assert_same_bits(state, small_state(1))
    finally:
        (folder / "manifest.json").write_text(whole)


@MANY
@given(at=st.integers(0, 5000), new=st.binary(min_size=1, max_size=20), cut=st.integers(0, 20))
def test_any_change_of_a_tensor_file_is_refused_or_harmless(tmp_path_factory, at, new, cut):
    dir = tmp_path_factory.getbasetemp() / "tensors"
    path = dir / "step00000001" / "rank0.safetensors"
    if not dir.exists():
        fds.save(dir, small_state(1), STEP)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + new + whole[at + cut :])
    try:
        state, _ = fds.load(dir, STEP, {})
    except StorageError as error:
        assert error.where.startswith(str(path))
    else:
        assert_same_bits(state, small_state(1))
    finally:
        path.write_bytes(whole)


def save(dir, state):
    fds.save(dir, state, Template(state, ("ema(0.9)", "adamw(0.1)")))


def test_another_model_names_the_first_parameter_that_differs_with_both_shapes(tmp_path):
    def model(width):
        b, a = torch.ones(4, width), torch.ones(width)
        return state_of({"b": b, "a": a, "c": torch.ones(2)}, opt={"exp_avg": {"b": b}})

    mine, yours = model(3), model(5)
    save(tmp_path, mine)
    error = refused(tmp_path, Template(yours))
    assert error.what == "this is a save of another model: params.b"
    assert error.got == "float32 (4, 3) in the save" and error.want == "float32 (4, 5), as this step has it"
    assert "3 leaves differ in all" in error.hint and "compose('ema(0.9)', 'adamw(0.1)')" in error.hint


def test_parameters_come_before_the_rest(tmp_path):
    save(tmp_path, state_of({"a": torch.ones(3)}, opt={"m": {"a": torch.ones(3)}}))
    yours = state_of({"a": torch.ones(3).bfloat16()}, opt={"m": {"a": torch.ones(4)}})
    object.__setattr__(yours, "step", torch.tensor(0.0))
    error = refused(tmp_path, Template(yours))
    assert error.got == "float32 (3,) in the save" and error.want == "bfloat16 (3,), as this step has it"


def test_a_parameter_missing_or_beyond(tmp_path):
    save(tmp_path, state_of({"layer.weight": torch.ones(3)}))
    error = refused(tmp_path, Template(state_of({"layers.weight": torch.ones(3)})))
    assert error.what == "this save has other parameters: params.layers.weight"
    assert error.got == "nothing in the save" and "did you mean 'params.layer.weight'?" in error.hint
    error = refused(tmp_path, Template(state_of({})))
    assert error.got == "float32 (3,) in the save" and error.want == "nothing, as this step has it"


def test_a_slot_missing_or_beyond(tmp_path):
    plain, averaged = state_of(torch.ones(3)), state_of(torch.ones(3), slots={"ema": torch.ones(3)})
    save(tmp_path, plain)
    error = refused(tmp_path, Template(averaged))
    assert error.what == "this save is of another composition: slots.ema" and error.got == "nothing in the save"
    save(tmp_path, averaged)
    assert refused(tmp_path, Template(plain)).want == "nothing, as this step has it"


def test_a_refused_load_changes_no_file(folder):
    before = {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()}
    refused(folder.parent, Template(state_of({})))
    fds.load(folder.parent, STEP, {})
    assert {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()} == before
    assert tree.leaves(fds.load(folder.parent, STEP, {})[0])


def test_slices_of_parameters_are_not_taken_for_their_structure(tmp_path):
    def body():
        sharded = fds.compose(fds.shard_optimizer(fds.mesh(dp=2)["dp"]), fds.sgd(0.1))
        step = sharded(lambda params, batch: params["w"].sum())
        state = step.init({"w": torch.ones(8)})
        fds.save(tmp_path, state, step)
        with pytest.raises(StorageError) as error:
            fds.load(tmp_path, step, state.params)
        return error.value.what, error.value.hint

    (what, hint), _ = fds.simulate(body, 2)
    assert what.endswith("the structure of whole parameters cannot be derived from slices")
    assert "named_parameters" in hint


@contextlib.contextmanager
def another_user():
    """Be a user who may not do everything, if this one may."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


CLOSED = ["", "run", "run/one", "run/one/manifest.json", "run/one/rank0.safetensors", "run/latest"]


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("how", ["load", "export", "verify", "import", "save", "command"])
def test_what_belongs_to_another_user_is_refused(folder, tmp_path, closed, how, capsys, monkeypatch):
    monkeypatch.chdir("/")
    place, mode = tmp_path / closed, (tmp_path / closed).stat().st_mode
    for above in (tmp_path, *tmp_path.parents[:-2]):
        above.chmod(above.stat().st_mode | 0o055)
    place.chmod(0)
    run = tmp_path / "run"
    calls = {
        "load": lambda: fds.load(run, STEP, {}),
        "export": lambda: fds.export_weights(run, "/proc/nothing"),
        "verify": lambda: verify(run),
        "import": lambda: fds.import_weights(run, STEP, {}),
        "save": lambda: fds.save(run, small_state(2), STEP, "one"),
    }
    try:
        with another_user():
            if how == "command":
                assert main(["storage", "show", str(run)]) in (0, 2)  # what can be shown of it
                assert main(["storage", "verify", str(run)]) in (1, 2) or closed == "run/latest"
                assert "Traceback" not in capsys.readouterr().err
                return
            try:
                found = calls[how]()
            except StorageError as error:
                assert str(tmp_path) in str(error) or how == "export", error
            else:
                assert how == "verify" and found, "it was read"
    finally:
        place.chmod(mode)
