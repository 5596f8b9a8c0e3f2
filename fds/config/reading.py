"""Read a configuration from a dict, a JSON file, or JSON in base64, and fill in the values of `"auto"`.

DeepSpeed reads files as HJSON, which allows comments, commas after the last value and keys without quotes. So does this
if the package hjson is installed (the extra `hjson`); JSON does not need it. `unknown="warn"` leaves out unknown keys.

Source: the documentation of transformers' DeepSpeed integration: which keys it fills in, and from what.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import math
import os
import re
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fds.config.field import AUTO, flat_keys, is_comment
from fds.config.record import Config, UnknownKeyError, record_of
from fds.config.rows import MissingKeyError
from fds.errors import ConfigError, nearest
from fds.storage.disk.files import RepeatedKeys, unique_keys


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object of a source. Raises `ConfigError` for a missing file or one that is not a JSON object."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError("not a configuration", got=repr(source)[:80], want="a dict, or a path of a JSON file")
    where, text = str(source)[:80], None
    try:
        text = Path(source).read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, ValueError) as error:
        text = _decoded(source)
        if text is None:
            reason = getattr(error, "strerror", None) or "not text in UTF-8"
            raise ConfigError(
                "the configuration cannot be read",
                where=where,
                got=str(reason),
                want="a file of JSON, or JSON in urlsafe base64",
            ) from None
    return _parsed(text, where)


def _decoded(source: str | os.PathLike[str]) -> str | None:
    """Return the text that base64 encodes, or None if that is not JSON."""
    try:
        text = base64.urlsafe_b64decode(str(source)).decode()
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip("\ufeff \t\r\n").startswith("{") else None


def _parsed(text: str, where: str) -> dict[str, Any]:
    if not text.strip():
        raise ConfigError("the configuration is empty", where=where, got=f"{len(text)} characters", want="{...}")
    try:
        data = _loaded(text)
    except RepeatedKeys as error:
        raise ConfigError(
            "a key is given twice", where=f"{where}: {', '.join(error.keys)}", got=f"{error.count} keys", want="once"
        ) from None
    except (RecursionError, ValueError) as error:
        if hasattr(error, "lineno"):  # a syntax error
            raise _unreadable(error, text, where) from None
        raise ConfigError(
            "the JSON is nested too deeply, or has too large a number",
            where=where,
            got=str(error)[:80],
            want="a configuration",
        ) from None
    if not isinstance(data, dict):
        raise ConfigError("a configuration is a JSON object", where=where, got=text.strip()[:40], want="{...}")
    return data


def _unreadable(error: Any, text: str, where: str) -> ConfigError:
    """Return the error for a text that is neither valid JSON nor valid HJSON."""
    line = "".join(text.splitlines()[error.lineno - 1 : error.lineno]).strip() or "the end of the file"
    of_json = isinstance(error, json.JSONDecodeError)
    return ConfigError(
        "not valid JSON" if of_json else "not valid HJSON",
        where=f"{where}, line {error.lineno}",
        got=line[:80],
        want=error.msg,
        hint=_hint(text[error.pos :]) if of_json else "",
    )


def _loaded(text: str) -> Any:
    """Parse JSON or, if that fails and the package is installed, HJSON.

    Raises the JSON error, or the HJSON error if the text is valid HJSON at the position of the JSON error.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        try:
            hjson = importlib.import_module("hjson")
        except ImportError:
            raise error from None
        try:
            return hjson.loads(text, object_pairs_hook=unique_keys)
        except hjson.HjsonDecodeError as other:
            raise (other if _is_hjson(text[error.pos :], error) and other.pos > error.pos else error) from None


def _is_hjson(rest: str, error: json.JSONDecodeError) -> bool:
    """Return whether HJSON allows what JSON refuses here: a comment, an unquoted key, or a trailing comma."""
    of_a_key = error.msg.startswith("Expecting property name") and re.match(r"[\w'}]", rest)
    return bool(of_a_key) or rest.startswith(("#", "//", "/*"))


