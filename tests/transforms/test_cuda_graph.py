"""`cuda_graph`: what is captured, what is refused and by which name, and whose memory is whose; on an emulated GPU."""

import copy
import gc
import math

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import kernels, tree
from fds.errors import BatchError, ComposeError, DonatedStateError, LossError, ScheduleError, StateError
from tests.bits import assert_same_bits
from tests.emulated_gpu import META, Gpu, captured
from tests.laws.mapped import Mapped, mapped


def linear(params, batch):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def start(gpu, *transforms, loss=linear, optimizer=None, params=None):
    """Return a captured step, its first state on the device, and a batch there."""
    step = fds.compose(*transforms, captured(gpu), fds.donate(), optimizer or fds.adamw(0.1))(loss)
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=generator)
    batch = {"x": rand(4, 3), "y": rand(4, 2)}
    return step, gpu.state(step.init({"w": rand(3, 2)} if params is None else params)), gpu.put(batch)


def calls(gpu, step, state, batch, number):
    metrics = {}
    with gpu:
        for _ in range(number):
            state, metrics = step(state, batch)
    return state, metrics


def test_a_step_on_a_cpu_is_run_as_it_is():
    plain, other = (fds.compose(fds.donate(), *more, fds.adamw())(linear) for more in ([], [fds.cuda_graph()]))
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    a = b = plain.init({"w": torch.ones(3, 2)})
    b = tree.map(torch.clone, a)
    for _ in range(4):
        (a, said), (b, told) = plain(a, batch), other(b, batch)
        assert_same_bits((b, told), (a, said))
    assert "one CUDA graph for every kind of batch" in other.describe().stations["run"]


COMPOSED = {
    "no donate": ([], "the old state is kept"),
    "a residency": ([fds.donate(), mapped(Mapped("/tmp"))], "opt in Mapped"),
    "a host store": ([fds.donate(), fds.checkpoint_activations(store="host")], "store='host'"),
    "another": ([fds.donate(), fds.cuda_graph()], "cuda_graph"),
}


@pytest.mark.parametrize(("transforms", "got"), COMPOSED.values(), ids=COMPOSED)
def test_a_composition_that_cannot_be_captured_is_refused(transforms, got):
    with pytest.raises(ComposeError) as caught:
        fds.compose(*transforms, fds.cuda_graph(), fds.sgd(0.1))(linear)
    assert got in caught.value.got


def test_ranks_that_share_a_step_are_refused():
    def run():
        mesh = fds.mesh(dp=-1)
        with pytest.raises(ComposeError, match="axis 'dp' of 2 ranks"):
            fds.compose(fds.shard_optimizer(mesh["dp"]), fds.donate(), fds.cuda_graph(), fds.sgd(0.1))(linear)

    fds.simulate(run, world_size=2)


def reads_a_number(params, batch):
    return linear(params, batch) * (batch["x"].sum().item() > 0)


def counts(params, batch):
    return linear(params, batch) + batch["x"][batch["x"] > 0].sum()


def goes_home(params, batch):
    return linear(params, batch) + float(batch["x"].cpu().sum())


def uploads(params, batch):
    return linear(params, batch) + torch.tensor([1.0, 2.0]).to(batch["x"].device).sum()


def uploads_at_once(params, batch):
    return linear(params, batch) + torch.tensor([1.0, 2.0], device=batch["x"].device).sum()


def draws_on_the_host(params, batch):
    return linear(params, batch) + kernels.dropout(batch["x"], p=0.5, seed=int(torch.randint(2**62, ()))).sum()


def draws_in_a_scope(params, batch):
    with fds.random.scope([batch["x"].device]):
        once = torch.rand((), device=batch["x"].device)
    return linear(params, batch) + once * torch.rand((), device=batch["x"].device)


def seeds_by_itself(params, batch):
    with fds.random.seeded(fds.random.key(3), devices=[batch["x"].device]):
        return linear(params, batch) + torch.rand((), device=batch["x"].device)


def by_the_calls(batch, call):
    return {**batch, "x": batch["x"] * (call.calls + 1)}


def by_a_key(batch, call):
    generator = fds.random.generator(call.key)
    return {**batch, "x": batch["x"] * float(torch.rand((), generator=generator))}


def read_schedule(t):
    return 0.1 if int(t) < 10 else 0.01


