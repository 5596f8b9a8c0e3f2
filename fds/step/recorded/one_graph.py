"""One graph of a step: the work of a call, recorded as operators of torch, and compiled by a backend of torch.compile.

`make_fx` records what autograd has made of the work: forward, backward and the update are one straight list of
operators, from the tensors of state and batch to the next ones, and those that write over the state do so in the graph.
Source: Reed et al. 2022, "torch.fx", arXiv:2112.08429; torch.fx.experimental.proxy_tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from fds import random, reading, tree
from fds.state import State, Token
from fds.step.all_stations import Program, Stations
from fds.step.checks.state_check import StateTensors
from fds.step.donated import TAKEN
from fds.step.recorded import refusals
from fds.step.recorded.generators import Drawing
from fds.step.recorded.recorder import Kind, Recorder, Recordings, Work, elsewhere, refuse_first
from fds.step.recorded.state_memory import builder, leaves_of, same_memory, storage_of

_AS_IT_IS = ("eager", "aot_eager")  # backends which run the operators of a graph one by one
_FUSED = {getattr(torch.ops.aten, name) for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")}
_READERS = [getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")]  # they call no operator
_READS = "reads a number of a tensor: "
_is_watched = _python_dispatch.is_in_any_mode_without_ignore_compile_internals


@attrs.frozen(eq=False)
class OneGraph(Recorder):
    """Compiles the work of a call as one graph, by a backend that is given no Python.

    The second call on a kind of batch is recorded, which does the work on copies, then compiled and run, and from then
    on calls run the graph.
    """

    backend: str | Callable[..., Any]  # its name, or a function of a graph and its inputs
    mode: str | None  # of inductor
    options: dict[str, Any] | None
    name: str

    def __repr__(self) -> str:
        return f"one graph for every kind of batch, from the batch to the update, compiled by {self.name}"

    @property
    def fuses(self) -> bool:
        """Whether the backend is known to fuse operators into kernels."""
        return isinstance(self.backend, str) and self.backend not in _AS_IT_IS

    def refuse(self, step: Stations) -> None:
        """Raise `ComposeError` for a step that cannot be one graph."""
        meeting = "ranks that share a step meet between its parts; fds.compile() compiles the loss alone"
        apart = ", ".join(str(x) for x in step.contexts if not getattr(x, "in_one_graph", True))
        chosen = (apart, "fds.compile(), or neither", "a compiler computes by operators of its own, with other bits")
        refuse_first("this step cannot be one graph", [chosen, *elsewhere(step, meeting=meeting)])

    def open(self, device: torch.device) -> Recordings:
        """Return an empty cache."""
        return _Graphs(device, self)

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """Return the compiled graph. Raises `ComposeError` where the backend fails."""
        from torch import _dynamo, _inductor  # as slow to import as they are large

        fake = FakeTensorMode()
        like: list[Any] = list(map(fake.from_tensor, inputs))  # as torch.compile does: nobody keeps the state's memory
        try:
            with torch.no_grad(), _without_metadata():
                if self.backend == "inductor":
                    chosen = {} if self.mode is None else _inductor.list_mode_options(self.mode)
                    compiled: Any = _inductor.compile(graph, like, options={**chosen, **(self.options or {})})
                    return compiled
                function: Any = _dynamo.lookup_backend(self.backend) if isinstance(self.backend, str) else self.backend
                return function(graph, like, **({"options": self.options} if self.options else {}))
        except Exception as error:
            got, want = f"{type(error).__name__}: {error}"[:400], f"a step that {self.name} can compile"
            raise refusals.UNCOMPILED.error(got, want=want) from error


@attrs.define(eq=False)
class _Graphs(Recordings):
    """The compiled work of a step, by the kind of batch and what else decides what operators do."""

    compiler: OneGraph

    def may_record(self, state: State) -> bool:
        return not _is_watched()  # by a mode that has to see every operator

    def key(self, state: State, held: StateTensors, kind: Kind) -> tuple[None, Hashable]:
        """Return the batch's key with the state's structure, its strides, and settings of torch."""
        leaves, at = tree.leaves((state.params, state.opt, state.buffers, state.slots)), self.device.type
        strides = tuple((i, x.stride()) for i, x in enumerate(leaves) if not x.is_contiguous())
        cast = torch.is_autocast_enabled(at) and torch.get_autocast_dtype(at)
        settings = cast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        return None, (held.structure, kind.key, strides, settings)

    def new_work(self, place: None, kind: Kind) -> Work:
        return _CompiledWork(self.compiler)


@attrs.define(eq=False)
class _CompiledWork:
    """The work on batches of one kind: run once as it is, then recorded and compiled."""

    compiler: OneGraph
    has_run: bool = False
    graph: _Graph | None = None

    def __call__(
        self, program: Program, state: State, held: StateTensors, kind: Kind
    ) -> tuple[State, dict[str, Tensor]]:
        if not self.has_run:
            self.has_run = True
            return program.work(state, held, kind.batch)
        if self.graph is None:
            graph = _record(program, state, held, kind, fuses=self.compiler.fuses)
            inputs = [*leaves_of(state, held.structure), state.step, *graph.inputs(state, kind)]
            graph.function = self.compiler.compile(graph.module, inputs)
            del inputs  # which would keep the state from being written over
            self.graph = graph
        return self.graph.run(program, state, held, kind)


@attrs.define(eq=False)
class _Graph:
    """The recorded work of calls on one kind of batch.

    Attributes:
        module: the leaves of a state, its `step`, the batch, draws and `constants` -> outputs; it writes over leaves.
        constants: tensors that the work reads and that are neither of the state nor of the batch.
        drawing: draws the numbers of every call.
        metrics: the names of the first outputs after the state's `step`.
        moved: which leaves are outputs, the last ones; the others are what they were, written over or not.
        function: the compiled module.
    """

    module: fx.GraphModule
    constants: list[Tensor]
    drawing: Drawing
    metrics: list[str]
    moved: list[int]
    function: Callable[..., Sequence[Tensor]] | None = None

    def inputs(self, state: State, kind: Kind) -> list[Tensor]:
        """Return the inputs after those of the state."""
        return [*(x.detach() for x in kind.tensors), *self.drawing.again(state.key, state.calls), *self.constants]

    def run(self, program: Program, state: State, held: StateTensors, kind: Kind) -> tuple[State, dict[str, Tensor]]:
        """Run it over memory of the next state that holds the old values."""
        assert self.function is not None
        rest, structure, new = self.inputs(state, kind), held.structure, program.leaves(state, held)
        params, slots = structure.put(held.parts, new.trained), {**state.slots, **new.after}
        over = State(state.step, state.calls, params, new.opt, state.buffers, slots, state.key)
        leaves = leaves_of(over, structure)
        new.give_up(state)
        with torch.no_grad():
            step, *outputs = self.function(*leaves, state.step, *rest)
        metrics = dict(zip(self.metrics, outputs, strict=False))
        for i, x in zip(self.moved, outputs[len(metrics) :], strict=True):
            leaves[i] = x
        parts = builder(over, structure)(leaves)
        return State(step, state.calls + 1, key=state.key, token=new.token(state), **parts), metrics


def _record(program: Program, state: State, held: StateTensors, kind: Kind, *, fuses: bool) -> _Graph:
    """Do the work of a call on copies of a state's leaves, and record it. Nothing that was given is written to.

    Raises `LossError`, `ScheduleError` or `ComposeError`, with the line that is at fault, for what a graph would not
    repeat.
    """
    structure, leaves = held.structure, [x.clone() for x in leaves_of(state, held.structure)]
    build, n, names, moved = builder(state, structure), len(leaves), list[str](), list[int]()
    devices, host = [state.step.device], [state.key, state.calls]
    drawing = Drawing(devices)
    watch = _Watch(drawing, host)

    def work(*inputs: Tensor) -> list[Tensor]:
        pairs = zip(inputs[n + 1 :], kind.tensors, strict=True)
        batch = kind.build([x.detach().requires_grad_(like.requires_grad) for x, like in pairs])
        inner = State(inputs[n], state.calls, key=state.key, token=Token(memory=TAKEN), **build(list(inputs[:n])))
        with watch, _Unread(host):
            after, metrics = program.work(inner, program.check(inner), batch)
            ends = leaves_of(after, structure)
            names.extend(metrics)
            moved.extend(i for i in range(n) if ends[i].numel() and not same_memory(ends[i], inputs[i]))
            outputs = [after.step, *metrics.values(), *(ends[i] for i in moved)]
            return [x.detach().clone() if watch.is_input(x, inputs) else x for x in outputs]

    inputs = [*leaves, state.step.clone(), *(x.detach() for x in kind.tensors)]
    recording = reading.Recording(fuses, host)
    try:
        with _without_metadata(), random.scope(devices), random.seeding_by(drawing), reading.recording(recording):
            module: fx.GraphModule = make_fx(work)(*inputs)
            drawn = drawing.finish()
    except RuntimeError as error:
        is_read = isinstance(refusals.first_of(error), _Unrepeated)
        raise (refusals.READ if is_read else refusals.UNRECORDED).caused_by(error) from error
    finally:
        program.runtime.pool.sweep()
    watch.check()
    return _Graph(module, _lift(module, drawn), drawing, names, moved)


@contextlib.contextmanager
def _without_metadata() -> Generator[None]:
    """Let what runs inside neither see nor leave metadata of nodes, which torch keeps in one place of the process.

    Selective checkpointing writes to it in a recording, also in one that is refused, and never clears it.
    """
    with traceback.preserve_node_meta(enable=False):
        traceback.get_current_meta().clear()  # it is restored from a copy
        yield


class _Unrepeated(RuntimeError):
    """An operator reads a number of a tensor, or has a result whose shape depends on one."""


class _Unread(TorchFunctionMode):
    """Refuses what reads tensors without an operator."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch. Raises `_Unrepeated`."""
        if func in _READERS and not any(args[0] is x for x in self.host):
            raise _Unrepeated(_READS + func.__name__)
        return func(*args, **(kwargs or {}))


