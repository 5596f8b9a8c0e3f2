"""What goes wrong on one rank is an error on all of them, which names it; and the saves that were there stay."""

import errno
import os

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.errors import RankError, StorageError
from fds.step import Memory
from fds.storage.disk import folders, writer
from fds.storage.format import manifest
from tests import sweeps
from tests.storage.faults import at_request
from tests.storage.topologies import Topology

RANKS = 3
PARAMS = {"w": torch.arange(100.0), "b": torch.ones(3)}
NAMES = ("step00000001", "step00000002")


def loss(params, batch):
    return (params["w"].sum() + params["b"].sum()) * batch


def make_step(stage=1):
    return fds.compose(fds.donate(), Topology(RANKS, stage).shard(), fds.sgd(0.1))(loss)


def rank() -> int:
    return fds.mesh(dp=-1).rank


def state_after(step, calls):
    state = step.init(PARAMS)
    for _ in range(calls):
        state, _ = step(state, torch.tensor(1.0))
    return state


def told(body, error=StorageError):
    """Return what the ranks raise; it is the same text on all."""

    def run():
        try:
            body()
        except error as caught:
            return caught
        return None

    errors = fds.simulate(run, RANKS)
    assert len({str(e) for e in errors}) == 1, errors
    return errors[0]


def save(dir, calls, *args, stage=1, **kwargs):
    step = make_step(stage)
    return fds.save(dir, state_after(step, calls), step, *args, **kwargs)


def found(dir):
    """Return how many calls the last save has behind it, as every rank loads it."""

    def load():
        step = make_step()
        state, _ = fds.load(dir, step, PARAMS)
        want = state_after(step, int(state.calls))
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(want), strict=True))
        return int(state.calls)

    (calls,) = set(fds.simulate(load, RANKS))
    return calls


@pytest.mark.sweep
def test_an_error_at_any_request_of_any_rank_changes_nothing(tmp_path):
    def fail(request):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    n, failed = 0, []
    while True:
        dir = tmp_path / str(n)
        fds.simulate(lambda dir=dir: save(dir, 1, "best"), RANKS)
        with at_request(n, fail) as made:
            error = told(lambda dir=dir: save(dir, 2, "best"))
        if error is None and len(made) <= n:
            break  # there was no such request
        if error is not None:
            assert not (dir / ".saving").exists()
            failed.append(error.what[:6])
            placed = "replace" in made[:n]  # the flush after the last rename
            what = (
                "the save is in its place, but may not outlive a power failure"
                if placed
                else ("the file system refuses this save")
            )
            assert error.what[6:] == f": {what}" and error.got == os.strerror(errno.ENOSPC)
        if error is None or "replace" in made[:n]:  # not needed, or the flush after the last rename
            assert found(dir) == 2
        else:
            assert found(dir) == 1 and folders.tags(dir) == ["best"]
        n += sweeps.STRIDE
    assert made.count("create") == 6  # three files of tensors, the lock, the manifest, latest
    assert set(failed) == {"rank 0", "rank 1", "rank 2"} and failed.count("rank 1") >= 4 // sweeps.STRIDE


def at(which, body, otherwise):
    return body() if rank() == which else otherwise()


@pytest.mark.parametrize("which", range(RANKS))
def test_a_state_that_one_rank_cannot_save(tmp_path, which):
    fds.simulate(lambda: save(tmp_path, 1), RANKS)
    bad = lambda: save(tmp_path, 2, extra={"a": (1, 2)})
    error = told(lambda: at(which, bad, lambda: save(tmp_path, 2)))
    assert error.what == f"rank {which}: extra has a value that JSON would change" and error.where == "extra.a"

    def donated():
        step = make_step()
        state = state_after(step, 1)
        new, _ = step(state, torch.tensor(1.0))
        fds.save(tmp_path, *at(which, lambda: (state, step), lambda: (new, step)))

    assert told(donated).what.startswith(f"rank {which}: save: this state was donated")

    def broken():
        step = make_step()
        state = state_after(step, 2)
        at(which, lambda: object.__setattr__(state, "buffers", {"x": 3}), lambda: None)
        fds.save(tmp_path, state, step)

    assert told(broken).what == f"rank {which}: a leaf of the state is not a tensor"
    assert found(tmp_path) == 1


