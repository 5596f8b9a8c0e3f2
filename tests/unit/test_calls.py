"""Calls with arguments that a function does not take, names in the wrong room, and paths with a `~`."""

import inspect

import pytest
import torch

import fds
from fds.errors import CallError, ComposeError, FdsError
from fds.step import Step

CALLS = [
    (lambda: fds.monitor(batch_sizes=4), "batch_size"),
    (lambda: fds.monitors.CSV("runs", evry=2), "every"),
    (lambda: fds.monitors.JSONL(), "path"),
    (lambda: fds.monitors.Console(2), "every"),
    (lambda: fds.monitors.TensorBoard("runs", flush_secs=2), "flush_seconds"),
    (lambda: fds.monitors.WandB(projct="gpt"), "project"),
    (lambda: fds.monitors.Comet(keys=1), "experiment_key"),
    (lambda: fds.timed(sample=3), "samples"),
    (lambda: fds.trace(None, None, None), "path"),
    (lambda: fds.profile(None, None, None, dept=2), "depth"),
    (lambda: fds.profile_model(None), "example"),
    (lambda: fds.estimate_memory(None), "params"),
    (lambda: fds.disk("/tmp", bufers=2), "buffers"),
    (lambda: fds.watch(), "step"),
    (lambda: fds.check_ranks(None), "step"),
    (lambda: fds.dump_state(None), "step"),
    (lambda: fds.adam(learning_rate=1), "lr"),
    (lambda: fds.adamw(weight_deca=1), "weight_decay"),
    (lambda: fds.adagrad(leps=1), "eps"),
    (lambda: fds.lamb(beta=(0.9, 0.9)), "betas"),
    (lambda: fds.lion(0.1, (0.9, 0.9), 0.0, 3), "weight_decay"),
    (lambda: fds.muon(momentums=1), "momentum"),
    (lambda: fds.sgd(nestrov=True), "nesterov"),
    (lambda: fds.by_name(), "optimizers"),
]


@pytest.mark.parametrize(("call", "named"), CALLS)
def test_an_argument_that_a_function_does_not_take_is_named_with_those_that_it_does(call, named):
    with pytest.raises(CallError) as error:
        call()
    assert named in error.value.want and isinstance(error.value, TypeError)


def test_a_signature_is_still_that_of_the_function():
    assert fds.adamw.__name__ == "adamw" and "weight_decay" in inspect.signature(fds.adamw).parameters
    assert str(fds.adamw(0.1)) == "adamw(lr=0.1)"


@pytest.mark.parametrize("name", ["CSV", "JSONL", "Console", "TensorBoard", "WandB", "Comet"])
def test_a_sink_that_is_looked_for_in_fds_is_found(name):
    with pytest.raises(AttributeError, match=f"it is fds.monitors.{name}"):
        getattr(fds, name)
    assert getattr(fds.monitors, name)


def loss(params, batch):
    return (params["w"] * batch).square().sum()


def test_a_home_is_meant_by_a_tilde_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    step = fds.compose(fds.offload(moments=fds.disk("~")), fds.adamw(0.1))(loss)
    assert fds.disk("~/nvme").directory == str(tmp_path / "nvme")
    state = step.init({"w": torch.ones(3)})
    with fds.monitor(fds.monitors.CSV("~/csv"), fds.monitors.JSONL("~/log.jsonl")) as monitor:
        state, metrics = fds.trace(step, state, torch.ones(3), "~/trace.json")
        monitor(state, metrics)
    fds.save("~/run", state, step)
    loaded, _ = fds.load("~/run", step, {"w": torch.ones(3)})
    assert loaded.params["w"].equal(state.params["w"])
    fds.export_weights(state, "~/weights.safetensors", step=step)
    profiled = fds.compose(fds.profiled(0, file="~/profile.txt"), fds.adamw(0.1))(loss)
    profiled(profiled.init({"w": torch.ones(3)}), torch.ones(3))
    assert [entry for entry in ("csv", "log.jsonl", "trace.json", "run", "weights.safetensors", "profile.txt")
            if not (tmp_path / entry).exists()] == []  # fmt: skip
    assert fds.display.read_log("~/log.jsonl")


def test_a_state_is_no_tree_of_parameters_for_curvature():
    step = fds.compose(fds.adamw(0.1))(loss)
    state = step.init({"w": torch.ones(3)})
    for measure in (fds.curvature.top_eigenvalue, fds.curvature.sharpness, fds.curvature.trace):
        with pytest.raises(FdsError, match=r"step\.params\(state\)"):
            measure(loss, state, torch.ones(3))


def test_a_mesh_beside_what_is_composed_already_is_refused():
    with pytest.raises(FdsError, match="already has the axes"):
        fds.estimate_memory(fds.compose(fds.adamw(0.1)), {"w": torch.ones(3)}, mesh={"dp": 8})


def test_a_backend_that_torch_does_not_know_is_refused_where_it_is_written():
    with pytest.raises(ComposeError, match="did you mean 'inductor'"):
        fds.compile(whole=True, backend="inductr")
    assert isinstance(fds.compose(fds.compile(backend="eager"), fds.adamw(0.1))(loss), Step)


def test_averages_that_nothing_keeps_are_warned_of():
    params = {"w": torch.ones(3)}
    with pytest.warns(UserWarning, match="there are no averages"):
        fds.compose(fds.offload(averages="host"), fds.adamw(0.1))(loss).init(params)
    fds.compose(fds.offload(averages="host"), fds.ema(0.9), fds.adamw(0.1))(loss).init(params)
    fds.compose(fds.offload("host", averages="host"), fds.adamw(0.1))(loss).init(params)  # all there is, wherever it is
