"""fds as others get it: the source distribution, the wheel, and the wheel in an environment without anything else."""

import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fds
from tests.once import once
from tests.package.example import ROOT, program

CACHES = {"__pycache__", ".git"}


def files(*options: str) -> set[str]:
    """Return the files of the repository as git lists them, or in an unpacked source distribution all of them."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", *options], cwd=ROOT, check=True, capture_output=True, text=True)
        return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return {str(path) for path in paths if not (CACHES & {*path.parts} or path.parts[0].startswith(".venv"))}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build both, the wheel from the source distribution, and return their folder."""
    source = tmp_path_factory.mktemp("source")

    def build(out: Path) -> None:
        for name in files("--cached", "--others", "--exclude-standard"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
        ran = subprocess.run(command, cwd=out, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return once(tmp_path_factory, "dist", build)


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_source_distribution_holds_the_repository(built):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    assert files("--cached") <= names
    assert not {name for name in names if CACHES & {*PurePosixPath(name).parts}}


def test_the_wheel_holds_fds_and_nothing_else(built):
    wheel = zipfile.ZipFile(only(built, "*.whl"))
    about = f"fds-{fds.__version__}.dist-info"
    code = {name for name in wheel.namelist() if not name.startswith(f"{about}/")}
    assert code == {name for name in files("--cached", "--others", "--exclude-standard") if name.startswith("fds/")}
    assert {"fds/py.typed", "fds/__init__.py"} <= code
    assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert wheel.read(f"{about}/entry_points.txt").decode() == "[console_scripts]\nfds = fds.command_line:run\n"
    metadata = Parser().parsestr(wheel.read(f"{about}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("fds", fds.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")


def declared(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the names of the distributions that one requires without extras, and of those that they require."""
    known: set[str] = set()
    todo = list(distribution.requires or [])
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            known.add(name)
            todo += importlib.metadata.distribution(name).requires or []
    return known


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory) -> Path:
    """Return an environment of the wheel and links to the distributions that it requires, and no others."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site]
    subprocess.run([sys.executable, "-m", "pip", *install, only(built, "*.whl")], check=True)
    (installed,) = importlib.metadata.distributions(name="fds", path=[str(site)])
    for name in declared(installed):
        distribution = importlib.metadata.distribution(name)
        for top in {PurePosixPath(str(file)).parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder


@functools.cache
def run(folder: Path, code: str) -> subprocess.CompletedProcess:
    return subprocess.run([folder / "bin" / "python", "-I", "-c", code], cwd=folder, capture_output=True, text=True)


def test_the_readmes_example_runs_where_only_the_wheel_and_what_it_requires_are(fresh):
    ran = run(fresh, program())
    assert ran.returncode == 0, ran.stderr
    assert re.search(f"ran with {re.escape(str(fresh))}.*fds/__init__.py", ran.stdout)


def test_the_command_runs_there_with_what_it_loads_when_it_is_chosen(fresh):
    words = ["explain", "fds.json"], ["plans", "gpipe"], ["doctor", "--quick"], ["storage", "verify", "--help"]
    (fresh / "fds.json").write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}')
    ran = run(fresh, f"import fds.command_line\nfor words in {words}: print(words, fds.command_line.main(words))")
    assert ran.stdout.count("fds.adam") and "peak live" in ran.stdout, ran.stderr
    assert "usage: fds storage verify" in ran.stdout, ran.stderr


def test_what_fds_does_not_require_is_not_there(fresh):
    for name in ("pytest", "matplotlib", "hypothesis", "hjson", "tests"):
        assert f"No module named '{name}'" in run(fresh, f"import {name}").stderr
