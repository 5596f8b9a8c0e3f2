"""What goes wrong in a pipeline: one clear error on every rank, with stage and microbatch; the old state is good."""

import functools
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import errors, plans
from fds.errors import BatchError, ComposeError, FdsError, LossError, PlanError, RankError
from fds.step import Transform, Transport, fill, transform
from tests.bits import assert_same_bits
from tests.pairs import covering

WIDTH, ROWS, MICROBATCHES = 4, 8, 4
LAYERS = 6


@attrs.define(eq=False)
class Mine:
    """Where a loss blows up: at the given visit of a place, counted from when it was armed."""

    place: tuple = ()  # (layer or "criterion", "forward", "backward" or "weight")
    microbatch: int = 0
    error: BaseException | None = None
    visits: int = 0

    def arm(self, place: tuple, microbatch: int, error: BaseException) -> None:
        self.place, self.microbatch, self.error, self.visits = place, microbatch, error, 0

    def disarm(self) -> None:
        self.place = ()

    def __deepcopy__(self, memo) -> "Mine":  # modules are copied, and every copy has the same mine
        return self

    def visit(self, *place) -> None:
        if place == self.place:
            self.visits += 1
            if self.visits == self.microbatch + 1:
                assert self.error is not None
                raise self.error


class Fuse(torch.autograd.Function):
    """The same tensor, whose backward may blow up."""

    @staticmethod
    def forward(ctx, x, visit):
        ctx.visit = visit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.visit()
        return grad, None


class Mined(nn.Module):
    def __init__(self, mine: Mine, layer: int):
        super().__init__()
        self.linear, self.mine, self.layer = nn.Linear(WIDTH, WIDTH), mine, layer

    def forward(self, x):
        self.mine.visit(self.layer, "forward")
        later = lambda kind: functools.partial(self.mine.visit, self.layer, kind)
        weight = Fuse.apply(self.linear.weight, later("weight"))
        return Fuse.apply(F.linear(x, weight, self.linear.bias), later("backward")).tanh()


def mined(mine: Mine) -> fds.Layers:
    def criterion(out, y):
        mine.visit("criterion", "forward")
        return Fuse.apply(F.mse_loss(out, y), functools.partial(mine.visit, "criterion", "backward"))

    return fds.Layers([fds.LayerSpec(Mined, mine, i) for i in range(LAYERS)], criterion)


def batch(seed: int, rows: int = ROWS, width: int = WIDTH):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=g), torch.randn(rows, WIDTH, generator=g)


def ended(body) -> BaseException | None:
    """Return what a call raised, so that every rank can show its own error."""
    try:
        body()
    except BaseException as error:
        return error
    return None


def stumble(axis, schedule, armed, *, good: int, transforms=(), fails: bool = True, rows=lambda batch: batch):
    """Step `good` times, once blow up, step on; return what was raised and where that led."""
    mine = Mine()
    loss = mined(mine)
    stages = len(
        plans.Plan.of(
            schedule(2 if axis is None else axis if isinstance(axis, int) else axis.size, MICROBATCHES)
        ).placement
    )
    partition = [LAYERS * i // stages for i in range(stages + 1)]
    pipeline = fds.pipeline(schedule, axis, num_microbatches=MICROBATCHES, partition=partition)
    step = fds.compose(pipeline, *transforms, fds.clip_by_global_norm(0.5), fds.adamw(0.01))(loss)
    state = step.init(loss.init, key=1)
    for i in range(good):
        state, _ = step(state, rows(batch(i)))
    error = None
    if armed is not None:
        if fails:
            mine.arm(*armed)
        error = ended(lambda: step(state, rows(batch(good))))
        mine.disarm()
    for i in range(good, good + 2):
        state, metrics = step(state, rows(batch(i)))
    return error, step.params(state), metrics


def boom() -> ZeroDivisionError:
    return ZeroDivisionError("boom")


WORDS = {"forward": "forward", "backward": "backward", "weight": "backward"}
PLACES = [(layer, kind) for layer in (0, 2, 5) for kind in WORDS]
PLACES += [("criterion", "forward"), ("criterion", "backward")]
SCHEDULES = {
    "gpipe": (plans.gpipe, 3),
    "one_f_one_b": (plans.one_f_one_b, 3),
    "zb_h1": (plans.zb_h1, 3),
    "interleaved": (plans.interleaved(3), 2),
    "zb_v": (plans.zb_v, 2),
    "dualpipe_v": (plans.dualpipe_v, 2),
}


def refused(error, schedule, ranks, place, microbatch) -> None:
    """Hold that this is the error of a stage that blew up there."""
    stages = len(plans.Plan.of(schedule(ranks, MICROBATCHES)).placement)
    layer = LAYERS - 1 if place[0] == "criterion" else place[0]
    assert isinstance(error, RankError), repr(error)
    assert error.what == "a stage of the pipeline failed"
    assert f"stage {layer * stages // LAYERS}, {WORDS[place[1]]}" in error.where, error
    assert error.where.endswith(f"of microbatch {microbatch}"), error
    assert "ZeroDivisionError: boom" in error.got


@functools.cache
def untroubled(name: str, good: int):
    schedule, size = SCHEDULES[name]
    return fds.simulate(lambda: stumble(fds.mesh(pp=size)["pp"], schedule, None, good=good), size)[0]


def turn(cases: tuple, place: tuple, other: int):
    """Return one of the cases: all schedules or stages, met with all places, meet all of them, and so do all places."""
    return cases[(PLACES.index(place) + other) % len(cases)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "layer", "kind"), covering((name, *place) for name in SCHEDULES for place in PLACES))
