"""What others wrote, as sources: weights that are shared as files, and the checkpoints of DeepSpeed.

Leaves have the key paths of a plain state: "params.<name>", "opt.<slot>.<name>", "buffers.<name>", "step" and "calls",
where <name> is the writer's name of a parameter; `renamed` turns it into another. Pickles are read by
`torch.load(weights_only=True)` alone, which runs no code of theirs.
"""

from fds.storage.foreign.deepspeed_runs import deepspeed
from fds.storage.foreign.renaming import renamed
from fds.storage.foreign.weight_files import weights

__all__ = ["deepspeed", "renamed", "weights"]
