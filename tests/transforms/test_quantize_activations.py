"""Quantized activations: the step by hand that rounds the inputs of the same modules, wherever and however it runs."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import fds
from fds import plans
from fds.compression import ActivationGrid
from fds.errors import ComposeError, LossError
from tests.bits import assert_same_bits
from tests.golden import quantized_activations

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "quantized_activations.json").read_text())
ROWS, S, WIDTH, MICROBATCHES, CALLS, LR, DECAY = 8, 3, 8, 4, 4, 0.5, 0.75
INNER = ["*.a", "*.b"]
KINDS = {
    "dynamic": {},
    "four bits": {"bits": 4, "symmetric": False},
    "each sample": {"bits": 3, "per": "sample"},
    "static": {"range": "static", "decay": DECAY},
    "late and lopsided": {"range": "static", "decay": DECAY, "bits": 5, "symmetric": False, "offset": 2},
}


class Block(nn.Module):
    def __init__(self, *, recomputes=False):
        super().__init__()
        self.a, self.b, self.recomputes = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), recomputes

    def forward(self, x):
        if self.recomputes:
            return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x):
        return self.b(torch.tanh(self.a(input=x)))


def parts(**more):
    torch.manual_seed(0)
    return [m.double() for m in (nn.Linear(3, WIDTH), Block(**more), Block(**more), nn.Linear(WIDTH, 2))]


def layers():
    return fds.Layers(parts(), lambda out, y: (out - y).square().mean())


def function(**more):
    apply, params, _ = fds.functional(nn.Sequential(*parts(**more)))
    return lambda params, batch: (apply(params, batch[0]) - batch[1]).square().mean(), params


def batch(call):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(ROWS, S, n, generator=g, dtype=torch.float64) for n in (3, 2)]


def train(*transforms, kind, loss=None, params=None, state=None, calls=range(CALLS)):
    loss = layers() if loss is None else loss
    step = fds.compose(*transforms, fds.quantize_activations(INNER, **kind), fds.sgd(LR))(loss)
    state, data = state or step.init(params or loss.init, key=3), step.dimensions.data
    for call in calls:
        rows = batch(call)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return step, state


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def on_grid(x, least, greatest, bits, symmetric):
    """Return x on a grid, by the formulas of the documents."""
    if symmetric:
        s = 2 * torch.maximum(-least, greatest) / 2**bits
        return torch.clamp(torch.round(x / s), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * s
    s = (greatest - least) / 2**bits
    z = torch.round(least / s) * s
    return torch.clamp(torch.round((x - z) / s), 0, 2**bits - 1) * s + z


def by_hand(params, ranges, seen, x, kind, t):
    """Run the model on x; `ranges` are those of the state, and what is `seen` of them goes to the next."""
    bits, symmetric = kind.get("bits", 8), kind.get("symmetric", True)

    def quantized(x, name):
        dims = (1, 2) if kind.get("per") == "sample" else (2,)
        ends = x.detach().amin(dims, keepdim=True), x.detach().amax(dims, keepdim=True)
        if kind.get("range") == "static":
            ends = x.detach().min().float(), x.detach().max().float()
            seen.setdefault(name, []).append(ends)
            ends = [end.double() for end in ranges.get(name, ends)]
        q = on_grid(x, *ends, bits, symmetric)
        return x + (q - x).detach() if t >= kind.get("offset", 0) else x

    x = F.linear(x, params["0.weight"], params["0.bias"])
    for i in (1, 2):
        h = F.linear(quantized(x, f"{i}.a"), params[f"{i}.a.weight"], params[f"{i}.a.bias"])
        h = quantized(torch.tanh(h), f"{i}.b")
        x = x + F.linear(h, params[f"{i}.b.weight"], params[f"{i}.b.bias"])
    return F.linear(x, params["3.weight"], params["3.bias"])


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def plain(request):
    step, state = train(fds.accumulate(MICROBATCHES), kind=request.param)
    return request.param, step, state


def kept(step, state):
    return step.params(state), state.slots.get("activation_ranges", {})


def test_the_loop_written_by_hand_that_rounds_the_same_inputs(plain):
    kind, step, state = plain
    params: dict[str, Any] = {n: x.clone().requires_grad_() for n, x in layers().init(fds.random.key(3)).items()}
    ranges = {}
    for call in range(CALLS):
        seen = {}
        for x, y in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            out = by_hand(params, ranges, seen, x, kind, call)
            ((out - y).square().mean() / MICROBATCHES).backward()
        with torch.no_grad():
            for x in params.values():
                x -= LR * x.grad
                x.grad = None
        for name, ends in seen.items():
            least, greatest = torch.stack([a for a, _ in ends]).min(), torch.stack([b for _, b in ends]).max()
            old = ranges.get(name, (least, greatest))
            ranges[name] = (DECAY * old[0] + (1 - DECAY) * least, DECAY * old[1] + (1 - DECAY) * greatest)
    close(step.params(state), {name: x.detach() for name, x in params.items()})
    noted = {name: (-x[0], x[1]) for name, x in state.slots.get("activation_ranges", {}).items()}
    close(noted, ranges)
    x, y = batch(9)
    out = by_hand({name: x.detach() for name, x in params.items()}, ranges, {}, x, kind, CALLS)
    close(step.evaluate(state, [x, y])["loss"], (out - y).square().mean())


@pytest.mark.parametrize("more", [{}, {"recomputes": True}], ids=["", "that checkpoints its own parts"])
def test_a_loss_that_is_no_layers_rounds_the_same(plain, more):
    kind, step, state = plain
    loss, params = function(**more)
    others = train(fds.accumulate(MICROBATCHES), kind=kind, loss=loss, params=params)
    assert_same_bits(kept(*others), kept(step, state))
    assert_same_bits(others[0].evaluate(others[1], batch(9)), step.evaluate(state, batch(9)))


@pytest.mark.parametrize("outside", [True, False])
def test_recomputed_layers_round_the_same(plain, outside):
    kind, step, state = plain
    checkpoint, rounds = fds.checkpoint_activations(every=2), fds.quantize_activations(INNER, **kind)
    order = (rounds, checkpoint) if outside else (checkpoint, rounds)
    loss = layers()
    other = fds.compose(fds.accumulate(MICROBATCHES), *order, fds.sgd(LR))(loss)
    new = other.init(loss.init, key=3)
    for call in range(CALLS):
        new, _ = other(new, batch(call))
    assert_same_bits(kept(other, new), kept(step, state))


@pytest.mark.parametrize("stage", range(4))
def test_ranks_round_what_one_rank_rounds(plain, stage):
    kind, step, state = plain
    more: dict[str, Any] = {"max_live_bytes": 4096, "bucket_bytes": 1024} if stage == 3 else {}

    def body():
        axis = fds.mesh(dp=2)["dp"]
        shared = fds.shard_optimizer(axis, stage=stage, **more)
        step, state = train(fds.accumulate(MICROBATCHES // 2), shared, kind=kind)
        return kept(step, state), step.evaluate(state, [x.chunk(2)[axis.index] for x in batch(9)])["loss"]

    for got in fds.simulate(body, 2):
        close(got, (kept(step, state), whole_loss(step, state, 2)))


def whole_loss(step, state, n):
    return torch.stack([step.evaluate(state, [x.chunk(n)[i] for x in batch(9)])["loss"] for i in range(n)]).mean()


def test_stages_of_a_pipeline_round_what_one_rank_rounds(plain):
    kind, step, state = plain

    def body():
        axis = fds.mesh(pp=2)["pp"]
        step, state = train(fds.pipeline(plans.one_f_one_b, axis, num_microbatches=MICROBATCHES), kind=kind)
        return kept(step, state), step.evaluate(state, batch(9))["loss"]

    for got in fds.simulate(body, 2):
        close(got, (kept(step, state), step.evaluate(state, batch(9))["loss"]))


def test_a_run_that_was_stopped_rounds_as_it_would_have(plain, tmp_path):
    kind, step, state = plain
    first, half = train(fds.accumulate(MICROBATCHES), kind=kind, calls=range(2))
    fds.save(tmp_path, half, first)
    loaded, _ = fds.load(tmp_path, first, layers().init)
    assert_same_bits(
        kept(*train(fds.accumulate(MICROBATCHES), kind=kind, state=loaded, calls=range(2, CALLS))), kept(step, state)
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of its own code
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the same
@pytest.mark.parametrize("kind", ["dynamic", "late and lopsided"])
def test_compiled_steps_round_the_same(kind):
    compiled = fds.compile(backend="eager", whole=kind != "dynamic")
    parts = compiled, fds.accumulate(MICROBATCHES)
    assert_same_bits(kept(*train(*parts, kind=KINDS[kind])), kept(*train(parts[1], kind=KINDS[kind])))


@pytest.mark.parametrize("kind", [{"range": "static"}, {"offset": 1}], ids=str)
def test_layers_that_are_compiled_do_not_follow_the_state(kind):
    with pytest.raises(LossError, match="follows the state"):
        train(fds.compile(backend="eager"), kind=kind)


@pytest.mark.parametrize("case", quantized_activations.CASES, ids=str)
def test_what_modules_of_deepspeed_make_of_inputs(case):
    """A range of DeepSpeed's holds an input already when it is rounded: ours is put into the state before."""
    (answer,) = [x for x in GOLDEN["cases"] if {name: x[name] for name in case} == case]
    inputs, params = quantized_activations.made(case)
    module = nn.Linear(5, 4) if case["module"] == "linear" else nn.Conv2d(3, 2, 3)
    apply, first, _ = fds.functional(nn.Sequential(module))
    rule = fds.quantize_activations("0", bits=case["bits"], symmetric=case["symmetric"], range=case["range"])
    step = fds.compose(rule, fds.sgd(0.0))(lambda params, x: apply(params, x).square().mean())
    state = step.init({name: params[name[2:]] for name in first})
    for x, want, seen in zip(inputs, answer["outputs"], answer["seen"], strict=True):
        if seen:
            slot = {"activation_ranges": {"0": torch.tensor([-seen[0], seen[1]])}}
            state = attrs.evolve(state, slots={**state.slots, **slot})
        got = step.evaluate(state, x, outputs=True)["outputs"]
        # a CPU of other instructions adds the products in another order
        sizes = nn.functional.conv2d if case["module"] == "convolution" else nn.functional.linear
        products = sizes(x.abs(), params["weight"].abs(), params["bias"].abs())
        bound = 2 * params["weight"][0].numel() * torch.finfo(torch.float32).eps * products.flatten()
        assert ((got.flatten() - torch.tensor(want)).abs() <= bound).all()