@fds.step.transform
def maps(function):
    return lambda step: fds.step.fill(step, batch=function)


AT_WORK = {
    "item": ({"loss": reads_a_number}, LossError, "in reads_a_number"),
    "shapes": ({"loss": counts}, LossError, "in counts"),
    "to the host": ({"loss": goes_home}, LossError, "in goes_home"),
    "from the host": ({"loss": uploads}, LossError, "in uploads"),
    "of numbers": ({"loss": uploads_at_once}, LossError, "in uploads_at_once"),
    "the CPU's generator": ({"loss": draws_on_the_host}, LossError, "seeded by ('step', calls, 0, 0)"),
    "a scope": ({"loss": draws_in_a_scope}, ComposeError, "in draws_in_a_scope"),
    "a seed": ({"loss": seeds_by_itself}, ComposeError, "in seeds_by_itself"),
    "calls": ({"transforms": [maps(by_the_calls)]}, ComposeError, "in by_the_calls"),
    "a key": ({"transforms": [maps(by_a_key)]}, ComposeError, "in by_a_key"),
    "a schedule": ({"optimizer": fds.adamw(read_schedule)}, ScheduleError, "read_schedule"),
}


@pytest.mark.parametrize(("what", "kind", "where"), AT_WORK.values(), ids=AT_WORK)
def test_what_a_replay_would_not_follow_is_refused_where_it_is_written_and_costs_nothing(what, kind, where):
    gpu = Gpu()
    what = dict(what)
    step, state, batch = start(gpu, *what.pop("transforms", ()), **what)
    error = None
    for _ in range(3):
        before = gpu.get(state)
        try:
            state, _ = calls(gpu, step, state, batch, 1)
        except kind as caught:
            error = caught
            break
    assert error is not None and where in error.where and gpu.replays == gpu.captures == 0
    assert_same_bits(gpu.get(state), before)  # it may be used, as it was


def test_work_that_takes_another_path_than_in_the_call_before_is_refused():
    turns = []

    @attrs.frozen
    class Sometimes:
        @property
        def draws(self):
            return len(turns) == 2

        def __call__(self, batch, call):
            turns.append(None)
            return batch

    gpu = Gpu()
    step, state, batch = start(gpu, maps(Sometimes()))
    state, _ = calls(gpu, step, state, batch, 2)
    with pytest.raises(ComposeError, match="took another than the last one"):
        calls(gpu, step, state, batch, 1)
    assert state.token.spent_at is None


BATCHES = {
    "on the host": (lambda gpu: {"x": torch.ones(4, 3), "y": gpu.put(torch.ones(4, 2))}, "batch.x"),
    "sparse": (lambda gpu: {"x": torch.empty(4, 3, device=META, layout=torch.sparse_coo), "y": None}, "batch.x"),
    "an object": (lambda gpu: {"x": object(), "y": gpu.put(torch.ones(4, 2))}, "batch.x"),
}


@pytest.mark.parametrize(("make", "where"), BATCHES.values(), ids=BATCHES)
def test_a_batch_that_is_not_on_the_device_is_refused(make, where):
    gpu = Gpu()
    step, state, _ = start(gpu)
    with pytest.raises(BatchError) as caught:
        calls(gpu, step, state, make(gpu), 1)
    assert caught.value.where == where and state.token.spent_at is None


def test_a_batch_of_one_more_shape_than_there_may_be_is_refused():
    gpu = Gpu()
    step, state, _ = start(gpu)
    for rows in range(1, 17):
        state, _ = calls(gpu, step, state, gpu.put({"x": torch.ones(rows, 3), "y": torch.ones(rows, 2)}), 1)
    with pytest.raises(BatchError, match="a graph of its own"):
        calls(gpu, step, state, gpu.put({"x": torch.ones(17, 3), "y": torch.ones(17, 2)}), 1)
    assert calls(gpu, step, state, gpu.put({"x": torch.ones(1, 3), "y": torch.ones(1, 2)}), 1)


def test_values_in_a_batch_have_graphs_of_their_own():
    def scaled(params, batch):
        return linear(params, batch) * batch["by"]

    gpu = Gpu()
    step, state, batch = start(gpu, loss=scaled)
    again = [gpu.state(gpu.get(state)) for _ in range(2)]
    one, two = (calls(gpu, step, x, batch | {"by": by}, 1)[1]["loss"] for x, by in zip(again, (1, 2), strict=True))
    assert float(gpu.get(two)) == 2 * float(gpu.get(one))


