"""The reader that docs/format.md shows, and how to compare what it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def page_reader() -> Callable[..., tuple[dict[str, Any], Any]]:
    """Return the page's function, `read(path, tag=None) -> (arrays by name, extra)`."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 46
    imported = {line.split()[1] for line in lines if re.match(r"import|from", line)}
    assert imported == {"json", "struct", "pathlib", "numpy", "xxhash"}
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["read"]


def assert_read(found: Mapping[str, Any], want: Mapping[str, Tensor]) -> None:
    """Compare arrays with tensors, bit for bit; what NumPy has no name for is there as integers."""
    assert found.keys() == want.keys()
    for name, x in want.items():
        x = x.detach().resolve_conj().contiguous()
        assert found[name].shape == tuple(x.shape) and found[name].dtype.itemsize == x.dtype.itemsize, name
        assert found[name].tobytes() == x.reshape(-1).view(torch.uint8).numpy().tobytes(), name
