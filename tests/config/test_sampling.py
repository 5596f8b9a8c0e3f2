"""`data_efficiency.data_sampling`: the loader of `initialize` draws easy samples first, or batches of tokens."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fds
from fds.data import CurriculumSampler, batches_by_tokens, write_tokens
from fds.errors import ConfigError, DataError

LENGTHS = np.random.default_rng(0).integers(1, 11, 100)
SAMPLES = [torch.full((n,), n) for n in LENGTHS.tolist()]
JSON = {"train_batch_size": 8, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.125}}}
DISCRETE = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [3, 6, 10], "max_step": [2, 5]}}
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1}}
STRETCHES = fds.schedules.fixed_discrete([3, 6, 10], [2, 5])
padded = lambda rows: pad_sequence(rows, batch_first=True, padding_value=-1)


def metric(kind="value", clustering="schedule_based", least=3, greatest=10, schedule=DISCRETE, **more):
    sizes = {"min_difficulty": least, "max_difficulty": greatest}
    return {"difficulty_type": kind, "clustering_type": clustering, **sizes, **schedule, **more}


def indexed(folder, name, values):
    """Write the files of DeepSpeed's analyser."""
    distinct = np.unique(values)
    write_tokens(folder / f"{name}_samples", [np.flatnonzero(values == x) for x in distinct], dtype="int64")
    write_tokens(folder / f"{name}_values", [[x] for x in distinct], dtype="int64")
    paths = ("index_to_sample_path", f"{name}_samples"), ("index_to_metric_path", f"{name}_values")
    return {key: str(folder / file) for key, file in paths}


def sampling(**sections):
    return {**JSON, "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": {"enabled": True, **sections}}}


def curriculum(**metrics):
    return sampling(curriculum_learning={"enabled": True, "curriculum_metrics": metrics})


