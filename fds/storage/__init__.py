"""Storage: a state as a folder of safetensors files and one JSON manifest, published whole or not at all.

    dir/
      latest                   the tag saved last, a line of text
      step00000012/            one folder a tag
        manifest.json          what is where: `fds.storage.format.manifest`
        rank0.safetensors      tensors under their key paths: what the first rank wrote
        rank1.safetensors      what the second one wrote, and so on
      .saving/                 what a running or a killed save left; the next save clears it
      .lock                    held while a save runs

Key paths, shapes and elements are those of the plain state: how many ranks wrote it, in which pipeline, at which stage
and in which buckets, shows only in which file a leaf is and how it is cut into chunks. docs/format.md is the whole
format.
"""

from fds.storage.background import Saving, save_async
from fds.storage.differing import Difference, differences
from fds.storage.exporting import export_weights
from fds.storage.format.manifest import Chunk, File, Leaf, Manifest
from fds.storage.importing import import_deepspeed, import_weights
from fds.storage.loading import load
from fds.storage.opening import open_source
from fds.storage.saving import save
from fds.storage.source import Source
from fds.storage.verifying import verify

__all__ = [
    "Chunk", "Difference", "File", "Leaf", "Manifest", "Saving", "Source", "differences", "export_weights",
    "import_deepspeed", "import_weights", "load", "open_source", "save", "save_async", "verify",
]  # fmt: skip
