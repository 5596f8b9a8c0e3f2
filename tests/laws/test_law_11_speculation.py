"""Law 11 of speculation: what is updated in backward, and again where the step decides otherwise, changes no bit."""

import functools
import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fds
from fds import tree
from fds.errors import ComposeError, DonatedStateError
from fds.step import Gradients, fill, transform
from fds.step.residency.early import Early
from tests.bits import assert_same_bits, snapshot
from tests.laws import problems as held
from tests.laws.mapped import Mapped, mapped
from tests.laws.places import PLACES, Place
from tests.laws.problems import compositions, make, means, optimizers, problems
from tests.laws.test_gradients_elsewhere import Failing
from tests.laws.test_law_11_offload import offload, placements
from tests.laws.test_law_11_on_the_host import Hosted, a_gpu, loss as gpu_loss, on_cpu, problem, trained
from tests.laws.test_law_11_residency import ALL, bad
from tests.pretending import DEVICE
from tests.storage.topologies import Topology

pytestmark = pytest.mark.filterwarnings("ignore:.*there are no averages")  # kinds are drawn

MAX_NORM = 0.5
SKIPS = {"loss_scale", "static_loss_scale", "skip_nonfinite"}
EVERYTHING = {"moments": "disk", "masters": "small", "gradients": "disk", "averages": "host"}, 1.0


@transform
def speculating(residency):
    return lambda step: fill(step, place={"residency": residency, "speculate": True})


def clipped(metrics):
    """Say whether the clip of these tests changes gradients of this norm, as its formula does."""
    return float((metrics["grad_norm"] + 1e-6) / MAX_NORM) > 1


def same_run(plain, placed, problem, batches, *, donated=False, clips=True):
    """Train beside each other; check every state, also those that are held, every metric, and what is rolled back."""
    a, b = plain.init(problem.params, key=3), placed.init(problem.params, key=3)
    kept, rolled = [], []
    for batch in batches:
        kept += [] if donated else [(b, snapshot(b))]
        (a, said), (b, told) = plain(a, batch), placed(b, batch)
        rolled.append(bool(told.pop("rolled_back")))
        assert_same_bits((b, told), (a, said))
        assert rolled[-1] == (bool(said.get("skipped", False)) or (clips and clipped(said)))
    for state, before in kept:
        assert_same_bits(state, before)
    return b, rolled


