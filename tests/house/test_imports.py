"""What `import fds` loads, and that the names that it loads later are all there, for people and for type checkers."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fds
from fds import data, kernels
from fds.lazy import lazily
from tests import ranks

ROOT = Path(__file__).parents[2]
HEAVY = {"attrs", "cattrs", "hjson", "matplotlib", "numpy", "rich", "safetensors", "torch", "triton", "xxhash"}


def loaded_by(code: str, after: str = "") -> set[str]:
    """Return the modules that a new process loads by running `code`, beside those that `after` loads before."""
    lines = ["import sys", after, "before = {*sys.modules}", code, "print(*({*sys.modules} - before))"]
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split())


def test_importing_fds_loads_nothing_but_fds():
    loaded = loaded_by("import fds")
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("fds")} == {"fds", "fds.lazy"}


def test_a_plain_step_loads_no_room_that_it_does_not_use():
    names = ["functional", "compose", "accumulate", "clip_by_global_norm", "adamw", "schedules.warmup_cosine"]
    loaded = loaded_by("import fds\n" + "\n".join(f"fds.{name}" for name in names), after="import torch")
    assert loaded & HEAVY == {"attrs"}
    assert not loaded & {f"fds.{room}" for room in ("config", "data", "nn", "plans", "storage", "transforms.pipeline")}
    assert {name for name in loaded if name.startswith("fds.kernels.")} == {"fds.kernels.choice"}


def test_a_loader_loads_no_room_that_an_analysis_needs():
    loaded = loaded_by("from fds import DistributedLoader", after="import torch")
    assert not {name for name in loaded if name.startswith(("fds.step", "fds.storage", "fds.display", "rich"))}


def under_type_checking(tree: ast.Module) -> list[str]:
    """Return the dotted names that a package imports under TYPE_CHECKING."""
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [f"{node.module}.{alias.name}" for node in block.body for alias in node.names]


def when_used(tree: ast.Module, package: str) -> list[str]:
    """Return the dotted names that a package loads when they are used."""
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazily"]
    homes = ast.literal_eval(call.args[1])
    submodules = "".join(ast.literal_eval(word.value) for word in call.keywords if word.arg == "submodules")
    named = [f"{module}.{name}" for module, names in homes.items() for name in names.split()]
    return named + [f"{package}.{name}" for name in submodules.split()]


@pytest.mark.parametrize("package", [fds, kernels, data], ids=lambda package: package.__name__)
def test_what_is_loaded_when_it_is_used_is_what_a_type_checker_sees(package):
    tree = ast.parse(Path(package.__file__).read_text())
    names = when_used(tree, package.__name__)
    assert sorted(names) == sorted(under_type_checking(tree))
    assert set(package.__all__) <= {name.rpartition(".")[2] for name in names} <= set(dir(package))
    for name in names:
        home, _, last = name.rpartition(".")
        value = getattr(package, last)
        assert vars(package)[last] is value  # it is asked for once
        assert value is sys.modules.get(name, value) is getattr(importlib.import_module(home), last)


def test_every_room_can_be_reached_by_name():
    parts = {path.stem for path in (ROOT / "fds").glob("[!_]*") if path.suffix == ".py" or path.is_dir()}
    assert {name for name in parts - {"lazy"} if f"fds.{name}" != getattr(fds, name).__name__} == set()


def test_names_that_are_loaded_later_can_be_pickled_and_imported_by_star():
    assert pickle.loads(pickle.dumps(fds.adamw)) is fds.adamw
    names: dict = {}
    exec("from fds import *", names)
    assert set(fds.__all__) <= set(names)


def test_a_name_that_does_not_exist_is_an_attribute_error_that_python_can_correct():
    with pytest.raises(AttributeError, match="module 'fds' has no attribute 'adamW'") as caught:
        fds.adamW  # noqa: B018
    assert caught.value.name == "adamW" and caught.value.obj is fds  # from which a traceback finds "adamw"
    with pytest.raises(ImportError, match="cannot import name 'adamW' from 'fds'"):
        from fds import adamW  # noqa: F401
    assert not hasattr(fds, "__wrapped__")


def test_an_import_that_fails_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "far.py").write_text("import a_library_that_is_not_there\nx = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = ModuleType("near")
    package.__getattr__, _ = lazily("near", {"far": "x"})
    monkeypatch.setitem(sys.modules, "near", package)
    for _ in range(2):  # it is tried again
        with pytest.raises(ModuleNotFoundError, match="No module named 'a_library_that_is_not_there'"):
            package.x  # noqa: B018
    (tmp_path / "far.py").write_text("x = 1\n")
    importlib.invalidate_caches()
    assert package.x == 1


def import_tools():
    """Import what stands beside the tests; what is a program of its own runs only when it is asked to."""
    for path in sorted((ROOT / "tests").glob("**/*.py")):
        if not path.name.startswith("test_") and path.name != "__main__.py":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_every_tool_of_the_tests_can_be_imported():
    code, said = ranks.alone(import_tools)
    assert code == 0, said
