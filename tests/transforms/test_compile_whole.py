"""`compile(whole=True)`: one graph of a whole step. The composition without it is the oracle, bit for bit."""

import contextlib
import copy

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fds
from fds import tree
from fds.errors import BatchError, ComposeError, DonatedStateError, FdsError, LossError, ScheduleError
from fds.step import Memory, fill, transform
from tests.bits import assert_same_bits, snapshot
from tests.laws.mapped import Mapped, mapped
from tests.laws.problems import ROWS, compositions, make, optimizers, problems

CURVE = fds.schedules.warmup_cosine(0.1, warmup_steps=2, total_steps=10)
NARROW = {"p": torch.linspace(-1, 1, 6).view(3, 2)}


class Graphs:
    """A backend that compiles graphs as another does, and keeps them."""

    def __init__(self, name="eager"):
        self.name, self.graphs = name, []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def whole(backend="eager"):
    return fds.compile(backend=backend, whole=True)


def network(params, batch):
    hidden = torch.tanh(batch["x"] @ params["w"] + params["b"])
    loss = F.mse_loss(F.dropout(hidden, 0.3) @ params["v"], batch["y"])
    return loss, {"size": hidden.abs().mean(), "rows": len(hidden)}


def start(*transforms, optimizer=None, loss=network, backend="eager"):
    """Return a step, the same without graphs, their first state, and batches."""
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=generator)
    params = {"w": rand(4, 5), "b": torch.zeros(5), "v": rand(5, 2)}
    optimizer = optimizer or fds.adamw(CURVE)
    step = fds.compose(*transforms, whole(backend), optimizer)(loss)
    plain = fds.compose(*transforms, optimizer)(loss)
    batches = [{"x": rand(6, 4), "y": rand(6, 2)} for _ in range(6)]
    return step, plain, plain.init(params, key=1), batches


def history(step, state, batches):
    """Return what calls return, given a state that stays as it is."""
    state, seen = tree.map(torch.clone, state), []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append((snapshot(state), snapshot(metrics)))
    return seen


@transform
def largest():
    """Add up the largest numbers of the batches of all calls."""

    def note(batch, call):
        call.note("largest", "x", batch["x"].max())
        return batch

    first = lambda shapes, device: {"x": torch.zeros((), device=device)}
    return lambda step: fill(step, batch=note, memory=Memory("largest", first, "named", merge="sum"))


