"""The page of all keys, docs/config-keys.md, generated from the records and from `decisions`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args, get_origin

from fds.config.decisions import CONTRADICTIONS, INTENDED
from fds.config.field import Key, keys, same
from fds.config.keys import optimizer
from fds.config.record import Config, record_of
from fds.config.schema import alternatives, plain
from fds.config.training import TrainingConfig

_INTRODUCTION = """\
# Keys of DeepSpeed's configuration

What `fds.config.TrainingConfig` reads: every key of the JSON of DeepSpeed 0.19.6, its default there, and what it is
here. A key that is not listed is refused, with its path and the nearest key that is.

- A value may be `"auto"`, but for groups and for what names groups: `resolve(auto=...)` fills it in, or it is the
  default.
- *Documented* is the default of DeepSpeed's documentation, where it is another than that of the code.
  `TrainingConfig.of(json, defaults="docs")` takes it.
- `*` in a path stands for a name of your own.
- *Not yet* is refused, unless the value asks for nothing; *not applicable* is taken, does nothing, and is listed by
  `explain`; *part of* another key matters only where that one asks for something.
- `fds config schema` prints all this as a JSON Schema for editors, `fds explain FILE` what a file comes to.

This page is made by `fds config table > docs/config-keys.md`.
"""
_COLUMNS = ("key", "type", "default", "documented", "unit", "what it does", "here")
_WORDS = {"boolean": "true or false", "null": "null"}


def table() -> str:
    """Return the page in Markdown."""
    return "\n".join([_INTRODUCTION, *_groups(), *_parameters(), *_old_spellings(), *_contradictions(), *_intended()])


def every_key(cls: type[Config], path: str = "") -> Iterator[tuple[str, Any, Key]]:
    """Yield (JSON path, type, key) of all keys of a record and below it; `*` stands for any name."""
    for name, (type_, key) in keys(cls).items():
        here = path if key.flat else f"{path}{name}"
        if not key.flat:
            yield here, type_, key
        below, star = _below(type_)
        if below is not None:
            yield from every_key(below, here if key.flat else f"{here}.{star}")


def parameters() -> dict[str, list[tuple[str, type[Config]]]]:
    """Return the types of optimizers and schedulers, as they are written, with the records of their `params`."""
    optimizers = [(optimizer.SPELLED.get(kind, kind), record) for kind, record in optimizer.OPTIMIZERS.items()]
    return {"optimizer": optimizers, "scheduler": list(optimizer.SCHEDULERS.items())}


def differing() -> Iterator[tuple[str, Key]]:
    """Yield (JSON path, key) of all keys whose default in the documentation differs from the code's."""
    for path, _, key in every_key(TrainingConfig):
        if key.differs:
            yield path, key
    for group, types in parameters().items():
        for type_, record in types:
            for path, _, key in every_key(record, f"{group}[{type_}].params."):
                if key.differs:
                    yield path, key


def _below(type_: Any) -> tuple[type[Config] | None, str]:
    """Return the record below a key, None if there is none, and what is between them in the path."""
    named = get_args(type_)[1] if get_origin(type_) is dict else None
    return (record_of(type_), "") if named is None else (record_of(named), "*.")


def _groups() -> Iterator[str]:
    yield "## All keys\n"
    for name, (type_, key) in keys(TrainingConfig).items():
        record = _below(type_)[0]
        if record is None:
            raise AssertionError(f"{name} is not a group")
        title = _upper(key.doc) if key.flat else f"`{name}`: {key.doc}"
        rows = every_key(record, "" if key.flat else f"{name}.")
        yield from _section(f"### {title}", _COLUMNS, [_row(*row) for row in rows])


def _parameters() -> Iterator[str]:
    for group, types in parameters().items():
        yield f"## `{group}.params`, by type\n"
        for record in dict.fromkeys(record for _, record in types):
            names = ", ".join(f"`{name}`" for name, one in types if one is record)
            yield from _section(f"### {names}", _COLUMNS, [_row(*row) for row in every_key(record, f"{group}.params.")])


def _old_spellings() -> Iterator[str]:
    yield "## Old spellings\n"
    yield "They are taken, with a `FutureWarning` that names the new one; beside the new one they are refused.\n"
    rows = [("`zero_optimization`: true or false", "`zero_optimization.stage`: 1 or 0")]
    for path, _, key in every_key(TrainingConfig):
        for spelling, conversion in key.old.items():
            parent = path.rpartition(".")[0]
            old = f"{parent}.{spelling}" if parent else spelling
            rows.append((f"`{old}`", f"`{path}`" + ("" if conversion is same else ", as its object")))
    yield from _section("", ("old", "new"), rows)


def _contradictions() -> Iterator[str]:
    yield "## Where documentation and code disagree\n"
    yield (
        'Defaults. `defaults="0.19.6"`, which is what holds where nothing is said, takes the code\'s; '
        '`defaults="docs"` the documentation\'s. Held by '
        "`tests/config/test_decisions.py::test_a_default_is_that_of_its_edition`.\n"
    )
    rows = [(f"`{path}`", _json(key.documented), _json(key.default)) for path, key in differing()]
    yield from _section("", ("key", "documentation", "0.19.6"), rows)
    yield "And what is no key's default:\n"
    rows = [(one.topic, one.documented, one.code, one.here, f"`{one.test}`") for one in CONTRADICTIONS]
    yield from _section("", ("topic", "documentation", "code", "fds", "held by"), rows)


def _intended() -> Iterator[str]:
    yield "## Where fds differs from DeepSpeed, and means to\n"
    rows = [(one.deepspeed, one.here, f"`{one.test}`") for one in INTENDED]
    yield from _section("", ("DeepSpeed", "fds", "held by"), rows)


def _row(path: str, type_: Any, key: Key) -> tuple[str, ...]:
    default = "" if _below(type_)[0] is not None and callable(key.default) else _json(key.default)
    documented = _json(key.documented) if key.differs else ""
    here = "its keys say" if key.meaning is None else str(key.meaning)
    return f"`{path}`", _type(type_, key), default, documented, key.unit, key.doc, here


def _type(type_: Any, key: Key) -> str:
    bounds = ((key.low, "≥"), (key.over, ">"), (key.high, "≤"), (key.under, "<"))
    limits = [f"{sign} {bound:g}" for bound, sign in bounds if bound is not None]
    return ", ".join([_words(alternatives(type_, key)), *limits])


def _words(schemas: list[dict[str, Any]]) -> str:
    words = [_word(one) for one in schemas] or ["anything"]
    return " or ".join(word for word in dict.fromkeys(words) if not (word == "integer" and "number" in words))


def _word(one: dict[str, Any]) -> str:
    """Return one alternative of a type in words."""
    if "enum" in one:
        return " or ".join(_json(value) for value in one["enum"])
    if one.get("type") == "array":
        items = one["items"].get("anyOf") or [one["items"]] * bool(one["items"])
        return f"list of {one['minItems']} x {_words(items)}" if "minItems" in one else f"list of {_words(items)}"
    type_: str = one.get("type", "object")
    return _WORDS.get(type_, type_)


def _json(value: Any) -> str:
    return f"`{json.dumps(value() if callable(value) else plain(value))}`"


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield an optional title and a table."""
    if title:
        yield f"{title}\n"
    yield _line(columns)
    yield _line(["---"] * len(columns))
    for row in rows:
        yield _line([_cell(text) for text in row])
    yield ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _cell(text: str) -> str:
    """Escape the characters that have a meaning in Markdown, except in code."""
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("*", "\\*").replace("<", "\\<") for i, part in enumerate(parts))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
