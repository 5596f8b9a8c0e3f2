"""What compiles the graph of a step: a backend of torch.compile, which is given one graph and no Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fds.step.checks import one_graph
from fds.step.compiled.recording import own_metadata

Function = Callable[..., Sequence[Tensor]]

_AS_IT_IS = ("eager", "aot_eager")  # which run the operators of a graph one by one


@attrs.frozen(eq=False, repr=False)
class Backend:
    """A backend, by name or as a function of a graph and its inputs, with a mode or options of inductor's."""

    backend: str | Callable[..., Any]
    mode: str | None
    options: dict[str, Any] | None
    name: str

    def __repr__(self) -> str:
        return self.name

    @property
    def fuses(self) -> bool:
        """Whether it is known to fuse operators into kernels."""
        return isinstance(self.backend, str) and self.backend not in _AS_IT_IS

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Function:
        """Return the compiled graph. Raises `ComposeError` where the backend fails."""
        from torch import _dynamo, _inductor  # as slow to import as they are large

        fake = FakeTensorMode()
        like: list[Any] = [
            fake.from_tensor(x) for x in inputs
        ]  # as torch.compile gives them: nobody keeps the state's memory
        try:
            with torch.no_grad(), own_metadata():
                if self.backend == "inductor":
                    chosen = {} if self.mode is None else _inductor.list_mode_options(self.mode)
                    found: Any = _inductor.compile(graph, like, options={**chosen, **(self.options or {})})
                    return found
                function: Any = _dynamo.lookup_backend(self.backend) if isinstance(self.backend, str) else self.backend
                return function(graph, like, **({"options": self.options} if self.options else {}))
        except Exception as error:
            raise one_graph.uncompiled(error, self.name) from error
