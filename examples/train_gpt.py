"""Train a byte-level GPT on Python's own standard library, or on your files: the main job of fds.

    python examples/train_gpt.py                        # about three minutes of training, then a sample
    python examples/train_gpt.py --data my/notes book.txt --minutes 30 --width 512 --layers 8
    python examples/train_gpt.py --resume runs/gpt      # continue where Ctrl-C stopped it, bit for bit
    python examples/train_gpt.py --ranks 0              # on every GPU of this machine, or every core
    python examples/train_gpt.py --ranks 2 --pipeline zb_h1 --stages 2     # half of the layers on each of two ranks
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py

A run is a folder: `options.json`, `run.json`, `log.jsonl`, `save/` (its last state) and, at the end, `curve.png`;
`fds report FOLDER` makes a page of it. A new run into the folder of another one replaces it; ranks that torchrun
restarts continue from the last save. The batch is that of all ranks, so their number changes the speed of a run but not
its curve, and a run may resume with another number.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gpt import pipelines, ranks
from gpt.model import gpt
from gpt.sample import generate
from gpt.text import Text, even_starts, random_starts, read, windows
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from torch import Tensor

import fds
from fds.collectives import Axis, Mesh
from fds.display import draw_curve, read_log
from fds.errors import FdsError, StorageError

PRECISIONS = {
    "float32": fds.compose(),
    "bfloat16": fds.precision(torch.bfloat16),
    "float16": fds.compose(fds.precision(torch.float16), fds.loss_scale()),
}
SHOWN = ("bits_per_byte", "grad_norm", "lr", "loss_scale", "skipped")
TIMEOUT = 300.0  # seconds that a rank waits for the others; nothing they do alone takes half of it


def training_step(options: argparse.Namespace, mesh: Mesh) -> fds.Step:
    """Compose the training step."""
    num_microbatches = pipelines.num_microbatches(options)
    if options.pipeline == pipelines.NONE:
        microbatches = fds.accumulate(num_microbatches)
    else:
        schedule, _ = pipelines.SCHEDULES[options.pipeline]
        microbatches = fds.pipeline(schedule, mesh["pp"], num_microbatches=num_microbatches)
    lr = fds.schedules.warmup_cosine(
        options.lr, warmup_steps=options.steps // 20, total_steps=options.steps, end_ratio=0.02
    )
    adamw = functools.partial(fds.adamw, lr, betas=(0.9, 0.95))
    muon = functools.partial(fds.muon, lr, adjust_lr="match_rms_adamw")  # updates as large as AdamW's
    matrices = muon if options.optimizer == "muon" else adamw
    return fds.compose(
        PRECISIONS[options.dtype],
        microbatches,
        fds.shard_optimizer(mesh["dp"], stage=options.stage),
        fds.clip_by_global_norm(1.0),
        fds.by_name(
            {
                "*norm*": adamw(weight_decay=0.0),
                "*.*.weight": matrices(weight_decay=options.weight_decay),  # of the blocks: 1.qkv.weight
                "*": adamw(weight_decay=options.weight_decay),
            }
        ),
        fds.donate(),
    )(model(options))


def model(options: argparse.Namespace) -> fds.Layers:
    """Return the loss."""
    return gpt(width=options.width, layers=options.layers, heads=options.heads, dropout=options.dropout)


def train(options: argparse.Namespace, text: Text, out: Path, mesh: Mesh) -> int:
    """Train until the last step or an interruption, then show the result; return the exit code.

    Every rank does the same, and what is collective together; the log and the console of all but the first lead
    nowhere.
    """
    step, device, shown = training_step(options, mesh), torch.device(options.device), mesh.rank == 0
    params = initial_params(step, options)
    if options.resume:
        state, extra = fds.load(out / "save", step, params)
        if extra["text"] != text.digest:
            raise StorageError(
                "the text has changed since this run began",
                where=str(out),
                got=text.digest,
                want=extra["text"],
                hint="leave out --resume to start again",
            )
    else:
        state = step.init(params, key=options.seed)
    fds.record_run(out, step, state, config=kept(options))
    timed = fds.timed(every=10)
    text, done, last = text.to(device), int(state.calls), options.steps
    console = Console() if shown else Console(quiet=True, force_terminal=False)
    size = sum(x.numel() for x in fds.tree.leaves(params))
    title = f"fds  GPT of {size / 1e6:.1f}M parameters, {options.dtype} on {placing(options, mesh)}"

    with fds.display.Progress(
        last, start=done, title=title, names=SHOWN, curve="bits_per_byte", log=out / "log.jsonl", console=console
    ) as progress:
        for _ in progress:
            batch = next_batch(text, state, options, mesh["dp"])
            with timed(state):
                state, metrics = step(state, batch)
            progress({**metrics, **timed.metrics()}, tokens=options.batch * options.context)
            done = progress.done
            if done % options.eval_every == 0 or done == last:
                with progress.paused():
                    progress.note({"held_out": held_out_bits(step, state, text, options, mesh["dp"])})
            if done % options.save_every == 0 or progress.ends:
                with progress.paused():
                    save = fds.save if progress.ends else fds.save_async  # training continues meanwhile
                    save(out / "save", state, step, tag="last", extra={"text": text.digest})

    if progress.done < last:
        command = shlex.join([sys.executable, sys.argv[0], "--resume", str(out)])
        console.print(
            f"stopped after step {progress.done} of {last}, and saved. Go on with:\n\n  {command}\n", soft_wrap=True
        )
        return 130
    code = generate(
        step.evaluator(state),
        options.prompt,
        num_bytes=options.sample,
        context=options.context,
        key=fds.random.fold_in(state.key, "sample"),
        device=device,
    )
    if shown:
        code = Syntax(code, "python", theme="ansi_dark", word_wrap=True)
        console.print(Panel(code, title="a sample", border_style="dim"))
        console.print(summary(out, options), highlight=False, soft_wrap=True)
    return 0


def placing(options: argparse.Namespace, mesh: Mesh) -> str:
    """Return a text that says where a run runs: its device, or its ranks and what they share."""
    device = torch.device(options.device)
    where = [f"{device}" if mesh.size == 1 else f"{mesh.size} ranks of {device.type}"]
    if mesh["dp"].size > 1:
        where.append(f"stage {options.stage}")
    if options.pipeline != pipelines.NONE:
        where.append(f"{options.pipeline} through {options.stages} stages")
    return ", ".join(where)


def everyone(mesh: Mesh) -> Axis:
    """Return the axis of all ranks."""
    return mesh["pp", "dp"]


def initial_params(step: fds.Step, options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the initial parameters for the seed, on the device."""
    key = fds.random.fold_in(fds.random.key(options.seed), "params")
    return fds.tree.map(lambda x: x.to(options.device), step.loss.init(key))