def test_zeros_of_either_sign_have_graphs_of_their_own_and_nan_has_one():
    def signed(params, batch):
        return linear(params, batch) + math.copysign(1.0, batch["by"])

    gpu = Gpu()
    step, state, batch = start(gpu, loss=signed)
    plain, other = fds.compose(fds.adamw(0.1))(signed), gpu.state(gpu.get(state))
    for by in [0.0] * 4 + [-0.0] * 4:
        state, metrics = calls(gpu, step, state, batch | {"by": by}, 1)
        other, wanted = calls(gpu, plain, other, batch | {"by": by}, 1)
        assert_same_bits(gpu.get(metrics), gpu.get(wanted))
    calls(gpu, step, state, batch | {"by": float("nan")}, 4)
    assert gpu.captures == 3


def test_a_step_that_is_written_over_counts_from_there():
    gpu, make = Gpu(), lambda: fds.adamw(lambda t: 0.1 / (t + 1))
    step, state, batch = start(gpu, optimizer=make())
    plain, other = fds.compose(make())(linear), gpu.state(gpu.get(state))
    for number in range(7):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
        if number in (0, 4):
            with gpu:
                state.step.fill_(100 * number)
                other.step.fill_(100 * number)
    assert gpu.captures == 1


# what Dynamo does while it traces, and hides where warnings are no errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:aten.*an autograd kernel was not registered")
def test_compiled_losses_are_captured():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    layers = fds.Layers([nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)], F.mse_loss)
    gpu, batch = Gpu(), (torch.randn(4, 3), torch.randn(4, 2))
    plain = fds.compose(fds.accumulate(2), fds.adamw(0.1))(layers)
    parts = (fds.compile(backend=counting), fds.donate(), captured(gpu))
    step = fds.compose(fds.accumulate(2), *parts, fds.adamw(0.1))(layers)
    state, batch = gpu.state(step.init(layers.init)), gpu.put(batch)
    other = gpu.state(gpu.get(state))
    for _ in range(5):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
    # 5 functions, compiled in the first call, never in a capture
    assert len(graphs) == 5 and (gpu.captures, gpu.replays) == (1, 3)


def test_what_is_drawn_in_a_scope_of_the_first_call_is_drawn_again_after_it():
    traced = []

    def twice(params, batch):
        if not traced:  # as a compiled loss does, which also runs once uncompiled
            with fds.random.scope([META]):
                torch.rand((), device=META)
            traced.append(None)
        return linear(params, {**batch, "x": F.dropout(batch["x"], 0.5)})

    gpu = Gpu()
    step, state, batch = start(gpu, loss=twice)
    plain = fds.compose(fds.adamw(0.1))(lambda p, b: linear(p, {**b, "x": F.dropout(b["x"], 0.5)}))
    other = gpu.state(gpu.get(state))
    for _ in range(2):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))


def test_a_state_that_was_given_up_is_refused():
    gpu = Gpu()
    step, state, batch = start(gpu)
    later, _ = calls(gpu, step, state, batch, 5)
    for doing in (lambda: calls(gpu, step, state, batch, 1), lambda: tree.leaves(state)):
        with pytest.raises(DonatedStateError):
            doing()
    assert int(later.calls) == 5 and gpu.replays == 3
    assert "tensor(" not in repr(step.runtime)


def test_generators_are_left_as_they_were_and_what_is_drawn_outside_of_layers_is_the_same():
    def noisy(params, batch):
        return linear(params, {**batch, "x": F.dropout(batch["x"], 0.5)})

    gpu = Gpu()
    step, state, batch = start(gpu, fds.checkpoint_activations(), fds.accumulate(2), loss=noisy)
    plain = fds.compose(fds.checkpoint_activations(), fds.accumulate(2), fds.adamw(0.1))(noisy)
    other, host, there = gpu.state(gpu.get(state)), torch.get_rng_state(), attrs.astuple(gpu.generator.get_state())
    for _ in range(6):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
    assert torch.equal(torch.get_rng_state(), host) and attrs.astuple(gpu.generator.get_state()) == there
    assert gpu.replays == 4


