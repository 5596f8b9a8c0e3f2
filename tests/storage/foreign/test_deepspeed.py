"""Checkpoints that real DeepSpeed 0.19.6 wrote, against what it says is in them; tests/golden says how."""

import collections
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import fds
from fds.errors import StorageError
from fds.storage.foreign import deepspeed
from fds.storage.foreign.deepspeed_files import CLASSES
from fds.storage.importing import import_deepspeed
from tests.storage.foreign import trained
from tests.storage.foreign.reading import read, read_all
from tests.storage.foreign.test_weights import replace

SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
CASES = [f"zero{stage}_ranks{ranks}" for stage in (1, 2, 3) for ranks in (1, 2, 3)] + [
    "zero0",
    "zero0_bf16",
    "zero0_fp16",
    "zero1_bf16",
    "zero1_bf16_float32_sums",
    "zero2_bf16",
    "zero3_bf16",
    "zero1_fp16",
    "zero3_fp16",
    "zero2_round_robin",
    "zero2_elastic",
    "zero3_subgroups",
    "zero1_sgd",
    "zero2_adagrad",
    "zero1_ranks3_universal",
    "zero3_ranks3_universal",
    "pipe_zero0",
    "pipe_zero0_bf16",
    "pipe_zero1",
    "pipe_zero1_bf16",
    "pipe_zero1_ranks4",
]
CONTINUED = [name for name in CASES if "16" not in name]  # of the others rounding is another's


def expected(folder: Path) -> dict:
    return json.loads((folder / "expected.json").read_text())


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(f"*/{pattern}"))


def copied(folder: Path, into: Path) -> Path:
    return Path(shutil.copytree(folder, into / folder.name))


def rewrite(path: Path, change) -> None:
    """Change what a file holds; DeepSpeed's own objects in it become numbers."""
    with torch.serialization.safe_globals([(Nothing, name) for name in CLASSES]):
        found = torch.load(path, weights_only=True)
    change(found)
    torch.save(found, path)


class Nothing:
    """What stands for an object of DeepSpeed, and is written as an empty dict."""

    def __init__(self, *_):
        pass

    def __reduce__(self):
        return collections.OrderedDict, ()


@pytest.mark.parametrize("case", CASES)
def test_every_leaf_is_what_deepspeed_gathers_to_the_bit(golden, case):
    source, want = deepspeed(golden / case), expected(golden / case)
    have = read_all(source)
    trees = {"params": want["params"], "buffers": want["buffers"]} | {f"opt.{s}": want[s] for s in SLOTS if s in want}
    named = {
        f"{tree}.{name.removeprefix('tied_modules.')}": x
        for tree, by_name in trees.items()
        for name, x in by_name.items()
    }
    scale = dict(zip(("scale", "good_steps", "hysteresis"), want["scale"] or (), strict=False))
    named |= {f"slots.loss_scale.{name}": x for name, x in scale.items()}
    assert have.keys() == {*named, "step", "calls"}
    for name, value in named.items():
        assert torch.equal(have[name].double(), torch.tensor(value).double()), name
    assert all(x.dtype == torch.float32 for name, x in have.items() if name.startswith(("opt.", "params.first")))
    assert have["step"].dtype == have["calls"].dtype == torch.int64
    assert have["calls"] == want["calls"] and have["step"] == want["calls"] - want["skipped"]


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("zero")])
def test_parameters_are_what_deepspeed_consolidates(golden, case):
    source, want = deepspeed(golden / case), expected(golden / case)
    for name, value in want.get("consolidated", {}).items():
        tree = "buffers" if name in want["buffers"] else "params"
        name = {"again.weight": "middle.weight"}.get(name, name)  # shared: under its first name alone
        assert torch.equal(read(source, f"{tree}.{name}").double(), torch.tensor(value).double()), name


@pytest.mark.parametrize("case", ["zero2_ranks3", "zero3_ranks3", "zero3_subgroups", "pipe_zero1_ranks4"])
def test_leaves_can_be_read_in_pieces_of_any_size(golden, case):
    source = deepspeed(golden / case)
    whole = read_all(source)
    for piece in (1, 2, 7):
        assert all(torch.equal(x, whole[name]) for name, x in read_all(source, piece).items())


def test_elements_that_a_leaf_has_not_are_refused(golden):
    source = deepspeed(golden / "zero2_ranks2")
    for start, out in ((-1, torch.empty(2)), (29, torch.empty(2)), (0, torch.empty(2, dtype=torch.int32))):
        with pytest.raises(StorageError, match="no such elements"):
            source.read("params.first.weight", start, out)