def test_what_a_stage_raises_is_raised_on_every_rank_and_the_old_state_is_good(name, layer, kind):
    (schedule, size), place = SCHEDULES[name], (layer, kind)
    good, microbatch = turn(((0, 0), (1, 2), (1, 3)), place, list(SCHEDULES).index(name))
    armed, want = (place, microbatch, boom()), untroubled(name, good)
    found = fds.simulate(lambda: stumble(fds.mesh(pp=size)["pp"], schedule, armed, good=good), size)
    assert len({str(error) for error, *_ in found}) == 1, found
    for error, params, metrics in found:
        refused(error, schedule, size, place, microbatch)
        assert_same_bits((params, metrics), want[1:])


def test_of_two_failures_the_earlier_one_is_raised_on_every_rank():
    armed = ((0, "forward"), 3, boom()), ((5, "forward"), 0, boom())

    def run():
        axis = fds.mesh(pp=2)["pp"]
        return stumble(axis, plans.gpipe, armed[axis.index], good=0)

    for error, *_ in fds.simulate(run, 2):
        refused(error, plans.gpipe, 2, (5, "forward"), 0)


@functools.cache
def untroubled_alone(schedule, size: int, good: int):
    return list(stumble(size, schedule, None, good=good)[1:])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "layer", "kind"), covering((name, *place) for name in ("one_f_one_b", "zb_h1", "zb_v") for place in PLACES)
)
def test_one_process_raises_the_error_itself_with_a_note_of_stage_and_microbatch(name, layer, kind):
    (schedule, size), place = SCHEDULES[name], (layer, kind)
    stages = len(plans.Plan.of(schedule(size, MICROBATCHES)).placement)
    layer = LAYERS - 1 if place[0] == "criterion" else place[0]
    for good, microbatch in ((0, 0), (1, 2)):
        error, *found = stumble(size, schedule, (place, microbatch, boom()), good=good)
        assert type(error) is ZeroDivisionError
        *of_layer, note = error.__notes__
        assert of_layer == ([f"in layers[{layer}]"] if place[1] == "forward" and place[0] != "criterion" else [])
        assert f"stage {layer * stages // LAYERS}, {WORDS[place[1]]}" in note
        assert note.endswith(f"of microbatch {microbatch}")
        assert_same_bits(found, untroubled_alone(schedule, size, good))


def two_by_two(schedule, armed, good, stage, *, at: int = 1, more=(), alone: bool = False):
    """Pipelines of two ranks, or `alone` of one, for two halves of the batch; only that of coordinate `at` blows up."""
    mesh = fds.mesh(pp=1 if alone else 2, dp=2)
    data = mesh["dp"]
    rows = lambda batch: fds.tree.map(lambda x: x.repeat(2, 1).roll(data.index * 3, 0)[:ROWS], batch)
    shard = fds.shard_optimizer(data, stage=stage, bucket_bytes=64)
    return stumble(
        2 if alone else mesh["pp"],
        schedule,
        armed,
        good=good,
        transforms=(shard, *more),
        fails=data.index == at,
        rows=rows,
    )


@functools.cache
def untroubled_pair(schedule, good: int, stage: int, *, alone: bool = False):
    return fds.simulate(lambda: two_by_two(schedule, None, good, stage, alone=alone), 2 if alone else 4)[0]


# Layer 2 ends the stage that layer 0 begins; gradients travel alike at stages 0 and 1.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("layer", "kind", "stage"), covering((*place, stage) for place in PLACES for stage in (1, 2, 3) if place[0] != 2)
)
def test_where_one_of_two_pipelines_fails_both_say_so(layer, kind, stage):
    place = layer, kind
    cases = (plans.one_f_one_b, 0, 0, 1), (plans.zb_h1, 0, 3, 0), (plans.one_f_one_b, 1, 3, 0), (plans.zb_h1, 1, 1, 1)
    schedule, good, microbatch, at = turn(cases, place, stage)
    run = functools.partial(two_by_two, schedule, (place, microbatch, boom()), good, stage, at=at)
    found, want = fds.simulate(run, 4), untroubled_pair(schedule, good, stage)
    assert len({str(error) for error, *_ in found}) == 1, found
    for error, params, metrics in found:
        refused(error, schedule, 2, place, microbatch)
        assert_same_bits((params, metrics), want[1:])


@pytest.mark.parametrize("stage", range(4))
def test_where_one_of_two_processes_fails_that_play_all_stages_both_say_so(stage):
    """In the first backward and in the last one, after which other ranks have sent their gradients already."""
    for place, microbatch in (((5, "weight"), 0), ((0, "backward"), MICROBATCHES - 1)):
        run = functools.partial(two_by_two, plans.one_f_one_b, (place, microbatch, boom()), 1, stage, alone=True)
        found, want = fds.simulate(run, 2), untroubled_pair(plans.one_f_one_b, 1, stage, alone=True)
        assert len({str(error) for error, *_ in found}) == 1, found
        for error, params, metrics in found:
            refused(error, plans.one_f_one_b, 2, place, microbatch)
            assert_same_bits((params, metrics), want[1:])


