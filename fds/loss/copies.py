"""Structural copies of modules: parameters without values, and everything that held the module's own parts rebound.

`copy.deepcopy` takes functions as they are, so that a lambda made in `__init__`, a hook or a wrapped `forward` would go
on calling the module that it was made for. Such functions are made anew over cells that hold the copies.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from fds.errors import LossError

Place = tuple[Any, Any, str]  # a dict or what acts as a list, the key in it, the parameter or buffer that is there


class Absent(nn.Parameter):
    """The place of a parameter while nobody runs the copy: it has a shape, and no values to read.

    So is what a copy has in place of a tensor that was computed of parameters, and kept.
    """

    path: str  # the parameter's name
    computed = False

    @classmethod
    def of(cls, p: Tensor, name: str, *, computed: bool = False) -> Absent:
        """Return what stands for a parameter, or for a tensor that was computed of some."""
        empty = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        made = cls(empty, requires_grad=p.requires_grad)
        made.path, made.computed = name, computed
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer what is not about values; refuse the rest."""
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _ABOUT or (func.__name__ == "__get__" and func.__self__.__name__ in _ABOUT):
                return func(*args, **(kwargs or {}))
        found = next((x for x in _flat((args, kwargs or {})) if isinstance(x, Absent)), None)
        name = "" if found is None else found.path
        if found is not None and found.computed:
            raise LossError(
                "the module reads a tensor that was computed before, and would not be computed again", where=name,
                got="an attribute with a graph, as it was at fds.functional(module)",
                want=f"self.{name} set in forward, before it is read", hint="a constant: self.x = y.detach()",
            )  # fmt: skip
        raise out_of_reach(
            name, "a parameter from where nobody can put its values",
            "a view made before (self.w.data); or a set, a weak reference or an object with slots that holds it",
        )  # fmt: skip

    def __repr__(self, **kwargs: Any) -> str:
        return f"Absent({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict) -> Absent:
        return memo.setdefault(id(self), Absent.of(self, self.path, computed=self.computed))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _absent, (self.path, tuple(self.shape), self.stride(), self.dtype, self.requires_grad, self.computed)


_ATOMS = {bool, int, float, str}
_ABOUT = {
    "shape", "size", "dim", "ndim", "ndimension", "stride", "storage_offset", "numel", "nelement", "dtype", "device",
    "layout", "itemsize", "nbytes", "element_size", "requires_grad", "is_leaf", "grad", "grad_fn", "_version",
    "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_floating_point", "is_complex",
    "is_inference", "is_contiguous", "_backward_hooks", "__hash__", "__len__",
}  # fmt: skip


def out_of_reach(name: str, what: str, got: str) -> LossError:
    """Return the error of a module that reads a parameter through `got`, which none of its copies can follow."""
    return LossError(
        f"the module reads {what}", where=name, got=got, want=f"self.{name} in forward",
        hint="attributes, lists, tuples, dicts and functions made in __init__ may hold it",
    )  # fmt: skip


def references(module: nn.Module) -> list[int]:
    """Return how many references there are to a module and to each of its parts."""
    return [sys.getrefcount(part) for part in module.modules()]


def structural(module: nn.Module) -> tuple[nn.Module, list[Place]]:
    """Return a copy of a module's structure, and where else than under their names it holds parameters and buffers.

    Parameters become `Absent`, buffers are copied. Raises `LossError` for a module that cannot be copied.
    """
    memo: dict[int, Any] = {id(b): b.detach().clone() for b in module.buffers()}
    for name, p in module.named_parameters():
        memo[id(p)] = Absent.of(p, name)
    live = _strangers(module)
    memo |= {id(x): x for x in live}
    for path, part in module.named_modules():  # what weight_norm and prune compute anew in every call, say
        for name, held in vars(part).items():
            for x in held.values() if type(held) is dict else held if type(held) in (list, tuple) else (held,):
                if isinstance(x, Tensor) and x.grad_fn is not None and id(x) not in memo:
                    memo[id(x)] = Absent.of(x, f"{path}.{name}" if path else name, computed=True)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise LossError(
            "the module cannot be copied", where=type(module).__name__, got=f"{type(error).__name__}: {error}"[:200],
            want="a module that copy.deepcopy takes",
            hint="one that keeps activations in other objects must let them go",
        ) from error  # fmt: skip
    return copied, list(_rebound(copied, _Rebinding(memo, _memory(module)), live))


