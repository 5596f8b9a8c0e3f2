"""Rooms and doors: who may import whom, what nobody may import, and what no file may be called."""

import ast
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BELOW_STEP = "_html reading state loss autodiff optim layout collectives media microbatches random tree errors"
ROOMS = {
    "errors": "",
    "containers": "",
    "lazy": "",
    "reading": "",
    "_html": "",
    "tree": "containers errors",
    "random": "errors tree",
    "microbatches": "tree errors",
    "state": "tree errors _html",
    "autodiff": "tree errors",
    "loss": "_html autodiff random tree errors",
    "layout": "tree errors",
    "collectives": "random tree errors",
    "media": "collectives errors tree",
    "attention_layouts": "random errors",
    "kernels": "attention_layouts errors lazy",
    "optim": "kernels layout collectives reading tree errors",
    "schedules": "errors",
    "step": f"{BELOW_STEP} kernels",
    "plans": "errors _html",
    "transports": "step kernels layout collectives reading random errors",
    "profiling": f"attention_layouts step {BELOW_STEP}",
    "curvature": "kernels loss random collectives state tree errors",
    "compression": "step loss layout kernels lazy nn optim reading random state tree errors storage",
    "transforms": f"compression step {BELOW_STEP} kernels nn plans profiling schedules",
    "nn": "attention_layouts collectives kernels loss random tree errors",
    "storage": "step media state optim layout collectives tree errors",
    "data": "collectives display lazy media microbatches random storage tree errors",
}
ROOMS["hf"] = "attention_layouts collectives kernels lazy loss nn random state step storage tree errors"
ROOMS["adapters"] = "lazy state step storage transforms tree errors"
ROOMS["distill"] = "kernels lazy loss optim state step transforms tree errors"
ROOMS["display"] = "_html collectives errors"
ROOMS["timing"] = "collectives errors loss profiling state step tree"
ROOMS["monitors"] = "collectives display errors state"
ROOMS["debugging"] = f"step storage profiling display {BELOW_STEP}"
ROOMS["reporting"] = "_html collectives display errors plans state step storage transforms"
ROOMS["config"] = " ".join(ROOMS)
ROOMS["trainer"] = "collectives config errors microbatches optim state step storage transforms"
ROOMS["elastic"] = "collectives config data errors media state step storage"
ROOMS["tuning"] = (
    "_html collectives config errors media plans profiling schedules state step transforms transports tree"
)
ROOMS["command_line"] = " ".join(ROOMS)
VERSION = "fds.__version__"  # which every room may ask for: it is there before any of them
PROGRAM = "__main__"  # wherever it lies, it belongs to the room of commands: `python -m fds.plans` is `fds plans`
ONLY = {"torch.utils._pytree": "tree", "torch.distributed": "collectives", "triton": "kernels"}
ONLY |= {"torch.distributed.checkpoint": "storage"}  # files; the longest name counts
# for those who read what others wrote
UNPICKLING = {"torch.load", "torch.serialization.safe_globals", "pickle.Unpickler", "pickle.UnpicklingError"}
UNPICKLERS = "fds.storage.foreign"
NOBODY = ["pickle", "_pickle", "cloudpickle", "dill", "shelve", "torch.serialization"]
SHAPELESS = {"util", "utils", "helper", "helpers", "common", "engine", "manager"}
MAX_LINES = 400