def test_a_static_range_averages_as_deepspeeds_does_where_there_is_one_microbatch():
    (answer,) = [
        x
        for x in GOLDEN["cases"]
        if (x["module"], x["bits"], x["symmetric"], x["range"]) == ("linear", 8, True, "static")
    ]
    inputs, _ = quantized_activations.made({name: answer[name] for name in quantized_activations.CASES[0]})
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(5, 4)))
    step = fds.compose(fds.quantize_activations("0", range="static"), fds.sgd(0.0))(lambda p, x: apply(p, x).mean())
    state = step.init(params)
    for x, seen in zip(inputs, answer["seen"], strict=True):
        state, _ = step(state, x)
        got = state.slots["activation_ranges"]["0"]
        torch.testing.assert_close(torch.stack([-got[0], got[1]]), torch.tensor(seen), rtol=1e-6, atol=0)


def test_zeros_and_constants_stay_what_they_are():
    x = torch.tensor([[0.0, 0.0, 0.0], [0.3, 0.3, 0.3], [-2.5, -2.5, -2.5]])
    assert_same_bits(ActivationGrid(8, symmetric=False).by_groups(x, "token"), x)
    assert_same_bits(ActivationGrid(4).by_groups(x[:1], "sample"), x[:1])
    assert ActivationGrid().by_groups(torch.tensor([[1.0, torch.nan]]), "token").isnan().all()
    assert ActivationGrid().by_groups(torch.zeros(0, 3), "token").shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_rounded_in_float32_and_once_more_to_them(dtype):
    x = torch.randn(16, 64).to(dtype)
    want = on_grid(x.float(), x.float().amin(1, True), x.float().amax(1, True), 8, symmetric=True).to(dtype)
    assert_same_bits(ActivationGrid().by_groups(x, "token"), want)
    for symmetric in (True, False):  # ends of 0 dims, which do not widen what they divide
        least, greatest = torch.tensor(-1.7), torch.tensor(2.3)
        want = on_grid(x.float(), least, greatest, 8, symmetric=symmetric).to(dtype)
        assert_same_bits(ActivationGrid(8, symmetric).between(x, least, greatest), want)


