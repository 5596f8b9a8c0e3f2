"""Run as a program: files that were tampered with, each refused with `StorageError` or read as it was written.

    python -m tests.storage.campaign.fuzz FOLDER SEED INPUTS

Prints a line of JSON for each kind of file; exits with an error at the first input that is read as something else,
raises anything else, opens a file elsewhere, writes one, takes a second of processor time, or 512 MiB of memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, strategies as st

import fds
from fds import tree
from fds.collectives import Axis
from fds.command_line import main as run_command, runs as _imported_before_files_are_watched  # noqa: F401
from fds.errors import StorageError
from fds.step import Dimension, Placement, Replicated, SplitDim, fill, transform
from fds.storage import open_source, verify
from fds.storage.disk import writer
from fds.storage.format import manifest
from fds.storage.source import blank_like
from tests.bits import bits
from tests.storage.campaign.mutations import byte_mutations, headers, json_mutations, text_of

MEMORY = 512 * 2**20  # bytes beyond what the program has when it begins
SECONDS = 1.0  # of processor time that an input may take
PARAMS = {"w": torch.arange(9000.0).view(90, 100), "b": torch.ones(7), "e": torch.ones(0, 3)}
EXTRA = {"position": [1, 2.5, None, {"a": "b"}]}
WRITES = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
    "subprocess.Popen",
    "os.system",
    "socket.connect",
)


class Watch:
    """Sees every file that this program opens while it is on."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        self.base = ""  # the folder against which a name is opened
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if self.folder is None:
            return
        if event in WRITES:
            self.seen.append(f"{event}{args}")
        elif event == "open" and not isinstance(args[0], int) and args[0] is not None:
            path, flags = os.path.realpath(os.path.join(self.base, os.fsdecode(args[0]))), args[2]
            inside = path == self.folder or path.startswith(self.folder + os.sep)
            if (not inside and not path.endswith((".py", ".pyc", ".so"))) or flags & (os.O_WRONLY | os.O_RDWR):
                self.seen.append(f"open {path!r:.200} with {flags}")

    @contextlib.contextmanager
    def on(self, folder: Path):
        """Note what is opened outside a folder, and what is written anywhere."""
        plain = os.open

        def opened(path, flags, mode=0o777, *, dir_fd=None):
            self.base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            try:
                return plain(path, flags, mode, dir_fd=dir_fd)
            finally:
                self.base = ""

        self.folder = os.path.realpath(folder)
        try:
            with mock.patch.object(os, "open", opened):
                yield
        finally:
            self.folder = None


@attrs.define
class Read:
    """What reading the inputs of one kind came to."""

    kind: str
    watch: Watch
    inputs: int = 0
    outcomes: Counter = attrs.field(factory=Counter)
    slowest: float = 0.0

    def attempt(self, folder: Path, body: Callable[[], Any], check: Callable[[Any], None] = lambda found: None) -> None:
        """Read; check what is read. Raises `AssertionError`, or what should not have been raised."""
        began = time.process_time()
        try:
            with self.watch.on(folder), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # StorageWarning says what differs
                found = body()
        except StorageError as error:
            assert len(str(error)) < 200_000, "an error without end"
            self.outcomes["refused"] += 1
        else:
            check(found)
            self.outcomes["read"] += 1
        taken = time.process_time() - began
        self.slowest = max(self.slowest, taken)
        assert not self.watch.seen, self.watch.seen
        assert taken < SECONDS, f"{taken} s"


def step() -> fds.Step:
    return fds.compose(fds.sgd(0.1, momentum=0.9), fds.ema(0.9))(lambda params, batch: params["w"].sum())


