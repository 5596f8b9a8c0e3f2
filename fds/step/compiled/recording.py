"""Recording the work of a call: one graph of torch's operators, from the tensors of state and batch to the next ones.

`make_fx` records what autograd has made of the work: forward, backward and the update are one straight list of
operators, and those that write over the state do so in the graph.
Source: Reed et al. 2022, "torch.fx", arXiv:2112.08429; torch.fx.experimental.proxy_tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fds import random, reading, tree
from fds.errors import FdsError
from fds.state import State, Token
from fds.step.captured.batches import Kind
from fds.step.captured.memory import builder, leaves_of, same_memory, storage_of
from fds.step.checks import capture, one_graph
from fds.step.checks.state_check import StateTensors
from fds.step.compiled.draws import Drawing, Draws
from fds.step.compiled.updates import traceable
from fds.step.donated import TAKEN
from fds.step.stations import Program

_READERS = [getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")]  # which call no operator
_READS = "reads a number of a tensor: "


@attrs.frozen(eq=False)
class Recorded:
    """The work of calls on one kind of batch.

    Attributes:
        graph: the leaves of a state, its `step`, the batch, `draws` and `constants` -> outputs; it writes over leaves.
        constants: tensors that the work reads and that are neither of the state nor of the batch.
        draws: what is drawn for every call.
        metrics: the names of the first outputs after the state's `step`.
        moved: which leaves are outputs, the last ones; the others are what they were, written over or not.
    """

    graph: fx.GraphModule
    constants: list[Tensor]
    draws: Draws
    metrics: list[str]
    moved: list[int]


def record(program: Program, state: State, held: StateTensors, kind: Kind, *, fuses: bool) -> Recorded:
    """Do the work of a call on copies of a state's leaves, and record it. Nothing that was given is written to.

    Raises `LossError`, `ScheduleError` or `ComposeError`, with the line that is at fault, for what a graph would not
    repeat.
    """
    structure, leaves = held.structure, [x.clone() for x in leaves_of(state, held.structure)]
    build, n, names, moved = builder(state, structure), len(leaves), list[str](), list[int]()
    devices = [state.step.device]
    drawing = Drawing(devices)
    host = [state.key, state.calls]
    watch = Watch(drawing, host)

    def work(*given: Tensor) -> list[Tensor]:
        batch = [
            x.detach().requires_grad_(like.requires_grad) for x, like in zip(given[n + 1 :], kind.tensors, strict=True)
        ]
        inner = State(given[n], state.calls, key=state.key, token=Token(memory=TAKEN), **build(list(given[:n])))
        with watch, Unread(host):
            after, metrics = program.work(inner, program.check(inner), kind.build(batch))
            ends = leaves_of(after, structure)
            names.extend(metrics)
            moved.extend(i for i in range(n) if ends[i].numel() and not same_memory(ends[i], given[i]))
            found = [after.step, *metrics.values(), *(ends[i] for i in moved)]
            return [x.detach().clone() if watch.is_given(x, given) else x for x in found]

    inputs = [*leaves, state.step.clone(), *(x.detach() for x in kind.tensors)]
    graph = reading.Recording(fuses, host)
    try:
        with own_metadata(), random.scope(devices), random.seeding_by(drawing), reading.recording(graph):
            module: fx.GraphModule = make_fx(work)(*inputs)
            draws = drawing.finished()
    except FdsError:
        raise
    except RuntimeError as error:
        refused = capture.synchronized if isinstance(capture.first_of(error), Unrepeated) else one_graph.unrecorded
        raise refused(error) from error
    finally:
        program.runtime.pool.sweep()
    watch.check()
    constants = _lifted(module, drawing.made)
    return Recorded(module, constants, draws, names, moved)


@contextlib.contextmanager
def own_metadata() -> Generator[None]:
    """Let what runs inside neither see nor leave metadata of nodes, which torch keeps in one place of the process.

    Selective checkpointing writes to it in a recording, also in one that is refused, and never clears it.
    """
    with traceback.preserve_node_meta(enable=False):
        traceback.get_current_meta().clear()  # it is restored from a copy
        yield


class Unrepeated(RuntimeError):
    """An operator reads a number of a tensor, or has a result whose shape depends on one."""


class Unread(TorchFunctionMode):
    """Refuses what reads tensors without an operator."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch. Raises `Unrepeated`."""
        if func in _READERS and not any(args[0] is x for x in self.host):
            raise Unrepeated(_READS + func.__name__)
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Refuses operators whose results a graph would not repeat, and has random numbers drawn before it."""

    def __init__(self, drawing: Drawing, host: list[Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  (which torch leaves without types)
        self.drawing, self.host = drawing, host
        self.outside: dict[int, tuple[Tensor, int]] = {}  # tensors that were there before, by id, and their versions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator. Raises `Unrepeated` for one that reads numbers, `LossError` where what it draws does."""
        kwargs = kwargs or {}
        given = [x for x in tree.leaves([args, kwargs]) if isinstance(x, Tensor)]
        for x in given:
            if not _is_recorded(x) and not any(x is one for one in self.drawing.made):
                self.outside.setdefault(id(x), (x, x._version))
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_certain(func, args, kwargs):
            return self.drawing.draw(func, args, kwargs)
        reads = torch.Tag.data_dependent_output in func.tags
        if reads and not all(_is_constant(x) or any(x is one for one in self.host) for x in given):
            raise Unrepeated(_READS + str(func))
        if torch.Tag.dynamic_output_shape in func.tags and _depends_on_values(func, given):
            raise Unrepeated(f"has a shape that depends on values: {func}")
        return traceable(func)(*args, **kwargs)

    def is_given(self, x: Tensor, given: Sequence[Tensor]) -> bool:
        """Say whether a tensor is in memory that the graph is given."""
        return not _is_recorded(x) or storage_of(x) in {*map(storage_of, given), *map(storage_of, self._outside())}

    def check(self) -> None:
        """Raise `LossError` where a tensor was written to that is neither of the state nor of the batch."""
        if any(x._version != version for x, version in self.outside.values()):
            raise one_graph.written()

    def _outside(self) -> list[Tensor]:
        return [x for x, _ in self.outside.values()]