def _strangers(module: nn.Module) -> list[nn.Module]:
    """Return modules that a module holds in lists, tuples and dicts, as a teacher is hidden from `parameters()`.

    They are no part of it, so it goes on with them as they are, and sees what others write there. One that has parts,
    parameters or buffers in common with it is none of these.
    """
    own = {id(x) for x in [*module.modules(), *module.parameters(), *module.buffers()]}
    registered = {id(x) for part in module.modules() for x in (part._modules, part._parameters, part._buffers)}
    todo = [x for part in module.modules() for x in vars(part).values() if id(x) not in registered]
    found: list[nn.Module] = []
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in seen or id(x) in own:
            continue
        seen.add(id(x))
        if isinstance(x, nn.Module):
            if not _leads_to(x, own):
                found.append(x)
        elif type(x) in (list, tuple, dict):
            todo.extend(x.values() if isinstance(x, dict) else x)
    return found


def _memory(module: nn.Module) -> dict[int, str]:
    """Return whose values lie in which storage: those of parameters and buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    real = lambda x: x.layout is torch.strided and not x.is_meta and type(x) in (Tensor, nn.Parameter) and x.numel()
    return {x.untyped_storage()._cdata: name for name, x in named if real(x)}


def _leads_to(module: nn.Module, own: set[int]) -> bool:
    """Say whether any of these objects can be reached from a module; its functions may hold some."""
    todo: list[Any] = [module]
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in own:
            return True
        if id(x) not in seen:
            seen.add(id(x))
            todo.extend(vars(x).values() if isinstance(x, nn.Module) else _held_by(x))
    return False


def _rebound(module: nn.Module, rebind: _Rebinding, live: Sequence[nn.Module]) -> Iterator[Place]:
    """Rebind what a copy holds of its original, in place; yield where it holds parameters and buffers."""
    names: dict[int, str] = {id(x): n for n, x in [*module.named_parameters(), *module.named_buffers()]}
    parts = list(module.modules())
    registered = {id(held) for part in parts for held in (part._parameters, part._buffers, part._modules)}
    copies = {id(x) for x in rebind.memo.values()}  # nothing else may be written to, but for what is made here
    copies -= {id(x) for x in live}
    todo: list[Any] = [vars(part) for part in parts]
    seen = {id(x) for x in parts}
    windows = rebind.windows()
    while todo:
        held = todo.pop()
        for key, x in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if x is None or type(x) in _ATOMS or id(x) in seen:
                continue
            if id(x) in names:
                if id(held) not in registered:
                    yield held, key, names[id(x)]
                continue
            if not (isinstance(x, dict | list) and id(x) in copies):
                new: Any = rebind(x) if id(x) not in windows else Absent.of(cast(Tensor, x), windows[id(x)])
                if new is not x:
                    held[key] = x = new
            if id(x) in copies or id(x) in rebind.fresh:
                seen.add(id(x))
                todo += _holders(x, held, key)


def _holders(x: Any, held: Any, key: Any) -> list[Any]:
    """Return what can be written to in an object that is held under a key: dicts, lists and what acts as one."""
    if isinstance(x, dict | list):
        return [x]
    if isinstance(x, tuple):
        return [_Items(lambda: held[key], lambda new: held.__setitem__(key, new))]
    if isinstance(x, types.FunctionType):
        cells = [_Items(lambda c=c: (c.cell_contents,), lambda new, c=c: setattr(c, "cell_contents", new[0]))
                 for c in x.__closure__ or () if _held_by(c)]  # fmt: skip
        defaults = _Items(lambda: x.__defaults__ or (), lambda new: setattr(x, "__defaults__", new))
        return [*cells, defaults, x.__kwdefaults__ or {}, x.__dict__]
    if isinstance(x, functools.partial):
        own: Any = x
        return [_Items(lambda: x.args, lambda new: own.__setstate__((x.func, new, x.keywords, vars(x)))), x.keywords]
    return [vars(x)] if hasattr(x, "__dict__") else []


@attrs.frozen(eq=False)
class _Items:
    """A tuple that somebody holds, as a list: to write an item is to hold another tuple."""

    get: Callable[[], tuple]
    put: Callable[[tuple], None]

    def __len__(self) -> int:
        return len(self.get())

    def __getitem__(self, index: int) -> Any:
        return self.get()[index]

    def __setitem__(self, index: int, x: Any) -> None:
        old = self.get()
        self.put(tuple.__new__(type(old), (*old[:index], x, *old[index + 1 :])))


@attrs.frozen(eq=False)
class _Rebinding:
    """Replaces what was copied by its copy, in what `copy.deepcopy` takes as it is."""

    memo: dict[int, Any]  # id of an original -> its copy; while it lives, so do they
    memory: dict[int, str]  # storage of an original -> whose values are there
    made: dict[int, Any] = attrs.field(factory=dict)  # id of an object -> what stands for it
    fresh: dict[int, Any] = attrs.field(factory=dict)  # what stands for others, by id

    def windows(self) -> dict[int, str]:
        """Return which copies were views of parameters and buffers (`self.w.data`), and of which."""
        kept = self.memo.get(id(self.memo), [])  # where copy.deepcopy keeps what it has copied
        found = ((x, self._window(x)) for x in kept if id(x) in self.memo)
        return {id(self.memo[id(x)]): name for x, name in found if name is not None}

    def _window(self, x: Any) -> str | None:
        """Return of whose values a plain tensor is a view."""
        plain = self.memory and type(x) is Tensor and x.layout is torch.strided and not x.is_meta
        return self.memory.get(x.untyped_storage()._cdata) if plain else None

    def __call__(self, x: Any) -> Any:
        """Return `x` over the copies; `x` itself if it does not reach an original."""
        if id(x) in self.memo:
            return self.memo[id(x)]
        if (name := self._window(x)) is not None:
            return Absent.of(x, name)
        if id(x) in self.made:
            return self.made[id(x)]
        if id(x) in self.fresh or not self._reaches(x, set()):
            return x
        new = self._made(x)
        self.made[id(x)] = self.fresh[id(new)] = new
        return new

    def _reaches(self, x: Any, seen: set[int]) -> bool:
        if id(x) in seen:
            return False
        seen.add(id(x))
        known = lambda y: id(y) in self.memo or self._window(y) is not None
        return any(known(y) or self._reaches(y, seen) for y in _held_by(x))

    def _made(self, x: Any) -> Any:
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(self(x.__func__), self(x.__self__))
        if isinstance(x, functools.partial):
            return type(x)(self(x.func), *map(self, x.args), **self(x.keywords))
        if isinstance(x, weakref.ref):
            return weakref.ref(self(x()))
        if isinstance(x, dict):
            mapping = self.made[id(x)] = {}  # before it is filled, here and below: it may hold itself
            mapping.update((key, self(y)) for key, y in x.items())
            return mapping
        if isinstance(x, list):
            sequence = self.made[id(x)] = []
            sequence.extend(map(self, x))
            return sequence
        return type(x)(map(self, x))

    def _function(self, f: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() if self._reaches(cell, set()) else cell for cell in f.__closure__ or ())
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, self(f.__defaults__), cells)
        self.made[id(f)] = self.fresh[id(new)] = new
        for cell, old in zip(cells, f.__closure__ or (), strict=True):
            if cell is not old:
                cell.cell_contents = self(old.cell_contents)
        new.__kwdefaults__ = self(f.__kwdefaults__)
        new.__qualname__, new.__module__, new.__doc__ = f.__qualname__, f.__module__, f.__doc__
        new.__dict__.update(self(f.__dict__))
        return new


def _held_by(x: Any) -> list[Any]:
    """Return what is inside of an object that `copy.deepcopy` takes as it is, or that such an object may hold."""
    if isinstance(x, types.FunctionType):
        return [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, x.__dict__]
    if isinstance(x, types.CellType):
        try:
            return [x.cell_contents]
        except ValueError:  # not yet assigned
            return []
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, x.keywords]
    if isinstance(x, weakref.ref):
        return [x()]
    if type(x) is dict:
        return list(x.values())
    return list(x) if type(x) in (list, tuple, set, frozenset) else []


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, list | tuple):
        for y in x:
            yield from _flat(y)
    else:
        yield x


def _absent(
    name: str, shape: tuple, stride: tuple, dtype: torch.dtype, requires_grad: bool, computed: bool
) -> Absent:  # fmt: skip
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
    return Absent.of(like, name, computed=computed)
