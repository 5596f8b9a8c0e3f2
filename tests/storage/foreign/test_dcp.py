"""Checkpoints of torch.distributed.checkpoint: those of real FSDP2 jobs here, and those of a state there."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fds
from fds.errors import StorageWarning
from tests import ranks
from tests.bits import assert_rounding, assert_same_bits
from tests.storage.foreign import fsdp
from tests.storage.topologies import plain

SLOTS = ("exp_avg", "exp_avg_sq")


def made(*transforms):
    """Return a step that computes what the job does, and what its init takes."""
    apply, params, _ = fds.functional(fsdp.Net())

    def loss(params, rows):
        return (apply(params, rows[0]).float() - rows[1]).square().mean()

    adamw = lambda lr, decay: fds.adamw(lr, fsdp.BETAS, fsdp.EPS, weight_decay=decay)
    small = lambda name, shape: len(shape) < 2
    return fds.compose(*transforms, fds.by_name({small: adamw(0.03, 0.0), "*": adamw(0.01, fsdp.DECAY)}))(loss), params


def sharded(stage):
    return fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=256)


def go_on(step, state, calls):
    data, losses = step.dimensions.data, []
    for call in calls:
        rows = fsdp.batch(call)
        state, metrics = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
        losses.append(metrics["loss"].item())
    return state, losses


def leaves(saved) -> dict[str, torch.Tensor]:
    """Return what a job has as leaves of a plain state."""
    kept = {f"params.{name}": x for name, x in saved["model"].items()}
    for name, slots in saved["optim"]["state"].items():
        kept |= {f"opt.{slot}.{name}": slots[slot] for slot in SLOTS}
        kept["step"] = slots["step"].to(torch.int64)
    return kept


def held(state, step) -> dict[str, torch.Tensor]:
    """Return the same of a state; all ranks call it."""
    return {name: x for name, x in plain(state, step).items() if name not in ("calls", "key")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of what a job of two ranks saved, what that was, and how it went on."""
    folder = tmp_path_factory.mktemp("dcp")
    saved, losses, end = ranks.run(fsdp.train, folder)[0]
    return folder, leaves(saved), losses, leaves(end)


@pytest.mark.parametrize(
    ("way", "count", "stage"),
    [("named", 3, 3), ("named", 2, 1), ("named", 1, 0), ("flat", 2, 2), ("numbered", 2, 3), ("numbered", 1, 0)],
)
def test_a_run_of_fsdp2_goes_on_with_its_bits(trained, way, count, stage):
    folder, saved, losses, end = trained

    def on_ranks():
        step, params = made(sharded(stage))
        state, extra = fds.import_dcp(folder / way, step, params)
        assert_same_bits(held(state, step), saved)
        assert state.calls == 3
        assert [group["lr"] for group in extra["param_groups"]] == [0.01, 0.03]
        assert way != "named" or extra["train"] == {"epoch": 2, "seen": 36}
        state, got = go_on(step, state, fsdp.AFTER)
        assert got == pytest.approx(losses, rel=1e-6)
        assert_rounding(held(state, step), end, additions=64)

    fds.simulate(on_ranks, count)


def test_weights_in_one_folder_and_the_optimizer_in_another(trained):
    folder, saved, *_ = trained
    step, params = made()
    state, _ = fds.import_dcp([folder / "wrapped", folder / "optimizer"], step, params)
    assert_same_bits(held(state, step), saved)
    with pytest.warns(StorageWarning):
        state, _ = fds.import_dcp(folder / "wrapped", step, params)
    assert state.step == 0 and not state.opt["exp_avg"]["last.weight"].any()
    state, _ = fds.import_dcp(folder / "named", step, params, without_optimizer=True)
    assert state.step == 0 and torch.equal(state.params["last.weight"], saved["params.last.weight"])


def test_fsdp2_goes_on_with_the_bits_of_a_state(trained, tmp_path):
    folder, saved, losses, end = trained

    def on_ranks():
        step, params = made(sharded(3))
        state, _ = fds.import_dcp(folder / "named", step, params)
        assert fds.export_dcp(state, step, tmp_path / "out") == tmp_path / "out"

    fds.simulate(on_ranks, 3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".metadata",
        *(f"__{i}_0.distcp" for i in range(3)),
    ]
    for got, losses_after, after in ranks.run(fsdp.load, tmp_path / "out"):
        assert_same_bits(leaves(got), saved)
        assert losses_after == losses
        assert_same_bits(leaves(after), end)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    assert_same_bits(leaves(torch.load(tmp_path / "out.pt", weights_only=True)), saved)