def test_what_draws_outside_of_all_scopes_draws_what_the_default_generator_says():
    class Unseeded:
        draws = False

        def __call__(self, gradients, call):
            for leaf in gradients.leaves:
                leaf.add_(torch.rand(leaf.shape, device=leaf.device))
            return gradients

    @fds.step.transform
    def unseeded():
        return lambda step: fds.step.fill(step, condition=Unseeded())

    gpu = Gpu()
    step, state, batch = start(gpu, unseeded())
    plain = fds.compose(unseeded(), fds.adamw(0.1))(linear)
    other = gpu.state(gpu.get(state))
    for seed in range(6):
        gpu.generator.manual_seed(seed)
        state, _ = calls(gpu, step, state, batch, 1)
        gpu.generator.manual_seed(seed)
        other, _ = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get(state), gpu.get(other))
    assert gpu.captures == 1


def test_kernels_draw_their_masks_from_a_seed_on_the_device():
    def loss(params, batch):
        seed = torch.randint(2**62, (), device=batch["x"].device)
        return linear(params, {**batch, "x": kernels.dropout(batch["x"], p=0.5, seed=seed)})

    gpu = Gpu()
    step, state, batch = start(gpu, loss=loss)
    plain = fds.compose(fds.adamw(0.1))(loss)
    other = gpu.state(gpu.get(state))
    seen = set()
    for _ in range(6):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
        seen.add(float(gpu.get(metrics["loss"])))
    assert len(seen) == 6


