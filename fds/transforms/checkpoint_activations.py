"""Keep only the inputs of layers, and recompute the rest in backward.

Fills:  layer                    State:  none
Law:    the identity, bit for bit, dropout on, under any policy
Cost:   time x4/3; activations: one input per `every` layers, and those of one group; with a `store` elsewhere the
        inputs of two groups, and each of them written and read once; with `partition` over N ranks 1/N of each input,
        two whole ones, and (N - 1)/N of each received once a microbatch
Source: Chen et al. 2016, arXiv:1604.06174; Griewank and Walther 2000 (Algorithm 799); Rajbhandari et al. 2020,
        arXiv:1910.02054, section 6.1 (partition)
"""

import functools
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import PurePath
from typing import Any, ClassVar

import attrs
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import checkpoint

from fds import tree
from fds.collectives import Axis
from fds.errors import ComposeError, LossError, count, did_you_mean, instance, is_a, is_int
from fds.loss import LayerCall
from fds.media import Blocks, Host, Kept, KeptGroups, Medium, Tally, place_of
from fds.step import Call, Step, fill, transform

MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)

# torch does not say of what types their arguments are
_recomputed: Callable[..., Any] = checkpoint.checkpoint  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
_hooks = torch.autograd.graph.saved_tensors_hooks
# torch 2.14 asks whether what a policy keeps passes hooks; ours are for inputs, results are moved afterwards
_BESIDE_HOOKS = (
    {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in signature(_recomputed).parameters else {}
)
_contexts: Callable[..., Any] = checkpoint.create_selective_checkpoint_contexts  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


@attrs.frozen
class Recompute:
    """The layer map: groups of `every` calls, each run under `torch.utils.checkpoint`.

    `store` is the medium on which what groups keep waits for backward; None to leave it where it is. Their inputs are
    cut into slices over the ranks of `axis`, if any, and lie in `blocks`, if any. A `tally` counts what is kept in all
    these ways. `compared` are the groups of which ranks have compared the inputs.
    """

    policy: Any
    store: Medium | None
    every: int
    axis: Axis | None = None
    blocks: Blocks | None = None
    tally: Tally | None = attrs.field(default=None, repr=False)
    compared: set[tuple[int, ...]] = attrs.field(factory=set[tuple[int, ...]], repr=False, eq=False)
    draws: ClassVar = False

    @property
    def keeps(self) -> str:
        """The argument by which groups keep something otherwise than as tensors of the graph; "" where none does."""
        ways = {
            f"store={getattr(self.store, 'name', '')!r}": self.store,
            "partition=": self.axis,
            "contiguous=True": self.blocks,
        }
        return next((text for text, way in ways.items() if way is not None), "")

    def counting(self) -> tuple["Recompute", dict[str, Tally]]:
        """Return the same map, which counts what it keeps apart, and place -> the bytes that it keeps there."""
        if not self.keeps:
            return self, {}
        tally = Tally()
        return attrs.evolve(self, tally=tally), {"device" if self.store is None else place_of(self.store): tally}

    def __call__(self, calls: list[LayerCall], call: Call) -> list[LayerCall]:
        """Return one checkpointed call per group."""
        groups: list[list[LayerCall]] = []
        for layer_call in calls:
            full = not groups or len(groups[-1]) >= self.every
            if full and not (groups and layer_call.in_place):
                groups.append([])
            groups[-1].append(layer_call)  # a call that writes over its input stays with the layer that computes it
        apart = KeptGroups(self.store, self.tally, self.axis, self.blocks) if self.keeps else None
        return [
            LayerCall(
                functools.partial(self.run, group, apart),
                sum((layer_call.layers for layer_call in group), ()),
                recomputes=True,
            )
            for group in groups
        ]

    def run(self, group: list[LayerCall], apart: KeptGroups | None, *args: Any) -> Any:
        """Run a group; its seeds are set anew inside it, so no generator state is kept.

        Raises `LossError` where the group writes over its input, from which it would be computed again, and where ranks
        that are to share it have others; and the `DiskError` of a store.
        """
        versions = [(x, x._version) for x in tree.leaves(args) if isinstance(x, torch.Tensor)]
        call = functools.partial(_recomputed, use_reentrant=False, preserve_rng_state=False)
        contexts = None if self.policy is None else _contexts(self.policy)
        if contexts is not None:
            call = functools.partial(call, context_fn=lambda: contexts, **_BESIDE_HOOKS)
        if apart is None or not torch.is_grad_enabled():
            out = call(_chain, group, *args)
        else:
            layers = group[0].layers
            is_first = layers in ((), (0,))  # of the loss: what it is given, the caller holds as well
            apart.open("" if is_first or layers in self.compared else f"what layers[{layers[0]}] is given")
            if is_first:
                out = call(_chain, group, *args)
            else:
                with _hooks(apart.keep, Kept.get):  # torch asks them for arguments, not for what these contain
                    leaves, build = tree.flatten(args)
                    out = call(_chain_of, group, build, *leaves)
            self.compared.add(layers)
            if contexts is not None and self.store is not None:
                _move_results(contexts[0].storage, apart)
        if any(x._version != version for x, version in versions):
            raise LossError(
                "a checkpointed layer writes over its input",
                got="an in-place operation",
                want="layers that leave their input as it is, since they are computed from it again",
                hint="inplace=False, or an `every` that puts it in one group with the layer before it",
            )
        return out


def _move_results(results: dict[Any, dict[int, Any]], apart: KeptGroups) -> None:
    """Put `Kept` tensors in the place of results of operators, by operator, which torch keeps for a policy."""

    def moved(x: Any) -> Any:
        value = getattr(x, "val", None)  # torch's wrapper; anything else says that there is nothing
        return apart.keep_result(value, x.version) if isinstance(value, torch.Tensor) else x

    for op, entries in results.items():
        if not getattr(op, "is_view", False):  # a view has the memory of another result
            entries.update({i: tree.map(moved, entry) for i, entry in entries.items()})


def _is_op(x: Any) -> bool:
    return isinstance(x, OpOverload | OpOverloadPacket)


def _chain_of(group: list[LayerCall], build: Callable[[list[Any]], tuple[Any, ...]], *leaves: Any) -> Any:
    return _chain(group, *build(list(leaves)))


def _chain(group: list[LayerCall], *args: Any) -> Any:
    if group[0].in_place:  # the first layer of a stage: what it is given is needed again to recompute
        args = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
    out = group[0](*args)
    for call in group[1:]:
        out = call(out)
    return out


@transform(
    every=count(": {name} counts layers"),
    partition=instance(Axis, ": not an axis", 'mesh["tp"], or None', where="partition").or_none(),
    contiguous=instance(bool, ": not a bool", "True", where="contiguous"),
)
def checkpoint_activations(
    *,
    policy: str | Sequence[OpOverload | OpOverloadPacket] | Callable[..., Any] | None = None,
    store: str | Medium = "device",
    every: int = 1,
    partition: Axis | None = None,
    contiguous: bool = False,
    number: int | None = None,
):
    """Recompute activations in backward: per layer of `Layers`, per `every` layers, or the whole of an opaque loss.

    Args:
        policy: what a group keeps besides its input: None nothing; `"matmuls"` the results of matrix products,
            convolutions and attention; a list of operators (`torch.ops.aten...`); or a function as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
        store: where what a group keeps waits for backward: `"device"`; `"host"`, pinned for a GPU; or `fds.disk(...)`.
            It is written while the next group runs forward, and read while that runs backward. What the loss itself is
            given stays where it is.
        every: layers per group; one input is kept for each group. A layer with `inplace=True` joins the group of the
            layer before it.
        partition: an axis whose ranks pass the same batch and compute the same activations between layers, as those of
            a tensor axis do. Each rank keeps ceil(n / N) of the n elements of every floating input, on the device or in
            the `store`, and the whole is gathered while the group after it runs backward. Inputs of fewer elements than
            ranks, and what a policy names, stay whole. On a CPU ranks compare their inputs in the first call.
        contiguous: whether floating inputs that stay on the device are copied into blocks of memory that are made once
            and used in all microbatches and steps, so that what lives long does not lie between what lives short. A
            block grows to the largest input that it has held.
        number: how many groups have such blocks, from the first on; the inputs of others are kept as without. None for
            all.

    For an opaque loss the peak stays what it was, since the one recomputation is as large as what it saves; put
    the layers in the open (`Layers`) to divide it.
    The recomputation draws the same random numbers and discards its updates of module buffers.
    Raises `ComposeError` for anything else, `MeshError` for an axis of ranks that do not run now; a call raises
    `LossError` where what ranks compare differs.
    """
    medium = _medium(store)
    kept = _checked(policy)
    axis, blocks = _axis(partition), _blocks(contiguous, number)

    def apply(step: Step) -> Step:
        return fill(step, layer=Recompute(kept, medium, every, axis, blocks if medium is None else None))

    return apply


def _medium(store: Any) -> Medium | None:
    """Return the medium of a store, None for the device. Raises `ComposeError` for another argument."""
    if isinstance(store, str) and store in ("device", "host"):
        return Host(cached=True) if store == "host" else None
    if not isinstance(store, str) and all(callable(getattr(store, name, None)) for name in ("make", "read", "write")):
        return store
    is_path = isinstance(store, PurePath) or (isinstance(store, str) and "/" in store)
    raise ComposeError(
        "checkpoint_activations: unknown store",
        where="store",
        got=repr(store)[:80],
        want="'device', 'host' or fds.disk(directory)",
        hint=f"fds.disk({str(store)!r})" if is_path else did_you_mean(str(store), ["device", "host"]),
    )


def _axis(partition: Axis | None) -> Axis | None:
    if partition is None:
        return None
    partition.check_current()
    return partition.channel("activations") if partition.size > 1 else None


def _blocks(contiguous: Any, number: Any) -> Blocks | None:
    """Return no blocks yet, None where none are wanted. Raises `ComposeError` for other arguments."""
    if number is not None and not (contiguous and is_int(number, 1)):
        raise ComposeError(
            "checkpoint_activations: number counts groups whose inputs lie in blocks",
            where="number",
            got=f"{number!r}"[:80] + ("" if contiguous else ", contiguous=False"),
            want="an int >= 1 with contiguous=True, or None",
        )
    return Blocks(number) if contiguous else None


def _checked(policy: Any) -> Any:
    """Return what `torch.utils.checkpoint` takes for a policy. Raises `ComposeError` for what is none."""
    operators = not isinstance(policy, str) and is_a(policy, Sequence)
    if policy is not None and not (policy == "matmuls" or callable(policy) or (operators and all(map(_is_op, policy)))):
        raise ComposeError(
            "checkpoint_activations: unknown policy",
            got=repr(policy),
            want="None, 'matmuls', a list of operators or a function",
        )
    return list(MATMULS) if policy == "matmuls" else policy if policy is None or callable(policy) else list(policy)
