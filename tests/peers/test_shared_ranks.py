"""A Llama of transformers whose layers ranks share as a JSON says; DeepSpeed's own batch sizes and orders of ranks."""

import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, default_collate

import fds
from fds.config import TrainingConfig
from fds.errors import ConfigError, LossError
from tests import ranks

pytestmark = pytest.mark.peers

CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
}
SHARED = CONFIG | {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}, "zero_optimization": {"stage": 1}}


class Tokens(Dataset):
    """Rows as a language model's collator gives them: half of a row is a prompt, which is not learned."""

    def __init__(self):
        self.ids = torch.randint(3, 37, (24, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[:4] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 30}
    config = LlamaConfig(vocab_size=37, num_hidden_layers=2, max_position_embeddings=32, **sizes, **changes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().train()


def train(path, **changes):
    """Train by a file, as the guide does it, and return losses, norms, an evaluation, parameters and shapes held."""
    step, state, loader, _ = fds.initialize(llama(**changes), config=path, training_data=Tokens())
    found = []
    for _, batch in zip(range(5), loader, strict=False):
        state, metrics = step(state, batch)
        found += [metrics["loss"], metrics["grad_norm"]]
    rows = default_collate([Tokens()[i] for i in range(8)])
    found.append(step.evaluate(state, rows)["loss"])
    held = sum(x.numel() for x in fds.tree.leaves(state.params))
    return torch.stack(found), step.params(state), held, repr(step.composition)


def file(tmp_path, config):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    path.write_text(json.dumps(config))
    return str(path)


def assert_same(found, want, num_slices):
    for losses, params, held, composition in found:
        torch.testing.assert_close(losses, want[0], rtol=1e-6, atol=0)  # its norms round to float32
        torch.testing.assert_close(params, want[1], rtol=1e-5, atol=1e-7)
        assert "tensor_parallel(mesh['tp'], overlap=1)" in composition
        assert held < want[2] / num_slices * 1.3  # norms are on all ranks


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_llama_whose_layers_ranks_share_trains_as_on_one_rank(tmp_path, stage, changes):
    want = train(file(tmp_path, CONFIG), **changes)
    path = file(tmp_path, SHARED | {"zero_optimization": {"stage": stage}})
    assert_same(fds.simulate(lambda: train(path, **changes), 4), want, 4 if stage else 2)


def test_it_does_so_on_four_real_ranks(tmp_path):
    want = train(file(tmp_path, CONFIG))
    assert_same(ranks.run(train, file(tmp_path, SHARED), world_size=4), want, 4)


def by_tokens(model, batch):
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    targets = batch["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return fds.Mean(total, (targets != -100).sum())


def train_on_parts(path, sequence, attention="over_ranks"):
    from transformers import AttentionInterface

    mesh = fds.mesh(dp=-1, sp=sequence)
    axis = mesh["sp"]

    def over_ranks(module, q, k, v, mask, scaling, dropout=0.0, **options):
        mine = fds.mesh(dp=-1, sp=sequence)["sp"]  # of the thread that runs this: the registry is one for all
        return fds.nn.attention(q, k, v, axis=mine, causal=True, scale=scaling, p=dropout).transpose(1, 2), None

    def cut(rows):
        batch = default_collate(rows)
        ids, labels = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
        whole = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(8).expand(len(ids), 8)}
        return {name: x.chunk(axis.size, 1)[axis.index] for name, x in whole.items()}

    AttentionInterface.register("over_ranks", over_ranks)
    model = llama()
    model.set_attn_implementation(attention)
    step, state, loader, _ = fds.initialize(
        model, by_tokens, config=path, mesh=mesh, training_data=Tokens(), collate_fn=cut
    )
    found = []
    for _, batch in zip(range(4), loader, strict=False):
        state, metrics = step(state, batch)
        found += [metrics["loss"], metrics["grad_norm"]]
    return torch.stack(found), step.params(state)


def test_a_llama_whose_rows_ranks_share_trains_as_on_one_rank(tmp_path):
    want = train_on_parts(file(tmp_path, CONFIG), 1, "sdpa")
    path = file(tmp_path, CONFIG | {"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}})
    for losses, params in fds.simulate(lambda: train_on_parts(path, 2), 4):
        torch.testing.assert_close(losses, want[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(params, want[1], rtol=1e-5, atol=1e-7)
    with pytest.raises(LossError, match="this rank's tokens alone"):
        fds.simulate(lambda: train_on_parts(path, 2, "sdpa"), 4)


# ------------------------------------------------------------------------------------------- DeepSpeed's own sizes


class Mpu:
    """What DeepSpeed asks a program's object for."""

    def __init__(self, data, tensor):
        self.data, self.tensor = data, tensor

    def get_data_parallel_world_size(self):
        return self.data

    def get_model_parallel_world_size(self):
        return self.tensor


def of_deepspeed(said, world, mpu=None):
    from deepspeed.runtime.config import DeepSpeedConfig

    with mock.patch("deepspeed.comm.get_world_size", return_value=world), mock.patch("deepspeed.comm.get_rank"):
        try:
            config = DeepSpeedConfig(dict(said), mpu)
        except AssertionError:
            return None
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


def of_fds(said, axes):
    from fds.config.composition import data_ranks

    try:
        batch = TrainingConfig.of(said).resolve(world_size=data_ranks(axes)).batch
    except ConfigError:
        return None
    return batch.train_batch_size, batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps


SIZES = [
    {"train_batch_size": 16},
    {"train_batch_size": 6},
    {"train_micro_batch_size_per_gpu": 3},
    {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2},
    {"train_batch_size": 16, "gradient_accumulation_steps": 4},
    {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
    {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("said", SIZES, ids=str)
def test_batch_sizes_are_those_of_deepspeed_where_ranks_share_layers_or_rows(said):
    assert of_fds(said, {"dp": 2, "tp": 4}) == of_deepspeed(said, 8, Mpu(2, 4))
    rows = said | {"sequence_parallel_size": 4}
    assert of_fds(rows, {"dp": 2, "sp": 4}) == of_deepspeed(rows, 8)


def test_deepspeed_counts_ranks_that_share_layers_as_data_ranks_where_it_made_them_itself():
    said = {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 4}}
    assert of_deepspeed(said, 8) == (32, 4, 1)
    assert of_fds(said, {"dp": 2, "tp": 4}) == (8, 4, 1)
    assert of_fds(said | {"train_batch_size": 32}, {"dp": 2, "tp": 4}) == (32, 4, 4)


def test_the_axes_of_a_mesh_number_ranks_as_deepspeeds_topologies_do():
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    theirs = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    names = {"pp": "pipe", "dp": "data", "tp": "model"}
    found = fds.simulate(lambda: (fds.mesh(pp=2, dp=3, tp=2).rank, fds.mesh(pp=2, dp=3, tp=2).coordinate()), 12)
    for rank, coordinate in found:
        assert theirs.get_rank(**{names[name]: i for name, i in coordinate.items()}) == rank
