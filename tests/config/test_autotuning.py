"""Autotuning, as records; its experiments, and the order in which they are searched."""

import json
import warnings
from pathlib import Path

import attrs
import pytest

import fds
from fds.config import TrainingConfig
from fds.config.autotuning import Autotuning, ModelSize, best_of, search
from fds.config.keys.data import AutotuningConfig
from fds.errors import ConfigError
from tests.golden.autotuning_search import digest, measured

EXAMPLE = {  # of reference/003
    "enabled": False,
    "results_dir": "autotuning_results",
    "exps_dir": "autotuning_exps",
    "overwrite": False,
    "metric": "throughput",
    "start_profile_step": 3,
    "end_profile_step": 5,
    "fast": True,
    "max_train_batch_size": None,
    "mp_size": 1,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "arg_mappings": None,
}


def test_the_documented_example_comes_back_as_it_went_in():
    assert AutotuningConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE


def test_the_documented_example_is_the_documented_defaults():
    assert AutotuningConfig.from_dict(EXAMPLE, defaults="docs") == AutotuningConfig(defaults="docs")


def test_deepspeed_searches_in_order_and_overwrites():
    assert AutotuningConfig().tuner_type == "gridsearch" and AutotuningConfig().overwrite


def test_options_and_what_is_known_of_the_model_are_objects():
    told = {
        "enabled": True,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
        "model_info": {"num_params": 1_000_000_000, "hidden_size": 10, "num_layers": 12},
    }
    config = AutotuningConfig.from_dict(told)
    assert config.to_dict() == told and config["model_info.profile"] is False


def test_the_steps_of_the_profile_have_old_names():
    with pytest.warns(FutureWarning, match="'start_profile_step'"), pytest.warns(FutureWarning, match="'end_prof"):
        config = AutotuningConfig.from_dict({"enabled": True, "start_step": 5, "end_step": 15})
    assert config.to_dict() == {"enabled": True, "start_profile_step": 5, "end_profile_step": 15}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"fast": 1}, "fast"),
        ({"metric": "loss"}, "metric"),
        ({"tuner": "random"}, "tuner"),
        ({"arg_mappings": {"train_batch_size": 8}}, "arg_mappings"),
        ({"model_info": {"hidden_size": "10"}}, "model_info.hidden_size"),
        ({"model_info": {"layers": 12}}, "model_info.layers"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        AutotuningConfig.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("least", "most"),
    [
        ("start_profile_step", "end_profile_step"),
        ("min_train_batch_size", "max_train_batch_size"),
        ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"),
    ],
)
def test_a_least_value_above_the_largest_is_refused_where_it_matters(least, most):
    with pytest.raises(ConfigError) as refused:
        AutotuningConfig.from_dict({"enabled": True, least: 7, most: 6})
    assert refused.value.where == f"{least}, {most}" and f"{least}=7, {most}=6" == refused.value.got
    for fine in (
        {"enabled": True, least: 7, most: 7},
        {"enabled": False, least: 7, most: 6},
        {"enabled": True, least: "auto", most: 6},
    ):
        assert AutotuningConfig.from_dict(fine).to_dict() == fine


CASES = json.loads((Path(__file__).parents[1] / "golden" / "autotuning_search.json").read_text())["cases"]
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98]}}}
MODEL = ModelSize(num_params=1000, activation_bytes=1000)


def tuning(ranks: int = 2, section: dict | None = None, **keys: object) -> Autotuning:
    return Autotuning.of({**ADAM, **keys, "autotuning": {"enabled": True, **(section or {})}}, ranks=ranks)


