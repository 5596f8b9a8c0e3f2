"""Files of adapters as peft has them: `adapter_model.safetensors` and `adapter_config.json`.

    base_model.model.<module>.lora_A.weight           (r, in)
    base_model.model.<module>.lora_B.weight           (out, r)
    base_model.model.<module>.lora_magnitude_vector   (out,): of DoRA, the lengths of rows
    base_model.model.<parameter>                      what is trained beside them: of `modules_to_save`, whole modules

Source: peft 0.21.2, utils/save_and_load.py and tuners/lora.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fds import tree
from fds.errors import StateError, StorageError, is_a, is_number
from fds.state import State
from fds.step import Step, Transform
from fds.storage.disk.files import check_path, read_errors, refusal
from fds.storage.disk.placing import replace_files
from fds.storage.ranks.exchange import Ranks
from fds.transforms.lora import lora
from fds.transforms.lora.low_rank import LowRank, is_part, length

MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
WORDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_M": "lora_magnitude_vector"}
_REFUSED = ("lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "trainable_token_indices",
            "target_parameters", "megatron_config", "layer_replication")  # fmt: skip


@attrs.frozen(eq=False)
class Adapter:
    """What `read` read.

    Attributes:
        transforms: `fds.lora(...)`, one for each rank and scale: `fds.compose(*adapter.transforms, ...)`.
        tensors: factors and other parameters that were trained, by their names in a state; of DoRA whole lengths.
        lengths: names of those lengths, and of the weights that they belong to.
        transposed: whether weights are (in, out), as GPT-2's.
    """

    transforms: tuple[Transform, ...]
    tensors: Mapping[str, Tensor]
    lengths: Mapping[str, str]
    transposed: bool

    def beside(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters of the base with those of the adapter, for `step.init`. Raises `StateError` for others."""
        if not (is_a(params, Mapping) and all(is_a(x, Tensor) for x in params.values())):
            raise StateError(
                "an adapter is put beside parameters by name",
                where="params",
                got=type(params).__name__,
                want="the dict of tensors that fds.functional returns",
            )
        new = {**params, **self.tensors}
        for name, weight in self.lengths.items():
            if weight in params:
                rows = length(params[weight], 0 if self.transposed else 1)
                new[name] = self.tensors[name] - rows.to(self.tensors[name])
        weights = [f"{name.split('.lora_')[0]}.weight" for name in self.tensors if is_part(name)]
        missing = sorted(
            {x for x in weights if x not in params} | {x for x in self.tensors if not is_part(x)} - {*params}
        )
        if missing:
            raise StateError(
                "the adapter is of another base",
                where=missing[0],
                got=f"parameters {tree.named([*params])}",
                want=tree.named(missing),
            )
        return new


