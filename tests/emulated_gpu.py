"""A GPU that is emulated: tensors on `meta` whose values lie elsewhere, and work that can be captured and replayed.

Tensors on `meta` have neither values nor addresses, and are no CPU tensors to anybody who asks. `Gpu`, a dispatch mode,
does what is asked of them a second time, with twins of them in memory of its own; so a step runs as it does on a GPU:
its kernels are launched, nobody reads a number in passing.

What a capture does to a GPU it does here. Launched work is kept and not done. A replay does it again, in the same
memory, with every number that came from the host as it was. Random numbers come from states of a generator; in a
capture the current state may be switched, not seeded or read, and a replay goes on from the seed that it was given
since. Reading a number raises `RuntimeError`, and so does copying between host and device.

It says nothing of streams (there is one), of the allocator (memory that is free is not used again), of how addresses
are aligned, of kernels that are compiled for a GPU, or of how long that takes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fds
from fds import random, tree
from fds.step.batch import Whole
from fds.step.recorded.cuda_graphs import CudaGraphs

META = torch.device("meta")
READS = ("_local_scalar_dense", "equal", "is_nonzero")


@attrs.define(eq=False)
class Numbers:
    """A state of the generator: where a sequence of random numbers is."""

    seed: int
    drawn: int = 0  # 4 for every operator that drew
    torch_state: Tensor | None = None

    def drawing(self):
        """Return a scope in which the CPU's generator, which does the work here, is in this state."""
        return _drawing(self)


@contextlib.contextmanager
def _drawing(numbers):
    default = torch.default_generator
    before = default.get_state()
    if numbers.torch_state is None:
        default.manual_seed(numbers.seed ^ 0x5EED)  # other numbers than those of the CPU for the same seed
    else:
        default.set_state(numbers.torch_state)
    yield
    numbers.torch_state, numbers.drawn = default.get_state(), numbers.drawn + 4
    default.set_state(before)


class Generator:
    """What `torch.Generator` is on a GPU: a reference to a state, and which of its methods a capture forbids."""

    def __init__(self, gpu, numbers=None):
        self.gpu, self.numbers = gpu, numbers or Numbers(67280421310721)

    def clone_state(self):
        """Return a generator with a state of its own."""
        return Generator(self.gpu, attrs.evolve(self.numbers))

    def graphsafe_get_state(self):
        """Return a generator that shares the state."""
        return Generator(self.gpu, self.numbers)

    def graphsafe_set_state(self, other):
        """Share the state of another."""
        self.numbers = other.numbers
        return self

    def manual_seed(self, seed):
        """Begin another sequence."""
        self.gpu.refuse_in_capture("Generator.manual_seed")
        numbers = self.numbers
        numbers.seed, numbers.drawn, numbers.torch_state = int(seed), 0, None
        return self

    def initial_seed(self):
        """Return the seed."""
        self.gpu.refuse_in_capture("Generator.initial_seed")
        return self.numbers.seed

    def get_offset(self):
        """Return how far the sequence is."""
        self.gpu.refuse_in_capture("Generator.get_offset")
        return self.numbers.drawn

    def set_offset(self, offset):
        """Go back to an earlier place, of which there is only the first."""
        if offset != self.numbers.drawn:
            raise NotImplementedError(offset)
        return self

    def get_state(self):
        """Return the state, which `set_state` takes."""
        self.gpu.refuse_in_capture("Generator.get_state")
        return attrs.evolve(self.numbers)

    def set_state(self, state):
        """Take a state that `get_state` returned."""
        self.gpu.refuse_in_capture("Generator.set_state")
        self.numbers.seed, self.numbers.drawn, self.numbers.torch_state = attrs.astuple(state, recurse=False)


@attrs.define(eq=False)
class Launch:
    """An operator that was launched: what it is given, as twins, and where its results are."""

    op: Any
    args: Any
    results: list[Tensor]
    made: list[bool]  # by result: whether it is memory of its own
    numbers: Numbers | None

    def again(self):
        """Do it again, into the same memory."""
        args, kwargs = self.args
        with contextlib.nullcontext() if self.numbers is None else self.numbers.drawing():
            found = _tensors(self.op(*args, **kwargs))
        for x, y, made in zip(self.results, found, self.made, strict=True):
            if made:
                x.copy_(y)