def test_deepspeeds_own_searches_run_the_same_experiments_in_the_same_order():
    total = 0
    for case in CASES:
        asked = Autotuning.of(case["config"], ranks=case["ranks"])
        measure = lambda experiment, case=case: measured(experiment.config, case)
        trials = search(asked, measure, model=ModelSize(**case["model"]), memory_bytes=case["memory"])
        ran = [(trial.experiment.name, trial.experiment.config) for trial in trials]
        assert len(ran) == case["trials"] and (not ran or ran[-1][0] == case["last"]), case
        assert digest(ran) == case["digest"], case
        assert len({name for name, _ in ran}) == len(ran)
        if ran and any(trial.value for trial in trials):
            best = best_of(asked, trials)
            assert best is not None and best.value == max(trial.value or 0 for trial in trials)
        total += len(ran)
    assert len(CASES) == 120 and total > 1000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_experiment_composes(stage):
    asked = tuning(fp16={"enabled": True})
    experiments = [asked.experiment(stage, 2, 3), *asked.experiments(stage, [2], 6, hidden_size=64)]
    assert len(experiments) == 1 + (1, 9, 72, 144)[stage]
    for experiment in experiments[:: 1 + stage * 10]:
        config = TrainingConfig.of(experiment.config)
        assert config.resolve(world_size=2)["train_batch_size"] == 12 == 2 * experiment.rows * 3
        made = fds.simulate(lambda config=config: [str(t) for t in config.transforms(fds.mesh(dp=2))], 2)[0]
        assert "accumulate(3)" in made and config["zero_optimization.stage"] == stage


def test_what_zero_says_stays_and_its_lists_are_tried():
    zero = {"stage": 1, "round_robin_gradients": True, "reduce_bucket_size": [7e7, 9e7], "allgather_bucket_size": 5e8}
    experiments = tuning(zero_optimization=zero).experiments(1, [4], 8)
    assert [experiment.name for experiment in experiments] == [
        "z1_rbs7.0e+07_tmbspg4_gas2",
        "z1_rbs9.0e+07_tmbspg4_gas2",
    ]
    for experiment, size in zip(experiments, (7e7, 9e7), strict=True):
        expected = {**zero, "reduce_bucket_size": size}
        assert experiment.config["zero_optimization"] == expected
    assert tuning(zero_optimization=zero).experiment(1, 4, 2).config["zero_optimization"] == {
        **zero,
        "reduce_bucket_size": 7e7,
    }


def test_a_list_that_a_key_takes_is_one_value():
    keys = {
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce", "all_gather"]},
        "gradient_clipping": [0.5, 1.0],
    }
    asked = tuning(**keys)
    assert asked.experiment(0, 1, 1).config["gradient_clipping"] == 0.5
    experiments = asked.experiments(0, [1, 2], 2)
    assert [experiment.config["gradient_clipping"] for experiment in experiments] == [0.5, 1.0, 0.5, 1.0]
    for experiment in experiments:
        assert experiment.config["comms_logger"] == keys["comms_logger"]
        assert experiment.config["optimizer"] == ADAM["optimizer"]


def test_latency_is_better_where_it_is_less():
    measure = lambda experiment: 1 / experiment.rows if experiment.rows <= 20 else None
    trials = search(tuning(section={"metric": "latency"}), measure, model=MODEL, memory_bytes=100_000)
    best = best_of(tuning(section={"metric": "latency"}), trials)
    assert best is not None and best.experiment.rows == max(t.experiment.rows for t in trials if t.value) == 20
    assert best_of(tuning(), []) is None and best_of(tuning(), [attrs.evolve(best, value=None)]) is None


def test_the_state_of_a_rank_is_what_its_data_ranks_share():
    held = lambda asked: [asked.state_bytes(1000, stage) for stage in range(4)]
    assert held(tuning(4)) == [16000, 10000, 7000, 4000]
    assert (
        held(tuning(4, fp16={"enabled": True})) == held(tuning(4, bf16={"enabled": True})) == [20000, 8000, 6500, 5000]
    )


def test_ranks_that_share_a_model_have_the_rows_of_one_data_rank():
    asked = tuning(4, section={"mp_size": 2})
    assert [asked.state_bytes(1000, stage) for stage in (0, 3)] == [8000, 4000]  # four ranks hold 16 bytes a parameter
    assert asked.experiment(0, 3, 2).config["train_batch_size"] == 3 * 2 * 2
    assert asked.microbatches(1, 8) == ([4, 8], 8)
    assert tuning(4, section={"mp_size": 2, "max_train_batch_size": 24}).largest_rows == 12


