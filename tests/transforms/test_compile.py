"""fds.compile: the composition without it is the oracle. torch compiles for seconds, so all tests share few losses."""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import fds
from fds import kernels, plans, tree
from fds.errors import ComposeError, LossError
from tests.bits import assert_same_bits, snapshot
from tests.laws.problems import OPTIMIZERS, Problem, compositions, make, regression, squared_error

# what Dynamo does while it traces, and hides where warnings are no errors
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

EXACT = fds.compile(backend="aot_eager")  # computes what uncompiled code does, operator by operator


class Counting:
    """The backend `aot_eager`, which counts the graphs that it is given, and notes the dtypes in them."""

    def __init__(self):
        self.graphs, self.dtypes = 0, set()

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.dtypes |= {node.meta["example_value"].dtype for node in graph.graph.nodes if _is_tensor(node)}
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def _is_tensor(node):
    return isinstance(node.meta.get("example_value"), torch.Tensor)


class Block(nn.Module):
    """Residual, with batch statistics and dropout."""

    def __init__(self, width, slope):
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.3)
        self.slope = slope

    def forward(self, x):
        return x + self.drop(F.leaky_relu(self.linear(self.norm(x)), self.slope))


@functools.cache
def in_layers():
    torch.manual_seed(0)
    parts = [nn.Linear(5, 6), nn.SiLU(inplace=True), Block(6, 0.1), Block(6, 0.1)]
    loss = fds.Layers([*parts, fds.LayerSpec(nn.Linear, 6, 3)], squared_error)
    return Problem("layers", loss, loss.init(fds.random.key(0)), regression(0, torch.float32), True, True)


@functools.cache
def whole():
    torch.manual_seed(0)
    apply, params, buffers = fds.functional(nn.Sequential(nn.Linear(5, 6), Block(6, 0.1), nn.Linear(6, 3)))

    def loss_fn(params, batch, buffers):
        out, new = apply.with_buffers(params, buffers, batch[0])
        seen = (batch[1] > 0).sum()
        return fds.Mean((out - batch[1]).square().sum(), seen), {"seen": seen, "two": 2, "size": out.abs().mean()}, new

    loss = fds.with_buffers(loss_fn, buffers)
    return Problem("whole", loss, params, regression(0, torch.float32), True, True)


def chain():
    torch.manual_seed(0)
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    loss_fn = lambda params, batch: squared_error(apply(params, batch[0]), batch[1])
    return Problem("chain", loss_fn, params, regression(0, torch.float32))


PROBLEMS = (in_layers, whole)


def trained(step, problem, batch=None):
    """Return what two steps end with."""
    batch = problem.batch if batch is None else batch
    state = step.init(problem.params, key=3)
    for _ in range(2):
        state, metrics = step(state, batch)
    return state, metrics


@settings(max_examples=5)
@given(
    st.sampled_from(PROBLEMS),
    st.sampled_from(sorted(OPTIMIZERS)),
    compositions(without=("precision", "half", "autocast")),
    st.booleans(),
)
def test_compiling_changes_no_bit(problem, optimizer, names, last):
    problem = problem()
    plain = make(names, OPTIMIZERS[optimizer](), problem)
    step = fds.compose(*(plain.composition if last else ()), EXACT, *(() if last else plain.composition))(problem.loss)
    assert_same_bits(trained(step, problem), trained(plain, problem))


@pytest.mark.parametrize("low", [fds.precision(torch.bfloat16), fds.autocast()], ids=["precision", "autocast"])
def test_16_bit_computation_is_the_same(low):
    counting, problem = Counting(), chain()
    got = trained(fds.compose(fds.compile(backend=counting), low, fds.sgd(0.1))(problem.loss), problem)
    assert_same_bits(got, trained(fds.compose(low, fds.sgd(0.1))(problem.loss), problem))
    assert counting.graphs == 1 and torch.bfloat16 in counting.dtypes


@pytest.mark.sweep
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("stage", range(4))
def test_every_stage_of_sharding_computes_the_same(problem, stage):
    problem = problem()

    def run(*more):
        axis = fds.mesh(dp=-1)["dp"]
        batch = tree.map(lambda x: x.chunk(axis.size)[axis.index], problem.batch)
        shard = fds.shard_optimizer(
            axis, stage=stage, bucket_bytes=64, **({"max_live_bytes": 512} if stage == 3 else {})
        )
        step = fds.compose(*more, shard, fds.accumulate(2), fds.adamw(0.01))(problem.loss)
        state, *metrics = trained(step, problem, batch)
        return step.params(state), state.buffers, metrics

    assert_same_bits(fds.simulate(lambda: run(EXACT), 2), fds.simulate(run, 2))