def _hint(rest: str) -> str:
    """Return what to write instead of this text, which is not JSON."""
    for python, name in (("True", "true"), ("False", "false"), ("None", "null")):
        if rest.startswith(python):
            return f"JSON writes {name}"
    if importlib.util.find_spec("hjson") is not None:
        return ""
    return "comments, a comma after the last value and keys without quotes are HJSON: pip install hjson to read it"


Unknown = Literal["error", "warn"]
_NEVER_LEFT_OUT = ("optimizer.params.", "scheduler.params.")


def with_known_keys(cls: type[Config], data: Mapping[str, Any], unknown: Unknown) -> Mapping[str, Any]:
    """Return the JSON of a record, for `"warn"` without unknown keys at any depth.

    Raises `ConfigError` if `unknown` is neither `"error"` nor `"warn"`.
    """
    if unknown not in typing.get_args(Unknown):
        raise ConfigError(
            "not a way to treat unknown keys",
            where="unknown",
            got=repr(unknown),
            want=" or ".join(map(repr, typing.get_args(Unknown))),
        )
    return data if unknown == "error" else _known(cls, data, "")


def naming_the_option(error: UnknownKeyError) -> ConfigError:
    """Return the error, with a hint at `unknown="warn"` where that would leave the key out."""
    hint = error.hint
    if not error.where.startswith(_NEVER_LEFT_OUT):
        hint = f"{hint} Or leave" if hint else "leave"
        hint += ' it out with a warning: unknown="warn"'
    return ConfigError(error.what, where=error.where, got=error.got, want=error.want, hint=hint)


