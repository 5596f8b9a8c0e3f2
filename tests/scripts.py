"""Programs of the repository that are no modules of a package."""

import importlib.util
from pathlib import Path
from typing import Any


def loaded(path: Path) -> Any:
    """Load a file of Python as a module that is not kept."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
