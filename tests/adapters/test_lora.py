"""`lora`: the oracle is the hand-written loop whose weights are W + s B A; both forms are it, on any ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds import plans, tree
from fds.errors import ComposeError, FdsError, LossError, StateError
from tests.bits import assert_same_bits

ROWS = torch.linspace(-1, 1, 32).view(4, 8).sin(), torch.linspace(0, 1, 16).view(4, 4)
FORMS = ("layer", "view")
WEIGHTS = ("0.0.weight", "0.2.weight", "1.0.weight", "1.2.weight")
LR = 0.05


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def layers() -> fds.Layers:
    torch.manual_seed(0)
    return fds.Layers([block(), block(), nn.Linear(8, 4)], nn.functional.mse_loss)


LAYERS = layers()
PARAMS = LAYERS.init(fds.random.key(0))


def lora(form="layer", **more):
    return fds.lora("(0|1).*.weight", **{"rank": 2, "alpha": 3, "form": form, **more})


def trained(*parts, given: Any = PARAMS, calls=3, loss: Any = LAYERS, optimizer=None):
    step = fds.compose(*parts, optimizer or fds.adamw(LR, weight_decay=0.1))(loss)
    state, losses = step.init(given, key=1), []
    for _ in range(calls):
        state, metrics = step(state, ROWS)
        losses.append(float(metrics["loss"]))
    return step, state, losses


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


def by_hand(kind, calls=3):
    """Return the losses of a loop in plain torch, from the factors that `init` makes."""
    step, state, _ = trained(lora(**kind), calls=0)
    params = {name: x.clone() for name, x in step.params(state).items()}
    leaves = [x.requires_grad_() for name, x in params.items() if "lora" in name]
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=0.1)
    scale, found = 3 / (math.sqrt(2) if kind.get("stabilized") else 2), []
    for _ in range(calls):
        seen = {name: x for name, x in params.items() if "lora" not in name}
        for name in WEIGHTS:
            at = name.removesuffix("weight")
            w = params[name]
            seen[name] = w + scale * (params[f"{at}lora_B.default.weight"] @ params[f"{at}lora_A.default.weight"])
            if kind.get("dora"):
                rows = seen[name].detach().norm(dim=1)
                seen[name] = seen[name] * ((w.norm(dim=1) + params[f"{at}lora_M.default.weight"]) / rows)[:, None]
        loss = LAYERS(seen, ROWS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found, {name: x.detach() for name, x in params.items()}


@pytest.mark.parametrize("kind", [{}, {"stabilized": True}, {"dora": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_loop_by_hand(form, kind):
    want, want_params = by_hand(kind)
    step, state, losses = trained(lora(form, **kind))
    close(losses, want)
    close(step.params(state), want_params)
    assert_same_bits({n: step.params(state)[n] for n in PARAMS}, dict(PARAMS))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_added_is_uniform_in_one_over_the_root_and_zero_whatever_makes_it(form):
    states = [trained(lora(form), given=given, calls=0)[1] for given in (PARAMS, LAYERS.init, lambda key: PARAMS)]
    for state in states:
        a, b = state.params["0.0.lora_A.default.weight"], state.params["0.0.lora_B.default.weight"]
        assert a.shape == (2, 8) and b.shape == (12, 2) and not b.any()
        bound = 1 / math.sqrt(8)
        assert 0.5 * bound < a.abs().max() <= bound and a.unique().numel() == a.numel()
        assert_same_bits(a, states[0].params["0.0.lora_A.default.weight"])
    assert not torch.equal(states[0].params["1.0.lora_A.default.weight"], a)
    step, state, _ = trained(lora(form))
    again = step.init(step.params(state))
    assert_same_bits(again.params, state.params)  # what is there stays


class Shapes(TorchDispatchMode):
    """Remembers the shapes that operators return."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes += [tuple(x.shape) for x in tree.leaves(out) if isinstance(x, Tensor) and not func.is_view]
        return out


