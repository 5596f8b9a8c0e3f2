"""Storage: a state as a folder of safetensors files and one JSON manifest, published whole or not at all.

dir/
latest                   the tag saved last, a line of text
step00000012/            one folder a tag
manifest.json          what is where: `fds.storage.manifest`
rank0.safetensors      the tensors, under their key paths
.saving/                 what a running or a killed save left; the next save clears it
.lock                    held while a save runs
"""

from fds.storage.loading import load
from fds.storage.manifest import Chunk, Leaf, Manifest
from fds.storage.saving import save

__all__ = ["Chunk", "Leaf", "Manifest", "load", "save"]