OPTIMIZERS = {
    "adam": fds.adam(0.1, weight_decay=0.1),
    "adamw": fds.adamw(CURVE),
    "lion": fds.lion(CURVE, weight_decay=0.1),
    "sgd": fds.sgd(0.1),
    "sgd with momentum": fds.sgd(CURVE, momentum=0.9, nesterov=True),
    "lamb": fds.lamb(CURVE),
    "adagrad": fds.adagrad(CURVE, lr_decay=0.1),
    "by name": fds.by_name({"w": fds.muon(CURVE), "*": fds.adamw(0.01)}),
}
TRANSFORMS = {
    "alone": [],
    "donated": [fds.donate()],
    "accumulated": [fds.accumulate(3), fds.donate()],
    "scaled": [fds.loss_scale(2.0**10), fds.ema(0.9)],
    "clipped": [fds.clip_by_global_norm(0.1), fds.ema(0.9), fds.donate()],
    "low": [fds.precision(torch.bfloat16), fds.checkpoint_activations()],
    "frozen": [fds.freeze("b"), fds.ema(0.5)],
    "noted": [largest()],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_updates_as_it_does(optimizer):
    step, plain, state, batches = start(fds.donate(), optimizer=optimizer, backend="aot_eager")
    assert_same_bits(history(step, state, batches), history(plain, state, batches))


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_transform_does_what_it_does_in_one_graph_for_all_steps(transforms):
    kept = Graphs()
    step, plain, state, batches = start(*transforms, backend=kept)
    assert_same_bits(history(step, state, batches), history(plain, state, batches))
    (graph,) = kept.graphs
    calls = {node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output")}
    assert all(isinstance(one, torch._ops.OpOverload) or one.__name__ == "getitem" for one in calls)


@settings(max_examples=max(settings.default.max_examples // 5, 2))  # each traces two graphs
@given(
    problems(), optimizers(), compositions(without=("checkpoint_pairs", "offload", "offload_to_disk")), st.booleans()
)
def test_a_step_in_one_graph_is_the_step(problem, optimizer, names, donates):
    more = [fds.donate()] if donates else []
    plain, step = (make(names, optimizer, problem, *more, *run) for run in ([], [whole()]))
    half = tree.map(lambda x: x[: ROWS // 2] if isinstance(x, torch.Tensor) else x, problem.batch)
    first, batches = plain.init(problem.params, key=1), [problem.batch] * 4 + [half] * 3
    got, want = history(step, first, batches), history(plain, first, batches)
    for _, metrics in (*got, *want):
        if "grad_norm" in metrics:
            metrics["grad_norm"] = metrics["grad_norm"].nan_to_num(nan=-1.0)  # NaNs differ in bits
    assert_same_bits(got, want)


def test_formulas_round_otherwise_than_fused_functions_and_are_taken_where_these_must_read_numbers():
    for optimizer in (
        fds.sgd(0.1, momentum=0.9, dampening=0.5),
        fds.adamw(0.1, betas=(lambda t: 0.9 - 0.1 / (t + 1), 0.9)),
    ):
        step, plain, state, batches = start(optimizer=optimizer)
        got, want = (tree.leaves(history(one, state, batches)[-1]) for one in (step, plain))
        torch.testing.assert_close(got, want)


def test_inputs_stay_as_they_are_and_results_are_their_own():
    step, _, state, batches = start(fds.loss_scale(2.0**5), fds.ema(0.9))
    batch = batches[0]
    before = snapshot((state, batch))
    draw = torch.get_rng_state()
    returned = [step(state, batch) for _ in range(4)]
    assert_same_bits((state, batch), before)
    assert torch.equal(torch.get_rng_state(), draw)
    for one in returned[1:]:
        assert_same_bits(one, returned[0])
    places = [{x.untyped_storage().data_ptr() for x in tree.leaves(one)} for one in returned[2:]]
    keys = {x.untyped_storage().data_ptr() for x in (state.key,)}
    assert not (places[0] & places[1]) - keys


def test_a_state_that_is_given_up_is_written_over_and_refused_later():
    step, _, state, batches = start(fds.donate(), fds.ema(0.9))
    state, _ = step(state, batches[0])
    places = [x.data_ptr() for x in tree.leaves((state.params, state.opt, state.slots))]
    for batch in batches:
        old, (state, _) = state, step(state, batch)
        assert [x.data_ptr() for x in tree.leaves((state.params, state.opt, state.slots))] == places
        with pytest.raises(DonatedStateError, match="call"):
            step(old, batch)


def test_a_tensor_of_a_donated_state_that_somebody_holds_is_left_alone():
    step, plain, first, batches = start(fds.donate())
    state = tree.map(torch.clone, first)
    for batch in batches[:4]:
        held = tree.leaves(state.params)[0]
        before = held.clone()
        state, _ = step(state, batch)
        assert_same_bits(held, before)
    assert_same_bits(snapshot(state), history(plain, first, batches[:4])[-1][0])


@pytest.mark.parametrize("commits", [fds.loss_scale(2.0**10), fds.skip_nonfinite()], ids=["scaled", "skipped"])
def test_steps_that_are_not_finite_are_skipped_in_the_graph(commits):
    kept = Graphs()
    step, plain, state, batches = start(commits, fds.ema(0.9), fds.clip_by_global_norm(1.0), backend=kept)
    for i in (2, 4):
        batches[i]["y"][0] = torch.inf
    got, want = history(step, state, batches), history(plain, state, batches)
    for _, metrics in (*got, *want):
        assert bool(metrics["skipped"]) is not bool(metrics.pop("grad_norm").isfinite())  # NaNs differ in bits
    assert_same_bits(got, want)
    assert [bool(metrics["skipped"]) for _, metrics in got] == [False, False, True, False, True, False]
    assert len(kept.graphs) == 1


def test_a_norm_beyond_the_squares_of_float32_is_finite_in_a_graph_too():
    loss = lambda params, x: (params["p"] * x).sum()
    step, plain = (fds.compose(*run, fds.clip_by_global_norm(1.0), fds.sgd(0.1))(loss) for run in ([whole()], []))
    x = torch.full((3, 2), 1e30)
    (_, got), (_, want) = (history(one, plain.init(NARROW), [x] * 3)[-1] for one in (step, plain))
    torch.testing.assert_close(got["grad_norm"], want["grad_norm"])
    assert got["grad_norm"].isfinite() and got["grad_norm"] > 1e30


def test_every_kind_of_batch_has_a_graph_and_no_more_than_there_may_be():
    kept = Graphs()
    step, plain, state, batches = start(backend=kept)
    shapes = [{name: x[:rows] for name, x in batches[0].items()} for rows in (6, 3, 6, 3, 6, 3)]
    assert_same_bits(history(step, state, shapes), history(plain, state, shapes))
    assert len(kept.graphs) == 2
    wide = lambda rows: {name: x[:1].expand(rows, -1) for name, x in batches[0].items()}
    for rows in range(10, 24):
        step(state, wide(rows))
    with pytest.raises(BatchError, match="a graph of its own"):
        step(state, wide(24))


def test_a_state_that_was_saved_and_loaded_goes_on(tmp_path):
    step, plain, first, batches = start(fds.loss_scale(2.0**10), fds.ema(0.9))
    state = tree.map(torch.clone, first)
    for batch in batches[:3]:
        state, _ = step(state, batch)
    fds.save(tmp_path / "run", state, step)
    other, *_ = start(fds.loss_scale(2.0**10), fds.ema(0.9))
    loaded, _ = fds.load(tmp_path / "run", other, first.params)
    want = history(plain, first, batches)[3:]
    for one in (step, other):
        assert_same_bits(history(one, loaded, batches[3:]), want)


def test_a_state_that_is_being_saved_is_not_written_over(tmp_path):
    step, plain, first, batches = start(fds.donate())
    state = tree.map(torch.clone, first)
    for batch in batches[:3]:
        state, _ = step(state, batch)
    saving = fds.save_async(tmp_path / "run", state, step)
    for batch in batches[3:]:
        state, _ = step(state, batch)
    saving.wait()
    want = history(plain, first, batches)
    assert_same_bits(snapshot(state), want[-1][0])
    assert_same_bits(tree.leaves(fds.load(tmp_path / "run", step, first.params)[0]), tree.leaves(want[2][0]))


def test_tensors_that_a_loss_closes_over_are_read_in_every_call():
    weight = torch.ones(2)
    loss = lambda params, x: ((params["p"] * x).sum(0) * weight).square().sum()
    step, plain = (fds.compose(*run, fds.sgd(0.01))(loss) for run in ([whole("aot_eager")], []))
    state, x = plain.init(NARROW), torch.ones(3, 2)
    for value in (1.0, 2.0, 3.0, 4.0):
        weight.fill_(value)
        assert_same_bits(step(state, x), plain(state, x))


class Noisy(nn.Module):
    """Draws in every way that does not depend on values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = torch.native_dropout(F.dropout(x * self.weight, 0.5), 0.2, True)[0]
        order = torch.randperm(len(x))
        return (x[order] + torch.rand_like(x) * torch.randn(4)) * torch.randint(1, 3, (4,)) + torch.rand(len(x), 1)


def draws_around_a_scope(gradients, call):
    with fds.random.scope([]):
        inside = torch.rand(())
    return attrs.evolve(gradients, leaves=[x * inside + torch.rand(()) for x in gradients.leaves])


@fds.step.transform
def fills(station, function):
    return lambda step: fds.step.fill(step, **{station: function})


DRAWING = {
    "plain": [],
    "recomputed": [fds.checkpoint_activations(), fds.accumulate(2)],
    "around a scope": [fills("condition", draws_around_a_scope)],
}


@pytest.mark.parametrize("more", DRAWING.values(), ids=DRAWING)
def test_random_numbers_are_those_of_the_step(more):
    layers = fds.Layers([Noisy(), nn.Dropout(0.4), Noisy()], F.mse_loss)
    step, plain = (fds.compose(*more, *run, fds.sgd(0.01))(layers) for run in ([whole("aot_eager")], []))
    state, batch = plain.init(layers.init), (torch.randn(6, 4), torch.randn(6, 4))
    assert_same_bits(history(step, state, [batch] * 4), history(plain, state, [batch] * 4))
    other = attrs.evolve(state, key=fds.random.key(7))
    assert_same_bits(history(step, other, [batch] * 2), history(plain, other, [batch] * 2))


def test_what_seeds_and_draws_nothing_is_left_out_of_every_call():
    kept = Graphs()
    silent = lambda params, batch: F.mse_loss(
        torch.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"], batch["y"]
    )
    step, _, state, batches = start(fds.checkpoint_activations(), loss=silent, backend=kept)
    history(step, state, batches)
    (work,) = step.runtime.captured[0].works.values()
    assert work.graph.drawing.events == []
    step, _, state, batches = start(backend=kept)
    history(step, state, batches)
    (work,) = step.runtime.captured[0].works.values()
    assert sum(map(callable, work.graph.drawing.events)) == 1


def reads_a_number(params, x):
    return (params["p"] * x).sum() * float(x.sum())


def branches(params, x):
    return (params["p"] * x).sum() if x.sum() > 0 else (params["p"] * 2).sum()


def lists(params, x):
    return (params["p"] * x).sum() * x.tolist()[0][0]


def arrays(params, x):
    return (params["p"] * x).sum() * x.numpy()[0, 0]


def counts(params, x):
    return (params["p"] * x).sum() + x[x > 0].sum()


def copies(params, x):
    return (params["p"] * copy.deepcopy(x)).sum()


def draws_by_values(params, x):
    return (params["p"] * torch.bernoulli(torch.sigmoid(x))).sum()


def reads_a_draw(params, x):
    return (params["p"] * x).sum() * float(torch.rand(()))


def draws_by_itself(params, x):
    return (params["p"] * torch.rand(3, 2, generator=GENERATOR)).sum()


def seeds_by_itself(params, x):
    with fds.random.scope([]):
        fds.random.reseed(3, [])
        return (params["p"] * torch.rand(3, 2)).sum()


def sets_the_generator(params, x):
    state = torch.get_rng_state()
    once = torch.rand(3, 2)
    torch.set_rng_state(state)
    return (params["p"] * once * torch.rand(3, 2)).sum()


def reads_outside(params, x):
    return (params["p"] * x).sum() * float(OUTSIDE)


def writes_outside(params, x):
    OUTSIDE.add_(1)
    return (params["p"] * x).sum() * OUTSIDE


def by_the_calls(batch, call):
    return batch * (call.calls + 1)


def by_a_key(batch, call):
    return batch * float(torch.rand((), generator=fds.random.generator(call.key)))


@attrs.frozen
class Sly:
    """Says that it draws nothing."""

    draws = False

    def __call__(self, gradients, call):
        return attrs.evolve(gradients, leaves=[x + torch.rand(()) for x in gradients.leaves])


GENERATOR, OUTSIDE = torch.Generator(), torch.ones(())
REFUSED = {
    "a number": (reads_a_number, [], LossError, "in reads_a_number"),
    "a branch": (branches, [], LossError, "in branches"),
    "a list": (lists, [], LossError, "in lists"),
    "an array": (arrays, [], LossError, "in arrays"),
    "a shape": (counts, [], LossError, "in counts"),
    "a copy": (copies, [], LossError, "in copies"),
    "a draw by values": (draws_by_values, [], LossError, "in draws_by_values"),
    "a draw that is read": (reads_a_draw, [], LossError, "in reads_a_draw"),
    "a generator": (draws_by_itself, [], LossError, "in draws_by_itself"),
    "a seed": (seeds_by_itself, [], ComposeError, "in seeds_by_itself"),
    "a generator that is set": (sets_the_generator, [], LossError, "seeded by ('step', calls, 0"),
    "a number outside": (reads_outside, [], LossError, "in reads_outside"),
    "a write outside": (writes_outside, [], LossError, "not its own"),
    "calls": (network, [fills("batch", by_the_calls)], ComposeError, "in by_the_calls"),
    "a key": (network, [fills("batch", by_a_key)], ComposeError, "in by_a_key"),
    "a draw without a seed": (None, [fills("condition", Sly())], ComposeError, "draws = False"),
    "a schedule": (None, [fds.adamw(lambda t: 0.1 if int(t) < 9 else 0.2)], ScheduleError, "lr, <lambda>"),
}


@pytest.mark.parametrize(("loss", "transforms", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_would_not_repeat_is_refused_by_its_line_and_costs_nothing(loss, transforms, kind, words):
    loss = (lambda params, x: (params["p"] * x).sum()) if loss in (None, network) else loss
    last = [] if any(isinstance(one, fds.optim.Optimizer) for one in transforms) else [fds.sgd(0.1)]
    step = fds.compose(*transforms, fds.donate(), whole(), *last)(loss)
    state, x = step.init(NARROW), torch.ones(3, 2)
    state, _ = step(state, x)
    before, draw = snapshot(state), torch.get_rng_state()
    with pytest.raises(kind) as error:
        step(state, x)
    assert words in str(error.value) and "tracing" not in str(error.value)
    assert_same_bits(snapshot(state), before)
    assert torch.equal(torch.get_rng_state(), draw) and state.token.spent_at is None


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if float(grad.sum()) else grad


def test_what_was_refused_decides_nothing_about_what_is_compiled_later():
    """Selective checkpointing leaves metadata of nodes in torch, which the partitioner of the next graph would read."""
    loss = lambda params, x: (torch.utils.checkpoint.checkpoint(layer, params["p"], x, use_reentrant=False)).sum()
    layer = lambda p, x: (p * x).tanh().cos()
    batch = torch.ones(3, 2), torch.ones(3, 1)
    for last in (ReadsInBackward.apply, torch.tanh):
        parts = [nn.Linear(2, 4), torch.tanh, nn.Linear(4, 1), last]
        layers = fds.Layers(parts, lambda out, y: (out - y).square().mean())
        step = fds.compose(fds.checkpoint_activations(policy="matmuls"), whole(), fds.sgd(0.1))(layers)
        state, _ = step(step.init(layers.init), batch)
        with contextlib.suppress(FdsError):
            step(state, batch)
            assert last is torch.tanh
        assert not torch.fx.traceback.get_current_meta() and not torch.fx.traceback.has_preserved_node_meta()
    plain = fds.compose(fds.sgd(0.1))(loss)
    compiled = fds.compose(fds.compile(backend="aot_eager_decomp_partition"), fds.sgd(0.1))(loss)
    x = torch.ones(3, 2)
    states = [step(step.init(NARROW), x)[0] for step in (plain, compiled)]
    assert_same_bits(*map(snapshot, states))


def test_a_number_that_is_the_same_in_every_call_may_be_read():
    loss = lambda params, x: (params["p"] * x).sum() * torch.tensor(2.0).item()
    step, plain = (fds.compose(*run, fds.sgd(0.01))(loss) for run in ([whole("aot_eager")], []))
    state, x = plain.init(NARROW), torch.ones(3, 2)
    assert_same_bits(history(step, state, [x] * 3), history(plain, state, [x] * 3))


COMPOSED = {
    "a residency": [mapped(Mapped("/tmp"))],
    "a host store": [fds.checkpoint_activations(store="host")],
    "a capture": [fds.donate(), fds.cuda_graph()],
}


@pytest.mark.parametrize("transforms", COMPOSED.values(), ids=COMPOSED)
def test_a_composition_that_cannot_be_one_graph_is_refused(transforms):
    with pytest.raises(ComposeError, match=r"one graph|one of the two"):
        fds.compose(*transforms, whole(), fds.sgd(0.1))(network)


def test_ranks_that_share_a_step_are_refused():
    def run():
        mesh = fds.mesh(dp=-1)
        with pytest.raises(ComposeError, match="axis 'dp' of 2 ranks"):
            fds.compose(fds.shard_optimizer(mesh["dp"]), whole(), fds.sgd(0.1))(network)

    fds.simulate(run, world_size=2)


def test_arguments_that_do_not_go_with_one_graph_are_refused():
    with pytest.raises(ComposeError, match="dynamic=True"):
        fds.compile(whole=True, dynamic=True)
    with pytest.raises(ComposeError, match="fullgraph=False"):
        fds.compile(whole=True, fullgraph=False)
    with pytest.raises(ComposeError, match="compiled already"):
        fds.compose(whole(), fds.sgd(0.1))(torch.compile(network, backend="eager"))
    with pytest.raises(ComposeError, match="no such backend"):
        fds.compile(whole=True, backend="inductr")

    def fails(graph, inputs):
        raise RuntimeError("it has no such operator")

    step, _, state, batches = start(backend=fails)
    step(state, batches[0])
    with pytest.raises(ComposeError, match="no such operator"):
        step(state, batches[0])


def test_a_mode_that_has_to_see_every_operator_sees_them():
    step, plain, state, batches = start()
    history(step, state, batches)
    counted = []
    for one in (step, plain):
        with FlopCounterMode(display=False) as flops:
            one(state, batches[0])
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_a_copy_of_a_step_compiles_its_own():
    kept = Graphs()
    step, plain, state, batches = start(backend=kept)
    history(step, state, batches)
    other = copy.copy(step)
    assert_same_bits(history(attrs.evolve(other), state, batches), history(plain, state, batches))
    assert len(kept.graphs) == 2


def test_gradients_of_a_batch_that_requires_them_are_taken_in_the_graph():
    def loss(params, batch):
        out = (batch["x"] * params["p"]).square().sum()
        (grad,) = torch.autograd.grad(out, batch["x"], create_graph=True)
        return out + grad.square().sum()

    step, plain = (fds.compose(*run, fds.sgd(0.01))(loss) for run in ([whole()], []))
    state, batch = plain.init(NARROW), {"x": torch.ones(3, 2, requires_grad=True)}
    for _ in range(3):
        assert_same_bits(step(state, batch), plain(state, batch))


def test_descriptions_say_what_compiles_the_step():
    step, *_ = start(backend="aot_eager")
    assert step.describe().stations["run"] == (
        "one graph for every kind of batch, from the batch to the update, compiled by torch.compile's aot_eager"
    )


@pytest.mark.inductor
@pytest.mark.parametrize("optimizer", [fds.adamw(CURVE), fds.lamb(0.01)], ids=["adamw", "lamb"])
def test_inductor_computes_the_step_to_rounding(optimizer):
    transforms = [fds.loss_scale(2.0**10), fds.accumulate(2), fds.clip_by_global_norm(0.5), fds.ema(0.9), fds.donate()]
    step, plain, state, batches = start(*transforms, optimizer=optimizer, backend="inductor")
    got, want = (tree.leaves(history(one, state, batches)) for one in (step, plain))
    torch.testing.assert_close(got, want)
