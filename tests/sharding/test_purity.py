"""Purity on many ranks: a step is a function of state and batch, and what it returned stays what it was."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, strategies as st
from torch import nn

import fds
from fds import tree
from tests.bits import assert_rounding, assert_same_bits, snapshot
from tests.laws.problems import OPTIMIZERS, compositions, make, problems
from tests.laws.test_law_4_sharding import SIZES, STAGES, batch_of, shard, share
from tests.sharding.models import data_axis, gpt, mine, tokens


@given(problems(), st.sampled_from(sorted(OPTIMIZERS)), compositions(), st.integers(2, 3), STAGES, SIZES)
def test_a_step_is_a_function_and_its_inputs_and_results_stay(problem, optimizer, names, ranks, stage, size):
    def run():
        axis = data_axis()
        step = make(names, OPTIMIZERS[optimizer](), problem, shard(stage, size))
        batches = [share(batch_of(problem, 6 * ranks * i), axis.index, ranks) for i in (1, 2)]
        before = torch.get_rng_state()
        start = step.init(problem.params)
        kept, held = [(start, snapshot(start))], []
        state = start
        for i in range(3):
            tensors = [x for x in tree.leaves(batches[i % 2]) if isinstance(x, torch.Tensor)]
            given = snapshot(tensors)
            state, metrics = step(state, batches[i % 2])
            assert_same_bits(tensors, given)
            told = step.evaluate(state, batches[0])
            kept += [(state, snapshot(state)), (metrics, snapshot(metrics)), (told, snapshot(told))]
            held.append(step.params(state))
            kept.append((held[-1], snapshot(held[-1])))
        again = start
        for i in range(3):
            again, metrics = step(again, batches[i % 2])
            assert_same_bits(step.params(again), held[i])
            assert_same_bits(metrics, kept[4 * i + 2][0])
        for x, copied in kept:
            assert_same_bits(x, copied)
        assert torch.equal(torch.get_rng_state(), before)

    fds.simulate(run, ranks)


TREESPEC = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning")  # torch's, of a copy


@TREESPEC
@pytest.mark.parametrize("stage", range(4))
def test_old_states_are_read_and_stepped_after_later_ones(stage):
    loss, params = gpt(width=16, layers=1)

    def run():
        axis = data_axis()
        step = fds.compose(
            fds.shard_optimizer(axis, stage=stage, bucket_bytes=4000), fds.ema(0.9), fds.accumulate(2), fds.adamw(0.01)
        )(loss)
        batch, states = mine(tokens(8), axis), [step.init(params)]
        for _ in range(4):
            states.append(step(states[-1], batch)[0])
        wholes = [step.params(s) for s in states]
        for i in (3, 0, 2):
            next_, _ = step(states[i], batch)
            assert_same_bits(next_, states[i + 1])
            del next_
        assert_same_bits([step.params(s) for s in states], wholes)
        for how in (copy.deepcopy, lambda s: tree.map(torch.clone, s)):
            twin = how(states[2])
            assert_same_bits(step(twin, batch)[0], states[3])

    fds.simulate(run, 2)


@TREESPEC
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_pickled_state_is_the_state(stage):
    loss, params = gpt(width=16, layers=1)

    def run():
        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=4000), fds.adamw(0.01))(loss)
        state, _ = step(step.init(params), mine(tokens(4), axis))
        known = len(step.runtime.structures)
        twin = pickle.loads(pickle.dumps(state))
        assert_same_bits(step(twin, mine(tokens(4), axis))[0], step(state, mine(tokens(4), axis))[0])
        assert len(step.runtime.structures) == known  # its layout is the same, hash and all

    fds.simulate(run, 2)


class Lookup(nn.Module):
    """Its output is a view of a parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).view(3, 4))

    def forward(self, x):
        return self.w[1:]


@pytest.mark.parametrize("module", [lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda: nn.Linear(4, 4), Lookup])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_outputs_stay_after_later_steps(stage, module):
    torch.manual_seed(0)
    apply, params, _ = fds.functional(module())

    def run():
        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=64), fds.sgd(0.1))(
            lambda p, b: apply(p, b).square().mean()
        )
        state, batch = step.init(params), torch.ones(2, 4) + axis.index
        evaluate, kept = step.evaluator(state), []
        for _ in range(3):
            out = evaluate(batch, outputs=True)["outputs"]
            kept.append((out, out.clone()))
            assert type(out) is torch.Tensor
            state, _ = step(state, batch)
            out = step.evaluate(state, batch, outputs=True)["outputs"]
            kept.append((out, out.clone()))
            step.params(state)
        for out, copied in kept:
            assert_same_bits({"x": out}, {"x": copied})
        for out, _ in kept[::2]:  # of the first state
            assert torch.equal(out, kept[0][0])

    fds.simulate(run, 2)


