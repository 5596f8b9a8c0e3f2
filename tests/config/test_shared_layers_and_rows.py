"""A JSON by which ranks share layers or rows: the training is that of one rank, on the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import fds
from fds.config import TrainingConfig
from fds.errors import BatchError, ConfigError, LossError, MeshError

# the gradient of the bias of keys is 0 but for rounding, which a small eps would blow up
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}}
JSON: dict[str, Any] = {"train_batch_size": 8, "gradient_accumulation_steps": 2, **ADAMW}
TENSOR, ROWS = {"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}
X = torch.randn(20, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(X, X.flip(1).cumsum(1))


def made(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def encoder(drop: float = 0.0) -> nn.Module:
    return made(lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=drop, batch_first=True))


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def train(config, model=encoder, loss_fn=loss, *, calls: int = 4, **arguments):
    """Return the losses of a training, its last norm, the parameters, and the rows that this rank was given."""
    step, state, loader, _ = fds.initialize(model(), loss_fn, config=config, training_data=DATA, **arguments)
    found, rows = list[float](), list[torch.Tensor]()
    for _, batch in zip(range(calls), loader, strict=False):
        state, metrics = step(state, batch)
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
        rows.append(batch[0])
    return found, step.params(state), torch.stack(rows), step.dimensions.share_of_batch


def assert_same(got, want) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layers_that_ranks_share_train_as_on_one_rank(stage):
    want = train(JSON)
    found = fds.simulate(lambda: train(JSON | TENSOR | {"zero_optimization": {"stage": stage}}), 4)
    for got in found:
        assert_same(got, want)


def test_ranks_that_share_layers_draw_what_one_rank_draws():
    dropping = lambda: encoder(0.2)
    want = train(JSON, dropping)
    for got in fds.simulate(lambda: train(JSON | TENSOR, dropping), 2):
        assert_same(got, want)
    assert want[0] != train(JSON)[0]


def test_ranks_that_share_layers_get_the_same_rows_and_their_number_follows_from_the_data_ranks():
    one = train({**JSON, "train_batch_size": 16})[2]
    found = fds.simulate(lambda: train({**JSON, "train_batch_size": 16} | TENSOR), 4)
    rows = [rows for _, _, rows, _ in found]
    assert [share for *_, share in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[2], rows[3])
    both = torch.cat([rows[0], rows[2]], 1)
    for every, here in zip(one, both, strict=True):  # 16 rows in another order: 2 microbatches of 2 ranks
        assert {str(row) for row in every} == {str(row) for row in here}


def test_a_mesh_of_ones_own_is_the_one_of_the_json():
    def run():
        own = train(JSON | TENSOR, mesh=fds.mesh(dp=2, tp=2))
        return own, train(JSON | TENSOR)

    for own, of_json in fds.simulate(run, 4):
        assert own[0] == of_json[0]


def test_a_plan_of_ones_own_takes_the_place_of_the_key():
    def run():
        mesh = fds.mesh(dp=1, tp=2)
        plan = {"self_attn": "heads", "linear1": "column", "linear2": "row"}
        return train(JSON, mesh=mesh, transforms=[fds.tensor_parallel(mesh["tp"], plan)])

    for got, want in zip(fds.simulate(run, 2), fds.simulate(lambda: train(JSON | TENSOR), 2), strict=True):
        assert got[0] == want[0]


def test_stages_whose_layers_ranks_share_keep_slices_of_what_they_recompute():
    spec = fds.LayerSpec(nn.TransformerEncoderLayer, 8, 2, 12, dropout=0.0, batch_first=True, dtype=torch.float64)
    again = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    make = lambda: fds.Layers([spec] * 4, F.mse_loss)
    want = train(JSON, make, None)
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    for got in fds.simulate(lambda: train(JSON | TENSOR | again, make, None, mesh=fds.mesh(**mesh)), 8):
        assert_same(got, want)


def test_messages_beside_products_change_no_bit():
    beside = {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}
    plain, other = (fds.simulate(lambda c=c: train(JSON | c), 2)[0] for c in (TENSOR, beside))
    assert plain[0] == other[0]


def test_sizes_that_are_auto_are_filled_in():
    said = JSON | {"tensor_parallel": {"autotp_size": "auto"}}
    values = {"tensor_parallel.autotp_size": 2}
    got = fds.simulate(lambda: train(said, auto=values), 4)[0]
    assert got[0] == fds.simulate(lambda: train(JSON | TENSOR), 4)[0][0]
    assert train(said)[0] == train(JSON)[0]  # without a value it is the default, none


def test_a_mesh_whose_tensor_axis_nothing_uses_is_refused():
    with pytest.raises(MeshError, match="nothing divides the model") as e:
        fds.simulate(lambda: train(JSON, mesh=fds.mesh(dp=1, tp=2)), 2)
    assert e.value.where == "mesh, tensor_parallel.autotp_size"


def test_ranks_that_share_layers_and_pass_other_rows_are_told_so():
    def run():
        step, state, _, _ = fds.initialize(encoder(), loss, config=JSON | TENSOR)
        return step(state, DATA[fds.mesh(r=-1)["r"].index : 8 + fds.mesh(r=-1)["r"].index])

    with pytest.raises(BatchError, match="different batches"):
        fds.simulate(run, 2)


def test_ranks_that_cannot_share_what_the_json_says_are_refused_on_all_of_them():
    for size, said in ((3, TENSOR), (2, TENSOR | ROWS), (1, ROWS)):
        with pytest.raises(ConfigError, match="cannot be divided"):
            fds.simulate(lambda said=said: train(JSON | said), size)


# ------------------------------------------------------------------------------------------------------------ rows


class Attending(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.axis, self.qkv, self.out = axis, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(fds.nn.attention(q, k, v, axis=self.axis, causal=True).transpose(1, 2).flatten(2))


def attend(config, sizes):
    mesh = fds.mesh(**sizes)
    axis = mesh["sp"]
    mine = lambda rows: [x.chunk(axis.size, 1)[axis.index] for x in default_collate(rows)]
    return train(config, lambda: made(lambda: Attending(axis)), mesh=mesh, collate_fn=mine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_that_ranks_share_train_as_on_one_rank(stage):
    want = attend(JSON, {"dp": 1, "sp": 1})
    found = fds.simulate(lambda: attend(JSON | ROWS | {"zero_optimization": {"stage": stage}}, {"dp": 2, "sp": 2}), 4)
    for got in found:
        assert_same(got, want)
    assert [share for *_, share in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(rows.shape[1:3] == (4, 3) for _, _, rows, _ in found)  # half of the rows, and of their tokens


def test_rows_are_shared_in_nodes_and_copies_too():
    want = attend(JSON, {"dp": 1, "sp": 1})
    nodes = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}}
    for got in fds.simulate(lambda: attend(JSON | ROWS | nodes, {"node": 2, "dp": 1, "sp": 2}), 4):
        assert_same(got, want)
    copies = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    for got in fds.simulate(lambda: attend(JSON | ROWS | copies, {"replicate": 2, "dp": 1, "sp": 2}), 4):
        assert_same(got, want)


def test_attention_that_does_not_know_of_other_ranks_is_refused():
    def run():
        mesh = fds.mesh(dp=1, sp=2)
        mine = lambda rows: [x.chunk(2, 1)[mesh["sp"].index] for x in default_collate(rows)]
        return train(JSON | ROWS, mesh=mesh, collate_fn=mine)

    with pytest.raises(LossError, match="this rank's tokens alone"):
        fds.simulate(run, 2)


def test_rows_and_layers_are_shared_at_once():
    class Both(nn.Module):
        def __init__(self, axis):
            super().__init__()
            self.first, self.mlp = Attending(axis), encoder_of_tokens()

        def forward(self, x):
            return self.mlp(self.first(x))

    def encoder_of_tokens():
        return nn.Sequential(fds.nn.ColumnLinear(8, 12), nn.GELU(), fds.nn.RowLinear(12, 8))

    def run(sizes, **said):
        mesh = fds.mesh(**sizes)
        axis = mesh["sp"]
        mine = lambda rows: [x.chunk(axis.size, 1)[axis.index] for x in default_collate(rows)]
        return train({**JSON, **said}, lambda: made(lambda: Both(axis)), mesh=mesh, collate_fn=mine)

    want = run({"dp": 1, "sp": 1})
    zero = {"zero_optimization": {"stage": 1}}
    for got in fds.simulate(lambda: run({"dp": 2, "sp": 2, "tp": 2}, **ROWS, **TENSOR, **zero), 8):
        assert_same(got, want)


# ----------------------------------------------------------------------------------------------------------- bytes


def test_pieces_are_counted_among_the_bytes_of_a_rank():
    config = TrainingConfig.of({**JSON, **TENSOR, "zero_optimization": {"stage": 1}})
    text = config.explain({"dp": 2, "tp": 2}, num_parameters=1000)
    assert "P parameters of its pieces" in text and "among 2 ranks: 6 P = 3,000\n" in text
    text = TrainingConfig.of({**JSON, **ROWS, "zero_optimization": {"stage": 1}}).explain({"dp": 2, "sp": 2})
    assert "a rank passes its tokens of 4 rows" in text and "among 4 ranks: 3 P\n" in text
