"""A step in words."""

import attrs
import torch
from torch import nn

import fds
from fds import tree
from fds.kernels import choice, language, only
from fds.transforms.kernels import reference_kernels
from tests.unit.step.problem import BATCH, loss_fn, make, make_params


def test_only_filled_stations_are_told_in_program_order():
    told = make(fds.clip_by_global_norm(1.0), fds.accumulate(4)).describe()
    assert list(told.stations) == ["split", "loss", "measure", "condition", "optimizer"]
    assert told.stations["loss"] == "loss_fn"
    assert "4" in told.stations["split"]
    assert told.num_bytes == {}


def test_bytes_are_those_of_the_tensors():
    step = make(fds.ema(0.9), fds.freeze("net.b"))
    state = step.init(make_params())
    held = step.describe(state).num_bytes
    assert {part: held[part] for part in ("params", "opt", "slots", "buffers")} == {
        part: tree.num_bytes(getattr(state, part)) for part in ("params", "opt", "slots", "buffers")
    }
    assert held["gradients"] == 4 * 6
    assert held["opt"] == 2 * 4 * 6


def test_layers_are_described_by_their_kinds():
    blocks = [fds.LayerSpec(nn.Linear, 3, 3) for _ in range(4)]
    loss = fds.Layers([nn.Sequential(nn.Linear(3, 3), nn.ReLU()), *blocks, torch.tanh, *blocks[:1]], nn.MSELoss())
    words = "Sequential, 4 x LayerSpec(Linear, 3, 3), tanh, LayerSpec(Linear, 3, 3)"
    assert make(loss=loss).describe().stations["loss"] == f"Layers({words}; criterion=MSELoss)"


def test_buffers_have_bytes():
    loss = fds.Layers([nn.BatchNorm1d(3)], nn.MSELoss())
    step = make(loss=loss)
    assert step.describe(step.init(loss.init)).num_bytes["buffers"] == 3 * 4 * 2 + 8


def test_16_bit_gradients_summed_in_float32_hold_4_bytes():
    step = make(fds.precision(torch.bfloat16))
    assert step.describe(step.init(make_params())).num_bytes["gradients"] == 4 * 8


def test_unused_and_frozen_parameters_are_named():
    step = make(fds.freeze("net.b"))
    state = step.init({**make_params(), "spare": [torch.ones(2)]})
    told = step.describe(state, BATCH)
    assert told.unused == ("spare.0",)
    assert "net.b" in told.frozen
    assert "spare.0" in str(told)
    assert step.describe(state).unused == ()


def test_a_parameter_that_one_microbatch_uses_is_used():
    def loss(params, batch):
        return loss_fn(params, batch) + (params["late"].sum() if batch["x"][0, 0] > 0 else 0)

    step = make(fds.accumulate(2), loss=loss)
    state = step.init({**make_params(), "late": torch.ones(2)})
    x = torch.cat([-torch.ones(4, 3), torch.ones(4, 3)])
    assert step.describe(state, {**BATCH, "x": x}).unused == ()


def test_the_text_is_a_table():
    step = make(fds.accumulate(4))
    text = str(step.describe(step.init(make_params()), BATCH))
    lines = text.splitlines()
    assert lines[0].startswith("split")
    assert any(line.startswith("params") and line.endswith("40 bytes") for line in lines)
    assert all(len(line) < 200 for line in lines)
    assert "0x" not in text


def test_describing_changes_nothing():
    step = make(fds.donate())
    state = step.init(make_params())
    step.describe(state, BATCH)
    step(state, BATCH)


def test_the_kernels_that_run_are_told_for_the_device_of_the_state():
    step = make()
    assert step.describe().kernels == "torch's operators; on a GPU also kernels that passed there"
    told = step.describe(step.init(make_params()))
    assert told.kernels == "adam: torch's fused functions; others: torch's operators (kernels run on GPUs)"
    assert f"kernels    {told.kernels}" in str(told).splitlines()


def test_the_kernels_are_told_as_they_were_chosen_around_the_step_and_in_it():
    for step, want in (
        (make(), "adam: Triton kernel (kernels were requested); others: Triton kernel (kernels were requested)"),
        (
            make(reference_kernels()),
            "adam: torch's fused functions; others: torch's operators (references were requested)",
        ),
    ):
        state = step.init(make_params())
        with only("triton"):
            assert step.describe(state).kernels == want


def test_the_kernels_are_told_for_the_dtypes_of_the_state(monkeypatch):
    monkeypatch.setattr(choice, "_decided", {})
    step, params = make(fds.triton_kernels()), make_params()
    requested = "Triton kernel (kernels were requested)"
    assert step.describe(step.init(params)).kernels == f"adam: {requested}; others: {requested}"
    double = tree.map(torch.Tensor.double, params)
    told = step.describe(step.init(double)).kernels
    assert told.startswith(f"adam: torch's fused functions; others: {requested} in float32, float16, bfloat16; ")
    assert told.endswith("torch's operators (kernels do not take this dtype: float64) in float64")
    mixed = {"net": {**params["net"], "w": double["net"]["w"]}}
    assert step.describe(step.init(mixed)).kernels.startswith("adam: torch's fused functions; ")  # all by one update


def test_kernels_that_cannot_run_on_a_cpu_are_not_told_to_run(monkeypatch):
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(language, "is_interpreted", False)
    step = make(fds.triton_kernels())
    why = "kernels cannot run here: kernels run on GPUs, and this is cpu"
    assert step.describe(step.init(make_params())).kernels.endswith(f"others: torch's operators ({why})")


def test_the_station_and_what_runs_are_one_line():
    told = make(reference_kernels()).describe()
    assert told.kernels == told.stations["kernels"] == "references only"
    assert [line for line in str(told).splitlines() if line.startswith("kernels")] == ["kernels    references only"]


def test_a_filler_without_a_text_of_its_own_is_named_after_its_class():
    class Flip:
        def __call__(self, grads, call):
            return grads

    own = fds.step.transform(lambda: lambda step: fds.step.fill(step, condition=Flip()))
    assert make(own()).describe().stations["condition"] == "Flip"


def test_an_optimizer_of_the_users_own_has_its_own_kernels():
    adam = fds.adam(0.1)
    step = make(optimizer=fds.Optimizer(adam.init, adam.update, lr=0.1))
    assert step.describe(step.init(make_params())).kernels.startswith("the optimizer's own; others: ")


def test_hundreds_of_names_and_buffers_are_counted():
    params = {f"base.{i}.weight": torch.ones(2) for i in range(147)} | {"head": torch.ones(2)}
    frozen = fds.freeze(*[name for name in params if name != "head"])
    loss = fds.with_buffers(lambda p, b, buffers: (p["head"].sum() * b, {}, buffers), {"mean": torch.zeros(256, 4)})
    step = fds.compose(frozen, fds.by_name({n: fds.sgd(0.1) for n in params}))
    assert str(frozen) == 'freeze(147 names: "base.*")'
    assert len(repr(step)) < 150
    step = fds.compose(frozen, fds.adam(0.1))(loss)
    text = str(step.describe(step.init(params)))
    assert text.count('147 names: "base.*"') == 2 and "1 buffer, 4,096 bytes" in text
    assert len(text) < 1000 and "tensor(" not in text + repr(step)
    assert step.describe(step.init(params)).frozen == tuple(n for n in params if n != "head")


def test_kernels_of_which_different_things_are_true_have_a_line_each():
    lines = str(attrs.evolve(make().describe(), kernels="lion: Triton kernel\nsgd: torch's operators")).splitlines()
    assert lines[-2:] == ["kernels    lion: Triton kernel", "           sgd: torch's operators"]
