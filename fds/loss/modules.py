"""`functional`: a module as a function of its parameters, which runs private copies of the module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds.errors import LossError
from fds.loss.attributes import AttributeWatch
from fds.loss.compiled import Key, TracedModule, key_in_trace, now as in_trace, output, output_and_buffers, untraced
from fds.loss.copies import Absent, copy_structure, count_references, place_for
from fds.loss.modes import Mode, current, in_float32, raise_if_mixed, warn_of_eval_mode, warn_of_hooks
from fds.loss.module_copies import (
    CallResult,
    ModuleCopy,
    OriginalsWatch,
    Root,
    check_no_originals,
    register_originals,
    roots,
)

_UNTRACED = (
    "fds.functional runs a copy of the module; compile the loss by fds.compile() in the composition, or the module: "
    "fds.functional(torch.compile(module))"
)

_NOTHING = contextlib.nullcontext()


@attrs.frozen(eq=False)
class Apply:
    """A module as a pure function: `apply(params, *args, buffers=None, **kwargs)`.

    `params` and `buffers` map the module's own names to tensors. A shared parameter has its first name.
    """

    source: nn.Module = attrs.field(repr=False)  # parameters on meta, buffers its own
    param_paths: dict[str, str] = attrs.field(repr=False)  # every path of a parameter in the module -> its first name
    buffer_paths: dict[str, str] = attrs.field(repr=False)  # the same for buffers
    names: frozenset[str] = attrs.field(repr=False)  # of parameters
    constants: dict[str, Tensor] = attrs.field(repr=False)  # copies of the buffers; never written to
    initial: dict[str, Tensor] = attrs.field(repr=False)  # the buffers that `functional` returned; they identify it
    prefix: str = ""  # of these names in the whole tree of parameters
    idle: dict[tuple, list[ModuleCopy]] = attrs.field(factory=dict, repr=False)  # idle copies, by mode
    frozen: frozenset[str] = frozenset()  # names of parameters with requires_grad=False in the module
    silent: frozenset[str] = frozenset()  # buffers that may be written to without a new version
    probed: set[tuple] = attrs.field(factory=set, repr=False)  # modes in which a call left all buffers as they were
    number: int = -1  # of this call of `functional`, in `originals`
    looked: set[tuple] = attrs.field(factory=set, repr=False)  # modes in which a call read none of the originals
    watches: dict[tuple, AttributeWatch] = attrs.field(factory=dict, repr=False)  # of plain attributes, by mode
    threaded: list[bool] = attrs.field(factory=list, repr=False)  # holds True once `with_buffers` was called
    traced: dict[Key, TracedModule] = attrs.field(factory=dict, repr=False)  # for code that is compiled

    def __call__(
        self, params: dict[str, Tensor], *args: Any, buffers: dict[str, Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Return the module's output.

        Raises `LossError` where the module changes its buffers, or where an `eval_fn` does not say which they are.
        """
        if torch.compiler.is_compiling():
            key = key_in_trace()
            if key in self.traced:
                return output(self.traced[key], params, buffers, args, kwargs)
        return self._call(params, args, buffers, kwargs)

    @untraced(_UNTRACED)
    def _call(self, params: dict, args: tuple, buffers: dict[str, Tensor] | None, kwargs: dict) -> Any:
        carried: dict[str, Tensor] = {}
        if buffers is None:
            state_buffers = current().carried
            buffers = carried = {} if state_buffers is None else state_buffers.of(self)
        before = {**self.constants, **buffers}
        run = self._run(params, before, args, kwargs)
        self._check_unchanged(before, run, set(before))
        self._make_traceable(carried)
        return run.out

    def __deepcopy__(self, memo: dict) -> Apply:
        copied = attrs.evolve(
            self,
            source=copy_structure(self.source)[0],
            constants=copy.deepcopy(self.constants, memo),
            initial=copy.deepcopy(self.initial, memo),
            idle={},
            probed=set(),
            looked=set(),
            watches={},
            traced={},
        )
        return memo.setdefault(id(self), copied)

    def with_buffers(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the module's output and the new buffers, without changing those that were passed.

        Raises `LossError` where the module changes a buffer that was not passed.
        """
        if torch.compiler.is_compiling():
            key = key_in_trace()
            if key in self.traced:
                return output_and_buffers(self.traced[key], params, buffers, args, kwargs)
        return self._call_with_buffers(params, buffers, args, kwargs)

    @untraced(_UNTRACED)
    def _call_with_buffers(
        self, params: dict, buffers: dict, args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Tensor]]:
        self.threaded[:] = [True]
        run = self._run(params, {**self.constants, **buffers}, args, kwargs)
        self._check_unchanged(self.constants, run, self.constants.keys() - buffers.keys())
        self._make_traceable({})
        return run.out, {name: run.buffers[name].detach() for name in buffers}

    def _make_traceable(self, carried: dict[str, Tensor]) -> None:
        """Where a loss is run before it is compiled, prepare this module for that."""
        key = in_trace.looking
        if key is not None and not torch.compiler.is_compiling():
            if key not in self.traced:
                now = current()
                self.traced[key] = self._new_copy(now).as_traced(self.constants, now.key)
            state_buffers = current().carried
            self.traced[key].find(carried, {} if state_buffers is None else state_buffers.values)

    def _run(self, params: dict, buffers: dict, args: tuple, kwargs: dict) -> CallResult:
        """Run the module on copies of the buffers."""
        self._check_arguments(params, buffers)
        now = current()
        if buffers:
            device = next((x.device for x in params.values()), None)
            buffers = {name: b.detach().to(device, copy=True) for name, b in buffers.items()}
        copied, release = self._take(now, params)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in params.values())
        inputs, kind = (params, args, kwargs), (*now.key, trains)
        first = kind not in self.looked and not torch.compiler.is_compiling()
        watch = self.watches.get(kind) or self.watches.setdefault(kind, AttributeWatch())
        call = None if watch.over else watch.begin(copied.module)
        before = count_references(copied.module) if now.busy is None and torch.is_grad_enabled() else None
        try:
            with (
                OriginalsWatch(self.number, inputs) if first and not trains else _NOTHING,
                _NOTHING if call is None or call.dependencies is None else call.dependencies,
            ):
                run = copied.run(params, buffers, args, kwargs)
            if call is not None:
                watch.end(call, run.out, trains=trains)
        except BaseException as error:
            release()
            if now.low and isinstance(error, RuntimeError):
                raise_if_mixed(error, params, buffers)
            raise
        if before is None or before == count_references(copied.module):
            release()  # otherwise a graph holds submodules of this copy, to recompute them: the copy is not reused
        if first:
            self._check_first_call(now, run.out, inputs, trains=trains)
            self.looked.add(kind)
        if now.seen is not None:
            now.seen[:1] = [run.out]
        return run

    def _check_arguments(self, params: dict, buffers: dict) -> None:
        added = self._added(current())
        names = self.names.union(name for name, _ in added.values()) if added else self.names
        _check_names(params, names, "parameters")
        _check_names(buffers, self.constants.keys(), "buffers")
        trained = [name for name in self.frozen if params[name].requires_grad]
        if trained:
            raise LossError(
                "the module wants no gradient for parameters that are being trained",
                where=", ".join(sorted(trained)),
                got="requires_grad=False in the module",
                want="fds.freeze(...) with their names",
                hint="or module.requires_grad_(True) before fds.functional(module)",
            )

    def _check_first_call(self, now: Mode, out: Any, inputs: tuple, *, trains: bool) -> None:
        """Check that a first call used only the parameters that it was given, and warn of eval mode."""
        if trains:
            check_no_originals(out, inputs, self.number)
        in_layers = bool(self.prefix) and not self.names  # a layer without parameters: the others are trained
        if now.busy is not None and not now.evaluating and (trains or in_layers):
            warn_of_eval_mode(self.source)

    def _check_unchanged(self, old: dict[str, Tensor], run: CallResult, names: set[str]) -> None:
        """Raise `LossError` where the call changed these buffers: their updates would be lost.

        An assignment is seen by the identity of the tensor, a write by its version. `F.batch_norm` and writes through
        `.data` increase no version. The first call in each mode therefore compares values; later ones do so only for
        buffers that may be statistics of `F.batch_norm`, and only on the CPU, since a GPU would have to be waited for.
        """
        first = (key := current().key) not in self.probed
        by_value = names if first else {n for n in names & self.silent if run.buffers[n].device.type == "cpu"}
        changed = (names & run.written) | {n for n in by_value if not _equal(old[n], run.buffers[n])}
        if not changed:
            self.probed.add(key)
        else:
            raise LossError(
                "the module changes its buffers, and this call would lose the change",
                where=", ".join(sorted(changed)),
                got="apply(params, ...)",
                want="apply.with_buffers(params, buffers, ...) -> (out, new_buffers)",
                hint="make the loss with fds.with_buffers(loss_fn, buffers), or module.eval() before functional; "
                "in Layers, register the buffer as persistent",
            )

    def _take(self, now: Mode, params: dict) -> tuple[ModuleCopy, Callable[[], None]]:
        """Return a copy of the module for this call alone, and the function that returns it to the idle ones.

        Within a step a copy keeps its parameters until after backward, since a module that checkpoints its own layers
        recomputes them there; another call with the same parameters shares the copy.
        """
        for owner, copied, _ in now.busy or ():
            if owner is self and all(place[key] is params[name] for place, key, name in copied.params):
                return copied, lambda: None
        free = self.idle.setdefault(now.key, [])
        try:
            copied = free.pop()
        except IndexError:  # the first call, or all copies are in use by other threads
            copied = self._new_copy(now)
        if now.busy is not None:
            now.busy.append((self, copied, free))
            return copied, lambda: None

        def release() -> None:
            copied.clear()
            free.append(copied)

        return copied, release

    def _added(self, now: Mode) -> dict[str, tuple[str, Tensor]]:
        """Return the parameters that maps of modules add: by path in the module their names, and what they are like."""
        added: dict[str, tuple[str, Tensor]] = {}
        for change in now.modules:
            if hasattr(change, "adds"):
                added |= change.adds(self.number)
        return added

    def _new_copy(self, now: Mode) -> ModuleCopy:
        """Return a copy of the module in this mode."""
        module, aliases = copy_structure(self.source)  # the source is never run, so it never changes
        root = roots[module] = Root(self.number, self.prefix)
        if now.evaluating:
            module.eval()
        in_float32(module, now.float32, low=now.low, prefix=self.prefix)
        added = self._added(now)
        for path, (name, like) in added.items():
            place_for(module, path).register_parameter(path.rpartition(".")[2], Absent.of(like, name))
        parts = dict(module.named_modules())
        for change in now.modules:
            change(module, root)
        split = lambda paths: [(*path.rpartition(".")[::2], name) for path, name in paths.items()]
        paths = self.param_paths | {path: name for path, (name, _) in added.items()}
        params = [(parts[owner]._parameters, key, name) for owner, key, name in split(paths)]
        buffers = [(parts[owner]._buffers, key, name) for owner, key, name in split(self.buffer_paths)]
        return ModuleCopy(module, params, buffers, aliases)


@torch.inference_mode(False)
def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """Split a module into `(apply, params, buffers)`; the module itself is neither called nor changed afterwards.

    `params` and `buffers` map names to detached tensors that share the module's memory (`step.init` copies them).
    Buffers that training changes (batch norm) go through `apply.with_buffers` and `fds.with_buffers`; others are
    captured as constants. What forward assigns to attributes (an auxiliary loss) stays in a copy: return it instead.
    State that forward keeps in attributes (a running mean) raises `LossError` in the first calls: make it a buffer.
    Every submodule keeps the training or eval mode that it has now; `step.evaluate` runs an eval-mode copy.

    If the module is written to later (a teacher that is loaded anew), `params` and `buffers` have the new values and
    the captured constants the old ones: call `apply(params, x, buffers=buffers)`. Modules that it holds only in a list,
    tuple or dict, and that share nothing with it, are not copied: calls use them as they are.
    """
    if not isinstance(module, nn.Module):
        raise LossError(
            "fds.functional takes a module",
            got=repr(module)[:60],
            want="an nn.Module",
            hint="GPT(), not GPT" if isinstance(module, type) else "",
        )
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise LossError(
                "an embedding with max_norm writes over its own weight in forward",
                where=path,
                got=f"{part}",
                want="max_norm=None",
                hint="divide the rows by their norms in the loss",
            )
        if any(isinstance(p, nn.UninitializedParameter) for p in part.parameters(recurse=False)):
            raise LossError(
                "a lazy module has no shapes yet",
                where=path,
                got=f"{part}",
                want="a module that was called once, or one that is not lazy",
            )
    warn_of_hooks(module)
    params = {name: p.detach() for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    constants = {name: b.clone() for name, b in buffers.items()}
    names = {id(x): name for name, x in [*module.named_parameters(), *module.named_buffers()]}
    param_paths: dict[str, str] = {}
    buffer_paths: dict[str, str] = {}
    for path, part in module.named_modules():  # each module once, however many names it has
        for paths, tensors in ((param_paths, part._parameters), (buffer_paths, part._buffers)):
            paths.update((f"{path}.{n}" if path else n, names[id(x)]) for n, x in tensors.items() if x is not None)
    frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
    silent = frozenset(name for path, name in buffer_paths.items() if _may_change_silently(module, path))
    source, _ = copy_structure(module)
    apply = Apply(
        source,
        param_paths,
        buffer_paths,
        frozenset(params),
        constants,
        buffers,
        frozen=frozen,
        silent=silent,
        number=register_originals(module),
    )
    return apply, params, dict(buffers)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or torch.equal(a, b)))


def _may_change_silently(module: nn.Module, path: str) -> bool:
    """Say whether a buffer may be a statistic of `F.batch_norm`; torch's own modules also count calls in a buffer."""
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    counts = isinstance(part, nn.modules.batchnorm._NormBase) and type(part).__module__.startswith("torch.nn.")
    buffer = part._buffers[name]
    return not counts and buffer is not None and buffer.is_floating_point() and buffer.dim() == 1


def _check_names(got: dict, want: Any, what: str) -> None:
    if got.keys() != want:
        missing, extra = sorted(want - got.keys()), sorted(got.keys() - want)
        raise LossError(
            f"the {what} are not the module's",
            got=f"missing {missing}, unknown {extra}",
            want="the dict that fds.functional returned, with other values",
        )
