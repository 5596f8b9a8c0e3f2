"""Defects of DeepSpeed that the same JSON does not bring back: what `fds.config.decisions.INTENDED` names."""

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.errors import ConfigError
from tests.bits import assert_same_bits

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def linear(params, batch):
    """Whose gradient by w is the mean of the batch."""
    return (params["w"] * batch.mean(0)).sum()


def composed(data: dict, loss=linear, **axes: int):
    config = TrainingConfig.of({"train_micro_batch_size_per_gpu": 2, **data})
    return fds.compose(*config.transforms(fds.mesh(**axes or {"dp": 1})))(loss)


def updates(step, params, batches: list) -> list:
    """Return all parameters, and the metrics, after each of the batches."""
    state, told = step.init(params, key=0), []
    for batch in batches:
        state, metrics = step(state, batch)
        told.append((step.params(state), metrics))
    return told


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float16_updates_alike_at_every_stage(stage):
    """At stage 0 DeepSpeed divides by a scale that it never multiplied by: a move of 0.125 / 256."""
    data = {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "optimizer": SGD,
        "zero_optimization": {"stage": stage},
    }

    def moves():
        step = composed(data, dp=2)
        told = updates(step, {"w": torch.zeros(2)}, [torch.full((2, 2), 0.125)])
        return [float(params["w"][0]) for params, _ in told]

    assert fds.simulate(moves, 2) == [[-0.125], [-0.125]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hysteresis_is_followed_at_every_stage(stage):
    """At stage 0 DeepSpeed halves the scale at the first overflow."""
    data = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 3},
        "optimizer": SGD,
        "zero_optimization": {"stage": stage},
    }
    told = updates(composed(data), {"w": torch.zeros(2)}, [torch.full((2, 2), torch.inf)] * 4)
    assert [float(metrics["loss_scale"]) for _, metrics in told] == [256, 256, 256, 128]


def layered() -> fds.Layers:
    spec = fds.LayerSpec
    return fds.Layers([spec(nn.Linear, 3, 4), nn.Tanh(), nn.Dropout(0.5), spec(nn.Linear, 4, 1)], nn.MSELoss())


BATCHES = [(torch.linspace(i, i + 1, 6).view(2, 3), torch.ones(2, 1)) for i in range(3)]


@pytest.mark.parametrize("stage", [0, 3])
def test_computing_activations_again_changes_no_bit_under_torch_autograd_grad(stage):
    """A step differentiates by torch.autograd.grad, which DeepSpeed's checkpointing refuses."""
    data = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    again = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}
    kept, computed_again = (composed(one, layered()) for one in (data, {**data, **again}))
    assert "checkpoint_activations" in str(computed_again) and "checkpoint_activations" not in str(kept)
    params = layered().init
    assert_same_bits(updates(computed_again, params, BATCHES), updates(kept, params, BATCHES))


def test_layers_with_seeds_are_divided_by_their_parameters():
    """DeepSpeed seeds them by a number of numpy's, which Python 3.11 refuses."""
    data = {"optimizer": SGD, "pipeline": {"partition": "parameters", "seed_layers": True}}

    def run():
        layers = layered()
        step = composed(data, layers, pp=2, dp=1)
        state, metrics = step(step.init(layers.init, key=0), BATCHES[0])
        return sorted(state.params), float(metrics["loss"])

    (first, loss), (second, other) = fds.simulate(run, 2)
    assert (first, second) == (["0.bias", "0.weight"], ["3.bias", "3.weight"]) and loss == other > 0