class _Watch(_python_dispatch.TorchDispatchMode):
    """Refuses operators whose results a graph would not repeat, and has random numbers drawn before it."""

    def __init__(self, drawing: Drawing, host: list[Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  (which torch leaves without types)
        self.drawing, self.host = drawing, host
        self.outside: dict[int, tuple[Tensor, int]] = {}  # tensors that were there before, by id, and their versions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator. Raises `_Unrepeated` for one that reads numbers, `LossError` where what it draws does."""
        kwargs = kwargs or {}
        tensors = [x for x in tree.leaves([args, kwargs]) if isinstance(x, Tensor)]
        for x in tensors:
            if _node(x) is None and not _is_among(x, self.drawing.tensors):
                self.outside.setdefault(id(x), (x, x._version))
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_certain(func, args, kwargs):
            return self.drawing.draw(func, args, kwargs)
        reads = torch.Tag.data_dependent_output in func.tags
        if reads and not all(_is_constant(x) or _is_among(x, self.host) for x in tensors):
            raise _Unrepeated(_READS + str(func))
        if torch.Tag.dynamic_output_shape in func.tags and _depends_on_values(func, tensors):
            raise _Unrepeated(f"has a shape that depends on values: {func}")
        return (_traceable(func) if func.overloadpacket in _FUSED else func)(*args, **kwargs)

    def is_input(self, x: Tensor, inputs: Sequence[Tensor]) -> bool:
        """Say whether a tensor is in memory that the graph is given."""
        outside = (y for y, _ in self.outside.values())
        return _node(x) is None or storage_of(x) in {*map(storage_of, inputs), *map(storage_of, outside)}

    def check(self) -> None:
        """Raise `LossError` where a tensor was written to that is neither of the state nor of the batch."""
        if any(x._version != version for x, version in self.outside.values()):
            raise refusals.WRITE.error("one that is neither of the state nor made in the step")


def _node(x: Tensor) -> Any:
    """Return what stands for a tensor in the graph that is recorded; None for one that was there before."""
    mode: Any = get_proxy_mode()
    return get_proxy_slot(x, mode.tracer, None)


def _is_among(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(x is y for y in tensors)


def _is_constant(x: Tensor) -> bool:
    """Say whether a tensor is made in the work and has the same values in every call."""
    return getattr(_node(x), "constant", None) is not None


def _is_certain(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Say whether an operator that may draw does not: attention without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" in names and not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p")


def _depends_on_values(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Say whether the shape of a result does: indexing by integers has one that does not."""
    is_index = func.overloadpacket is torch.ops.aten.index
    return not is_index or any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])


def _lift(module: fx.GraphModule, draws: list[Tensor]) -> list[Tensor]:
    """Make tensors that a graph holds inputs of it, draws first; return the others."""
    graph: Any = module.graph
    graph.set_codegen(CodeGen())  # inputs one by one, and a list of outputs
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    reads = [(node, getattr(module, node.target)) for node in graph.nodes if node.op == "get_attr"]
    tensors = {id(x): x for _, x in reads}
    constants = [x for x in tensors.values() if not _is_among(x, draws)]
    for i, x in enumerate([*draws, *constants]):
        with graph.inserting_after(last):
            last = graph.placeholder(f"held_{i}")
        for node in [node for node, y in reads if y is x]:
            node.replace_all_uses_with(last)
            graph.erase_node(node)
    module.recompile()
    return constants


@functools.cache
def _library() -> Any:
    return torch.library.Library("fds", "FRAGMENT")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Return nothing: all that an update does to tensors without data."""


@functools.cache
def _traceable(op: Any) -> Any:
    """Define the operator to record in the place of one of torch's fused updates, for the whole process.

    Those of torch 2.13 have no meta kernels, or write to lists that may be empty, which its functionalization refuses.
    This one has the same signature, calls the same function, and is understood by `auto_functionalized`.
    """
    name, overload = op.overloadpacket.__name__.strip("_"), op._overloadname
    name += "" if overload == "default" else f"_{overload}"
    schema = str(op._schema).partition("(")[2]
    _library().define(f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library().impl(name, op, "CompositeExplicitAutograd")
    library: Any = torch.library  # which torch leaves without types
    library.register_fake(f"fds::{name}", _do_nothing, lib=_library())
    return getattr(torch.ops.fds, name).default
