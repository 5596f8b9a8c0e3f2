"""`fds storage` and `fds report`: look into what runs leave behind: saves, and what was logged."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fds.command_line import Parser
from fds.errors import escaped
from fds.storage import showing
from fds.storage.disk.files import read_errors
from fds.storage.disk.folders import tags
from fds.storage.exporting import export_weights
from fds.storage.format.tensors import DTYPES
from fds.storage.opening import differences, locate, open_source, verify

Options = argparse.Namespace


AFTER = (
    "DIR is a run's directory, DIR:TAG or DIR/TAG one save of it; or what others saved. docs/storage.md is the guide."
)


def fill(parser: Parser) -> None:
    """Give the parser of `fds storage` its commands."""
    parser.teach(
        "Look into saves, check them, and take weights out of them.",
        examples={
            "fds storage show runs/gpt/save": "the saves of a run",
            "fds storage verify runs/gpt/save": "whether the last one is whole",
            "fds storage export runs/gpt/save weights": "its weights, for other programs",
            "fds storage diff runs/a runs/b": "in what two differ",
        },
        after=AFTER,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    commands.add_parser("show", help="list the saves of a run, or what is in one", fill=_fill_show)
    commands.add_parser("verify", help="compare every checksum", fill=_fill_verify)
    commands.add_parser("export", help="write weights as Hugging Face safetensors", fill=_fill_export)
    commands.add_parser("diff", help="compare two saves leaf by leaf", fill=_fill_diff)


def _fill_show(parser: Parser) -> None:
    parser.teach(
        "List the saves of a run; or of one save its composition, its leaves, their sizes, and the user's extra.",
        examples={
            "fds storage show run": "the saves",
            "fds storage show run:step00000008": "one of them, leaf by leaf",
            "fds storage show pytorch_model.bin": "what torch.save wrote",
        },
        after=AFTER,
    )
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument("--tag", help="which save to show leaf by leaf")
    parser.set_defaults(run=_reading(_show))


def _fill_verify(parser: Parser) -> None:
    parser.teach(
        "Compare every checksum; exit with 1 if anything is wrong.",
        examples={"fds storage verify run": "the last save", "fds storage verify run --all": "all of them"},
        after=AFTER,
    )
    parser.add_argument("dir", metavar="DIR")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tag", help="which save (the last)")
    which.add_argument("--all", action="store_true", help="all saves")
    parser.set_defaults(run=_reading(_verify))


def _fill_export(parser: Parser) -> None:
    parser.teach(
        "Write the weights of a save as Hugging Face safetensors.",
        examples={
            "fds storage export run weights": "a folder, in bfloat16",
            "fds storage export run model.safetensors --dtype float32": "one file",
            "fds storage export run weights --tree slots.ema": "the averages of fds.ema",
        },
        after=AFTER,
    )
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument("path", metavar="PATH", help="a file that ends in .safetensors, or a directory")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32", "own"],
        help="of floating-point weights (%(default)s); own: as they are",
    )
    parser.add_argument("--tag", help="which save (the last)")
    parser.add_argument("--tree", default="params", help="slots.ema: averages in the place of params")
    parser.set_defaults(run=_reading(_export))


def _fill_diff(parser: Parser) -> None:
    parser.teach(
        "Compare two saves leaf by leaf; exit with 1 if they differ.",
        examples={
            "fds storage diff runs/a runs/b": "the last saves of two runs",
            "fds storage diff run:step00000006 run": "an earlier save and the last one",
        },
        after=AFTER,
    )
    parser.add_argument("a", metavar="A", help="DIR, DIR:TAG or DIR/TAG")
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument("--tags", nargs=2, metavar=("TAG_A", "TAG_B"), help="which saves (the last ones)")
    parser.set_defaults(run=_reading(_diff))


def _reading(command: Callable[[Options], int]) -> Callable[[Options], int]:
    """Return a command under which files that cannot be read are a `StorageError`."""

    def run(options: Options) -> int:
        with read_errors("command"):
            return command(options)

    return run


def _show(options: Options) -> int:
    path, tag = locate(options.dir, options.tag)
    listed = tag is None and path.is_dir() and tags(path)
    showing.show(showing.run(path) if listed else showing.save(open_source(path, tag)))
    return 0


def _verify(options: Options) -> int:
    path, tag = locate(options.dir, options.tag)
    wrong = 0
    for save_tag in (options.all and tags(path)) or [tag]:
        faults = verify(path, save_tag)
        wrong += bool(faults)
        name = escaped(str(path) if save_tag is None else f"{path}:{save_tag}")
        showing.show([f"{name}: {'damaged' if faults else 'whole'}", *(f"  {escaped(text)}" for text in faults)])
    return 1 if wrong else 0


def _export(options: Options) -> int:
    path, tag = locate(options.dir, options.tag)
    dtype = None if options.dtype == "own" else DTYPES[options.dtype]
    showing.show(escaped(str(p)) for p in export_weights(path, options.path, dtype, tag=tag, tree=options.tree))
    return 0


def _diff(options: Options) -> int:
    places = zip((options.a, options.b), options.tags or (None, None), strict=True)
    a, b = (open_source(*locate(text, tag)) for text, tag in places)
    differing = differences(a, b)
    showing.show(showing.comparison(differing, len({*a.leaves, *b.leaves})))
    return 1 if differing else 0


def fill_report(parser: Parser) -> None:
    """Give the parser of `fds report` its options."""
    parser.teach(
        "Write one HTML file about a run: curves, speed, time and memory, messages, the pipeline, configuration,\n"
        "and what deserves a look. It needs no server and no network. Of several runs it shows the differences.",
        examples={
            "fds report runs/gpt": "writes runs/gpt/report.html",
            "fds report runs/a runs/b -o both.html": "two runs beside each other",
        },
        after="A run leaves what is shown by fds.monitor(fds.monitors.JSONL(...)), fds.timed and fds.record_run;\n"
        "`make train` does. docs/monitors.md is the guide.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the directory that a run was logged to")
    parser.add_argument("-o", "--output", metavar="FILE", help="of the page (report.html, in the run's directory)")
    parser.set_defaults(run=_report)


def _report(options: Options) -> int:
    from fds.reporting import report  # `fds storage` does not wait for it

    print(escaped(str(report(*options.runs, path=options.output))))
    return 0
