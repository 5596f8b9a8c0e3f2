"""Kept inputs in slices over the ranks of an axis, and in blocks: the same bits, how much is held, what is refused."""

import gc
import math

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.errors import ComposeError, LossError, MeshError, RankError
from fds.media import Blocks, KeptGroups
from tests import ranks
from tests.bits import assert_same_bits
from tests.memory import peak_bytes
from tests.tensor_axis import splitting
from tests.tensor_axis.splitting import Place

ROWS, WIDTH = 512, 96
ACTIVATION = ROWS * WIDTH * 4
SMALL = 8192  # bytes of parameters, metrics, and of what they are sent in


def trained(place, **kept):
    """Return parameters and metrics of two calls of a step over split pairs, whose layers are recomputed."""
    mesh = fds.mesh(copies=place.replicas, pp=place.stages, dp=place.data, tp=place.tensor)
    axis = mesh["tp"] if kept.pop("cut", True) else None
    step = place.step(fds.checkpoint_activations(partition=axis, **kept), optimizer=fds.adamw(1e-2))
    state, found = step.init(splitting.model(None).init, key=3), []
    for call in range(2):
        state, metrics = step(state, splitting.share(step, call))
        found.append(metrics)
    return step.params(state), found


PLACES = [
    (Place(4), {}),
    (Place(2, stages=2), {"contiguous": True, "number": 2}),
    (Place(2, data=2, zero=3), {"policy": "matmuls", "store": "disk"}),
    (Place(2, data=2, stages=2, zero=3), {"store": "disk", "every": 2}),
]


@pytest.mark.parametrize(("place", "kept"), PLACES, ids=str)
def test_slices_change_no_bit_of_split_layers(place, kept, tmp_path):
    kept = {name: fds.disk(tmp_path) if value == "disk" else value for name, value in kept.items()}
    want = fds.simulate(lambda: trained(place, cut=False), place.ranks)
    assert_same_bits(fds.simulate(lambda: trained(place, **kept), place.ranks), want)


def test_slices_change_no_bit_on_real_ranks():
    assert_same_bits(ranks.run(real, True), ranks.run(real, False))


def real(cut):
    return trained(Place(2), cut=cut)


def encoders(number):
    layers = [nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True) for _ in range(number)]
    return fds.Layers([nn.Linear(16, 16), *layers], lambda out, y: (out - y).square().mean())


ENCODED = tuple(torch.randn(2, 8, 6, 16, generator=torch.Generator().manual_seed(1)))


def test_slices_change_no_bit_under_tensor_parallel_and_dropout():
    loss = encoders(2)

    def body(cut):
        mesh = fds.mesh(dp=2, tp=2)
        step = fds.compose(
            fds.accumulate(2),
            fds.shard_optimizer(mesh["dp"], stage=3),
            fds.tensor_parallel(mesh["tp"]),
            fds.checkpoint_activations(partition=mesh["tp"] if cut else None),
            fds.adamw(1e-2),
        )(loss)
        mine = tuple(x.chunk(2)[mesh["dp"].index] for x in ENCODED)
        state, metrics = step(step.init(loss.init, key=3), mine)
        return step.params(state), metrics

    assert_same_bits(fds.simulate(lambda: body(True), 4), fds.simulate(lambda: body(False), 4))


def test_nothing_of_tensor_parallel_layers_holds_the_whole_beside_a_slice():
    batch = torch.ones(16, 64, 16), torch.zeros(16, 64, 16)

    def body(number):
        axis, loss = fds.mesh(tp=-1)["tp"], encoders(number)
        recompute = fds.checkpoint_activations(partition=axis)
        step = fds.compose(fds.tensor_parallel(axis), recompute, fds.sgd(0.1))(loss)
        return fds.profile_memory(step, step.init(loss.init, key=3), batch).measured["forward"]

    few, many = (fds.simulate(lambda number=number: body(number), 2)[0] for number in (2, 4))
    assert many - few == 2 * batch[0].nbytes // 2


