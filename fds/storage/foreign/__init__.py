"""Files of other programs as sources: weights, and the checkpoints of DeepSpeed and of torch.distributed.checkpoint.

Leaves have the key paths of a plain state: "params.<name>", "opt.<slot>.<name>", "buffers.<name>", "step" and "calls",
where <name> is the name of a parameter in the file; `renamed` changes it. Pickles are only read by
`torch.load(weights_only=True)`, and in `dcp_files` by a reader that knows a few inert classes: no code from them runs.
"""

from fds.storage.foreign.dcp_files import METADATA
from fds.storage.foreign.dcp_runs import dcp
from fds.storage.foreign.deepspeed_runs import deepspeed
from fds.storage.foreign.foreign_leaf import renamed
from fds.storage.foreign.weight_files import weights

__all__ = ["METADATA", "dcp", "deepspeed", "renamed", "weights"]
