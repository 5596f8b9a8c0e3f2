"""Files of other programs as sources: weights, and the checkpoints of DeepSpeed.

Leaves have the key paths of a plain state: "params.<name>", "opt.<slot>.<name>", "buffers.<name>", "step" and "calls",
where <name> is the name of a parameter in the file; `renamed` changes it. Pickles are only read by
`torch.load(weights_only=True)`, which does not run code from them.
"""

from fds.storage.foreign.deepspeed_runs import deepspeed
from fds.storage.foreign.foreign_leaf import renamed
from fds.storage.foreign.weight_files import weights

__all__ = ["deepspeed", "renamed", "weights"]