class Unsent(Transport):
    """Sends no gradients."""

    def reduce(self, axis, whole, out, kept):
        raise boom()


@pytest.mark.parametrize("stage", range(4))
def test_a_transport_that_fails_is_named_at_every_zero_stage(stage):
    unsent = transform(lambda: lambda step: fill(step, reduce={"transport": Unsent()}))()
    run = lambda: ended(lambda: two_by_two(plans.one_f_one_b, ((), 0, boom()), 0, stage, more=(unsent,)))
    for error in fds.simulate(run, 4):
        assert "boom" in str(error), repr(error)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_donated_state_is_not_spent_by_a_step_that_fails(stage):
    if stage is None:
        run = lambda armed: fds.simulate(
            lambda: stumble(fds.mesh(pp=2)["pp"], plans.zb_h1, armed, good=1, transforms=(fds.donate(),)), 2
        )
    else:
        run = lambda armed: fds.simulate(lambda: two_by_two(plans.zb_h1, armed, 1, stage, more=(fds.donate(),)), 4)
    want = run(None)[0]
    for place in (0, "forward"), (5, "backward"), (2, "weight"):
        for error, params, metrics in run((place, 1, boom())):
            refused(error, plans.zb_h1, 2, place, 1)
            assert_same_bits((params, metrics), want[1:])


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise TypeError("no words")


class Own(FdsError):
    """A user's own kind."""


