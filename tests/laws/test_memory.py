"""What fillers note: wherever a step runs, its slots become what they become in the plain step."""

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from tests import ranks
from tests.bits import assert_same_bits
from tests.laws.noting import MAXIMA, noting
from tests.laws.test_law_4_sharding import share
from tests.storage.topologies import Stages, Topology
from tests.tensor_axis import splitting

MICROBATCHES, ROWS = 4, 8
EPS = torch.finfo(torch.float64).eps


def curved(x):
    return torch.tanh(x + x.square())


def model():
    """Return layers, two of them tied, in different stages wherever there are two."""
    tied = lambda: fds.TiedLayerSpec("tied", nn.Linear, 4, 4, dtype=torch.float64)
    first, last = (fds.LayerSpec(nn.Linear, *size, dtype=torch.float64) for size in ((3, 4), (4, 2)))
    return fds.Layers([first, tied(), curved, nn.Dropout(0.2), tied(), last], nn.MSELoss())


def batch(call, bad=False):
    g = torch.Generator().manual_seed(call)
    x, y = (torch.randn(ROWS, n, generator=g, dtype=torch.float64) for n in (3, 2))
    return (x * torch.inf if bad else x), y


@attrs.frozen
class Shared(Topology):
    """Ranks that share the optimizer, and the microbatches."""

    def transforms(self):
        return [fds.accumulate(MICROBATCHES // self.ranks), self.shard()]


def made(place, *parts):
    return fds.compose(*(parts or [noting()]), fds.freeze("0.bias"), *place.transforms(), fds.adam(1e-2))(model())


def mine(step, rows):
    data = step.dimensions.data
    return rows if data is None else share(rows, data.index, data.size)


def after(step, state, calls):
    for call in calls:
        state, _ = step(state, mine(step, batch(call)))
    return state


def slots(place, *parts, calls=(0,)):
    def body():
        step = made(place, *parts)
        return after(step, step.init(step.loss.init, key=7), calls).slots

    found = place.run(body)
    for one in found[1:]:
        assert_same_bits(one, found[0])
    return found[0]


def assert_like(got, want, exact=MAXIMA):
    """Demand the same maxima bit for bit, and sums to the rounding of so many additions."""
    for name, slot in want.items():
        if name in exact:
            assert_same_bits(got[name], slot)
        for path, x in tree.paths(slot).items():
            y = tree.paths(got[name])[path]
            assert (y - x).abs().max() <= 1e3 * EPS * x.abs().max(), (name, path)


PLACES = {
    "one process": Shared(1, 0),
    **{f"stage {stage}": Shared(2, stage, 64) for stage in range(4)},
    **{f"replicas, stage {stage}": Shared(4, stage, 300, 2) for stage in (1, 3)},
    **{
        f"{name}, one process": Stages(2, schedule, alone=True)
        for name, schedule in {"gpipe": plans.gpipe, "zb_h1": plans.zb_h1, "interleaved": plans.interleaved(2)}.items()
    },
    **{
        f"{name}, {n} places": Stages(n, schedule, partition="uniform")
        for name, schedule, n in [
            ("gpipe", plans.gpipe, 2),
            ("1f1b", plans.one_f_one_b, 3),
            ("zb_h1", plans.zb_h1, 2),
            ("interleaved", plans.interleaved(2), 2),
        ]
    },
    **{
        f"{name} x data, stage {stage}": Stages(2, schedule, 2, stage)
        for name, schedule, stage in [
            ("gpipe", plans.gpipe, 0),
            ("1f1b", plans.one_f_one_b, 1),
            ("zb_h1", plans.zb_h1, 2),
            ("zb_h1", plans.zb_h1, 3),
            ("interleaved", plans.interleaved(2), 3),
        ]
    },
    "1f1b x replicas": Stages(2, plans.one_f_one_b, 1, 1, 2),
}
PLAIN = PLACES["one process"]


@pytest.fixture(scope="module")
def plain():
    """Return the slots of the plain step after one call, and after three."""
    return slots(PLAIN), slots(PLAIN, calls=range(3))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_plain_slots_are_those_of_a_loop_by_hand(microbatches):
    loss, (x, y) = model(), batch(0)
    step = fds.compose(noting(), fds.accumulate(microbatches), fds.sgd(0.1))(loss)
    state = step.init(loss.init, key=7)
    new, metrics = step(state, (x, y))
    seen = {name: p.detach().abs() for name, p in state.params.items()}
    assert_same_bits(new.slots["largest parameter"], {name: p.max() for name, p in seen.items()})
    want = {name: microbatches * p.sum() for name, p in seen.items()}
    for name, total in new.slots["all parameters"].items():
        assert (total - want[name]).abs() <= 100 * EPS * want[name]
    first = nn.functional.linear(x, state.params["0.weight"], state.params["0.bias"])
    assert (new.slots["largest activation"]["0"] - first.abs().max()).abs() <= 10 * EPS
    assert (new.slots["all activations"]["0"] - first.abs().sum()).abs() <= 1e3 * EPS
    assert new.slots["rows"] == ROWS and torch.equal(new.slots["largest input"], x.abs().amax(0))
    assert (new.slots["squares"].sqrt() - metrics["grad_norm"]).abs() <= 1e3 * EPS


@pytest.mark.parametrize("name", PLACES)
def test_notes_are_merged_alike_wherever_a_step_runs(name, plain):
    place = PLACES[name]
    assert_like(slots(place), plain[0])
    thrice = slots(place, calls=range(3))
    assert_like(thrice, plain[1], exact=["largest input", "rows", "runs", "steps"])
    assert (thrice["rows"], thrice["runs"], thrice["steps"]) == (3 * ROWS, 3 * len(model()) * MICROBATCHES, 3)


CHECKPOINTED = ["one process", "stage 3", "zb_h1, 2 places", "1f1b x data, stage 1"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_layers_that_run_again_in_backward_are_noted_once(name, inside):
    again = fds.checkpoint_activations(
        policy=[torch.ops.aten.add.Tensor, torch.ops.aten.maximum.default, torch.ops.aten.clone.default]
    )

    def body(*parts):
        step = made(PLACES[name], *parts)
        state = after(step, step.init(step.loss.init, key=7), range(2))
        return state.slots, state.params, state.opt

    got = PLACES[name].run(lambda: body(*([again, noting()] if inside else [noting(), again])))
    assert_same_bits(got, PLACES[name].run(body))


@pytest.mark.parametrize(("stages", "data", "zero"), [(1, 1, 0), (1, 2, 3), (2, 1, 0)])
def test_ranks_of_a_tensor_axis_add_what_is_split_and_one_of_them_the_rest(stages, data, zero):
    def body(*sizes):
        place = splitting.Place(*sizes)
        step = place.step(noting(width=5), optimizer=fds.adam(1e-2))
        return step(step.init(splitting.model(None).init, key=3), splitting.share(step, 0))[0].slots

    want = body()
    for one in fds.simulate(lambda: body(2, data, stages, zero), 2 * data * stages):
        assert_like(one, want, exact=["largest parameter", "largest input", "rows"])


RESUMED = [
    ("1f1b x data, stage 1", "stage 3"),
    ("stage 3", "interleaved, 2 places"),
    ("zb_h1, 2 places", "one process"),
    ("one process", "replicas, stage 1"),
    ("gpipe x data, stage 0", "gpipe x data, stage 0"),
]


@pytest.mark.parametrize(("first", "then"), RESUMED)
def test_a_run_is_resumed_anywhere(first, then, tmp_path):
    def begin():
        step = made(PLACES[first])
        state = after(step, step.init(step.loss.init, key=7), range(2))
        fds.save(tmp_path, state, step)
        return state.slots, after(step, state, [2])

    def resume():
        step = made(PLACES[then])
        state, _ = fds.load(tmp_path, step, step.loss.init)
        return state.slots, after(step, state, [2])

    begun, resumed = PLACES[first].run(begin), PLACES[then].run(resume)
    for slots_, new in resumed:
        assert_same_bits(slots_, begun[0][0])
        assert_like(new.slots, begun[0][1].slots, exact=["largest input", "rows", "runs", "steps"])
    if first == then:
        assert_same_bits([new for _, new in resumed], [new for _, new in begun])


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["one process", "stage 2", "zb_h1 x data, stage 3"])
@pytest.mark.parametrize("scale", [fds.loss_scale, fds.skip_nonfinite])
def test_a_skipped_step_leaves_their_bits(name, scale):
    def body():
        step = made(PLACES[name], noting(), scale())
        state = after(step, step.init(step.loss.init, key=7), [0])
        skipped, metrics = step(state, mine(step, batch(1, bad=True)))
        assert metrics["skipped"]
        assert_same_bits({**skipped.slots, "loss_scale": {}}, {**state.slots, "loss_scale": {}})
        return after(step, skipped, [2]).slots

    for one in PLACES[name].run(body):
        assert one["steps"] == 2 and one["rows"] == 2 * ROWS


@pytest.mark.parametrize("name", ["one process", "stage 3", "1f1b x data, stage 1"])
def test_a_donated_step_notes_what_a_pure_one_does_and_an_evaluation_nothing(name):
    def body(*more):
        step = made(PLACES[name], noting(), *more)
        state = after(step, step.init(step.loss.init, key=7), [0])
        before = tree.map(torch.clone, state.slots)
        rows = mine(step, batch(1))
        step.evaluate(state, rows), fds.evaluate(step, state, [rows, rows])
        step.describe(state, rows)
        new = after(step, state, [1])
        if not more:
            assert_same_bits(state.slots, before)
        return new

    assert_same_bits(PLACES[name].run(lambda: body(fds.donate())), PLACES[name].run(body))


def real(name):
    step = made(PLACES[name])
    return after(step, step.init(step.loss.init, key=7), range(2)).slots


@pytest.mark.parametrize("name", ["stage 3", "zb_h1, 2 places"])
def test_real_ranks_note_what_simulated_ones_do(name):
    assert_same_bits(ranks.run(real, name, world_size=2), PLACES[name].run(lambda: real(name)))