def test_gradients_pass_straight_through_also_by_torch_func():
    grid, x = ActivationGrid(2), torch.randn(4, 6, dtype=torch.float64)
    f = lambda x: (grid.by_groups(x, "token") ** 2).sum()
    want = 2 * grid.by_groups(x, "token")
    assert_same_bits(torch.func.grad(f)(x), want)
    assert_same_bits(torch.func.vmap(torch.func.grad(f))(x[:, None]), want[:, None])


def test_a_range_waits_for_finite_numbers_and_a_skipped_step_keeps_it():
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(3, 1)))
    loss = lambda params, batch: (apply(params, batch[0]) * batch[1]).mean()
    step = fds.compose(fds.skip_nonfinite(), fds.quantize_activations("0", range="static"), fds.sgd(0.1))(loss)
    state = step.init(params)
    x, ones = torch.tensor([[1.0, -2.0, 3.0]]), torch.ones(1, 1)
    skipped, metrics = step(state, [x, ones * torch.nan])
    assert metrics["skipped"] and skipped.slots["activation_ranges"]["0"].tolist() == [0, 0]
    state, _ = step(skipped, [x, ones])
    assert state.slots["activation_ranges"]["0"].tolist() == [2, 3]
    step.evaluate(state, [x * 9, ones])
    assert state.slots["activation_ranges"]["0"].tolist() == [2, 3]
    going_on = fds.compose(fds.quantize_activations("0", range="static"), fds.sgd(0.1))(loss)
    after, _ = going_on(state, [x * torch.inf, ones])
    assert after.slots["activation_ranges"]["0"].tolist() == [2, 3]


