"""Scripts that are run again and again: real processes, ended by the step itself."""

import json
from pathlib import Path

import pytest

from fds.command_line import main
from fds.config.trial import VARIABLE
from fds.errors import ConfigError
from fds.tuning.scripts import tune_script

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
    size = json.loads((here / "autotuning_exps/model_info/found.json").read_text())
    assert size["num_params"] == 16 * 17 and size["activation_bytes"] > 0
    lines = []
    again = tune_script("ds_config.json", [SCRIPT, "--fails-from", "8"], ranks=2, limit=0.001, show=lines.append)
    assert [trial.value is None for trial in again.trials] == [False, True] and len(lines) == 2  # of the journal


def test_a_script_that_does_not_run_is_said_to_be(here):
    with pytest.raises(ConfigError, match="does not run") as fails:
        tune_script(JSON, [SCRIPT, "--fails-from", "1"], show=print)
    assert fails.value.got == "rank 0: MemoryError: 1 rows"
    with pytest.raises(ConfigError, match="not done after 2 s"):
        tune_script({**JSON, "autotuning": {"enabled": True}}, [SCRIPT, "--sleeps"], limit=2.0, show=print)


def test_a_trial_that_is_none_is_refused(here, monkeypatch):
    import fds

    (here / "trial.json").write_text("{}")
    monkeypatch.setenv(VARIABLE, str(here / "trial.json"))
    with pytest.raises(ConfigError, match="not a trial"):
        fds.initialize(None, config={})
