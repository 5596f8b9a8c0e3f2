"""Eigenvalues and traces beside explicit Hessians."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

import fds
from fds import curvature
from fds.config import TrainingConfig
from fds.errors import ConfigError, FdsError, LossError

torch_module = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def problem(seed=0, rows=6):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = torch_module()
        batch = torch.randn(rows, 3).double(), torch.randn(rows, 2).double()
    loss_fn = lambda p, b: (functional_call(module, p, (b[0],)) - b[1]).square().mean()
    return loss_fn, {n: p.detach() for n, p in module.named_parameters()}, batch


def explicit(loss_fn, params, batch, names):
    """Return the block of these parameters of the Hessian, by torch.autograd.functional."""
    sizes = [params[n].numel() for n in names]

    def flat(x):
        parts = {n: p.view(params[n].shape) for n, p in zip(names, x.split(sizes), strict=True)}
        return loss_fn({**params, **parts}, batch)

    return hessian(flat, torch.cat([params[n].flatten() for n in names]))


def greatest(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_eigenvalues_of_blocks_are_those_of_the_hessian(seed):
    loss_fn, params, batch = problem(seed)
    found = curvature.top_eigenvalue(loss_fn, params, batch, blocks=["0.*", "2.*"], tol=1e-9, max_iter=2000)
    want = {
        block: greatest(explicit(loss_fn, params, batch, [n for n in params if n[0] == block[0]])) for block in found
    }
    for block, one in found.items():
        assert one.value == pytest.approx(want[block], rel=1e-5) and one.converged
        assert one.normalized == pytest.approx(abs(want[block]) / max(map(abs, want.values())), rel=1e-5)


def test_one_product_is_not_enough_where_it_happens_to_be_near_1():
    """DeepSpeed compares the first estimate with 1, and ends there: with that of whatever vector it began with."""
    loss_fn = lambda p, _: (p["x"].square() * torch.tensor([1.0, 3.0])).sum() / 2
    first = curvature.top_eigenvalue(loss_fn, {"x": torch.ones(2)}, None, max_iter=1)["*"]
    scaled = lambda p, _: loss_fn(p, None) / first.value  # the first estimate is 1
    found = curvature.top_eigenvalue(scaled, {"x": torch.ones(2)}, None, tol=1e-5)["*"]
    assert found.value == pytest.approx(3 / first.value, rel=1e-4) and not first.converged


def test_sharpness_is_the_greatest_eigenvalue_also_where_another_is_greater_in_magnitude():
    matrix = torch.diag(torch.tensor([-5.0, 2.0, 1.0], dtype=torch.float64))
    loss_fn = lambda p, _: p["x"] @ matrix @ p["x"] / 2
    params = {"x": torch.ones(3, dtype=torch.float64)}
    assert curvature.top_eigenvalue(loss_fn, params, None, tol=1e-9)["*"].value == pytest.approx(-5, rel=1e-6)
    assert curvature.sharpness(loss_fn, params, None, tol=1e-9) == pytest.approx(2, rel=1e-6)
    loss_fn, params, batch = problem()
    values = torch.linalg.eigvalsh(explicit(loss_fn, params, batch, list(params)))
    assert curvature.sharpness(loss_fn, params, batch, tol=1e-9, max_iter=2000) == pytest.approx(
        float(values[-1]), rel=1e-5
    )


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-6])
def test_sharpness_is_as_near_as_it_is_asked_for_and_says_where_it_is_not(tol):
    draw = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(200, 200, generator=draw, dtype=torch.float64))
    for values in (torch.linspace(-2.0, 1.2877, 200), torch.linspace(-1.0, 1.2877, 200) ** 3, -torch.arange(1.0, 201)):
        matrix = basis @ torch.diag(values.double()) @ basis.T
        loss_fn = lambda p, _, matrix=matrix: p["x"] @ matrix @ p["x"] / 2
        params, most = {"x": torch.zeros(200, dtype=torch.float64)}, float(values.max())
        found = curvature.sharpness(loss_fn, params, None, tol=tol, max_iter=250)
        assert abs(found - most) <= tol * abs(most)
    with pytest.warns(UserWarning, match="after 3 products"):
        curvature.sharpness(loss_fn, params, None, tol=tol, max_iter=3)


def test_the_trace_is_within_its_error_and_exact_for_a_diagonal():
    loss_fn, params, batch = problem()
    want = float(explicit(loss_fn, params, batch, list(params)).trace())
    mean, error = curvature.trace(loss_fn, params, batch, num_samples=400)
    assert abs(mean - want) < 4 * error and error < 0.1 * abs(want)
    diagonal = lambda p, _: (p["x"].square() * torch.arange(3.0)).sum() / 2
    assert curvature.trace(diagonal, {"x": torch.ones(3)}, None, num_samples=2) == (3.0, 0.0)


def test_a_linear_block_has_the_value_0_and_is_normalized_to_1():
    loss_fn = lambda p, _: p["a"].sum() + 3 * p["b"].square().sum()
    found = curvature.top_eigenvalue(loss_fn, {"a": torch.ones(2), "b": torch.ones(2)}, None, blocks=["a", "b"])
    assert (found["a"].value, found["a"].normalized) == (0.0, 1.0)
    assert found["b"].value == pytest.approx(6.0, rel=1e-5) and found["b"].normalized == 1.0
    alone = curvature.top_eigenvalue(loss_fn, {"a": torch.ones(2), "b": torch.ones(2)}, None, blocks=["a"])
    assert alone["a"].normalized == 1.0


def test_iteration_ends_where_it_is_told_to():
    loss_fn = lambda p, _: (p["x"].square() * torch.tensor([1.0, 0.999])).sum()
    found = curvature.top_eigenvalue(loss_fn, {"x": torch.ones(2)}, None, max_iter=1, tol=1e-12)["*"]
    assert found.iterations == 1 and not found.converged


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_have_the_curvature_of_all_their_rows(stage):
    loss_fn, params, (x, y) = problem(rows=8)
    weighted = lambda p, b: fds.Mean(loss_fn(p, b) * len(b[0]), len(b[0]))
    want = curvature.top_eigenvalue(loss_fn, params, (x, y), tol=1e-9, max_iter=500)["*"].value

    def run():
        dp = fds.mesh(dp=2)["dp"]
        step = fds.compose(fds.shard_optimizer(dp, stage=stage), fds.sgd(0.1))(weighted)
        whole = step.params(step.init(params))
        mine = slice(0, 3) if dp.index == 0 else slice(3, 8)
        return curvature.top_eigenvalue(weighted, whole, (x[mine], y[mine]), tol=1e-9, max_iter=500, axis=dp)["*"].value

    assert fds.simulate(run, 2) == pytest.approx([want, want], rel=1e-9)


def test_attention_and_layers_have_second_derivatives():
    layers = fds.Layers(
        [nn.Linear(4, 4)],
        lambda out, y: nn.functional.scaled_dot_product_attention(out, out, out, is_causal=True).sub(y).square().mean(),
    )
    step = fds.compose(fds.sgd(0.1))(layers)
    state, x = step.init(layers.init), torch.randn(2, 5, 4)
    found = curvature.top_eigenvalue(layers, step.params(state), (x, x), blocks=["0.weight", "0.bias"])
    assert all(one.value for one in found.values())


def test_dropout_is_one_draw_and_generators_are_as_they_were():
    loss_fn = lambda p, x: nn.functional.dropout(p["x"] * x).square().sum()
    before = torch.get_rng_state()
    found = [curvature.top_eigenvalue(loss_fn, {"x": torch.ones(9)}, torch.ones(9), key=3) for _ in range(2)]
    assert found[0] == found[1] and torch.equal(torch.get_rng_state(), before)
    assert found[0]["*"].value == pytest.approx(8.0, rel=1e-4)


def test_the_key_of_a_configuration_names_layers():
    loss_fn, params, batch = problem()
    nested = {f"net.{n}": p for n, p in params.items()}
    plain = lambda p, b: loss_fn({n.removeprefix("net."): x for n, x in p.items()}, b)
    asked = {"enabled": True, "layer_name": "net", "layer_num": 1, "tol": 1e-6, "max_iter": 300}
    config = TrainingConfig.of({"train_batch_size": 6, "eigenvalue": asked})
    found = config.eigenvalues(plain, nested, batch)
    want = curvature.top_eigenvalue(loss_fn, params, batch, blocks=["0.*"], tol=1e-6, max_iter=300, stability=1e-6)
    assert found["net.0.*"] == want["0.*"]
    assert TrainingConfig.of({"train_batch_size": 6}).eigenvalues(plain, nested, batch) == {}
    with pytest.raises(ConfigError):
        TrainingConfig.of({"train_batch_size": 6, "eigenvalue": {"enabled": True}}).eigenvalues(plain, nested, batch)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"max_iter": 0}, "max_iter"),
        ({"max_iter": 1.5}, "max_iter"),
        ({"tol": -1}, "tol"),
        ({"tol": float("nan")}, "tol"),
        ({"stability": "0"}, "stability"),
        ({"blocks": "0.*"}, "blocks"),
        ({"blocks": []}, "blocks"),
        ({"blocks": [3]}, "blocks"),
        ({"axis": "dp"}, "axis"),
        ({"key": 0.5}, "key"),
        ({"params": {}}, "params"),
        ({"params": {"x": 3}}, "params"),
        ({"loss": None}, "loss"),
    ],
)
def test_wrong_arguments_are_refused(arguments, where):
    loss_fn, params, batch = problem()
    given = {"loss": loss_fn, "params": params, "batch": batch, **arguments}
    with pytest.raises(FdsError) as e:
        curvature.top_eigenvalue(given.pop("loss"), given.pop("params"), given.pop("batch"), **given)
    assert e.value.where == where


def test_wrong_patterns_losses_and_samples_are_refused():
    loss_fn, params, batch = problem()
    with pytest.raises(FdsError):
        curvature.top_eigenvalue(loss_fn, params, batch, blocks=["9.*"])
    for num_samples in (1, 2.0):
        with pytest.raises(FdsError, match="samples"):
            curvature.trace(loss_fn, params, batch, num_samples=num_samples)
    for wrong in (lambda p, b: 1.0, lambda p, b: p["0.weight"], lambda p, b: b[0].sum()):
        with pytest.raises(LossError):
            curvature.sharpness(wrong, params, batch)
