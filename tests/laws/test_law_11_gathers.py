"""Law 11, of masters that live elsewhere: the loss gets them bucket by bucket, ahead, without a changed bit."""

import contextlib
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fds
from fds import tree
from fds.errors import DiskError, RankError
from fds.step import fill, transform
from fds.step.residency import lives
from fds.step.sharding.gather import Coming, Departures
from tests import devices
from tests.bits import assert_same_bits, snapshot
from tests.laws.mapped import Mapped, mapped
from tests.sharding.models import data_axis, mine

LAYERS, WIDTH = 6, 32
BUCKET = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer
PARAMS = {
    f"{i}": {"w": torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) / 6, "b": torch.zeros(WIDTH)}
    for i in range(LAYERS)
}
BATCH = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Watched(Mapped):
    """Masters in files; notes which slice is read, and the most bytes of what was read that anybody holds at once."""

    fails_at = -1  # which read fails

    def __init__(self, folder, kinds=("params", "opt"), **options):
        super().__init__(folder, kinds, **options)
        self.names, self.sizes, self.most = {}, {}, 0

    def make(self, x, leaf):
        made = super().make(x, leaf)
        self.names[made.data_ptr()] = leaf.names[0]
        return made

    def read(self, old, device):
        number, names = next(self.count), [self.names[x.data_ptr()] for x in old]
        self.log += [f"read {name}" for name in names]
        out = [self.noted(x.to(device, copy=True)) for x in old]

        def wait():
            if number == self.fails_at:
                raise OSError("the disk fails")
            self.log += [f"has read {name}" for name in names]
            return out

        return wait

    def write(self, worked, new):
        for x, y in zip(new, worked, strict=True):  # no thread holds these any longer
            x.copy_(y)
        return lambda: None

    def noted(self, x):
        """Count the bytes of a copy for as long as its memory is held."""
        storage = x.untyped_storage()
        self.sizes[id(storage)] = storage.nbytes()
        self.most = max(self.most, sum(self.sizes.values()))
        weakref.finalize(storage, self.sizes.pop, id(storage))
        return x


def chain(order=(0, 1, 2, 3, 0, 4, 5), log=None, again=2):
    """Return a loss of layers in this order, one of them used twice, one computed again in backward, with dropout."""

    def loss(params, batch):
        x = batch
        for n, i in enumerate(order):
            if log is not None:
                log.append(f"use {i}")
            p = params[f"{i}"]
            layer = lambda x, p=p: torch.tanh(torch.nn.functional.linear(x, p["w"], p["b"].to(x.dtype)))
            x = checkpoint(layer, x, use_reentrant=False) if n == again else layer(x)
            x = torch.nn.functional.dropout(x, 0.2)
        return x.float().square().mean()

    return loss


@transform
def shrinking():
    """Show the loss smaller matrices."""
    return lambda step: fill(step, view=lambda x, leaf, call: x * 0.5 if len(leaf.shape) == 2 else x)


def trained(loss, residency, sharding, *parts, calls=3):
    """Return the step, its last state, and all that a run shows."""
    axis = data_axis()
    sharding = {"bucket_bytes": BUCKET, **sharding}
    placing = [] if residency is None else [mapped(residency)]
    step = fds.compose(*placing, fds.shard_optimizer(axis, **sharding), *parts, fds.adamw(1e-2))(loss)
    state, shown = step.init(PARAMS, key=3), []
    for i in range(calls):
        state, metrics = step(state, mine(BATCH * (i + 1), axis))
        shown.append(metrics)
    shown += [step.evaluate(state, mine(BATCH, axis)), step.params(state)]
    return step, state, shown


