"""Experts over an axis of the mesh, as a filler: the dense loop on one rank, beside ZeRO on another axis."""

import pytest
import torch
import torch.nn.functional as F

import fds
from tests.fillers.expert_parallel import by_experts, expert_parallel
from tests.fillers.magnitude_pruning import magnitude_pruning

EXPERTS, WIDTH, ROWS, CALLS, LR, NORM = 4, 4, 16, 4, 0.5, 0.2
G = torch.Generator().manual_seed(0)
PARAMS = {
    name: 0.5 * torch.randn(shape, generator=G, dtype=torch.float64)
    for name, shape in {
        "router": (EXPERTS, WIDTH),
        "experts.up": (EXPERTS, 8, WIDTH),
        "experts.down": (EXPERTS, WIDTH, 8),
        "head": (WIDTH,),
    }.items()
}


def batch(call):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(ROWS, *size, generator=g, dtype=torch.float64) for size in ((WIDTH,), ())]


def loss_over(axis):
    def loss(params, batch):
        x, y = batch
        up, down = params["experts.up"], params["experts.down"]
        weight, expert = torch.softmax(x @ params["router"].T, 1).max(1)
        out = by_experts(lambda i, rows: F.gelu(rows @ up[i].T) @ down[i].T, x, expert, len(up), axis)
        return ((x + weight[:, None] * out) @ params["head"] - y).square().mean()

    return loss


def dense_loss(params, batch):
    x, y = batch
    weight, expert = torch.softmax(x @ params["router"].T, 1).max(1)
    out = torch.stack(
        [params["experts.down"][e] @ F.gelu(params["experts.up"][e] @ row) for row, e in zip(x, expert, strict=True)]
    )
    return ((x + weight[:, None] * out) @ params["head"] - y).square().mean()


def composed(mesh, stage, microbatches=1, *transforms):
    return fds.compose(
        *transforms,
        fds.accumulate(microbatches),
        expert_parallel(mesh["ep"], "experts.*"),
        fds.shard_optimizer(mesh["dp"], stage=stage),
        fds.clip_by_global_norm(NORM),
        fds.sgd(LR, momentum=0.9),
    )(loss_over(mesh["ep"]))


def train(step, state, mesh, calls=range(CALLS)):
    peers = mesh["dp", "ep"]
    norms, losses = [], []
    for call in calls:
        state, metrics = step(state, [x.chunk(peers.size)[peers.index] for x in batch(call)])
        norms.append(metrics["grad_norm"])
        losses.append(metrics["loss"])
    return state, [step.params(state), norms, losses]


@pytest.fixture(scope="module")
def by_hand():
    params = {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    optimizer = torch.optim.SGD(params.values(), LR, momentum=0.9)
    norms, losses = [], []
    for call in range(CALLS):
        loss = dense_loss(params, batch(call))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), NORM, foreach=False))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [{name: x.detach() for name, x in params.items()}, norms, losses]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize(("dp", "ep", "stage"), [(1, 1, 0), (1, 4, 0), *((2, 2, stage) for stage in range(4))])
def test_experts_over_ranks_are_the_dense_loop(dp, ep, stage, by_hand):
    def body():
        mesh = fds.mesh(dp=dp, ep=ep)
        step = composed(mesh, stage)
        state, results = train(step, step.init(PARAMS), mesh)
        # of a rank: its experts, and of those its slice
        elements = step.describe(state).num_bytes["params"] / 8
        return results, elements

    for results, elements in fds.simulate(body, dp * ep):
        close(results, by_hand)
        if (dp, ep) == (2, 2):
            assert elements < sum(x.numel() for x in PARAMS.values()) * (0.6 if stage == 0 else 0.5)


@pytest.mark.parametrize("stage", [0, 3])
def test_microbatches_of_experts_add_up(stage, by_hand):
    def body():
        mesh = fds.mesh(dp=2, ep=2)
        step = composed(mesh, stage, 2)
        return train(step, step.init(PARAMS), mesh)[1]

    close(fds.simulate(body, 4)[0], by_hand)


def test_a_pruning_mask_counts_each_expert_and_each_copy_once():
    def body(dp, ep):
        mesh = fds.mesh(dp=dp, ep=ep)
        step = composed(mesh, 3, 1, magnitude_pruning(lambda t: 0.5, 2, mesh["dp", "ep"]))
        return train(step, step.init(PARAMS), mesh)[1]

    close(fds.simulate(lambda: body(2, 2), 4)[0], body(1, 1))


def test_a_run_goes_on_with_other_experts_a_rank(by_hand, tmp_path):
    def first():
        mesh = fds.mesh(dp=2, ep=2)
        step = composed(mesh, 3)
        state, _ = train(step, step.init(PARAMS), mesh, range(2))
        fds.save(tmp_path, state, step)

    def second():
        mesh = fds.mesh(dp=1, ep=4)
        step = composed(mesh, 0)
        return train(step, fds.load(tmp_path, step, PARAMS)[0], mesh, range(2, CALLS))[1]

    fds.simulate(first, 4)
    params, norms, losses = fds.simulate(second, 4)[0]
    close([params, norms, losses], [by_hand[0], by_hand[1][2:], by_hand[2][2:]])
