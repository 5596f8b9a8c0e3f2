"""The page of all keys, docs/config-keys.md: made from the records and from what was decided."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args, get_origin

from fds.config.decisions import CONTRADICTIONS, INTENDED
from fds.config.keys import optimizer, scheduler
from fds.config.record import Config, Key, keys, record_of, same
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
- `python -m fds.config schema` prints all this as a JSON Schema for editors, `python -m fds.config explain FILE` what
  a file comes to.

This page is made by `python -m fds.config table > docs/config-keys.md`.
"""
_COLUMNS = ("key", "type", "default", "documented", "unit", "what it does", "here")
_WORDS = {"boolean": "true or false", "null": "null"}


def table() -> str:
    """Return the page in Markdown."""
    return "\n".join([_INTRODUCTION, *_groups(), *_parameters(), *_old_spellings(), *_contradictions(), *_intended()])


def every_key(cls: type[Config], path: str = "") -> Iterator[tuple[str, Any, Key]]:
    """Yield (JSON path, type, what is known) of the keys of a record and of those below it; `*` is any name."""
    for name, (type_, known) in keys(cls).items():
        here = path if known.flat else f"{path}{name}"
        if not known.flat:
            yield here, type_, known
        below, star = _below(type_)
        if below is not None:
            yield from every_key(below, here if known.flat else f"{here}.{star}")


def parameters() -> dict[str, list[tuple[str, type[Config]]]]:
    """Return of `optimizer.params` and `scheduler.params` the types, as they are written, with their records."""
    optimizers = [(optimizer.SPELLED.get(kind, kind), record) for kind, record in optimizer.PARAMETERS.items()]
    return {"optimizer": optimizers, "scheduler": list(scheduler.PARAMETERS.items())}


def differing() -> Iterator[tuple[str, Key]]:
    """Yield (JSON path, what is known) of all keys whose default the documentation gives otherwise."""
    for path, _, known in every_key(TrainingConfig):
        if known.differs:
            yield path, known
    for group, types in parameters().items():
        for type_, record in types:
            for path, _, known in every_key(record, f"{group}[{type_}].params."):
                if known.differs:
                    yield path, known


def _below(type_: Any) -> tuple[type[Config] | None, str]:
    """Return the record below a key and what stands between them in the path; None for a value."""
    named = get_args(type_)[1] if get_origin(type_) is dict else None
    return (record_of(type_), "") if named is None else (record_of(named), "*.")


def _groups() -> Iterator[str]:
    yield "## All keys\n"
    for name, (type_, known) in keys(TrainingConfig).items():
        record = _below(type_)[0]
        if record is None:
            raise AssertionError(f"{name} is no group")
        title = _upper(known.doc) if known.flat else f"`{name}`: {known.doc}"
        rows = every_key(record, "" if known.flat else f"{name}.")
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
    for path, _, known in every_key(TrainingConfig):
        for spelling, turn in known.old.items():
            parent = path.rpartition(".")[0]
            old = f"{parent}.{spelling}" if parent else spelling
            rows.append((f"`{old}`", f"`{path}`" + ("" if turn is same else ", as its object")))
    yield from _section("", ("old", "new"), rows)


def _contradictions() -> Iterator[str]:
    yield "## Where documentation and code disagree\n"
    yield ("Defaults. `defaults=\"0.19.6\"`, which is what holds where nothing is said, takes the code's; "
           "`defaults=\"docs\"` the documentation's. Held by "
           "`tests/config/test_decisions.py::test_a_default_is_that_of_its_edition`.\n")
    rows = [(f"`{path}`", _json(known.documented), _json(known.default)) for path, known in differing()]
    yield from _section("", ("key", "documentation", "0.19.6"), rows)
    yield "And what is no key's default:\n"
    rows = [(one.topic, one.documented, one.code, one.here, f"`{one.test}`") for one in CONTRADICTIONS]
    yield from _section("", ("topic", "documentation", "code", "fds", "held by"), rows)


def _intended() -> Iterator[str]:
    yield "## Where fds differs from DeepSpeed, and means to\n"
    rows = [(one.deepspeed, one.here, f"`{one.test}`") for one in INTENDED]
    yield from _section("", ("DeepSpeed", "fds", "held by"), rows)


def _row(path: str, type_: Any, known: Key) -> tuple[str, ...]:
    default = "" if _below(type_)[0] is not None and callable(known.default) else _json(known.default)
    documented = _json(known.documented) if known.differs else ""
    here = "its keys say" if known.meaning is None else str(known.meaning)
    return f"`{path}`", _type(type_, known), default, documented, known.unit, known.doc, here


def _type(type_: Any, known: Key) -> str:
    bounds = ((known.low, "≥"), (known.over, ">"), (known.high, "≤"), (known.under, "<"))
    told = [f"{sign} {bound:g}" for bound, sign in bounds if bound is not None]
    return ", ".join([_words(alternatives(type_, known)), *told])


def _words(found: list[dict[str, Any]]) -> str:
    words = [_word(one) for one in found] or ["anything"]
    return " or ".join(word for word in dict.fromkeys(words) if not (word == "integer" and "number" in words))


def _word(one: dict[str, Any]) -> str:
    """Return one alternative of a type as people say it."""
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
    """Yield a title, if there is one, and a table below it."""
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
    """Return the text with what Markdown would read as its own escaped, but for code."""
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("*", "\\*").replace("<", "\\<") for i, part in enumerate(parts))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
