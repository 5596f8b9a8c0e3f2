"""Train a byte-level GPT on Python's own standard library, or on your files: the main job of fds.

    python examples/train_gpt.py                        # some three minutes of training, then a sample
    python examples/train_gpt.py --data my/notes book.txt --minutes 30 --width 512 --layers 8
    python examples/train_gpt.py --resume runs/gpt      # go on where Ctrl-C stopped it, bit for bit

A run is a folder: `options.json`, `log.jsonl`, `save/` (its last state) and, at the end, `curve.png`. A fresh run
into the folder of another one replaces it.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from gpt import curve
from gpt.display import Display
from gpt.log import Log
from gpt.model import gpt
from gpt.sample import generate
from gpt.text import Text, even_starts, random_starts, read, windows
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from torch import Tensor

import fds

PRECISIONS = {
    "float32": fds.compose(),
    "bfloat16": fds.precision(torch.bfloat16),
    "float16": fds.compose(fds.precision(torch.float16), fds.loss_scale()),
}


def training_step(options: argparse.Namespace) -> fds.Step:
    """Compose the whole of training."""
    lr = fds.schedules.warmup_cosine(
        options.lr, warmup_steps=options.steps // 20, total_steps=options.steps, kind="linear", end_ratio=0.02
    )
    adamw = functools.partial(fds.adamw, lr, betas=(0.9, 0.95))
    muon = functools.partial(fds.muon, lr, adjust_lr="match_rms_adamw")  # as long a step as AdamW's
    matrices = muon if options.optimizer == "muon" else adamw
    return fds.compose(
        PRECISIONS[options.dtype],
        fds.accumulate(options.accumulate),
        fds.clip_by_global_norm(1.0),
        fds.by_name({
            "*norm*": adamw(weight_decay=0.0),
            "*.*.weight": matrices(weight_decay=options.weight_decay),  # of the blocks: 1.qkv.weight
            "*": adamw(weight_decay=options.weight_decay),
        }),
        fds.donate(),
    )(gpt(width=options.width, layers=options.layers, heads=options.heads, dropout=options.dropout))  # fmt: skip


def train(options: argparse.Namespace, text: Text, out: Path, console: Console) -> int:
    """Train until the last step or an interruption, then show what came of it; return the exit code."""
    step, device = training_step(options), torch.device(options.device)
    params = initial_params(step, options)
    if options.resume:
        state, extra = fds.load(out / "save", step, params)
        if extra["text"] != text.digest:
            raise fds.FdsError("the text has changed since this run began", where=str(out), got=text.digest,
                               want=extra["text"], hint="leave out --resume to start again")  # fmt: skip
    else:
        state = step.init(params, key=options.seed)
    text, done, last = text.to(device), int(state.calls), options.steps
    size = sum(x.numel() for x in fds.tree.leaves(state.params))
    title = f"[bold]fds[/]  GPT of {size / 1e6:.1f}M parameters, {options.dtype} on {device}"

    with (Log(out / "log.jsonl", upto=done) as log, Display(console, title, total=last, done=done) as display,
          Interrupt() as interrupt):  # fmt: skip
        while done < last:
            state, metrics = step(state, next_batch(text, state, options))
            done += 1
            log.step(done, metrics)
            stops = interrupt.asked or done == last
            evaluates, saves = done % options.eval_every == 0 or done == last, done % options.save_every == 0 or stops
            if done % options.read_every == 0 or evaluates or saves:
                log.read(tokens_per_step=options.batch * options.context)
                display.show(log)
            if evaluates:
                log.evaluation(done, held_out_bits(step, state, text, options))
                display.show(log)
                display.tell(log)
            if saves:
                fds.save(out / "save", state, step, tag="last", extra={"text": text.digest})
            if evaluates or saves:
                log.pause()
            if stops:
                break

    if done < last:
        command = shlex.join([sys.executable, sys.argv[0], "--resume", str(out)])
        console.print(f"stopped after step {done} of {last}, and saved. Go on with:\n\n  {command}\n", soft_wrap=True)
        return 130
    code = generate(step.evaluator(state), options.prompt, num_bytes=options.sample, context=options.context,
                    key=fds.random.fold_in(state.key, "sample"), device=device)  # fmt: skip
    code = Syntax(code, "python", theme="ansi_dark", word_wrap=True)
    console.print(Panel(code, title="a sample", border_style="dim"))
    console.print(summary(log, out, options), highlight=False, soft_wrap=True)
    return 0


def initial_params(step: fds.Step, options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the parameters that the seed gives, on the device."""
    key = fds.random.fold_in(fds.random.key(options.seed), "params")
    return fds.tree.map(lambda x: x.to(options.device), step.loss.init(key))


