"""Media: where a leaf of a state lives, on the device, the host or disk, and how it is read and written there.

A leaf elsewhere is a tensor like any other: whoever reads it finds its values. `read` and `write` get at many leaves at
once, beside what else is computed, in memory of a known size.
"""

from fds.media._disk import Disk, disk, place_of
from fds.media.activations import Blocks, Kept, KeptGroups, Tally
from fds.media.arena import Extent, extent_of
from fds.media.mapping import written_in_place
from fds.media.medium import Device, Host, Medium, medium_of, read, write

__all__ = [
    "Blocks",
    "Device",
    "Disk",
    "Extent",
    "Host",
    "Kept",
    "KeptGroups",
    "Medium",
    "Tally",
    "disk",
    "extent_of",
    "medium_of",
    "place_of",
    "read",
    "write",
    "written_in_place",
]
