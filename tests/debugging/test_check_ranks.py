"""Ranks hold the same bits of what several of them hold, or all of them say which leaf is another one where."""

import pytest
import torch
from torch import nn

import fds
from fds.debugging import RankDifference, rank_differences
from fds.errors import FdsError, StateError
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import parts_of
from tests.tensor_axis import splitting

LARGE = (3, 70_001)


def loss(params, batch):
    return sum(x.square().mean() for x in params.values()) * batch.mean()


def params():
    return {"large": torch.ones(LARGE), "small": torch.ones(5), "none": torch.zeros(0)}


def stepped(step, init=params, given=None):
    state = step.init(init() if init is params else init, key=3)
    return step(state, torch.ones(4, 1) if given is None else given)[0]


def raised(state, step):
    try:
        fds.check_ranks(state, step)
    except StateError as error:
        return error
    return None


def on_ranks(transforms, change, ranks=4):
    """Return the differences that every rank finds after one has changed its state."""

    def rank():
        dp = fds.mesh(dp=-1)["dp"]
        step = fds.compose(*transforms(dp), fds.adamw(0.01))(loss)
        state = stepped(step)
        assert raised(state, step) is None
        change(dp.index, state)
        return rank_differences(state, step)

    every = fds.simulate(rank, ranks)
    assert all(one == every[0] for one in every)
    return every[0]


def test_the_element_is_found_with_its_values_on_either_side():
    def change(rank, state):
        if rank == 2:
            state.params["large"][1, 69_999] = 0.25
            state.params["large"][2, 5] = 7.0
            state.opt["exp_avg"]["small"][4] = -0.0

    expected = stepped(fds.compose(fds.adamw(0.01))(loss))
    found = on_ranks(lambda dp: [fds.shard_optimizer(dp, stage=0)], change)
    assert [one.name for one in found] == ["params.large", "opt.exp_avg.small"]
    one = found[0]
    assert (one.ranks, one.others, one.index, one.value) == ((2,), (0, 1, 3), (1, 69_999), "0.25")
    assert float(one.expected) == expected.params["large"][1, 69_999]
    assert str(one).startswith("params.large: rank 2 not as ranks 0, 1, 3; first at [1, 69999]: 0.25 on rank 2")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_a_sharded_state_what_all_ranks_hold_must_be_equal(stage):
    def change(rank, state):
        state.params.buckets[next(iter(state.params.buckets))].add_(rank)  # a slice is each rank's own
        if rank == 0:
            state.step.add_(1)
        state.key[1] += rank // 2

    found = on_ranks(lambda dp: [fds.shard_optimizer(dp, stage=stage)], change)
    assert [(one.name, one.ranks, one.others) for one in found] == [("step", (0,), (1, 2, 3)), ("key", (2, 3), (0, 1))]
    assert (found[0].index, found[0].value, found[0].expected) == ((), "2", "1")


def test_replicas_hold_equal_slices_and_averages():
    def rank():
        mesh = fds.mesh(node=2, dp=2)
        sharded = fds.shard_optimizer(mesh["dp"], stage=2, replicate=mesh["node"])
        step = fds.compose(sharded, fds.ema(0.9), fds.adamw(0.01))(loss)
        state = stepped(step)
        assert raised(state, step) is None
        if (mesh["node"].index, mesh["dp"].index) == (1, 1):
            for slice_ in state.slots["ema"].buckets.values():
                slice_[0] += 1
        return [(one.name, one.ranks, one.others, one.index) for one in rank_differences(state, step)]

    every = fds.simulate(rank, 4)
    assert every[0] == every[1] == every[2] == every[3]
    ((name, ranks, others, index),) = every[0]
    assert name.startswith("slots.ema.") and (ranks, others) == ((3,), (1,))
    assert name.endswith("large") and index[0] > 0  # in the whole leaf, of which rank 3 has the second half


