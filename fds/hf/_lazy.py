"""Models of transformers whose weights are in their files until each rank reads the ranges of bytes that it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import loss as losses, random
from fds.errors import ComposeError, is_a
from fds.hf._matching import files_of, matched, matches
from fds.hf._names import package
from fds.loss import Recipe
from fds.state import State
from fds.step import Adds, Step, with_added
from fds.storage import Source
from fds.storage.disk.files import check_path, refusal
from fds.storage.foreign.foreign_leaf import source_of, whole
from fds.storage.format.tensors import DTYPES
from fds.storage.loading import fill
from fds.storage.matching import MatchOptions
from fds.storage.ranks.exchange import Ranks


@attrs.frozen(eq=False)
class LazyModel:
    """A model of transformers without its weights, and where they are.

    Attributes:
        path: the folder of its configuration and files.
        module: the model in training mode, its parameters on `meta`; buffers have their values.
        apply: the module as a function of its parameters, as `fds.functional` returns it.
        params: a recipe of the parameters, which `fds.load` and `step.structure` take; `step.init` takes it too, but
            then every rank reads all weights, a layer at a time.
        names: by parameter, the tensors that it is read from; of what is initialised, none.
    """

    path: Path
    module: Any
    apply: Callable[..., Any]
    params: Recipe
    names: dict[str, tuple[str, ...]]
    source: Callable[..., Source] = attrs.field(
        repr=False
    )  # of the parameters, given the key of those that are new, and what adds others

    def __repr__(self) -> str:
        return f"<LazyModel: {type(self.module).__name__}, {len(self.names)} parameters in {self.path}>"


def lazy(
    path: str | os.PathLike[str],
    *,
    cls: Any = None,
    config: Any = None,
    dtype: torch.dtype | None = torch.float32,
    strict: bool = True,
) -> LazyModel:
    """Return a model of transformers of which only the configuration and the names of its tensors are read.

    Args:
        path: a folder with `config.json` and safetensors files, with an index if there are several; a state dict of
            `torch.save` is read too, without running code from it.
        cls: the class of the model, or one such as `AutoModelForCausalLM`; by default that which the configuration
            names.
        config: in place of that of the folder.
        dtype: of floating-point parameters, in which a state holds them; those that the model wants in float32 stay.
            None takes the dtype that the configuration names, as `from_pretrained` does.
        strict: whether parameters that are missing or of another shape, and tensors that the model lacks, are an error.
            If not, the former are initialised as the model does, the latter ignored, and a `StorageWarning` lists all.

    Raises `ComposeError` without transformers or for arguments that are none of these; `StorageError` for files that
    are missing, truncated, ambiguous or of another model.
    """
    transformers, folder = package(), check_path(path, "path")
    if dtype is not None and not (is_a(dtype, torch.dtype) and dtype.is_floating_point and dtype in DTYPES.values()):
        want = "torch.float32, another floating-point dtype, or None"
        raise ComposeError("weights are of no such dtype", where="dtype", got=repr(dtype)[:60], want=want)
    if not is_a(strict, bool):
        raise ComposeError("strict is a boolean", where="strict", got=repr(strict)[:60], want="True or False")
    config = configuration(transformers, folder) if config is None else config
    opened = files_of(folder)
    build = _builder(transformers, folder, cls, config, dtype or _dtype_of(config, opened))
    module = _built(build, folder)
    module.train()
    leaves = matched(module, folder, opened, strict)
    apply, meta, _ = losses.functional(module)
    missing = [name for name in meta if name not in leaves]
    make = losses.recipe(build)

    def source(key: Tensor, adds: Sequence[Adds] = ()) -> Source:
        new = {} if not missing else {n: x for p in make.pieces(key, missing.__contains__) for n, x in p.items()}
        new_leaves = {name: whole(new[name].to(meta[name].dtype), name) for name in missing}
        have = {name: leaves[name][0] if name in leaves else new_leaves[name] for name in meta}
        whole_shapes = {name: torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) for name, x in meta.items()}
        with_more = with_added(adds, whole_shapes, key) if adds else {}
        have |= {name: whole(x, name) for name, x in with_more.items() if name not in have}
        return source_of(str(folder), {f"params.{name}": leaf for name, leaf in have.items()}, {}, ())

    names = {name: leaves[name][1] if name in leaves else () for name in meta}
    return LazyModel(folder, module, apply, _recipe(meta, source), names, source)


@torch.inference_mode(False)
def init(step: Step, model: LazyModel, *, key: int | Tensor = 0) -> State:
    """Return the first state of a step, as from `step.init`, with the weights of a model that is still in its files.

    Where ranks share the state, all of them call this, and each reads the bytes of what it will hold: at stages 1 to 3
    of its slices, of a pipeline or a tensor axis of its parameters or pieces. Frozen parameters that are held in
    another form are encoded as they are read. What a transform adds, such as `fds.lora`, is made as in `step.init`.

    Args:
        step: the step that will train; its loss takes the model's parameters, as `model.apply` does.
        model: what `fds.hf.lazy` returns.
        key: the seed of the run.

    Raises `StorageError`, on every rank if on any, for files that have changed, and for other parameters.
    """
    ranks = Ranks.of(step, "hf.init")
    with ranks.together():
        if not is_a(model, LazyModel):
            hint = "model = fds.hf.lazy(path); fds.hf.init(step, model)"
            raise refusal("hf.init takes a model in its files", "model", type(model).__name__, "a LazyModel", hint)
        source = model.source(random.fold_in(random.key(key), "params"), step.added)
    options = MatchOptions(params_only=True, foreign=True)
    return fill(source, step, model.params, options, ranks, key)


def configuration(transformers: Any, folder: Path) -> Any:
    """Return the configuration in a folder. Raises `StorageError` where there is none."""
    if not (folder / "config.json").is_file():
        raise refusal(
            "there is no model of transformers here",
            str(folder),
            "no config.json" if folder.is_dir() else "no folder",
            "a folder with config.json and model.safetensors",
            "huggingface_hub.snapshot_download(name) returns the folder of a model on the hub",
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"[:300]
        raise refusal("a configuration cannot be read", str(folder / "config.json"), got) from error


def _builder(transformers: Any, folder: Path, cls: Any, config: Any, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return what builds the model. Raises `ComposeError` for a class or a configuration that is none."""
    if not isinstance(config, transformers.PreTrainedConfig):
        raise ComposeError(
            "this is not a configuration of transformers",
            where="config",
            got=repr(config)[:80],
            want="AutoConfig.from_pretrained(path)",
        )
    if (method := getattr(config, "quantization_config", None)) is not None:
        raise refusal(
            "the weights are quantized by another library",
            str(folder / "config.json"),
            repr(method)[:120],
            "weights in floating point",
            "fds.quantize_frozen() holds what is frozen in 8 bits",
        )
    if cls is None:
        architectures = getattr(config, "architectures", None) or [None]
        cls = getattr(transformers, str(architectures[0]), None)
        if cls is None:
            raise refusal(
                "the configuration names no class of transformers",
                str(folder / "config.json"),
                f"architectures: {architectures[0]!r}"[:80],
                "fds.hf.lazy(path, cls=transformers.AutoModelForCausalLM)",
            )
    build = getattr(cls, "from_config", None) or getattr(cls, "_from_config", None)
    if build is None:
        raise ComposeError(
            "this is not a class of models of transformers",
            where="cls",
            got=repr(cls)[:80],
            want="transformers.AutoModelForCausalLM, or LlamaForCausalLM",
        )

    def model() -> nn.Module:
        module = build(config, dtype=dtype)
        plan = module._get_dtype_plan(dtype)
        for name, p in module.named_parameters():
            if matches(plan, name):
                p.data = p.data.to(plan[next(pattern for pattern in plan if matches([pattern], name))])
        return module

    return model


def _dtype_of(config: Any, opened: Source) -> torch.dtype:
    """Return the dtype that a configuration names, else that of the first floating-point tensor of the files."""
    dtypes = (DTYPES[leaf.dtype] for leaf in opened.leaves.values())
    dtype = getattr(config, "dtype", None) or next((x for x in dtypes if x.is_floating_point), torch.float32)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _built(build: Callable[[], nn.Module], folder: Path) -> Any:
    try:
        return losses.on_meta(build)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"[:300]
        raise refusal("a model cannot be built from its configuration", str(folder), got) from error


def _recipe(meta: dict[str, Tensor], source: Callable[[Tensor], Source]) -> Recipe:
    """Return the recipe of whole parameters, each read when it is its turn."""

    def pieces(key: Tensor, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[dict[str, Tensor]]:
        opened = source(key)
        for name, x in meta.items():
            if wanted(name):
                leaf = opened.leaves[f"params.{name}"]
                read = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype])
                opened.read(f"params.{name}", 0, read.view(-1))
                yield {name: read.to(x.dtype)}

    return Recipe(lambda: dict(meta), pieces)