def violations(sources: dict[str, str]) -> list[str]:
    """List every door that `sources` (path such as 'fds/step.py' -> text) opens and should not."""
    modules = {dotted(path): path for path in sources}
    trees = {module: ast.parse(sources[path], path) for module, path in modules.items()}
    nodes = {module: list(ast.walk(tree)) for module, tree in trees.items()}
    uses = {m: set(names_used(nodes[m], package_of(m, modules[m]))) - {VERSION} for m in modules}
    found = []
    for module, path in modules.items():
        parts = module.split(".")
        found += [f"{path}: '{part}' is a name for no idea" for part in parts if part in SHAPELESS]
        if (length := lines_of_code(sources[path], nodes[module])) > MAX_LINES:
            found.append(f"{path}: {length} lines of code, more than {MAX_LINES}")
        if module != "fds" and room(module) not in ROOMS:
            found.append(f"{path}: the room '{room(module)}' is not in the table")
        for name in sorted(uses[module]):
            found += [f"{path}: {wrong}" for wrong in wrong_use(module, name, modules)]
        if path.endswith("/__init__.py"):
            found += [f"{path}: {wrong}" for wrong in wrong_bindings(module, trees[module], modules)]
        if loads_anything(nodes[module], package_of(module, path)):
            found.append(f"{path}: torch.load is called with weights_only=True written out, and not used otherwise")
    graph = {m: {owner(n, modules) for n in names} - {m, None} for m, names in uses.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"cycle: {' <- '.join(error.args[1])}")
    return list(dict.fromkeys(found))


def wrong_use(module: str, name: str, modules: dict[str, str]) -> Iterator[str]:
    """Say what is wrong, if anything, with `module` naming `name` (dotted)."""
    target = owner(name, modules) or name
    here, there = room(module), room(target)
    it = max((it for it in ONLY if inside(name, it)), key=len, default="")
    if it and here != ONLY[it]:
        yield f"{name} is for fds/{ONLY[it]} alone"
    if name in UNPICKLING:
        if not inside(module, UNPICKLERS):
            yield f"{name} is for {UNPICKLERS.replace('.', '/')} alone"
    elif any(inside(name, it) for it in NOBODY) and not (name == "torch.serialization" and inside(module, UNPICKLERS)):
        yield f"{name} is for nobody"
    if not inside(name, "fds") or module == "fds":
        return
    home, _, file = target.rpartition(".")
    if file.startswith("_") and not file.endswith("__") and not inside(module, home) and not inside(home, module):
        yield f"{name} is private; import it from {home}"
    if there == "":
        yield f"{name} comes from the roof; import it from its room"
    elif there != here and there not in ROOMS.get(here, "").split():
        yield f"{here} may not import {there} ({name})"
    elif here == "transforms" == there and f"{target}.".split(".")[2] != f"{module}.".split(".")[2] != "":
        yield f"transforms never import each other ({name})"


def wrong_bindings(package: str, tree: ast.Module, modules: dict[str, str]) -> Iterator[str]:
    """Say which names of a package's `__init__` are a submodule's too; of the roof, only what is public."""
    bound = dict(bindings(tree, package))
    for name in all_of(tree) if package == "fds" else bound:
        submodule = f"{package}.{name}"
        if any(inside(module, submodule) for module in modules) and bound.get(name, submodule) != submodule:
            yield f"binds '{name}', the name of a room or module in it"