LIVE = 3 * (BUCKET + 4 * WIDTH)  # with what pads them on two ranks
SHARDINGS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "max_live_bytes": LIVE},
    "nothing ahead": {"stage": 3, "max_live_bytes": LIVE, "prefetch": 0},
    "two ahead, some stay": {"stage": 3, "max_live_bytes": LIVE, "prefetch": 2, "persist_below": WIDTH + 1},
    "all fit": {"stage": 3, "max_live_bytes": LAYERS * LIVE},
}
PARTS = {
    "float32": (),
    "16 bit": (fds.precision(torch.bfloat16, keep_float32="*1.b"), fds.accumulate(2), fds.donate()),
    "views, frozen": (shrinking(), fds.freeze("2.*")),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_loss_sees_the_same_bits_and_no_more_is_read_at_once_than_is_told(tmp_path, sharding, parts, ranks):
    sharding, parts = SHARDINGS[sharding], PARTS[parts]
    want = fds.simulate(lambda: trained(chain(), None, sharding, *parts)[2], ranks)

    def body():
        residency = Watched(tmp_path, ("params",), some=lambda leaf: leaf.index != 1)
        step, state, shown = trained(chain(), residency, sharding, *parts)
        return shown, residency.most, step.describe(state).num_bytes

    for (shown, most, told), plain in zip(fds.simulate(body, ranks), want, strict=True):
        assert_same_bits(shown, plain)
        assert most <= max(told["chunks"], told.get("read", 0) + told.get("whole", 0))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_buckets_are_read_before_they_are_used(tmp_path, prefetch, ranks):
    order = (0, 1, 2, 3, 4, 5)

    def body():
        residency = Watched(tmp_path, ("params",))
        loss = chain(order, residency.log)
        sharding = {"stage": 3, "max_live_bytes": LIVE, "prefetch": prefetch}
        step, state, _ = trained(loss, residency, sharding)  # learns the order
        del residency.log[:]
        step(state, mine(BATCH, data_axis()))
        return residency.log

    for log in fds.simulate(body, ranks):
        forward = log[: log.index("use 5")]
        for i in order[1:]:
            begun = f"read {i}.w" in forward[: log.index(f"use {i}")]
            assert begun is (prefetch > 0)
            assert prefetch != 1 or f"has read {i}.w" not in forward[: log.index(f"use {i}")]  # nobody waited
        if prefetch == 2:
            assert "read 2.w" in log[: log.index("use 1")]
        backward = [line for line in log[log.index("use 5") :] if line.startswith("read")]
        assert backward.count("read 1.w") == 2  # in backward, and in the update


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_whose_masters_live_in_different_places_send_in_one_order(tmp_path, stage):
    sharding = {"stage": stage, **({"max_live_bytes": LIVE, "prefetch": 2} if stage == 3 else {})}
    want = fds.simulate(lambda: trained(chain(), None, sharding)[2], 2)

    def body():
        here = data_axis().index
        residency = Watched(tmp_path, ("params",), some=lambda leaf: here == 0 and leaf.index % 2 == 0)
        return trained(chain(), residency, sharding)[2]

    assert_same_bits(fds.simulate(body, 2), want)


@pytest.mark.parametrize("bits", [32, 16])
def test_on_one_rank_what_was_read_is_the_bucket(tmp_path, bits):
    residency = Watched(tmp_path, ("params",))
    parts, live = [fds.precision(torch.bfloat16)] * (bits == 16), LIVE * bits // 32
    step, state, _ = trained(chain(), residency, {"stage": 3, "max_live_bytes": live}, *parts)
    told = step.describe(state).num_bytes
    residency.most = 0
    step.evaluate(state, BATCH)
    pooled = {dtype for n, dtype in step.runtime.pool.scratch if n == BUCKET // 4 and dtype is torch.bfloat16}
    if bits == 32:
        assert "read" not in told and residency.most == 3 * BUCKET and not pooled
        return
    assert residency.most == told["read"] == BUCKET and pooled == {torch.bfloat16}


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("sharding", "at"),
    [("stage 0", 0), ("stage 1", 0), ("stage 1", 5), ("stage 3", 0), ("stage 3", 2), ("stage 3", 8), ("two ahead", 4)],
)
def test_an_error_of_the_disk_reaches_all_ranks_which_may_try_again(tmp_path, sharding, at, ranks):
    sharding = SHARDINGS.get(sharding, SHARDINGS["two ahead, some stay"])

    def body():
        axis, residency = data_axis(), Watched(tmp_path, ("params",))
        step, state, _ = trained(chain(), residency, sharding, calls=2)
        before, batch = snapshot(state), mine(BATCH, axis)
        if axis.index == 0:
            residency.fails_at = next(residency.count) + 1 + at
        with pytest.raises((OSError, DiskError), match="the disk fails") as caught:
            step(state, batch)
        assert_same_bits(state, before)
        residency.fails_at = -1
        _, metrics = step(state, batch)
        return caught.type, metrics

    found = fds.simulate(body, ranks)
    assert [kind for kind, _ in found] == [OSError, DiskError][:ranks]
    assert_same_bits(found[0][1], found[-1][1])


class Held(nn.Module):
    """Layers of their own names."""

    def __init__(self):
        super().__init__()
        for name, layer in PARAMS.items():
            held = nn.Module()
            held.w, held.b = (nn.Parameter(torch.zeros_like(layer[part])) for part in "wb")
            self.add_module(name, held)


@pytest.mark.parametrize("sharding", ["stage 0", "stage 1", "stage 3"])
def test_a_module_gets_what_lives_elsewhere_a_bucket_at_a_time(tmp_path, monkeypatch, sharding):
    monkeypatch.setattr(lives, "MOST_BYTES", BUCKET)

    def body():
        residency = Watched(tmp_path, ("params",))
        step, state, _ = trained(chain(), residency, SHARDINGS[sharding], calls=1)
        residency.most = 0
        found = step.into(Held(), state)
        most = residency.most
        want = tree.paths(step.params(state))
        assert {name: x.detach() for name, x in found.named_parameters()}.keys() == want.keys()
        assert_same_bits([found.get_parameter(name).detach() for name in want], list(want.values()))
        assert 0 < most <= 2 * BUCKET

    fds.simulate(body, 1)


def test_all_is_waited_for_though_some_of_it_fails():
    waited = []

    class Lost:
        def wait(self):
            waited.append("sent")
            raise RankError("rank 1 was lost")

    def fails():
        waited.append("read")
        raise OSError("the disk fails")

    coming = [Coming(None, None, None, (torch.ones(1), Lost())), Coming(None, fails, None)]
    departures = Departures(deque([*coming, *coming]))
    departures.give_up()
    assert waited == ["sent", "read"] * 2 and not departures.waiting


ON_A_GPU = {
    "stage 0": (),
    "16 bit": (fds.precision(torch.bfloat16), fds.clip_by_global_norm(0.1)),
    "stage 3": (fds.donate(),),
}


@contextlib.contextmanager
def on_a_gpu():
    """Run inside on a GPU: the one of the tests, or one that is pretended."""
    if devices.NAME != "cpu":
        yield
        return
    from tests import pretending

    with pretending.pretended(), devices.DefaultDevice(pretending.DEVICE):
        yield


@pytest.mark.sweep
@pytest.mark.parametrize("moments", ["device", "host"])
@pytest.mark.parametrize("parts", ON_A_GPU)
def test_masters_on_the_host_of_a_gpu(parts, moments):
    def run(*placing):
        sharding = {"stage": 3, "max_live_bytes": LIVE, "bucket_bytes": BUCKET}
        shard = [fds.shard_optimizer(data_axis(), **sharding)] * (parts == "stage 3")
        step = fds.compose(*placing, *shard, *ON_A_GPU[parts], fds.adamw(1e-2))(chain(again=None))
        state, shown = (
            step.init({name: {k: x.clone().to(home) for k, x in p.items()} for name, p in PARAMS.items()}),
            [],
        )
        for _ in range(3):
            state, metrics = step(state, BATCH.to(home))
            shown.append(metrics)
        shown += [step.evaluate(state, BATCH.to(home)), step.params(state)]
        assert state.step.device.type == "cuda"
        masters = {x.device.type for x in [*tree.leaves(state.params), *tree.leaves(shown[-1])]}
        return tree.map(lambda x: x.cpu(), shown), masters

    with on_a_gpu():
        home = torch.device("cuda", 0)
        (want, there), (got, here) = run(fds.offload("host")), run(fds.offload(masters="host", moments=moments))
        assert (there, here) == ({"cuda"}, {"cpu"})
        assert_same_bits(got, want)


def test_a_module_is_written_from_masters_elsewhere(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    apply, params, _ = fds.functional(module)
    loss = lambda p, batch: apply(p, batch).square().mean()
    step = fds.compose(mapped(Watched(tmp_path)), fds.sgd(0.1))(loss)
    state = step.init(params)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    step.into(module, state)
    assert_same_bits(dict(module.named_parameters()), tree.paths(step.params(state)))
