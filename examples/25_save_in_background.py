"""Save in the background: `save_async` returns at once, and the loop continues while another process writes.

Nothing is copied first. That process reads the state where it lies, so a donating step that is given the state
meanwhile writes into other memory. The save is complete when somebody has waited for it: `saving.wait()`, the end of
`with saving:`, or the next save. `keep=2` removes older ones when a newer one is complete, never before.
"""

import inspect
import tempfile
import textwrap
import time
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
        fds.donate(),
    )(loss_fn)


def copied(state):
    return {name: x.clone() for name, x in fds.tree.paths(state).items()}


def equal(state, copy):
    return all(torch.equal(x, copy[name]) for name, x in fds.tree.paths(state).items())


with tempfile.TemporaryDirectory() as folder:
    step = new_step()
    state = step.init(params, key=0)
    saved = {}
    for i in range(60):
        state, metrics = step(state, batch(i))
        if (i + 1) % 15 == 0:
            saved[i + 1], where = copied(state), state.params["head.weight"].data_ptr()
            start = time.perf_counter()
            saving = fds.save_async(folder, state, step, extra={"next_batch": i + 1}, keep=2)
            began = time.perf_counter() - start
            state, metrics = step(state, batch(i + 1000))  # donates the state being saved: its memory is left alone
            spared = state.params["head.weight"].data_ptr() != where
            others = 1
            while not saving.done():
                state, metrics = step(state, batch(i + 1000 + others))
                others += 1
            path = saving.wait()  # complete already; an error of the save would be raised here
            print(
                f"{path.name}: begun in {1000 * began:.1f} ms, complete after {others} further steps; "
                f"the first of them wrote {'into other memory' if spared else 'over it, for it had been read'}"
            )
    print("kept:", *sorted(p.name for p in Path(folder).glob("step*")))

    # The save is bit-equal to the state that was passed, whatever the steps did meanwhile.
    for path in Path(folder).glob("step*"):
        loaded, extra = fds.load(folder, step, params, tag=path.name)
        assert equal(loaded, saved[extra["next_batch"]])

    # `with` waits at its end.
    with fds.save_async(folder, state, step, tag="last"):
        held_out = step.evaluate(state, batch(5000, rows=500))
    assert equal(fds.load(folder, step, params)[0], copied(state))
    print(f"saved {(Path(folder) / 'latest').read_text().strip()!r} while evaluating, loss {held_out['loss']:.3f}")

    # A value that cannot be saved is an error at once, and the last save is not changed.
    try:
        fds.save_async(folder, state, step, extra={"loader": object()})
    except fds.FdsError as error:
        print(error)
    else:
        raise AssertionError
    assert (Path(folder) / "latest").read_text() == "last\n"
