"""ZeRO's offloading to host memory and disk, and asynchronous I/O."""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.field import key
from fds.config.meaning import NotApplicable, NotYet, argument
from fds.config.record import Config
from fds.errors import ConfigError

Device = Literal["none", "cpu", "nvme"]
_MEDIA = 'cpu: "host", nvme: fds.disk(nvme_path)'
_PATH = argument("disk", name="directory")
_PINNED = NotApplicable(
    "memory of the host is page-locked for a GPU, in exact sizes; without one it makes no difference"
)
_BUFFERS = NotApplicable("three chunks are under way: one is read, one is updated, one is written")
_AHEAD = NotApplicable("a chunk is always read ahead and written behind")
_SUBMITTED = NotApplicable("requests are submitted many at a time, and as earlier ones are done")


@attrs.frozen
class _OffloadConfig(Config):
    def check(self) -> None:
        """Raise `ConfigError` for nvme without a folder."""
        if self["device"] == "nvme" and self["nvme_path"] is None:
            raise ConfigError(
                "nvme needs a folder", where="device, nvme_path", got="nvme, null", want='"nvme_path": "/a/folder"'
            )


@attrs.frozen
class OffloadParamConfig(_OffloadConfig):
    """`offload_param`: offloaded parameters, at stage 3."""

    device: Device = key("none", "where it waits", argument("offload", name="masters", note=_MEDIA), documented="cpu")
    nvme_path: str | None = key(None, "folder on a fast disk, for nvme", _PATH, documented="/local_nvme")
    pin_memory: bool = key(True, "page-locked host memory", _PINNED, documented=False)
    buffer_count: int = key(5, "buffers of the pool", _BUFFERS, low=0)
    buffer_size: int = key(
        100_000_000,
        "size of each",
        argument("disk", name="buffer_bytes", note="4 bytes an element, where that is less than its default"),
        unit="elements",
        low=0,
    )
    max_in_cpu: int = key(
        1_000_000_000,
        "parameters that stay in host memory under nvme",
        NotApplicable(
            "parameters on a disk are read from it; fds.offload takes patterns of those that stay on the host"
        ),
        unit="elements",
        low=0,
    )


@attrs.frozen
class OffloadOptimizerConfig(_OffloadConfig):
    """`offload_optimizer`: offloaded optimizer state, which is updated where it is."""

    device: Device = key(
        "none",
        "where it waits",
        argument("offload", name="moments", note=f"{_MEDIA}; gradients too, and masters in 16 bit"),
        documented="cpu",
    )
    nvme_path: str | None = key(None, "folder on a fast disk, for nvme", _PATH, documented="/local_nvme")
    pin_memory: bool = key(True, "page-locked host memory", _PINNED, documented=False)
    buffer_count: int = key(4, "buffers of the pool, as many as a parameter has states", _BUFFERS, low=0)
    pipeline_read: bool = key(False, "read the next tile while one is computed", _AHEAD)
    pipeline_write: bool = key(False, "write the last tile while one is computed", _AHEAD)
    fast_init: bool = key(False, "begin faster under nvme", NotApplicable("leaves are made where they live"))
    ratio: float = key(
        1.0, "share of the state that is offloaded, at stage 3", argument("offload", name="ratio"), low=0, high=1
    )
    super_offload: bool = key(
        False, "update before the norm of all gradients is known", argument("offload", name="speculate")
    )
    cpuadam_cores_perc: float = key(
        0.8,
        "share of the cores that update",
        NotApplicable("torch.set_num_threads says how many cores an update on the host takes"),
        low=0,
        high=1,
    )


@attrs.frozen
class AioConfig(Config):
    """`aio`: asynchronous reads and writes of offloaded tensors."""

    block_size: int = key(
        1048576, "size of a request", NotApplicable("fds.disk cuts requests itself"), unit="bytes", over=0
    )
    queue_depth: int = key(
        8, "requests on their way", argument("disk", name="queue_depth", note="times intra_op_parallelism"), over=0
    )
    intra_op_parallelism: int = key(
        1,
        "threads of a request",
        argument("disk", name="queue_depth", note="times queue_depth"),
        over=0,
        old=("thread_count",),
    )
    single_submit: bool = key(False, "send requests one by one", _SUBMITTED)
    overlap_events: bool = key(True, "send before earlier requests are done", _SUBMITTED)
    use_gds: bool = key(False, "let the disk write into GPU memory", NotYet("GPUDirect storage"))
