"""Structural copies of modules: without parameter values, and without references to the original module.

`copy.deepcopy` does not copy functions, so a lambda from `__init__`, a hook or a wrapped `forward` would go on calling
the original module. Such functions are replaced by copies whose closures hold the copied module.
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
from fds.loss.compiled import Location


class Absent(nn.Parameter):
    """Placeholder for a parameter between calls of a copy: it has a shape and a dtype, and no values.

    It also stands for attributes that were computed from parameters.
    """

    path: str  # the parameter's name
    computed = False

    @classmethod
    def of(cls, p: Tensor, name: str, *, computed: bool = False) -> Absent:
        """Return the placeholder for a parameter, or for a tensor that was computed from parameters."""
        empty = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        made = cls(empty, requires_grad=p.requires_grad)
        made.path, made.computed = name, computed
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer questions about shape, dtype and the like; raise `LossError` for whatever reads values."""
        with torch._C.DisableTorchFunctionSubclass():  # private; how Tensor.__torch_function__ itself avoids recursion
            if func.__name__ in _ABOUT or (func.__name__ == "__get__" and func.__self__.__name__ in _ABOUT):
                return func(*args, **(kwargs or {}))
        absent = next((x for x in _flat((args, kwargs or {})) if isinstance(x, Absent)), None)
        name = "" if absent is None else absent.path
        if absent is not None and absent.computed:
            raise LossError(
                "the module reads a tensor that was computed before the call and is not computed in it",
                where=name,
                got="an attribute with a graph, as it was at fds.functional(module)",
                want=f"self.{name} set in forward, before it is read",
                hint="a constant: self.x = y.detach()",
            )
        raise out_of_reach(
            name,
            "a parameter from a place where its values cannot be set",
            "a view made before (self.w.data); or a set, a weak reference or an object with slots that holds it",
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"Absent({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict) -> Absent:
        return memo.setdefault(id(self), Absent.of(self, self.path, computed=self.computed))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _absent, (self.path, tuple(self.shape), self.stride(), self.dtype, self.requires_grad, self.computed)


_ATOMS = {bool, int, float, str}
_ABOUT = {
    "shape", "size", "dim", "ndim", "ndimension", "stride", "storage_offset", "numel", "nelement", "dtype",
    "device", "layout", "itemsize", "nbytes", "element_size", "requires_grad", "is_leaf", "grad", "grad_fn",
    "_version", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_floating_point",
    "is_complex", "is_inference", "is_contiguous", "_backward_hooks", "__hash__", "__len__",
}  # fmt: skip


def out_of_reach(name: str, what: str, got: str) -> LossError:
    """Return the error for a module that reads a parameter through `got`, where a copy cannot replace it."""
    return LossError(
        f"the module reads {what}",
        where=name,
        got=got,
        want=f"self.{name} in forward",
        hint="attributes, lists, tuples, dicts and functions made in __init__ may hold it",
    )


def count_references(module: nn.Module) -> list[int]:
    """Return how many references there are to a module and to each of its parts."""
    return [sys.getrefcount(part) for part in module.modules()]


def copy_structure(module: nn.Module) -> tuple[nn.Module, list[Location]]:
    """Return a copy of a module's structure, and the further locations where it holds parameters and buffers.

    Those are other than their registered names: attributes, lists, closures. Parameters become `Absent`, buffers are
    copied. Raises `LossError` for a module that cannot be copied.
    """
    memo: dict[int, Any] = {id(b): b.detach().clone() for b in module.buffers()}
    for name, p in module.named_parameters():
        memo[id(p)] = Absent.of(p, name)
    live = _find_unrelated(module)
    memo |= {id(x): x for x in live}
    for path, part in module.named_modules():  # computed in every call, as by weight_norm and prune
        for name, value in vars(part).items():
            for x in value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,):
                if isinstance(x, Tensor) and x.grad_fn is not None and id(x) not in memo:
                    memo[id(x)] = Absent.of(x, f"{path}.{name}" if path else name, computed=True)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise LossError(
            "the module cannot be copied",
            where=type(module).__name__,
            got=f"{type(error).__name__}: {error}"[:200],
            want="a module that copy.deepcopy takes",
            hint="one that keeps activations in other objects must release them",
        ) from error
    return copied, list(_rebind_references(copied, _Rebinding(memo, _memory(module)), live))


