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
    lines = [
        "# Measured results",
        "",
        "What was measured, the newest table of each name, claims that were met and claims that were not. How it is "
        "measured, and what a claim is: [how to read a table](measuring.md).",
        "",
        "| table | measured | claims met | not met |",
        "| --- | --- | --- | --- |",
    ]
    missed = []
    for name, (path, *_) in tables().items():
        said = list(claims(path.read_text()))
        met = sum(claim.met for claim in said)
        date = path.stem.removesuffix(f"-{name}")
        counts = f"{met} of {len(said)} | {len(said) - met or ''}" if said else "informs, claims nothing | "
        lines.append(f"| [{name}]({path.name}) | {date} | {counts} |")
        missed += [(name, path, claim) for claim in said if not claim.met]
    lines += ["", "## Claims that were not met", ""]
    lines += ["| table | what | ratio (95% interval) | claim |", "| --- | --- | --- | --- |"]
    for name, path, claim in missed:
        said = claim.row["claim"].partition(":")[0]
        lines.append(f"| [{name}]({path.name}) | {claim.about()} | {claim.measured()} | {said} |")
    return "\n".join([*lines, ""])