def test_the_client_state_comes_along_as_far_as_it_is_json(golden):
    source = deepspeed(golden / "zero2_ranks2")
    assert source.extra == {"epoch": 2, "note": "as it was", "history": [0.5, None, {"a": True}]}
    assert source.composition == (
        "DeepSpeed 0.19.6, ZeRO 2, 2 data ranks",
        "left out: client_state['odd'], a Tensor that is not JSON",
    )


def test_a_tag_or_the_folder_of_one_may_be_given(golden):
    for source in (deepspeed(golden / "zero1_ranks2", "global_step3"), deepspeed(golden / "zero1_ranks2/global_step3")):
        assert source.leaves.keys() == deepspeed(golden / "zero1_ranks2").leaves.keys()


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("zero0_trainable", "does not name its parameters"),
        ("pipe_zero0_tied", "does not name its parameters"),
        ("zero2_rmsprop", "left out: square_avg of the optimizer"),
    ],
)
def test_state_of_the_optimizer_that_is_left_out_is_said_to_be(golden, case, what):
    with pytest.warns(UserWarning, match=what):
        source = deepspeed(golden / case)
    assert not any(name.startswith("opt.") for name in source.leaves)
    assert any(what in line for line in source.composition)


def make_step(case: str):
    """Return a step like DeepSpeed's of a case, and the parameters to begin with."""
    rates = {"lr": trained.LR, "weight_decay": trained.WEIGHT_DECAY}
    others = {"zero1_sgd": fds.sgd(momentum=0.9, **rates), "zero2_adagrad": fds.adagrad(**rates)}
    optimizer = others.get(case, fds.adamw(betas=trained.BETAS, eps=trained.EPS, **rates))
    if case.startswith("pipe"):
        tied = None if case == "pipe_zero0" else fds.TiedLayerSpec
        loss = fds.Layers(trained.layers(fds.LayerSpec, tied), trained.loss_of)
        return (lambda *more: fds.compose(optimizer, *more)(loss)), loss.init
    loss, params = net_loss()
    return (lambda *more: fds.compose(fds.freeze("still.*"), optimizer, *more)(loss)), params


def net_loss():
    """Return the loss of the module, its buffers in the state, and its parameters."""
    apply, params, buffers = fds.functional(trained.Net())

    def loss(params, batch, buffers):
        out, buffers = apply.with_buffers(params, buffers, batch[0])
        return trained.loss_of(out, batch[1]), {}, buffers

    return fds.with_buffers(loss, buffers), params


def go_on(step, state) -> tuple[list[float], dict]:
    losses = []
    for i in range(trained.STEPS_AFTER):
        state, metrics = step(state, trained.batch(trained.STEPS_BEFORE + i))
        losses.append(float(metrics["loss"]))
    return losses, step.params(state)


def assert_continues(losses: list[float], params: dict, want: dict) -> None:
    """Three steps, and a dozen operations of order 1 in each, rounded to float32 in another order."""
    close = {"rtol": 36 * torch.finfo(torch.float32).eps, "atol": 36 * torch.finfo(torch.float32).eps}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want["losses"]), **close)
    after = {name.removeprefix("tied_modules."): torch.tensor(x) for name, x in want["after"].items()}
    torch.testing.assert_close(params, after, **close)


@pytest.mark.parametrize("case", CONTINUED)
def test_an_imported_run_goes_on_as_deepspeed_did(golden, case):
    compose, params = make_step(case)
    step = compose()
    state, extra = import_deepspeed(golden / case, step, params)
    assert extra["epoch"] == 2 and state.step == state.calls == trained.STEPS_BEFORE
    assert_continues(*go_on(step, state), expected(golden / case))


