"""Baked modules on disk: safetensors, with integers as compressed-tensors has them, which vLLM reads.

    <module>.weight_packed   (rows, ceil(c b / 32)) int32: b bits for each of c numbers of a row, the first in the low
                             bits, each the integer plus 2^(b-1)
    <module>.weight_scale    (rows, groups of a row), what an integer is multiplied by
    <module>.weight_shape    (2,) int64: rows, c

config.json has `quantization_config`, of the format "pack-quantized", and under `fds` what else belongs to integers.

Source: compressed-tensors 0.20.1, compressors/pack_quantized and quantization/quant_config.py.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fds.compression._shrink import Cut, cut_off
from fds.compression.activations import ActivationGrid, RoundedInputs
from fds.compression.grids import Packed, Scheme
from fds.compression.packed_modules import PARTS, Holding, hold, packed_of, unpacked
from fds.errors import StorageError, is_a, is_int
from fds.kernels.fake_quantized import SCHEMES
from fds.storage.disk.files import check_path, read_errors
from fds.storage.disk.placing import replace_files

MODEL, CONFIG = "model.safetensors", "config.json"
PER = ("token", "sample", "all")
_DTYPES = {str(x): x for x in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


@attrs.frozen
class Grid:
    """How the rows of a weight are cut into groups, as compressed-tensors says it."""

    bits: int
    group_size: int | None  # None for one scale a row

    def config(self, targets: list[str]) -> dict[str, Any]:
        """Return the entry of `config_groups` for modules of these names."""
        strategy = "channel" if self.group_size is None else "group"
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "strategy": strategy}
        more = {"group_size": self.group_size, "dynamic": False, "observer": None}
        none = {"input_activations": None, "output_activations": None, "format": "pack-quantized"}
        return {"targets": targets, "weights": {**weights, **more}, **none}


def grid_of(packed: Packed) -> Grid | None:
    """Return how compressed-tensors says a weight; None where it has no such grid."""
    if len(packed.shape) != 2 or packed.zeros is not None or packed.sizes is not None or packed.bits not in (2, 4, 8):
        return None
    columns, group = packed.shape[1], packed.group
    if columns * packed.bits % 8 or (group * packed.bits % 8) or (columns % group and group % columns):
        return None
    return Grid(packed.bits, group if group < columns else None)


def write(module: nn.Module, cuts: Sequence[Cut], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a module, and return the files; see `Baked.save`."""
    to = check_path(folder, "folder")
    tensors, groups, integers = dict[str, Tensor](), dict[Grid, list[str]](), dict[str, Any]()
    as_integers = set[str]()
    for at, part in module.named_modules():
        if not isinstance(part, Holding):
            continue
        for name in part.integers:
            path, packed = f"{at}.{name}".lstrip("."), packed_of(part, name)
            as_integers.update(f"{path}_{word}" for word in PARTS)
            integers[path] = _described(packed)
            grid = grid_of(packed) if name == "weight" else None
            if grid is None:
                tensors |= {f"{path}_{word}": x for word, x in packed.tensors.items()}
                continue
            groups.setdefault(grid, []).append(at)
            tensors |= _compressed(path, packed)
    tensors |= {name: x for name, x in module.state_dict().items() if name not in as_integers}
    plain = [at for at, part in module.named_modules() if isinstance(part, nn.Linear) and not isinstance(part, Holding)]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": grid.config(names) for i, (grid, names) in enumerate(groups.items())},
        "ignore": plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    with read_errors("read", to):
        text = (to / CONFIG).read_text() if (to / CONFIG).exists() else "{}"
    config = _parsed(text, to / CONFIG)
    config.pop("quantization_config", None)
    config["fds"] = {
        "integers": integers,
        "inputs": rounded_inputs(module),
        "cuts": [_cut_in_words(cut) for cut in cuts],
    }
    config |= {"quantization_config": quantization} if groups else {}
    with replace_files(to, [MODEL, CONFIG]) as hidden:
        save_file({name: _alone(x) for name, x in tensors.items()}, hidden / MODEL, metadata={"format": "pt"})
        (hidden / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return [to / MODEL, to / CONFIG]


def _parsed(text: str, path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises `StorageError` for anything else."""
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise StorageError("this is no JSON object", where=str(path), got=text[:80], want="an object, or no file")
    return config


def read_baked(folder: str | os.PathLike[str], module: nn.Module) -> nn.Module:
    """Fill a module with what `Baked.save` wrote of one of the same structure, in place, and return it in eval mode.

    Of a pruned model that is a module as large as before, which is cut as the other was, or one of its sizes. It is
    then what was written, whatever it was: reading twice is reading once. Raises `StorageError` for files that cannot
    be read, and for a module of other names, shapes or dtypes, which stays as it is.
    """
    at = check_path(folder, "folder")
    if not is_a(module, nn.Module) or any(x.is_meta for x in module.parameters()):
        raise StorageError(
            "not a module, or one without values", where="module", got=repr(module)[:80], want="an nn.Module"
        )
    try:
        with read_errors("read", at):
            config, tensors = json.loads((at / CONFIG).read_text()), load_file(at / MODEL)
        said = config["fds"]
        integers, inputs, cuts = dict[str, Any](said["integers"]), dict[str, Any](said["inputs"]), [*said["cuts"]]
        packed = {path: _packed(path, described, tensors) for path, described in integers.items()}
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        want = f"{MODEL} and {CONFIG}, as Baked.save writes them"
        raise StorageError("this is no baked model", where=str(at), got=str(error)[:200], want=want) from None
    plain = {name: x for name, x in tensors.items() if not _is_held(name, integers)}
    trial = _without_numbers(module)
    try:
        _restructure(trial, cuts, packed, inputs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        want = "a module of the structure that was baked"
        raise StorageError("this module has another structure", got=str(error)[:200], want=want) from error
    has = {name: x for name, x in trial.state_dict().items() if not _is_held(name, integers)}
    for name in sorted(has.keys() | plain.keys()):
        got, want = (f"{tuple(x[name].shape)} {x[name].dtype}" if name in x else "nothing" for x in (has, plain))
        if got != want:
            raise StorageError("this module has another structure", where=name, got=got, want=want)
    _restructure(module, cuts, packed, inputs)
    module.load_state_dict(plain, strict=False)
    return module.eval()


def _without_numbers(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device."""
    memo = dict[int, Any]()
    for x in (*module.parameters(), *module.buffers()):
        meta = x.detach().to("meta")
        memo[id(x)] = nn.Parameter(meta, requires_grad=False) if isinstance(x, nn.Parameter) else meta
    return copy.deepcopy(module, memo)


def _restructure(
    module: nn.Module, cuts: list[dict[str, Any]], packed: dict[str, Packed], inputs: dict[str, dict[str, Any]]
) -> None:
    """Have a module be cut, hold these parameters as integers, no others, and round these inputs, no others."""
    unpacked(module)
    cut_off(module, filter(None, [_cut_of(module, words) for words in cuts]))
    for path, value in packed.items():
        parent, _, name = path.rpartition(".")
        x = module.get_submodule(parent)._parameters[name]
        if x is None or (tuple(x.shape), x.dtype) != (value.shape, value.dtype):
            got = None if x is None else (tuple(x.shape), x.dtype)
            raise ValueError(f"{path}: {got} for {value.shape}, {value.dtype}")
        hold(module, path, attrs.evolve(value, **{word: part.to(x.device) for word, part in value.tensors.items()}))
    for part in module.modules():
        RoundedInputs.remove(part)
    for path, described in inputs.items():
        grid, per = ActivationGrid(described["bits"], described["symmetric"]), described["per"]
        if not (is_int(grid.bits, 2) and grid.bits <= 8 and is_a(grid.symmetric, bool)) or per not in PER:
            raise ValueError(f"{path}: {described}")
        RoundedInputs.put(module.get_submodule(path), grid, per, torch.zeros(2))


def rounded_inputs(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return how modules round what they are given, by path."""
    hooks = [(path, x) for path, part in module.named_modules() for x in part._forward_pre_hooks.values()]
    rounds = {path: x for path, x in hooks if isinstance(x, RoundedInputs)}
    return {path: {**attrs.asdict(x.grid), "per": x.per} for path, x in rounds.items()}


def _cut_in_words(cut: Cut) -> dict[str, Any]:
    return {
        "name": cut.name,
        "dim": cut.dim,
        "length": len(cut.keep),
        "kept": int(cut.keep.sum()),
        "num_heads": cut.num_heads,
    }


def _cut_of(module: nn.Module, words: dict[str, Any]) -> Cut | None:
    """Return the cut of a module that makes its sizes; None where it has them."""
    path, _, name = words["name"].rpartition(".")
    dim, length, kept, heads = (words[key] for key in ("dim", "length", "kept", "num_heads"))
    x = module.get_submodule(path)._parameters.get(name)
    if (x is None and not kept) or (x is not None and kept and x.shape[dim] == kept):
        return None
    return Cut(words["name"], dim, torch.arange(length) < kept, None if heads is None else tuple(heads))


def _is_held(name: str, integers: dict[str, Any]) -> bool:
    path, _, word = name.rpartition("_")
    return path in integers and word in (*PARTS, "packed", "scale", "shape")


def _described(packed: Packed) -> dict[str, Any]:
    return {
        "bits": packed.bits,
        "group": packed.group,
        "scheme": packed.scheme,
        "shape": list(packed.shape),
        "dtype": str(packed.dtype),
    }


def _compressed(path: str, packed: Packed) -> dict[str, Tensor]:
    rows, columns = packed.shape
    codes = packed.codes.reshape(rows, -1)
    words = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
    scales = packed.scales.reshape(-1, max(1, columns // packed.group))
    scales = scales.repeat_interleave(rows // len(scales), 0)
    return {f"{path}_packed": words, f"{path}_scale": scales, f"{path}_shape": torch.tensor([rows, columns])}


def _packed(path: str, described: dict[str, Any], tensors: dict[str, Tensor]) -> Packed:
    """Return what integers are described. Raises errors of many types where that is no weight."""
    packed = _described_by(path, described, tensors)
    if not is_int(packed.bits, 1) or packed.bits > 16 or packed.scheme not in SCHEMES:
        raise ValueError(f"{path}: {packed.bits} bits of {packed.scheme!r}")
    packed.numbers()  # which fail where tensors have other sizes
    return packed


def _described_by(path: str, described: dict[str, Any], tensors: dict[str, Tensor]) -> Packed:
    bits, group, shape = described["bits"], described["group"], tuple(described["shape"])
    scheme: Scheme = described["scheme"]
    dtype = _DTYPES[described["dtype"]]
    if f"{path}_packed" not in tensors:
        codes, scales = tensors[f"{path}_codes"], tensors[f"{path}_scales"]
        zeros, sizes = (tensors.get(f"{path}_{word}") for word in ("zeros", "sizes"))
        return Packed(codes, scales, zeros, bits, group, scheme, shape, dtype, sizes)
    rows, columns = shape
    codes = tensors[f"{path}_packed"].view(torch.uint8)[:, : columns * bits // 8]
    scales = tensors[f"{path}_scale"]
    scales = scales[:: max(1, group // columns)].reshape(-1, 1)
    return Packed(codes.reshape(rows * columns // group, -1), scales, None, bits, group, scheme, shape, dtype)


def _alone(x: Tensor) -> Tensor:
    """Return a tensor in memory of its own, which safetensors need."""
    return x.detach().cpu().contiguous().clone()
