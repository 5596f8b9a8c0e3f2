"""Files of the repository that tests open: programs that are no modules of a package, and archives."""

import importlib.util
import tarfile
from pathlib import Path
from typing import Any


def loaded(path: Path) -> Any:
    """Load a file of Python as a module that is not kept."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpack(archive: Path, into: Path) -> None:
    """Write the files of an archive to a folder, and nothing outside of it."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # there is none before Python 3.11.4
        files.extractall(into)
