"""What `benchmarks.loading` compares: ways to get the weights of a model into the slices of two ranks."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import fds
from benchmarks import ranks
from fds.storage.disk.reader import touch_fresh

BLOCK = 8 * 2**20
INIT, RAW, WHOLE = "fds.hf.init", "raw read", "from_pretrained, step.init"


@attrs.frozen
class Weighed:
    """What making a state takes of the rank that takes most, and what it holds."""

    beyond_bytes: int  # at the peak, above what was there and what is held
    read_bytes: int
    held_bytes: int


def make(folder: str, layers: int, width: int) -> None:
    """Write the model, in a process that ends."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32 * width,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    if dist.get_rank() == 0:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="300MB")


def new_step() -> Any:
    """Return a step at stage 3, which keeps nothing beside parameters."""
    axis = fds.mesh(dp=-1)["dp"]
    return fds.compose(fds.shard_optimizer(axis, stage=3), fds.sgd(0.1))(lambda params, batch: params)


def initialise(folder: str) -> Callable[[], Any]:
    """Return what reads slices."""
    step, model = new_step(), fds.hf.lazy(folder)
    return lambda: fds.hf.init(step, model)


def load_whole(folder: str) -> Callable[[], Any]:
    """Return what loads the model on every rank, and divides it."""
    step, transformers = new_step(), importlib.import_module("transformers")

    def call() -> Any:
        module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return step.init({name: p.detach() for name, p in module.named_parameters()})

    return call


def read_raw(folder: str) -> Callable[[], Any]:
    """Return what reads a rank's share of the bytes, and nothing else."""
    files = sorted(Path(folder).glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    share = sum(sizes) // dist.get_world_size()

    def call() -> torch.Tensor:
        out = torch.empty(share, dtype=torch.uint8)
        touch_fresh(out)
        left, skipped = out.numpy().data, share * dist.get_rank()
        for path, size in zip(files, sizes, strict=True):
            at, skipped = min(skipped, size), max(0, skipped - size)
            fd = os.open(path, os.O_RDONLY)
            while len(left) and at < size:
                count = os.preadv(fd, [left[: min(BLOCK, size - at)]], at)
                left, at = left[count:], at + count
            os.close(fd)
        return out

    return call


WAYS = {INIT: initialise, RAW: read_raw, WHOLE: load_whole}


def weigh(folder: str, name: str) -> Weighed:
    """Run on every rank of a fresh process: return what this takes."""
    call = WAYS[name](folder)
    _let_go(call())  # what the first call imports and starts
    gc.collect()
    ranks.high_water(reset=True)
    before, read = ranks.high_water(reset=True), _read_bytes()
    state = call()
    read = _read_bytes() - read
    held = sum(x.nbytes for x in fds.tree.leaves(state if name == RAW else state.params))
    most = torch.tensor([ranks.high_water(reset=True) - before - held, read, held])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Weighed(*most.tolist())


def time_in_turns(folder: str, names: tuple[str, str], rounds: int, cpu: bool = False) -> list[list[float]]:
    """Run on every rank: return the seconds of the slowest rank, round by round, of two ways in turned order.

    With `cpu` they are those of the CPU, of all threads of the process.
    """
    clock = time.process_time if cpu else time.perf_counter
    calls = {str(i): WAYS[name](folder) for i, name in enumerate(names)}
    make = {i: lambda call=call: lambda: _let_go(call()) for i, call in calls.items()}
    return list(ranks.take_turns(make, rounds=rounds, first_calls=2, turn=0, clock=clock).seconds.values())


def _let_go(x: Any) -> torch.Tensor:
    """Return a loss, as contenders do, without what was made: memory in blocks of 1 MiB and more is new each time."""
    del x
    return torch.zeros(1)


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
