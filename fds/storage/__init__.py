"""Storage: a state as a folder of safetensors files and one JSON manifest, published whole or not at all.

dir/
latest                   the tag saved last, a line of text
step00000012/            one folder a tag
manifest.json          what is where: `fds.storage.manifest`
rank0.safetensors      tensors under their key paths: what all ranks have alike, and what the first one owns
rank1.safetensors      what the second one owns, and so on
.saving/                 what a running or a killed save left; the next save clears it
.lock                    held while a save runs

Key paths, shapes and elements are those of the plain state: how many ranks wrote it, in which pipeline, at which stage
and in which buckets, shows only in which file a leaf is and how it is cut into chunks.
"""

from fds.storage.loading import load
from fds.storage.manifest import Chunk, Leaf, Manifest
from fds.storage.saving import save

__all__ = ["Chunk", "Leaf", "Manifest", "load", "save"]
