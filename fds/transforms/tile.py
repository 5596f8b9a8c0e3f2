"""Run modules that treat every token by itself over tiles of tokens, and compute each tile again in backward.

Fills:  modules                  State:  none
Law:    the step without it, to derived rounding; forward has the same bits where products of fewer rows have
Cost:   forward of these modules once more, which nothing adds to that of `checkpoint_activations` around a layer that
        ends in them; activations inside of them: those of one tile, and a gradient of their parameters
Source: Bekman et al. 2025, arXiv:2506.13996, section 3.1
"""

# modules have no public tables of their parameters
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import loss as losses, random, tree
from fds.autodiff import exclusive, in_torch_func, nodes_behind
from fds.errors import ComposeError, LossError, count
from fds.loss.compiled import untraced
from fds.nn.parallel import tokens as parts
from fds.step import Step, fill, transform


@attrs.frozen(eq=False)
class Tiles:
    """What is done in the place of a call of a module: it is called for at most so many tokens at once."""

    tokens: int
    # of whose calls was seen that they treat every token by itself, and that they read only what they are given
    looked: set[tuple[str, bool]] = attrs.field(factory=set[tuple[str, bool]], repr=False)
    traced: set[str] = attrs.field(factory=set[str], repr=False)

    @property
    def is_planned(self) -> bool:
        """Whether it follows the state: never."""
        return False

    def check(self, name: str, module: nn.Module) -> None:
        """Take any module: what it computes is looked at in its first call."""

    def plan(self, call: Any) -> None:
        """Return nothing: tiles follow from the shapes of what a module is given."""

    def run(
        self,
        plan: None,
        call: Any,
        name: str,
        module: Any,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what a module returns. Raises `LossError` for one that does not treat every token by itself."""
        if in_torch_func():  # which differentiates no backward of ours
            return forward(*args, **kwargs)
        return _run(self, name, module, forward, args, kwargs)

    def bake(self, name: str, module: nn.Module, call: Any) -> None:
        """Do nothing: a plain module computes the same."""


@untraced("fds.tile runs modules again in backward; fds.compile(fullgraph=False) lets them run uncompiled")
def _run(
    rule: Tiles,
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    leaves, build = tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]
    x = leaves[at[0]] if at else None
    if x is None or x.dim() < 2 or not x.is_floating_point():
        got = "no tensor" if x is None else f"{tuple(x.shape)} {x.dtype}"
        raise _refusal(name, "is given no activations", got, "(..., tokens, features), floating")
    lead = x.shape[:-1]
    for other in (leaves[i] for i in at[1:]):
        if other.shape[: len(lead)] != lead:
            got = f"{tuple(other.shape)} beside {tuple(x.shape)}"
            raise _refusal(name, "is given a tensor that has other tokens", got, f"({', '.join(map(str, lead))}, ...)")
    if lead.numel() <= rule.tokens:
        return forward(*args, **kwargs)
    return _Work(rule, name, module, forward, leaves, build, at, lead, x.device).run()


@attrs.define(eq=False)
class _Work:
    """A call of a module in tiles; a graph that holds it can call the module again."""

    rule: Tiles
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    leaves: list[Any]  # of the arguments; None for tensors of tokens, which are saved for backward
    build: Callable[[Any], Any]
    at: list[int]  # which of the leaves have tokens
    lead: torch.Size  # the dims of tokens
    device: torch.device
    slots: list[tuple[dict[str, Any], str, int]] = attrs.field(init=False)  # where parameters belong, by their number
    buffers: list[tuple[dict[str, Any], str, Tensor]] = attrs.field(init=False)
    autocast: tuple[bool, torch.dtype] = attrs.field(init=False)
    drawn: random.Snapshot | None = attrs.field(init=False, default=None)  # before forward, where the module draws
    out: Tensor | None = attrs.field(init=False, default=None)
    dout: Tensor | None = attrs.field(init=False, default=None)

    def run(self) -> Tensor:
        """Return what the module returns for all tokens."""
        tensors = [self.leaves[i] for i in self.at]
        for i in self.at:
            self.leaves[i] = None
        self.autocast = torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)
        params = self._params()
        if (key := (self.name, self.module.training)) not in self.rule.looked:
            self._check_tokens_are_alone(tensors)
            self.rule.looked.add(key)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *params)):
            # What backward needs is saved before anything is computed: where a checkpoint around this runs it again,
            # and needs nothing that comes after, torch stops it here.
            token = _start(self, *tensors, *params)
            self.out = self._compute(tensors)
            out = _end(self, token)
        else:
            out = self._compute(tensors)
        draws, x = parts.now(), tensors[0]
        if draws is not None and draws.watch is not None:
            draws.watch.follow(x, out)
        return out

    @property
    def size(self) -> int:
        """The tokens of a tile but the last, which may have less: as few tiles as there may be, about equal."""
        n = self.lead.numel()
        return -(-n // -(-n // self.rule.tokens))

    def gradients(self, tensors: Sequence[Tensor], params: Sequence[Tensor], wants: Sequence[bool]) -> list[Any]:
        """Return the gradients that are wanted of tokens and of parameters, given that of the output."""
        assert self.dout is not None
        of_tokens = [torch.empty_like(self._rows(x)) if want else None for x, want in zip(tensors, wants, strict=False)]
        leaves = [p.detach().requires_grad_(want) for p, want in zip(params, wants[len(tensors) :], strict=True)]
        sums: list[Tensor | None] = [None] * len(leaves)
        with self._placed(leaves), self._casting(cache=True), self._drawing():
            for tile, (dy, *pieces) in self._tiles([self.dout, *tensors]):
                cut = [x.detach().requires_grad_(want) for x, want in zip(pieces, wants, strict=False)]
                with torch.enable_grad():
                    y = self._call(cut)
                self._check_inputs(y, [*cut, *leaves])
                inputs = [x for x in (*cut, *leaves) if x.requires_grad]
                of_inputs: Sequence[Any] = (
                    torch.autograd.grad(y, inputs, dy, allow_unused=True) if y.requires_grad else ()
                )
                grads: dict[int, Tensor] = {id(x): g for x, g in zip(inputs, of_inputs, strict=False) if g is not None}  # pyright: ignore[reportUnnecessaryComparison]  (None of what is not used)
                for dx, x in zip(of_tokens, cut, strict=True):
                    if dx is not None:
                        dx[tile] = grads.get(id(x), 0)
                sums = [_sum(total, grads.get(id(leaf))) for total, leaf in zip(sums, leaves, strict=True)]
        return [
            *(None if dx is None else dx.view(x.shape) for dx, x in zip(of_tokens, tensors, strict=True)),
            *(None if total is None else total.to(p.dtype) for total, p in zip(sums, params, strict=True)),
        ]

    def _params(self) -> list[Tensor]:
        """Return the module's parameters, each once, which may be gathered on use; remember where all tensors are."""
        params: list[Tensor] = []
        numbers: dict[int, int] = {}
        self.slots, self.buffers = [], []
        for part in self.module.modules():
            for key, p in part.named_parameters(recurse=False, remove_duplicate=False):
                if id(p) not in numbers:
                    numbers[id(p)] = len(params)
                    params.append(p)
                self.slots.append((part._parameters, key, numbers[id(p)]))
            tables = part.named_buffers(recurse=False, remove_duplicate=False)
            self.buffers += [(part._buffers, key, x) for key, x in tables]
        return params

    def _rows(self, x: Tensor) -> Tensor:
        """Return a tensor with the dims of tokens as one."""
        return x.reshape(-1, *x.shape[len(self.lead) :])

    def _tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield which tokens a tile has, and these of each tensor."""
        rows: list[Any] = [self._rows(x) for x in tensors]
        for i, cut in enumerate(zip(*(x.split(self.size) for x in rows), strict=True)):
            yield slice(i * self.size, i * self.size + len(cut[0])), list(cut)

    def _call(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return what the module returns for some of the tokens, (tokens, ...); it is given as many dims as ever."""
        leaves, ones = list(self.leaves), [1] * (len(self.lead) - 1)
        for i, piece in zip(self.at, pieces, strict=True):
            leaves[i] = piece.reshape(*ones, *piece.shape)
        args, kwargs = self.build(leaves)
        y, want = self.forward(*args, **kwargs), (*ones, len(pieces[0]))
        if not isinstance(y, Tensor) or y.shape[: len(want)] != want:
            got = f"{tuple(y.shape)} for {want}" if isinstance(y, Tensor) else type(y).__name__
            raise _refusal(self.name, "does not return one tensor of the tokens that it is given", got)
        return y.flatten(0, len(ones))

    @torch.no_grad()
    def _compute(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return what the module returns for all tokens, without a graph."""
        versions, out, drawn = [x._version for x in tensors], None, self._snapshot()
        # what autocast keeps of parameters has no graph here, and would be taken where one is needed
        n = self.lead.numel()
        with self._casting(cache=False), self._in_tile({self.size, n % self.size or self.size}):
            for tile, pieces in self._tiles(tensors):
                y = self._call(pieces)
                if out is None:
                    out = y.new_empty(n, *y.shape[1:])
                out[tile] = y
        assert out is not None
        if [x._version for x in tensors] != versions:
            raise _refusal(self.name, "writes over what it is given", "an in-place operation", "inplace=False")
        self.drawn = None if drawn is None or not drawn.has_moved else drawn.checked(f"tile: {self.name}")
        return out.view(*self.lead, *out.shape[1:])

    @contextlib.contextmanager
    def _placed(self, params: Sequence[Tensor]) -> Generator[None]:
        """Have the module compute with these parameters, and with the buffers that it had in forward."""
        values = [(table, key, params[i]) for table, key, i in self.slots] + self.buffers
        before = [table[key] for table, key, _ in values]
        for table, key, x in values:
            table[key] = x
        try:
            yield
        finally:
            for (table, key, _), x in zip(values, before, strict=True):
                table[key] = x

    def _casting(self, *, cache: bool) -> contextlib.AbstractContextManager[Any]:
        enabled, dtype = self.autocast
        if not enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype, cache_enabled=cache)

    def _in_tile(self, lengths: set[int]) -> contextlib.AbstractContextManager[Any]:
        draws = parts.now()
        return contextlib.nullcontext() if draws is None else parts.InTile(draws, lengths)

    def _snapshot(self) -> random.Snapshot | None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        return random.Snapshot.taken([self.device])

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.drawn is None else self.drawn.again()

    @torch.no_grad()
    def _check_tokens_are_alone(self, tensors: Sequence[Tensor]) -> None:
        """Raise `LossError` where some tokens of a tile come out otherwise without those around them."""
        n = self.size
        first, last = max(n // 3, 1), n - n // 5  # not the middle, which is where it was in what is turned round
        drawn = self._snapshot()
        if n < 2 or drawn is None or not all(type(x) is Tensor and x.device.type != "meta" for x in tensors):
            return
        pieces = [x.clone() for x in next(self._tiles(tensors))[1]]
        with drawn.again(), self._casting(cache=False), self._in_tile({n, last - first}):
            whole = self._call(pieces).narrow(0, first, last - first)
            alone = self._call([x.narrow(0, first, last - first) for x in pieces])
            if drawn.has_moved:  # the tokens of one call are given other numbers than those of another
                return
        if type(whole) is not Tensor or whole.shape != alone.shape:
            return
        wrong, most = (whole - alone).abs().max(), whole.abs().max()
        if bool(wrong > torch.finfo(whole.dtype).eps ** 0.5 * most):
            got = f"a difference of {float(wrong):.2g} in numbers up to {float(most):.2g}"
            raise _refusal(self.name, "does not treat every token by itself", got, "feed-forward layers, norms, a head")

    def _check_inputs(self, y: Tensor, inputs: Sequence[Tensor]) -> None:
        """Raise `LossError` in a first backward where a module computes with what would get no gradient."""
        if self.name in self.rule.traced:
            return
        ids = {id(x) for x in inputs}
        for node in nodes_behind([y]):
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in ids:
                got = f"a tensor {tuple(variable.shape)} that requires a gradient"
                want = "parameters of the module, and arguments"
                raise _refusal(self.name, "computes with what is neither its own nor an argument", got, want)
        self.rule.traced.add(self.name)


class _Start(torch.autograd.Function):
    """Arguments and parameters -> an empty tensor; its backward is that of all tiles."""

    runs_again = True  # what the module consists of is no part of the graph

    @staticmethod
    def forward(ctx: Any, work: _Work, *tensors: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        work, num = ctx.work, len(ctx.work.at)
        if torch.is_grad_enabled():
            raise _refusal(work.name, "is computed in tiles, of which there is no second derivative", "create_graph")
        tensors, work_dout = ctx.saved_tensors, work.dout
        assert work_dout is not None
        grads = work.gradients(tensors[:num], tensors[num:], ctx.needs_input_grad[1:])
        work.dout = None
        return None, *grads


class _End(torch.autograd.Function):
    """The empty tensor of `_Start` -> what the module returned; its backward keeps the gradient for that."""

    @staticmethod
    def forward(ctx: Any, work: _Work, token: Tensor) -> Tensor:
        ctx.work = work
        out, work.out = work.out, None
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.work.dout = dout
        return None, dout.new_zeros(0)


# torch does not say what they return
_start: Callable[..., Tensor] = _Start.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_end: Callable[..., Tensor] = _End.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return a sum of gradients of tiles, in float32 of 16 bits, as one product would sum them."""
    if grad is None:
        return total
    wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    return exclusive(grad.to(wide)) if total is None else total.add_(grad)


def _refusal(name: str, what: str, got: str, want: str = "", hint: str = "") -> LossError:
    return LossError(f"a module that is tiled {what}", where=f"tile: {name}", got=got, want=want, hint=hint)


@transform(several=True, modules=losses.PATTERNS, tokens=count(": {name} is that of a tile", 1))
def tile(modules: str | Sequence[str], *, tokens: int = 4096):
    """Call some modules for at most so many tokens at once, and each of these calls again in backward.

    They treat every token by itself: feed-forward layers, norms, a head. What lies inside of them is then in memory for
    one tile alone, however long rows are; what they are given and return is there for all tokens. Gradients of
    parameters are sums over tiles, in float32 where they have 16 bits.

    A module that draws, such as a dropout, draws the same in backward, and other numbers than without tiles; under
    `fds.context_parallel` it is refused. Inside of transforms of `torch.func` modules are called for all tokens.

    Args:
        modules: patterns of paths of modules (`*` crosses dots), which begin with the layer's name in `fds.Layers`.
            They are given activations (..., tokens, features), of which all dims but the last are tokens, and return
            one tensor (..., tokens, any). Further tensors have the same tokens, or no dims.
        tokens: of a tile, those of all rows together. Modules that are given no more are called as they are.

    Raises `ComposeError` for anything else, patterns that match nothing, a module matched twice, and one inside of
    another. A call raises `LossError` for modules that are given or return anything else, that write over it, or in
    their first call, whose results for some tokens depend on others.
    """
    rule = Tiles(tokens)

    def apply(step: Step) -> Step:
        chosen = losses.at_submodules((step.loss, step.eval_loss), modules, rule, "tile")
        others = (x for x in step.modules if isinstance(x, losses.Submodules) and x.where == "tile")
        names = [name for x in (chosen, *others) for name in x.names]
        for name in names:
            outer = next((x for x in names if name.startswith(f"{x}.")), None)
            if outer is not None or names.count(name) > 1:
                raise ComposeError(
                    "tile: a module is called in tiles twice",
                    where=name,
                    got="patterns that match it twice" if outer is None else f"patterns that match {outer} too",
                    want="each module matched once, and nothing inside of it",
                )
        return fill(step, modules=chosen)

    return apply