@pytest.mark.parametrize("case", ["zero1_ranks3", "zero2_ranks3", "zero3_ranks3"])
def test_an_imported_run_goes_on_at_another_stage_on_another_number_of_ranks(golden, case):
    def rank():
        axis = fds.mesh(dp=2)["dp"]
        compose, params = make_step(case)
        step = compose(fds.shard_optimizer(axis, stage=3))
        state, _ = import_deepspeed(golden / case, step, params)
        losses = []
        rows = slice(axis.index * trained.ROWS // 2, (axis.index + 1) * trained.ROWS // 2)
        for i in range(trained.STEPS_AFTER):
            batch = tuple(x[rows] for x in trained.batch(trained.STEPS_BEFORE + i))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, step.params(state)

    for losses, params in fds.simulate(rank, world_size=2):
        assert_continues(losses, params, expected(golden / case))


def test_the_loss_scale_goes_on(golden):
    loss, params = net_loss()
    step = fds.compose(fds.loss_scale(), fds.freeze("still.*"), fds.adamw())(loss)
    state, _ = import_deepspeed(golden / "zero1_fp16", step, params)
    slot, want = state.slots["loss_scale"], expected(golden / "zero1_fp16")["scale"]
    assert [slot.scale.item(), slot.good_steps.item(), slot.hysteresis.item()] == want


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("zero2_ranks3", "zero_pp_rank_0_*optim*"),
        ("zero2_ranks3", "zero_pp_rank_2_*optim*"),
        ("zero3_ranks3", "zero_pp_rank_1_*model*"),
        ("zero3_ranks3", "zero_pp_rank_2_*model*"),
        ("zero3_ranks3", "zero_pp_rank_2_*optim*"),
        ("zero1_ranks1", "mp_rank_00_*"),
        ("pipe_zero1_ranks4", "mp_rank_01_*"),
        ("pipe_zero1_ranks4", "zero_pp_rank_1_mp_rank_01_*"),
    ],
)
def test_a_file_that_is_missing_is_refused(golden, tmp_path, case, pattern):
    folder = copied(golden / case, tmp_path)
    for path in files(folder, pattern):
        path.unlink()
    with pytest.raises(StorageError, match=r"missing|no DeepSpeed checkpoint"):
        deepspeed(folder)


def test_a_layer_that_is_missing_is_missed_at_import(golden, tmp_path):
    folder = copied(golden / "pipe_zero0", tmp_path)
    files(folder, "layer_02*")[0].unlink()
    compose, params = make_step("pipe_zero0")
    with pytest.warns(UserWarning, match="does not name"), pytest.raises(StorageError, match=r"params\.2\.shift"):
        import_deepspeed(folder, compose(), params)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixtures of experts"),
        ("expert_3_mp_rank_00_model_states.pt", "mixtures of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixtures of experts"),
        ("layer_00-model_01-model_states.pt", "tensor parallelism"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("offloaded_tensors", "NVMe"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "two files are of the same rank or layer"),
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "missing, or left over"),
        ("zero_pp_rank_4_mp_rank_00_optim_states.pt", "missing"),
    ],
)
def test_what_is_not_imported_is_refused_by_its_files(golden, tmp_path, name, what):
    folder = copied(golden / "zero2_ranks2", tmp_path)
    source = files(folder, "*rank_1*optim*" if "optim" in name else "mp_rank_00*")[0]
    shutil.copy(source, source.parent / name)
    with pytest.raises(StorageError, match=what):
        deepspeed(folder)


def test_tensor_parallelism_is_refused_by_what_the_model_says(golden, tmp_path):
    folder = copied(golden / "zero2_ranks2", tmp_path)
    rewrite(files(folder, "mp_rank*")[0], lambda found: found["checkpoint_parallel_dimensions"].update(tp_degree=2))
    with pytest.raises(StorageError, match="tensor parallelism"):
        deepspeed(folder)


def cut(group):
    group["optimizer_state_dict"]["single_partition_of_fp32_groups"][1] = torch.zeros(3)


def stretch(group):
    group["optimizer_state_dict"]["single_partition_of_fp32_groups"][1] = torch.zeros(300)


def stack(group):
    group["optimizer_state_dict"]["single_partition_of_fp32_groups"][1] = torch.zeros(6, 6)


def lose(group):
    del group["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg_sq"]


def empty(group):
    group["optimizer_state_dict"] = None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (cut, "do not"),
        (stretch, "do not fit"),
        (stack, "not flat"),
        (lose, "does not hold what DeepSpeed puts there"),
        (empty, "does not hold"),
    ],
)
def test_slices_that_do_not_make_the_parameters_are_refused(golden, tmp_path, change, what):
    folder = copied(golden / "zero2_ranks2", tmp_path)
    rewrite(files(folder, "*rank_1*optim*")[0], change)
    with pytest.raises(StorageError, match=what):
        deepspeed(folder)


@pytest.mark.parametrize("tag", ["..", "../zero1_ranks2/global_step3", "/etc", "", "none", "global_step3\0"])
def test_tags_that_are_not_there_or_lead_elsewhere_are_refused(golden, tag):
    with pytest.raises(StorageError, match="tag"):
        deepspeed(golden / "zero1_ranks1", tag)


def test_latest_may_not_lead_elsewhere(golden, tmp_path):
    folder = copied(golden / "zero1_ranks1", tmp_path)
    (folder / "latest").write_text("../../etc")
    with pytest.raises(StorageError, match="not a tag"):
        deepspeed(folder)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("x")])
