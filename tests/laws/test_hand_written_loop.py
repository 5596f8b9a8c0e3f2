"""The composed step is the loop that a PyTorch user would write, on the example's model, for twenty steps."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from tests.bits import assert_rounding, assert_same_bits

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt.model import Block, Embedding, gpt

from tests.devices import DEVICE

WIDTH, LAYERS, HEADS, ROWS, STEPS = 32, 2, 2, 8, 20


class Module(nn.Module):
    """The example's model as a module of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = Embedding(WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, HEADS, LAYERS, 0.0) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.embedding.logits(self.norm(x))


def start():
    loss = gpt(width=WIDTH, layers=LAYERS, heads=HEADS)
    params = loss.init(fds.random.key(0))
    module = Module()
    names = [name for name, _ in module.named_parameters()]
    module.load_state_dict(dict(zip(names, params.values(), strict=True)))
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (ROWS, 17), generator=g) for _ in range(STEPS)]
    return loss, params, module, [(r[:, :-1], r[:, 1:]) for r in rows]


def run(step, params, batches):
    state, losses = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return list(state.params.values()), torch.stack(losses)


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def values(module):
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("donated", [False, True])
def test_plain_training_is_bit_equal(donated):
    loss, params, module, batches = start()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.1, fused=True)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        value = cross_entropy(module, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    step = fds.compose(fds.adamw(1e-2, weight_decay=0.1), *[fds.donate()] * donated)(loss)
    assert_same_bits(run(step, params, batches), (values(module), torch.stack(losses)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_with_a_grad_scaler_is_bit_equal(dtype):
    loss, params, module, batches = start()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.1, fused=True)
    scaler, losses = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**12), []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, dtype=dtype):
            value = cross_entropy(module, batch)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.detach())
    step = fds.compose(fds.autocast(dtype), fds.loss_scale(2.0**12), fds.adamw(1e-2, weight_decay=0.1))(loss)
    assert_same_bits(run(step, params, batches), (values(module), torch.stack(losses)))


def test_accumulation_clipping_and_a_schedule_are_equal_to_rounding():
    loss, params, module, batches = start()
    module = module.double()
    rate = fds.schedules.warmup_cosine(1e-2, warmup_steps=5, total_steps=STEPS)
    optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum=0.9)
    for t, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        for i in range(4):
            half = tuple(x[2 * i : 2 * i + 2] for x in batch)
            (F.cross_entropy(module(half[0]).flatten(0, 1), half[1].flatten()) / 4).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate(t)
        optimizer.step()
    step = fds.compose(
        fds.accumulate(4), fds.clip_by_global_norm(0.5), fds.checkpoint_activations(), fds.sgd(rate, momentum=0.9)
    )(fds.Layers(loss.layers, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())))
    got, _ = run(step, {k: v.double() for k, v in params.items()}, batches)
    assert_rounding(got, values(module), additions=STEPS * ROWS * 16 * WIDTH * LAYERS)
