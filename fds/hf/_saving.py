"""Save a state as a folder of transformers: weights, configuration, tokenizer; names of tensors in files."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import tree
from fds.errors import ComposeError, is_a
from fds.hf._lazy import LazyModel, configuration
from fds.hf._names import package
from fds.state import State
from fds.step import Step
from fds.storage.disk.files import check_path, refusal
from fds.storage.exporting import check_numbers, check_options, export_state
from fds.storage.ranks.exchange import Ranks

COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # of tokenizers, processors and generation
WEIGHTS = (".index.json", "adapter_config.json")


def save(
    state: State,
    step: Step,
    out: str | os.PathLike[str],
    *,
    source: LazyModel | str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    view: bool = False,
) -> list[Path]:
    """Write the parameters of a state as a folder that `from_pretrained` loads, and return the files of weights.

    Beside the weights stand the configuration, and what the source has of a tokenizer, a processor and settings of
    generation. Where ranks share the state, all of them call this, and each writes what it holds; nothing is gathered.
    All files get their names at the end, the weights last: a folder that was being written when the process died has no
    weights, or the old ones.

    Args:
        state, step: of a loss of the model, whose parameters have the model's names.
        out: the folder, made where it does not exist. Earlier weights in it are replaced.
        source: what `fds.hf.lazy` returned, or the folder of the model that was trained.
        dtype: of floating-point parameters; None writes each as the state holds it.
        max_shard_bytes: the most bytes of tensors in one file, unless one tensor is larger.
        view: write what the loss sees in evaluation, in numbers: of rounded, pruned or encoded parameters. Then every
            rank has all of them in memory.

    Raises `StorageError`, on every rank if on any, for what cannot be read or written; existing files are then
    unchanged. Raises `ComposeError` without transformers, `RankError` if a rank is lost.
    """
    transformers, ranks = package(), Ranks.of(step, "hf.save")
    with ranks.together() as exchange:
        check_options(dtype, max_shard_bytes)
        to = check_path(out, "out")
        if not is_a(state, State):
            raise refusal("hf.save takes a state", "state", type(state).__name__, "what fds.hf.init or a step returns")
        if to.suffix == ".safetensors":
            raise refusal("a model of transformers is a folder", "out", to.name, "a folder", "fds.export_weights")
        if step.added:
            raise refusal(
                "parameters have others beside them, which transformers does not read",
                "hf.save",
                ", ".join(map(str, step.composition)),
                "a step that adds none",
                "fds.adapters.save(out, step, state); merged, fds.bake(step, state).module.save_pretrained(out)",
            )
        if not view:
            check_numbers(step, "hf.save", "view=True, which writes numbers")
        module = source.module if isinstance(source, LazyModel) else None
        folder = source.path if isinstance(source, LazyModel) else check_path(source, "source")
        config = copy.deepcopy(configuration(transformers, folder) if module is None else module.config)
        floats = [x.dtype for x in tree.leaves(state.params) if x.is_floating_point()]
        config.dtype = str(dtype or next(iter(floats), torch.float32)).removeprefix("torch.")
        if module is not None:
            config.architectures = [type(module).__name__]
            saved = module.state_dict().keys()
            constants = {n: b for n, b in module.named_buffers() if n in saved}  # which the loss has captured
            state = attrs.evolve(state, buffers={**constants, **state.buffers})
        exchange.mine = [*step.held_by(state)[0].leaves]
    with ranks.together():
        names = {name for names in exchange.all for name in names}
        if isinstance(source, LazyModel) and (odd := sorted(names ^ source.names.keys())):
            got = "a parameter that the model has not" if odd[0] in names else "nothing"
            want = f"the parameters of {type(module).__name__}, under its names"
            raise refusal("the state is of another model than the source", f"hf.save: {odd[0]}", got, want)
    write = lambda hidden: _write_beside(hidden, folder, config)
    return export_state(state, to, dtype, step, "params", max_shard_bytes, view=view, doing="hf.save", beside=write)


def file_names(model: LazyModel | Any) -> dict[str, Any]:
    """Return the `names` of `step.weights` under which a model's files have its weights: those on the hub.

    transformers holds some weights otherwise than files do: of a Mixtral the matrices of all experts are one. These are
    cut apart again by its own rules, one weight after another, and renamed; others keep their names.

    Args:
        model: what `fds.hf.lazy` returned, or a module of transformers.

    Raises `ComposeError` for anything else, and where a tensor of the files is made of several weights.
    """
    package()
    module = model.module if isinstance(model, LazyModel) else model
    if not isinstance(module, nn.Module) or not hasattr(module, "save_pretrained"):
        got, want = repr(model)[:60], "a LazyModel, or a module of transformers"
        raise ComposeError("file_names takes a model of transformers", where="model", got=got, want=want)
    revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    metas = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in module.named_parameters()}
    made = {name: revert(module, {name: x}) for name, x in metas.items()}
    each = {new: x.shape for by_name in made.values() for new, x in by_name.items()}
    together = {new: x.shape for new, x in revert(module, metas).items()}
    if each != together:
        raise ComposeError(
            "a tensor of the files is made of several weights",
            where=next(new for new in together if together[new] != each.get(new)),
            got=type(module).__name__,
            want="names=None, for the names and tensors of the model",
        )
    changed = [name for name, by_name in made.items() if [*by_name] != [name]]
    return {**{name: functools.partial(_reverted, revert, module, name) for name in changed}, "*": "*"}


def _reverted(revert: Any, module: nn.Module, name: str, x: Tensor) -> dict[str, Tensor]:
    """Return what the files have of a weight, by name."""
    return revert(module, {name: x})


def _write_beside(hidden: Path, folder: Path, config: Any) -> None:
    """Write what stands beside the weights: the configuration, and copies of files of the source."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name.endswith(COPIED) and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, hidden / path.name)
    config.save_pretrained(hidden)
    for path in hidden.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
