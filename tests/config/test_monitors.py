"""The keys of monitors write where DeepSpeed does, under its tags."""

import csv
import math

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.config.training import sinks
from fds.errors import FdsError, MeshError

JSON = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def test_a_json_with_monitors_trains_and_writes(tmp_path, capsys):
    where = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = TrainingConfig.of({**JSON, "csv_monitor": where, "tensorboard": where, "steps_per_print": 2})
    mesh = fds.mesh(dp=1)
    loss = lambda model, batch: model(batch).square().mean()
    step, state, _, _ = fds.initialize(nn.Linear(4, 1), loss, config=config, mesh=mesh)
    losses = []
    with config.monitor(mesh) as monitor:
        for _ in range(4):
            state, metrics = step(state, torch.ones(8, 4))
            monitor(state, metrics)
            losses.append(float(metrics["loss"]))
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "train_loss"] and [int(x) for x, _ in rows] == [8, 16, 24, 32]
    assert [float(value) for _, value in rows] == losses
    assert len(list((tmp_path / "job").glob("events.out.tfevents*"))) == 1
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["16", "32"]


def test_samples_between_two_values_become_calls_and_names_go_where_they_belong(monkeypatch):
    made = []
    monkeypatch.setattr("fds.config.training.Comet", lambda *a, **k: made.append((a, k)))
    monkeypatch.setattr("fds.config.training.WandB", lambda *a, **k: made.append((a, k)))
    sinks(TrainingConfig.of({
        **JSON,
        "wandb": {"enabled": True, "group": "g", "team": "t"},
        "comet": {"enabled": True, "project": "p", "samples_log_interval": 50, "online": False, "experiment_name": "n"},
    }))  # fmt: skip
    assert made[0] == (("deepspeed",), {"group": "g", "team": "t"})
    (args, options) = made[1]
    assert args == ("p",) and options["every"] == 7 and options["online"] is False and options["name"] == "n"


def test_nothing_is_written_where_no_key_asks():
    for quiet in ({}, {"steps_per_print": None}, {"steps_per_print": math.inf}, {"tensorboard": {"enabled": False}}):
        assert sinks(TrainingConfig.of({**JSON, **quiet})) == []


def test_what_the_mesh_and_the_packages_lack_is_said(monkeypatch):
    with pytest.raises(MeshError):
        TrainingConfig.of(JSON).monitor(fds.mesh(ranks=1))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FdsError, match=r"pip install 'fds\[comet\]'"):
        TrainingConfig.of({**JSON, "comet": {"enabled": True}}).monitor(fds.mesh(dp=1))