@pytest.mark.parametrize("kind", [{}, {"dora": True}], ids=str)
def test_layers_never_make_a_matrix_of_the_shape_of_a_weight(kind):
    torch.manual_seed(0)
    module = nn.Linear(24, 40)
    apply, params, _ = fds.functional(module)
    made = {}
    for form in FORMS:
        step = fds.compose(fds.lora("weight", rank=2, form=form, **kind), fds.sgd(LR))(
            lambda p, x: apply(p, x).square().mean()
        )
        state = step.init(params)
        state, _ = step(state, torch.ones(3, 24))
        with Shapes() as seen:
            step(state, torch.ones(3, 24))
        made[form] = [x for x in seen.shapes if sorted(x) == [24, 40]]
    squares = bool(kind)  # the lengths of the weight's own rows
    assert len(made["layer"]) <= squares and len(made["view"]) >= 3


PLACES = {
    "stage 0": (2, {"dp": 2}, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=0)]),
    "stage 1, offloaded": (
        2, {"dp": 2}, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=1), fds.offload(moments="host")]),
    "stage 2": (2, {"dp": 2}, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=2), fds.ema(0.9)]),
    "stage 3": (
        2, {"dp": 2},
        lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=3, persist_below=0), fds.checkpoint_activations()]),
    "pipeline": (2, {"pp": 2}, lambda mesh: [fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=2)]),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_ranks_do_what_one_does(form, place):
    ranks, axes, more = PLACES[place]

    def run():
        step, state, losses = trained(lora(form), *more(fds.mesh(**axes)), given=LAYERS.init)
        return step.params(state), losses

    given = LAYERS.init(fds.random.fold_in(fds.random.key(1), "params"))
    want_step, want_state, want = trained(lora(form), given=given)
    for params, losses in fds.simulate(run, ranks):
        close(losses, want)
        close(params, want_step.params(want_state))


TENSOR = {"*.0": "column", "*.2": "row"}


def tensor(plan: Any = TENSOR, **more):
    return fds.tensor_parallel(fds.mesh(tp=2, dp=-1)["tp"], plan, **more)


PARTS = {
    "alone": (2, lambda mesh: []),
    "stage 3": (4, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=3, persist_below=0)]),
    "offloaded": (2, lambda mesh: [fds.offload(moments="host")]),
    "checkpointed": (2, lambda mesh: [fds.checkpoint_activations()]),
    "pipeline": (4, lambda mesh: [fds.pipeline(plans.one_f_one_b, mesh["dp"], num_microbatches=2)]),
}


@pytest.mark.sweep
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_axis_is_one_rank(form, parts):
    ranks, more = PARTS[parts]
    want_step, want_state, want = trained(lora(form))

    def run():
        step, state, losses = trained(lora(form), tensor(), *more(fds.mesh(tp=2, dp=-1)))
        return step.params(state), losses

    for params, losses in fds.simulate(run, ranks):
        close(losses, want)
        close(params, want_step.params(want_state))


TOKENS = torch.linspace(-1, 1, 2 * 6 * 8).view(2, 6, 8).sin(), torch.linspace(0, 1, 2 * 6 * 4).view(2, 6, 4)
PLANS = {
    "gathered": ({"*.0": fds.nn.column(gather=True), "*.3": fds.nn.column(gather=True)}, {}),
    "parts": ({"*.0": fds.nn.column(parts=2), "*.3": fds.nn.row(parts=(6, 6))}, {}),
    "uneven": ({"*.0": fds.nn.column(parts=(5, 7)), "*.3": fds.nn.row(parts=(5, 7))}, {}),
    "sequence": ({"0": "sequence", "1": "sequence", "*.0": "column", "*.3": "row"}, {"sequence": True}),
    "beside messages": ({"*.0": "column", "*.3": "row"}, {"overlap": 2}),
    "both": ({"0": "sequence", "*.0": "column", "*.3": "row"}, {"sequence": True, "overlap": 2}),
    "whole in parts": ({"*": "sequence", "0.0": "column", "0.3": "row"}, {"sequence": True}),
    "compared": ({"*.0": "column", "*.3": "row"}, {"verify": True}),
}  # fmt: skip


