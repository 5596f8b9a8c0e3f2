"""The pool: memory comes back when nobody looks, and never before."""

import numpy as np
import pytest
import torch

import fds
from fds import tree
from fds.media.mapping import PAGE, drop
from fds.step.pool import HOLE, Pool, give_back
from tests.bits import assert_same_bits, snapshot
from tests.collector import uncollected
from tests.unit.step.problem import BATCH, make, make_params


def addresses(state):
    """Where the written leaves lie: those of one shape may change places."""
    return {x.data_ptr() for x in tree.leaves((state.params["net"], state.opt, state.slots))}


def pool_bytes(step):
    return tree.num_bytes([one.tensors for one in step.runtime.pool.sets])


def run(step, state, n):
    for _ in range(n):
        state, _ = step(state, BATCH)
    return state


def test_memory_comes_back_when_it_is_free():
    step = make(fds.ema(0.9))
    state, seen = step.init(make_params()), []
    for _ in range(8):
        state, _ = step(state, BATCH)
        seen.append(addresses(state))
    assert seen[0] == seen[2] == seen[4] == seen[6]
    assert seen[1] == seen[3] == seen[5] == seen[7]
    assert not seen[0] & seen[1]


def test_at_most_two_sets_are_held():
    step = make(fds.ema(0.9))
    state = run(step, step.init(make_params()), 6)
    one_set = tree.num_bytes((state.params["net"], state.opt, state.slots))
    assert pool_bytes(step) <= 2 * one_set


def test_a_held_state_costs_its_own_memory_until_it_is_dropped():
    step = make()
    held = [run(step, step.init(make_params()), n) for n in (1, 2, 3)]
    full = pool_bytes(step)
    state = run(step, held[-1], 1)
    held.clear()
    state = run(step, state, 3)
    assert pool_bytes(step) < full


HOLDERS = {
    "tensor": lambda x: x,
    "view": lambda x: x.view(-1)[2:],
    "detached": lambda x: x.detach(),
    "numpy": lambda x: x.numpy(),
    "iterator": lambda x: iter(x.unbind()),
    "storage": lambda x: x.untyped_storage(),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "parameter": torch.nn.Parameter,
}
READ = {
    "iterator": lambda held: torch.stack(list(held)),
    "numpy": torch.from_numpy,
    "storage": lambda held: torch.tensor(held.tolist(), dtype=torch.uint8),
    "dlpack": torch.utils.dlpack.from_dlpack,
}


@pytest.mark.parametrize("how", HOLDERS)
def test_memory_that_anyone_holds_is_left_alone(how):
    step = make()
    state = run(step, step.init(make_params()), 2)
    read = READ.get(how, lambda held: held)
    held, want = HOLDERS[how](state.params["net"]["w"]), state.params["net"]["w"].clone()
    want = read(HOLDERS[how](want)).clone()
    for _ in range(4):  # in this frame, so that nothing else holds the state
        state, _ = step(state, BATCH)
    assert_same_bits(read(held), want)


def test_memory_that_a_graph_has_saved_is_left_alone():
    step = make()
    state = run(step, step.init(make_params()), 2)
    x = torch.ones(3, 2, requires_grad=True)
    y, want = (x * state.params["net"]["w"]).sum(), state.params["net"]["w"].clone()
    for _ in range(4):
        state, _ = step(state, BATCH)
    y.backward()
    assert_same_bits(x.grad, want)


@pytest.mark.parametrize("drop", [lambda pool: pool.sets.clear(), lambda pool: setattr(pool, "sets", [])])
def test_dropping_the_pool_changes_nothing(drop):
    kept, dropped = make(fds.ema(0.9)), make(fds.ema(0.9))
    a, b = kept.init(make_params()), dropped.init(make_params())
    for _ in range(5):
        (a, metrics_a), (b, metrics_b) = kept(a, BATCH), dropped(b, BATCH)
        drop(dropped.runtime.pool)
        assert_same_bits((b, metrics_b), (a, metrics_a))


def test_two_runs_of_one_step_do_not_mix():
    step, alone = make(), make()
    a, b = step.init(make_params(), key=0), step.init(make_params(), key=1)
    other = {**BATCH, "x": BATCH["x"] * 2}
    for _ in range(4):
        (a, _), (b, _) = step(a, BATCH), step(b, other)
    assert_same_bits(a, run(alone, alone.init(make_params(), key=0), 4))


def test_an_earlier_state_can_be_stepped_again():
    step = make()
    state = run(step, step.init(make_params()), 2)
    first = snapshot(step(state, BATCH))
    later = state
    for _ in range(5):
        later, _ = step(later, BATCH)
    assert_same_bits(step(state, BATCH), first)


def test_no_cycle_keeps_a_state_alive():
    step = make(fds.precision(torch.bfloat16), fds.accumulate(2))
    with uncollected():
        state, seen = step.init(make_params()), []
        for _ in range(6):
            state, _ = step(state, BATCH)
            seen.append(addresses(state))
    assert seen[0] == seen[2] == seen[4]


def test_copies_are_contiguous_and_equal():
    x = [torch.randn(3, 4).t(), torch.ones(1).expand(5), torch.tensor(3), torch.zeros(0)]
    copies, buffers = Pool().copies(x)
    assert all(c.is_contiguous() for c in copies)
    assert_same_bits(copies, x)
    assert_same_bits(buffers.flat, [c.view(-1) for c in copies])


def test_what_somebody_holds_is_not_given_back():
    """Memory that went back to the system reads as zeros."""
    tensors = [torch.ones(HOLE) for _ in range(3)] + [torch.from_numpy(np.ones(HOLE, np.float32)), torch.ones(64)]
    held, view = tensors[1], tensors[2][1:]
    give_back(tensors)
    assert [float(x.sum()) / x.numel() for x in tensors[1:]] == [1, 1, 1, 1]
    assert held is tensors[1] and float(view.sum()) == HOLE - 1
    assert float(tensors[0].sum()) <= 2 * PAGE // 4  # all but the pages that it shares
    tensors[0].fill_(2)  # it is there as ever
    assert float(tensors[0].sum()) == 2 * HOLE


def test_gradients_given_back_change_no_bit(tmp_path, monkeypatch):
    """Where masters live elsewhere memory is short; a small gradient is as good a test as a large one."""
    monkeypatch.setattr("fds.step.pool.HOLE", PAGE)
    given: list[int] = []
    monkeypatch.setattr("fds.media.mapping.drop", lambda at, nbytes: (given.append(nbytes), drop(at, nbytes)))
    params, batch = {"w": torch.randn(64, 64), "v": torch.randn(64, 64)}, torch.randn(8, 64)
    loss = lambda params, batch: (batch @ params["w"] @ params["v"]).square().mean()
    shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3, max_live_bytes=2**20)
    states = []
    for more in ([], [fds.offload(masters=fds.disk(tmp_path))]):
        step = fds.compose(*more, shard, fds.adamw(1e-2))(loss)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, batch)
        states.append(state)
        assert bool(given) is bool(more)
    assert_same_bits(*states)