class Columns(Placement):
    """Every rank has some columns of `w`, and all of the rest."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def lies(self, name: str) -> SplitDim | Replicated:
        return SplitDim(1) if name == "w" else Replicated()


@transform
def columns(axis: Axis):
    return lambda step: fill(step, topology=Dimension(axis, "tensor", Columns(axis)))


def write_base(root: Path) -> None:
    """Write what is mutated: a save of four ranks in many chunks, one where each keeps its own, and weights.

    Two ranks share the optimizer, and two hold half of the columns of `w`.
    """

    def body() -> None:
        mesh = fds.mesh(dp=2, tp=2)
        shared = fds.shard_optimizer(mesh["dp"], stage=1, bucket_bytes=20_000)
        parts = fds.sgd(0.1, momentum=0.9), fds.ema(0.9), columns(mesh["tp"])
        one = fds.compose(shared, *parts)(lambda params, batch: params["w"].sum())
        state = one.init(PARAMS)
        fds.save(root / "run", state, one, "one", EXTRA)
        fds.save(root / "local", state, one, "one", EXTRA, local=True)

    with mock.patch.object(writer, "BLOCK", 4 * writer.ALIGN):
        fds.simulate(body, 4)
    from safetensors.torch import save_file

    (root / "weights").mkdir()
    save_file({"w": PARAMS["w"], "b": PARAMS["b"]}, root / "weights" / "model-1.safetensors")
    save_file({"e": PARAMS["e"]}, root / "weights" / "model-2.safetensors")
    index = {
        "metadata": {"total_size": 36028},
        "weight_map": {"w": "model-1.safetensors", "b": "model-1.safetensors", "e": "model-2.safetensors"},
    }
    (root / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))


def sealed(record: Any) -> bytes:
    """Return a manifest as bytes, with the checksum that belongs to it where it can have one."""
    text = text_of(record)
    try:
        return text_of({**record, "checksum": manifest._checksum(json.loads(text))})
    except (RecursionError, TypeError):
        return text


def opened(folder: Path, name: str) -> Any:
    """Return a manifest's record without its checksum."""
    record = json.loads((folder / name).read_text())
    del record["checksum"]
    return record