ODD = {
    "of fds": (LossError("this is bad", where="here", got="x", want="y", hint="do z"), LossError, "this is bad"),
    "of fds, with fields that are no text": (
        BatchError("this is bad", got=torch.float32, want=torch.Size([3]), hint=torch.device("cpu")),
        BatchError,
        "this is bad",
    ),
    "of a user's kind of fds": (Own("this is bad", got="a thing", want="y", hint="do z"), FdsError, "a thing"),
    "without words": (Mute(), RankError, "Mute"),
    "with an argument that is no text": (KeyError(("a", 1)), RankError, "KeyError: ('a', 1)"),
    "of half a character": (ValueError("\ud800 \x00"), RankError, "ValueError"),
    "of a megabyte": (ValueError("x" * 1_000_000), RankError, "ValueError: xxx"),
    "of many lines": (ValueError("a\n\nb\n  c"), RankError, "b"),
    "that ends iterations": (StopIteration(3), RankError, "StopIteration"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("layer", [0, 3])
def test_every_kind_of_error_comes_to_every_rank(kind, layer):
    error, expected, word = ODD[kind]
    found = fds.simulate(
        lambda: stumble(fds.mesh(pp=2)["pp"], plans.one_f_one_b, ((layer, "forward"), 1, error), good=1), 2
    )
    for raised, *_ in found:
        assert isinstance(raised, expected), repr(raised)
        assert word in str(raised), raised
        assert len(str(raised)) < 20_000


def test_an_error_of_fds_keeps_its_words_and_gets_stage_and_microbatch():
    armed = (3, "forward"), 1, LossError("this is bad", where="here", got="x", want="y", hint="do z")
    for error, *_ in fds.simulate(lambda: stumble(fds.mesh(pp=2)["pp"], plans.one_f_one_b, armed, good=1), 2):
        assert (error.what, error.got, error.want, error.hint) == ("this is bad", "x", "y", "do z")
        assert error.where == "rank 1 of pp, stage 1, forward of microbatch 1: here"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("place", [(0, "forward"), (5, "backward"), (2, "weight")], ids=str)
def test_an_interrupt_of_one_process_leaves_the_old_state_good(kind, place):
    error, *found = stumble(2, plans.zb_h1, (place, 1, kind()), good=1)
    assert type(error) is kind
    assert_same_bits(found, untroubled_alone(plans.zb_h1, 2, 1))


def test_an_interrupt_of_a_simulated_rank_ends_the_simulation():
    armed = (3, "forward"), 1, KeyboardInterrupt()

    def job():
        axis = fds.mesh(pp=2)["pp"]
        mine = Mine()
        loss = mined(mine)
        step = fds.compose(fds.pipeline(plans.one_f_one_b, axis, num_microbatches=4), fds.sgd(0.1))(loss)
        state = step.init(loss.init)
        mine.arm(*armed)
        step(state, batch(0))

    with pytest.raises(KeyboardInterrupt):
        fds.simulate(job, 2)


def every_rank(job, size: int = 3, **axes) -> list[Exception]:
    """Return how each rank ended, which must be by an error of fds with one text."""
    found = fds.simulate(lambda: ended(job), size)
    assert len({str(error) for error in found}) == 1, found
    for error in found:
        assert isinstance(error, FdsError), repr(error)
    return found


def plain(schedule=plans.one_f_one_b, size: int = 3, **options):
    """Return a step over a pipeline of simple layers, and its state."""
    loss = mined(Mine())
    options = {"num_microbatches": MICROBATCHES, **options}
    step = fds.compose(fds.pipeline(schedule, fds.mesh(pp=size)["pp"], **options), fds.sgd(0.1))(loss)
    return step, step.init(loss.init, key=1)


def recovering(bad, rows: int = ROWS):
    """Hold that a bad batch is refused on every rank, by step and by evaluate, and that a good one passes after it."""

    def job(stumbles: bool):
        step, state = plain()
        index = step.dimensions.place
        state, _ = step(state, batch(0))
        caught = []
        if stumbles:
            caught = [ended(lambda: step(state, bad(index))), ended(lambda: step.evaluate(state, bad(index)))]
        state, _ = step(state, batch(1))
        return caught, step.params(state), step.evaluate(state, batch(2))

    want = fds.simulate(lambda: job(False), 3)
    found = fds.simulate(lambda: job(True), 3)
    for one, other in zip(found, want, strict=True):
        assert_same_bits(one[1:], other[1:])
    return [caught for caught, *_ in found]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_without_the_batch_that_it_needs_is_named(rank):
    needs = {0: "inputs", 2: "targets"}[rank]
    for errors_of_rank in recovering(lambda index: None if index == rank else batch(1)):
        for error in errors_of_rank:
            assert isinstance(error, BatchError), repr(error)
            assert f"needs the {needs}" in error.what
            assert f"rank {rank} of pp, stage {rank}, forward of microbatch 0" in error.where


def test_no_rank_has_the_batch():
    for caught in recovering(lambda index: None):
        for error in caught:
            assert isinstance(error, BatchError) and "needs the inputs" in error.what and "stage 0" in error.where


def test_a_rank_in_the_middle_needs_no_batch():
    def job(none: bool):
        step, state = plain()
        mine = None if none and step.dimensions.place == 1 else batch(0)
        state, metrics = step(state, mine)
        return step.params(state), metrics, step.evaluate(state, mine)

    assert_same_bits(fds.simulate(lambda: job(True), 3), fds.simulate(lambda: job(False), 3))


BATCHES = {
    "does not divide": (lambda: batch(1, rows=7), BatchError, "7 rows", "multiple of 4", False),
    "too few rows": (lambda: batch(1, rows=2), BatchError, "2 rows", "multiple of 4", False),
    "no rows": (lambda: batch(1, rows=0), BatchError, "0 rows", "multiple of 4", True),
    "lengths that differ": (lambda: (batch(1)[0], batch(1)[1][:4]), BatchError, "4 rows", "one length", True),
    "no pair": (lambda: batch(1)[0], BatchError, "Tensor", "(inputs, targets)", True),
    "another width": (lambda: batch(1, width=5), RankError, "RuntimeError: mat1 and mat2", "", True),
    "another type": (lambda: (batch(1)[0].long(), batch(1)[1]), RankError, "RuntimeError", "", True),
    "no tensor": (lambda: ("words", batch(1)[1]), RankError, "TypeError", "", True),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_bad_batch_is_refused_on_every_rank(kind):
    make, expected, got, want, evaluates = BATCHES[kind]
    for step_error, eval_error in recovering(lambda index: make()):
        assert isinstance(step_error, expected), repr(step_error)
        assert got in step_error.got and want in step_error.want, step_error
        assert "rank 0 of pp" in step_error.where
        if evaluates:
            assert isinstance(eval_error, expected), repr(eval_error)
        else:
            assert eval_error is None


def test_one_rank_alone_has_a_bad_batch():
    for caught in recovering(lambda index: batch(1, rows=7) if index == 2 else batch(1)):
        assert isinstance(caught[0], BatchError) and caught[0].where.endswith("rank 2"), caught


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 13])
def test_evaluate_takes_any_number_of_rows(rows):
    def job():
        step, state = plain()
        return step.evaluate(state, batch(3, rows), outputs=True)

    loss = mined(Mine())
    plain_step = fds.compose(fds.sgd(0.1))(loss)
    want = plain_step.evaluate(plain_step.init(loss.init, key=1), batch(3, rows), outputs=True)
    for found in fds.simulate(job, 3):
        assert found["outputs"].shape == (rows, WIDTH)
        assert torch.allclose(found["outputs"], want["outputs"], rtol=0, atol=64 * torch.finfo(torch.float32).eps)
        assert torch.allclose(found["loss"], want["loss"], rtol=0, atol=64 * torch.finfo(torch.float32).eps)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("place", [(0, "forward"), (2, "forward"), (5, "forward"), ("criterion", "forward")], ids=str)
def test_an_evaluation_that_fails_in_one_pipeline_fails_in_both_and_the_next_is_good(place, stage):
    def job():
        mesh, mine = fds.mesh(pp=2, dp=2), Mine()
        loss = mined(mine)
        pipeline = fds.pipeline(plans.zb_h1, mesh["pp"], num_microbatches=MICROBATCHES, partition="uniform")
        shard = fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=64)
        step = fds.compose(pipeline, shard, fds.sgd(0.1))(loss)
        state = step.init(loss.init, key=1)
        caught = []
        for microbatch, rows in ((0, 8), (3, 8), (0, 7)):
            before = step.evaluate(state, batch(5), outputs=True)
            if mesh["dp"].index == 1:
                mine.arm(place, microbatch, boom())
            caught.append(ended(lambda s=state, rows=rows: step.evaluate(s, batch(5, rows), outputs=True)))
            mine.disarm()
            assert_same_bits(step.evaluate(state, batch(5), outputs=True), before)
            state, _ = step(state, batch(microbatch))
        return caught

    found = fds.simulate(job, 4)
    for caught in found:
        assert list(map(str, caught)) == list(map(str, found[0]))
        for error, microbatch in zip(caught, (0, 3, 0), strict=True):
            refused(error, plans.zb_h1, 2, place, microbatch)