class Own(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


KINDS = ["plain", "dropout", "two", "rounded", "dora", "own"]
CASES = [*((plan, "plain") for plan in PLANS), *((plan, kind) for plan in ("uneven", "sequence") for kind in KINDS[1:])]


@pytest.mark.parametrize(("plan", "kind"), CASES)
def test_layers_on_a_tensor_axis_compute_what_one_rank_does(plan, kind):
    """Gradients and losses in float64: whatever divides the layers, however they are sent, with dropout of both."""
    torch.manual_seed(1)
    kind_of = Own if kind == "own" else nn.Linear
    inner = lambda: nn.Sequential(kind_of(8, 12), nn.GELU(), nn.Dropout(0.2 * (kind == "dropout")), kind_of(12, 8))
    linear = fds.Layers([inner().double(), inner().double(), nn.Linear(8, 4).double()], nn.functional.mse_loss)
    weights = "(0|1).*.weight"
    parts = [fds.lora(weights, rank=2, dropout=0.3 * (kind == "dropout"), dora=kind == "dora")]
    if kind == "two":
        parts += [fds.lora(weights, rank=3, alpha=5, name="second")]
    if kind == "rounded":
        parts = [fds.quantize_activations(["0.0", "0.3"]), *parts, fds.quantize_activations(["1.0", "1.3"])]
    divided, more = PLANS[plan]

    def losses_and_changes(*others):
        step = fds.compose(*parts, *others, fds.sgd(1.0))(linear)
        params = fds.compose(*parts, fds.sgd(1.0))(linear).init(linear.init, key=3).params
        generator = torch.Generator().manual_seed(2)
        params = {n: x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype) if "lora" in n else x.double()
                 for n, x in params.items()}  # fmt: skip
        state, losses = step.init(params, key=5), []
        for _ in range(2):
            state, metrics = step(state, tuple(x.double() for x in TOKENS))
            losses.append(metrics["loss"])
        evaluated = step.evaluate(state, tuple(x.double() for x in TOKENS))["loss"]
        return losses, evaluated, step.params(state)

    want = losses_and_changes()
    for got in fds.simulate(lambda: losses_and_changes(tensor(divided, **more)), 2):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_dora_on_a_tensor_axis_has_whole_rows_or_adds_up_their_squares():
    for form in FORMS:
        kind = {"form": form, "dora": True, "rank": 2}
        for pattern in ("*.0.weight", "*.2.weight"):
            run = lambda pattern=pattern, kind=kind: trained(fds.lora(pattern, **kind), tensor())[2]
            if form == "view" and pattern == "*.2.weight":
                with pytest.raises(ComposeError, match="length of a row"):
                    fds.simulate(run, 2)
                continue
            _, _, want = trained(fds.lora(pattern, **kind))
            for losses in fds.simulate(run, 2):
                close(losses, want)


def test_a_row_of_zeros_has_the_length_of_its_factors():
    """In layers as in views: nothing is added to the square of a weight's row of zeros."""
    x, weight = torch.linspace(-1, 1, 20).view(5, 4), torch.linspace(0, 1, 12).view(3, 4)
    linear, outputs = fds.Layers([nn.Linear(4, 3, bias=False)], nn.functional.mse_loss), []
    for form in FORMS:
        step = fds.compose(fds.lora("*", rank=2, dora=True, form=form), fds.sgd(0.1))(linear)
        params = step.init({"0.weight": weight * torch.tensor([[1.0], [0.0], [1.0]])}).params
        state = step.init({name: x + 0.3 if "lora" in name else x for name, x in params.items()})
        outputs.append(step.evaluate(state, (x, x[:, :3]), outputs=True)["outputs"])
    torch.testing.assert_close(*outputs)


def test_a_run_goes_on_at_another_stage(tmp_path):
    whole, state, _ = trained(lora(), calls=2)
    fds.save(tmp_path, state, whole)
    state, metrics = whole(state, ROWS)

    def run():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3, persist_below=0)
        step = fds.compose(lora("view"), shard, fds.adamw(LR, weight_decay=0.1))(LAYERS)
        mine, _ = fds.load(tmp_path, step, PARAMS)
        mine, metrics = step(mine, ROWS)
        return float(metrics["loss"]), step.params(mine)

    for loss, params in fds.simulate(run, 2):
        close(loss, float(metrics["loss"]))
        close(params, whole.params(state))