class Model(nn.Module):
    """A mean over tokens, without padding."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        seen = batch >= 0
        return (self.w * batch * seen).sum(), seen.sum()


def initialized(json, data=SAMPLES, **more):
    loss = lambda model, batch: fds.Mean(*model(batch))
    return fds.initialize(Model(), loss, config=json, training_data=data, collate_fn=padded, **more)


def test_the_loader_draws_by_the_metrics_of_deepspeeds_analyser(tmp_path):
    rarities = 100 - np.arange(100)
    files = {name: indexed(tmp_path, name, x) for name, x in (("length", LENGTHS), ("rarity", rarities))}
    json = curriculum(
        length=metric(**files["length"]),
        rarity=metric("percentile", least=10, greatest=50, schedule=LINEAR, **files["rarity"]),
    )
    step, state, loader, _ = initialized(json)
    rising = fds.schedules.fixed_linear(10, 50, 10)
    schedules = {"length": STRETCHES, "rarity": lambda step: 2 * rising(step)}  # the greatest stands for all samples
    kinds = {"length": "value", "rarity": "percentile"}
    sampler = CurriculumSampler({"length": LENGTHS, "rarity": rarities}, schedules, key=7, difficulty=kinds)
    for batch in range(12):
        assert (loader.sampler.rows(batch, 8) == sampler.rows(batch, 8)).all()
    first = next(iter(loader))
    assert first.shape[0] == 8 and first.max() <= 3
    state, metrics = step(state, first)
    assert metrics["loss"] == first[first >= 0].float().mean()


def test_what_fds_analysed_can_stand_for_it_and_single_clusters_need_no_files(tmp_path):
    fds.data.analyse(SAMPLES, {"length": fds.data.SequenceLength()}, tmp_path, show=False)
    paths = {
        "index_to_sample_path": str(tmp_path / "length.order.npy"),
        "index_to_metric_path": str(tmp_path / "length.values.npy"),
    }
    json = curriculum(length=metric(**paths), other=metric(clustering="single_cluster"))
    sampler = initialized(json)[2].sampler
    expected = CurriculumSampler({"length": LENGTHS}, {"length": STRETCHES}, key=7)
    assert all((sampler.rows(batch, 8) == expected.rows(batch, 8)).all() for batch in range(8))
    assert sampler.difficulties(3) == {"length": 6, "other": 6}
    whole = initialized(curriculum(other=metric(clustering="single_cluster")))[2].sampler
    assert len(set(whole.rows(0, 100))) == 100


@pytest.mark.parametrize(("method", "measured"), [("linear", True), ("sqrt", False), ("none", False)])
def test_batches_of_tokens_have_a_rate_that_follows_their_rows_on_any_number_of_ranks(method, measured, tmp_path):
    batching = {"enabled": True, "max_tokens": 40, "sequence_picking_order": "random", "lr_scaling_method": method}
    json = sampling(dynamic_batching=batching | ({"metrics_path": str(tmp_path)} if measured else {}))
    batches = batches_by_tokens(LENGTHS, 40, order="random", key=7)
    factor = {"linear": lambda x: x, "sqrt": np.sqrt, "none": lambda x: np.ones(len(x))}[method]
    rates = 0.125 * factor(batches.num_rows(0, 4) / 8)

    def run(microbatches):
        step, state, loader, _ = initialized({**json, "gradient_accumulation_steps": microbatches})
        losses, lrs = [], []
        for batch in loader:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            lrs.append(float(metrics["lr"]))
        return losses, lrs

    ranks = fds.simulate(lambda: run(2), 2)
    assert ranks[0] == ranks[1] and ranks[0][1] == pytest.approx(rates)
    w = 1.0
    for batch, (loss, rate) in enumerate(zip(*run(4), strict=True)):
        tokens = np.concatenate([np.repeat(LENGTHS[part], LENGTHS[part]) for part in batches.rows(batch, 4)])
        assert loss == pytest.approx(w * tokens.mean(), rel=1e-5) and ranks[0][0][batch] == pytest.approx(
            loss, rel=1e-5
        )
        w -= rate * tokens.mean()


def test_workers_are_those_of_data_sampling():
    batching = {"enabled": True, "max_tokens": 40}
    loader = initialized(sampling(dynamic_batching=batching, num_workers=1))[2]
    assert loader.num_workers == 1 and initialized({**sampling(num_workers=1)})[2].num_workers == 0


LENGTH = {"index_to_sample_path": "/nowhere/a", "index_to_metric_path": "/nowhere/b"}
BY_TOKENS = {"enabled": True, "max_tokens": 40}
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
NUMBERS = ("total_curriculum_step", "difficulty_step", "root_degree")
BATCHING = "data_efficiency.data_sampling.dynamic_batching"


@pytest.mark.parametrize(
    ("json", "where"),
    [
        (curriculum(a=metric()), f"{METRICS}.a.index_to_sample_path, {METRICS}.a.index_to_metric_path"),
        (curriculum(a=metric(kind=None, **LENGTH)), f"{METRICS}.a.difficulty_type"),
        (curriculum(a=metric(schedule={"schedule_type": "custom"}, **LENGTH)), f"{METRICS}.a.schedule_type"),
        (
            curriculum(a=metric(schedule={"schedule_type": "fixed_root"}, **LENGTH)),
            ", ".join(f"{METRICS}.a.schedule_config.{x}" for x in NUMBERS),
        ),
        (curriculum(a=metric("percentile", least=0, greatest=0, **LENGTH)), f"{METRICS}.a.max_difficulty"),
        (
            sampling(
                dynamic_batching=BY_TOKENS,
                curriculum_learning={"enabled": True, "curriculum_metrics": {"a": metric(**LENGTH)}},
            ),
            f"data_efficiency.data_sampling.curriculum_learning.enabled, {BATCHING}.enabled",
        ),
        ({**sampling(dynamic_batching=BY_TOKENS), "optimizer": {}}, f"{BATCHING}.lr_scaling_method"),
    ],
)
def test_what_draws_no_batches_is_refused_with_its_keys(json, where):
    with pytest.raises(ConfigError) as refused:
        initialized(json, **({} if json["optimizer"] else {"optimizer": fds.sgd}))
    assert refused.value.where == where


def test_metrics_of_other_data_are_refused(tmp_path):
    with pytest.raises(DataError, match="of another data set"):
        initialized(curriculum(length=metric(**indexed(tmp_path, "length", LENGTHS[:60]))))
    with pytest.raises(DataError):  # which have no lengths
        initialized(sampling(dynamic_batching=BY_TOKENS), [(torch.ones(2), 1)] * 9)
