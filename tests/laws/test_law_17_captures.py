"""Law 17: a step whose work is captured and replayed is the step, bit for bit, whatever happens between its calls."""

from __future__ import annotations

import attrs
import torch
from hypothesis import given, settings, strategies as st

import fds
from fds import tree
from tests.bits import assert_same_bits
from tests.emulated_gpu import Gpu, captured
from tests.laws.problems import ROWS, compositions, make, optimizers, problems


def kept(state, held, *tensors):
    """Hold some tensors of a state, views or copies too, and go on with the state."""
    held.extend(tensors)
    return state


HAPPENS = {
    "nothing": lambda state, held, copies: state,
    "a copy goes on": lambda state, held, copies: tree.map(torch.clone, state),
    "the key is another": lambda state, held, copies: attrs.evolve(state, key=fds.random.key(int(state.calls) + 5)),
    "a tensor is held": lambda state, held, copies: kept(state, held, tree.leaves(state.params)[0]),
    "a container is held": lambda state, held, copies: kept(state, held, state.opt),
    "views are held": lambda state, held, copies: kept(state, held, *[x.view(-1) for x in tree.leaves(state.params)]),
    "a copy is kept": lambda state, held, copies: kept(state, copies, tree.map(torch.clone, state)),
    "an earlier copy goes on": lambda state, held, copies: copies.pop(0) if copies else state,
}
CALL = st.tuples(st.sampled_from(["whole", "half", "infinite"]), st.sampled_from(sorted(HAPPENS)))


def variants(batch):
    """Return batches of two shapes, and one that is not finite where it holds floats."""
    half = tree.map(lambda x: x if not isinstance(x, torch.Tensor) else x[: ROWS // 2], batch)
    infinite = tree.map(lambda x: x * torch.inf if isinstance(x, torch.Tensor) and x.is_floating_point() else x, batch)
    return {"whole": batch, "half": half, "infinite": infinite}


@settings(max_examples=settings.default.max_examples // 4)  # each is two runs, by operators that Python counts
@given(
    problems(),
    optimizers(),
    compositions(without=("checkpoint_pairs", "autocast", "offload", "offload_to_disk", "eight_bits")),
    st.lists(CALL, min_size=4, max_size=7),
)
def test_a_captured_step_is_the_step(problem, optimizer, names, calls):
    gpu = Gpu()
    batches = {name: gpu.put(batch) for name, batch in variants(problem.batch).items()}
    plain = make(names, optimizer, problem, fds.donate())
    other = make(names, optimizer, problem, fds.donate(), captured(gpu))
    first = plain.init(problem.params, key=1)
    histories = []
    for step in (plain, other):
        state, held, copies, seen, were = gpu.state(first), [], [], [], []
        with gpu:
            for shape, happens in calls:
                state, metrics = step(state, batches[shape])
                seen.append((gpu.get(state), gpu.get(metrics), metrics))
                state = HAPPENS[happens](state, held, copies)
                were += [gpu.get(x) for x in held[len(were) :]]
            for _, told, metrics in seen:  # later calls leave alone what earlier ones returned
                assert_same_bits(gpu.get(metrics), told)
            assert_same_bits([gpu.get(x) for x in held], were)
        histories.append([(state, metrics) for state, metrics, _ in seen])
    assert_same_bits(histories[1], histories[0])


def test_calls_are_replays_from_the_third_on():
    gpu, layers = Gpu(), fds.Layers([torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)], torch.nn.functional.mse_loss)
    step = fds.compose(fds.adamw(), fds.donate(), captured(gpu))(layers)
    batches = [tuple(gpu.put(torch.randn(rows, 3)) for _ in range(2)) for rows in (4, 2)]
    state = gpu.state(step.init(layers.init))
    with gpu:
        for number in range(12):
            state, _ = step(state, batches[number % 2])
    assert (gpu.captures, gpu.replays) == (2, 8)