def test_an_evaluation_of_torchs_own_encoder_rounds_where_torch_would_fuse():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    apply, params, _ = fds.functional(encoder)
    loss = lambda params, x: apply(params, x).square().mean()
    step = fds.compose(fds.quantize_activations(["linear1", "linear2"], bits=2), fds.sgd(0.1))(loss)
    x, grid = torch.randn(3, 5, 8), ActivationGrid(2)
    h = encoder.eval().norm1(x + encoder.self_attn(x, x, x, need_weights=False)[0])
    fed = encoder.linear2(grid.by_groups(torch.relu(encoder.linear1(grid.by_groups(h, "token"))), "token"))
    want = encoder.norm2(h + fed)
    state = step.init(params)
    for _ in range(6):  # in first calls modes watch, beside which torch fuses nothing
        torch.testing.assert_close(step.evaluate(state, x, outputs=True)["outputs"], want.detach())
    with pytest.raises(ComposeError, match="never calls it"):
        fds.compose(fds.quantize_activations("self_attn.out_proj"), fds.sgd(0.1))(loss)


def test_an_eval_fn_rounds_too():
    loss, params = function()
    error = lambda params, batch: loss(params, batch)
    step = fds.compose(fds.quantize_activations(INNER, bits=3), fds.sgd(0.1))(loss, eval_fn=error)
    state = step.init(params)
    plain = fds.compose(fds.sgd(0.1))(loss)
    assert step.evaluate(state, batch(0))["loss"] != plain.evaluate(plain.init(params), batch(0))["loss"]
    assert_same_bits(step.evaluate(state, batch(0))["loss"], step(state, batch(0))[1]["loss"])