@pytest.mark.parametrize("stage", range(4))
def test_what_a_loss_keeps_of_its_parameters_stays(stage):
    """Copies, NumPy arrays, views and graphs of the gathered parameters are not written over by later steps."""

    def run():
        kept = []

        def f(p, b):
            x = torch.tanh(b @ p["w"])
            copies = p["w"].detach() * 1, p["w"].detach().reshape(-1).clone(), x.detach()
            kept.extend((y, y.clone().numpy()) for y in copies)
            if stage < 3:  # where parameters are whole anyway, views of them may be kept
                kept.append((p["w"].detach()[1], p["w"].detach()[1].clone().numpy()))
                kept.append((torch.from_numpy(p["w"].detach().numpy()), p["w"].detach().clone().numpy()))
            return x.square().mean()

        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=64), fds.sgd(0.5))(f)
        state = step.init({"w": torch.ones(8, 8), "v": torch.ones(40)})
        for i in range(4):
            state, _ = step(state, torch.ones(2, 8) + i)
            step.evaluate(state, torch.ones(2, 8) + i)
        for x, copied in kept:
            assert torch.equal(x, torch.from_numpy(copied))

    fds.simulate(run, 2)


LAYERS = 4
PATHS = st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=6)


@example([[0], [0], [3, 1], [3]], 3, 2, 0)
@given(st.lists(PATHS, min_size=4, max_size=4), st.integers(2, 3), st.integers(1, 2), st.sampled_from([0, 1, 2]))
def test_a_step_is_a_function_to_rounding_where_ranks_take_other_paths(paths, ranks, n, prefetch):
    """What ranks learned of the order in the step before decides when a bucket is reduced, so which sum comes first."""
    g = torch.Generator().manual_seed(0)
    params = {str(i): {k: torch.randn(6, 6, generator=g) / 2 for k in "uvw"} for i in range(LAYERS)}

    def f(p, b):
        x = b["x"]
        for n, i in enumerate(j for j in b["path"][0].tolist() if j >= 0):
            x = torch.tanh(F.linear(x, p[str(i)]["uvw"[n % 3]]))
        return x.square().mean()

    def run():
        axis = data_axis()
        step = fds.compose(
            fds.accumulate(n), fds.sgd(0.1), fds.shard_optimizer(axis, stage=3, bucket_bytes=500, prefetch=prefetch)
        )(f)
        mine = [paths[(axis.index + i) % 4] for i in range(n)]
        batch = {
            "x": torch.randn(n, 6, generator=torch.Generator().manual_seed(axis.index)),
            "path": torch.tensor([p + [-1] * (6 - len(p)) for p in mine]),
        }
        state = step.init(params)
        wholes = [step.params(step(state, batch)[0]) for _ in range(4)]
        for other in wholes[1:]:
            assert_rounding(other, wholes[0], additions=ranks * n * 6)

    fds.simulate(run, ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loss_that_raises_on_all_ranks_leaves_state_and_step_usable(stage, where):
    loss, params = gpt(width=16, layers=2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError

    def run():
        fail = [False]

        def f(p, batch):
            if fail[0] and where == "backward":
                p = {**p, "blocks.0.up.weight": Fails.apply(p["blocks.0.up.weight"])}
            total = loss(p, batch)
            if fail[0] and where == "forward":
                raise ZeroDivisionError
            return total

        axis = data_axis()
        step = fds.compose(
            fds.shard_optimizer(axis, stage=stage, bucket_bytes=4000), fds.accumulate(2), fds.adamw(0.01)
        )(f)
        state, batch = step.init(params), mine(tokens(8), axis)
        kept = snapshot(state)
        want = step(state, batch)
        for _ in range(2):
            fail[0] = True
            with pytest.raises(ZeroDivisionError):
                step(state, batch)
            fail[0] = False
            assert_same_bits(state, kept)
            assert_same_bits(step(state, batch), want)

    fds.simulate(run, 2)
