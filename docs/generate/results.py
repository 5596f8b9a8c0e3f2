"""The pages of measured results: the newest table of every name, its claims, and older tables beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Claim:
    """One row of a table that claims something: what it says, and whether it was met."""

    row: dict[str, str]
    met: bool

    def about(self) -> str:
        """Return the cells that say what is compared with what."""
        said = [self.row[key] for key in ("case", "on", "contender") if self.row.get(key)]
        beside = f" beside {self.row['beside']}" if self.row.get("beside") else ""
        return ", ".join(said) + beside

    def measured(self) -> str:
        """Return what was measured."""
        ratio, interval = self.row.get("ratio", ""), self.row.get("95% interval", "")
        if not ratio:
            return "; ".join(f"{key} {value}" for key, value in self.row.items() if value and key != "claim")
        return f"{ratio} ({interval})" if interval else ratio


def tables() -> dict[str, list[Path]]:
    """Return the files of every name, newest first; a name is what stands behind the date."""
    found: dict[str, list[Path]] = {}
    for path in sorted(FOLDER.glob("*.md"), reverse=True):
        found.setdefault(re.sub(r"^\d{4}-\d\d-\d\d-", "", path.stem), []).append(path)
    return dict(sorted(found.items()))


def claims(text: str) -> Iterator[Claim]:
    """Yield the claims of the tables of a result: their last column is `claim`, and says yes or NO."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif header[-1] == "claim" and re.search(r": (yes|NO)\b", cells[-1]):
            yield Claim(dict(zip(header, cells, strict=False)), ": yes" in cells[-1])


def pages() -> dict[str, str]:
    """Return the Markdown of every page of results by its path in the site."""
    found = {"results/index.md": _index()}
    for name, paths in tables().items():
        for path in paths:
            found[f"results/{path.name}"] = _table(path, paths if path == paths[0] else [], name)
    return found


def _table(path: Path, paths: list[Path], name: str) -> str:
    title, _, rest = path.read_text().partition("\n")
    date = path.stem.removesuffix(f"-{name}")
    earlier = ", ".join(f"[{older.stem.removesuffix(f'-{name}')}]({older.name})" for older in paths[1:])
    lines = [f"# {name}", "", f"Measured on {date}." + (f" Earlier: {earlier}." if earlier else ""), ""]
    return "\n".join([*lines, rest.lstrip()]) if title.startswith("# ") else path.read_text()


def _index() -> str:
    newest = {name: paths[0] for name, paths in tables().items()}
    said = {name: list(claims(path.read_text())) for name, path in newest.items()}
    every = [claim for of_one in said.values() for claim in of_one]
    lines = [
        "# Measured results",
        "",
        "The newest table of each measurement. A claim is a bound that was set before measuring: "
        f"{sum(claim.met for claim in every)} of {len(every)} are met, and those that are not are listed below. "
        "[How to read a table](measuring.md) tells how times are compared.",
        "",
        "| table | measured | claims met | not met | what ran |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, path in newest.items():
        met = sum(claim.met for claim in said[name])
        counts = f"{met} of {len(said[name])} | {len(said[name]) - met or ''}" if said[name] else "makes none |"
        date = path.stem.removesuffix(f"-{name}")
        lines.append(f"| [{name}]({path.name}) | {date} | {counts} | {_what_ran(path.read_text())} |")
    lines += ["", "## Claims that are not met", ""]
    lines += ["| table | what | ratio (95% interval) | claim |", "| --- | --- | --- | --- |"]
    for name, path in newest.items():
        for claim in said[name]:
            if not claim.met:
                bound = claim.row["claim"].partition(":")[0]
                lines.append(f"| [{name}]({path.name}) | {claim.about()} | {claim.measured()} | {bound} |")
    return "\n".join([*lines, ""])


def _what_ran(text: str) -> str:
    """Return what a result says that it measured, without the details behind a semicolon."""
    said = re.search(r"^- what (?:ran|was measured): ([^;\n]+)", text, re.MULTILINE)
    return said[1].replace("|", "\\|") if said else ""