class Fuzz:
    """The base, how it is mutated, and what may be read."""

    def __init__(self, root: Path):
        self.root, self.watch = root, Watch()
        write_base(root)
        self.state, _ = fds.load(root / "run", step(), PARAMS)
        for name in ("run", "local"):
            shutil.copytree(root / name, root / f"{name}.whole")

    def read(
        self,
        read: Read,
        dir: Path,
        extra: Any = EXTRA,
        *,
        local: bool = False,
        loose: bool = False,
        forged: bool = False,
    ) -> None:
        """Load in the usual way and hold what is read; then in the ways that forgive more, and by the other doors."""

        def same(found: Any) -> None:
            got, want = tree.paths(found[0]), tree.paths(self.state)
            for name, x in got.items():  # whoever forges the checksum too may give a leaf another's name
                may_be = want.values() if forged else [want[name]]
                alike = [y for y in may_be if (y.shape, y.dtype) == (x.shape, x.dtype)]
                assert any(bits(x).equal(bits(y)) for y in alike), f"{name} was read as something else"
            assert text_of(found[1]) == text_of(extra), "another extra was read"

        load = lambda **more: fds.load(dir, step(), PARAMS, local=local, **more)
        read.attempt(dir, load, same)
        if loose:
            read.attempt(dir, lambda: load(verify=False, slots=("init", "drop"), strict=False))
            read.attempt(dir, lambda: load(params_only=True, strict=False, tag="one"))
            run = dir / "rank0" if local else dir
            read.attempt(dir, lambda: verify(run))
            for words in (["show", str(run)], ["show", f"{run}:one"], ["verify", str(run)]):
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    read.attempt(dir, lambda words=words: run_command(["storage", *words]))

    def manifests(self, read: Read, data: st.DataObject) -> None:
        """Manifests with fields that are absurd, mostly under a checksum that belongs to them."""
        record = data.draw(json_mutations(opened(self.root / "run.whole" / "one", manifest.NAME)))
        text = sealed(record) if isinstance(record, dict) and data.draw(st.integers(0, 5)) else text_of(record)
        self._with(read, "run", Path("one") / manifest.NAME, text, data, record)

    def local_manifests(self, read: Read, data: st.DataObject) -> None:
        """The same, of one of two ranks that each keep their own."""
        record = data.draw(json_mutations(opened(self.root / "local.whole" / "rank1" / "one", manifest.NAME)))
        text = sealed(record) if isinstance(record, dict) else text_of(record)
        self._with(read, "local", Path("rank1") / "one" / manifest.NAME, text, data, None)

    def manifest_bytes(self, read: Read, data: st.DataObject) -> None:
        """Manifests with bytes that are not what was written."""
        name = Path("one") / manifest.NAME
        text = data.draw(byte_mutations((self.root / "run.whole" / name).read_bytes()))
        self._with(read, "run", name, text, data, None)

    def latest(self, read: Read, data: st.DataObject) -> None:
        """A file `latest` that is not what was written."""
        text = data.draw(byte_mutations(b"one\n") | st.binary(max_size=30))
        self._with(read, "run", Path("latest"), text, data, None)

    def tensor_files(self, read: Read, data: st.DataObject) -> None:
        """Tensor files with other headers or bytes, with and without a manifest that knows of it."""
        folder, name = self.root / "run.whole" / "one", f"rank{data.draw(st.integers(0, 3))}.safetensors"
        changed = data.draw(headers((folder / name).read_bytes()))
        record = opened(folder, manifest.NAME)
        if data.draw(st.booleans()):
            record["files"][name]["bytes"] = len(changed)
        if data.draw(st.booleans()):
            end = 8 + min(int.from_bytes(changed[:8], "little"), len(changed))
            record["files"][name]["header"] = writer.checksum(changed[:end])
        known = self.root / "run" / "one" / manifest.NAME
        known.write_bytes(sealed(record))
        try:
            self._with(read, "run", Path("one") / name, changed, data, None)
        finally:
            shutil.copy(folder / manifest.NAME, known)

    def weights(self, read: Read, data: st.DataObject) -> None:
        """Weights of others: headers and bytes of safetensors, and the index beside them."""
        folder = self.root / "weights"
        names = ["model-1.safetensors", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
        path = folder / data.draw(st.sampled_from(names))
        whole = path.read_bytes()
        if path.suffix == ".json":
            changed = data.draw(json_mutations(json.loads(whole)).map(text_of) | byte_mutations(whole))
        else:
            changed = data.draw(headers(whole))
        path.write_bytes(changed)
        (self.root / "tampered").write_bytes(changed)
        try:
            for given in {path, folder}:
                read.attempt(folder, lambda given=given: fds.import_weights(given, step(), PARAMS, strict=False))
                read.attempt(folder, lambda given=given: _all_of(given))
        finally:
            path.write_bytes(whole)

    def _with(self, read: Read, run: str, name: Path, content: bytes, data: st.DataObject, record: Any) -> None:
        path = self.root / run / name
        path.write_bytes(content)
        (self.root / "tampered").write_bytes(content)  # for whoever looks into what was found
        extra = record.get("extra") if isinstance(record, dict) else EXTRA
        try:
            loose, forged = not data.draw(st.integers(0, 4)), read.kind.endswith("manifests")
            self.read(read, self.root / run, extra, local=run == "local", loose=loose, forged=forged)
        finally:
            shutil.copy(self.root / f"{run}.whole" / name, path)


def _all_of(path: Path) -> None:
    source = open_source(path)
    for name, leaf in source.leaves.items():
        source.read(name, 0, blank_like(leaf, torch.Size(leaf.shape).numel()))


SHARES = {
    "manifests": 0.35,
    "local_manifests": 0.1,
    "manifest_bytes": 0.1,
    "latest": 0.05,
    "tensor_files": 0.2,
    "weights": 0.2,
}


def main(root: Path, seed: int, inputs: int) -> None:
    """Read so many inputs, and print what came of each kind."""
    fuzz = Fuzz(root)
    for name in ("run", "local"):  # what is imported or started late is so now
        fuzz.read(Read(name, fuzz.watch), root / name, local=name == "local", loose=True)
    fuzz.watch.seen.clear()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    for name, share in SHARES.items():
        read = Read(name, fuzz.watch)
        try:
            _run(getattr(fuzz, name), read, seed, max(int(inputs * share), 1))
        except _Found as found:
            error = found.__cause__
            assert error is not None
            error.__notes__ = []  # of Hypothesis, the whole input among them
            traceback.print_exception(error)
            print(f"{name}: input {read.inputs}, seed {seed}, kept as {root / 'tampered'}", file=sys.stderr)
            sys.exit(1)
        print(json.dumps([name, read.inputs, dict(read.outcomes), round(read.slowest, 3)]), flush=True)


def _run(read_one: Callable[[Read, st.DataObject], None], read: Read, seed: int, inputs: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        read.inputs += 1
        read.watch.seen.clear()
        try:
            read_one(read, data)
        except Exception as error:
            raise _Found from error

    run()


class _Found(BaseException):
    """An input that is not as it should be; nothing goes on from here, shrinking neither."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    with mock.patch.object(time, "sleep"):  # load looks again at what it cannot read: somebody might be replacing it
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
