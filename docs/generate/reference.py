"""The pages of the API reference: every public name once, by room, in the order of data flow."""

from __future__ import annotations

import docstrings
import public

TITLES = {
    "fds.loss": "Losses",
    "fds.step": "Steps",
    "fds.transforms": "Transforms",
    "fds.optim": "Optimizers",
    "fds.schedules": "Schedules",
    "fds.collectives": "Ranks and collectives",
    "fds.state": "State",
    "fds.autodiff": "Gradients as values",
    "fds.random": "Random numbers",
    "fds.tree": "Trees",
    "fds.layout": "Flat buckets",
    "fds.microbatches": "Microbatches",
    "fds.media": "Where leaves live",
    "fds.plans": "Pipeline plans",
    "fds.attention_layouts": "Layouts of sparse attention",
    "fds.kernels": "Kernels",
    "fds.nn": "Layers of kernels",
    "fds.hf": "Models of transformers",
    "fds.profiling": "What a step takes",
    "fds.curvature": "Curvature",
    "fds.storage": "Saving and loading",
    "fds.storage.foreign": "Files of other programs",
    "fds.data": "Data loaders",
    "fds.display": "Progress of a run",
    "fds.monitors": "Monitors of a run",
    "fds.timing": "Times of a step",
    "fds.transports": "Messages in fewer bytes",
    "fds.compression": "Smaller models",
    "fds.distill": "Students and teachers",
    "fds.adapters": "Adapters",
    "fds.debugging": "Debugging a run",
    "fds.reporting": "The page of a run",
    "fds.config": "DeepSpeed's configuration",
    "fds.trainer": "The Trainer of transformers",
    "fds.elastic": "Elastic batches and runs",
    "fds.tuning": "The fastest composition",
    "fds.command_line": "The command line",
    "fds.errors": "Errors",
}
STATIONS = "stations"  # of fds.step, what only an author of transforms meets: a page of its own

FIRST = "---\nsearch:\n  boost: 4\n---\n"  # a name is searched for more often than it is mentioned


def page_of(name: public.Name) -> str:
    """Return the page that describes a name, as `transforms`."""
    if name.room == "fds.step" and name.path.startswith("fds.step."):
        return STATIONS
    return name.room.removeprefix("fds.").replace(".", "-")


def pages() -> dict[str, str]:
    """Return the Markdown of every page of the reference by its path in the site."""
    by_page: dict[str, list[public.Name]] = {}
    for name in public.names():
        by_page.setdefault(page_of(name), []).append(name)
    found = {"reference/index.md": _index(by_page)}
    for room in public.ROOMS:
        page = room.removeprefix("fds.").replace(".", "-")
        if page in by_page:
            found[f"reference/{page}.md"] = _page(room, TITLES[room], by_page[page])
        if room == "fds.step":
            found[f"reference/{STATIONS}.md"] = _stations(by_page[STATIONS])
    return found


def _page(room: str, title: str, names: list[public.Name]) -> str:
    text = docstrings.markdown(public.docstring(room), room)
    lines = [f"{FIRST}# {title}", "", text, ""]
    groups = public.groups(room)
    titled = {member: head for head, members in groups for member in members} if len(groups) > 1 else {}
    last = ""
    for name in names:
        head = titled.get(name.name, "")
        if head != last:
            lines += [f"## {head[0].upper()}{head[1:]}", ""]
            last = head
        lines += _name(name, 3 if titled else 2)
    return "\n".join(lines)


def _titles() -> dict[str, str]:
    """Return the title of every page in order."""
    found = {}
    for room, title in TITLES.items():
        found[room.removeprefix("fds.").replace(".", "-")] = title
        if room == "fds.step":
            found[STATIONS] = "Stations"
    return found


def _stations(names: list[public.Name]) -> str:
    lines = [
        f"{FIRST}# Stations",
        "",
        "What a transform of your own takes, fills and returns. [Write your own](../write-your-own.md) tells how they "
        "work together; whoever only composes transforms meets none of them.",
        "",
    ]
    for name in names:
        lines += _name(name, 2)
    return "\n".join(lines)


def _name(name: public.Name, level: int) -> list[str]:
    lines = [f"::: {name.path}", "    options:", f"      heading_level: {level}"]
    if name.room == "fds.errors" and name.name.endswith(("Error", "Warning")) and name.name != "FdsError":
        lines += ["      show_signature: false", "      show_bases: true"]  # they take what FdsError takes
    return [*lines, ""]


def _index(by_page: dict[str, list[public.Name]]) -> str:
    lines = [
        "# API reference",
        "",
        "Every public name, in the order of data flow: from the loss to the files of a run.",
        "",
    ]
    for page, title in _titles().items():
        lines += [f"## [{title}]({page}.md)", "", "| name | |", "| --- | --- |"]
        for name in by_page[page]:
            summary = docstrings.markdown(name.summary, name.room).replace("|", "\\|")
            lines.append(f"| [`{name.path}`][{name.path}] | {summary} |")
        lines.append("")
    return "\n".join(lines)