def gather(loss: fds.Layers, size: int, rows_of, outputs: bool = True, **options):
    """Evaluate on simulated ranks, after a step that must go on after; return how every rank ended."""

    def job():
        pipeline = fds.pipeline(plans.one_f_one_b, fds.mesh(pp=size)["pp"], num_microbatches=MICROBATCHES, **options)
        step = fds.compose(pipeline, fds.sgd(0.1))(loss)
        state = step.init(loss.init, key=1)
        error = ended(lambda: step.evaluate(state, rows_of(), outputs=outputs))
        return error, step.evaluate(state, rows_of())["loss"]

    found = fds.simulate(job, size)
    for _, value in found:
        assert_same_bits(value, found[0][1])
    return [error for error, _ in found]


class Thing:
    """What no message can carry."""


UNSHOWN = {
    "an object": lambda x: (x, Thing()),
    "a sparse tensor": lambda x: (x, x.to_sparse()),
    "lengths that differ": lambda x: (x, x[:, : 1 + int(x.abs().sum() * 1e4) % 3]),
    "structures that differ": lambda x: (x, [x] * (int(x.abs().sum() * 1e4) % 3)),
}


@pytest.mark.parametrize("kind", UNSHOWN)
def test_outputs_that_cannot_be_shown_are_an_error_on_every_rank(kind):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), torch.tanh, nn.Linear(WIDTH, WIDTH), UNSHOWN[kind]]
    loss = fds.Layers(layers, lambda out, y: F.mse_loss(out[0], y))
    found = gather(loss, 2, lambda: batch(3))
    for error in found:
        assert isinstance(error, FdsError), found
        assert str(error) == str(found[0])


CRITERIA = {
    "a vector": (lambda out, y: (out - y).square(), LossError),
    "a string": (lambda out, y: "low", LossError),
    "nothing": (lambda out, y: None, LossError),
    "an integer": (lambda out, y: (out - y).long().sum(), LossError),
    "a metric that is no scalar": (lambda out, y: (F.mse_loss(out, y), {"out": out}), LossError),
    "a reserved metric": (lambda out, y: (F.mse_loss(out, y), {"step": out.detach().sum()}), LossError),
    "no graph": (lambda out, y: F.mse_loss(out, y).detach(), LossError),
}


@pytest.mark.parametrize("kind", CRITERIA)
def test_what_a_criterion_must_not_return_is_refused_as_without_a_pipeline(kind):
    criterion, expected = CRITERIA[kind]
    layers = [fds.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)]
    loss = fds.Layers(layers, criterion)
    step = fds.compose(fds.accumulate(MICROBATCHES), fds.sgd(0.1))(loss)
    alone = ended(lambda: step(step.init(loss.init), batch(0)))
    assert isinstance(alone, expected)

    def job(axis):
        step = fds.compose(fds.pipeline(plans.one_f_one_b, axis, num_microbatches=MICROBATCHES), fds.sgd(0.1))(loss)
        return ended(lambda: step(step.init(loss.init), batch(0)))

    for error in (job(3), *fds.simulate(lambda: job(fds.mesh(pp=3)["pp"]), 3)):
        assert isinstance(error, expected), repr(error)
        assert error.what == alone.what


def test_data_ranks_whose_metrics_differ_are_told_apart():
    def job():
        mesh = fds.mesh(pp=2, dp=2)
        name = "right" if mesh["dp"].index else "left"
        criterion = lambda out, y: (F.mse_loss(out, y), {name: out.detach().sum()})
        loss = fds.Layers([fds.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)], criterion)
        pipeline = fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=MICROBATCHES)
        step = fds.compose(pipeline, fds.shard_optimizer(mesh["dp"], stage=1), fds.sgd(0.1))(loss)
        state = step.init(loss.init)
        step(state, batch(0))

    for error in every_rank(job, 4):
        assert isinstance(error, LossError) and "left" in str(error) and "right" in str(error)


def test_a_layer_whose_output_the_next_cannot_take_is_named_by_its_stage():
    widths = [(4, 4), (4, 5), (4, 4), (4, 4)]
    loss = fds.Layers([fds.LayerSpec(nn.Linear, *w) for w in widths], nn.MSELoss())

    def job(axis):
        pipeline = fds.pipeline(plans.one_f_one_b, axis, num_microbatches=MICROBATCHES, partition="uniform")
        step = fds.compose(pipeline, fds.sgd(0.1))(loss)
        state = step.init(loss.init)
        step(state, batch(0))

    for error in every_rank(lambda: job(fds.mesh(pp=2)["pp"]), 2):
        assert error.where == "rank 1 of pp, stage 1, forward of microbatch 0"
        assert "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)\nin layers[2]" in error.got
    alone = ended(lambda: job(2))
    assert alone.__notes__ == ["in layers[2]", "in stage 1, forward of microbatch 0"]