def test_the_json_is_late_by_an_update_and_says_so_and_a_skipped_step_is_no_update():
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = TrainingConfig.of(
        {
            "train_batch_size": 2,
            "optimizer": SGD,
            "scheduler": warmup,
            "fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 8},
        }
    )
    assert "fds.schedules.delayed(fds.schedules.warmup(1.0" in config.explain({"dp": 1})
    good, bad = torch.ones(2, 2), torch.full((2, 2), torch.inf)
    step = fds.compose(*config.transforms(fds.mesh(dp=1)))(linear)
    state, rates = step.init({"w": torch.zeros(2)}), []
    for batch in (good, bad, good, bad, good, good):
        state, metrics = step(state, batch)
        rates.append(float(metrics["lr"]))
    assert (int(state.step), int(state.calls)) == (4, 6), "DeepSpeed counts six steps"
    assert rates == [0.0, 0.0, 0.0, 0.25, 0.25, 0.5]

    by_hand = fds.compose(fds.sgd(fds.schedules.warmup(1.0, warmup_steps=4, kind="linear")))(linear)
    told = updates(by_hand, {"w": torch.zeros(2)}, [good] * 3)
    assert [float(metrics["lr"]) for _, metrics in told] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("data", "where", "near"),
    [
        ({"graidient_clipping": 0.1}, "graidient_clipping", "gradient_clipping"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"aio": {"blok_size": 1}}, "aio.blok_size", "block_size"),
        (
            {"activation_checkpointing": {"cpu_checkpoint": True}},
            "activation_checkpointing.cpu_checkpoint",
            "cpu_checkpointing",
        ),
        ({"optimizer": {"type": "Adam", "param": {"lr": 1e-4}}}, "optimizer.param", "params"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate", ""),
        ({"pipeline": {"partitions": "uniform"}}, "pipeline.partitions", "partition"),
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag", "stage"),
    ],
)
def test_a_typing_error_is_refused_in_every_group(data, where, near):
    with pytest.raises(ConfigError, match="no such key") as error:
        TrainingConfig.of(data)
    assert error.value.where == where and near in error.value.hint


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_by_which_gradients_are_clipped_is_known_at_every_stage(stage):
    data = {"optimizer": SGD, "zero_optimization": {"stage": stage}}
    ((params, metrics),) = updates(composed(data), {"w": torch.zeros(2)}, [torch.tensor([[3.0, 4.0]] * 2)])
    norm = float(params["w"].double().norm())  # 5 / (5 + 1e-6) and some roundings of 2**-24
    assert float(metrics["grad_norm"]) == 5.0 and norm == pytest.approx(1.0, abs=2e-7 + 4 * 2**-24)


def test_two_trainings_in_one_process_are_as_each_alone():
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    jsons = [
        {"optimizer": adam, "bf16": {"enabled": True}, "activation_checkpointing": {"cpu_checkpointing": True}},
        {"optimizer": SGD, "zero_optimization": {"stage": 3}, "pipeline": {"activation_checkpoint_interval": 2}},
    ]

    def alone():
        layers = [layered(), layered()]
        return [updates(composed(data, one), one.init, BATCHES) for data, one in zip(jsons, layers, strict=True)]

    def in_turn():
        layers = [layered(), layered()]
        steps = [composed(data, one) for data, one in zip(jsons, layers, strict=True)]
        states, told = [step.init(one.init, key=0) for step, one in zip(steps, layers, strict=True)], [[], []]
        for batch in BATCHES:
            for i, step in enumerate(steps):
                states[i], metrics = step(states[i], batch)
                told[i].append((step.params(states[i]), metrics))
        return told

    assert_same_bits(in_turn(), alone())


def test_bias_correction_is_followed_where_an_optimizer_takes_it():
    for kind in ("Adam", "AdamW", "Lamb"):
        optimizers = [{"type": kind, "params": {"lr": 0.1, "bias_correction": corrects}} for corrects in (True, False)]
        steps = [composed({"optimizer": one}) for one in optimizers]
        moved = [updates(step, {"w": torch.ones(2)}, [torch.ones(2, 2)])[0][0]["w"] for step in steps]
        assert not torch.equal(*moved), kind


ONE_BIT = {
    kind: {"type": kind, "params": {"lr": 0.1, "freeze_step": 3, "comm_backend_name": "nccl"}}
    for kind in ("OneBitAdam", "OneBitLamb")
}
every_one_bit = pytest.mark.parametrize("asked", ONE_BIT.values(), ids=ONE_BIT)


@every_one_bit
def test_the_warm_up_of_1_bit_optimizers_is_one_call_shorter_and_every_call_updates(asked):
    step = composed({"optimizer": asked})
    assert f"{asked['type'].lower().replace('bit', 'bit_')}(lr=0.1, freeze_step=2)" in str(step)
    (first, _), (second, _) = updates(step, {"w": torch.ones(2)}, [torch.ones(2, 2)] * 2)
    assert not torch.equal(first["w"], torch.ones(2)) and not torch.equal(second["w"], first["w"])


def test_0_1_adam_has_as_many_updates_of_the_first_phase_as_the_json_says():
    params = {"lr": 0.1, "var_freeze_step": 3, "local_step_clipper": 2, "cuda_aware": True, "betas": [0.8, 0.9]}
    step = composed({"optimizer": {"type": "ZeroOneAdam", "params": params}})
    told = "zero_one_adam(lr=0.1, var_freeze_step=3, local_step_clipper=2, betas=(0.8, 0.9))"
    assert told in str(step)
    assert "var_freeze_step=1" in str(
        composed({"optimizer": {"type": "zerooneadam", "params": {"var_freeze_step": 0}}})
    )


