"""Names of a package whose modules are loaded when they are first used (PEP 562), so that importing it costs little."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str], submodules: str = "", elsewhere: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    A name that was used once is an ordinary attribute from then on. An import that fails raises its own `ImportError`;
    any other name raises `AttributeError`.

    Args:
        package: its `__name__`.
        homes: module -> the names that it defines, separated by spaces.
        submodules: those that are reached by name, separated by spaces.
        elsewhere: module -> names that are looked for in the package, and which the error says are there.
    """
    elsewhere_of = {name: module for module, names in (elsewhere or {}).items() for name in names.split()}
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    names = {*home_of, *submodules.split()}

    def load(name: str) -> Any:
        this = sys.modules[package]
        if name not in names:
            hint = f": it is {elsewhere_of[name]}.{name}" if name in elsewhere_of else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=this)
        if name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
        else:
            value = importlib.import_module(f"{package}.{name}")
        setattr(this, name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load, directory
