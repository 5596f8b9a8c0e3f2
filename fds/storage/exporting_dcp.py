"""Export a state as a checkpoint of torch.distributed.checkpoint (DCP), as an FSDP2 run writes it.

torch's own writer makes the files, so that they are what its readers take. What it does with a process group is done
here by the ranks of the step: each plans the boxes of what it holds, and writes them to a file; the first rank is told
where they are, and writes `.metadata`. The folder gets its name when all of it is there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from fds.errors import is_a
from fds.media.locks import hold_lock
from fds.state import State
from fds.step import Step
from fds.storage.disk.files import check_path, hold_alone, refusal, sync
from fds.storage.disk.placing import write_errors
from fds.storage.exporting import check_numbers, check_options
from fds.storage.format.tensors import check_writable
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import parts_of, split_version
from fds.storage.ranks.sharing import AllLeaves, agreement, pieces_of_rank


@torch.inference_mode(False)
def export_dcp(
    state: State,
    step: Step,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    model: str = "model",
    optimizer: str | None = "optim",
    flat: bool = False,
    tied: Mapping[str, str] | nn.Module | None = None,
) -> Path:
    """Write a state as a checkpoint of `torch.distributed.checkpoint` (DCP), which FSDP2 runs load; return its folder.

    It has what `{"model": get_model_state_dict(m), "optim": get_optimizer_state_dict(m, o)}` has in torch: parameters
    and buffers, the optimizer's slots and counts by the names of parameters, and its groups, with the learning rate of
    the next update. Where ranks share the state, all of them call this, with one `path` on a common file system, and
    each writes what it holds. `dcp.load` gives any number of ranks the same bits, `dcp_to_torch_save` one process.

    Args:
        state: a result of `step.init` or of a step.
        step: the step of that state.
        path: a folder that is not there yet, or empty. It gets its name when all files are complete.
        dtype: of floating-point parameters and buffers; None keeps them. Those of the optimizer's state stay.
        model: where in the state dict the model's tensors are, keys with dots between; "" for the top.
        optimizer: the same of the optimizer's state; None leaves it out.
        tied: further names of the model's tensors, each with the name that the state has: `{"head.weight":
            "embed.weight"}`; or the module, whose shared parameters and buffers have them. A job whose weights are tied
            has all of their names, the optimizer only the first.
        flat: write groups as `StateDictOptions(flatten_optimizer_state_dict=True)` has them, one for each parameter.

    Raises, on every rank if on any, `StorageError` for what cannot be written, and for an optimizer that computes what
    torch's of its name does not; `DonatedStateError` for a donated state, `RankError` if a rank is lost. After an error
    nothing is under `path`.
    """
    from fds.storage.dcp_plan import Plan, as_keys, writer_of  # torch's module takes seconds to import

    ranks = Ranks.of(step, "export_dcp")
    with ranks.together() as exchange:
        to = check_path(path, "path")
        check_options(dtype, 1)
        if not is_a(state, State):
            got, want = type(state).__name__, "what step.init or a step returns"
            raise refusal("export_dcp takes a state", "state", got, want)
        check_numbers(step, "export_dcp", "fds.export_weights(state, path, step=step, view=True)")
        texts = isinstance(model, str) and (optimizer is None or (isinstance(optimizer, str) and optimizer != model))
        if not (texts and isinstance(flat, bool)):
            got, want = f"{model=}, {optimizer=}, {flat=}"[:120], 'two keys, such as "model" and "optim"'
            raise refusal("export_dcp takes other values", "export_dcp", got, want)
        tied = {} if tied is None else _tied_in(tied) if isinstance(tied, nn.Module) else tied
        if not (is_a(tied, Mapping) and all(is_a(x, str) and x for pair in tied.items() for x in pair)):
            want = '{"head.weight": "embed.weight"}, the module, or None'
            raise refusal("export_dcp takes names by other names", "tied", repr(tied)[:80], want)
        state.check("export_dcp")
        structure, _ = step.held_by(state)
        parts = {name: part for name, part in parts_of(state, ranks).items() if not split_version(name)[1]}
        check_writable({name: part.tensor for name, part in parts.items()})
        asked = {"path": str(to), "dtype": str(dtype), "keys": f"{model}, {optimizer}, {flat}, {dict(tied)}"}
        exchange.mine = asked | agreement(parts, ranks)
    ranks.check_equal(exchange.all)
    union = AllLeaves.of(parts, ranks)
    with ranks.together() as exchange:
        exchange.mine = list(structure.trained_names)
    trained = {name for names in exchange.all for name in names}
    with ranks.together():
        plan = Plan.of(union.leaves, dtype, as_keys(model), tied)
        if optimizer is not None and step.optimizer is not None:
            plan.add_optimizer(union.leaves, step.optimizer, trained, int(state.step), as_keys(optimizer), flat=flat)
        plan.check()
        pieces = pieces_of_rank({n: x for n, x in parts.items() if n in plan.keys}, union, ranks)
    with contextlib.ExitStack() as publishing:
        with ranks.together() as exchange:
            exchange.mine = str(publishing.enter_context(_publishing(to))) if ranks.index == 0 else ""
        writer = writer_of(exchange.all[0])
        with ranks.together() as exchange, write_errors(to), _torchs_errors(to):
            exchange.mine = plan.write(writer, pieces, ranks)
        with ranks.together(), write_errors(to):
            if ranks.index == 0:
                plan.finish(writer, exchange.all)
        with ranks.together(), write_errors(to):
            publishing.close()  # the folder gets its name
    return to


def _tied_in(module: nn.Module) -> dict[str, str]:
    """Return the further names of what a module has under several, each with the first, by which a state has it."""
    first: dict[int, str] = {}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = {name: first.setdefault(id(x), name) for name, x in itertools.chain(*named)}
    return {name: state_name for name, state_name in names.items() if name != state_name}


@contextlib.contextmanager
def _torchs_errors(folder: Path) -> Iterator[None]:
    """Turn torch's error of a file that cannot be written, such as on a full disk, into a `StorageError`."""
    try:
        yield
    except RuntimeError as error:
        what, want = "the file system refuses this export", f"a directory that can be written: {folder}"
        raise refusal(what, str(folder), str(error)[:200], want, "nothing is under this name") from error


@contextlib.contextmanager
def _publishing(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder, which is renamed to `folder` at the end; after an error it is removed.

    Raises `StorageError` where something is under that name, or another export writes there.
    """
    hidden = folder.parent / f".{folder.name}.exporting"
    with write_errors(folder):
        if os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
            want, hint = "a path where nothing is, or an empty folder", "remove it first, or give another path"
            raise refusal("there is something under this name", str(folder), want=want, hint=hint)
        hidden.mkdir(parents=True, exist_ok=True)
        fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with hold_alone(hold_lock(fd), "export", folder.parent):
            try:
                for left in os.scandir(hidden):  # of an export that was killed
                    shutil.rmtree(left.path) if left.is_dir(follow_symlinks=False) else os.unlink(left.path)
                yield hidden
                sync(hidden)
                os.rename(hidden, folder)
            except BaseException:
                shutil.rmtree(hidden, ignore_errors=True)
                raise
            sync(folder.parent)