def _is_recorded(x: Tensor) -> bool:
    mode: Any = get_proxy_mode()
    return get_proxy_slot(x, mode.tracer, None) is not None


def _is_constant(x: Tensor) -> bool:
    """Say whether a tensor is made in the work and has the same values in every call."""
    mode: Any = get_proxy_mode()
    return getattr(get_proxy_slot(x, mode.tracer, None), "constant", None) is not None


def _is_certain(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Say whether an operator that may draw does not: attention without dropout."""
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    return "dropout_p" in {one.name for one in func._schema.arguments} and not named.get("dropout_p")


def _depends_on_values(func: Any, given: Sequence[Tensor]) -> bool:
    """Say whether the shape of a result does: indexing by integers has one that does not."""
    return func.overloadpacket is not torch.ops.aten.index or any(
        x.dtype in (torch.bool, torch.uint8) for x in given[1:]
    )


def _lifted(module: fx.GraphModule, draws: list[Tensor]) -> list[Tensor]:
    """Make tensors that a graph holds inputs of it, draws first; return the others."""
    graph: Any = module.graph
    graph.set_codegen(CodeGen())  # inputs one by one, and a list of outputs
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    known: dict[int, list[fx.Node]] = {}
    held: dict[int, Tensor] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            x = getattr(module, node.target)
            known.setdefault(id(x), []).append(node)
            held[id(x)] = x
    constants = [x for x in held.values() if not any(x is one for one in draws)]
    for i, x in enumerate([*draws, *constants]):
        with graph.inserting_after(last):
            last = graph.placeholder(f"held_{i}")
        for node in known.get(id(x), []):
            node.replace_all_uses_with(last)
            graph.erase_node(node)
    module.recompile()
    return constants
