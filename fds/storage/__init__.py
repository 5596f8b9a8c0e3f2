"""Storage: a state as a folder of safetensors files and one JSON manifest, written completely or not at all.

    dir/
      latest                   the tag saved last, a line of text
      step00000012/            one folder a tag
        manifest.json          the files and leaves: `fds.storage.format.manifest`
        rank0.safetensors      the tensors that the first rank wrote, by key path
        rank1.safetensors      those of the second rank, and so on
      .saving/                 files of a running or killed save; the next save clears it
      .lock                    held while a save runs

Key paths, shapes and elements are those of the plain state. The number of ranks, the pipeline, the ZeRO stage and the
buckets with which it was saved only decide which file a leaf is in and how it is divided into chunks. docs/format.md
specifies the format.
"""

from fds.storage.exporting import export_weights
from fds.storage.exporting_dcp import export_dcp
from fds.storage.format.manifest import Chunk, File, Manifest, SavedLeaf as Leaf
from fds.storage.importing import import_dcp, import_deepspeed, import_weights
from fds.storage.loading import load
from fds.storage.opening import Difference, differences, open_source, verify
from fds.storage.saving import Saving, save, save_async
from fds.storage.source import Source

__all__ = [
    "Chunk",
    "Difference",
    "File",
    "Leaf",
    "Manifest",
    "Saving",
    "Source",
    "differences",
    "export_dcp",
    "export_weights",
    "import_dcp",
    "import_deepspeed",
    "import_weights",
    "load",
    "open_source",
    "save",
    "save_async",
    "verify",
]