@pytest.mark.sweep
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [{}, {"range": "static"}], ids=str)
def test_ranks_of_a_tensor_axis_round_by_the_ranges_of_one(kind, first):
    def body(size):
        axis = fds.mesh(tp=size)["tp"]
        divided = fds.tensor_parallel(axis, {"*.a": "column", "*.b": "row"})
        pair = [divided, fds.quantize_activations(["*.a", "*.b"], **kind)]
        loss = layers()
        step = fds.compose(*(pair if first else pair[::-1]), fds.sgd(LR))(loss)
        state = step.init(loss.init, key=3)
        for call in range(CALLS):
            state, _ = step(state, batch(call))
        return kept(step, state), step.evaluate(state, batch(9))["loss"]

    want = fds.simulate(lambda: body(1), 1)[0]
    for got in fds.simulate(lambda: body(2), 2):
        close(got, want)


def test_ranks_that_have_parts_of_what_a_range_is_of_are_refused():
    def body(more, kind, pattern="*.a"):
        loss = layers()
        step = fds.compose(*more(), fds.quantize_activations(pattern, **kind), fds.sgd(LR))(loss)
        step(step.init(loss.init), batch(0))

    parts = lambda: [fds.context_parallel(fds.mesh(sp=2)["sp"])]
    with pytest.raises(ComposeError, match="whole rows"):
        fds.simulate(lambda: body(parts, {"range": "static"}), 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([],), "names modules"),
        ((3,), "names modules"),
        (("nothing.*",), "matches no module"),
        (("1",), "linear layers and convolutions"),
        (("*.a", {"bits": 1}), "bits"),
        (("*.a", {"bits": 9}), "bits"),
        (("*.a", {"bits": True}), "bits"),
        (("*.a", {"symmetric": 1}), "symmetric"),
        (("*.a", {"range": "both"}), "range"),
        (("*.a", {"per": "row"}), "group"),
        (("*.a", {"range": "static", "per": "token"}), "static range"),
        (("*.a", {"offset": -1}), "offset"),
        (("*.a", {"offset": 1.5}), "offset"),
        (("*.a", {"decay": 1.0}), "decay"),
        (("*.a", {"name": "a b"}), "slot"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, match):
    names, *more = arguments
    with pytest.raises(ComposeError, match=match):
        fds.compose(fds.quantize_activations(names, **(more[0] if more else {})), fds.sgd(0.1))(layers())


def test_modules_that_are_matched_twice_and_losses_without_modules_are_refused():
    rounds = fds.quantize_activations
    with pytest.raises(ComposeError, match="two round the inputs of one module"):
        fds.compose(rounds("*.a"), rounds("1.a", bits=4), fds.sgd(0.1))(layers())
    with pytest.raises(ComposeError, match="each its own"):
        fds.compose(rounds("*.a", range="static"), rounds("*.b", range="static"), fds.sgd(0.1))(layers())
    step = fds.compose(rounds("*.a", range="static"), rounds("*.b", range="static", name="more"), fds.sgd(0.1))(
        layers()
    )
    assert list(step.init(layers().init).slots) == ["activation_ranges", "more"]
    with pytest.raises(ComposeError, match="finds no module"):
        fds.compose(rounds("*"), fds.sgd(0.1))(lambda params, x: x.mean())
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(2, 2)))
    step = fds.compose(rounds("0"), fds.sgd(0.1))(lambda params, x: apply(params, x["x"]).mean())
    with pytest.raises(LossError, match="something else than numbers"):
        step(step.init(params), {"x": torch.ones(2, 2, dtype=torch.int64)})
