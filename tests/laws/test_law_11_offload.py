"""Law 11 of `offload`: any placement of any leaves, on any medium, is the plain step bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fds
from fds import tree
from fds.layout import Sharded
from fds.media import medium_of
from tests.bits import assert_same_bits
from tests.laws import problems as held
from tests.laws.places import PLACES, Place
from tests.laws.problems import make, optimizers, problems
from tests.laws.test_law_11_residency import ALL, PAIRS, SKIPPING, UNPLACED, bad, same_run
from tests.storage.topologies import Topology

pytestmark = pytest.mark.filterwarnings("ignore:.*there are no averages")  # kinds are drawn

KINDS = ("moments", "masters", "gradients", "averages")


@st.composite
def placements(draw, names=()):
    """Draw the arguments of `offload`, as a function of a directory: media are words, `disk` and `small` are disks."""
    media = st.sampled_from(["device", "host", "disk", "small"])
    patterns = st.sampled_from([*names, "*"]) if names else st.just("*")
    where = media | st.dictionaries(patterns, media, min_size=1, max_size=3)
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
    return {kind: draw(where) for kind in kinds}, draw(st.sampled_from([1.0, 1.0, 0.5, 0.3, 0.0]))


def offload(drawn, directory, **more):
    """Return the transform of drawn arguments; buffers of a `small` disk take one slice."""
    disks = {"disk": fds.disk(directory), "small": fds.disk(directory, buffer_bytes=4096)}
    medium = lambda where: disks.get(where, where)
    where, ratio = drawn
    told = {k: tree.map(medium, x) if isinstance(x, dict) else medium(x) for k, x in where.items()}
    return fds.offload(**told, ratio=ratio, **more)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples * 3 // 4)
@given(st.data(), problems(), optimizers(), UNPLACED, st.booleans())
def test_any_placement_of_any_leaves_changes_no_bit(tmp_path, data, problem, optimizer, names, donated):
    drawn = data.draw(placements(sorted(tree.paths(problem.params))))
    plain = make(names, optimizer, problem)
    placed = make(names, optimizer, problem, offload(drawn, tmp_path), *[fds.donate()] * donated)
    same_run(plain, placed, problem, [problem.batch] * 3, donated=donated)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples * 3 // 8)
@given(PAIRS, PLACES, placements(), st.booleans(), st.integers(0, 99))
def test_on_ranks_and_in_pipelines_too(tmp_path, pair, place, drawn, donated, seed):
    kind, optimizer = pair
    problem = kind(seed, torch.float32, 0.3, False)
    ranks(tmp_path, problem, optimizer, place.fit(problem), drawn, donated)


def ranks(tmp_path, problem, optimizer, place, drawn, donated):
    """Train beside the plain step on the ranks of a place; return whether each holds slices."""

    def body():
        parts = [*place.transforms(), *SKIPPING[:-1], ALL[optimizer]()]
        placing = [offload(drawn, tmp_path), *[fds.donate()] * donated]
        plain, placed = fds.compose(*parts)(problem.loss), fds.compose(*placing, *parts)(problem.loss)
        batch = place.batch(problem, plain)
        _, state = same_run(plain, placed, problem, [batch, bad(batch), batch], donated=donated)
        assert_same_bits(placed.evaluate(state, batch), plain.evaluate(state, batch))
        assert_same_bits(placed.params(state), plain.params(state))
        return isinstance(state.params, Sharded)

    where = place.sharded if place.piped is None else place.piped
    return where.run(body)


EVERYTHING = {"moments": "disk", "masters": "small", "gradients": "disk", "averages": "host"}, 1.0


@pytest.mark.parametrize("stage", range(4))
def test_everything_elsewhere_at_every_stage(tmp_path, stage):
    place, problem = Place(Topology(2, stage, 64), None, 2), held.layers(7, torch.float32, 0.0, False)
    sharded = ranks(tmp_path, problem, "muon", place, EVERYTHING, stage % 2 == 1)
    assert sharded == [stage > 0] * 2


@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
def test_leaves_are_where_they_were_told_to_be(tmp_path, donated):
    problem, disk = held.layers(5, torch.float32, 0.0, False), fds.disk(tmp_path)
    moments = {"0.*": disk, "1.norm.*": "device", "*.weight": "host"}
    more = [fds.donate()] * donated
    step = fds.compose(fds.offload(moments, masters="host", averages=disk), fds.ema(0.9), *more, fds.adamw(0.01))(
        problem.loss
    )
    state = step.init(problem.params)
    for _ in range(3):
        state, _ = step(state, problem.batch)
        names = lambda held: {path: getattr(medium_of(x), "name", "device") for path, x in tree.paths(held).items()}
        told = lambda path: next(
            (m for p, m in [("0.", "disk"), ("1.norm.", "device")] if path.startswith(p)),
            "host" if path.endswith(".weight") else "device",
        )
        for slot in ("exp_avg", "exp_avg_sq"):
            found = names(state.opt[slot])
            assert found == {path: told(path) for path in found} and set(found.values()) == {"disk", "host", "device"}
        assert set(names(state.params).values()) == {"host"}
        assert set(names(state.slots["ema"]).values()) == {"disk"}


@pytest.mark.parametrize(("ratio", "stay"), [(1.0, 0), (0.7, 2), (0.3, 6), (0.1, 8), (0.0, 9)])
def test_the_last_part_of_the_slices_leaves(ratio, stay):
    """As DeepSpeed: sub-group i of n leaves where i >= int((1 - ratio) * n)."""
    params = {str(i): torch.randn(3) for i in range(9)}
    loss = lambda params, batch: sum(x.square().sum() for x in params.values()) * batch.sum()
    step = fds.compose(fds.offload("host", ratio=ratio), fds.sgd(0.1, momentum=0.9))(loss)
    (momentum,) = step.init(params).opt.values()
    assert [medium_of(x) is None for x in momentum.values()] == [i < stay for i in range(9)]
