"""`fds.initialize`: what it makes is what a composition by hand makes, bit for bit."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import fds
from fds.config import TrainingConfig
from fds.data import DistributedLoader, RepeatingLoader
from fds.errors import BatchError, ComposeError, ConfigError, DataError, LossError, MeshError, NotSupportedError
from tests import ranks
from tests.bits import assert_same_bits

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
BARE = {"train_batch_size": 16, "gradient_clipping": 0.0}
JSON = {**BARE, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": {"stage": 2}}
X = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
BATCH = DATA[:16]


def module(*, drop: float = 0.0, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8), *[nn.BatchNorm1d(8)] * norm, nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 1)]
        return nn.Sequential(*layers)


def layers() -> fds.Layers:
    return fds.Layers([fds.LayerSpec(nn.Linear, 4, 8), nn.Tanh(), fds.LayerSpec(nn.Linear, 8, 1)], F.mse_loss)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


class Scored(nn.Module):
    """A module that computes its loss, as those of transformers do."""

    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = module(), wrap

    def forward(self, x, y=None):
        out = self.inner(x)
        return self.wrap(None if y is None else F.mse_loss(out, y), out)


def with_outputs(loss, out):
    return types.SimpleNamespace(loss=loss, logits=out)


def train(step, state, batches, calls):
    metrics = {}
    for _, batch in zip(range(calls), batches, strict=False):
        state, metrics = step(state, batch)
    return state, metrics


def by_hand(config, loss_fn, params, mesh, *further):
    step = fds.compose(*further, *TrainingConfig.of(config).transforms(mesh))(loss_fn)
    return step, step.init(params, key=0)


# ------------------------------------------------------------------------------------------- module and loss


def both_ways(stage):
    config = {**JSON, "gradient_clipping": 0.5, "scheduler": WARMUP, "zero_optimization": {"stage": stage}}
    step, state, loader, _ = fds.initialize(module(drop=0.5), loss, config=config, training_data=DATA)
    mesh = fds.mesh(dp=-1)
    apply, params, _ = fds.functional(module(drop=0.5))
    hand, begun = by_hand(config, lambda params, batch: loss(lambda x: apply(params, x), batch), params, mesh)
    own = DistributedLoader(DATA, 16, mesh["dp"], last="wrap", num_microbatches=4 // mesh.size)
    assert repr(step.composition) == repr(hand.composition)
    return train(step, state, loader, 5), train(hand, begun, own, 5)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_and_a_loss_are_the_composition_by_hand(stage, world_size):
    for ported, by_hand in fds.simulate(lambda: both_ways(stage), world_size):
        assert_same_bits(ported, by_hand)


@pytest.mark.parametrize(
    ("wrap", "batch"),
    [
        (with_outputs, {"x": BATCH[0], "y": BATCH[1]}),
        (with_outputs, BATCH),
        (with_outputs, list(BATCH)),
        (lambda loss, out: loss, BATCH),
        (lambda loss, out: (loss, {"size": out.detach().abs().mean()}), BATCH),
    ],
    ids=["dict", "tuple", "list", "a scalar", "a scalar and metrics"],
)
def test_a_module_that_computes_its_loss_needs_no_other(wrap, batch):
    model = Scored(wrap)
    ported, found = train(*fds.initialize(model, config=JSON)[:2], [batch] * 3, 3)
    _, state, *_ = begun = fds.initialize(model.inner, loss, config=JSON)
    expected, metrics = train(*begun[:2], [BATCH] * 3, 3)
    assert_same_bits({name.removeprefix("inner."): x for name, x in ported.params.items()}, expected.params)
    assert found["loss"] == metrics["loss"] < train(begun[0], state, [BATCH], 1)[1]["loss"]


def test_a_batch_that_is_one_tensor_is_one_argument():
    class Norm(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    step, state, *_ = fds.initialize(Norm(4, 2), config=JSON)
    assert step(state, X[:16])[1]["loss"] > 0


def test_a_module_without_labels_is_told_of_its_loss():
    step, state, *_ = fds.initialize(Scored(with_outputs), config=JSON)
    with pytest.raises(LossError, match="NoneType"):
        step(state, {"x": X[:16]})


def test_batch_statistics_are_threaded_as_by_hand():
    model = module(norm=True)
    apply, params, buffers = fds.functional(model)

    def threaded(params, batch, buffers):
        out, buffers = apply.with_buffers(params, buffers, batch[0])
        return F.mse_loss(out, batch[1]), {"size": out.detach().abs().mean()}, buffers

    def reported(model, batch):
        out = model(batch[0])
        return F.mse_loss(out, batch[1]), {"size": out.detach().abs().mean()}

    hand = by_hand(JSON, fds.with_buffers(threaded, buffers), params, fds.mesh(dp=1))
    ported = fds.initialize(model, reported, config=JSON)[:2]
    after = train(*ported, [BATCH] * 3, 3)
    assert_same_bits(after, train(*hand, [BATCH] * 3, 3))
    assert after[0].buffers["1.num_batches_tracked"] == 3 * 4  # once a microbatch
    assert not torch.equal(ported[0].evaluate(after[0], BATCH)["loss"], after[1]["loss"])  # with running statistics


def test_batch_statistics_of_a_loss_with_two_calls_are_threaded_from_one_to_the_next():
    def twice(model, batch):
        return loss(model, batch) + loss(model, batch)

    step, state, *_ = fds.initialize(module(norm=True), twice, config=JSON)
    assert step(state, BATCH)[0].buffers["1.num_batches_tracked"] == 2 * 4


def test_a_mean_goes_through():
    def counted(model, batch):
        some = batch[1] > 0
        return fds.Mean(((model(batch[0]) - batch[1]).square() * some).sum(), some.sum())

    step, state, *_ = fds.initialize(module(), counted, config=JSON)
    some = BATCH[1] > 0
    with torch.no_grad():
        expected = (module()(BATCH[0]) - BATCH[1]).square()[some].double().mean()
    assert abs(step(state, BATCH)[1]["loss"] - expected) <= 2**-20 * expected  # 16 additions of float32


def test_the_module_keeps_its_values_and_its_mode():
    model = module(norm=True)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    train(*fds.initialize(model, loss, config=JSON)[:2], [BATCH] * 2, 2)
    assert_same_bits(model.state_dict(), before)
    assert model.training


def test_parameters_that_want_no_gradient_are_frozen():
    model = module()
    model[0].requires_grad_(False)
    step, state, *_ = fds.initialize(model, loss, config=JSON)
    after, _ = train(step, state, [BATCH] * 2, 2)
    assert torch.equal(after.params["0.weight"], model[0].weight)
    assert not torch.equal(after.params["3.weight"], model[3].weight)
    assert not any("0.weight" in path for path in fds.tree.paths(after.opt))


def outputs(model, batch):
    return model(batch[0])


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (module(), outputs, "outputs"),
        (module(norm=True), outputs, "outputs"),
        (Scored(lambda loss, out: out), None, "Scored"),
    ],
)
def test_errors_of_a_loss_bear_the_name_of_what_was_given(model, given, name):
    step, state, *_ = fds.initialize(model, given, config=JSON)
    with pytest.raises(LossError, match="the loss is not a scalar") as refused:
        step(state, BATCH)
    assert refused.value.where == name


# ------------------------------------------------------------------------------------------- layers


def test_layers_go_through_a_pipeline_as_by_accumulation():
    config = {**JSON, "zero_optimization": {"stage": 1}}

    def run(pp):
        mesh = fds.mesh(pp=pp, dp=-1)
        step, state, loader, _ = fds.initialize(layers(), config=config, training_data=DATA, mesh=mesh)
        state, metrics = train(step, state, loader, 5)
        return step.params(state), metrics

    (alone,) = fds.simulate(lambda: run(1), 1)
    for staged in fds.simulate(lambda: run(2), 2):
        assert_same_bits(staged, alone)


def test_layers_begin_with_the_key():
    begun = [fds.initialize(layers(), config=JSON, key=key)[1] for key in (1, 1, 2)]
    expected = fds.compose(fds.adamw(1e-2))(layers()).init(layers().init, key=1)
    assert_same_bits(begun[0].params, expected.params)
    assert_same_bits(begun[1].params, expected.params)
    assert not torch.equal(begun[2].params["0.weight"], expected.params["0.weight"])


# ------------------------------------------------------------------------------------------- optimizer and schedule


def rates(calls=4, **arguments):
    step, state, *_, schedule = fds.initialize(module(), loss, **arguments)
    found = []
    for _ in range(calls):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["lr"]))
    return found, schedule


def test_the_schedule_of_the_json_is_returned_and_runs():
    found, schedule = rates(config={**JSON, "scheduler": WARMUP})
    assert found == [float(schedule(t)) for t in range(4)] == [0.0, 0.0, *found[2:]]
    assert 0.0 < found[2] < found[3] <= 1e-2


def test_without_a_scheduler_there_is_no_schedule():
    assert rates(config=JSON) == ([1e-2] * 4, None)
    assert rates(config={**JSON, "scheduler": {}}) == ([1e-2] * 4, None)


def test_an_optimizer_stands_in_for_that_of_the_json():
    assert rates(config=BARE, optimizer=fds.sgd(0.25)) == ([0.25] * 4, None)
    assert rates(config={**BARE, "scheduler": {}}, optimizer=fds.sgd(0.25)) == ([0.25] * 4, None)


def test_a_function_to_an_optimizer_is_given_the_schedule_of_the_json():
    found, schedule = rates(config={**BARE, "scheduler": WARMUP}, optimizer=fds.lion)
    assert found == rates(config={**JSON, "scheduler": WARMUP})[0]
    step, *_ = fds.initialize(module(), loss, config={**BARE, "scheduler": WARMUP}, optimizer=fds.lion)
    assert repr(step.composition[-1]) == f"lion(lr={schedule!r})"


def test_a_function_to_an_optimizer_is_given_the_schedule_of_the_call():
    own = lambda t: 0.5 / (1 + t)
    assert rates(config=BARE, optimizer=fds.sgd, schedule=own) == ([0.5 / (1 + t) for t in range(4)], own)
    assert rates(config=BARE, optimizer=lambda: fds.sgd(0.125)) == ([0.125] * 4, None)


def test_a_schedule_of_the_call_drives_the_optimizer_of_the_json_and_is_not_late():
    own = lambda t: 0.5 / (1 + t)
    assert rates(config=JSON, schedule=own) == ([0.5 / (1 + t) for t in range(4)], own)


# ------------------------------------------------------------------------------------------- refusals

NAMED = argparse.Namespace(fds_config="ds_config.json")
TORCHS = torch.optim.SGD(module().parameters())
REFUSED = {
    "no configuration": (ConfigError, "one configuration", {}),
    "two configurations": (ConfigError, "both", {"config": JSON, "args": NAMED}),
    "a configuration that is not there": (ConfigError, "ds_config.json", {"args": NAMED}),
    "no optimizer": (ConfigError, "there is no optimizer", {"config": BARE}),
    "two optimizers": (ConfigError, "the optimizer is given twice", {"config": JSON, "optimizer": fds.sgd(0.1)}),
    "two functions to an optimizer": (ConfigError, "optimizer is given twice", {"config": JSON, "optimizer": fds.sgd}),
    "two schedules": (
        ConfigError,
        "the schedule is given twice",
        {"config": {**JSON, "scheduler": WARMUP}, "schedule": lambda t: 0.1},
    ),
    "an optimizer and a scheduler": (
        ConfigError,
        "already has a schedule",
        {"config": {**BARE, "scheduler": WARMUP}, "optimizer": fds.sgd(0.1)},
    ),
    "an optimizer and a schedule": (
        ConfigError,
        "already has a schedule",
        {"config": BARE, "schedule": lambda t: 0.1, "optimizer": fds.sgd(0.1)},
    ),
    "an optimizer of torch": (ConfigError, "not an optimizer of fds", {"config": BARE, "optimizer": TORCHS}),
    "a class of torch": (ConfigError, "not an optimizer of fds", {"config": BARE, "optimizer": torch.optim.SGD}),
    "a loss of layers": (ComposeError, "have their own criterion", {"config": JSON, "model": layers()}),
    "a module without values": (ComposeError, "fds.recipe", {"config": JSON, "model": module().to("meta")}),
    "a loss of one argument": (ComposeError, "not a loss", {"config": JSON, "loss": lambda model: 0}),
    "a function as model": (ComposeError, "not a model", {"config": JSON, "model": loss}),
    "a mesh without data ranks": (MeshError, '"dp"', {"config": JSON, "mesh": fds.mesh(x=1)}),
    "messages by way of nodes": (
        NotSupportedError,
        "zero_optimization.mics_hierarchical_params_gather",
        {"config": {**JSON, "zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": True}}},
    ),
    "a key of nothing": (ConfigError, "gradient_clipping", {"config": {**JSON, "graidient_clipping": 1.0}}),
    "batches that do not multiply": (ConfigError, "train_batch_size", {"config": {**JSON, "train_batch_size": 18}}),
    "a known value that the JSON contradicts": (
        ConfigError,
        "optimizer.params.lr",
        {"config": JSON, "auto": {"optimizer.params.lr": 1e-3}},
    ),
    "rows that fill no batch": (
        DataError,
        '"dataloader_drop_last": false',
        {"config": {**JSON, "dataloader_drop_last": True}, "training_data": DATA[:3][0]},
    ),
    "a stream of rows": (DataError, "random access", {"config": JSON, "training_data": iter([1])}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what):
    error, words, arguments = REFUSED[what]
    with pytest.raises(error, match=words):
        fds.initialize(**{"model": module(), "loss": loss, **arguments})


@pytest.mark.parametrize("norm", [False, True])
def test_a_loss_that_asks_the_model_for_an_attribute_is_told_what_to_do(norm):
    def norms(model, batch):
        assert not hasattr(model, "config") and getattr(model, "training", None) is None
        return sum(x.square().sum() for x in model.parameters())

    step, state, *_ = fds.initialize(module(norm=norm), norms, config=JSON)
    with pytest.raises(LossError) as error:
        step(state, BATCH)
    assert error.value.got == "model.parameters" and "loss_fn(params, batch)" in error.value.hint


# ------------------------------------------------------------------------------------------- where a configuration is


@pytest.mark.parametrize("flag", ["--fds_config", "--fds-config", "--deepspeed_config"])
def test_arguments_name_the_configuration(flag, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(JSON))
    args = fds.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed", flag, str(path)])
    named, given = (fds.initialize(module(), loss, **one)[0] for one in ({"args": args}, {"config": JSON}))
    assert args.fds and repr(named) == repr(given)


def test_arguments_without_a_configuration_leave_it_to_the_call():
    args = fds.add_config_arguments(argparse.ArgumentParser()).parse_args([])
    assert (args.fds, args.fds_config) == (False, None)
    assert fds.initialize(module(), loss, args=args, config=JSON)[0]


def test_arguments_of_deepspeeds_own_parser_name_it_too(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(JSON))
    args = argparse.Namespace(deepspeed=True, deepspeed_config=str(path), local_rank=0)
    assert fds.initialize(module(), loss, args=args)[0]


def test_a_record_and_a_dict_and_a_path_are_one(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(JSON))
    made = [
        repr(fds.initialize(module(), loss, config=one)[0]) for one in (JSON, path, str(path), TrainingConfig.of(JSON))
    ]
    assert made == made[:1] * 4


def test_autos_are_filled_in():
    asked = {**JSON, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "train_micro_batch_size_per_gpu": "auto"}
    auto = {"optimizer.params.lr": 0.125, "train_micro_batch_size_per_gpu": 2}
    step, *_ = fds.initialize(module(), loss, config=asked, auto=auto)
    assert repr(step.composition) == (
        "(accumulate(8), shard_optimizer(mesh['dp'], stage=2), adamw(lr=0.125, weight_decay=0.0))"
    )


# ------------------------------------------------------------------------------------------- data


def shares(**keys):
    def run():
        _, _, loader, _ = fds.initialize(module(), loss, config={**JSON, **keys}, training_data=DATA)
        assert loader is not None
        return list(loader)

    return run


@pytest.mark.parametrize(("drop", "num"), [(True, 6), (False, 7)])
def test_ranks_read_their_shares_of_every_batch(drop, num):
    (alone,) = fds.simulate(shares(dataloader_drop_last=drop), 1)
    assert len(alone) == num  # of 100 rows in batches of 16: 4 are left over
    both = fds.simulate(shares(dataloader_drop_last=drop), 2)
    for whole, *parts in zip(alone, *both, strict=True):
        assert [len(x) for x in whole] == [16, 16] and all(len(x) == 8 for part in parts for x in part)
        assert_same_bits([torch.cat(xs) for xs in zip(*parts, strict=True)], list(whole))


def test_a_collate_function_sees_the_rows_of_a_share():
    seen = []

    def collate(rows):
        seen.append(len(rows))
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    def run():
        made = fds.initialize(Scored(with_outputs), config=JSON, training_data=DATA, collate_fn=collate)
        return train(*made[:3], 2)

    ranks_agree = fds.simulate(run, 2)
    assert seen == [8] * 4
    assert_same_bits(ranks_agree[0][1], ranks_agree[1][1])


def test_the_key_orders_the_data():
    orders = [
        next(iter(fds.initialize(module(), loss, config=JSON, training_data=DATA, key=key)[2])) for key in (1, 1, 2)
    ]
    assert_same_bits(list(orders[0]), list(orders[1]))
    assert not torch.equal(orders[0][0], orders[2][0])


def test_without_data_there_is_no_loader():
    assert fds.initialize(module(), loss, config=JSON)[2] is None


def test_copies_of_shards_read_rows_of_their_own():
    def run():
        mesh = fds.mesh(replicate=2, dp=2)
        _, _, loader, _ = fds.initialize(module(), loss, config=JSON, training_data=DATA, mesh=mesh)
        return next(iter(loader))[0]

    assert torch.cat(fds.simulate(run, 4)).unique(dim=0).shape == (16, 4)


# ------------------------------------------------------------------------------------------- other rows


def takes(step, state, batch):
    """Return the number of updates after a call, or what it is refused with."""
    try:
        return int(step(state, batch)[0].step)
    except BatchError as error:
        return error.got, error.want.split(":")[0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [("8 rows", "16 rows"), 1, ("32 rows", "16 rows")]),  # a loader of microbatches, as in DeepSpeed
        ({"dataloader_drop_last": True}, [("8 rows", "16 rows"), 1, ("32 rows", "16 rows")]),
        ({"dataloader_drop_last": False}, [1, 1, ("32 rows", "16 rows")]),
        ({"train_batch_size": 32}, [("8 rows", "32 rows"), ("16 rows", "32 rows"), 1]),
    ],
)
def test_other_rows_than_those_of_the_json_are_refused_but_for_a_shorter_last_batch(keys, expected):
    step, state, *_ = fds.initialize(module(), loss, config={**JSON, **keys})
    batches = [DATA[: 8 * n] for n in (1, 2, 4)]
    assert [takes(step, state, batch) for batch in batches] == expected
    assert all(step.evaluate(state, batch)["loss"].isfinite() for batch in batches)
    parts = in_parts(step.split.num_microbatches, rows=32)
    assert takes(step, state, parts) == expected[2]


def in_parts(n, rows):
    return fds.Microbatches([DATA[i * rows // n : (i + 1) * rows // n] for i in range(n)])


# ------------------------------------------------------------------------------------------- going on


def resumable(micro, stage):
    model = module(drop=0.5).double()
    config = {
        **BARE,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
    }
    data = TensorDataset(*(x.double() for x in DATA.tensors))
    step, state, loader, _ = fds.initialize(model, loss, config=config, training_data=data)
    return step, state, loader, dict(model.named_parameters())


def first_half(folder, micro, stage):
    step, state, loader, _ = resumable(micro, stage)
    batches = RepeatingLoader(loader)
    state, _ = train(step, state, batches, 9)  # ends in the second epoch of 6.25 batches
    fds.save(folder, state, step)
    state, metrics = train(step, state, batches, 4)
    return step.params(state), metrics


def second_half(folder, micro, stage):
    step, _, loader, params = resumable(micro, stage)
    state, _ = fds.load(folder, step, params)
    state, metrics = train(step, state, RepeatingLoader(loader.starting(state.calls)), 4)
    return step.params(state), metrics


@pytest.mark.parametrize(("before", "after", "stage"), [(1, 1, 0), (2, 2, 3), (1, 2, 2), (2, 1, 3)])
def test_a_run_goes_on_in_mid_epoch_on_any_number_of_ranks_bit_for_bit(before, after, stage, tmp_path):
    """With 8 rows a microbatch there are two in a batch, on whichever ranks: they are added in one order."""
    straight = fds.simulate(lambda: first_half(tmp_path, 8, stage), before)
    resumed = fds.simulate(lambda: second_half(tmp_path, 8, stage), after)
    for one in (*straight, *resumed):
        assert_same_bits(one, straight[0])


def test_with_several_microbatches_a_rank_another_number_of_ranks_may_add_in_another_order(tmp_path):
    """AdamW divides by sqrt(v) + eps, so a gradient's rounding d moves a parameter by at most lr d / eps = d a call.

    A gradient is some 2**7 products and sums, none above 2**3. What parameters have drifted comes back in gradients,
    times a curvature below 2**4: the drift grows at most by 1 + 2**4 a call. Measured: 3e-17.
    """
    straight = fds.simulate(lambda: first_half(tmp_path, 4, 2), 1)
    resumed = fds.simulate(lambda: second_half(tmp_path, 4, 2), 2)
    bound = torch.finfo(torch.float64).eps * 2**7 * 2**3 * sum(17.0**i for i in range(4))
    wanted, got = straight[0][0], resumed[0][0]
    assert all((got[name] - wanted[name]).abs().max() <= bound for name in wanted)


# ------------------------------------------------------------------------------------------- ranks


def joins():
    step, state, loader, _ = fds.initialize(module(), loss, config=JSON, training_data=DATA)
    metrics = train(step, state, loader, 3)[1]
    print(fds.mesh(dp=-1).size, float(metrics["loss"]).hex())


def test_ranks_that_were_launched_are_joined():
    """In the environment of torchrun, and nothing else called."""

    def run():
        step, state, loader, _ = fds.initialize(module(), loss, config=JSON, training_data=DATA)
        return float(train(step, state, loader, 3)[1]["loss"]).hex()

    expected = fds.simulate(run, 2)[0]
    for status, output in ranks.spawn(joins, world_size=2):
        assert status == 0, output
        assert output.split() == ["2", expected]


# ------------------------------------------------------------------------------------------- transformers

ARGUMENTS = {"learning_rate": 0.125, "warmup_steps": 0, "max_steps": -1}
WARM = "scheduler.params.warmup_num_steps"
TOTAL = "scheduler.params.total_num_steps"


@pytest.mark.parametrize(
    ("arguments", "total", "found"),
    [
        ({}, None, {WARM: 1}),  # DeepSpeed takes no 0, so transformers says 1
        ({"warmup_steps": 7}, None, {WARM: 7}),
        ({"warmup_steps": 7, "max_steps": 30}, None, {WARM: 7, TOTAL: 30}),
        ({"warmup_steps": 7}, 40, {WARM: 7, TOTAL: 40}),
        ({"warmup_steps": 0.1}, 45, {WARM: 5, TOTAL: 45}),  # a share, as transformers 5 has it
        ({"warmup_ratio": 0.1, "max_steps": 45}, None, {WARM: 5, TOTAL: 45}),  # and 4
        ({"warmup_ratio": 0.1}, None, {}),  # of nobody knows how many
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, 45, {WARM: 3, TOTAL: 45}),
    ],
)
def test_the_steps_of_a_warm_up_are_those_of_transformers(arguments, total, found):
    given = types.SimpleNamespace(**{**ARGUMENTS, **arguments})
    auto = fds.config.training_arguments(given, num_training_steps=total)
    assert {path: auto[path] for path in (WARM, TOTAL) if path in auto} == found


def test_what_transformers_only_fills_in_contradicts_nothing():
    params = {"warmup_min_lr": 1e-6, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    asked = {
        **JSON,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR", "params": params},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500},
    }
    auto = fds.config.training_arguments(types.SimpleNamespace(**ARGUMENTS), hidden_size=64)
    config = TrainingConfig.of(asked).resolve(auto=auto)
    assert config["zero_optimization.reduce_bucket_size"] == 500
    assert config.scheduler.arguments.warmup_min_lr == 1e-6 and config.scheduler.arguments.warmup_max_lr == 0.125


@pytest.mark.peers
def test_a_model_of_transformers_trains_by_its_arguments():
    """The arguments as the class has them: to make one would need accelerate."""
    import dataclasses

    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    asked = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    }
    arguments = types.SimpleNamespace(**{one.name: one.default for one in dataclasses.fields(TrainingArguments)})
    arguments.gradient_accumulation_steps, arguments.max_steps = 2, 50
    arguments.learning_rate, arguments.per_device_train_batch_size = 1e-2, 4
    auto = fds.config.training_arguments(arguments, hidden_size=16)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    tokens = torch.arange(8 * 8).view(8, 8) % 32
    batch = {"input_ids": tokens, "labels": tokens}

    step, state, *_ = fds.initialize(model, config=asked, auto=auto)
    state, metrics = train(step, state, [batch] * 30, 30)
    apply, params, _ = fds.functional(model)
    config = TrainingConfig.of(asked).resolve(auto=auto)
    hand = fds.compose(*config.transforms(fds.mesh(dp=1)))(lambda params, batch: apply(params, **batch).loss)
    expected, told = train(hand, hand.init(params, key=0), [batch] * 30, 30)
    assert_same_bits((state, metrics), (expected, told))
    assert metrics["loss"] < step.evaluate(step.init(params), batch)["loss"] - 1.0


# ------------------------------------------------------------------------------------------- DeepSpeed

GUIDE = Path(__file__).parents[2] / "docs" / "from-deepspeed.md"


@pytest.mark.peers
def test_the_left_side_of_the_guide_runs_in_deepspeed_and_what_it_saves_goes_on_here(tmp_path):
    blocks = re.findall(r"^```(python|Python)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    before = blocks[0][1]
    left = [
        code for language, code in blocks if language == "Python" and not re.search("PipelineModule|transformers", code)
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DS_ACCELERATOR": "cpu",
    }
    # without the kernel for ranks of one machine, whose build waits for ever on a lock that a killed build has left
    first = "import sys, deepspeed\nsys.modules['deepspeed.comm.torch'].build_shm_op = lambda: None\n"
    (tmp_path / "left.py").write_text("".join([first, before, *left, 'print("found", float(found))\n']))
    done = subprocess.run(
        [sys.executable, "left.py"], cwd=tmp_path, env=os.environ | alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = float(re.search(r"^found (.*)$", done.stdout, re.MULTILINE)[1])

    here = {}
    exec(before.partition("Path(")[0], here)
    model, x = here["Net"](), here["x"]
    step, *_ = fds.initialize(model, loss, config=tmp_path / "ds_config.json")
    state, client = fds.import_deepspeed(tmp_path / "run", step, dict(model.named_parameters()))
    found = step.evaluate(state, (x, x.sum(1, True)))["loss"]
    assert (int(state.step), client) == (31, {"seen": 2000})  # 126 microbatches, of which 4 are an update
    assert abs(found - expected) <= 1000 * torch.finfo(torch.float32).eps * expected  # a mean of 1000 rows
