"""A DeepSpeed JSON drives a run: one call for module, loss, configuration and data; a save and a resume in mid-epoch.

`fds.initialize` is for those who come with a `ds_config.json` and a module. What it does can be read: `explain` prints
the composition as Python, and composing that by hand gives the same bits. Keys that ask for what fds does not have,
and keys that do not exist, are refused by name.
"""

import inspect
import json
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import fds

DS_CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10, "total_num_steps": 200, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 2, "contiguous_gradients": True},
    "steps_per_print": 50,
}

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)[:3000]  # eight bytes, and the one that follows them
dataset = TensorDataset(windows[:, :8], windows[:, 8])  # an epoch is 46.875 batches of 64


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


def loss(model, batch):  # the code that was in the loop between `engine(...)` and `engine.backward(loss)`
    context, following = batch
    return F.cross_entropy(model(context), following)


def begin(path):
    torch.manual_seed(0)
    model = Model()
    return model, *fds.initialize(model, loss, config=path, training_data=dataset)


def train(step, state, loader, stop):
    first = int(state.calls)
    batches = fds.data.RepeatingLoader(loader.starting(state.calls))  # at the position of the run, in any epoch
    for _ in range(first, stop):
        state, metrics = step(state, next(batches))
    loss, lr = metrics["loss"], metrics["lr"]
    print(f"calls {first:2} to {stop:2}: loss {loss:.6f}, lr {lr:.6f}, in epoch {batches.loader.epoch}")
    return state


def resume(path, folder):  # as in another process
    model, step, _, loader, _ = begin(path)
    state, _ = fds.load(folder, step, dict(model.named_parameters()))  # only the structure of the model is read
    return step.params(train(step, state, loader, 90))


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


with tempfile.TemporaryDirectory() as temporary:
    folder, path = Path(temporary), Path(temporary) / "ds_config.json"
    path.write_text(json.dumps(DS_CONFIG))

    # What the file means on two ranks.
    config = fds.config.TrainingConfig.of(path)
    print(config.explain({"dp": 2}, num_parameters=sum(p.numel() for p in Model().parameters())))

    # Half a run, a save in the second epoch, the other half; and the other half from the save, on one rank and on two.
    model, step, state, loader, schedule = begin(path)
    half = train(step, state, loader, 60)
    fds.save(folder / "run", half, step)
    straight = step.params(train(step, half, loader, 90))
    assert apart(resume(path, folder / "run"), straight) == 0
    both = fds.simulate(lambda: resume(path, folder / "run"), 2)
    assert apart(*both) == 0 and apart(both[0], straight) < 1e-3  # to rounding: sums are taken in another order
    print(f"equal bit for bit on one rank; two differ by {apart(both[0], straight):.1e} at most")
    assert float(schedule(60)) == 3e-3 * (200 - 59) / (200 - 10)  # DeepSpeed's rate of update 61, one update late

    # The same by hand, with two things that the JSON cannot say: a donated state and an average.
    apply, params, _ = fds.functional(model)
    own = fds.compose(*config.transforms(fds.mesh(dp=-1)), fds.donate(), fds.ema(0.98))(
        lambda params, batch: loss(lambda context: apply(params, context), batch)
    )
    assert apart(train(own, own.init(params, key=0), loader, 60).params, half.params) == 0

    # No key is ignored without an error.
    later = {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [16]}}
    for wrong in ({"graidient_clipping": 0.5}, later):
        try:
            fds.initialize(model, loss, config={**DS_CONFIG, **wrong})
        except fds.FdsError as error:
            print(error)
        else:
            raise AssertionError
