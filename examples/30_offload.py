"""Offload: moments on a disk, parameters on the host, and the update in chunks that are read ahead and written behind.

What lives elsewhere is a tensor of the state like any other, and no number depends on where it lives. `describe` says
the bytes of each place. A run that is saved goes on with its leaves elsewhere. On a CPU the host is where all is
computed anyway: what moves here is what is on the disk.
"""

import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(8 * 32, 128)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = self.embed(context).flatten(1)
        return self.head(self.norm(F.gelu(self.hidden(x))))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def compose(*transforms):
    return fds.compose(fds.clip_by_global_norm(1.0), fds.ema(0.98), *transforms, fds.adamw(lr=3e-3))(loss_fn)


def train(step, state, stop):
    for i in range(int(state.calls), stop):
        state, metrics = step(state, batch(i))
    return state, float(metrics["loss"])


with tempfile.TemporaryDirectory() as temporary:  # of a local NVMe drive
    folder = Path(temporary)
    disk = fds.disk(folder, buffer_bytes=2**18)
    offload = fds.offload(moments=disk, masters="host", averages={"embed.*": disk})

    plain, step = compose(), compose(offload, fds.donate())
    there, loss = train(plain, plain.init(params, key=0), 30)
    state, same = train(step, step.init(params, key=0), 30)
    assert loss == same and all(map(torch.equal, fds.tree.leaves(state), fds.tree.leaves(there)))
    print(f"30 updates, equal bit for bit to those with all on the device, loss {loss:.3f}")

    told = step.describe(state)
    for place, count in told.places.items():
        print(f"{place.replace(temporary, '...'):<10} {count:>10,} bytes of the state")
    assert told.places[f"disk {folder}"] == sum(x.nbytes for x in fds.tree.leaves(state.opt)) + 256 * 32 * 4
    assert told.places["host"] == sum(x.nbytes for x in params.values())
    print(f"copies of chunks in an update: {told.num_bytes['chunks']:,} bytes")
    names = [path.name for path in folder.iterdir()]
    assert not [name for name in names if not name.startswith("fds.lock")]  # nothing that a killed run would leave

    # A save does not know where its leaves lived: the run goes on with other leaves elsewhere, or with none.
    fds.save(folder / "run", state, step)
    want, _ = train(plain, there, 40)
    for other in (step, plain, compose(fds.offload(moments={"head.*": disk}, ratio=0.5))):
        loaded, _ = fds.load(folder / "run", other, params)
        loaded, _ = train(other, loaded, 40)
        assert all(map(torch.equal, fds.tree.leaves(loaded), fds.tree.leaves(want)))
    print("saved, and gone on with in three other places, with the same bits")

    # What is no medium is refused, with what was meant.
    for wrong in ({"moments": "cpu"}, {"moments": temporary}, {"masters": "host", "ratio": 30}):
        try:
            fds.offload(**wrong)
        except fds.FdsError as error:
            print(str(error).replace(temporary, "..."))
        else:
            raise AssertionError
