"""Law 2: recomputing activations changes nothing, bit for bit, dropout on, however their inputs are kept."""

import pytest
import torch
from hypothesis import assume, given, strategies as st

import fds
from tests.bits import assert_same_bits
from tests.laws.problems import compositions, make, optimizers, problems


def _save_nothing(ctx, op, *args, **kwargs):
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return {"device": "device", "host": "host", "disk": fds.disk(tmp_path_factory.mktemp("activations"))}


@given(
    problems(),
    optimizers(),
    compositions(without=("checkpoint", "checkpoint_pairs")),
    st.sampled_from([None, "matmuls", [torch.ops.aten.tanh.default], _save_nothing]),
    st.sampled_from(["device", "host", "disk"]),
    st.integers(1, 4),
    st.sampled_from([{}, {"contiguous": True}, {"contiguous": True, "number": 2}]),
    st.sampled_from([1, 1, 2, 3]),
)
def test_checkpointing_is_the_identity(stores, problem, optimizer, names, policy, store, every, blocks, size):
    # torch refuses to write over a product that it keeps for recomputation
    assume(policy != "matmuls" or not any(getattr(x, "inplace", False) for x in getattr(problem.loss, "layers", ())))
    plain = make(names, optimizer, problem)

    def after_two_calls(step):
        state, _ = step(step.init(problem.params, key=5), problem.batch)
        return step(state, problem.batch)

    def checkpointed():
        axis = fds.mesh(tp=-1)["tp"]
        kept = {"policy": policy, "store": stores[store], "every": every, "partition": axis, **blocks}
        return after_two_calls(make(names, optimizer, problem, fds.checkpoint_activations(**kept)))

    want = after_two_calls(plain)
    for found in [checkpointed()] if size == 1 else fds.simulate(checkpointed, size):
        assert_same_bits(found, want)