DIFFERENT = {
    "schedule": lambda i: fds.pipeline((plans.gpipe, plans.one_f_one_b)[i], fds.mesh(pp=2)["pp"], num_microbatches=4),
    "microbatches": lambda i: fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=(4, 2)[i]),
    "partition": lambda i: fds.pipeline(
        plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=4, partition=([0, 3, 6], [0, 2, 6])[i]
    ),
    "shapes": lambda i: fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=4, dynamic_shapes=bool(i)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_composed_different_pipelines_are_told_at_init(kind):
    def job():
        step = fds.compose(DIFFERENT[kind](fds.mesh(pp=2)["pp"].index), fds.sgd(0.1))(mined(Mine()))
        step.init(step.loss.init)

    for error in every_rank(job, 2):
        assert isinstance(error, errors.ComposeError) and "composed different steps" in error.what
        assert "rank 1 of pp" in error.where and "plans.measure" in error.hint
        assert error.got not in error.want, f"a reader sees no difference: {error}"


# what is refused before anything runs


def piped(schedule=plans.one_f_one_b, axis=2, num_microbatches=4, loss=None, more=(), eval_fn=None, **options):
    """Return a step, or raise what composing it raises."""
    made = fds.pipeline(schedule, axis, num_microbatches=num_microbatches, **options)
    return fds.compose(made, *more, fds.sgd(0.1))(mined(Mine()) if loss is None else loss, eval_fn)


def buffered(params, batch, buffers):
    return opaque(params, batch), {}, buffers


def opaque(params, batch):
    return (params["w"] * batch).sum()


def normed_twice():
    norm = nn.BatchNorm1d(4)
    return fds.Layers([norm, nn.Linear(4, 4), norm], nn.MSELoss())


class NeedsAll:
    """A gradient map that says nothing of slices."""

    def __call__(self, grads, call):
        return grads

    def __repr__(self):
        return "needs_all"


