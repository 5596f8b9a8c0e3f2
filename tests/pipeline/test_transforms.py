"""A pipeline among other transforms: what each rank holds, which patterns mean what, what is counted once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans, tree
from fds.errors import FdsError
from tests.bits import assert_rounding, assert_same_bits
from tests.laws.problems import Block, Rows, language, token_mean

BATCH = language(0)
EMBED = fds.TiedLayerSpec("embed", nn.Embedding, 7, 6)
HEAD = fds.TiedLayerSpec("embed", nn.Embedding, 7, 6, forward_fn=lambda m, x: F.linear(x, m.weight))
LAYERS = [
    EMBED,
    nn.Dropout(0.1),
    fds.LayerSpec(Block, 6, 0.1),
    fds.LayerSpec(Rows, 6),
    fds.LayerSpec(Block, 6, 0.1),
    torch.tanh,
    HEAD,
]
CUT = [0, 3, 7]  # the embedding on rank 0, and the head on rank 1
NAMES = [
    {"embed.weight", *(f"2.{n}" for n in ("norm.weight", "norm.bias", "linear.weight", "linear.bias"))},
    {
        "embed.weight",
        "3.norm.weight",
        "3.norm.bias",
        *(f"4.{n}" for n in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")),
    },
]


def one_process(*transforms, optimizer=None, num_microbatches=3, batch=BATCH, layers=LAYERS):
    """Return the step with accumulation, and what comes of two calls."""
    loss = fds.Layers(layers, token_mean)
    step = fds.compose(fds.accumulate(num_microbatches), *transforms, optimizer or fds.sgd(0.1))(loss)
    return called(step, batch)


def on_ranks(*transforms, optimizer=None, schedule=plans.one_f_one_b, batches=(BATCH, BATCH), partition=CUT):
    """Return the same of two ranks."""

    def run():
        axis = fds.mesh(pp=2)["pp"]
        cut = fds.pipeline(schedule, axis, num_microbatches=3, partition=partition)
        step = fds.compose(cut, *transforms, optimizer or fds.sgd(0.1))(fds.Layers(LAYERS, token_mean))
        return called(step, batches[axis.index])

    return fds.simulate(run, 2)


def called(step, batch):
    state = step.init(step.loss.init, key=1)
    for _ in range(2):
        state, metrics = step(state, batch)
    return step, state, metrics, step.params(state)


def assert_close(got, want):
    assert_rounding(got, want, additions=64, scale=max(float(x.abs().max()) for x in tree.leaves(want)))


def test_a_rank_holds_its_stages_under_the_names_of_the_whole_model():
    _, whole, _, params = one_process()
    for rank, (_, state, _, gathered) in enumerate(on_ranks()):
        assert state.params.keys() == NAMES[rank]
        assert state.buffers.keys() == (set(whole.buffers) if rank else set())
        assert gathered.keys() == params.keys() == NAMES[0] | NAMES[1]


def test_ranks_start_from_the_values_of_one_process():
    loss = fds.Layers(LAYERS, token_mean)
    want = fds.compose(fds.sgd(0.1))(loss).init(loss.init, key=1)

    def run():
        cut = fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=3, partition=CUT)
        step = fds.compose(cut, fds.sgd(0.1))(fds.Layers(LAYERS, token_mean))
        return step.init(step.loss.init, key=1)

    for state in fds.simulate(run, 2):
        assert_same_bits(state.params, {name: want.params[name] for name in state.params})
        assert_same_bits(state.buffers, {name: want.buffers[name] for name in state.buffers})


def test_tied_copies_start_from_the_values_of_the_first_rank_that_has_them():
    def run():
        axis = fds.mesh(pp=2)["pp"]
        cut = fds.pipeline(plans.gpipe, axis, num_microbatches=3, partition=CUT)
        step = fds.compose(cut, fds.sgd(0.1))(fds.Layers(LAYERS, token_mean))
        given = step.loss.init(fds.random.key(axis.index))
        return given["embed.weight"], step.init(given, key=0).params["embed.weight"]

    (first, here), (other, there) = fds.simulate(run, 2)
    assert not torch.equal(first, other)
    assert_same_bits((here, there), (first, first))


@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1, plans.zb_v], ids=lambda s: s.__name__)
def test_a_tied_parameter_counts_once_in_the_norm(schedule):
    _, _, want, params = one_process(fds.clip_by_global_norm(0.01))
    partition = CUT if schedule is not plans.zb_v else [0, 2, 3, 5, 7]
    results = on_ranks(fds.clip_by_global_norm(0.01), schedule=schedule, partition=partition)
    for _, _, metrics, got in results:
        assert_close({"norm": metrics["grad_norm"]}, {"norm": want["grad_norm"]})
        assert_close(got, params)


def test_the_norm_of_a_model_that_is_all_tied_is_that_of_one_copy():
    """Counted twice, it would be larger by sqrt(2)."""
    layers = [EMBED, torch.tanh, HEAD]
    clip = fds.clip_by_global_norm(1e9)
    plain = fds.compose(fds.accumulate(3), clip, fds.sgd(0.1))(fds.Layers(layers, token_mean))
    _, _, want, _ = called(plain, BATCH)

    def run():
        cut = fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=3, partition=[0, 1, 3])
        return called(fds.compose(cut, clip, fds.sgd(0.1))(fds.Layers(layers, token_mean)), BATCH)[2]

    for metrics in fds.simulate(run, 2):
        assert_close({"norm": metrics["grad_norm"]}, {"norm": want["grad_norm"]})


@pytest.mark.parametrize("pattern", ["2.*", "4.linear.*", "embed.weight", "*.bias", "[24].*"])
def test_a_pattern_freezes_where_its_parameters_are(pattern):
    step, _, _, want = one_process(fds.freeze(pattern))
    initial = step.init(step.loss.init, key=1).params
    frozen = tree.match([pattern], list(initial), what="test")
    assert frozen
    for _, _, _, got in on_ranks(fds.freeze(pattern)):
        assert_close(got, want)
        assert_same_bits({name: got[name] for name in frozen}, {name: initial[name] for name in frozen})


def beside_data_ranks(*transforms, stage, bucket_bytes, layers=LAYERS, partition=CUT):
    """Return the parameters of one process, and those of two pipelines of two ranks, each with the same rows."""
    twice = tree.map(lambda x: torch.cat([x, x]), BATCH)
    _, _, _, want = one_process(*transforms, num_microbatches=6, batch=twice, layers=layers)

    def run():
        mesh = fds.mesh(pp=2, dp=2)
        cut = fds.pipeline(plans.zb_h1, mesh["pp"], num_microbatches=3, partition=partition)
        sharded = fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=bucket_bytes)
        return called(fds.compose(cut, sharded, *transforms, fds.sgd(0.1))(fds.Layers(layers, token_mean)), BATCH)[3]

    return want, fds.simulate(run, 4)


@pytest.mark.parametrize("stage", range(4))
def test_all_parameters_of_one_stage_may_be_frozen_beside_data_ranks(stage):
    want, ranks = beside_data_ranks(fds.freeze("2.*", "embed.*"), stage=stage, bucket_bytes=64)
    for got in ranks:
        assert_close(got, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tied_parameter_shares_no_bucket_with_those_of_its_stages_alone(stage):
    want, ranks = beside_data_ranks(stage=stage, bucket_bytes=2**20)
    for got in ranks:
        assert_close(got, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_bucket_waits_for_each_part_of_the_gradient_of_layers_that_one_stage_has_twice(stage):
    tied = fds.TiedLayerSpec("block", Block, 6, 0.1)  # in backward its first part comes early, its last one last
    layers = [EMBED, tied, fds.LayerSpec(Block, 6, 0.1), tied, HEAD]
    want, ranks = beside_data_ranks(stage=stage, bucket_bytes=2**20, layers=layers, partition=[0, 1, 5])
    for got in ranks:
        assert_close(got, want)


def test_an_optimizer_by_name_may_have_patterns_of_another_stage():
    optimizer = fds.by_name({"2.*": fds.adamw(0.01), "4.*": fds.sgd(0.1, momentum=0.9), "*": fds.lion(0.01)})
    _, _, _, want = one_process(optimizer=optimizer)
    for _, _, _, got in on_ranks(optimizer=optimizer):
        assert_close(got, want)


REFUSED = {
    "freeze": [fds.freeze("9.*"), fds.sgd(0.1)],
    "by_name": [fds.by_name({"9.*": fds.sgd(1.0), "*": fds.sgd(0.1)})],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pattern_of_no_stage_is_refused_on_every_rank(name):
    def run():
        cut = fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=3, partition=CUT)
        step = fds.compose(cut, *REFUSED[name])(fds.Layers(LAYERS, token_mean))
        with pytest.raises(FdsError, match=r"9\.\*"):
            step.init(step.loss.init, key=1)

    fds.simulate(run, 2)


def test_averages_are_of_the_parameters_of_the_rank():
    _, want, *_ = one_process(fds.ema(0.9))
    whole = tree.paths(want.slots["ema"])
    seen = set()
    for _, state, *_ in on_ranks(fds.ema(0.9)):
        mine = tree.paths(state.slots["ema"])
        floats = {name: x for name, x in mine.items() if x.is_floating_point()}
        assert floats and floats.keys() <= whole.keys()
        assert_close(floats, {name: whole[name] for name in floats})
        seen |= floats.keys()
    assert seen == {name for name, x in whole.items() if x.is_floating_point()}


def test_a_rank_between_the_ends_may_pass_none():
    layers = [EMBED, fds.LayerSpec(Block, 6, 0.1), fds.LayerSpec(Block, 6, 0.1), HEAD]
    _, _, metrics, want = called(fds.compose(fds.accumulate(3), fds.sgd(0.1))(fds.Layers(layers, token_mean)), BATCH)

    def run():
        axis = fds.mesh(pp=3)["pp"]
        cut = fds.pipeline(plans.one_f_one_b, axis, num_microbatches=3, partition=[0, 1, 3, 4])
        step = fds.compose(cut, fds.sgd(0.1))(fds.Layers(layers, token_mean))
        step, state, told, params = called(step, None if axis.index == 1 else BATCH)
        return told, params, step.evaluate(state, None if axis.index == 1 else BATCH, outputs=True)

    results = fds.simulate(run, 3)
    for told, params, shown in results:
        assert_close(params, want)
        assert_close({"loss": told["loss"]}, {"loss": metrics["loss"]})
        assert_same_bits(shown, results[0][2])
        assert shown["outputs"].shape == (12, 4, 7)


@pytest.mark.parametrize("rows", [12, 7, 1])
def test_evaluation_takes_any_number_of_rows(rows):
    batch = tree.map(lambda x: x[:rows], BATCH)
    layers = [EMBED, fds.LayerSpec(Block, 6, 0.1), HEAD]
    plain = fds.compose(fds.accumulate(3), fds.sgd(0.1))(fds.Layers(layers, token_mean))
    want = plain.evaluate(plain.init(plain.loss.init, key=1), batch, outputs=True)

    def run():
        cut = fds.pipeline(plans.interleaved(1), fds.mesh(pp=2)["pp"], num_microbatches=4, partition=[0, 2, 3])
        step = fds.compose(cut, fds.sgd(0.1))(fds.Layers(layers, token_mean))
        return step.evaluate(step.init(step.loss.init, key=1), batch, outputs=True)

    for got in fds.simulate(run, 2):
        assert_close(got, want)


def crop(x):
    """Leave out as many positions as the first row says."""
    return x[:, int(x[0, 0, 0]) :]


@pytest.mark.parametrize("schedule", [plans.gpipe, plans.zb_h1], ids=["gpipe", "zb_h1"])
def test_microbatches_may_differ_in_shape_where_that_was_said(schedule):
    layers = [crop, fds.LayerSpec(nn.Linear, 6, 6), fds.LayerSpec(Block, 6, 0.1), fds.LayerSpec(nn.Linear, 6, 1)]
    loss = fds.Layers(layers, lambda out, target: (out.mean((1, 2)) - target).square().mean())
    x = torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(0))
    x[:, 0, 0] = torch.tensor([0.0, 0.0, 2.0, 2.0, 1.0, 1.0])
    batch = (x, torch.ones(6))
    *_, want = called(fds.compose(fds.accumulate(3), fds.sgd(0.1))(loss), batch)

    def run():
        axis = fds.mesh(pp=2)["pp"]
        cut = fds.pipeline(schedule, axis, num_microbatches=3, partition=[0, 2, 4], dynamic_shapes=True)
        return called(fds.compose(cut, fds.sgd(0.1))(loss), batch)[3]

    for got in fds.simulate(run, 2):
        assert_close(got, want)


@pytest.mark.parametrize("partition", [[0, 1, 3, 6], [0, 2, 4, 6], [0, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_a_module_that_stands_three_times_is_one_in_any_stages(partition):
    """In one stage or in several, with others between that have no parameters."""
    torch.manual_seed(0)
    module = nn.Linear(6, 6)
    layers = [module, torch.tanh, module, nn.Linear(6, 6), torch.sin, module]
    loss = fds.Layers(layers, nn.MSELoss())
    batch = tuple(torch.randn(12, 6) for _ in range(2))
    _, _, _, want = called(fds.compose(fds.accumulate(3), fds.sgd(0.1))(loss), batch)

    def run():
        axis = fds.mesh(pp=-1)["pp"]
        cut = fds.pipeline(plans.zb_h1, axis, num_microbatches=3, partition=partition)
        _, state, _, params = called(fds.compose(cut, fds.sgd(0.1))(loss), batch)
        return params, state.params

    results = fds.simulate(run, len(partition) - 1)
    copies = [held["0.weight"] for _, held in results if "0.weight" in held]
    for params, _ in results:
        assert_close(params, want)
    for copy in copies:
        assert_same_bits(copy, copies[0])


@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1])
def test_a_stage_that_begins_with_a_layer_in_place_is_recomputed(schedule):
    """What the stage was sent is needed again, and the layer would have written over it."""
    linear = fds.LayerSpec(nn.Linear, 6, 6)
    loss = fds.Layers([linear, linear, nn.SiLU(inplace=True), linear], nn.MSELoss())
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(6, 6, generator=g), torch.randn(6, 6, generator=g)

    def run(split):
        return called(fds.compose(split(), fds.checkpoint_activations(), fds.sgd(0.1))(loss), batch)

    cut = lambda: fds.pipeline(schedule, fds.mesh(pp=2)["pp"], num_microbatches=3, partition=[0, 2, 4])
    _, _, metrics, params = run(lambda: fds.accumulate(3))
    for _, _, told, whole in fds.simulate(lambda: run(cut), 2):
        assert_close((told, whole), (metrics, params))


@pytest.mark.parametrize("schedule", [plans.gpipe, plans.one_f_one_b, plans.zb_h1])
def test_where_activations_wait_changes_no_bit(tmp_path, schedule):
    stored = lambda store: fds.checkpoint_activations(store=store, policy="matmuls")
    here = on_ranks(stored("device"), schedule=schedule)
    there = on_ranks(stored(fds.disk(tmp_path)), schedule=schedule)
    assert_same_bits([called[1:] for called in there], [called[1:] for called in here])