@every_one_bit
def test_1_bit_optimizers_take_the_clip_of_the_json_and_its_default(asked):
    assert "clip_by_global_norm(1.0)" in str(composed({"optimizer": asked}))
    assert "clip_by_global_norm(0.5)" in str(composed({"optimizer": asked, "gradient_clipping": 0.5}))
    assert "clip" not in str(composed({"optimizer": asked, "gradient_clipping": 0.0}))


@every_one_bit
def test_a_run_of_1_bit_optimizers_goes_on_bit_for_bit(asked, tmp_path):
    def run():
        step = composed({"optimizer": asked, "zero_optimization": {"stage": 0}}, dp=2)
        state = step.init({"w": torch.ones(5)})
        rows = torch.randn(5, 2, 5, generator=torch.Generator().manual_seed(step.shard.data.index))
        for row in rows[:4]:
            state, _ = step(state, row)
        fds.save(tmp_path, state, step)
        again, _ = fds.load(tmp_path, step, {"w": torch.ones(5)})
        assert any(x.any() for x in again.slots["worker_error"].values())
        assert_same_bits(step(again, rows[4])[0], step(state, rows[4])[0])

    fds.simulate(run, 2)


def test_float_inputs_and_targets_are_cast_under_bfloat16():
    seen = []

    def loss(params, batch):
        seen[:] = [leaf.dtype for leaf in batch]
        return (params["w"] * batch[0].mean(0)).sum()

    step = composed({"bf16": {"enabled": True}, "optimizer": SGD}, loss)
    step(step.init({"w": torch.zeros(2)}, key=0), (torch.ones(2, 2), torch.ones(2)))
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_gradients_of_autocast_travel_in_float32():
    data = {"torch_autocast": {"enabled": True}, "optimizer": SGD, "zero_optimization": {"stage": 2}}

    def sent():
        step = composed(data, dp=2)
        state = step.init({"w": torch.zeros(64)}, key=0)
        return step.describe(state).sent["reduce"]

    assert fds.simulate(sent, 2) == [64 * 4 // 2] * 2


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def trained(data: dict, batches: list, loss=linear, params: dict | None = None) -> list:
    """Return what `updates` gives on two simulated ranks, whose rows are halves of the batches."""

    def run():
        step = composed(data, loss, dp=2)
        rank = fds.mesh(dp=2)["dp"].index
        shares = [x.chunk(2)[rank] for x in batches]
        return updates(step, {"w": torch.tensor([0.5, -0.25])} if params is None else params, shares)

    first, second = fds.simulate(run, 2)
    assert_same_bits(first, second)
    return first


def zero(stage: int, **keys) -> dict:
    return {"zero_optimization": {"stage": stage, **keys}}


DRAWN = list(torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0)))


@STAGES
@pytest.mark.parametrize("key", ["contiguous_gradients", "round_robin_gradients"])
def test_gradients_that_are_not_contiguous_are_the_same_gradients(stage, key):
    one, other = (
        trained({"gradient_accumulation_steps": 2, "optimizer": SGD, **zero(stage, **{key: value})}, DRAWN)
        for value in (True, False)
    )
    assert_same_bits(one, other)


@STAGES
@pytest.mark.parametrize("sums", ["bf16", "fp32"])
def test_an_update_that_is_not_finite_is_skipped_at_every_stage(stage, sums):
    data = {"optimizer": SGD, "data_types": {"grad_accum_dtype": sums}, **zero(stage)}
    unchecked = {"enabled": True, "check_grad_overflow": False}
    ((_, told),) = trained({**data, "bf16": unchecked}, [torch.full((4, 2), torch.inf)])
    assert not told["grad_norm"].isfinite()
    data["bf16"] = {"enabled": True}
    (before, told), (after, _) = trained(data, [torch.full((4, 2), torch.inf), torch.ones(4, 2)])
    assert told["skipped"] and before["w"].tolist() == [0.5, -0.25]
    assert after["w"].isfinite().all() and not torch.equal(after["w"], before["w"])


