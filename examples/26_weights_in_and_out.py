"""Weights out of a run and into another: Hugging Face safetensors, and state dicts written by `torch.save`.

A save is for going on with a run, and its composition must fit. Weights are for everybody: `export_weights` writes
parameters alone, under the names of the module, from a saved run without its model, and `import_weights` begins a run
with them, of any composition, on any number of ranks. Pickles are read with `weights_only=True`: nothing in them runs.
"""

import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
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
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = self.embed(context).flatten(1)
        return self.head(self.drop(self.norm(F.gelu(self.hidden(x)))))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def new_step():
    return fds.compose(
        fds.accumulate(4),
        fds.clip_by_global_norm(0.5),
        fds.adamw(lr=fds.schedules.warmup_cosine(3e-3, warmup_steps=10, total_steps=60)),
        fds.ema(0.98),
    )(loss_fn)


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    step = new_step()
    state = step.init(params, key=0)
    for i in range(60):
        state, metrics = step(state, batch(i))
    fds.save(folder / "run", state, step)
    trained = step.evaluate(state, batch(1000, rows=500))["loss"]

    # Out: only the folder of the run is needed.
    (half,) = fds.export_weights(folder / "run", folder / "weights")
    (masters,) = fds.export_weights(folder / "run", folder / "masters.safetensors", torch.float32)
    (averages,) = fds.export_weights(folder / "run", folder / "averages.safetensors", torch.float32, tree="slots.ema")
    save = sum(p.stat().st_size for p in (folder / "run" / "step00000060").iterdir())
    print(f"a save has {save:,} bytes, float32 weights {masters.stat().st_size:,}, bfloat16 {half.stat().st_size:,}")
    module = Model()
    module.load_state_dict(load_file(masters))  # torch has them back
    assert all(torch.equal(x, state.params[name]) for name, x in module.state_dict().items())
    assert all(torch.equal(x, state.slots["ema"][name]) for name, x in load_file(averages).items())

    # In: a new run with another optimizer and a frozen part.
    tuning = fds.compose(fds.freeze("embed.*"), fds.sgd(lr=0.1, momentum=0.9))(loss_fn)
    begun = tuning.init(params, key=1)
    fresh = tuning.evaluate(begun, batch(1000, rows=500))["loss"]
    for file in (masters, half.parent):  # a file, or a directory as Hugging Face has it; dtypes are cast
        begun = fds.import_weights(file, tuning, params, key=1)
        loss = tuning.evaluate(begun, batch(1000, rows=500))["loss"]
        print(f"loss {fresh:.3f} as it was made, {loss:.3f} with {file.name}, {trained:.3f} in the run they are from")
        assert int(begun.step) == 0 and abs(loss - trained) < 0.02

    # In from torch.save, under other names, by ranks that each read only their slices.
    theirs = {f"model.{name.replace('hidden', 'fc')}": x for name, x in module.state_dict().items()}
    torch.save({"state_dict": theirs}, folder / "theirs.pt")

    def ours(name):
        return name.removeprefix("model.").replace("fc", "hidden")

    def sharded():
        dp = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(dp, stage=3), fds.adamw(lr=3e-3))(loss_fn)
        return step.params(fds.import_weights(folder / "theirs.pt", step, params, rename=ours))

    for found in fds.simulate(sharded, 2):
        assert all(torch.equal(found[name], state.params[name]) for name in params)
    print("two ranks have the weights of theirs.pt, equal bit for bit")

    # A name that does not fit is an error that suggests the closest one.
    try:
        fds.import_weights(folder / "theirs.pt", tuning, params, rename=lambda name: name.removeprefix("model."))
    except fds.FdsError as error:
        print(str(error).replace(str(folder), "."))
    else:
        raise AssertionError
