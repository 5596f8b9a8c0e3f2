"""Scripts that are run again and again: real processes, ended by the step itself."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds.command_line import main
from fds.config.trial import VARIABLE
from fds.errors import ConfigError
from fds.tuning.scripts import tune_script, with_options

SCRIPT = str(Path(__file__).parent / "train.py")
JSON = {
    "train_micro_batch_size_per_gpu": [4, 8],
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "autotuning": {"enabled": True, "overwrite": False, "arg_mappings": {"train_micro_batch_size_per_gpu": "--rows"}},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(JSON))
    return tmp_path


def test_a_script_is_run_with_each_experiment_and_the_fastest_is_written_down(here, capsys):
    assert main(["tune", "ds_config.json", "--ranks", "2", SCRIPT, "--fails-from", "8"]) == 0
    out = capsys.readouterr().out
    assert "z0_gas2_tmbspg4: " in out and "rows a second" in out
    assert "z0_gas1_tmbspg8: does not run: rank " in out and "MemoryError: 8 rows" in out
    assert "2 experiments, of which 1 have run\nbest: z0_gas2_tmbspg4" in out
    best = json.loads((here / "autotuning_results/ds_config_optimal.json").read_text())
    assert best["train_micro_batch_size_per_gpu"] == 4 and best["train_batch_size"] == 16 and "autotuning" not in best
    assert "fds.accumulate(2)" in (here / "autotuning_results/ds_config_optimal.py").read_text()
    size = json.loads((here / "autotuning_exps/model_info/found.json").read_text())
    assert size["num_params"] == 16 * 17 and size["activation_mem_per_gpu"] > 0
    lines = []
    again = tune_script("ds_config.json", [SCRIPT, "--fails-from", "8"], ranks=2, limit=0.001, show=lines.append)
    assert [trial.value is None for trial in again.trials] == [False, True] and len(lines) == 2  # of the journal


def test_options_of_a_script_have_the_values_of_a_configuration():
    """Also under keys with blanks around them and names without dashes, which the examples of DeepSpeed have."""
    config = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}, "lr": "auto", "steps_per_print": 5}
    options = {
        "gradient_accumulation_steps ": "--steps",
        "zero_optimization.stage": "--stage",
        "lr": "--lr",
        "x": "--x",
        "steps_per_print": "print",
    }
    command = with_options(["t.py", "--steps=1"], options, config)
    assert command == ["t.py", "--steps", "4", "--stage", "2", "--print", "5"]


def test_a_configuration_that_asks_for_it_is_measured_by_a_run_of_its_own(here):
    """As DeepSpeed's engine does where its launcher did not start it."""
    config = {
        "train_batch_size": 8,
        "optimizer": JSON["optimizer"],
        "autotuning": {"enabled": True, "start_profile_step": 2, "end_profile_step": 4, "metric_path": "cost.json"},
    }

    def run(said):
        model, rows = nn.Linear(16, 16), torch.randn(64, 16)
        step, state, loader, _ = fds.initialize(
            model, lambda m, x: m(x).square().mean(), config=said, training_data=rows
        )
        calls = []

        def train(state):
            for batch in itertools.cycle(loader):
                state, _ = step(state, batch)
                calls.append(batch)

        with pytest.raises(SystemExit) as ended:
            train(state)
        assert ended.value.code == 0
        return len(calls)

    assert run(config) == 3  # the fourth ends it
    cost = json.loads((here / "cost.json").read_text())
    assert cost["latency"] > 0 and cost["throughput"] == pytest.approx(8 / (cost["latency"] * 1e-6))
    weighing = {**config, "autotuning": {"enabled": True, "model_info": {"profile": True}}}
    assert run(weighing) == 0
    size = json.loads((here / "autotuning_model_info.json").read_text())
    assert size["num_params"] == 16 * 17 and size["activation_mem_per_gpu"] > 0
    (here / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        run({**config, "autotuning": {**config["autotuning"], "metric_path": "taken"}})


def test_a_script_that_does_not_run_is_said_to_be(here, fresh):
    with pytest.raises(ConfigError, match="does not run") as fails:
        tune_script(JSON, [SCRIPT, "--fails-from", "1"], show=print)
    assert fails.value.got == "rank 0: MemoryError: 1 rows"
    with pytest.raises(ConfigError, match="not done after 2 s"):
        tune_script({**JSON, "autotuning": {"enabled": True}}, [SCRIPT, "--sleeps"], limit=2.0, show=print)


def test_a_trial_that_is_none_is_refused(here, monkeypatch):
    (here / "trial.json").write_text("{}")
    monkeypatch.setenv(VARIABLE, str(here / "trial.json"))
    with pytest.raises(ConfigError, match="not a trial"):
        fds.initialize(None, config={})