@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1, plans.interleaved(2)], ids=["1f1b", "zb_h1", "2"])
def test_pipelines_of_compiled_layers_compute_the_same(schedule):
    problem = in_layers()

    def run(*more):
        pipe = fds.pipeline(schedule, axis=fds.mesh(pp=-1)["pp"], num_microbatches=2)
        step = fds.compose(*more, pipe, fds.checkpoint_activations(), fds.sgd(0.1))(problem.loss)
        state, metrics = trained(step, problem)
        return step.params(state), metrics

    assert_same_bits(fds.simulate(lambda: run(EXACT), 2), fds.simulate(run, 2))


@pytest.mark.parametrize("policy", ["matmuls", lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE])
def test_policies_of_recomputation_leave_compiled_layers_as_they_are(policy):
    problem = in_layers()
    step = fds.compose(EXACT, fds.checkpoint_activations(policy=policy, every=2), fds.sgd(0.1))(problem.loss)
    assert_same_bits(trained(step, problem), trained(fds.compose(fds.sgd(0.1))(problem.loss), problem))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_compiled_step_is_pure(problem):
    problem = problem()
    step = fds.compose(EXACT, fds.sgd(0.1))(problem.loss)
    state = step.init(problem.params)
    before, drawn = snapshot((state, problem.batch)), torch.get_rng_state()
    first, second = step(state, problem.batch), step(state, problem.batch)
    assert_same_bits(first, second)
    assert_same_bits((state, problem.batch), before)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_views_and_layer_maps_stay_around_compiled_layers():
    seen = []

    @fds.step.transform
    def around():
        def counted(calls, call):
            seen.extend(one.layers for one in calls)
            return calls

        half = lambda x, leaf, call: x / 2 if leaf.name.endswith("weight") else x
        return lambda step: fds.step.fill(step, view=half, layer=counted)

    problem = in_layers()
    got, want = (trained(fds.compose(*m, around(), fds.sgd(0.1))(problem.loss), problem) for m in ([EXACT], []))
    assert_same_bits(got, want)
    assert seen[:5] == [(i,) for i in range(5)]


def test_equal_layers_share_a_function_and_other_sizes_of_batches_one_more():
    counting = Counting()
    loss = fds.Layers([nn.Linear(4, 4), *(nn.LayerNorm(4) for _ in range(12)), nn.Linear(4, 4)], nn.MSELoss())
    step = fds.compose(fds.compile(backend=counting), fds.sgd(0.1))(loss)
    state = step.init(loss.init)
    for rows in (4, 4, 6):
        state, _ = step(state, (torch.ones(rows, 4), torch.ones(rows, 4)))
    # the criterion, a norm, and a linear layer with and without a gradient of its input: for 4 rows, and for all
    assert counting.graphs == 2 * 4
    for rows in (8, 10):
        state, _ = step(state, (torch.ones(rows, 4), torch.ones(rows, 4)))
    again = fds.compose(fds.compile(backend=counting), fds.accumulate(2), fds.sgd(0.1))(loss)
    again(again.init(loss.init), (torch.ones(16, 4), torch.ones(16, 4)))
    assert counting.graphs == 8