SCHEDULED = {
    "schedules": lambda: fds.adamw(
        fds.schedules.warmup_cosine(1e-1, warmup_steps=2, total_steps=7),
        betas=(fds.schedules.one_cycle_momentum(first_steps=3), 0.99),
    ),
    "delayed": lambda: fds.sgd(fds.schedules.delayed(lambda t: 0.1, updates=2, before=0.01), momentum=0.9),
    "groups": lambda: fds.by_name({"v": fds.lion(lambda t: 0.1 / (t + 1)), "*": fds.muon()}),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_follow_the_step_of_every_replay(name):
    def loss(params, batch):
        return linear(params, batch) + params["v"].square().sum(), {"rows": torch.tensor(len(batch["x"]))}

    gpu, params = Gpu(), {"w": torch.ones(3, 2), "v": torch.ones(2)}
    step, state, batch = start(gpu, loss=loss, optimizer=SCHEDULED[name](), params=params)
    plain, other = fds.compose(SCHEDULED[name]())(loss), gpu.state(gpu.get(state))
    for _ in range(8):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
    assert gpu.captures == 1 and int(gpu.get(metrics["rows"])) == 4


def test_metrics_that_come_and_go_are_refused():
    turns = []

    def loss(params, batch):
        turns.append(None)
        return linear(params, batch), {"even": 1.0} if len(turns) % 2 else {}

    gpu = Gpu()
    step, state, batch = start(gpu, loss=loss)
    state, _ = calls(gpu, step, state, batch, 1)
    with pytest.raises(ComposeError, match="took another than the last one"):
        calls(gpu, step, state, batch, 1)


def test_kernels_are_launched_in_the_rehearsal_as_in_the_capture():
    from fds.kernels.language import is_capturing, rehearsing_capture

    with rehearsing_capture(), rehearsing_capture():
        assert is_capturing(torch.device("cuda")) and not is_capturing(torch.device("cpu"))


def test_a_state_goes_on_from_a_save(tmp_path):
    gpu = Gpu()
    step, state, batch = start(gpu, fds.ema(0.9), fds.loss_scale())
    plain = fds.compose(fds.ema(0.9), fds.loss_scale(), fds.adamw(0.1))(linear)
    other = gpu.state(gpu.get(state))
    for number in range(8):
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
        if number == 3:
            fds.save(tmp_path / "run", gpu.get(state), step)
        if number == 5:
            state, other = (gpu.state(fds.load(tmp_path / "run", step, {"w": torch.zeros(3, 2)})[0]) for _ in range(2))
    assert gpu.captures == 1  # what is loaded is copied to where the graph is


def test_a_state_that_a_save_reads_is_left_alone():
    gpu = Gpu()
    step, state, batch = start(gpu)
    state, _ = calls(gpu, step, state, batch, 3)
    reader, before = object(), gpu.get(state)
    state.token.readers.add(reader)
    later, _ = calls(gpu, step, state, batch, 1)
    state.token.spent_at = None
    assert_same_bits(gpu.get(state), before)
    state.token.readers.clear()
    del state
    replays = gpu.replays
    calls(gpu, step, later, batch, 2)
    assert gpu.replays == replays + 2 and gpu.captures == 1


def test_two_states_in_turns_have_graphs_each():
    gpu = Gpu()
    step, first, batch = start(gpu)
    second = gpu.state(gpu.get(first))
    for _ in range(6):
        first, _ = calls(gpu, step, first, batch, 1)
        second, _ = calls(gpu, step, second, batch, 1)
    assert gpu.captures == 2
    assert_same_bits(gpu.get(second), gpu.get(first))


def test_memory_that_slots_follow_by_notes_is_captured():
    @fds.step.transform
    def largest():
        def noted(calls, call):
            def run(x):
                call.note("largest", "", x.detach().double().abs().max())
                return calls[0](x)

            return [calls[0].replaced(run), *calls[1:]]

        memory = fds.step.Memory("largest", lambda shapes, device: torch.zeros((), dtype=torch.float64, device=device),
                                 "replicated", merge="max")  # fmt: skip
        return lambda step: fds.step.fill(step, layer=noted, memory=memory)

    gpu, layers = Gpu(), fds.Layers([nn.Linear(3, 3), nn.Linear(3, 2)], F.mse_loss)
    parts = (largest(), fds.accumulate(2), fds.skip_nonfinite(), fds.sgd(0.1))
    step, plain = fds.compose(*parts, fds.donate(), captured(gpu))(layers), fds.compose(*parts)(layers)
    state, sizes = gpu.state(step.init(layers.init)), (1.0, 2.0, 1.5, 3.0, 2.5, 4.0)
    other = gpu.state(gpu.get(state))
    for size in sizes:
        batch = gpu.put((torch.full((4, 3), size), torch.randn(4, 2)))
        state, metrics = calls(gpu, step, state, batch, 1)
        other, wanted = calls(gpu, plain, other, batch, 1)
        assert_same_bits(gpu.get((state, metrics)), gpu.get((other, wanted)))
    assert gpu.captures == 1 and float(gpu.get(state.slots["largest"])) == 4


def test_calls_in_which_a_slot_changes_are_captured_apart():
    gpu, params = Gpu(), {"w": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))}
    prune = fds.prune_weights("w", density=0.3, offset=1, end=7, stride=2)
    loss = lambda params, x: (x @ params["w"].T).square().mean()
    steps = [fds.compose(prune, fds.donate(), *more, fds.sgd(0.1))(loss) for more in ([], [captured(gpu)])]
    states = [gpu.state(steps[0].init(params)) for _ in steps]
    with gpu:
        for call in range(13):
            x = gpu.put(torch.randn(3, 4, generator=torch.Generator().manual_seed(call)))
            states = [step(state, x)[0] for step, state in zip(steps, states, strict=True)]
    assert_same_bits(gpu.get(states[1]), gpu.get(states[0]))
    assert gpu.captures == 2 and gpu.replays > 2


def test_graphs_and_batches_are_in_the_description_and_in_no_copy():
    gpu = Gpu()
    step, state, batch = start(gpu)
    state, _ = calls(gpu, step, state, batch, 3)
    with gpu:
        assert step.describe(state).num_bytes["graphs"] == gpu.num_bytes + tree.num_bytes(batch)
    assert copy.deepcopy(step.runtime.captured) == [None]


def test_graphs_of_memory_that_nobody_uses_are_let_go():
    gpu = Gpu()
    step, state, batch = start(gpu)
    state, _ = calls(gpu, step, state, batch, 3)
    held = []
    for _ in range(3):
        held.append(tree.leaves(state.params))
        state, _ = calls(gpu, step, state, batch, 4)
    gc.collect()
    assert len({memory for memory, _ in step.runtime.captured[0].works}) == 1


def test_leaves_on_two_devices_are_refused():
    gpu = Gpu()
    step, state, batch = start(gpu, optimizer=fds.sgd(0.1), params={"w": torch.ones(3, 2), "v": torch.ones(2)})
    mixed = attrs.evolve(state, params={**state.params, "v": torch.ones(2)})
    with pytest.raises(StateError, match="captures the work of one device"):
        calls(gpu, step, mixed, batch, 1)