def names_used(nodes: Sequence[ast.AST], package: str) -> Iterator[str]:
    """Yield the dotted name of all that is imported, and of every attribute reached through an import.

    Imports inside functions and under TYPE_CHECKING count like any other.
    """
    imported = list(imports(nodes, package))
    yield from (target for _, target in imported)
    known = dict(imported) | {name: name for name, target in imported if inside(target, name)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, *rest = chain(node)
            if root in known:
                yield ".".join([known[root], *rest])


def chain(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; the first is empty where they follow no name, as in `f().b`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def loads_anything(nodes: Sequence[ast.AST], package: str) -> bool:
    """Tell whether torch.load is used in any other way than by a call with weights_only=True."""
    known = dict(imports(nodes, package))
    safe = {
        id(node.func)
        for node in nodes
        if isinstance(node, ast.Call)
        and any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            root, *rest = chain(node)
            if ".".join([known.get(root, root), *rest]) == "torch.load" and id(node) not in safe:
                return True
    return False


def imports(nodes: Sequence[ast.AST], package: str) -> Iterator[tuple[str, str]]:
    """Yield (local name, dotted target) of every import in `nodes`, relative ones from `package` on."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((alias.asname or alias.name, f"{base}.{alias.name}") for alias in node.names)


def bindings(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield (name, dotted origin) of all that a package's `__init__` binds at its top level, lazily too."""
    yield from imports(
        [*tree.body, *(it for node in tree.body if isinstance(node, ast.If) for it in node.body)], package
    )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, f"{package}.__init__.{node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((t.id, f"{package}.__init__.{t.id}") for t in targets if isinstance(t, ast.Name))


def all_of(tree: ast.Module) -> list[str]:
    """Return what `__all__` names, if it is there."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def lines_of_code(source: str, nodes: Sequence[ast.AST]) -> int:
    """Count the lines that are neither blank, nor comment, nor docstring."""
    prose = set()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(number not in prose and bool(line) and not line.startswith("#") for number, line in lines)


def dotted(path: str) -> str:
    """Turn 'fds/optim/adam.py' into 'fds.optim.adam', and a package's `__init__.py` into the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str, path: str) -> str:
    return module if path.endswith("/__init__.py") else module.rpartition(".")[0]


def room(module: str) -> str:
    return "command_line" if module.endswith(f".{PROGRAM}") else f"{module}.".split(".")[1]


def inside(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def owner(name: str, modules: dict[str, str]) -> str | None:
    """Return the module that a dotted name is of: its longest prefix that is one."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_the_house_keeps_its_doors():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("fds/**/*.py"))}
    assert sources
    found = violations(sources)
    assert not found, "\n".join(found)


def test_the_table_itself_has_no_cycle():
    TopologicalSorter({name: line.split() for name, line in ROOMS.items()}).prepare()
    assert {name for line in ROOMS.values() for name in line.split()} <= set(ROOMS)


BROKEN = {
    "a door that is not on the line": (
        {"fds/tree.py": "from fds import state", "fds/state.py": ""},
        "may not import state",
    ),
    "a relative one": ({"fds/plans/a.py": "from ..tree import map", "fds/tree.py": ""}, "may not import tree"),
    "inside a function": ({"fds/errors.py": "def f():\n    import fds.tree as t"}, "errors may not import tree"),
    "for the type checker": ({"fds/tree.py": "if TYPE_CHECKING:\n    from fds.state import State"}, "tree may not"),
    "from the roof": ({"fds/__init__.py": "", "fds/step.py": "from fds import compose"}, "from the roof"),
    "through the roof": ({"fds/__init__.py": "", "fds/step.py": "import fds\nfds.adamw"}, "from the roof"),
    "an unknown room": ({"fds/attic.py": ""}, "'attic' is not in the table"),
    "pytree outside tree": ({"fds/state.py": "import torch\ntorch.utils._pytree.tree_map"}, "for fds/tree alone"),
    "distributed outside collectives": ({"fds/step.py": "from torch import distributed"}, "collectives alone"),
    "triton outside kernels": ({"fds/nn/norm.py": "import triton.language as tl"}, "for fds/kernels alone"),
    "transforms among themselves": (
        {"fds/transforms/a.py": "from fds.transforms.b import f", "fds/transforms/b.py": ""},
        "transforms never import each other",
    ),
    "transforms, relative": (
        {"fds/transforms/p/x.py": "from .. import b", "fds/transforms/b.py": ""},
        "transforms never import each other",
    ),
    "a cycle in a room": (
        {"fds/optim/a.py": "from . import b", "fds/optim/b.py": "from fds.optim.a import f"},
        "cycle: fds.optim.",
    ),
    "a name of a submodule": (
        {"fds/loss/__init__.py": "from fds.loss.run import run", "fds/loss/run.py": ""},
        "binds 'run', the name of",
    ),
    "a room named like a function": (
        {"fds/__init__.py": "from fds.data.load import data\n__all__ = ['data']", "fds/data/load.py": ""},
        "binds 'data', the name of",
    ),
    "a room named like a function, loaded when it is used": (
        {
            "fds/__init__.py": "if TYPE_CHECKING:\n    from fds.data.load import data\n__all__ = ['data']",
            "fds/data/load.py": "",
        },
        "binds 'data', the name of",
    ),
    "a private module of another room": (
        {"fds/config/a.py": "from fds.optim._sgd import sgd", "fds/optim/_sgd.py": ""},
        "fds.optim._sgd.sgd is private; import it from fds.optim",
    ),
    "a private module of the alcove beside": (
        {"fds/kernels/a/x.py": "from fds.kernels.b import _y", "fds/kernels/b/_y.py": ""},
        "fds.kernels.b._y is private; import it from fds.kernels.b",
    ),
    "a command, from a room below it": (
        {"fds/plans/a.py": "from fds.command_line import main", "fds/command_line/__init__.py": ""},
        "plans may not import command_line",
    ),
    "a name for no idea": ({"fds/optim/utils.py": ""}, "'utils' is a name for no idea"),
    "two ideas in a file": ({"fds/tree.py": "x = 1\n" * 401}, "401 lines of code"),
    "pickle": ({"fds/storage/save.py": "import pickle"}, "pickle is for nobody"),
    "torch.load": (
        {"fds/storage/load.py": "import torch as t\nt.load('x', weights_only=True)"},
        "torch.load is for fds/storage/foreign alone",
    ),
    "classes for torch.load": (
        {"fds/storage/load.py": "import torch\ntorch.serialization.safe_globals([])"},
        "torch.serialization.safe_globals is for fds/storage/foreign alone",
    ),
    "the rest of torch.serialization": (
        {"fds/storage/foreign/files.py": "import torch\ntorch.serialization.add_safe_globals([])"},
        "torch.serialization.add_safe_globals is for nobody",
    ),
    "all that a pickle wants": (
        {"fds/storage/foreign/files.py": "import torch as t\nt.load('x')"},
        "torch.load is called with weights_only=True",
    ),
    "all that it wants, said": (
        {"fds/storage/foreign/files.py": "from torch import load\nload('x', weights_only=False)"},
        "torch.load is called with weights_only=True",
    ),
    "all that it wants, perhaps": (
        {"fds/storage/foreign/files.py": "import torch\ntorch.load('x', weights_only=safe)"},
        "torch.load is called with weights_only=True",
    ),
    "torch.load handed on": (
        {"fds/storage/foreign/files.py": "import torch\nread = torch.load\nread('x', weights_only=True)"},
        "torch.load is called with weights_only=True",
    ),
    "torch.load by another name": (
        {"fds/storage/foreign/files.py": "from torch import load as read\nmap(read, 'x')"},
        "torch.load is called with weights_only=True",
    ),
}


@pytest.mark.parametrize(("sources", "words"), BROKEN.values(), ids=BROKEN)
def test_an_open_door_is_seen(sources, words):
    assert words in "\n".join(violations(sources))


def test_what_is_allowed_is_not_reported():
    assert not violations(
        {
            "fds/__init__.py": "from fds import random\nfrom fds.step import fill\n__all__ = ['fill', 'random']",
            "fds/random.py": "from .errors import FdsError",
            "fds/errors.py": "",
            "fds/plans/__main__.py": "from fds.command_line import run",
            "fds/command_line/__init__.py": "",
            "fds/step/__init__.py": "from fds.step import program\nfrom fds.step.program import compose",
            "fds/step/program.py": '"""Fill.' + "\n" * 400 + '"""\nfrom fds import random\nrandom.key',
            "fds/transforms/pipeline/run.py": "from .send import send\nfrom fds.step import compose",
            "fds/transforms/pipeline/send.py": "",
            "fds/kernels/adam.py": "import triton.language as tl",
            "fds/kernels/__init__.py": "from fds.kernels.norms._rms import rms_norm",
            "fds/kernels/norms/_rms.py": "",
            "fds/kernels/norms/_layer.py": "from fds.kernels.norms import _rms",
            "fds/storage/foreign/files.py": "import torch\nwith torch.serialization.safe_globals([]):\n"
            "    torch.load('x', weights_only=True)",
        }
    )