@STAGES
def test_autocast_in_float16_clips_the_gradient_itself_at_every_stage(stage):
    data = {"optimizer": SGD, "gradient_clipping": 1.0, "torch_autocast": {"enabled": True, "dtype": "float16"}}
    (_, skipped), (params, metrics) = trained(
        {**data, **zero(stage)}, [torch.full((4, 2), torch.inf), torch.tensor([[3.0, 4.0]] * 4)]
    )
    assert skipped["skipped"] and metrics["step"] == 1
    moved = params["w"] - torch.tensor([0.5, -0.25])
    assert metrics["grad_norm"] == 5 and moved.norm() == pytest.approx(1.0, abs=2**-20)  # 2^-10 of float16 cancels


@STAGES
def test_master_weights_are_the_parameters_unrounded(stage):
    given = {"w": torch.tensor([1 / 3, 1 + 2**-20])}
    data = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "bf16": {"enabled": True}, **zero(stage)}
    ((params, _),) = trained(data, [torch.ones(4, 2)], params=given)
    assert_same_bits(params, given)


@STAGES
def test_gradients_of_ranks_are_divided_before_they_are_added_in_float16(stage):
    """Both ranks have 40,000 after scaling: float16 ends at 65,504."""
    fp16 = {"enabled": True, "loss_scale": 40000.0}
    ((params, told),) = trained(
        {"optimizer": SGD, "fp16": fp16, "gradient_clipping": 0.0, **zero(stage, reduce_scatter=False)},
        [torch.ones(4, 2)],
    )
    assert not told["skipped"] and params["w"].tolist() == [-0.5, -1.25]


def test_an_overflow_at_the_least_scale_is_a_skip_that_is_reported():
    data = {"optimizer": SGD, "fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 2}}
    told = trained(data, [torch.full((4, 2), torch.inf)] * 3 + [torch.ones(4, 2)])
    said = [(float(m["loss_scale"]), bool(m["at_minimum_scale"]), bool(m["skipped"])) for _, m in told]
    assert said == [(2.0, True, True)] * 3 + [(2.0, True, False)]


@pytest.mark.parametrize(
    ("data", "params"),
    [
        (zero(2, elastic_checkpoint=True), {"w": torch.ones(2)}),
        (zero(3, sub_group_size=20), {"w": torch.ones(2)}),
        ({**zero(1), "gradient_clipping": 0.5}, {"w": torch.ones(2), "s": torch.ones(())}),
        (
            {
                "bf16": {"enabled": True},
                "optimizer": {"type": "Adagrad", "params": {"lr": 0.5}},
                "data_types": {"grad_accum_dtype": "fp32"},
                **zero(1),
            },
            {"w": torch.ones(2)},
        ),
    ],
)
def test_what_deepspeed_cannot_resume_goes_on_bit_for_bit(data, params, tmp_path):
    loss = lambda params, batch: (params["w"] * batch).pow(2).mean() * params.get("s", torch.ones(()))
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}

    def run():
        step = composed({**adam, **data}, loss, dp=2)
        state, _ = step(step.init(params), DRAWN[0])
        fds.save(tmp_path, state, step)
        loaded, _ = fds.load(tmp_path, step, params)
        return [step.params(step(one, DRAWN[1])[0]) for one in (state, loaded)]

    for straight, resumed in fds.simulate(run, 2):
        assert_same_bits(resumed, straight)


@pytest.mark.parametrize(
    "data",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 2.0},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "float32"}},
    ],
)
def test_what_the_engine_refuses_at_some_stages_is_the_same_at_all(data):
    runs = [trained({"optimizer": SGD, **data, **zero(stage, allgather_bucket_size=11)}, DRAWN) for stage in range(4)]
    for run in runs[1:]:
        assert_same_bits([params for params, _ in run], [params for params, _ in runs[0]])


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"optimizer": {"type": "SGD", "params": {"dampening": -0.5, "momentum": 0.9}}}, "optimizer.params.dampening"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}}, "optimizer.params.betas"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params.nesterov"),
        ({"optimizer": {"type": "Lamb", "params": {"min_coeff": 3, "max_coeff": 2}}}, "optimizer.params.min_coeff"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "fp16.initial_scale_power"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_max_mom": 1.0}}},
            "scheduler.params.cycle_max_mom",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": None, "cycle_max_lr": 2}}},
            "scheduler.params.cycle_min_lr",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": None}}},
            "scheduler.params.total_num_steps",
        ),
    ],
)
def test_values_without_meaning_are_refused_with_their_path(data, where):
    with pytest.raises(ConfigError) as error:
        TrainingConfig.of(data)
    assert where in error.value.where.split(", ")