def _find_unrelated(module: nn.Module) -> list[nn.Module]:
    """Return modules that a module holds only in lists, tuples and dicts, as a teacher is hidden from `parameters()`.

    They are not part of the module, so copies share them and see later changes. Modules that have submodules,
    parameters or buffers in common with it are not among them.
    """
    parts = {id(x) for x in [*module.modules(), *module.parameters(), *module.buffers()]}
    registered = {id(x) for part in module.modules() for x in (part._modules, part._parameters, part._buffers)}
    todo = [x for part in module.modules() for x in vars(part).values() if id(x) not in registered]
    unrelated: list[nn.Module] = []
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in seen or id(x) in parts:
            continue
        seen.add(id(x))
        if isinstance(x, nn.Module):
            if not _leads_to(x, parts):
                unrelated.append(x)
        elif type(x) in (list, tuple, dict):
            todo.extend(x.values() if isinstance(x, dict) else x)
    return unrelated


def _memory(module: nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers by the address of their storage."""
    named = [*module.named_parameters(), *module.named_buffers()]
    real = lambda x: x.layout is torch.strided and not x.is_meta and type(x) in (Tensor, nn.Parameter) and x.numel()
    return {x.untyped_storage()._cdata: name for name, x in named if real(x)}


def _leads_to(module: nn.Module, targets: set[int]) -> bool:
    """Say whether any of these objects can be reached from a module, through its functions too."""
    todo: list[Any] = [module]
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in targets:
            return True
        if id(x) not in seen:
            seen.add(id(x))
            todo.extend(vars(x).values() if isinstance(x, nn.Module) else _held_by(x))
    return False


def _rebind_references(module: nn.Module, rebind: _Rebinding, live: Sequence[nn.Module]) -> Iterator[Location]:
    """Replace references of a copy to its original, in place; yield where the copy holds parameters and buffers."""
    names: dict[int, str] = {id(x): n for n, x in [*module.named_parameters(), *module.named_buffers()]}
    parts = list(module.modules())
    registered = {id(container) for part in parts for container in (part._parameters, part._buffers, part._modules)}
    copies = {id(x) for x in rebind.memo.values()}  # with what is created here, all that may be written to
    copies -= {id(x) for x in live}
    todo: list[Any] = [vars(part) for part in parts]
    seen = {id(x) for x in parts}
    views = rebind.views()
    while todo:
        container = todo.pop()
        for key, x in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if x is None or type(x) in _ATOMS or id(x) in seen:
                continue
            if id(x) in names:
                if id(container) not in registered:
                    yield container, key, names[id(x)]
                continue
            if not (isinstance(x, dict | list) and id(x) in copies):
                new: Any = rebind(x) if id(x) not in views else Absent.of(cast(Tensor, x), views[id(x)])
                if new is not x:
                    container[key] = x = new
            if id(x) in copies or id(x) in rebind.replacements:
                seen.add(id(x))
                todo += _holders(x, container, key)


def _holders(x: Any, container: Any, key: Any) -> list[Any]:
    """Return the containers inside an object that can be written to: dicts, lists and `_Items`."""
    if isinstance(x, dict | list):
        return [x]
    if isinstance(x, tuple):
        return [_Items(lambda: container[key], lambda new: container.__setitem__(key, new))]
    if isinstance(x, types.FunctionType):
        cells = [
            _Items(lambda c=c: (c.cell_contents,), lambda new, c=c: setattr(c, "cell_contents", new[0]))
            for c in x.__closure__ or ()
            if _held_by(c)
        ]
        defaults = _Items(lambda: x.__defaults__ or (), lambda new: setattr(x, "__defaults__", new))
        return [*cells, defaults, x.__kwdefaults__ or {}, x.__dict__]
    if isinstance(x, functools.partial):
        f: Any = x
        return [_Items(lambda: x.args, lambda new: f.__setstate__((x.func, new, x.keywords, vars(x)))), x.keywords]
    return [vars(x)] if hasattr(x, "__dict__") else []


@attrs.frozen(eq=False)
class _Items:
    """A tuple in an attribute, used like a list: writing an item replaces the tuple."""

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
    """Replace originals by their copies in objects that `copy.deepcopy` does not copy."""

    memo: dict[int, Any]  # id of an original -> its copy; deepcopy's memo, which keeps both alive
    memory: dict[int, str]  # address of a storage -> the parameter or buffer in it
    replaced: dict[int, Any] = attrs.field(factory=dict)  # id of an object -> its replacement
    replacements: dict[int, Any] = attrs.field(factory=dict)  # the replacements by their own id

    def views(self) -> dict[int, str]:
        """Return the copies, by id, that were views of parameters and buffers (`self.w.data`), and their names."""
        originals = self.memo.get(id(self.memo), [])  # where copy.deepcopy keeps alive what it has copied
        named = ((x, self._name_of_viewed(x)) for x in originals if id(x) in self.memo)
        return {id(self.memo[id(x)]): name for x, name in named if name is not None}

    def _name_of_viewed(self, x: Any) -> str | None:
        """Return the parameter or buffer of which a plain tensor is a view."""
        plain = self.memory and type(x) is Tensor and x.layout is torch.strided and not x.is_meta
        return self.memory.get(x.untyped_storage()._cdata) if plain else None

    def __call__(self, x: Any) -> Any:
        """Return `x` with originals replaced by copies; `x` itself if it does not lead to an original."""
        if id(x) in self.memo:
            return self.memo[id(x)]
        if (name := self._name_of_viewed(x)) is not None:
            return Absent.of(x, name)
        if id(x) in self.replaced:
            return self.replaced[id(x)]
        if id(x) in self.replacements or not self._reaches(x, set()):
            return x
        new = self._replacement(x)
        self.replaced[id(x)] = self.replacements[id(new)] = new
        return new

    def _reaches(self, x: Any, seen: set[int]) -> bool:
        if id(x) in seen:
            return False
        seen.add(id(x))
        is_replaced = lambda y: id(y) in self.memo or self._name_of_viewed(y) is not None
        return any(is_replaced(y) or self._reaches(y, seen) for y in _held_by(x))

    def _replacement(self, x: Any) -> Any:
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(self(x.__func__), self(x.__self__))
        if isinstance(x, functools.partial):
            return type(x)(self(x.func), *map(self, x.args), **self(x.keywords))
        if isinstance(x, weakref.ref):
            return weakref.ref(self(x()))
        if isinstance(x, dict):
            mapping = self.replaced[id(x)] = {}  # noted before it is filled, here and below: it may contain itself
            mapping.update((key, self(y)) for key, y in x.items())
            return mapping
        if isinstance(x, list):
            sequence = self.replaced[id(x)] = []
            sequence.extend(map(self, x))
            return sequence
        return type(x)(map(self, x))

    def _function(self, f: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() if self._reaches(cell, set()) else cell for cell in f.__closure__ or ())
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, self(f.__defaults__), cells)
        self.replaced[id(f)] = self.replacements[id(new)] = new
        for cell, old in zip(cells, f.__closure__ or (), strict=True):
            if cell is not old:
                cell.cell_contents = self(old.cell_contents)
        new.__kwdefaults__ = self(f.__kwdefaults__)
        new.__qualname__, new.__module__, new.__doc__ = f.__qualname__, f.__module__, f.__doc__
        new.__dict__.update(self(f.__dict__))
        return new


def _held_by(x: Any) -> list[Any]:
    """Return the contents of a function, method, cell, partial, weak reference or plain container."""
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


def _absent(name: str, shape: tuple, stride: tuple, dtype: torch.dtype, requires_grad: bool, computed: bool) -> Absent:
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
    return Absent.of(like, name, computed=computed)


def place_for(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule that holds what is at a path; those that are not there are made, and are empty."""
    for part in path.split(".")[:-1]:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module