REFUSALS = {
    "microbatches: none": (lambda: piped(num_microbatches=0), ComposeError, "0", "int >= 1"),
    "microbatches: true": (lambda: piped(num_microbatches=True), ComposeError, "True", "int >= 1"),
    "microbatches: text": (lambda: piped(num_microbatches="4"), ComposeError, "'4'", "int >= 1"),
    "microbatches: half": (lambda: piped(num_microbatches=4.0), ComposeError, "4.0", "int >= 1"),
    "axis: none": (lambda: piped(axis=0), ComposeError, "0", "a number of ranks"),
    "axis: true": (lambda: piped(axis=True), ComposeError, "True", "a number of ranks"),
    "axis: its name": (lambda: piped(axis="pp"), ComposeError, "'pp'", 'fds.mesh(pp=2, dp=-1)["pp"]'),
    "axis: the mesh": (lambda: piped(axis=fds.mesh(pp=-1)), ComposeError, "pp", 'fds.mesh(pp=2, dp=-1)["pp"]'),
    "schedule: a word": (lambda: piped("1f1b"), ComposeError, "'1f1b'", "fds.plans.one_f_one_b"),
    "schedule: not called": (lambda: piped(plans.interleaved), PlanError, "", ""),
    "schedule: a plan": (lambda: piped(plans.gpipe(2, 4)), ComposeError, "0F0", "a function (ranks, microbatches)"),
    "schedule: nothing": (lambda: piped(lambda p, m: None), PlanError, "None", "rows"),
    "schedule: a number": (lambda: piped(lambda p, m: 7), PlanError, "7", "rows"),
    "schedule: numbers": (lambda: piped(lambda p, m: [[1, 2], [3]]), PlanError, "1", "0F0"),
    "schedule: one text": (lambda: piped(lambda p, m: "0F0 0BW0"), PlanError, "0F0 0BW0", "rows such as"),
    "schedule: rows of text": (
        lambda: piped(lambda p, m: ["0F0,0BW0", "1F0,1BW0"], num_microbatches=1),
        PlanError,
        "0F0,0BW0",
        "such as 2F0",
    ),
    "schedule: no action": (lambda: piped(lambda p, m: [["0X0"]]), PlanError, "0X0", ""),
    "schedule: no rows": (lambda: piped(lambda p, m: []), PlanError, "no rows", "0F0 0BW0"),
    "schedule: empty rows": (lambda: piped(lambda p, m: [[], []]), PlanError, "the plan is empty", "0F0 0BW0"),
    "schedule: of other ranks": (lambda: piped(lambda p, m: plans.gpipe(3, m)), PlanError, "3 ranks", "2 ranks"),
    "schedule: of other microbatches": (
        lambda: piped(lambda p, m: plans.gpipe(p, 3)),
        PlanError,
        "3 microbatches",
        "4 microbatches",
    ),
    "schedule: no backward": (lambda: piped(plans.inference), PlanError, "no backward", "2 ranks, 4 microbatches"),
    "schedule: takes one argument": (lambda: piped(lambda p: []), PlanError, "", "microbatches"),
    "schedule: lowered already": (lambda: piped(lambda p, m: plans.communicate(plans.gpipe(p, m))), PlanError, "", ""),
    "schedule: loses work": (
        lambda: piped(lambda p, m: [[f"{r}F{i}" for i in range(m)] for r in range(p)]),
        PlanError,
        "",
        "",
    ),
    "schedule: too few microbatches": (lambda: piped(plans.interleaved(2), num_microbatches=1), PlanError, "1", "2"),
    "partition: a word": (lambda: piped(partition="best"), PlanError, "best", "uniform"),
    "partition: a number": (lambda: piped(partition=3), PlanError, "3", "uniform"),
    "partition: no end": (lambda: piped(partition=[0, 3]), PlanError, "[0, 3]", "6"),
    "partition: backwards": (lambda: piped(partition=[0, 7, 6]), PlanError, "7", ""),
    "partition: an empty stage": (lambda: piped(partition=[0, 6, 6]), PlanError, "6", ""),
    "partition: negative": (lambda: piped(partition=[0, -1, 6]), PlanError, "-1", ""),
    "partition: texts": (lambda: piped(partition=["0", "3", "6"]), PlanError, "'3'", ""),
    "partition: no pattern": (lambda: piped(partition="type:("), PlanError, "(", ""),
    "partition: nothing matches": (lambda: piped(partition="type:Conv"), PlanError, "", "Mined"),
    "more stages than layers": (lambda: piped(axis=7), PlanError, "6 layers, 7 stages", "a layer for every stage"),
    "loss: opaque": (lambda: piped(loss=opaque), ComposeError, "opaque", "fds.Layers"),
    "loss: recorded buffers": (lambda: piped(loss=fds.with_buffers(buffered, {})), ComposeError, "", "fds.Layers"),
    "loss: tied statistics": (lambda: piped(loss=normed_twice(), partition=[0, 2, 3]), LossError, "stages 0 and 1", ""),
    "eval_fn: opaque": (lambda: piped(eval_fn=opaque), ComposeError, "opaque", "eval_fn, too, is Layers"),
    "eval_fn: other layers": (lambda: piped(eval_fn=fds.Layers([nn.Linear(4, 4)], nn.MSELoss())), ComposeError, "", ""),
    "two pipelines": (
        lambda: piped(more=(fds.pipeline(plans.gpipe, 2, num_microbatches=4),)),
        ComposeError,
        "pipeline",
        "compose(",
    ),
    "with accumulate": (lambda: piped(more=(fds.accumulate(2),)), ComposeError, "accumulate", "num_microbatches=4"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_pipeline_that_cannot_be_is_refused_when_it_is_composed(kind):
    compose, expected, got, want = REFUSALS[kind]
    error = ended(compose)
    assert isinstance(error, expected), repr(error)
    assert got in str(error.got) + error.where + error.what and want in error.want + error.hint, str(error)


def one_axis_twice():
    axis = fds.mesh(pp=2)["pp"]
    return piped(axis=axis, more=(fds.shard_optimizer(axis, stage=1),))


def two_meshes():
    return piped(axis=fds.mesh(pp=2, dp=2)["pp"], more=(fds.shard_optimizer(fds.mesh(a=2, b=2)["b"], stage=1),))


def flattened():
    mesh = fds.mesh(pp=2, dp=2)
    return piped(axis=mesh["pp"], more=(fds.shard_optimizer(mesh["pp", "dp"], stage=1),))


@pytest.mark.parametrize(
    ("compose", "size"), [(one_axis_twice, 2), (two_meshes, 4), (flattened, 4)], ids=lambda x: getattr(x, "__name__", x)
)
def test_axes_that_are_not_two_of_one_mesh_are_refused_by_every_rank(compose, size):
    for error in every_rank(compose, size):
        assert isinstance(error, ComposeError) and "two axes of one mesh" in error.what
        assert 'pipeline(..., mesh["pp"])' in error.want


def test_an_axis_of_a_simulation_that_is_over_is_refused():
    axis = fds.simulate(lambda: fds.mesh(pp=2)["pp"], 2)[0]
    assert isinstance(ended(lambda: piped(axis=axis)), errors.MeshError)


def test_a_gradient_map_that_needs_all_gradients_is_refused_and_told_what_a_pipeline_gives_it():
    unsliced = Transform("mine", "mine()", lambda step: fill(step, condition=NeedsAll()))
    for error in every_rank(lambda: piped(axis=fds.mesh(pp=2)["pp"], more=(unsliced,)), 2):
        assert isinstance(error, ComposeError) and "takes_slices" in error.want
        assert "shard at stage 0" not in error.hint, "nothing is sharded here"
    piped(axis=2, more=(unsliced,))  # one process has all of them


# what is unusual, and works


def test_one_composition_serves_two_losses_and_an_axis_of_one_rank_is_one_process():
    def job(axis):
        composed = fds.compose(fds.pipeline(plans.zb_h1, axis, num_microbatches=4), fds.adamw(0.01))
        found = []
        other = fds.Layers([nn.Linear(WIDTH, WIDTH), torch.tanh, nn.Linear(WIDTH, WIDTH)], nn.MSELoss())
        losses = [mined(Mine()), other]
        steps = [composed(loss) for loss in losses]
        states = [step.init(loss.init, key=2) for step, loss in zip(steps, losses, strict=True)]
        for i in range(3):
            states = [step(state, batch(i))[0] for step, state in zip(steps, states, strict=True)]
            found = [step.params(state) for step, state in zip(steps, states, strict=True)]
        return found

    torch.manual_seed(0)
    rng = torch.get_rng_state()
    again = lambda axis: (torch.set_rng_state(rng), job(axis))[1]
    want = again(2)
    for found in fds.simulate(lambda: again(fds.mesh(pp=2)["pp"]), 2):
        assert_same_bits(found, want)
    assert_same_bits(again(1), again(fds.mesh(pp=1)["pp"]))


def test_values_of_rank_0_win_in_modules_that_ranks_built_themselves():
    def job():
        mesh = fds.mesh(pp=3)
        torch.manual_seed(mesh["pp"].index)
        tied = nn.Linear(WIDTH, WIDTH)
        layers = [tied, torch.tanh, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), tied]
        layers[3].running_mean += mesh["pp"].index
        loss = fds.Layers(layers, nn.MSELoss())
        pipeline = fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=4, partition="uniform")
        step = fds.compose(pipeline, fds.adamw(0.01))(loss)
        state = step.init(loss.init)
        first = step.params(state)
        for i in range(2):
            state, _ = step(state, batch(i))
        return first, step.params(state), state.params.get("0.weight"), [x.detach() for x in tied.parameters()]

    found = fds.simulate(job, 3)
    own = found[0][3]
    assert not torch.equal(found[1][3][0], own[0])
    for first, after, *_ in found:
        assert_same_bits([first["0.weight"], first["0.bias"]], own)
        assert_same_bits((first, after), found[0][:2])
    assert_same_bits(found[0][2], found[2][2])
    assert found[1][2] is None


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("frozen", [("0.*", "1.*", "2.*"), ("3.*", "4.*", "5.*"), ("[0-4].*",)], ids=str)
def test_a_stage_may_be_frozen(frozen, stage):
    def job(data: int, index: int, *more):
        loss = mined(Mine())
        step = fds.compose(*more, fds.freeze(*frozen), fds.adamw(0.01, eps=1e-2))(loss)
        state = step.init({n: x.double() for n, x in loss.init(fds.random.key(1)).items()})
        for i in range(2):
            state, metrics = step(state, fds.tree.map(lambda x: x.double().chunk(data)[index], batch(i)))
        return step.params(state), metrics["loss"]

    def ranked(schedule):
        mesh = fds.mesh(pp=2, dp=1 if stage is None else 2)
        pipeline = fds.pipeline(schedule, mesh["pp"], num_microbatches=4 // mesh["dp"].size, partition="uniform")
        shard = () if stage is None else (fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=64),)
        return job(mesh["dp"].size, mesh["dp"].index, pipeline, *shard)

    want = job(1, 0, fds.accumulate(4))
    for schedule in (plans.one_f_one_b, plans.zb_h1):
        for found in fds.simulate(functools.partial(ranked, schedule), 2 if stage is None else 4):
            for name in want[0]:
                assert torch.allclose(found[0][name], want[0][name], rtol=0, atol=1e-13), name
            assert torch.allclose(found[1], want[1], rtol=0, atol=1e-13)