def elsewhere(drawn):
    """Say whether any pattern of drawn arguments is of another medium than the device."""
    media = [x for where in drawn[0].values() for x in (where.values() if isinstance(where, dict) else [where])]
    return set(media) != {"device"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples * 3 // 4)
@given(
    st.data(),
    problems(),
    optimizers(),
    compositions(without=("offload", "offload_to_disk", "clip_value")),
    st.booleans(),
)
def test_any_placement_of_any_leaves_changes_no_bit(tmp_path, data, problem, optimizer, names, donated):
    drawn = data.draw(placements(sorted(tree.paths(problem.params))).filter(elsewhere))
    plain = make(names, optimizer, problem)
    parts = [offload(drawn, tmp_path, speculate=True), *[fds.donate()] * donated]
    placed = make(names, optimizer, problem, *parts)
    wrong = [bad(problem.batch)] if SKIPS & set(names) and problem.name not in ("tied_layers", "tied_module") else []
    batches = [problem.batch, *wrong, problem.batch]
    same_run(plain, placed, problem, batches, donated=donated, clips="clip_norm" in names)


def ranks(tmp_path, problem, place, placing, optimizer, donated, *parts):
    """Train beside the plain step on the ranks of a place; return of each what was rolled back."""

    def body():
        some = [*place.transforms(), *parts, fds.clip_by_global_norm(MAX_NORM), fds.ema(0.9), optimizer()]
        own = [placing(), *[fds.donate()] * donated]
        plain, placed = fds.compose(*some)(problem.loss), fds.compose(*own, *some)(problem.loss)
        batch = place.batch(problem, plain)
        small = tree.map(lambda x: x * 1e-3 if x.is_floating_point() else x, batch)
        state, rolled = same_run(plain, placed, problem, [batch, bad(batch), small, batch], donated=donated)
        assert_same_bits(placed.evaluate(state, batch), plain.evaluate(state, batch))
        return rolled

    found = place.sharded.run(body)
    assert all(one == found[0] for one in found)
    return found[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples * 3 // 8)
@given(st.sampled_from([held.layers, held.records]), PLACES, placements().filter(elsewhere), st.booleans(), st.data())
def test_on_ranks_too(tmp_path, kind, place, drawn, donated, data):
    problem = kind(data.draw(st.integers(0, 99)), torch.float32, 0.3, False)
    place = Place(place.sharded, None, place.microbatches)
    optimizer = ALL[data.draw(st.sampled_from(sorted(held.OPTIMIZERS.keys() - {"lamb"})))]
    placing = lambda: offload(drawn, tmp_path, speculate=True)
    ranks(tmp_path, problem, place, placing, optimizer, donated, fds.skip_nonfinite())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("low", [False, True], ids=["float32", "float16"])
def test_everything_elsewhere_at_every_stage(tmp_path, stage, low):
    place, problem = Place(Topology(2, stage, 64), None, 2), held.layers(7, torch.float32, 0.0, False)
    parts = [fds.precision(torch.float16), fds.loss_scale(2.0**10)] if low else [fds.skip_nonfinite()]
    placing = lambda: offload(EVERYTHING, tmp_path, speculate=True)
    optimizer = lambda: fds.by_name({"1.*": fds.lamb(1e-3), "*": fds.lion(1e-3)})  # lamb asks other ranks
    rolled = ranks(tmp_path, problem, place, placing, optimizer, stage % 2 == 1, *parts)
    assert rolled[1] and len(set(rolled)) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("where", ["files", "host"])
def test_on_the_host_too_where_the_step_runs_on_a_gpu(tmp_path, where, donated):
    """Masters on the device, moments in memory of the host, which the update writes into, or in files."""
    parts, batches = [fds.skip_nonfinite(), fds.ema(0.9), fds.clip_by_global_norm(1e-2)], [1.0, torch.inf, 1e-4, 2.0]
    with a_gpu():
        residency = Hosted(tmp_path, where, size=2, some=lambda leaf: "0.bias" not in leaf.names)
        _, want = trained([mapped(residency), *parts], fds.adamw(0.01), batches, donated)
        state, got = trained([speculating(residency), *parts], fds.adamw(0.01), batches, donated)
        assert {x.device.type for x in tree.leaves(state.opt)} == {"cpu", "cuda"}
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("where", ["files", "host"])
def test_one_step_runs_on_a_gpu_and_on_the_cpu_by_turns(tmp_path, where, donated):
    residency = Hosted(tmp_path, where, size=2, some=lambda leaf: "0.bias" not in leaf.names)
    residency.read = functools.partial(Mapped.read, residency)
    parts = [speculating(residency), fds.clip_by_global_norm(1e-2), *[fds.donate()] * donated]
    step, (params, batch) = fds.compose(*parts, fds.adamw(0.01))(gpu_loss), problem()

    def run(device):
        state = step.init(tree.map(lambda x: x.to(device), params), key=1)
        for size in (1.0, 1e-4):
            state, _ = step(state, batch.to(device) * size)
        assert {x.device.type for x in tree.leaves(state.params)} == {torch.device(device).type}
        return on_cpu(state)

    want = run("cpu")
    with a_gpu():
        on_gpu = run(DEVICE)
    assert_same_bits(run("cpu"), want)
    with a_gpu():
        assert_same_bits(run(DEVICE), on_gpu)


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_weights_of_means_are_known_before_the_last_backward(tmp_path, stage):
    """Those of all ranks and microbatches, which differ; nothing is taken back for them."""
    place = Place(Topology(1 if stage is None else 2, stage or 0, 64), None, 2)
    problem = means(held.tied_layers(7, torch.float32, 0.0, False), lambda x: fds.Mean(x.total, x.weight * 0.3))

    def body():
        some = [fds.accumulate(2), *([] if stage is None else [place.sharded.shard()]), fds.adamw(0.01)]
        placing = offload(({"moments": "disk", "masters": "disk"}, 1.0), tmp_path, speculate=True)
        plain, placed = fds.compose(*some)(problem.loss), fds.compose(placing, *some)(problem.loss)
        _, rolled = same_run(plain, placed, problem, [place.batch(problem, plain)] * 3, clips=False)
        assert rolled == [False] * 3

    place.sharded.run(body)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
def test_a_step_that_is_called_again_does_the_same(tmp_path, dtype, donated):
    problem = held.layers(7, dtype, 0.3, False)
    parts = [fds.clip_by_global_norm(MAX_NORM), fds.accumulate(3), *[fds.donate()] * donated, fds.adamw(0.01)]
    residency = Mapped(tmp_path, ("opt", "gradients"), 2, lambda leaf: leaf.index % 3 != 0)
    plain, step = fds.compose(*parts)(problem.loss), fds.compose(speculating(residency), *parts)(problem.loss)
    same_run(plain, step, problem, [problem.batch] * 3, donated=donated)
    state, before = step.init(problem.params), torch.get_rng_state()
    first, told = step(snapshot(state), problem.batch)
    want = snapshot(state)
    assert told["rolled_back"]
    assert_same_bits(step(state, problem.batch), (first, told))
    assert torch.equal(torch.get_rng_state(), before)
    if donated:
        with pytest.raises(DonatedStateError):
            step(state, problem.batch)
    else:
        assert_same_bits(state, want)


class Noted(torch.autograd.Function):
    """Note when the backward of a parameter of the first layer begins, which is the last one; raise in the n-th."""

    @staticmethod
    def forward(ctx, x, log, raises):
        ctx.log, ctx.raises = log, raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("last backward")
        ctx.raises[0] -= 1
        if ctx.raises[0] == 0:
            raise OSError("the disk is full")
        return grad, None, None


def watched(tmp_path, *parts, shard=(), kinds=("opt", "params")):
    """Return a plain step, one that speculates, a problem, and what raises in its last backward."""
    problem, raises = held.layers(7, torch.float32, 0.0, False), [0]
    residency = Failing(tmp_path, kinds)
    residency.chunks = lambda structure: [[i] for i in range(len(structure.segments))]

    def loss(params, batch):
        paths = tree.paths(params)
        first = {
            name: Noted.apply(x, residency.log, raises) if name.startswith("0.") else x for name, x in paths.items()
        }
        return problem.loss(tree.flatten(params)[1](list(first.values())), batch)

    some = [*shard, *parts, fds.accumulate(2), fds.sgd(0.1, momentum=0.9)]
    return fds.compose(*some)(loss), fds.compose(speculating(residency), *some)(loss), problem, residency, raises


def test_updates_begin_before_backward_ends_and_again_after_the_decision(tmp_path):
    _, step, problem, residency, _ = watched(tmp_path, fds.clip_by_global_norm(MAX_NORM))
    state = step.init(problem.params)
    slices = len(tree.leaves(state.params))
    for size, rolls in ((1.0, True), (1e-6, False)):
        residency.log.clear()
        _, told = step(state, tree.map(lambda x, size=size: x * size, problem.batch))
        log = residency.log
        assert bool(told["rolled_back"]) is rolls
        end = len(log) - log[::-1].index("last backward")  # of the last microbatch
        begun = [i for i, word in enumerate(log) if word == "write"]
        assert len(begun) == slices * (2 if rolls else 1)
        early = [i for i in begun if i < end]
        assert len(early) >= slices - 4 and "has written" in log[: early[-1]]  # all but the first layer's, and one more
        assert log[0] != "write"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("fails", [("loss", 0), ("read", 3), ("write", 1), ("write", -1)], ids=str)
def test_an_error_before_the_decision_leaves_the_state_as_it_was(tmp_path, fails, stage, donated):
    def body():
        shard = [] if stage is None else [Topology(2, stage, 64).shard()]
        plain, step, problem, residency, raises = watched(tmp_path, *[fds.donate()] * donated, shard=shard)
        small = tree.map(lambda x: x[:4], problem.batch)
        state, _ = step(step.init(problem.params), small)
        before = snapshot(state)
        chunks = len(tree.leaves(state.params)) if stage is None else len(state.params.buckets)
        raises[0] = 4 * (fails[0] == "loss")  # of two parameters, in the second microbatch
        residency.fails = fails[0], fails[1] % chunks
        residency.log.clear()
        with pytest.raises(OSError, match="the disk is full"):
            step(state, small)
        raises[0], residency.fails = 0, ("", 0)
        assert fails[0] == "read" or "write" in residency.log
        assert_same_bits(state, before)
        want, _ = plain(snapshot(before), small)
        assert_same_bits(step(state, small)[0], want)

    body() if stage is None else fds.simulate(body, 2)


def test_the_memory_of_states_that_nobody_holds_is_used_again(tmp_path):
    problem, residency = held.layers(5, torch.float32, 0.0, False), Mapped(tmp_path)
    step = fds.compose(speculating(residency), fds.donate(), fds.ema(0.9), fds.adamw(0.01))(problem.loss)
    state = step.init(problem.params)
    places = []
    for _ in range(6):
        state, _ = step(state, problem.batch)
        places.append({x.data_ptr() for x in tree.leaves((state.params, state.opt))})
        averages = [x.data_ptr() for x in tree.leaves(state.slots)]
    assert places[1] == places[3] == places[5] and places[2] == places[4] and places[4].isdisjoint(places[5])
    assert len(residency.made) == 3 * len(tree.leaves(state.opt))  # of the first state, and of two by turns
    told = step.describe(state)
    opt = told.num_bytes["opt"]
    assert told.num_bytes["ahead"] == told.num_bytes["params"] + opt and told.lives["ahead"] == "device, files"
    state, _ = step(state, problem.batch)
    assert averages == [x.data_ptr() for x in tree.leaves(state.slots)]  # which are written over


def of_the_norm(change):
    """Return the transform of a map that says that it needs the norm alone, and changes the leaves all the same."""

    def map_of_all(grads, call):
        return Gradients(change(grads.leaves), grads.scale)

    map_of_all.needs = "norm"
    return transform(lambda: lambda step: fill(step, condition=map_of_all))()


@pytest.mark.parametrize("change", [lambda some: [x * 2 for x in some], lambda some: [x.mul_(2) for x in some]])
def test_gradients_that_a_map_of_the_norm_changed_are_those_of_the_update(tmp_path, change):
    problem, parts = held.layers(5, torch.float32, 0.0, False), [of_the_norm(change), fds.sgd(0.1, momentum=0.9)]
    plain = fds.compose(*parts)(problem.loss)
    step = fds.compose(speculating(Mapped(tmp_path)), *parts)(problem.loss)
    want, _ = plain(plain.init(problem.params), problem.batch)
    state, told = step(step.init(problem.params), problem.batch)
    assert told["rolled_back"]
    assert_same_bits(state, want)


def whole_sum(grads, call):
    return Gradients([x * 2 for x in grads.leaves], grads.scale)


@transform
def doubled():
    return lambda step: fill(step, condition=whole_sum)


REFUSED = {
    "a map that changes gradients": (lambda: [fds.clip_by_value(1.0), fds.adamw()], "gradients are changed"),
    "a map of one's own": (lambda: [doubled(), fds.adamw()], "whole_sum"),
    "a pipeline": (lambda: [fds.pipeline(fds.plans.gpipe, 2, num_microbatches=2), fds.adamw()], "stages"),
    "an optimizer that is given all slices": (
        lambda: [fds.Optimizer(lambda segments, *, params: {}, lambda grads, opt, params, **more: (params, opt))],
        "all slices at once",
    ),
}


@pytest.mark.parametrize(("parts", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_updated_ahead_is_refused_by_name(parts, text):
    problem = held.layers(5, torch.float32, 0.0, False)
    with pytest.raises(ComposeError, match=text) as caught:
        fds.compose(fds.offload("host", speculate=True), *parts())(problem.loss)
    assert caught.value.where == "station 'place', speculate"


def test_an_optimizer_that_asks_other_ranks_is_refused(tmp_path):
    def body():
        shard, problem = Topology(2, 1).shard(), held.layers(5, torch.float32, 0.0, False)
        with pytest.raises(ComposeError, match="asks other ranks"):
            fds.compose(fds.offload("host", speculate=True), shard, fds.lamb())(problem.loss)

    fds.simulate(body, 2)


def test_a_call_that_fails_leaves_nothing_behind(tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise OSError("in backward")

    loss = lambda params, batch: Fails.apply(batch @ params["w"]).square().mean()
    step = fds.compose(fds.offload("host", gradients="device", speculate=True), fds.adamw(0.01))(loss)
    state, batch = step.init({"w": torch.ones(4, 1)}), torch.ones(2, 4)
    gc.collect()
    gc.disable()
    try:
        before = [x for x in gc.get_objects() if isinstance(x, Early)]  # of tests whose errors are still held
        for _ in range(2):
            with pytest.raises(OSError, match="in backward"):
                step(state, batch)
        after = [x for x in gc.get_objects() if isinstance(x, Early)]
        assert set(map(id, after)) <= set(map(id, before))
    finally:
        gc.enable()