def next_batch(text: Text, state: fds.State, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return random windows: a pure function of the state, so that a loader has nothing to remember."""
    key = fds.random.fold_in(state.key, "batch", int(state.calls))
    starts = random_starts(text.train, key, rows=options.batch, context=options.context)
    return windows(text.train, starts, context=options.context)


def held_out_bits(step: fds.Step, state: fds.State, text: Text, options: argparse.Namespace) -> float:
    """Return the bits per byte on the same windows of held-out text for every run."""
    starts = even_starts(text.held_out, rows=options.eval_rows, context=options.context)
    evaluate = step.evaluator(state)
    batches = [windows(text.held_out, some, context=options.context) for some in starts.split(options.batch)]
    bits = [evaluate(batch)["bits_per_byte"] * len(batch[0]) for batch in batches]
    return float(torch.stack(bits).sum() / len(starts))


def summary(log: Log, out: Path, options: argparse.Namespace) -> str:
    """Draw the curve, and return a few lines on how it went and where everything is."""
    try:
        curve.draw(log, out / "curve.png")
        picture = str(out / "curve.png")
    except ImportError:
        picture = 'not drawn: matplotlib is not installed (pip install "fds\\[plot]")'
    last = log.evaluations[-1]
    return "\n".join((
        f"held out  [bold]{last['held_out']:.3f}[/] bits per byte",
        f"trained   {options.steps} steps of {options.batch * options.context:,} bytes in {last['seconds']:.0f} s",
        f"curve     {picture}",
        f"log       {out / 'log.jsonl'}",
        f"save      {out / 'save'}",
    ))  # fmt: skip


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the loop to end after its step, a second one ends the program at once."""

    asked = False

    def __enter__(self) -> Interrupt:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def fastest_dtype(device: str) -> str:
    """Return bfloat16 where matrix products run much faster in it, found by trying, else float32."""

    def seconds(dtype: torch.dtype) -> float:
        x, times = torch.ones(512, 512, dtype=dtype, device=device), []
        for _ in range(8):
            start = time.perf_counter()
            float((x @ x)[0, 0])
            times.append(time.perf_counter() - start)
        return min(times)

    return "bfloat16" if 1.5 * seconds(torch.bfloat16) < seconds(torch.float32) else "float32"


def steps_within(options: argparse.Namespace, text: Text) -> int:
    """Return how many steps fit into `--minutes` on this machine, from the times of a few."""
    options.steps = 1
    step, text = training_step(options), text.to(torch.device(options.device))
    state, times = step.init(initial_params(step, options)), []
    for _ in range(8):
        start = time.perf_counter()
        state, metrics = step(state, next_batch(text, state, options))
        float(metrics["loss"])
        times.append(time.perf_counter() - start)
    typical = sorted(times)[len(times) // 2]
    return min(20_000, max(100, 100 * round(0.6 * options.minutes / typical)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; those of a run that is resumed are what they were, unless given anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help="files and folders to learn from")
    parser.add_argument("--out", default="runs/gpt", help="the run's folder (%(default)s)")
    parser.add_argument("--resume", metavar="OUT", help="go on with the run in this folder")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few seconds, to see that all works")
    sizes = parser.add_argument_group("sizes")
    for name, default, meaning in (
        ("steps", 0, "steps to train; 0 takes what fits into --minutes"),
        ("batch", 8, "windows per step"), ("accumulate", 1, "microbatches per step"),
        ("context", 256, "bytes per window"), ("width", 128, "of the model"), ("layers", 4, "blocks"),
        ("heads", 2, "attention heads per block"), ("seed", 0, "of everything random"),
        ("read-every", 10, "steps between readings of the metrics"), ("eval-every", 100, "steps between evaluations"),
        ("eval-rows", 64, "held-out windows"), ("save-every", 250, "steps between saves"),
        ("sample", 600, "bytes to generate at the end"),
    ):  # fmt: skip
        sizes.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (%(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--minutes", type=float, default=2.75, help="of training, where --steps is 0 (%(default)s)")
    training.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (%(default)s)")
    training.add_argument("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    training.add_argument("--dropout", type=float, default=0.0, help="(%(default)s)")
    training.add_argument("--prompt", default="def ", help="what the sample starts with")
    training.add_argument("--dtype", choices=["auto", *PRECISIONS], default="auto", help="auto: the fastest here")
    training.add_argument(
        "--optimizer",
        choices=["auto", "adamw", "muon"],
        default="auto",
        help="of the blocks' matrices; auto: muon where bfloat16 is fast",
    )
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")

    first = parser.parse_args(arguments)
    if first.resume:
        try:
            parser.set_defaults(**json.loads((Path(first.resume) / "options.json").read_text()))
        except (OSError, ValueError) as error:
            raise fds.FdsError("there is no run to resume", where=first.resume, got=str(error),
                               want="a folder that this script wrote") from None  # fmt: skip
    elif first.quick:
        parser.set_defaults(steps=20, batch=4, context=64, width=32, layers=2, heads=2, eval_every=10, sample=40)
    options = parser.parse_args(arguments)
    counts = "batch accumulate context width layers heads read_every eval_every eval_rows save_every"
    for name in counts.split():
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} counts from 1, not {getattr(options, name)}")
    return options


def prepare(options: argparse.Namespace, text: Text, out: Path) -> None:
    """Settle what is left open, make the folder, and write the options down.

    Raises `FdsError` for a folder that holds something else than a run.
    """
    if not options.resume:
        if out.exists() and any(out.iterdir()) and not (out / "options.json").exists():
            raise fds.FdsError("this folder holds no run, and is not replaced", where="--out", got=str(out),
                               want="a new or empty folder, or an earlier run's")  # fmt: skip
        for name in ("options.json", "log.jsonl", "curve.png"):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / "save", ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
    if options.dtype == "auto":
        options.dtype = fastest_dtype(options.device)
    if options.optimizer == "auto":
        options.optimizer = "muon" if options.dtype == "bfloat16" else "adamw"
    if options.steps < 1:
        options.steps = steps_within(options, text)
    options.data = [str(Path(path).resolve()) for path in options.data]
    kept = {name: value for name, value in vars(options).items() if name not in ("out", "resume", "quick")}
    (out / "options.json").write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Run from the command line; return the exit code."""
    try:
        options = parse(arguments)
        out = Path(options.resume or options.out)
        text = read(options.data, context=options.context)
        prepare(options, text, out)
        return train(options, text, out, Console())
    except (fds.FdsError, OSError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