def test_places_without_checkpoints_are_refused(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(StorageError, match="not a directory of DeepSpeed"):
        deepspeed(tmp_path / "run")


def by_hand(folder: Path, optimizer: dict | None, module: dict) -> Path:
    """Write a checkpoint without ZeRO as DeepSpeed would, for optimizers that need a GPU."""
    folder.mkdir()
    torch.save(
        {
            "module": module,
            "buffer_names": [],
            "optimizer": optimizer,
            "param_shapes": None,
            "shared_params": None,
            "skipped_steps": 1,
            "global_steps": 4,
            "dp_world_size": 1,
            "ds_version": "0.19.6",
            "ds_config": {},
        },
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def test_flat_masters_of_float16_are_cut_into_parameters(tmp_path):
    flat = torch.arange(10.0)
    inner = {"state": {0: {"step": 3, "exp_avg": flat + 1, "exp_avg_sq": flat + 2}}, "param_groups": [{"params": [0]}]}
    module = {"a": torch.zeros(2, 3).half(), "b": torch.zeros(4).half()}
    state = {"optimizer_state_dict": inner, "fp32_groups_flat": [flat], "dynamic_loss_scale": True, "cur_scale": 2.0}
    have = read_all(deepspeed(by_hand(tmp_path / "run", state, module)))
    assert torch.equal(have["params.a"], flat[:6].view(2, 3)) and torch.equal(have["params.b"], flat[6:])
    assert torch.equal(have["opt.exp_avg.b"], flat[6:] + 1) and torch.equal(have["opt.exp_avg_sq.b"], flat[6:] + 2)
    assert (have["step"], have["calls"]) == (3, 4)


def adam(*groups: list[torch.Tensor], **more) -> dict:
    """Return the state of an Adam whose exp_avg are these, group by group."""
    flat = [x for group in groups for x in group]
    numbers = iter(range(len(flat)))
    return {
        "state": {i: {"step": torch.tensor(3.0), "exp_avg": x, "exp_avg_sq": x} for i, x in enumerate(flat)},
        "param_groups": [{"params": [next(numbers) for _ in group], **more} for group in groups],
    }


def test_groups_of_matrices_and_vectors_are_told_apart_by_shape(tmp_path):
    shapes = {"weight": (2, 3), "bias": (2,)}
    module = {f"{layer}.{name}": torch.zeros(shape) for layer in "ab" for name, shape in shapes.items()}
    state = adam([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)], [torch.full((2,), 3.0), torch.full((2,), 4.0)])
    have = read_all(deepspeed(by_hand(tmp_path / "run", state, module)))
    assert [float(have[f"opt.exp_avg.{name}"].unique()) for name in module] == [1.0, 3.0, 2.0, 4.0]


def test_groups_that_share_a_shape_are_left_out(tmp_path):
    module = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.warns(UserWarning, match="does not name its parameters"):
        source = deepspeed(by_hand(tmp_path / "run", adam([torch.ones(2)], [torch.ones(2)]), module))
    assert source.leaves.keys() == {"step", "calls", "params.a", "params.b"}


def test_names_that_torch_was_told_decide(tmp_path):
    module = {"a": torch.zeros(2), "b": torch.zeros(2)}
    state = adam([torch.full((2,), 1.0), torch.full((2,), 2.0)], param_names=["b", "a"])
    have = read_all(deepspeed(by_hand(tmp_path / "run", state, module)))
    assert have["opt.exp_avg.b"].tolist() == [1, 1] and have["opt.exp_avg.a"].tolist() == [2, 2]


def test_a_sum_of_squares_alone_is_adagrads(tmp_path):
    state = adam([torch.ones(2)])
    del state["state"][0]["exp_avg"]
    with warnings.catch_warnings():
        source = deepspeed(by_hand(tmp_path / "run", state, {"a": torch.zeros(2)}))
    assert "opt.sum.a" in source.leaves and "opt.exp_avg_sq.a" not in source.leaves


def test_tied_parameters_that_differ_between_stages_are_reported(golden, tmp_path):
    folder = copied(golden / "pipe_zero1", tmp_path)

    def move(found):
        groups = found["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[1] = groups[1].detach() + 1

    rewrite(files(folder, "*rank_01_optim*")[0], move)
    assert "the stages differ in both.weight, taken from the first" in deepspeed(folder).composition


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_what_is_no_small_file_is_refused_as_latest_and_not_waited_for(golden, tmp_path, kind):
    run = Path(shutil.copytree(golden / "zero0", tmp_path / "run"))
    replace(run / "latest", kind)
    with pytest.raises(StorageError, match="not a directory of DeepSpeed's checkpoints"):
        deepspeed(run)
    assert deepspeed(run, "global_step3").leaves
