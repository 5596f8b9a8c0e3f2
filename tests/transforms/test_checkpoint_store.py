"""Activations on a medium: how much of them is in memory, what becomes of them after errors, and what is refused."""

import gc
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.errors import ComposeError, DiskError, DiskFullError, LossError
from fds.loss import LayerCall
from fds.media.arena import Arena
from fds.media.mapping import leaves as known
from tests.bits import assert_same_bits
from tests.memory import peak_bytes

LAYERS, ROWS, WIDTH = 12, 2048, 64
ACTIVATION = ROWS * WIDTH * 4
GRADS = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) * 4  # at the end of backward, when activations are gone


class Wide(nn.Module):
    """Keeps nine activations of its own for backward, and draws."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.down(torch.tanh(self.up(x))))


@pytest.fixture
def disk(tmp_path):
    return fds.disk(tmp_path)


def stored(medium) -> int:
    """Return how many tensors are on a medium."""
    return sum(leaf.medium is medium for leaf in list(known.values()))


def assert_nothing_stored(medium) -> None:
    """Wait for writes that are still under way, which hold what they write to."""
    end = time.monotonic() + 20
    while stored(medium) and time.monotonic() < end:
        time.sleep(0.001)
    assert stored(medium) == 0


class Watched:
    """A disk, how many tensors were on it at most, and what it raises at which of its reads and writes."""

    name = "disk"

    def __init__(self, disk):
        self.disk, self.make = disk, disk.make
        self.most, self.begun, self.fails, self.asked = 0, 0, {}, {"read": 0, "write": 0}

    def _ask(self, what):
        self.asked[what] += 1
        if self.fails.get(what) == self.asked[what]:
            raise DiskError("the disk failed", got=what)

    def read(self, old, device):
        wait = self.disk.read(old, device)
        self.begun += 1
        return lambda: (self._ask("read"), wait())[1]

    def write(self, worked, new):
        wait = self.disk.write(worked, new)
        self.most = max(self.most, stored(self.disk))
        return lambda: (self._ask("write"), wait())[1]


def deep(*transforms, layers=LAYERS):
    """Return a step over many layers, its first state and a batch."""
    loss = fds.Layers([fds.LayerSpec(Wide) for _ in range(layers)], nn.MSELoss())
    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    batch = tuple(torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
    return step, step.init(loss.init, key=3), batch


def measure(*transforms) -> int:
    step, state, batch = deep(*transforms, fds.donate())
    state, _ = step(state, batch)
    return peak_bytes(lambda: step(state, batch))


@pytest.mark.parametrize("policy", [None, "matmuls"])
def test_what_two_groups_keep_is_in_memory(disk, policy):
    here = measure(fds.checkpoint_activations(policy=policy))
    there = measure(fds.checkpoint_activations(policy=policy, store=disk))
    kept = 1 if policy is None else 1 + 5  # the input, and the results of two products
    assert there <= here - (LAYERS - 1 - 2) * kept * ACTIVATION + GRADS
    assert_nothing_stored(disk)


def test_a_stage_holds_neither_what_its_microbatches_are_given_nor_what_its_layers_keep(disk):
    alone, piped = (
        measure(cut, fds.checkpoint_activations(store=disk))
        for cut in (fds.accumulate(4), fds.pipeline(plans.gpipe, 6, num_microbatches=4))
    )
    assert piped <= alone + ACTIVATION  # all four microbatches on their way from one stage to the next


@pytest.mark.parametrize("every", [1, 5])
def test_each_input_is_written_once_and_those_but_the_last_are_read(disk, every):
    watched = Watched(disk)
    plain, state, batch = deep()
    step, *_ = deep(fds.checkpoint_activations(store=watched, every=every))
    assert_same_bits(step(state, batch), plain(state, batch))
    groups = -(-LAYERS // every)
    assert watched.most == groups - 1
    assert watched.asked == {"write": groups - 2, "read": groups - 2}  # nobody waits for the last one, or reads it
    step.evaluate(state, batch)
    assert watched.asked == {"write": groups - 2, "read": groups - 2}


def test_while_a_layer_is_computed_again_the_input_of_the_one_before_is_read(disk):
    watched, log = Watched(disk), []

    def logging(i):
        return lambda x: (log.append((i, watched.begun)), x.sin())[1]

    loss = fds.Layers([nn.Linear(3, 3), *map(logging, range(1, 6))], lambda output, targets: output.sum())
    step = fds.compose(fds.checkpoint_activations(store=watched), fds.sgd(0.1))(loss)
    step(step.init(loss.init), (torch.ones(2, 3), torch.ones(2)))
    assert log[:5] == [(i, 0) for i in range(1, 6)]
    assert log[5:] == [(5, 1), (4, 2), (3, 3), (2, 4), (1, 4)]  # the input of 5 is still in memory, and that of 0 stays


@pytest.mark.parametrize("what", ["read", "write"])
def test_an_error_of_the_disk_comes_up_and_leaves_the_state_and_nothing_else(disk, what):
    watched = Watched(disk)
    plain, state, batch = deep()
    step, *_ = deep(fds.checkpoint_activations(store=watched))
    watched.fails[what] = 4
    with pytest.raises(DiskError, match="the disk failed"):
        step(state, batch)
    gc.collect()  # frames of the error
    assert_nothing_stored(disk)
    assert_same_bits(step(state, batch), plain(state, batch))


def test_a_loss_that_fails_or_never_runs_backward_leaves_nothing(disk):
    def criterion(output, targets):
        assert stored(disk) == 2
        raise ZeroDivisionError

    loss = fds.Layers([nn.Linear(3, 3) for _ in range(3)], criterion)
    step = fds.compose(fds.checkpoint_activations(store=disk), fds.sgd(0.1))(loss)
    with pytest.raises(ZeroDivisionError):
        step(step.init(loss.init), (torch.ones(2, 3), None))
    gc.collect()
    assert_nothing_stored(disk)
    calls = step.layer[0]([LayerCall(lambda x: x.sin().sin(), (i,)) for i in range(3)], None)
    out = torch.ones(5, requires_grad=True)
    for call in calls:
        out = call(out)
    assert stored(disk) == 2
    del out
    assert_nothing_stored(disk)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_what_is_written_over_after_it_was_kept_is_refused(disk, store):
    criterion = lambda output, targets: (output[0] + output[1].mul_(2)).sum()  # what the last layer was given
    loss = fds.Layers([nn.Linear(3, 3), nn.Linear(3, 3), lambda x: (x.sin(), x)], criterion)
    elsewhere = fds.checkpoint_activations(store=disk if store == "disk" else store)
    step = fds.compose(elsewhere, fds.sgd(0.1))(loss)
    with pytest.raises(LossError, match="written over before backward"):
        step(step.init(loss.init), (torch.ones(2, 3), torch.ones(2)))


def test_views_come_back_with_their_strides(disk):
    seen = []

    def look(x):
        seen.append((x.stride(), x.clone()))
        return x.sin()

    views = [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(5, -1),
        lambda x: x.sum(),
        lambda x: x.bfloat16().view(4, 3, 2).transpose(0, 2),
        lambda x: x[:0],
        lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
    ]
    recompute = fds.compose(fds.checkpoint_activations(store=disk), fds.sgd(0.1))(lambda params, batch: 0).layer[0]
    for view in views:
        layers = [LayerCall(f, (i,)) for i, f in enumerate([lambda x: x * 1, look, torch.abs])]
        first, second, third = recompute(layers, None)
        x = torch.randn(4, 6, requires_grad=True)
        third(second(view(first(x)))).sum().backward()
        (before, a), (after, b) = seen
        assert before == after and torch.equal(a, b)
        seen.clear()


@pytest.mark.parametrize(
    ("store", "hint"),
    [
        ("hots", "host"),
        ("disk", "known"),
        ("/mnt/nvme", "fds.disk('/mnt/nvme')"),
        (Path("nvme"), "fds.disk('nvme')"),
        (1, "known"),
        (None, "known"),
    ],
)
def test_another_store_is_refused(store, hint):
    with pytest.raises(ComposeError, match="unknown store") as error:
        fds.checkpoint_activations(store=store)
    assert hint in error.value.hint


def test_what_is_kept_on_a_disk_is_described(disk, tmp_path):
    step, state, batch = deep(fds.checkpoint_activations(store=disk))
    told = step.describe(state, batch)
    assert told.num_bytes["stored"] == (LAYERS - 1) * ACTIVATION  # the first layer's input is the caller's
    assert told.lives["stored"] == f"disk {tmp_path}" and f"in disk {tmp_path}" in str(told)
    assert "stored" not in step.describe(state).num_bytes
    halves, state, batch = deep(fds.accumulate(2), fds.checkpoint_activations(store=disk, every=2))
    assert halves.describe(state, batch).num_bytes["stored"] == (LAYERS // 2 - 1) * ACTIVATION // 2
    plain, state, batch = deep(fds.checkpoint_activations(store="host"))
    assert "stored" not in plain.describe(state, batch).num_bytes


def test_a_full_disk_is_said_to_need_what_is_described(disk, tmp_path, monkeypatch):
    step, state, batch = deep(fds.checkpoint_activations(store=disk), layers=3)

    def refuse(arena, nbytes):
        raise DiskFullError("the disk is full")

    monkeypatch.setattr(Arena, "take", refuse)
    with pytest.raises(DiskFullError) as caught:
        step(state, batch)
    want = f"in all a run needs in disk {tmp_path} what layers keep, as describe(state, batch) says"
    assert caught.value.__notes__ == [want]


def test_stages_of_a_pipeline_describe_what_each_keeps(disk, tmp_path):
    def body():
        loss = fds.Layers([fds.LayerSpec(Wide) for _ in range(4)], nn.MSELoss())
        pipeline = fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=2)
        step = fds.compose(fds.checkpoint_activations(store=disk), pipeline, fds.sgd(0.1))(loss)
        batch = tuple(torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
        return step.describe(step.init(loss.init, key=3), batch).num_bytes["stored"]

    assert fds.simulate(body, 2) == [ACTIVATION, 2 * ACTIVATION]  # of both microbatches; the first layer's is the batch
