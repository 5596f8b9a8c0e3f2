"""Read a configuration from a dict, a JSON file, or JSON in base64, as DeepSpeed's launcher passes it.

DeepSpeed reads files as HJSON, which allows comments, commas after the last value and keys without quotes. So does this
if the package hjson is installed (the extra `hjson`); JSON does not need it. `unknown="warn"` leaves out unknown keys.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import os
import re
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fds.config.field import flat_keys, is_comment
from fds.config.record import Config, UnknownKeyError, record_of
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
        return {name: _known(of[1], one, f"{path}.{name}.") for name, one in value.items()}
    return value


def _depth(path: str) -> int:
    return 2 * path.count(".")
