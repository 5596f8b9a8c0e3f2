"""A job of FSDP2 that goes on in fds, and a run of fds that goes on in FSDP2, by torch.distributed.checkpoint.

`fully_shard` cuts a model's parameters over ranks, and `torch.distributed.checkpoint` saves each rank's part. Such a
folder is a state of fds: parameters, moments and the count of updates. `import_dcp` reads of it what each rank will
hold, here two ranks at stage 3; `export_dcp` writes what `dcp.load` takes. Neither changes a bit.
"""

import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them
LR, DECAY = 3e-3, 0.1


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(8 * 32, 128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        return self.head(F.gelu(self.hidden(self.embed(context).flatten(1))))


def job():
    model = Model()
    for layer in (model.embed, model.hidden, model.head, model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def train(model, optimizer, calls):
    losses = []
    for i in calls:
        context, following = batch(i)
        loss = F.cross_entropy(model(context), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(model, optimizer, folder):
    params, moments = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optim": moments}, checkpoint_id=folder)


def load(model, optimizer, folder):
    params, moments = get_state_dict(model, optimizer)
    dcp.load({"model": params, "optim": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=moments)


apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def go_on():
    """Go on with the job's checkpoint for ten steps, on each of two ranks, and save it as FSDP2 would."""
    dp = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.shard_optimizer(dp, stage=3), fds.adamw(LR, weight_decay=DECAY))(loss_fn)
    state, _ = fds.import_dcp(folder / "step30", step, params)
    losses = []
    for i in range(30, 40):
        state, metrics = step(state, [x.chunk(dp.size)[dp.index] for x in batch(i)])
        losses.append(float(metrics["loss"]))
    fds.export_dcp(state, step, folder / "step40")
    return losses, step.params(state)


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    # one rank; under torchrun init_process_group("gloo") makes as many as there are
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model, optimizer = job()
    train(model, optimizer, range(30))
    save(model, optimizer, folder / "step30")
    theirs = train(model, optimizer, range(30, 40))

    ours, weights = fds.simulate(go_on, 2)[0]
    print(f"after 40 steps: FSDP2 {theirs[-1]:.4f}, fds from its checkpoint on two ranks {ours[-1]:.4f}")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)

    torch.manual_seed(1)  # another model, which loads what fds wrote
    model, optimizer = job()
    load(model, optimizer, folder / "step40")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(whole, weights, rtol=0, atol=0)
    print(f"and FSDP2 goes on from there, at step {int(optimizer.state[model.head.weight]['step'])}:", end=" ")
    print(f"{train(model, optimizer, range(40, 50))[-1]:.4f}")
    dist.destroy_process_group()