def test_orders_at_random_follow_a_seed():
    section = {"fast": False, "tuner_type": "random", "tuner_num_trials": 6}
    asked = tuning(section=section, zero_optimization={"stage": 1}, train_micro_batch_size_per_gpu=[1, 2])
    names = lambda seed: [
        trial.experiment.name
        for trial in search(asked, lambda experiment: experiment.rows, model=MODEL, memory_bytes=10**6, seed=seed)
    ]
    assert names(0) == names(0) and len({tuple(names(seed)) for seed in range(4)}) == 4


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": [1, "x"]}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": []}}, "zero_optimization.stage"),
        ({"zero_optimization": True}, "zero_optimization.stage"),
        ({"zero_optimization": {"reduce_bucket_size": []}}, "zero_optimization.reduce_bucket_size"),
        ({"train_micro_batch_size_per_gpu": [2, 0]}, "train_micro_batch_size_per_gpu"),
        ({"train_micro_batch_size_per_gpu": []}, "train_micro_batch_size_per_gpu"),
        ({"train_micro_batch_size_per_gpu": ["auto"]}, "train_micro_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": [1, 2]}, "gradient_accumulation_steps"),
        ({"train_batch_size": [8]}, "train_batch_size"),
        ({"gradient_cliping": 1.0}, "gradient_cliping"),
        ({"section": {"enabled": False}}, "autotuning.enabled"),
        ({"section": {"mp_size": 3}}, "ranks, autotuning.mp_size"),
        ({"ranks": 0}, "ranks"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_its_path(keys, where):
    with pytest.raises(ConfigError) as refused:
        tuning(**keys)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"measure": 1.0}, "measure"),
        ({"model": {"num_params": 1}}, "model"),
        ({"seed": "x"}, "seed"),
        ({"model": ModelSize(0, 1)}, "num_params"),
        ({"model": ModelSize(1, 1.5)}, "activation_bytes"),  # pyright: ignore[reportArgumentType]
        ({"model": ModelSize(1, 1, 0)}, "hidden_size"),
        ({"measure": lambda experiment: "fast"}, "measure(z0_gas1_tmbspg1)"),
        ({"measure": lambda experiment: -1.0}, "measure(z0_gas1_tmbspg1)"),
        ({"measure": lambda experiment: float("nan")}, "measure(z0_gas1_tmbspg1)"),
    ],
)
def test_what_a_search_cannot_use_is_refused(changes, where):
    arguments = {"measure": lambda experiment: 1.0, "model": MODEL, "memory_bytes": 10**6, **changes}
    with pytest.raises(ConfigError) as refused:
        search(tuning(), **arguments)
    assert refused.value.where == where
    with pytest.raises(ConfigError) as refused:
        search(tuning(section={"tuner_type": "model_based"}), lambda _: 1.0, model=MODEL, memory_bytes=10**6)
    assert refused.value.where == "autotuning.tuner_type"


def test_files_that_people_use_are_searched():
    tune = Path(__file__).parent / "shapes" / "hf_autotuning.json"
    trials = search(Autotuning.of(tune, ranks=2), lambda e: e.rows, model=MODEL, memory_bytes=40_000)
    assert trials[0].experiment.config["fp16"] == {"enabled": True} and len(trials) > 2
    old = {
        "train_micro_batch_size_per_gpu": [8],
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 2e8, "cpu_offload": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "autotuning": {"enabled": True, "start_step": 5, "end_step": 10, "num_gpus": [2, 4], "metric": "latency"},
    }
    with pytest.raises(ConfigError, match="no such key"), warnings.catch_warnings(action="ignore"):
        Autotuning.of(old, ranks=2)
    with warnings.catch_warnings(action="ignore"):
        asked = Autotuning.of(old, ranks=2, unknown="warn")
    (trial,) = search(asked, lambda e: 1.0, model=MODEL, memory_bytes=10**6)
    assert trial.experiment.name == "z2_gas1_tmbspg8" and trial.experiment.config["zero_optimization"]["cpu_offload"]
