"""Law 2: recomputing activations changes nothing, bit for bit, dropout on, under any policy."""

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
)
def test_checkpointing_is_the_identity(stores, problem, optimizer, names, policy, store, every):
    # torch refuses to write over a product that it keeps for recomputation
    assume(policy != "matmuls" or not any(getattr(x, "inplace", False) for x in getattr(problem.loss, "layers", ())))
    plain = make(names, optimizer, problem)
    recompute = fds.checkpoint_activations(policy=policy, store=stores[store], every=every)
    checkpointed = make(names, optimizer, problem, recompute)
    a = b = plain.init(problem.params, key=5)
    for _ in range(2):
        (a, metrics_a), (b, metrics_b) = plain(a, problem.batch), checkpointed(b, problem.batch)
    assert_same_bits((b, metrics_b), (a, metrics_a))