@pytest.mark.parametrize("kind", [{}, {"dora": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_baked_is_merged_and_merged_is_unmerged(form, kind):
    step, state, _ = trained(lora(form, **kind))
    module = fds.bake(step, state).module
    assert not any("lora" in name for name, _ in module.named_parameters())
    assert {n for n, x in module.named_parameters() if not torch.equal(x, PARAMS[n])} == set(WEIGHTS)
    close(nn.functional.mse_loss(module(ROWS[0]), ROWS[1]).detach(), step.evaluate(state, ROWS)["loss"])


@pytest.mark.parametrize("form", FORMS)
def test_adapters_of_several_names_add_up_and_one_may_rest(form):
    first = trained(lora(form, name="first"))
    params = {**first[0].params(first[1])}
    both = lora(form, name="first"), fds.lora("0.*.weight", rank=3, form=form, name="second")
    step, state, _ = trained(*both, fds.freeze("*.lora_?.first.*"), given=params)
    after = step.params(state)
    assert {n for n in after if n not in params} == {f"0.{i}.lora_{x}.second.weight" for i in (0, 2) for x in "AB"}
    assert_same_bits({n: after[n] for n in params}, params)
    module = fds.bake(step, state).module
    close(nn.functional.mse_loss(module(ROWS[0]), ROWS[1]).detach(), step.evaluate(state, ROWS)["loss"])


def test_lengths_are_of_the_weight_that_the_adapters_before_made():
    view = trained(lora(name="first", form="view"), lora(name="second", form="view", dora=True))
    first = trained(lora(name="first", dora=True), lora(name="second"))
    for step, state, _ in (view, first):
        module = fds.bake(step, state).module
        close(nn.functional.mse_loss(module(ROWS[0]), ROWS[1]).detach(), step.evaluate(state, ROWS)["loss"])
    fds.compose(lora(name="first"), fds.lora("2.weight", rank=2, dora=True), fds.adamw(LR))(LAYERS)
    with pytest.raises(ComposeError, match=r"another adapter changes[\s\S]*0\.0\.weight"):
        fds.compose(lora(name="first"), lora(name="second", dora=True), fds.adamw(LR))(LAYERS)


def test_bytes_of_a_state_are_the_formulas():
    step, state, _ = trained(lora(), calls=0)
    base = 4 * sum(x.numel() for x in PARAMS.values())
    factors = 4 * sum(2 * (rows + inner) for rows, inner in (PARAMS[name].shape for name in WEIGHTS))
    held = step.describe(state).num_bytes
    assert (held["params"], held["opt"]) == (base + factors, 2 * factors)


def test_what_is_named_is_trained_too():
    step, state, _ = trained(lora(train=["2.bias"]))
    params = step.params(state)
    assert {n for n in PARAMS if not torch.equal(params[n], PARAMS[n])} == {"2.bias"}


@pytest.mark.parametrize("more", [[], [fds.checkpoint_activations()]], ids=["plain", "checkpointed"])
def test_dropout_is_of_the_factors_input_in_training_and_follows_the_key(more):
    linear = fds.Layers([nn.Linear(8, 8), nn.Linear(8, 4)], nn.functional.mse_loss)
    runs = [
        trained(fds.lora("*.weight", rank=2, dropout=p), *more, given=linear.init, loss=linear, calls=3)
        for p in (0.0, 0.5, 0.5)
    ]
    assert runs[1][2] == runs[2][2] and runs[1][2][1:] != runs[0][2][1:]
    assert runs[1][2][0] == pytest.approx(runs[0][2][0])  # B is zero
    step, state, _ = runs[1]
    assert_same_bits(step.evaluate(state, ROWS)["loss"], step.evaluate(state, ROWS)["loss"])
    close(
        nn.functional.mse_loss(fds.bake(step, state).module(ROWS[0]), ROWS[1]).detach(),
        step.evaluate(state, ROWS)["loss"],
    )


def test_low_precision_has_factors_in_float32_and_computes_in_16_bits():
    half = {name: x.to(torch.bfloat16) for name, x in PARAMS.items()}
    dtypes = []
    apply, params, _ = fds.functional(block().to(torch.bfloat16))
    loss = lambda p, b: dtypes.append(p["0.lora_A.default.weight"].dtype) or apply(p, b[0]).float().square().mean()
    step = fds.compose(fds.lora("*.weight", rank=2), fds.precision(torch.bfloat16), fds.sgd(LR))(loss)
    state = step.init(params)
    assert state.params["0.lora_A.default.weight"].dtype is torch.float32 and half
    state, metrics = step(state, ROWS)
    assert metrics["loss"].isfinite() and dtypes == [torch.bfloat16]


def test_a_loss_without_modules_takes_views():
    params = {"w": torch.ones(3, 5), "b": torch.zeros(3)}
    loss = lambda p, x: (x @ p["w"].T + p["b"]).square().mean()
    _, state, losses = trained(fds.lora("w", rank=1, form="view"), given=params, loss=lambda p, b: loss(p, b[0][:, :5]))
    assert {*state.params} == {"w", "b", "lora_A.default.weight", "lora_B.default.weight"} and losses[2] < losses[0]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    {
        "no pattern": (lambda: fds.lora(rank=2), ComposeError, "patterns"),
        "no rank": (lambda: lora(rank=0), ComposeError, "rank"),
        "a rank that is no int": (lambda: lora(rank=1.5), ComposeError, "rank"),
        "an infinite scale": (lambda: lora(alpha=math.inf), ComposeError, "alpha"),
        "no scale": (lambda: lora(alpha=0), ComposeError, "alpha"),
        "a scale that is no number": (lambda: lora(alpha=math.nan), ComposeError, "alpha"),
        "no form": (lambda: lora("matrix"), ComposeError, "form"),
        "a name with a dot": (lambda: lora(name="a.b"), ComposeError, "name"),
        "all dropped": (lambda: lora(dropout=1.0), ComposeError, "dropout"),
        "a view with dropout": (lambda: lora("view", dropout=0.1), ComposeError, "no activations"),
        "train is a word": (lambda: lora(train="2.bias"), ComposeError, "train"),
        "train matches nothing": (lambda: lora(train=["3.bias"]), StateError, "3.bias"),
        "nothing matches": (lambda: fds.lora("3.weight", rank=2), StateError, "3.weight"),
        "nothing matches a view": (lambda: fds.lora("3.weight", rank=2, form="view"), StateError, "3.weight"),
        "one of two matches nothing": (lambda: fds.lora("*.weight", "9.(a|b)", rank=2), StateError, r"9.\(a\|b\)"),
        "biases": (lambda: fds.lora("*.bias", rank=2, form="view"), StateError, "matrix"),
        "twice": (lambda: fds.compose(lora(), lora()), StateError, "two transforms"),
    }.values(),
)
def test_bad_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=words) as caught:
        trained(make(), calls=1)
    assert isinstance(caught.value, FdsError)


def test_what_cannot_be_adapted_is_refused():
    embedding = fds.Layers([nn.Embedding(5, 8), nn.Linear(8, 4)], nn.functional.mse_loss)
    with pytest.raises(ComposeError, match="linear layers"):
        fds.compose(fds.lora("0.weight", rank=2), fds.sgd(LR))(embedding)
    with pytest.raises(ComposeError, match="no linear layer"):
        fds.compose(fds.lora("w", rank=2), fds.sgd(LR))(lambda p, b: p["w"].sum())
    nested = fds.compose(fds.lora("a.w", rank=1, form="view"), fds.sgd(LR))(lambda p, b: p["a"]["w"].sum())
    with pytest.raises(StateError, match="dict by name"):
        nested.init({"a": {"w": torch.ones(2, 2)}})
    step = fds.compose(lora(), fds.sgd(LR))(LAYERS)
    with pytest.raises(StateError, match="another shape"):
        step.init({**PARAMS, "0.0.lora_A.default.weight": torch.zeros(3, 8)})
    apply, params, _ = fds.functional(nn.Linear(8, 4))
    step = fds.compose(fds.lora("weight", rank=2), fds.sgd(LR))(lambda p, b: apply(p, b[0]).sum())
    with pytest.raises(LossError, match="unknown"):
        apply(step.params(step.init(params)), ROWS[0])

    with pytest.raises(ComposeError, match="before what divides"):
        fds.simulate(lambda: trained(tensor(), lora("view")), 2)
