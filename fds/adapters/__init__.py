"""Adapters in the files of peft: written from a state, and read to go on with."""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:
    from fds.adapters.files import Adapter, read, save

__getattr__, __dir__ = lazily(__name__, {"fds.adapters.files": "Adapter read save"})

__all__ = ["Adapter", "read", "save"]
