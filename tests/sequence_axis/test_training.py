"""Ranks that pass parts of the same sequences train as one rank does that passes them whole."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import tree
from fds.errors import BatchError, ComposeError, MeshError
from tests import ranks
from tests.sequence_axis.language_model import DTYPE, ROWS, TOKENS, Place, model

CALLS, EPS, LR = 2, 1e-2, 1e-2
# A gradient element is a sum of at most 2**13 rounded products of size 1 (rows x tokens x widths), and adamw divides by
# sqrt(v) + EPS: a parameter moves by at most LR / EPS of that error a call, which then comes back.
ROUNDING = torch.finfo(DTYPE).eps * 2**13 * LR / EPS * sum(2.0**i for i in range(CALLS))
RING = {"method": "ring", "layout": "zigzag"}
PLACES = [
    (Place(2), "sgd"),
    (Place(4, **RING), "sgd"),
    (Place(2, data=2, zero=0), "sgd"),
    (Place(2, data=2, zero=2, **RING), "adamw"),
    (Place(2, data=2, zero=3), "adamw"),
    (Place(2, data=2, zero=1, joint=True), "adamw"),
    (Place(2, data=2, zero=2, joint=True, **RING), "sgd"),
    (Place(2, data=2, zero=3, joint=True), "sgd"),
    (Place(4, data=2, zero=1), "sgd"),
    (Place(2, stages=2, **RING), "sgd"),
    (Place(2, data=2, stages=2, zero=1, joint=True), "adamw"),
]
PARTS = {
    "sgd": lambda: [fds.sgd(0.5)],
    "adamw": lambda: [fds.loss_scale(), fds.clip_by_global_norm(0.1), fds.ema(0.9), fds.adamw(LR, eps=EPS)],
}


def trained(place: Place, parts: str) -> dict[str, Any]:
    """Return what a rank computes: metrics of every call, an evaluation, and whole parameters and averages."""
    step = place.step(*PARTS[parts]())
    state, found = step.init(model().init, key=3), {}
    for call in range(CALLS):
        state, found[f"call {call}"] = step(state, place.batch(step, call))
    found["evaluated"] = step.evaluate(state, place.batch(step, 9))
    found["many"] = fds.evaluate(step, state, [place.batch(step, call) for call in (7, 8)])
    found["params"] = step.params(state)
    if "ema" in state.slots:
        found["averages"] = step.params(attrs.evolve(state, params=state.slots["ema"]))
    return tree.paths(found)


@functools.cache
def plain(parts: str) -> dict[str, Any]:
    """Return what one rank computes."""
    return trained(Place(), parts)


def check_equal(found: dict[str, Any], parts: str) -> None:
    """Assert that all that a rank computed is what one rank alone does; whole numbers exactly."""
    want = plain(parts)
    assert found.keys() == want.keys()
    for name, x in want.items():
        bound = ROUNDING if x.is_floating_point() else 0
        assert torch.allclose(found[name].double(), x.double(), rtol=bound, atol=bound), name


@pytest.mark.parametrize(("place", "parts"), PLACES, ids=str)
def test_parts_of_sequences_are_the_plain_step(place, parts):
    found = fds.simulate(lambda: trained(place, parts), place.ranks)
    for one in found:
        check_equal(one, parts)
        assert all(torch.equal(x, found[0][name]) for name, x in one.items() if name.startswith("params"))


def test_parts_of_sequences_on_real_ranks_are_the_plain_step():
    for found in ranks.run(trained, Place(2, zero=2, joint=True, **RING), "adamw"):
        check_equal(found, "adamw")


def test_ranks_have_different_numbers_of_targets():
    place = Place(2)

    def body():
        _, targets = place.batch(place.step(fds.sgd(0.1)), 0)
        return int((targets != -100).sum())

    first, last = fds.simulate(body, 2)
    assert first > 2 * last > 0


@pytest.mark.parametrize("there", [Place(4, **RING), Place(2, data=2, zero=1, joint=True)])
def test_a_save_of_any_ranks_goes_on_on_any_others(tmp_path, there):
    def first():
        place = Place(2, data=2, zero=2)
        step = place.step(*PARTS["adamw"]())
        state = step.init(model().init, key=3)
        state, _ = step(state, place.batch(step, 0))
        fds.save(tmp_path, state, step)

    def second():
        step = there.step(*PARTS["adamw"]())
        state, _ = fds.load(tmp_path, step, model().init)
        state, metrics = step(state, there.batch(step, 1))
        return tree.paths({"call 1": metrics, "params": step.params(state)})

    fds.simulate(first, 4)
    want = plain("adamw")
    for found in fds.simulate(second, there.ranks):
        for name, x in found.items():
            bound = ROUNDING if x.is_floating_point() else 0
            assert torch.allclose(x.double(), want[name].double(), rtol=bound, atol=bound), name


def test_a_step_that_one_rank_would_skip_all_skip():
    def body():
        axis = fds.mesh(sp=2)["sp"]
        loss = lambda params, batch: (params["w"] * batch).mean()
        step = fds.compose(fds.context_parallel(axis), fds.skip_nonfinite(), fds.sgd(0.1))(loss)
        state = step.init({"w": torch.ones(3)})
        bad = torch.full((2, 3), torch.inf if axis.index else 1.0)
        state, metrics = step(state, bad)
        assert metrics["skipped"]
        return step.params(state)["w"]

    assert all(torch.equal(w, torch.ones(3)) for w in fds.simulate(body, 2))


@attrs.frozen
class Seen:
    """A loss that notes what it drew: one number for all rows, and a mask of the tokens."""

    drawn: list[Any]

    def __call__(self, params: Any, batch: Any) -> Any:
        self.drawn.append(nn.functional.dropout(torch.ones_like(batch), 0.5))
        return (params["w"] * batch).mean()


def test_tokens_of_a_row_draw_apart_on_each_rank_and_in_every_call():
    def body(sequence: int) -> Any:
        mesh, seen = fds.mesh(dp=-1, sp=sequence), Seen([])
        step = fds.compose(fds.shard_optimizer(mesh["dp"]), fds.context_parallel(mesh["sp"]), fds.sgd(0.1))(seen)
        state = step.init({"w": torch.ones(8)}, key=1)
        for _ in range(2):
            state, _ = step(state, torch.ones(4, 8))
        return seen.drawn

    drawn = [x for rank in fds.simulate(lambda: body(2), 4) for x in rank]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    again = [x for rank in fds.simulate(lambda: body(2), 4) for x in rank]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_ranks_of_a_sequence_share_their_rows():
    def body():
        mesh = fds.mesh(pp=1, dp=2, sp=2)
        shard = fds.shard_optimizer(mesh["dp", "sp"], stage=1)
        found = []
        for parts in ([fds.shard_optimizer(mesh["dp"])], [shard], [shard, fds.context_parallel(mesh["sp"])]):
            parts = parts if len(parts) > 1 or parts[0] is shard else [*parts, fds.context_parallel(mesh["sp"])]
            step = fds.compose(*parts, fds.sgd(0.1))(lambda params, batch: params["w"].sum())
            found.append(step.dimensions.share_of_batch)
        return found

    rows, shares = [(0, 2), (0, 2), (1, 2), (1, 2)], [(i, 4) for i in range(4)]
    assert fds.simulate(body, 4) == [[a, b, a] for a, b in zip(rows, shares, strict=True)]


def test_an_axis_of_one_rank_changes_nothing():
    loss = lambda params, batch: params["w"].sum()
    step = fds.compose(fds.context_parallel(fds.mesh(sp=1)["sp"]), fds.sgd(0.1))(loss)
    assert step.topology == () and step.everyone is None


def test_it_is_shown_by_describe():
    def body():
        place = Place(2, zero=1, joint=True)
        return str(place.step(fds.sgd(0.1)).describe())

    assert all("sequence over sp (2 ranks)" in text for text in fds.simulate(body, 2))


def test_what_is_not_an_axis_is_refused():
    with pytest.raises(ComposeError, match="not an axis"):
        fds.context_parallel("sp")  # pyright: ignore[reportArgumentType]
    (axis, _) = fds.simulate(lambda: fds.mesh(sp=2)["sp"], 2)
    with pytest.raises(MeshError):
        fds.context_parallel(axis)


def test_a_part_of_a_flattened_axis_is_refused():
    def body():
        mesh = fds.mesh(a=2, b=2)
        parts = fds.shard_optimizer(mesh["a"]), fds.context_parallel(mesh["a", "b"]), fds.sgd(0.1)
        with pytest.raises(ComposeError, match="two axes of one mesh"):
            fds.compose(*parts)(lambda params, batch: params["w"].sum())

    fds.simulate(body, 4)


def test_ranks_of_a_sequence_evaluate_together():
    place = Place(2)

    def body():
        step = place.step(fds.sgd(0.1))
        state, mine = step.init(model().init), [place.batch(step, call) for call in range(2)]
        index = fds.mesh(sp=2)["sp"].index
        with pytest.raises(BatchError, match="different numbers of batches"):
            fds.evaluate(step, state, mine[: 2 - index])

    fds.simulate(body, 2)


def test_activations_of_a_rank_are_its_share():
    def kept(place: Place) -> int:
        step = place.step(fds.sgd(0.1), microbatches=place.data)
        state = step.init(model().init, key=3)
        batch, addresses = place.batch(step, 0), dict[int, int]()

        def keep(x: Any) -> Any:
            addresses[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            step(state, batch)
        return sum(addresses.values())

    params = sum(x.nbytes for x in tree.leaves(model().init(fds.random.key(3))))
    one = kept(Place())
    assert one > ROWS * TOKENS * 16 * 8
    for method in ("ulysses", "ring"):
        for mine in fds.simulate(lambda method=method: kept(Place(2, method=method)), 2):
            assert mine - params <= 0.55 * (one - params)
