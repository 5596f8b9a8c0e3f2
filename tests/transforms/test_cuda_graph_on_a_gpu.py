"""`cuda_graph` on a GPU: torch's own capture of whole steps, beside the steps that are not captured."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import kernels, tree
from fds.errors import LossError
from tests.bits import assert_same_bits
from tests.laws.problems import OPTIMIZERS

pytestmark = pytest.mark.gpu
COMPOSITIONS = {
    "plain": list,
    "accumulated": lambda: [fds.accumulate(2), fds.checkpoint_activations()],
    "half": lambda: [fds.precision(torch.float16), fds.loss_scale(2.0**10), fds.clip_by_global_norm(1.0)],
    "bfloat16": lambda: [fds.precision(torch.bfloat16), fds.ema(0.9), fds.skip_nonfinite()],
    "autocast": lambda: [fds.autocast(torch.bfloat16), fds.clip_by_value(0.1)],
}


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [nn.Linear(8, 32), nn.Dropout(0.3), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)]
        return fds.Layers(parts, lambda out, targets: F.mse_loss(out.float(), targets))


def batches(number, rows=16):
    generator = torch.Generator("cuda").manual_seed(7)
    rand = lambda *shape: torch.randn(shape, generator=generator, device="cuda")
    return [(rand(rows if i % 3 else rows // 2, 8), rand(rows if i % 3 else rows // 2, 4)) for i in range(number)]


def on_gpu(step, loss):
    state = step.init(loss.init(fds.random.key(1)))
    return tree.map(lambda x: x.cuda() if x is not state.calls and x is not state.key else x, state)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("composition", sorted(COMPOSITIONS))
def test_a_captured_step_is_the_step(composition, optimizer):
    loss, seen = network(0), []
    for more in ([], [fds.cuda_graph()]):
        step = fds.compose(*COMPOSITIONS[composition](), fds.donate(), *more, OPTIMIZERS[optimizer]())(loss)
        state, told = on_gpu(step, loss), []
        generator = torch.cuda.get_rng_state()
        for batch in batches(12):
            state, metrics = step(state, batch)
            told.append(metrics)
        assert torch.equal(torch.cuda.get_rng_state(), generator)
        seen.append((state, told))
    assert_same_bits(seen[1], seen[0])


def test_masks_of_kernels_follow_the_seed_of_every_replay():
    def loss(params, batch):
        x, y = batch
        seed = torch.randint(2**62, (), device=x.device)
        return F.mse_loss(kernels.dropout(x @ params["w"], p=0.5, seed=seed), y)

    ended = []
    for more in ([], [fds.cuda_graph()]):
        step = fds.compose(fds.triton_kernels(), fds.donate(), *more, fds.adamw(0.1))(loss)
        state = step.init({"w": torch.ones(8, 4, device="cuda")})
        for batch in batches(9):
            state, _ = step(state, batch)
        ended.append(state)
    assert_same_bits(ended[1], ended[0])


def test_replays_allocate_nothing_that_stays_and_the_pool_is_described():
    loss = network(1)
    step = fds.compose(fds.donate(), fds.cuda_graph(), fds.adamw())(loss)
    state, batch = on_gpu(step, loss), batches(2)[1]
    for _ in range(4):
        state, _ = step(state, batch)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        state, _ = step(state, batch)
    assert torch.cuda.memory_allocated() == before
    assert step.describe(state).num_bytes["graphs"] >= tree.num_bytes(batch)


def test_graphs_outlive_others_of_the_same_step():
    """Destroying a graph frees what cuBLAS has on the stream that it was captured on (torch 2.12 and 2.13)."""
    loss, batch = network(3), batches(2)[1]
    step, plain = (fds.compose(fds.donate(), *m, fds.adamw())(loss) for m in ([fds.cuda_graph()], []))
    kept, dropped, other, held = on_gpu(step, loss), on_gpu(step, loss), on_gpu(plain, loss), []
    for number in range(12):
        kept, metrics = step(kept, batch)
        other, wanted = plain(other, batch)
        assert_same_bits((kept, metrics), (other, wanted))
        if number < 4:
            dropped, _ = step(dropped, batch)
        else:
            held += [] if dropped is None else tree.leaves(dropped.params)  # so no other state takes this memory
            dropped = None
            step(on_gpu(step, loss), batch)  # which lets go of it, and of its graph
            torch.cuda.empty_cache()
            torch.full((1 << 24,), torch.nan, device="cuda")


def test_a_pool_is_followed_by_another_when_its_graphs_are_gone():
    loss, batch = network(4), batches(2)[1]
    step = fds.compose(fds.donate(), fds.cuda_graph(), fds.adamw())(loss)
    state, held = on_gpu(step, loss), []
    for _ in range(3):
        for _ in range(4):
            state, metrics = step(state, batch)
        held.append(tree.leaves(state.params))
    assert torch.isfinite(metrics["loss"])


def test_a_number_that_is_read_is_refused_by_its_line_and_the_state_goes_on():
    def reads(params, batch):
        return F.mse_loss(batch[0] @ params["w"], batch[1]) * (batch[0].sum().item() < 1e9)

    step = fds.compose(fds.donate(), fds.cuda_graph(), fds.sgd(0.1))(reads)
    state, batch = step.init({"w": torch.ones(8, 4, device="cuda")}), batches(2)[1]
    state, _ = step(state, batch)
    with pytest.raises(LossError) as caught:
        step(state, batch)
    assert "in reads" in caught.value.where
    del caught
    assert torch.isfinite(fds.compose(fds.sgd(0.1))(reads)(state, batch)[1]["loss"])


def test_work_that_goes_on_beside_a_capture_does_not_end_it():
    loss, stop = network(2), threading.Event()
    step = fds.compose(fds.donate(), fds.cuda_graph(), fds.adamw())(loss)
    state, batch = on_gpu(step, loss), batches(2)[1]

    def pin():
        while not stop.is_set():
            torch.empty(1 << 16).pin_memory()

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(6):
            state, metrics = step(state, batch)
    finally:
        stop.set()
        thread.join()
    assert torch.isfinite(metrics["loss"])