@pytest.mark.parametrize("kind", ["copies", "pieces"])
def test_jobs_on_meshes_of_two_dims_are_read_and_read_what_is_written(kind, tmp_path):
    saved = leaves(ranks.run(fsdp.train_in_two_dims, kind, tmp_path / "saved", world_size=4)[0])
    apply, params, _ = fds.functional(fsdp.Net(2, width=40))

    def on_ranks():
        step = fds.compose(sharded(3), fds.adamw(0.01))(lambda params, x: apply(params, x).sum())
        state, _ = fds.import_dcp(tmp_path / "saved", step, params)
        assert_same_bits(held(state, step), saved)
        fds.export_dcp(state, step, tmp_path / "out")

    fds.simulate(on_ranks, 3)
    for got in ranks.run(fsdp.load_in_two_dims, kind, tmp_path / "out", world_size=4):
        assert_same_bits(leaves(got), saved)


def test_masters_of_mixed_precision_stay_what_they_are(tmp_path):
    saved, losses, _ = ranks.run(fsdp.train, tmp_path, True)[0]

    def on_ranks():
        step, params = made(fds.precision(torch.bfloat16), sharded(3))
        state, _ = fds.import_dcp(tmp_path / "named", step, params)
        assert_same_bits(held(state, step), leaves(saved))
        _, got = go_on(step, state, fsdp.AFTER)
        assert got == pytest.approx(losses, rel=2**-7)  # the last bit of bfloat16

    fds.simulate(on_ranks, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_weights_have_all_of_their_names_in_a_job(tmp_path):
    def job(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
        module[2].weight = module[0].weight
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        return module, optimizer

    def parts(module, optimizer):
        return dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))

    def train(module, optimizer):
        loss = module(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    rows, theirs, other = torch.arange(6), job(0), job(1)
    train(*theirs)
    dcp.save(parts(*theirs), checkpoint_id=tmp_path / "saved", no_dist=True)
    module, _ = job(2)
    apply, params, _ = fds.functional(module)

    def on_ranks():
        optimizer = fds.adamw(0.1, weight_decay=0.01)
        step = fds.compose(sharded(3), optimizer)(lambda params, rows: apply(params, rows).square().mean())
        state, _ = fds.import_dcp(tmp_path / "saved", step, params)
        fds.export_dcp(state, step, tmp_path / "out", tied={"2.weight": "0.weight"})
        fds.export_dcp(state, step, tmp_path / "of module", tied=module)

    fds.simulate(on_ranks, 2)
    seen = parts(*job(3))
    dcp.load(seen, checkpoint_id=tmp_path / "of module", no_dist=True)
    assert_same_bits(seen["model"], dict(theirs[0].state_dict()))
    loaded = parts(*other)
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(*other, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    assert_same_bits(dict(other[0].state_dict()), dict(theirs[0].state_dict()))
    assert [train(*other) for _ in range(2)] == [train(*theirs) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("theirs", "ours", "warned"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), fds.sgd(0.1, momentum=0.9), "counts no updates"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5), fds.sgd(0.1, momentum=0.9, dampening=0.5), "counts no updates"),
        (lambda p: torch.optim.Adam(p, 0.1, amsgrad=True), fds.adam(0.1), "max_exp_avg_sq"),
    ],
)
def test_a_buffer_goes_on_though_nothing_counts_updates_or_another_is_left_out(tmp_path, theirs, ours, warned):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer, x = theirs(module.parameters()), torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(4):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    parts = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=tmp_path / "saved", no_dist=True)
    apply, params, _ = fds.functional(module)
    step = fds.compose(ours)(lambda params, x: apply(params, x).square().sum())
    with pytest.warns(UserWarning, match=warned):
        state = fds.import_dcp(tmp_path / "saved", step, params)[0]
    assert int(state.step) == (1 if warned == "counts no updates" else 4)
    for slot, leaves_ in state.opt.items():
        for name, param in module.named_parameters():
            assert_same_bits(leaves_[name], optimizer.state[param][slot])
    state, _ = step(state, x)
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()
    if warned == "counts no updates":
        for name, param in module.named_parameters():
            torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-6, atol=1e-7)
