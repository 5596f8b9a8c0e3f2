"""The dynamic loss scale: DeepSpeed's trajectory without DeepSpeed's defects."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fds
from fds import tree
from fds.errors import ComposeError
from tests.bits import assert_same_bits, snapshot
from tests.pairs import covering

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "loss_scale.json").read_text())["cases"]
ARGUMENTS = ("initial", "window", "hysteresis", "consecutive_hysteresis", "minimum")


def linear(params, batch):
    return (params["w"] * batch).sum()


def overflowing(bit: int) -> torch.Tensor:
    return torch.tensor([float("inf") if bit else 1.0, 1.0])


def train(step, bits):
    state, told = step.init({"w": torch.zeros(2)}), []
    for bit in bits:
        state, metrics = step(state, overflowing(bit))
        told.append(metrics)
    return state, told


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: "-".join(str(c[k]) for k in ARGUMENTS))
def test_the_scale_follows_deepspeed(case):
    step = fds.compose(fds.loss_scale(**{k: case[k] for k in ARGUMENTS}), fds.sgd(1.0))(linear)
    slot, scales = step.init({"w": torch.zeros(2)}).slots["loss_scale"], []
    for bit in case["overflow"]:
        slot = step.memory["loss_scale"].rule(slot, None, SimpleNamespace(overflow=torch.tensor(bool(bit))))
        scales.append(float(slot.scale))
    assert scales == case["scale_after"]


BY_ARGUMENTS = {tuple(case[k] for k in ARGUMENTS): case for case in GOLDEN}


@pytest.mark.parametrize("arguments", covering(BY_ARGUMENTS, 3), ids=lambda arguments: "-".join(map(str, arguments)))
def test_a_step_scales_and_skips_as_deepspeed_does(arguments):
    case = BY_ARGUMENTS[arguments]
    step = fds.compose(fds.loss_scale(**{k: case[k] for k in ARGUMENTS}), fds.sgd(1.0), fds.donate())(linear)
    state, told = train(step, case["overflow"])
    after = [float(m["loss_scale"]) for m in told[1:]] + [float(state.slots["loss_scale"].scale)]
    assert after == case["scale_after"]
    assert [bool(m["skipped"]) for m in told] == [bool(b) for b in case["overflow"]]
    assert float(told[0]["loss_scale"]) == case["initial"]


def test_the_update_on_the_step_where_the_scale_doubles_is_whole():
    """DeepSpeed unscales that step with the doubled scale: 0.125, 0.125, 0.0625, 0.125, 0.0625, ..."""
    step = fds.compose(fds.loss_scale(2.0**8, window=2), fds.sgd(0.125))(linear)
    state, moves, scales = step.init({"w": torch.zeros(2)}), [], []
    for _ in range(8):
        new, metrics = step(state, torch.ones(2))
        moves.append(float((state.params["w"] - new.params["w"])[0]))
        scales.append(float(metrics["loss_scale"]))
        state = new
    assert len(set(scales)) > 3, "the scale must double on the way"
    assert moves == [0.125] * 8


def test_clipping_uses_the_norm_of_the_unscaled_gradients_also_when_the_scale_doubles():
    plain = fds.compose(fds.clip_by_global_norm(1.0), fds.sgd(1.0))(linear)
    scaled = fds.compose(fds.clip_by_global_norm(1.0), fds.loss_scale(2.0**8, window=1), fds.sgd(1.0))(linear)
    a = b = plain.init({"w": torch.zeros(2)})
    b = scaled.init({"w": torch.zeros(2)})
    for _ in range(6):
        a, want = plain(a, torch.tensor([3.0, 4.0]))
        b, got = scaled(b, torch.tensor([3.0, 4.0]))
        assert float(got["grad_norm"]) == float(want["grad_norm"]) == 5.0
        assert_same_bits(b.params, a.params)


def test_skipped_steps_advance_neither_the_step_nor_the_learning_rate():
    rates = []
    step = fds.compose(fds.loss_scale(2.0**4, hysteresis=1), fds.sgd(lambda t: 1.0 / (t + 2)))(linear)
    state = step.init({"w": torch.zeros(2)})
    for bit in (0, 1, 1, 0, 1, 0):
        state, metrics = step(state, overflowing(bit))
        rates.append(float(metrics["lr"]))
    assert rates == pytest.approx([1 / 2, 1 / 3, 1 / 3, 1 / 3, 1 / 4, 1 / 4])
    assert (int(state.step), int(state.calls)) == (3, 6)


def test_the_floor_is_told_and_held():
    state, told = train(fds.compose(fds.loss_scale(4.0, hysteresis=1, minimum=2.0), fds.sgd(1.0))(linear), [1, 1, 1])
    assert [bool(m["at_minimum_scale"]) for m in told] == [False, True, True]
    assert float(state.slots["loss_scale"].scale) == 2.0


def test_float16_gradients_survive_only_with_a_scale():
    def tiny(params, batch):
        return (params["w"] * batch).sum() * 1e-6

    def update(*transforms):
        step = fds.compose(fds.precision(torch.float16), *transforms, fds.sgd(1.0))(tiny)
        return step(step.init({"w": torch.zeros(2)}), torch.full((2,), 1e-3))[0].params["w"]

    assert torch.equal(update(), torch.zeros(2))
    assert torch.allclose(update(fds.loss_scale()), torch.full((2,), -1e-9), rtol=1e-2)
    assert torch.allclose(update(fds.static_loss_scale(2.0**14)), torch.full((2,), -1e-9), rtol=1e-2)


def test_an_overflow_of_the_sum_of_squares_is_no_overflow():
    step = fds.compose(fds.skip_nonfinite(), fds.sgd(1e-30))(linear)
    state, metrics = step(step.init({"w": torch.zeros(2)}), torch.tensor([1e30, 1e30]))
    assert not bool(metrics["skipped"]) and int(state.step) == 1
    assert float(metrics["grad_norm"]) == pytest.approx(2**0.5 * 1e30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_skip_nonfinite_skips_without_a_scale(bad):
    step = fds.compose(fds.skip_nonfinite(), fds.adamw(0.1), fds.ema(0.5))(linear)
    state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    before = snapshot(state)
    after, metrics = step(state, torch.tensor([1.0, bad]))
    assert bool(metrics["skipped"])
    assert_same_bits({**tree.paths(after), "calls": before.calls}, tree.paths(before))


@pytest.mark.parametrize(
    "arguments",
    [{"window": 0}, {"window": 1.5}, {"hysteresis": 0}, {"minimum": 0.0}, {"initial": 0.5}, {"initial": float("inf")}],
    ids=str,
)
def test_a_scale_without_room_is_refused(arguments):
    with pytest.raises(ComposeError):
        fds.loss_scale(**arguments)
    with pytest.raises(ComposeError):
        fds.static_loss_scale(-1.0)