class Noisy(nn.Module):
    """Shapes that no number of ranks divides, views, a mask that is no floating tensor, dropout."""

    def __init__(self, i):
        super().__init__()
        self.linear, self.drop, self.i = nn.Linear(5, 5), nn.Dropout(0.3), i

    def forward(self, given):
        x, mask, one = given if isinstance(given, tuple) else (given, given > 0, given.sum())
        x = self.drop(self.linear(x.reshape(-1, 5))) * mask.reshape(-1, 5) + one
        x = x.view(7, 5) if self.i % 2 else x.t().contiguous().t()
        return x, mask, one * 0.5


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_sizes_that_do_not_divide_come_back_with_their_strides(size, store, tmp_path):
    loss = fds.Layers([Noisy(i) for i in range(4)], lambda out, y: (out[0] - y).square().mean() + out[2])
    batch = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(7, 5)

    def body(*transforms):
        step = fds.compose(*transforms, fds.adamw(0.1))(loss)
        state = step.init(loss.init, key=1)
        return step(step(state, batch)[0], batch)

    def cut():
        medium = fds.disk(tmp_path) if store == "disk" else store
        return body(fds.checkpoint_activations(partition=fds.mesh(tp=-1)["tp"], store=medium))

    want = body()
    for found in fds.simulate(cut, size):
        assert_same_bits(found, want)