def test_ranks_that_do_not_save_the_same_thing(tmp_path):
    fds.simulate(lambda: save(tmp_path, 1), RANKS)
    for which in (1, 2):
        error = told(lambda: at(which, lambda: save(tmp_path, 2, "odd"), lambda: save(tmp_path, 2, "even")))  # noqa: B023
        assert (error.what, error.got) == ("the ranks do not agree on the tag", "odd")
        assert (error.where, error.want) == (f"rank {which}", "even, as rank 0 has it")
        other = tmp_path / "other"
        error = told(lambda: at(which, lambda: save(other, 2), lambda: save(tmp_path, 2)))  # noqa: B023
        assert (error.what, error.got) == ("the ranks do not agree on the directory", str(other))

    def save_other(step_of=lambda step: step, **fields):
        step = make_step()
        state = state_after(step, 2)
        other = lambda: (attrs.evolve(state, **fields), step_of(step))
        fds.save(tmp_path, *at(1, other, lambda: (state, step)), "x")

    error = told(lambda: save_other(calls=torch.tensor(1)))
    assert error.what == "the ranks do not agree on the calls made"
    assert (error.where, error.got, error.want) == ("rank 1", "1", "2, as rank 0 has it")
    memory = Memory("x", lambda params, device: torch.ones(1, device=device), "parameters")
    remembers = lambda step: attrs.evolve(step, memory={"x": memory})
    error = told(lambda: save_other(remembers, slots={"x": torch.ones(1)}))
    assert error.what == "the ranks do not agree on the leaves"
    error = told(lambda: save_other(buffers={"x": torch.ones(1)}))
    assert error.what == "rank 1: a part of the state does not fit its parameters and this step"
    assert error.where == "buffers.x"
    assert found(tmp_path) == 1 and not other.exists() and folders.tags(tmp_path) == [NAMES[0]]


def test_slices_of_another_step(tmp_path):
    def body():
        state = state_after(make_step(), 1)
        fds.save(tmp_path, state, make_step(0))

    error = told(body)
    assert error.what == "rank 0: these parameters are sharded in another way" and not os.listdir(tmp_path)


def test_a_key_pressed_on_one_rank_is_an_error_on_the_others(tmp_path, monkeypatch):
    fds.simulate(lambda: save(tmp_path, 1), RANKS)
    plain = writer.write

    def write(path, header, spans):
        if rank() == 1:
            raise KeyboardInterrupt
        return plain(path, header, spans)

    monkeypatch.setattr(writer, "write", write)

    def body():
        try:
            save(tmp_path, 2)
        except (StorageError, KeyboardInterrupt) as error:
            return type(error), str(error)

    first, second, third = fds.simulate(body, RANKS)
    assert first == third == (StorageError, "rank 1: KeyboardInterrupt: ") and second[0] is KeyboardInterrupt
    monkeypatch.undo()
    assert found(tmp_path) == 1 and not (tmp_path / ".saving").exists()


def load(dir, params=PARAMS, **kwargs):
    return fds.load(dir, make_step(), params, **kwargs)


@pytest.mark.parametrize("which", range(RANKS))
def test_a_flipped_byte_that_one_rank_reads_is_an_error_on_all(tmp_path, which):
    folder = fds.simulate(lambda: save(tmp_path, 1), RANKS)[0]
    path = folder / f"rank{which}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # of what nobody else reads
    assert told(lambda: load(tmp_path)).what == f"rank {which}: a tensor file was changed after it was written"
    path.unlink()
    leaves = manifest.read_manifest(folder).leaves
    all_read = path.name in {leaves[name].chunks[0].file for name in ("step", "calls", "key")}
    assert told(lambda: load(tmp_path)).what == f"rank {0 if all_read else which}: a tensor file is missing"


def test_loads_that_are_refused(tmp_path):
    assert told(lambda: load(tmp_path / "nowhere")).what == "rank 0: there is no save here"
    fds.simulate(lambda: save(tmp_path, 1), RANKS)
    assert told(lambda: load(tmp_path, tag="best")).what == "rank 0: there is no save under this tag"
    error = told(lambda: load(tmp_path, tag=NAMES[0] if rank() else None))
    assert (error.what, error.where) == ("the ranks do not agree on the tag", "rank 1")
    assert error.want == "None, as rank 0 has it"
    wider = {**PARAMS, "b": torch.ones(4)}
    error = told(lambda: load(tmp_path, wider if rank() == 2 else PARAMS))
    assert error.what == "rank 2: this is a save of another model: params.b"
    assert error.got == "float32 (3,) in the save" and error.want == "float32 (4,), as this step has it"
    assert told(lambda: load(tmp_path, {"w": 3})).what == "rank 0: a parameter is not a tensor"


def test_a_save_that_is_replaced_while_ranks_read_it(tmp_path, monkeypatch):
    fds.simulate(lambda: save(tmp_path, 1, "best"), RANKS)
    fds.simulate(lambda: save(tmp_path / "other", 2, "best"), RANKS)
    plain = fds.storage.loading.read_manifest
    newer = lambda folder: plain(tmp_path / "other" / "best" if rank() == 1 else folder)
    monkeypatch.setattr(fds.storage.loading, "read_manifest", newer)
    error = told(lambda: load(tmp_path))
    assert error.what.startswith("rank 1: a tensor file was changed") or "do not agree" in error.what


def test_a_rank_that_never_comes_is_reported(tmp_path):
    def body():
        if rank() != 1:
            save(tmp_path, 1)

    with pytest.raises(RankError, match="rank 1 has ended"):
        fds.simulate(body, RANKS)
    assert not (tmp_path / NAMES[0]).exists()
