"""`bake` of pruned models: dims are smaller, scores are gone, outputs are those of an evaluation."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds.compression import read_baked, sensitivity, shrink, with_scores
from fds.errors import ComposeError, StateError, StorageError
from tests.bits import assert_same_bits
from tests.golden import pruning_masks as golden
from tests.transforms import test_prune_structures as structures
from tests.transforms.test_prune_structures import CASES, LR, batch, problem, train


def trained(kind, prune, *scores, optimizer=None, zeros=False, **more):
    _, loss, params = problem(kind, *scores, zeros=zeros, **more)
    step = fds.compose(*prune, fds.sgd(LR) if optimizer is None else optimizer)(loss)
    return step, train(kind, step, step.init(params))


def compare(kind, step, state, baked, exact=False):
    x, y = batch(kind, 99)
    loss, want = (baked.module(x) - y).square().mean(), step.evaluate(state, [x, y])["loss"]
    if exact:
        assert_same_bits(loss, want)
    else:
        torch.testing.assert_close(loss, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_structures_that_are_left_out_are_not_there(name):
    kind, more, prune = CASES[name]
    step, state = trained(kind, [prune()], **more)
    baked = fds.bake(step, state)
    compare(kind, step, state, baked)
    sizes = {n: tuple(m.weight.shape) for n, m in baked.module.named_modules() if n in structures.SMALLER[name]}
    assert sizes == structures.SMALLER[name]
    assert baked.num_bytes == sum(x.nbytes for x in baked.module.parameters())
    smaller = bool(structures.SMALLER[name])
    assert (baked.num_bytes < sum(entry.bytes_before for entry in baked.entries)) == smaller
    assert (baked.uncut is not None) == smaller
    assert baked.measure(batch(kind, 0)[0], repeats=1).plain_ms > 0


def test_a_weight_without_numbers_has_no_share_of_zeros():
    module = nn.Linear(4, 2)
    module.register_parameter("empty", nn.Parameter(torch.ones(0, 4)))
    apply, params, _ = fds.functional(module)
    step = fds.compose(fds.prune_weights("*", density=0.5), fds.sgd(LR))(lambda params, x: apply(params, x).sum())
    baked = fds.bake(step, step.init(params))
    assert {entry.name: entry.zeros for entry in baked.entries} == {"weight": 0.5, "bias": None, "empty": None}
    assert "nan" not in baked.report()


def test_between_two_masks_the_first_of_them_counts():
    schedule = {"density": 0.3, "end": 8, "stride": 4}  # after 6 calls
    for kind, prune in (
        (structures.multilayer, fds.prune_rows("0.weight", related="next", **schedule)),
        (structures.transformer, fds.prune_heads("1.out.weight", num_heads=4, related="1.qkv.weight", **schedule)),
    ):
        step, state = trained(kind, [prune])
        compare(kind, step, state, fds.bake(step, state))


def test_masked_weights_are_zeros_and_scores_are_gone():
    prune = [fds.prune_weights("2.weight", method="topk", density=0.25)]
    step, state = trained(structures.multilayer, prune, ("2.weight", "weights"))
    baked = fds.bake(step, state)
    compare(structures.multilayer, step, state, baked, exact=True)
    assert int((baked.module[2].weight != 0).sum()) == 24
    assert "2.weight_scores" not in dict(baked.module.named_parameters())
    (entry,) = [entry for entry in baked.entries if entry.name == "2.weight_scores"]
    assert (entry.bytes_before, entry.bytes_after) == (8 * 96, 0)
    zeros = fds.bake(*trained(structures.multilayer, [fds.prune_weights("2.weight", density=0.25)]))
    assert "without zeros" in str(zeros.measure(batch(structures.multilayer, 0)[0], repeats=1))


def test_a_module_that_cannot_be_cut_so_stays_as_it_is(tmp_path):
    kind, _, prune = CASES["next rows"]
    fds.bake(*trained(kind, [prune()])).save(tmp_path)
    for place, other in ((0, nn.Linear(4, 13)), (0, nn.Flatten()), (2, nn.LayerNorm(12)), (2, nn.Linear(13, 8))):
        module = kind().double()
        module[place] = other.double()
        words, before = repr(module), copy.deepcopy(module.state_dict())
        with pytest.raises(StorageError, match="another structure"):
            read_baked(tmp_path, module)
        assert repr(module) == words
        assert_same_bits(module.state_dict(), before)


def test_rows_by_their_sensitivity_and_weights_in_integers():
    prune = [
        fds.prune_rows("0.weight", method="sensitivity", density=0.5, offset=2, related="2.weight"),
        fds.quantize_weights("4.weight", bits=8),
    ]
    optimizer = fds.by_name({"*_scores": sensitivity(), "*": fds.sgd(LR)})
    step, state = trained(structures.multilayer, prune, ("0.weight", "rows"), optimizer=optimizer, zeros=True)
    baked = fds.bake(step, state)
    compare(structures.multilayer, step, state, baked)
    assert baked.module[0].out_features == baked.module[2].in_features == 6
    assert [entry.bits for entry in baked.entries if entry.name == "4.weight"] == [8]
    assert isinstance(baked.module, nn.Sequential)


@pytest.mark.parametrize("name", ["next rows", "channels", "heads"])
@pytest.mark.parametrize("grid", [{"bits": 1}, {"bits": (4, 1)}, {"bits": 4, "symmetric": False}], ids=str)
def test_a_grid_without_zero_comes_before_pruning(grid, name):
    kind, more, prune = CASES[name]
    quantize = fds.quantize_weights("*.weight", **grid)
    with pytest.raises(ComposeError, match="a grid without 0") as error:
        trained(kind, [prune(), quantize], **more)
    assert "quantize_weights first" in error.value.hint
    step, state = trained(kind, [quantize, prune()], **more)
    baked = fds.bake(step, state)
    compare(kind, step, state, baked)
    sizes = {n: tuple(m.weight.shape) for n, m in baked.module.named_modules() if n in structures.SMALLER[name]}
    assert sizes == structures.SMALLER[name]


def test_zeros_of_single_weights_stay_zeros():
    _, loss, params = problem(structures.multilayer)
    prune = fds.prune_weights("2.weight", density=0.25)
    with pytest.raises(ComposeError, match="a grid without 0"):
        fds.compose(prune, fds.quantize_weights("*", bits=1), fds.sgd(LR))(loss).init(params)
    apart = [prune, fds.quantize_weights("4.weight", bits=1)]  # which no mask makes zero
    for prunes in (apart, [prune, fds.quantize_weights("*", bits=1, scheme="torchao")]):
        step, state = trained(structures.multilayer, prunes)
        seen = fds.step.seen_parameters(step, state)
        assert not seen["2.weight"][
            fds.compression.masks.unpack(state.slots["pruned_weights"]["2.weight"], 12) == 0
        ].any()


GRIDS = {
    "rows": {"bits": 4, "groups": "rows"},
    "all": {"bits": 8},
    "pairs": {"bits": 4, "group_size": 2},
    "shifted": {"bits": 4, "scheme": "torchao", "symmetric": False, "group_size": 2},
}


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("next rows", "rows"),
        ("next rows", "pairs"),
        ("channels", "all"),
        ("channels", "shifted"),
        ("heads", "rows"),
        ("heads", "all"),
        ("heads", "pairs"),  # of which heads, 3 columns each, cut some apart
        ("interleaved heads", "shifted"),
        ("rows", "pairs"),  # which stay, as zeros
    ],
)
def test_weights_that_are_cut_are_integers_in_either_order(name, grid, tmp_path):
    kind, more, prune = CASES[name]
    quantize = fds.quantize_weights(*["3.weight", "5.weight"] if name == "channels" else ["*.weight"], **GRIDS[grid])
    for i, transforms in enumerate(([quantize, prune()], [prune(), quantize])):
        step, state = trained(kind, transforms, **more)
        baked, x = fds.bake(step, state), batch(kind, 99)[0]
        compare(kind, step, state, baked)
        plain = baked.unpacked()
        seen = {n: x + 0.0 for n, x in fds.step.seen_parameters(step, state).items()}  # a mask makes -0, too
        assert_same_bits({n: x + 0.0 for n, x in plain.named_parameters()}, seen)
        smaller = shrink(plain, baked.cuts)
        assert_same_bits(baked.module(x), smaller(x))
        for entry in baked.entries:
            path, _, last = entry.name.rpartition(".")
            in_float = smaller.get_parameter(entry.name)
            assert_same_bits(getattr(baked.module.get_submodule(path), last) + 0.0, in_float + 0.0)
            assert entry.baked_shape == in_float.shape
            assert (entry.bits is None) == (last == "bias" or (name == "channels" and path in "01"))
        baked.save(tmp_path / str(i))
        fresh = read_baked(tmp_path / str(i), kind(**more).double())
        assert_same_bits(fresh(x), baked.module(x))
        assert_same_bits(read_baked(tmp_path / str(i), fresh)(x), baked.module(x))
        assert repr(fresh) == repr(baked.module)


def test_ranks_that_share_the_state_have_the_same_integers():
    transforms = [CASES["next rows"][2](), fds.quantize_weights("*.weight", bits=4, group_size=2)]

    def body():
        share = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3)
        return fds.bake(*trained(structures.multilayer, [share, *transforms]))

    alone = fds.bake(*trained(structures.multilayer, transforms))
    first, second = fds.simulate(body, 2)
    x = batch(structures.multilayer, 99)[0]
    assert_same_bits(first.module(x), second.module(x))
    assert [(e.bits, e.baked_shape) for e in first.entries] == [(e.bits, e.baked_shape) for e in alone.entries]
    torch.testing.assert_close(first.module(x), alone.module(x))


def test_a_report_names_dynamic_ranges_of_inputs_of_which_some_are_cut_off():
    kind, _, prune = CASES["heads"]
    inputs = [fds.quantize_activations("1.*"), fds.quantize_activations("2.*", range="static")]
    step, state = trained(kind, [prune(), *inputs, fds.prune_weights("3.*", density=0.5)])
    baked = fds.bake(step, state)
    assert baked.ranges == ("1.out",)
    x, y = batch(kind, 99)
    assert_same_bits((baked.uncut(x) - y).square().mean(), step.evaluate(state, [x, y])["loss"])
    lines = baked.report(fds.compression.Speed(1.0, 3.0, "the uncut model in float")).splitlines()
    assert lines[0].split() == ["parameter", "shape", "cut", "to", "zeros", "bytes", "before", "after"]
    assert lines[11].split() == ["3.weight", "2", "x", "8", "50%", "128", "128"]
    assert lines[-2:] == [
        "1.out: inputs are rounded by the range of those that are left",
        "speed: 3.00 times as fast as the uncut model in float here: 1.000 ms, and 3.000 ms",
    ]


def test_why_a_weight_stays_in_float():
    late = fds.quantize_weights("0.weight", bits=4, offset=100)
    mixed = fds.quantize_weights("2.weight", bits=(8, 4), period=50, mixing=0.1)
    moved = fds.quantize_weights("4.weight", bits=4)
    step, state = trained(structures.multilayer, [late, mixed, moved, shifted("4.weight")])
    reasons = {entry.name: entry.reason for entry in fds.bake(step, state).entries}
    assert reasons == {
        "0.weight": "rounded from update 100 on",
        "2.weight": "30% of the weight is mixed in",
        "4.weight": "a view after it makes other numbers",
        **dict.fromkeys(("0.bias", "2.bias", "4.bias"), ""),
    }


@fds.step.transform
def shifted(name="2.weight"):
    return lambda step: fds.step.fill(step, view=lambda x, leaf, call: x + 1 if leaf.name == name else x)


def test_columns_that_are_not_zero_are_not_left_out():
    step, state = trained(structures.multilayer, [fds.prune_rows("0.weight", density=0.4, related="next"), shifted()])
    with pytest.raises(StateError, match="not 0") as error:
        fds.bake(step, state)
    assert error.value.where == "2.weight"


NAMES = {"fc1.weight_row_scores": "fc1.row_scores", "fc2.weight_scores": "fc2.sparse_scores"}
NAMES |= {"head.weight_head_scores": "head.head_scores"}  # of ours, those from whose names the recorded ones are drawn
TRANSFORMS = {
    "l1": [
        fds.prune_rows("fc1.weight", density=0.4, offset=2, initial=True, related="fc2.weight"),
        fds.prune_weights("head.weight", density=0.3, offset=1, initial=True),
    ],
    "topk": [
        fds.prune_weights("fc2.weight", method="topk", density=0.6),
        fds.prune_rows("fc1.weight", method="topk", density=0.5, offset=1, related="fc2.weight"),
        fds.prune_heads("head.weight", method="topk", num_heads=golden.HEADS, density=0.5, offset=3),
    ],
}
TRAININGS = json.loads((Path(golden.__file__).parent / "pruning_masks.json").read_text())["trainings"]


@pytest.mark.parametrize("case", TRAININGS, ids=[case["name"] for case in TRAININGS])
def test_losses_outputs_and_sizes_are_those_of_deepspeed(case):
    module = golden.Net()
    if case["name"] == "topk":
        module = with_scores(with_scores(module, "fc1.weight", of="rows"), "fc2.weight")
        module = with_scores(module, "head.weight", of="heads", num_heads=golden.HEADS)
    apply, shapes, _ = fds.functional(module)
    params = {name: golden.drawn(NAMES.get(name, name), x.shape) for name, x in shapes.items()}
    loss_fn = lambda params, batch: (apply(params, batch[0]) - batch[1]).square().mean()
    step = fds.compose(*TRANSFORMS[case["name"]], fds.sgd(golden.LR))(loss_fn)
    state, losses = step.init(params), []
    for call in range(golden.CALLS):
        state, metrics = step(state, golden.rows(call))
        losses.append(metrics["loss"].item())
    assert losses == pytest.approx(case["losses"], rel=1e-6)
    baked = fds.bake(step, state).module
    outputs = baked(golden.rows(99)[0]).flatten().tolist()
    assert outputs == pytest.approx(case["outputs"], rel=1e-5, abs=1e-6)
    assert {name: list(x.shape) for name, x in baked.named_parameters()} == case["shapes"]