def test_along_a_pipeline_stages_hold_their_own_and_tied_parameters_alike():
    def layers():
        tied = fds.TiedLayerSpec("tied", nn.Linear, 4, 4, bias=False)
        return fds.Layers([tied, fds.LayerSpec(nn.Linear, 4, 4), tied], lambda out, y: (out - y).square().mean())

    def rank():
        mesh = fds.mesh(pp=2, dp=2)
        whole = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2, partition=[0, 1, 3])
        step = fds.compose(whole, fds.shard_optimizer(mesh["dp"], stage=0), fds.adamw(0.01))(layers())
        state = stepped(step, layers().init, (torch.ones(4, 4), torch.ones(4, 4)))
        assert raised(state, step) is None
        if (mesh["pp"].index, mesh["dp"].index) == (1, 0):
            for x in state.params.values():
                x.view(-1)[3] += 1
        return [(one.name, one.ranks, one.others, one.index) for one in rank_differences(state, step)]

    every = fds.simulate(rank, 4)
    assert every[0] == every[1] == every[2] == every[3]
    names = {name: (ranks, others, index) for name, ranks, others, index in every[0]}
    tied = next(name for name in names if "tied" in name)
    assert names.pop(tied) == ((2,), (0, 1, 3), (0, 3))
    assert {name: one[:2] for name, one in names.items()} == dict.fromkeys(
        ["params.1.weight", "params.1.bias"], ((3,), (2,))
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_an_element_of_a_piece_of_several_parts_is_named_in_the_whole(zero):
    """Of 11 columns, (4, 2, 5), the second of two ranks holds 2, 3, 5, 9 and 10: of row 4 elements 20 to 25."""

    def rank():
        place = splitting.Place(tensor=2, data=2, zero=zero, replicas=2)
        step = place.step(optimizer=fds.adamw(0.01))
        state = step.init(splitting.model(None).init)
        if step.everyone.index in (5, 7):  # of the second replica
            narrow = parts_of(state, Ranks.of(step, "test"))["params.1.narrow"]
            if narrow.start <= 23 < narrow.end:
                narrow.tensor.view(-1)[23 - narrow.start] += 1
        return [(one.name, one.index) for one in rank_differences(state, step)]

    assert fds.simulate(rank, 8)[0] == [("params.1.narrow", (4, 9))]


def test_leaves_on_a_disk_and_in_memory_are_compared(tmp_path):
    def change(rank, state):
        if rank == 1:
            state.opt["exp_avg"]["large"][2, 70_000] += 1

    placed = fds.offload(moments=fds.disk(tmp_path), masters="host")
    (one,) = on_ranks(lambda dp: [fds.shard_optimizer(dp, stage=0), placed], change, ranks=2)
    assert (one.name, one.ranks, one.others, one.index) == ("opt.exp_avg.large", (1,), (0,), (2, 70_000))


def test_values_that_print_alike_differ_in_bits():
    def change(rank, state):
        state.params["small"][0] = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)[rank].view(torch.float32)

    (one,) = on_ranks(lambda dp: [fds.shard_optimizer(dp, stage=0)], change, ranks=2)
    assert (one.value, one.expected) == ("nan (bits 0x7fc00001)", "nan (bits 0x7fc00000)")


@pytest.mark.parametrize("fault", ["no state", "other leaves", "donated"])
def test_a_rank_that_has_nothing_to_compare_leaves_none_waiting(fault):
    def rank():
        dp = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(dp, stage=0), fds.adamw(0.01))(loss)
        state, other = stepped(step), step.init({"large": torch.ones(2), "small": torch.ones(5)})
        if dp.index == 1:
            state = {"no state": None, "other leaves": other}.get(fault, state)
            if fault == "donated":
                state.token.spent_at = 3
        return str(raised(state, step))

    first, second = fds.simulate(rank, 2)
    assert first == second
    assert "rank 1" in first and ("ranks hold other leaves" in first) == (fault == "other leaves")
    if fault == "other leaves":
        assert "params.large float32 (2,)" in first and "params.large float32 (3, 70001)" in first


def test_the_error_shows_a_few_and_names_the_rest():
    def rank():
        dp = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(dp, stage=0), fds.adamw(0.01))(loss)
        state = stepped(step)
        for x in fds.tree.leaves(state):
            x.add_(dp.index)
        return str(raised(state, step))

    text, same = fds.simulate(rank, 2)
    assert text == same and "... and 5 more leaves" in text and text.count("first at") == 4


def test_one_rank_has_nothing_to_compare_and_bad_arguments_are_named():
    step = fds.compose(fds.adamw(0.01))(loss)
    assert rank_differences(stepped(step), step) == [] and fds.check_ranks(stepped(step), step) is None
    for state, other in ((step, stepped(step)), (stepped(step), None), (None, step)):
        with pytest.raises(FdsError, match=r"not a st"):
            fds.check_ranks(state, other)
    assert str(RankDifference("step", (1, 2), (0,))) == "step: ranks 1, 2 not as rank 0"
