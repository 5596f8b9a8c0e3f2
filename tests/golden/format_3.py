"""Record saves of format 3, which later versions must go on loading, but for what their messages had lost.

format_3.tar.xz holds `whole`, which two ranks at ZeRO stage 1 saved that send gradients with error feedback, and
expected.json: the leaves of the state, by key path, as lists. Written by the version before format 4 (commit 93b8a80),
which is the last that this can be run with:

    PYTHONPATH=. python tests/golden/format_3.py
"""

import json
import tarfile
import tempfile
from pathlib import Path

import torch

import fds
from tests.storage.topologies import plain

ARCHIVE = Path(__file__).parent / "format_3.tar.xz"


def params():
    """Return the parameters that the run began with."""
    return {"w": torch.arange(40.0).view(8, 5) / 8, "b": torch.arange(3.0)}


def step():
    """Return the step of a rank."""
    loss = lambda params, batch: ((batch @ params["w"]).sum(-1).tanh().mean() + params["b"].sum()).square()
    shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], gradients=fds.transports.topk(0.25))
    return fds.compose(shard, fds.adamw(0.1))(loss)


def main():
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:

        def body():
            one = step()
            state, _ = one(one.init(params(), key=7), torch.ones(2, 8))
            fds.save(f"{folder}/whole", state, one, "best", {"from": "format 3"})
            return {name: x.tolist() for name, x in plain(state, one).items()}

        (Path(folder) / "expected.json").write_text(json.dumps(fds.simulate(body, 2)[0]))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(folder, ".")


if __name__ == "__main__":
    main()