def _known(cls: type[Config], data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    types = {spelling: type_ for name, (type_, key) in flat_keys(cls).items() for spelling in (*key.old, name)}
    if path == "":
        types["allgather_size"] = int  # used with the oldest spelling of zero_optimization, true or false
    out = {}
    for name, value in data.items():
        if name in types:
            out[name] = _value(types[name], value, f"{path}{name}")
        elif not is_comment(str(name)):
            near = nearest(str(name), types)
            hint = f" ({near})" if near else ""
            warnings.warn(f"{path}{name} is not known and is left out{hint}", UserWarning, stacklevel=_depth(path) + 4)
    return out


def _value(type_: Any, value: Any, path: str) -> Any:
    """Return the value of a key without unknown keys below it."""
    if (record := record_of(type_)) is not None:
        return _known(record, value, f"{path}.")
    of = typing.get_args(type_)
    named = typing.get_origin(type_) is dict and isinstance(of[1], type) and issubclass(of[1], Config)
    if named and isinstance(value, Mapping):
        return {name: _known(of[1], group, f"{path}.{name}.") for name, group in value.items()}
    return value


def _depth(path: str) -> int:
    return 2 * path.count(".")


_OWN_VALUE = {"pipeline.stages"}  # paths where "auto" is a value of its own

_OF_ARGUMENTS = {  # JSON path -> attribute of transformers' TrainingArguments
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
_NOT_OF_ARGUMENTS = {  # may differ from the JSON, whose value then stays
    "scheduler.params.warmup_min_lr",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}


def training_arguments(
    arguments: Any, *, hidden_size: int | None = None, num_training_steps: int | None = None
) -> dict[str, Any]:
    """Return the values that transformers would fill in for `"auto"`: JSON path -> value.

    Args:
        arguments: transformers' `TrainingArguments`, or an object with some of their attributes.
        hidden_size: of the model, in elements, from which the sizes of ZeRO's messages are computed.
        num_training_steps: updates of the whole training, if `max_steps` is not set.
    """
    values = {path: getattr(arguments, name) for path, name in _OF_ARGUMENTS.items() if hasattr(arguments, name)}
    if hasattr(arguments, "adam_beta1"):
        values["optimizer.params.betas"] = [arguments.adam_beta1, arguments.adam_beta2]
    total = max(getattr(arguments, "max_steps", 0), 0) if num_training_steps is None else num_training_steps
    steps = _warmup_steps(arguments, total)
    counts = {"scheduler.params.total_num_steps": total or None, "scheduler.params.warmup_num_steps": steps}
    values |= {path: count for path, count in counts.items() if count is not None}
    values["scheduler.params.warmup_min_lr"] = 0.0
    return values | ({} if hidden_size is None else of_hidden_size(hidden_size))


def _warmup_steps(arguments: Any, total: int) -> int | None:
    """Return the updates of the warm-up, from a number or a share of all, at least 1; None if unknown."""
    steps = getattr(arguments, "warmup_steps", None) or getattr(arguments, "warmup_ratio", None)
    if steps and steps < 1:
        return max(1, math.ceil(total * steps)) if total else None
    return max(1, int(steps or 0)) if hasattr(arguments, "warmup_steps") else None


def of_hidden_size(hidden_size: int) -> dict[str, int]:
    """Return the sizes of ZeRO's messages for a model of this width: JSON path -> elements."""
    return {
        "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def with_batch_size(data: Mapping[str, Any], values: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Add `train_batch_size` to the values, computed as transformers does from the other two sizes and the ranks.

    If it is `"auto"`, a size without a value is the JSON's; the accumulation is then 1 by default.
    """
    whole, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    in_json = {name: data.get(name) if data.get(name) != AUTO else None for name in (micro, steps)}
    rows, count = (values.get(name) for name in (micro, steps))
    if data.get(whole) == AUTO:
        rows, count = rows or in_json[micro], count or in_json[steps] or 1
    if whole in values or not isinstance(rows, int) or not isinstance(count, int) or type(world_size) is not int:
        return dict(values)
    return {**values, whole: rows * count * world_size}


def explained(error: ConfigError, data: Mapping[str, Any], values: Mapping[str, Any]) -> ConfigError:
    """Return an error of the configuration that says which `"auto"` has no value, if that may be the reason."""
    missing = [path for path in auto_paths(data) if path not in values]
    hint = error.hint or (_auto_hint(missing, error.where) if missing else "")
    needed = [path for path in error.where.split(", ") if path in missing and path.rpartition(".")[2] in error.want]
    if not needed or not isinstance(error, MissingKeyError):
        return type(error)(error.what, where=error.where, got=error.got, want=error.want, hint=hint)
    what = 'a value is "auto", and nobody gave it'
    return ConfigError(what, where=", ".join(needed), got=error.what, want=f"a value for {error.want}", hint=hint)


def _auto_hint(missing: list[str], where: str) -> str:
    steps = "num_training_steps=" if "total_num_steps" in where else "..."
    return (
        f'"auto" without a value: {", ".join(missing)}; pass auto={{{missing[0]!r}: ..., ...}}, or of '
        f"transformers' arguments auto=fds.config.training_arguments(arguments, {steps})"
    )


def fill(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON in which every `"auto"` is replaced by its value, or left out, so that the default applies.

    Values of absent keys are not used. Raises `ConfigError` if the JSON has another value.
    """
    for path, value in values.items():
        in_json = _value_at(data, path.split("."))
        if in_json not in (None, AUTO, value) and path not in _NOT_OF_ARGUMENTS:
            raise ConfigError(
                'a key that is not "auto" has another value',
                where=path,
                got=repr(in_json)[:80],
                want=f'{value!r:.80}, or "auto"',
            )
    return _fill(data, values, "")


def _value_at(data: Any, names: list[str]) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def auto_paths(data: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the JSON paths of every `"auto"` to be filled in."""
    paths = []
    for name, value in data.items():
        if is_comment(name):
            continue
        if isinstance(value, Mapping):
            paths += auto_paths(value, f"{path}{name}.")
        elif isinstance(value, str) and value == AUTO and path + name not in _OWN_VALUE:
            paths.append(path + name)
    return paths


def _fill(data: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    out = {}
    for name, value in data.items():
        here = path + name
        if isinstance(value, Mapping):
            out[name] = _fill(value, values, f"{here}.")
        elif not (isinstance(value, str) and value == AUTO) or here in _OWN_VALUE:
            out[name] = value
        elif here in values:
            out[name] = values[here]
    return out
