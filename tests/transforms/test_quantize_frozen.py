"""`quantize_frozen`: the oracle is the plain step on what the codes mean; the bound is a law of every element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fds
from fds import plans, tree
from fds.errors import FdsError, StateError
from tests.bits import assert_same_bits

ROWS = torch.linspace(-1, 1, 128).view(8, 16).sin(), torch.linspace(0, 1, 24).view(8, 3)
GROUP = 256
FROZEN = fds.freeze("0.*", "4.bias")
EIGHT = fds.quantize_frozen()


def layers() -> fds.Layers:
    """Rows of 16 (one group), 300 in two groups, the last of 44, 40 trained, 3 too short; a frozen bias."""
    parts = [nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 3)]
    return fds.Layers(parts, lambda out, y: (out - y).square().mean())


def params() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(3)
    shapes = tree.paths(LAYERS.init.trace())
    return {name: torch.randn(x.shape, generator=draws) for name, x in shapes.items()}


LAYERS = layers()
PARAMS = params()
HEAD = fds.freeze("0.weight", "2.weight")  # one group, and a last one that is not full


def trained(*more: Any, given: Any = PARAMS, eight: Any = EIGHT, steps: int = 2) -> tuple[Any, ...]:
    """Return a step, its last state, the parameters that it ends with and its metrics; `eight` None holds no codes."""
    parts = [one for one in (*more, HEAD, eight) if one is not None]
    step = fds.compose(*parts, fds.adamw(0.01))(LAYERS)
    state, found = step.init(given, key=0), []
    shard = step.shard
    for _ in range(steps):
        mine = ROWS if shard is None else [x.chunk(shard.axis.size)[shard.axis.index] for x in ROWS]
        state, metrics = step(state, mine)
        found.append(metrics)
    return step, state, step.params(state), found, step.evaluate(state, mine)["loss"]


def rounded() -> dict[str, Tensor]:
    """Return the parameters with those of `HEAD` as their codes say, from the definition."""
    out = dict(PARAMS)
    for name in ("0.weight", "2.weight"):
        scales = [piece.abs().amax(1, keepdim=True) * torch.tensor(1 / 127) for piece in PARAMS[name].split(GROUP, 1)]
        pieces = zip(PARAMS[name].split(GROUP, 1), scales, strict=True)
        out[name] = torch.cat([(x * (1 / s)).round().to(torch.int8) * s for x, s in pieces], 1)
    return out


PLACES = ["alone", 0, 1, 2, 3]
EXTRAS = {
    "plain": [],
    "accumulated": [fds.accumulate(2)],
    "in bfloat16": [fds.precision(torch.bfloat16)],
    "checkpointed": [fds.checkpoint_activations()],
}


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_a_step_is_the_plain_one_on_what_the_codes_mean(place, extra):
    want_of, runs = rounded(), []
    for given, eight in ((PARAMS, EIGHT), (want_of, None)):

        def run(given=given, eight=eight):
            more = [] if place == "alone" else [shard(place)]
            return trained(*more, *extra, given=given, eight=eight)[2:]

        runs.append([run()] if place == "alone" else fds.simulate(run, 2))
    for got, want in zip(*runs, strict=True):
        assert_same_bits(got, want)


def shard(stage: int) -> fds.Transform:
    more: dict[str, Any] = {"bucket_bytes": 4096, "persist_below": 1} if stage == 3 else {}
    return fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_is_off_by_1_of_254_of_the_largest_of_its_group_at_most(dtype):
    given = {name: x.to(dtype) for name, x in PARAMS.items()}
    step = fds.compose(HEAD, fds.quantize_frozen(), fds.sgd(0.1))(LAYERS)
    found = step.params(step.init(given))
    for name in ("0.weight", "2.weight"):
        pieces = zip(given[name].float().split(GROUP, 1), found[name].split(GROUP, 1), strict=True)
        for x, y in pieces:
            assert ((y - x).abs() <= x.abs().amax(1, keepdim=True) * (1 / 254 + 2**-22)).all()
        assert not torch.equal(found[name], given[name].float())


@pytest.mark.parametrize("place", PLACES)
def test_frozen_codes_are_never_touched_and_bytes_are_the_formulas(place):
    def run():
        more = [] if place == "alone" else [shard(place)]
        first = fds.compose(*more, HEAD, EIGHT, fds.adamw(0.01))(LAYERS)
        begun, (step, state, *_) = first.init(PARAMS, key=0), trained(*more)
        return kinds(begun), kinds(state), step.describe(state).num_bytes["params"], step.describe(state).sent

    def kinds(state):
        return [x for x in tree.leaves(state.params) if x.dtype is torch.uint8]

    ranks = [run()] if place == "alone" else fds.simulate(run, 2)
    for before, after, *_ in ranks:
        assert before and len(before) == len(after)
        for x, y in zip(before, after, strict=True):
            assert_same_bits(x, y)
    codes = 300 * (16 + 4) + 40 * (300 + 4 * 2)
    floats = 4 * (300 + 40 + 40 * 3 + 3)
    if place in ("alone", 0):
        assert ranks[0][2] == codes + floats
    else:  # each bucket is padded to whole slices
        assert codes + floats <= 2 * ranks[0][2] <= codes + floats + 1024
        if place == 3:  # each rank sends its slice twice a microbatch
            assert ranks[0][3]["gather"] == 2 * ranks[0][2]


def test_trees_recipes_and_callables_are_held_alike_and_written_into_a_module():
    step = fds.compose(HEAD, EIGHT, fds.sgd(0.1))(LAYERS)
    state = step.init(LAYERS.init, key=5)
    given = fds.compose(HEAD, fds.sgd(0.1))(LAYERS).init(LAYERS.init, key=5).params
    assert_same_bits(state.params, step.init(given, key=5).params)
    assert_same_bits(state.params, step.init(lambda key: given, key=5).params)
    kinds = [[(x.shape, x.dtype) for x in tree.leaves(one)] for one in (state, step.structure(given))]
    assert kinds[0] == kinds[1]
    module = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 3))
    step.into(module, state)
    assert_same_bits(dict(module.named_parameters()), step.params(state))


def test_short_rows_vectors_and_float64_stay_as_they_are():
    step = fds.compose(fds.freeze("a.*", "b.*", "c.*"), EIGHT, fds.sgd(0.1))
    given = {"a.weight": torch.randn(3, 15), "a.bias": torch.randn(64), "b.weight": torch.randn(2, 16).double()}
    given |= {"c.weight": torch.randn(2, 3, 16), "d.weight": torch.randn(())}
    made = step(lambda params, batch: params["d.weight"] * batch.sum())
    held = made.init(given).params
    assert {name for name, x in held.items() if x.dtype is torch.uint8} == {"c.weight"}
    assert held["c.weight"].shape == (2, 3, 20)
    for name in given.keys() - {"c.weight"}:
        assert_same_bits(held[name], given[name])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_save_is_loaded_bit_for_bit_on_another_number_of_ranks(tmp_path, ranks):
    def save():
        step, state, params, *_ = trained(shard(3))
        fds.save(tmp_path, state, step)
        return params

    def load():
        step = fds.compose(shard(3), HEAD, EIGHT, fds.adamw(0.01))(LAYERS)
        state, _ = fds.load(tmp_path, step, PARAMS)
        return step.params(state)

    want = fds.simulate(save, 2)[0]
    for got in fds.simulate(load, ranks):
        assert_same_bits(got, want)


def test_a_pipeline_on_this_process_or_on_ranks_holds_codes():
    pipe = lambda axis: fds.pipeline(plans.gpipe, axis, num_microbatches=2)
    want = trained(pipe(2), given=rounded(), eight=None)[2:]
    assert_same_bits(trained(pipe(2))[2:], want)
    for got in fds.simulate(lambda: trained(pipe(fds.mesh(pp=2)["pp"]))[2:], 2):
        assert_same_bits(got, want)


@pytest.mark.parametrize("given", [{"dtype": torch.float64}, {"dtype": 8}], ids=str)
def test_other_arguments_are_refused(given: dict[str, Any]):
    with pytest.raises(FdsError, match="quantize_frozen"):
        fds.quantize_frozen(**given)


def test_weights_that_are_not_finite_and_matrices_of_uint8_are_refused():
    for bad in (torch.nan, torch.inf):
        spoiled = {**PARAMS, "0.weight": PARAMS["0.weight"].clone().fill_(bad)}
        with pytest.raises(StateError, match="finite"):
            trained(given=spoiled)
    step = fds.compose(EIGHT, fds.sgd(0.1))(lambda params, batch: params["w"].sum())
    with pytest.raises(StateError, match="taken for codes"):
        step.init({"w": torch.ones(3), "table": torch.zeros(2, 20, dtype=torch.uint8)})


def test_views_see_numbers_wherever_they_stand_in_the_composition():
    seen = []

    @fds.step.transform
    def looking():
        return lambda step: fds.step.fill(step, view=lambda x, leaf, call: seen.append((leaf.name, x.dtype)) or x)

    trained(looking(), steps=1)
    assert {dtype for _, dtype in seen} == {torch.float32} and {name for name, _ in seen} == set(PARAMS)