class Bend(nn.Module):
    """A layer that keeps its output for backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).tanh()


@pytest.mark.parametrize("stage", [None, 3])
def test_nothing_of_a_step_stays_in_memory(stage):
    layers, rows = fds.Layers([Bend(), Bend()], nn.MSELoss()), 977
    apply, params, _ = fds.functional(nn.Sequential(Bend(), Bend()))
    whole = lambda params, batch: F.mse_loss(apply(params, batch[0]), batch[1])

    def run():
        shard = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=64)]
        for loss, start in ((layers, layers.init), (whole, params)):
            step = fds.compose(EXACT, *shard, fds.sgd(0.1))(loss)
            step(step.init(start), (torch.ones(rows, 3), torch.ones(rows, 3)))

    fds.simulate(run, 2 if stage else 1)
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() == 2 and not x.is_meta]
    assert not [x.shape for x in tensors if x.shape[0] == rows]


def test_layers_with_hooks_share_no_function():
    """torch does not notice whether a module has hooks."""

    def hooked(by):
        part = nn.Sequential(nn.Linear(3, 3))
        if by:
            part[0].register_forward_hook(lambda module, inputs, out: out * by)
        return part

    loss = fds.Layers([hooked(by) for by in (0, 0, 3.0, 2.0)], nn.MSELoss())
    states = [fds.compose(*m, fds.sgd(0.1))(loss) for m in ([EXACT], [])]
    batch = torch.ones(2, 3), torch.ones(2, 3)
    got, want = (step(step.init(loss.init), batch) for step in states)
    assert_same_bits(got, want)


class Times(nn.Module):
    """Layers that look alike, and differ in a number that torch makes a constant of compiled code."""

    def __init__(self, by):
        super().__init__()
        self.by, self.w = by, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.w * self.by


def test_versions_beyond_the_limit_of_torch_are_functions_of_layers_or_an_error():
    loss, counting = fds.Layers([Times(by) for by in (2, 3, 4, 5)], nn.MSELoss()), Counting()
    step = fds.compose(fds.compile(backend=counting, dynamic=False), fds.sgd(0.1))(loss)
    state, batch = step.init(loss.init), (torch.ones(2, 1), torch.ones(2, 1))
    with torch._dynamo.config.patch(recompile_limit=2):
        after = step(state, batch)
        assert counting.graphs == 5  # the criterion's too
        assert_same_bits(step(state, batch), after)
        assert counting.graphs == 5
        with pytest.raises(LossError, match=r"(?s)where: layer \d, a Times.*fds.compile\(dynamic=True\)"):
            [step(state, (torch.ones(rows, 1), torch.ones(rows, 1))) for rows in (3, 4)]


def test_python_values_that_change_are_an_error_beyond_the_limit_of_torch():
    now = {"phase": ""}
    loss_fn = lambda params, x: (x @ params["w"]).square().mean() * (2 if now["phase"] == "1" else 3)
    step = fds.compose(EXACT, fds.sgd(0.1))(loss_fn)
    state = step.init({"w": torch.ones(3)})
    want = r"(?s)exceeding the recompile_limit.*warning that torch logged.*Python values change.*into the batch"
    with torch._dynamo.config.patch(recompile_limit=2):
        for now["phase"] in "ab":
            step(state, torch.ones(4, 3))
        now["phase"] = "c"
        with pytest.raises(LossError, match=want):
            step(state, torch.ones(4, 3))


def test_a_branch_on_a_value_is_an_error_that_says_how_to_go_on():
    def loss_fn(params, x):
        s = (x @ params["w"]).square().mean()
        return s * (2 if s.item() > 0 else 1)

    step = fds.compose(EXACT, fds.sgd(0.1))(loss_fn)
    with pytest.raises(LossError, match=r"(?s)where: loss_fn.*fullgraph=False"):
        step(step.init({"w": torch.ones(3)}), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"mode": "reduce-overhead"}, "fds.cuda_graph()"),
        ({"mode": "max-autotune"}, 'mode="max-autotune-no-cudagraphs"'),
        ({"options": {"triton.cudagraphs": True}}, "fds.cuda_graph()"),
        ({"backend": "cudagraphs"}, "fds.cuda_graph()"),
    ],
)
def test_cuda_graphs_of_torch_are_refused(arguments, hint):
    with pytest.raises(ComposeError, match="write over gradients") as caught:
        fds.compile(**arguments)
    assert caught.value.hint == hint
    assert fds.compile(mode="max-autotune-no-cudagraphs")


@pytest.mark.parametrize("given", [nn.Linear(2, 2), "aot_eager"])
def test_arguments_by_position_are_refused(given):
    with pytest.raises(ComposeError, match="by keyword") as caught:
        fds.compile(given)
    assert "compose(fds.compile()" in caught.value.hint


@pytest.mark.parametrize("loss", [lambda params, x: params["w"].sum(), fds.Layers([nn.Linear(2, 2)], nn.MSELoss())])
def test_compiling_twice_is_refused_as_such(loss):
    with pytest.raises(ComposeError, match=r"filled by compile\(\) \(position 0\); compile\(\) fills it too"):
        fds.compose(fds.compile(), fds.compile(), fds.sgd(0.1))(loss)


def test_a_loss_with_modules_kernels_and_metrics_is_one_graph():
    torch.manual_seed(0)
    counting, norm = Counting(), torch.ones(4)
    apply, params, _ = fds.functional(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True))
    other, more, _ = fds.functional(nn.Linear(4, 3))

    def loss_fn(params, batch):
        h = kernels.rms_norm(apply(params["body"], batch["x"]), norm, residual=batch["x"])
        logits = other(params["head"], kernels.swiglu(h, h)).flatten(0, 1)
        total = kernels.cross_entropy(logits, batch["y"].flatten(), reduction="sum")
        return fds.Mean(total, batch["y"].numel()), {"size": logits.detach().abs().mean()}

    batch = {"x": torch.randn(4, 3, 4), "y": torch.randint(3, (4, 3))}
    params = {"body": params, "head": more}
    steps = [fds.compose(*m, fds.sgd(0.1))(loss_fn) for m in ([fds.compile(backend=counting)], [])]
    got, want = (step(step.init(params), batch) for step in steps)
    torch.testing.assert_close(tree.leaves(got), tree.leaves(want))
    assert counting.graphs == 1


@pytest.mark.parametrize("stage", [None, 3])
def test_evaluation_of_layers_is_compiled_too(stage):
    problem = in_layers()

    def run(*more):
        shard = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=64)]
        step = fds.compose(*more, *shard, fds.sgd(0.1))(problem.loss)
        return step.evaluate(step.init(problem.params), problem.batch, outputs=True)

    assert_same_bits(fds.simulate(lambda: run(EXACT), 2), fds.simulate(run, 2))


def test_evaluation_shows_outputs_and_finds_the_buffers_of_the_state():
    problem, calls = whole(), Counting()
    module = nn.Sequential(nn.Linear(5, 6), Block(6, 0.1), nn.Linear(6, 3))
    apply, params, buffers = fds.functional(module)

    def loss_fn(params, batch, buffers):
        out, new = apply.with_buffers(params, buffers, batch[0])
        return F.mse_loss(out, batch[1]), {}, new

    def eval_fn(params, batch):
        return F.l1_loss(apply(params, batch[0]), batch[1])

    steps = [
        fds.compose(*m, fds.sgd(0.1))(fds.with_buffers(loss_fn, buffers), eval_fn)
        for m in ([fds.compile(backend=calls)], [])
    ]
    states = [step(step.init(params), problem.batch)[0] for step in steps]
    got, want = (s.evaluate(state, problem.batch, outputs=True) for s, state in zip(steps, states, strict=True))
    assert_same_bits(got, want)
    assert calls.graphs == 2 and got["outputs"].shape == (12, 3)


def test_a_mode_that_sees_operators_sees_those_of_a_compiled_loss():
    problem, flops = in_layers(), []
    for more in ([EXACT], []):
        step = fds.compose(*more, fds.sgd(0.1))(problem.loss)
        state = step.init(problem.params)
        with FlopCounterMode(display=False) as counter:
            step(state, problem.batch)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


def test_what_cannot_be_traced_is_an_error_that_says_where_or_runs_uncompiled():
    def loss_fn(params, x):
        y = x @ params["w"]
        torch._dynamo.graph_break()
        return y.square().mean()

    params, x = {"w": torch.ones(3)}, torch.ones(4, 3)
    step = fds.compose(EXACT, fds.sgd(0.1))(loss_fn)
    state = step.init(params)
    with pytest.raises(LossError, match=r"(?s)where: loss_fn.*graph_break.*fullgraph=False"):
        step(state, x)
    plain = fds.compose(fds.sgd(0.1))(loss_fn)
    broken = fds.compose(fds.compile(backend="aot_eager", fullgraph=False), fds.sgd(0.1))(loss_fn)
    assert_same_bits(broken(state, x), plain(state, x))


def test_mistakes_in_a_module_are_found_as_without_it():
    apply, params, _ = fds.functional(nn.BatchNorm1d(3))
    step = fds.compose(EXACT, fds.sgd(0.1))(lambda params, x: apply(params, x).square().mean())
    state = step.init(params)
    with pytest.raises(LossError, match="changes its buffers"):
        step(state, torch.randn(4, 3))


def test_arguments_that_torch_does_not_take_are_refused():
    loss_fn = lambda params, x: params["w"].sum()
    with pytest.raises(ComposeError, match="a mode or options"):
        fds.compile(mode="max-autotune", options={})
    with pytest.raises(ComposeError, match="compiled already"):
        fds.compose(EXACT, fds.sgd(0.1))(torch.compile(loss_fn, backend="eager"))
    step = fds.compose(fds.compile(mode="fastest"), fds.sgd(0.1))(loss_fn)
    with pytest.raises(ComposeError, match="Unrecognized mode"):
        step(step.init({"w": torch.ones(2)}), None)


def test_descriptions_say_what_is_compiled():
    step = fds.compose(EXACT, fds.sgd(0.1))(in_layers().loss)
    assert step.describe().stations["loss"].endswith("each through torch.compile by aot_eager")
    step = fds.compose(fds.compile(), fds.sgd(0.1))(lambda params, x: params["w"].sum())
    assert step.describe().stations["loss"] == "<lambda>, through torch.compile by inductor"


@pytest.mark.inductor
@pytest.mark.parametrize("problem", PROBLEMS)
def test_inductor_draws_as_torch_does_where_it_is_asked_to(problem):
    problem = problem()
    plain = fds.compose(fds.accumulate(2), fds.sgd(0.1))(problem.loss)
    step = fds.compose(fds.compile(options={"fallback_random": True}), *plain.composition)(problem.loss)
    torch.testing.assert_close(tree.leaves(trained(step, problem)), tree.leaves(trained(plain, problem)))
    other = fds.compose(fds.compile(), *plain.composition)(problem.loss)
    assert_same_bits(trained(other, problem), trained(other, problem))
