"""Read a configuration from a dict, a JSON file, or JSON in base64, as DeepSpeed's launcher passes it.

DeepSpeed reads files as HJSON, which allows comments, commas after the last value and keys without quotes. So does this
if the package hjson is installed (the extra `hjson`); JSON does not need it.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fds.errors import ConfigError
from fds.storage.disk.small_files import RepeatedKeys, unique_keys


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