def deep(layers, *transforms):
    """Return a step over many layers that hold nothing, its first state and a batch."""
    loss = fds.Layers([nn.LayerNorm(WIDTH), *[_wave] * (layers - 1)], lambda out, y: (out - y).square().mean())
    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    batch = tuple(torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
    return step, step.init(loss.init, key=0), batch


def _wave(x):
    return x.sin().cos().sin()


def peaks(**kept):
    """Return the peaks of calls with 8 and 20 layers, and the bytes that the second one is described to keep."""
    axis, found, stored = fds.mesh(tp=-1)["tp"], [], 0
    for layers in (8, 20):
        step, state, batch = deep(layers, fds.checkpoint_activations(partition=axis, **kept), fds.donate())
        stored = step.describe(state, batch).num_bytes["stored"]
        state, _ = step(state, batch)
        found.append(peak_bytes(lambda step=step, state=state, batch=batch: step(state, batch)))
    return *found, stored


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_holds_its_share_of_each_input(size):
    share = math.ceil(ROWS * WIDTH / size) * 4
    for few, many, stored in ranks.run(peaks_alone, world_size=size):
        assert abs(many - few - 12 * share) <= SMALL
        assert stored == 19 * share
        assert many <= 19 * share + 7 * ACTIVATION + SMALL  # two whole ones, and one layer's own


@pytest.mark.parametrize("blocks", [False, True])
def test_a_profile_finds_slices_in_forward_as_its_dry_run_does(blocks):
    def body():
        recompute = fds.checkpoint_activations(partition=fds.mesh(tp=-1)["tp"], contiguous=blocks)
        return fds.profile_memory(*deep(8, recompute))

    for found in fds.simulate(body, 2):
        assert found.peak == found.predicted.dry_run
        assert found.measured["forward"] == 7 * ACTIVATION // 2 + 4  # and the loss


def peaks_alone():
    return peaks()


def test_of_slices_on_a_disk_no_more_is_in_memory_however_many_layers_there_are(tmp_path):
    for few, many, stored in ranks.run(peaks_on_disk, tmp_path):
        assert abs(many - few) <= SMALL and stored == 19 * ACTIVATION // 2


def peaks_on_disk(directory):
    return peaks(store=fds.disk(directory))


def test_messages_are_one_gather_a_layer_and_begin_one_layer_ahead():
    def body():
        log = []

        class Watched(nn.Module):
            def forward(self, x):
                log.append(channel._link.count)
                return x.sin()

        axis = fds.mesh(tp=-1)["tp"]
        loss = fds.Layers([nn.Linear(3, 3), *[Watched() for _ in range(4)]], lambda out, y: out.sum())
        step = fds.compose(fds.checkpoint_activations(partition=axis), fds.sgd(0.1))(loss)
        channel = step.layer[0].axis
        state, batch = step.init(loss.init, key=0), (torch.ones(2, 3), torch.ones(2))
        state, _ = step(state, batch)
        log.clear()
        before = channel._link.count
        log_messages = fds.messages(every=1)
        with log_messages(state):
            step(state, batch)
        return [n - before for n in log], str(log_messages.last)

    for seen, text in fds.simulate(body, 2):
        assert seen == [0] * 4 + [2, 3, 4, 4], "a layer is run again while the input of the one before it is gathered"
        assert "activations" in text


def test_a_layer_of_several_inputs_has_each_gathered_once():
    def body():
        pair = lambda given: (given[0].sin(), given[0] * given[1])
        layers = [nn.Linear(3, 3), lambda x: (x.sin(), x.cos()), pair, pair, pair]
        loss = fds.Layers(layers, lambda out, y: (out[0] + out[1]).sum())
        step = fds.compose(fds.checkpoint_activations(partition=fds.mesh(tp=-1)["tp"]), fds.sgd(0.1))(loss)
        state, batch = step.init(loss.init, key=0), (torch.ones(2, 3), torch.ones(2))
        state, _ = step(state, batch)  # in which ranks compare
        before = step.layer[0].axis._link.count
        step(state, batch)
        return step.layer[0].axis._link.count - before

    assert fds.simulate(body, 2) == [1 + 3 * 2] * 2


def test_ranks_that_pass_other_batches_are_told_so():
    def body(rows=ROWS):
        axis = fds.mesh(tp=-1)["tp"]
        step, state, (x, y) = deep(3, fds.checkpoint_activations(partition=axis))
        if axis.index == 1:
            x, y = x[:rows].flip(0), y[:rows]
        step(state, (x, y))

    with pytest.raises(LossError, match="differ between the ranks") as caught:
        fds.simulate(body, 3)
    assert "layers[1]" in caught.value.where and caught.value.got == "other values"
    with pytest.raises(LossError, match="differ between the ranks") as caught:
        fds.simulate(lambda: body(rows=8), 2)
    assert "bytes" in caught.value.got


def test_every_rank_is_told_of_what_one_of_them_sees():
    def body():
        axis = fds.mesh(tp=-1)["tp"]
        step, state, (x, y) = deep(3, fds.checkpoint_activations(partition=axis))
        if axis.index == 1:
            x[-1] += 1  # of which the last rank has the slice
        with pytest.raises(LossError, match="differ between the ranks"):
            step(state, (x, y))

    fds.simulate(body, 3)


def test_an_error_in_backward_leaves_the_state_and_nothing_in_the_blocks():
    def body():
        fails = [True]

        class Breaking(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                if fails.pop() if fails else False:
                    raise ZeroDivisionError
                return grad

        recompute = fds.checkpoint_activations(partition=fds.mesh(tp=-1)["tp"], contiguous=True)
        loss = fds.Layers([nn.Linear(3, 3), torch.sin, Breaking.apply, torch.cos], lambda out, y: out.sum())
        step = fds.compose(recompute, fds.sgd(0.1))(loss)
        state, batch = step.init(loss.init, key=0), (torch.ones(2, 3), None)
        with pytest.raises(ZeroDivisionError):
            step(state, batch)
        gc.collect()
        blocks = step.layer[0].blocks
        assert sorted(map(len, blocks.free.values())) == [1, 1, 1]
        plain = fds.compose(fds.sgd(0.1))(loss)
        assert_same_bits(step(state, batch), plain(state, batch))

    fds.simulate(body, 2)


def blocks_of(step):
    return [block for free in step.layer[0].blocks.free.values() for block in free]


@pytest.mark.parametrize("number", [None, 3, 100])
def test_blocks_are_made_once_and_grow_to_the_largest_input(number):
    plain, state, (x, y) = deep(8)
    step, *_ = deep(8, fds.checkpoint_activations(contiguous=True, number=number))
    seen = []
    for rows in (16, 8, 32, 16, 32):
        batch = x[:rows].clone(), y[:rows].clone()
        assert_same_bits(step(state, batch), plain(state, batch))
        seen.append({block.data_ptr(): len(block) for block in blocks_of(step)})
    count = 7 if number in (None, 100) else number - 1  # what the first layer is given stays where it is
    assert [set(one.values()) for one in seen] == [{16 * WIDTH * 4}] * 2 + [{32 * WIDTH * 4}] * 3
    assert [len(one) for one in seen] == [count] * 5
    assert seen[0] == seen[1] and seen[2] == seen[3] == seen[4]


def test_microbatches_in_flight_have_blocks_of_their_own():
    loss = fds.Layers([nn.Linear(6, 6), torch.tanh, torch.sin, nn.Linear(6, 6)], nn.functional.mse_loss)
    batch = torch.ones(8, 6), torch.zeros(8, 6)
    piped = fds.pipeline(plans.gpipe, 2, num_microbatches=4)
    step = fds.compose(fds.checkpoint_activations(contiguous=True), piped, fds.sgd(0.1))(loss)
    plain = fds.compose(fds.accumulate(4), fds.sgd(0.1))(loss)
    state = plain.init(loss.init, key=0)
    assert_same_bits(step(state, batch), plain(state, batch))
    addresses = sorted(block.data_ptr() for block in blocks_of(step))
    assert_same_bits(step(state, batch), plain(state, batch))
    assert sorted(block.data_ptr() for block in blocks_of(step)) == addresses
    assert {len(free) for free in step.layer[0].blocks.free.values()} == {4}


def test_what_a_layer_does_to_its_input_when_it_runs_again_does_not_reach_a_block():
    """Who gets a block's values gets a copy, since the block is taken by another microbatch while he may hold it."""
    groups, x = KeptGroups(blocks=Blocks()), torch.arange(6.0).view(2, 3).t()
    groups.open()
    kept = groups.keep(x)
    got = kept.get()
    assert got.stride() == x.stride() and torch.equal(got, x)
    assert torch.equal(got.zero_() + kept.get(), x)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"partition": "tp"}, ComposeError, "not an axis"),
        ({"partition": 2}, ComposeError, "not an axis"),
        ({"contiguous": 1}, ComposeError, "not a bool"),
        ({"contiguous": None}, ComposeError, "not a bool"),
        ({"number": 4}, ComposeError, "number counts groups"),
        ({"contiguous": True, "number": 0}, ComposeError, "number counts groups"),
        ({"contiguous": True, "number": True}, ComposeError, "number counts groups"),
        ({"contiguous": True, "number": 2.0}, ComposeError, "number counts groups"),
    ],
)
def test_other_arguments_are_refused(wrong, error, match):
    with pytest.raises(error, match=match):
        fds.checkpoint_activations(**wrong)


def test_an_axis_of_other_ranks_is_refused():
    (axis, _) = fds.simulate(lambda: fds.mesh(tp=-1)["tp"], 2)
    with pytest.raises(MeshError, match="other ranks"):
        fds.checkpoint_activations(partition=axis)


def test_an_axis_of_one_rank_is_the_identity():
    step = fds.compose(fds.checkpoint_activations(partition=fds.mesh(tp=1)["tp"]), fds.sgd(0.1))(lambda p, b: p["w"])
    assert step.layer[0].keeps == ""


def test_one_rank_that_does_not_partition_is_told_of():
    def body():
        axis = fds.mesh(tp=-1)["tp"]
        step, state, batch = deep(3, fds.checkpoint_activations(partition=None if axis.index else axis))
        step(state, batch)

    with pytest.raises(RankError):
        fds.simulate(body, 2)
