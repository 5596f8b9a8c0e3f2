"""Saving and loading."""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.field import key
from fds.config.meaning import Elsewhere, NotApplicable
from fds.config.record import Config

_ONE_WRITER = NotApplicable("fds.save and fds.save_async have one writer, past the kernel's cache where they can")


@attrs.frozen
class WriterConfig(Config):
    """`checkpoint.writer`: DeepSpeed's fast writer."""

    type: Literal["mock", "python", "fast", "MOCK", "PYTHON", "FAST"] = key("FAST", "which writer", _ONE_WRITER)
    decoupled: bool = key(False, "write while training goes on", Elsewhere("fds.save_async(dir, state, step)"))
    io_buffer_size: int = key(64 * 2**20, "size of its buffer", _ONE_WRITER, unit="bytes", over=0)
    io_buffer_double: bool = key(True, "have two of them", _ONE_WRITER)
    show_statistics: bool = key(False, "print what it did", _ONE_WRITER)
    data_parallel: Literal["replica", "socket", "machine", "REPLICA", "SOCKET", "MACHINE"] | None = key(
        None, "which ranks share the writing", NotApplicable("all ranks that hold a part write it")
    )
    io_multiplier: float = key(1, "writers per rank", _ONE_WRITER)


@attrs.frozen
class ParallelWriteConfig(Config):
    """`checkpoint.parallel_write`: which ranks of a pipeline write what."""

    pipeline_stage: bool = key(
        False, "spread a stage's layers over its data ranks", NotApplicable("every rank writes its own share")
    )


@attrs.frozen
class CheckpointConfig(Config):
    """`checkpoint`: saving and loading."""

    tag_validation: Literal["Ignore", "Warn", "Fail", "ignore", "warn", "fail", "IGNORE", "WARN", "FAIL"] = key(
        "WARN",
        "what to do where ranks name different tags",
        Elsewhere("fds.save(dir, state, step, tag_validation=...)", "in lower case; fds fails unless told"),
    )
    checkpoint_serialization: bool = key(
        True, "pickle it as torch does", NotApplicable("tensors are safetensors, the rest is JSON")
    )
    load_universal: bool = key(
        False,
        "load one that was made universal",
        Elsewhere("fds.load(dir, step, params)", "every save is; fds.import_deepspeed reads DeepSpeed's"),
    )
    use_node_local_storage: bool = key(
        False, "write to disks that ranks do not share", Elsewhere("fds.save(dir, state, step, local=True)")
    )
    parallel_write: ParallelWriteConfig = key(ParallelWriteConfig, "who writes what of a pipeline", None)
    writer: WriterConfig | None = key(None, "DeepSpeed's fast writer", None)