def save(
    folder: str | os.PathLike[str], step: Step, state: State, *, name: str = "default", base: str | None = None
) -> list[Path]:
    """Write an adapter of a state as peft does, and return the files; ranks that share the state all call it.

    peft's `PeftModel.from_pretrained(model, folder)` reads them. What `train` named is written as `modules_to_save`,
    with all parameters of such a module. Existing files are replaced, both or none.

    Args:
        folder: is made.
        step: the state's, with `fds.lora`.
        state: of which whole parameters are gathered; the first rank writes.
        name: of the adapter.
        base: the model that it belongs to: `base_model_name_or_path`.

    Raises `StorageError`, on every rank if on any, for a folder that cannot be written, and for a step without such an
    adapter.
    """
    ranks = Ranks.of(step, "adapters.save")
    with ranks.together() as trained:
        to = check_path(folder, "folder")
        if not is_a(state, State):
            raise refusal(
                "adapters.save takes a state", "state", type(state).__name__, "what step.init or a step returns"
            )
        if not (base is None or is_a(base, str)):
            raise refusal("a model that an adapter belongs to is named", "base", repr(base)[:60], "a name, or None")
        mine = _of_name(step, name)
        leaves = step.held_by(state)[0].leaves
        trained.mine = [n for n, leaf in leaves.items() if leaf.trained]  # of a pipeline, of this rank's stage
    params = step.params(state)
    with ranks.together():
        tensors, config = _written(mine, params, {n for names in trained.all for n in names}, base)
        if ranks.index == 0:
            with replace_files(to, [MODEL, CONFIG]) as hidden:
                files = {n: x.cpu().contiguous() for n, x in tensors.items()}
                save_file(files, hidden / MODEL, metadata={"format": "pt"})
                (hidden / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return [to / MODEL, to / CONFIG]


def _of_name(step: Step, name: str) -> list[LowRank]:
    """Return the adapters of a name. Raises `StorageError` where there is none."""
    adapters = [x for x in step.added if isinstance(x, LowRank)]
    mine = [x for x in adapters if x.name == name]
    if not mine:
        raise StorageError(
            "the step has no such adapter",
            where="name",
            got=repr(name)[:60],
            want=tree.named([x.name for x in adapters]),
        )
    return mine


def _written(
    adapters: Sequence[LowRank], params: Mapping[str, Tensor], trained: set[str], base: str | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of adapters of one name. Raises `StorageError` for what peft lacks."""
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    transposed = set[bool]()
    for adapter in adapters:
        for name, x in params.items():
            parts = adapter.parts(name)
            if not (adapter.chooses(name, x.dim()) and parts[0] in params):
                continue
            module = name.removesuffix(".weight")
            if module == name:
                raise StorageError(
                    "peft has adapters of modules' `weight` alone", where=name, got=name, want="*.weight"
                )
            ranks[module], alphas[module] = adapter.rank, adapter.alpha
            transposed.add(name in adapter.transposed)
            for word, part in zip(WORDS.values(), parts, strict=False):
                tensors[f"{PREFIX}{module}.{word}"] = params[part]
            if adapter.dora:
                rows = length(x, 0 if name in adapter.transposed else 1)
                tensors[f"{PREFIX}{module}.{WORDS['lora_M']}"] = params[parts[2]] + rows.to(params[parts[2]])
    options = {(x.stabilized, x.dora, x.dropout) for x in adapters}
    if len(options) > 1 or len(transposed) > 1:
        raise StorageError(
            "peft has one kind of adapter in a file",
            where="name",
            got="; ".join(map(repr, adapters))[:160],
            want="one of dora, stabilized, dropout, and weights that all are (out, in) or (in, out)",
            hint="fds.lora(..., name='second') is another file",
        )
    modules = sorted({name.rpartition(".")[0] for name in trained if not is_part(name)})
    if both := [module for module in modules if module in ranks]:
        raise StorageError(
            "peft trains a module or has an adapter of it",
            where=both[0],
            got="both",
            want="train=... with other modules than those of patterns",
        )
    whole = {f"{PREFIX}{n}": x for n, x in params.items() if n.rpartition(".")[0] in modules and not is_part(n)}
    (stabilized, dora, dropout), (rank, alpha) = options.pop(), (_usual(ranks), _usual(alphas))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{re.escape(module)}": r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(module)}": a for module, a in alphas.items() if a != alpha},
        "target_modules": _targets(sorted(ranks), {name.rpartition(".")[0] for name in params}),
        "modules_to_save": modules or None,
        "lora_dropout": dropout,
        "use_rslora": stabilized,
        "use_dora": dora,
        "fan_in_fan_out": transposed.pop(),
        "bias": "none",
        "init_lora_weights": True,
    }
    return {**tensors, **whole}, config


def _targets(modules: list[str], others: set[str]) -> list[str] | str:
    """Return what peft finds these modules by: their paths; a regular expression where one is the end of another's."""
    ends = any(other.endswith(f".{module}") and other not in modules for module in modules for other in others)
    return "|".join(map(re.escape, modules)) if ends else modules


def _usual(values: Mapping[str, Any]) -> Any:
    """Return what most modules have, an integer where it is one."""
    value = Counter(values.values()).most_common(1)[0][0]
    return int(value) if value == int(value) else value


def read(folder: str | os.PathLike[str], *, name: str = "default", form: str = "layer") -> Adapter:
    """Read an adapter of LoRA from files that peft, or `save`, wrote.

        adapter = fds.adapters.read("folder")
        step = fds.compose(*adapter.transforms, fds.adamw(1e-4))(loss)
        state = step.init(adapter.beside(params))

    Args:
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        name: that it gets.
        form: of `fds.lora`: "layer" or "view"; "view" has no dropout.

    Raises `StorageError` for files that are not there or are no such adapter: another kind, tensors without elements,
    as were written where ranks had slices, embeddings, convolutions, and options that `fds.lora` has not.
    """
    source = check_path(folder, "folder")
    if form not in ("layer", "view"):
        raise StorageError("no such form", where="form", got=repr(form)[:60], want='"layer" or "view"')
    with read_errors("read", source):
        text = (source / CONFIG).read_text()
        try:
            tensors = load_file(source / MODEL)
        except SafetensorError as error:
            raise _refused(source, MODEL, str(error), "safetensors") from None
    config = _parsed(text, source / CONFIG)
    ranks, scales, lengths, whole = dict[str, int](), dict[str, float](), dict[str, str](), dict[str, Tensor]()
    for key, x in tensors.items():
        local = key.removeprefix(PREFIX)
        module, part = next(
            ((local.removesuffix(f".{w}"), p) for p, w in WORDS.items() if local.endswith(f".{w}")), (local, "")
        )
        if (
            not x.numel()
            or local == key
            or (not part and "lora_" in local)
            or (part and x.dim() != 2 - (part == "lora_M"))
        ):
            raise StorageError(
                "this is no adapter of linear layers",
                where=f"{source / MODEL}: {key}",
                got=f"shape {tuple(x.shape)}",
                want=f"{PREFIX}<module>. and {', '.join(WORDS.values())}, not empty; or a whole parameter",
                hint="" if x.numel() else "peft wrote an empty tensor where a rank had a slice alone",
            )
        full = f"{module}.{part}.{name}.weight" if part else local
        whole[full] = x
        if part == "lora_A":
            ranks[module] = len(x)
        if part == "lora_M":
            lengths[full] = f"{module}.weight"
    dropout = config.get("lora_dropout") or 0
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise _refused(source, "lora_dropout", dropout, "0 <= lora_dropout < 1")
    for module in ranks:
        try:
            alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
        except re.error:
            raise _refused(source, "alpha_pattern", config["alpha_pattern"], "regular expressions") from None
        if not (is_number(alpha) and 0 < alpha < math.inf):
            raise _refused(source, "lora_alpha", alpha, "a finite number > 0")
        scales[module] = float(alpha)
        b = whole.get(f"{module}.lora_B.{name}.weight")
        if b is None or b.shape[1] != ranks[module]:
            raise _refused(source, module, "lora_A without a lora_B of its rank", "both")
    if not ranks:
        raise _refused(source, MODEL, tree.named([*tensors]), "lora_A and lora_B")
    flags = {"stabilized": bool(config.get("use_rslora")), "dora": bool(config.get("use_dora"))}
    dropout = 0.0 if form == "view" else float(dropout)
    groups: dict[tuple[int, float], list[str]] = {}
    for module, rank in ranks.items():
        groups.setdefault((rank, scales[module]), []).append(f"{module}.weight")
    train = tuple(n for n in whole if not is_part(n))
    transforms = tuple(
        lora(*names, rank=rank, alpha=alpha, form=form, dropout=dropout, train=train, name=name, **flags)  # type: ignore[arg-type]
        for (rank, alpha), names in groups.items()
    )
    return Adapter(transforms, whole, lengths, bool(config.get("fan_in_fan_out")))


def _parsed(text: str, path: Path) -> dict[str, Any]:
    """Return a configuration. Raises `StorageError` for what is none of LoRA, or has what `fds.lora` has not."""
    try:
        config: Any = json.loads(text)
    except ValueError:
        config = None
    if not is_a(config, dict) or config.get("peft_type") != "LORA":
        raise StorageError(
            "this is no configuration of LoRA",
            where=str(path),
            got=text[:60] if not is_a(config, dict) else f"peft_type={config.get('peft_type')!r}",
            want='"peft_type": "LORA"',
        )
    for key in _REFUSED:
        if config.get(key):
            raise _refused(path, key, config[key], "nothing")
    if config.get("bias", "none") != "none":
        raise _refused(path, "bias", config["bias"], '"none"')
    return config


def _of_module(pattern: Any, module: str, usual: Any) -> Any:
    """Return what a pattern of peft says of a module: regular expressions of its path, or of the end of it."""
    listed: Mapping[str, Any] = pattern if is_a(pattern, dict) else {}
    return next((x for key, x in listed.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def _refused(path: Path, key: str, got: Any, want: str) -> StorageError:
    return StorageError(
        "fds.lora cannot go on with this adapter", where=f"{path}: {key}", got=f"{got!r:.80}", want=want
    )
