"""Services that save in the background, and the data loader: keys that other functions of fds take.

Source: `nebula/`, `datastates/` and `runtime/config.py` of 0.19.6.
"""

from __future__ import annotations

from typing import Any

import attrs

from fds.config.field import key
from fds.config.meaning import Elsewhere, NotApplicable
from fds.config.record import Config

_SAVE = "fds.save_async(...)"


@attrs.frozen
class NebulaConfig(Config):
    """`nebula`: Azure's service for saves in the background."""

    enabled: bool = key(False, "save in the background", Elsewhere(_SAVE, "to any file system"))
    persistent_storage_path: str | None = key(None, "folder of saves", Elsewhere("fds.save_async(path, ...)"))
    persistent_time_interval: int = key(
        100,
        "time from one save that lasts to the next",
        Elsewhere(_SAVE, "the program decides when"),
        unit="seconds",
        over=0,
    )
    num_of_version_in_retention: int = key(
        2, "saves that are kept", Elsewhere("fds.save_async(..., keep=)"), unit="saves", over=0
    )
    nebula_load_path: str | None = key(
        None, "folder to go on from; null: that of saves", Elsewhere("fds.load(path, ...)")
    )
    enable_nebula_load: bool = key(
        True, "load what the service wrote, not torch.save", NotApplicable("`fds.load` sees what a save is")
    )


@attrs.frozen
class LoadingConfig(Config):
    """Keys of the top level on data loading and background saves."""

    datastates_ckpt: bool | dict[str, Any] | None = key(
        False,
        "save in the background by DataStates; an object, with host_cache_size in GiB, or true",
        Elsewhere(_SAVE, "the state waits in the memory of the run, or in a copy of it"),
    )
    dataloader_drop_last: bool = key(
        False,
        "leave out the last batch of an epoch where it is short",
        Elsewhere("fds.data.DistributedLoader(last=)", "drop, or wrap, which fills it up"),
    )