def next_batch(text: Text, state: fds.State, options: argparse.Namespace, dp: Axis) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of random windows: a pure function of the state, so there is no loader state.

    Ranks that differ along the pipeline get the same rows.
    """
    key = fds.random.fold_in(state.key, "batch", int(state.calls))
    starts = random_starts(text.train, key, rows=options.batch, context=options.context)
    return windows(text.train, ranks.share(starts, dp), context=options.context)


def held_out_bits(step: fds.Step, state: fds.State, text: Text, options: argparse.Namespace, dp: Axis) -> float:
    """Return the bits per byte on the same windows of held-out text for every run; the ranks share them."""
    starts = even_starts(text.held_out, rows=options.eval_rows, context=options.context)
    evaluate, parts = step.evaluator(state), starts.split(options.batch)
    batches = [windows(text.held_out, ranks.share(part, dp), context=options.context) for part in parts]
    bits = [evaluate(batch)["bits_per_byte"] * len(part) for part, batch in zip(parts, batches, strict=True)]
    return float(torch.stack(bits).sum() / len(starts))


def summary(out: Path, options: argparse.Namespace) -> str:
    """Draw the curve, and return a few lines about the result and the files."""
    log, picture = out / "log.jsonl", str(out / "curve.png")
    try:
        draw_curve(log, picture, metric="bits_per_byte", note="held_out")
    except FdsError as error:
        picture = f"not drawn: {escape(error.what)} ({escape(error.hint)})"
    last = read_log(log)[-1]
    return "\n".join(
        (
            f"held out  [bold]{last['held_out']:.3f}[/] bits per byte",
            f"trained   {options.steps} steps of {options.batch * options.context:,} bytes in {last['seconds']:.0f} s",
            f"curve     {picture}",
            f"page      fds report {out}",
            f"log       {log}",
            f"save      {out / 'save'}",
        )
    )


def fastest_dtype(device: str) -> str:
    """Return bfloat16 if matrix products are measured to be much faster in it, else float32."""

    def seconds(dtype: torch.dtype) -> float:
        x, times = torch.ones(512, 512, dtype=dtype, device=device), []
        for _ in range(8):
            start = time.perf_counter()
            float((x @ x)[0, 0])
            times.append(time.perf_counter() - start)
        return min(times)

    return "bfloat16" if 1.5 * seconds(torch.bfloat16) < seconds(torch.float32) else "float32"


def steps_within(options: argparse.Namespace, text: Text, mesh: Mesh) -> int:
    """Return the number of steps that fit into `--minutes`, from the times of a few steps on the first rank."""
    options.steps = 1
    step, text = training_step(options, mesh), text.to(torch.device(options.device))
    state, times = step.init(initial_params(step, options)), []
    for _ in range(8):
        start = time.perf_counter()
        state, metrics = step(state, next_batch(text, state, options, mesh["dp"]))
        float(metrics["loss"])
        times.append(time.perf_counter() - start)
    typical = everyone(mesh).exchange(sorted(times)[len(times) // 2])[0]
    return min(20_000, max(100, 100 * round(0.6 * options.minutes / typical)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a resumed run keeps its options unless they are given again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help="files and folders to learn from")
    parser.add_argument("--out", default="runs/gpt", help="the run's folder (%(default)s)")
    parser.add_argument("--resume", metavar="OUT", help="go on with the run in this folder")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few seconds, to see that all works")
    sizes = parser.add_argument_group("sizes")
    for name, default, meaning in (
        ("steps", 0, "steps to train; 0 takes what fits into --minutes"),
        ("batch", 8, "windows per step"),
        ("accumulate", 0, "microbatches of a rank's rows; 0 takes 1, with --pipeline up to four for each of its ranks"),
        ("context", 256, "bytes per window"),
        ("width", 128, "of the model"),
        ("layers", 4, "blocks"),
        ("heads", 2, "attention heads per block"),
        ("seed", 0, "of everything random"),
        ("eval-every", 100, "steps between evaluations"),
        ("eval-rows", 64, "held-out windows"),
        ("save-every", 250, "steps between saves"),
        ("sample", 600, "bytes to generate at the end"),
        ("ranks", 1, "processes that share each batch; 0 takes one per GPU or core, as many as divide it"),
        ("restarts", 0, "times that the ranks are started again from the last save when one is lost"),
        ("stages", 0, "of --pipeline, on all its ranks together"),
    ):
        sizes.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (%(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--minutes", type=float, default=2.75, help="of training, where --steps is 0 (%(default)s)")
    training.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (%(default)s)")
    training.add_argument("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    training.add_argument("--dropout", type=float, default=0.0, help="(%(default)s)")
    training.add_argument("--prompt", default="def ", help="what the sample starts with")
    training.add_argument("--stage", type=int, choices=range(4), default=2, help="of sharding by ranks (%(default)s)")
    training.add_argument(
        "--pipeline",
        choices=[pipelines.NONE, *pipelines.SCHEDULES],
        metavar="SCHEDULE",
        help=f"cut the layers into --stages and pass microbatches through by a schedule of fds.plans, sharding each "
        f"stage over the ranks that are left ({pipelines.NONE}): {', '.join(pipelines.SCHEDULES)}",
    )
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
            parser.set_defaults(**written(Path(first.resume)))
        except (OSError, ValueError) as error:
            raise FdsError(
                "there is no run to resume", where=first.resume, got=str(error), want="a folder that this script wrote"
            ) from None
    elif first.quick:
        parser.set_defaults(steps=20, batch=4, context=64, width=32, layers=2, heads=2, eval_every=10, sample=40)
    if first.pipeline == pipelines.NONE:  # a run may be resumed without its pipeline
        parser.set_defaults(stages=0)
    options = parser.parse_args(arguments)
    options.pipeline = options.pipeline or pipelines.NONE
    counts = "batch context width layers heads eval_every eval_rows save_every"
    from_zero = ("accumulate", "ranks", "restarts", "stages")
    for name, low in (*((name, 1) for name in counts.split()), *((name, 0) for name in from_zero)):
        if getattr(options, name) < low:
            parser.error(f"--{name.replace('_', '-')} counts from {low}, not {getattr(options, name)}")
    pipelines.refuse_stages(options)
    rows = options.batch // pipelines.rows_together(options)
    options.ranks = options.ranks or ranks.fitting(options.device, rows=rows, each=pipelines.num_ranks(options))
    return options


def refuse(options: argparse.Namespace) -> None:
    """Raise `FdsError` for sizes that do not fit, before anything is started."""
    loss = model(options)
    pipelines.refuse_ranks(options)
    data_ranks = options.ranks // pipelines.num_ranks(options)
    if options.batch % data_ranks:
        raise FdsError(
            "the ranks cannot share the batch evenly",
            where="--batch",
            got=f"{options.batch} windows for {data_ranks} ranks",
            want="a multiple",
        )
    pipelines.refuse(options, loss)


def settle(options: argparse.Namespace, text: Text, out: Path, mesh: Mesh) -> None:
    """Settle what is left open, alike on every rank; the first one makes the folder and writes the options down.

    Raises `FdsError` for a folder that holds something else than a run.
    """
    ranks.agree(everyone(mesh), lambda: begin(options, out), vars(options))
    if options.steps < 1:
        options.steps = steps_within(options, text, mesh)
    if mesh.rank == 0:
        (out / "options.json").write_text(json.dumps(kept(options), indent=1) + "\n")


def kept(options: argparse.Namespace) -> dict:
    """Return the options that a resumed run keeps."""
    return {name: value for name, value in vars(options).items() if name not in ("out", "resume", "quick")}


def begin(options: argparse.Namespace, out: Path) -> None:
    """Delete the files of an earlier run, or continue the run if the ranks were restarted."""
    run = ranks.run_id()
    if ranks.started_again() and written(out, {}).get("run") == run:
        vars(options).update(written(out), resume=str(out) if (out / "save" / "latest").exists() else None)
        return
    if not options.resume:
        if out.exists() and any(out.iterdir()) and not (out / "options.json").exists():
            raise FdsError(
                "this folder holds no run, and is not replaced",
                where="--out",
                got=str(out),
                want="a new or empty folder, or an earlier run's",
            )
        for name in ("options.json", "run.json", "log.jsonl", "curve.png", "report.html"):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / "save", ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
    if options.dtype == "auto":
        options.dtype = fastest_dtype(options.device)
    if options.optimizer == "auto":
        options.optimizer = "muon" if options.dtype == "bfloat16" else "adamw"
    options.data, options.run = [str(Path(path).resolve()) for path in options.data], run


def written(out: Path, otherwise: dict | None = None) -> dict:
    """Return the options of the run in a folder. Raises `OSError` or `ValueError` if there are none."""
    try:
        return json.loads((out / "options.json").read_text())
    except (OSError, ValueError):
        if otherwise is None:
            raise
        return otherwise


def main(arguments: Sequence[str]) -> int:
    """Run from the command line; return the exit code."""
    rank = 0
    try:
        options = parse(arguments)
        fds.init_distributed("gloo" if options.device == "cpu" else None, timeout=TIMEOUT)
        world = fds.mesh(dp=-1)
        rank, started = world.rank, world.size > 1 or ranks.run_id() is not None
        options.ranks = world.size if started else options.ranks
        refuse(options)
        text = read(options.data, context=options.context)
        if options.ranks > world.size:
            return ranks.launch([sys.argv[0], *arguments], options.ranks, restarts=options.restarts)
        out = Path(options.resume or options.out)
        mesh = fds.mesh(pp=pipelines.num_ranks(options), dp=-1)
        settle(options, text, out, mesh)
        return train(options, text, out, mesh)
    except (FdsError, OSError) as error:
        if not (rank and isinstance(error, StorageError)):  # every rank raises it
            print(f"train_gpt{f', rank {rank}' if rank else ''}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