def test_a_step_of_one_process_runs_in_two_threads_at_once():
    step = piped(plans.zb_h1, 3)
    states = [step.init(step.loss.init, key=i) for i in range(2)]

    def trained(state):
        for i in range(5):
            state, _ = step(state, batch(i))
        return step.params(state)

    want = [trained(state) for state in states]
    with ThreadPoolExecutor(2) as pool:
        assert_same_bits(list(pool.map(trained, states)), want)


class Fragile(nn.Module):
    """Raises for large numbers."""

    def forward(self, x):
        if x.abs().max() > 50:
            raise ValueError("large")
        return x


@pytest.mark.parametrize(("place", "stage"), [(1, 1), (1, 2), (3, 0), (3, 2)])
def test_a_failure_leaves_nobody_waiting_for_the_weights_that_feedback_asks_for(place, stage):
    parts = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    parts.insert(place, Fragile())
    layers = fds.Layers(parts, lambda out, y: fds.Mean((out - y).square().sum(), torch.tensor(float(y.numel()))))

    def run():
        mesh = fds.mesh(pp=2, dp=2)
        shard = fds.shard_optimizer(mesh["dp"], stage=stage, gradients=fds.transports.topk(0.3))
        pipe = fds.pipeline(fds.plans.zb_h1, mesh["pp"], num_microbatches=4)
        step = fds.compose(pipe, shard, fds.sgd(0.1))(layers)
        x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(mesh["dp"].index)), torch.zeros(8, 3)
        state, _ = step(step.init(layers.init, key=0), (x, y))
        large = x * torch.where(torch.arange(8) == 5, 1e4 if mesh["dp"].index else 1.0, 1.0)[:, None]
        with pytest.raises(FdsError, match="large"):
            step(state, (large, y))
        _, metrics = step(state, (x, y))
        return float(metrics["loss"])

    found = fds.simulate(run, 4)
    assert len(set(found)) == 1 and 0 < found[0] < 1