@attrs.define(eq=False)
class Graph:
    """A captured graph."""

    gpu: Any
    registered: list[Numbers]
    launches: list[Launch] = tree.new(list)
    before: dict[int, tuple[Tensor, Tensor]] = tree.new(dict)  # memory that was written to, and what it held
    made: set[int] = tree.new(set)

    def replay(self):
        """Do everything again."""
        self.gpu.replays += 1
        for launch in self.launches:
            launch.again()

    num_bytes = 0


class Uploads(TorchFunctionMode):
    """Copy tensors that are made of numbers of the host, which `meta` would never get to see, or raise for them."""

    def __init__(self, *, refused):
        super().__init__()
        self.refused = refused

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        there = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if not there or function not in (torch.tensor, torch.as_tensor) or isinstance(args[0], Tensor):
            return function(*args, **kwargs)
        if self.refused:
            raise RuntimeError("called a synchronizing operation: a copy from the host")
        return function(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])


class Gpu(TorchDispatchMode):
    """The device, on while it is entered; what `CudaGraphs` opens."""

    def __init__(self):
        super().__init__()
        self.twins: dict[int, torch.UntypedStorage] = {}
        self.generator, self.is_strict, self.graph = Generator(self), False, None
        self.replays, self.captures, self.launched, self.num_bytes = 0, 0, 0, 7

    @classmethod
    def ignore_compile_internals(cls):
        """Let torch.compile compile: this is the device, not somebody who looks on."""
        return True

    # what a program sees

    def put(self, x):
        """Return a tree of tensors on the device."""
        with _disable_current_modes():
            return tree.map(self._put, x)

    def get(self, x):
        """Return copies of a tree of tensors, on the CPU."""
        with _disable_current_modes():
            return tree.map(lambda one: self.twin(one).clone() if one.is_meta else one.clone(), x)

    def _put(self, x):
        if isinstance(x, Whole):
            return Whole(self.put(x.value))
        return self._made(x.detach().clone(), None) if isinstance(x, Tensor) else x

    def state(self, state):
        """Return a state on the device; counters of the host stay there."""
        parts = {name: self.put(getattr(state, name)) for name in ("step", "params", "opt", "buffers", "slots")}
        return attrs.evolve(state, **parts, token=fds.state.Token())

    def home(self, state):
        """Return a copy of a state on the CPU."""
        return self.get(state)

    # what `CudaGraphs` sees

    def open(self, device):
        """Return the device where there is one."""
        return self if device == META else None

    def apart(self):
        """Return a scope in which anything may be done."""
        return Uploads(refused=False)

    @contextlib.contextmanager
    def strict(self):
        """Raise for what waits for the device."""
        self.is_strict = True
        try:
            with Uploads(refused=True):
                yield
        finally:
            self.is_strict = False

    @contextlib.contextmanager
    def capture(self, states):
        """Capture what is done inside."""
        graph = Graph(self, [one.numbers for one in states])
        if self.generator.numbers not in graph.registered:
            graph.registered.append(self.generator.numbers)
        self.graph, self.captures = graph, self.captures + 1
        try:
            with Uploads(refused=True):
                yield graph
        finally:
            self.graph = None
            for memory, held in graph.before.values():
                memory.copy_(held)

    def refuse_in_capture(self, what):
        """Raise where work is captured."""
        if self.graph is not None:
            raise RuntimeError(f"{what} while a stream captures")

    # what torch sees

    def __enter__(self):
        self.patched = random.default_generators
        random.default_generators = lambda devices: [
            torch.default_generator,
            *(self.generator for one in devices if one.type == "meta"),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        random.default_generators = self.patched
        return super().__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        there = [x for x in given if x.is_meta]
        target = kwargs.get("device")
        is_target = target is not None and torch.device(target).type == "meta"
        if not there and not is_target:
            return op(*args, **kwargs)
        self._check(op, given, there, is_target, target)
        return self._launch(op, args, kwargs, there)

    def _check(self, op, given, there, is_target, target):
        """Raise for what a capture does not allow."""
        if not (self.is_strict or self.graph is not None):
            return
        name, tags = op.overloadpacket.__name__, op.tags
        shapes = torch.Tag.dynamic_output_shape in tags
        if name == "index" and not any(x.dtype in (torch.bool, torch.uint8) for x in given[1:]):
            shapes = False
        moved = len(there) < len(given) and any(not x.is_meta and x.dim() for x in given)
        left = there and target is not None and not is_target
        up = is_target and not there and given
        if name in READS or torch.Tag.data_dependent_output in tags or shapes or moved or left or up:
            raise RuntimeError(f"called a synchronizing operation: {name}")

    def _launch(self, op, args, kwargs, there):
        self.launched += 1
        known = {id(x): self.twin(x) for x in there}
        twin_args, twin_kwargs = _mapped(args, known), {k: _mapped(x, known) for k, x in kwargs.items()}
        name = op.overloadpacket.__name__
        if name in READS:
            return op(*twin_args, **twin_kwargs)
        if "device" in kwargs and torch.device(kwargs["device"]).type != "meta":
            return op(*twin_args, **kwargs)
        if name == "copy_" and not args[0].is_meta:
            return args[0].copy_(twin_args[1])
        draws = torch.Tag.nondeterministic_seeded in op.tags and not _is_certain(op, args, kwargs)
        numbers = self.generator.numbers if draws else None
        if draws and self.graph is not None and numbers not in self.graph.registered:
            raise RuntimeError("a generator whose state is not registered is drawn from while a stream captures")
        if self.graph is not None:
            self._keep(op, twin_args, twin_kwargs)
        with contextlib.nullcontext() if numbers is None else numbers.drawing():
            result = op(*twin_args, **twin_kwargs)
        written = {id(known[id(x)]): x for x in there}
        memory = {y.untyped_storage().data_ptr(): x for x, y in ((x, known[id(x)]) for x in there) if y.nbytes}
        results, made = _tensors(result), []
        outs = {}
        for y in results:
            if id(y) in written:
                outs[id(y)], own = written[id(y)], False
            else:
                base = memory.get(y.untyped_storage().data_ptr()) if y.nbytes else None
                outs[id(y)], own = self._made(y, base), base is None
            made.append(own)
        if self.graph is not None:
            self.graph.made.update(y.untyped_storage().data_ptr() for y, own in zip(results, made, strict=True) if own)
            self.graph.launches.append(Launch(op, (twin_args, twin_kwargs), results, made, numbers))
        return _mapped(result, outs)

    def _made(self, twin, base):
        """Return a tensor of the device whose values are these: new memory, or some of that of another tensor."""
        if base is not None:
            x = torch.empty(0, dtype=twin.dtype, device=META)
            return x.set_(base.untyped_storage(), twin.storage_offset(), twin.shape, twin.stride())
        held = twin.untyped_storage()
        x = torch.empty(0, dtype=twin.dtype, device=META)
        x.set_(
            torch.empty(held.nbytes(), dtype=torch.uint8, device=META).untyped_storage(),
            twin.storage_offset(),
            twin.shape,
            twin.stride(),
        )
        self.twins[_place(x)] = held
        return x

    def _keep(self, op, args, kwargs):
        """Keep what lies in memory that the operator writes to and that was there before the capture."""
        named = dict(zip((one.name for one in op._schema.arguments), args, strict=False)) | kwargs
        for one in op._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                for x in _tensors(named.get(one.name)):
                    where = x.untyped_storage().data_ptr()
                    if where not in self.graph.made and where not in self.graph.before and x.numel():
                        whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                        self.graph.before[where] = whole, whole.clone()

    def twin(self, x):
        """Return the values of a tensor, in the memory where they are."""
        held = self.twins[_place(x)]
        return torch.empty(0, dtype=x.dtype).set_(held, x.storage_offset(), x.shape, x.stride())


def captured(gpu):
    """Return the transform: `fds.cuda_graph` for this device."""

    @fds.step.transform
    def captured():
        return lambda step: fds.step.fill(step, run=CudaGraphs(gpu.open))

    return captured()


def _is_certain(op, args, kwargs):
    """Say whether an operator that may draw does not: attention without dropout."""
    named = dict(zip((one.name for one in op._schema.arguments), args, strict=False)) | kwargs
    return "dropout_p" in {one.name for one in op._schema.arguments} and not named.get("dropout_p")


def _tensors(x):
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [one for value in values for one in _tensors(value)]


def _mapped(x, known):
    """Return arguments or results with other tensors, by the id of theirs, and the CPU in the place of the device."""
    if isinstance(x, Tensor):
        return known.get(id(x), x)
    if isinstance(x, list | tuple):
        return type(x)([_mapped(one, known) for one in x])
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "meta" else x


def _place(x):
    return x.untyped_storage()._cdata
