"""ZeRO's offloading to host memory and disk, and asynchronous I/O."""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.field import key
from fds.config.meaning import NotApplicable, NotYet, PartOf
from fds.config.record import Config
from fds.errors import ConfigError

Device = Literal["none", "cpu", "nvme"]


@attrs.frozen
class _OffloadConfig(Config):
    device: Device = key("none", "where it waits", NotYet("offloading", nothing=("none",)), documented="cpu")
    nvme_path: str | None = key(None, "folder on a fast disk, for nvme", PartOf("device"), documented="/local_nvme")
    pin_memory: bool = key(True, "page-locked host memory", PartOf("device"), documented=False)

    def check(self) -> None:
        """Raise `ConfigError` for nvme without a folder."""
        if self.device == "nvme" and self.nvme_path is None:
            raise ConfigError(
                "nvme needs a folder", where="device, nvme_path", got="nvme, null", want='"nvme_path": "/a/folder"'
            )


@attrs.frozen
class OffloadParamConfig(_OffloadConfig):
    """`offload_param`: offloaded parameters, at stage 3."""

    buffer_count: int = key(5, "buffers of the pool", PartOf("device"), low=0)
    buffer_size: int = key(100_000_000, "size of each", PartOf("device"), unit="elements", low=0)
    max_in_cpu: int = key(
        1_000_000_000, "parameters that stay in host memory under nvme", PartOf("device"), unit="elements", low=0
    )


@attrs.frozen
class OffloadOptimizerConfig(_OffloadConfig):
    """`offload_optimizer`: offloaded optimizer state, which is updated where it is."""

    buffer_count: int = key(4, "buffers of the pool, as many as a parameter has states", PartOf("device"), low=0)
    pipeline_read: bool = key(False, "read the next tile while one is computed", PartOf("device"))
    pipeline_write: bool = key(False, "write the last tile while one is computed", PartOf("device"))
    fast_init: bool = key(False, "begin faster under nvme", PartOf("device"))
    ratio: float = key(1.0, "share of the state that is offloaded, at stage 3", PartOf("device"), low=0, high=1)
    super_offload: bool = key(False, "the way for chips whose host memory is near", PartOf("device"))
    cpuadam_cores_perc: float = key(0.8, "share of the cores that update", PartOf("device"), low=0, high=1)


@attrs.frozen
class AioConfig(Config):
    """`aio`: asynchronous reads and writes of offloaded tensors."""

    block_size: int = key(1048576, "size of a request", NotApplicable("read only under nvme"), unit="bytes", over=0)
    queue_depth: int = key(8, "requests on their way", NotApplicable("read only under nvme"), over=0)
    intra_op_parallelism: int = key(
        1, "threads of a request", NotApplicable("read only under nvme"), over=0, old=("thread_count",)
    )
    single_submit: bool = key(False, "send requests one by one", NotApplicable("read only under nvme"))
    overlap_events: bool = key(True, "send before earlier requests are done", NotApplicable("read only under nvme"))
    use_gds: bool = key(False, "let the disk write into GPU memory", NotYet("GPUDirect storage"))
