"""Elasticity, as a record, and in the batch of a step."""

import json
import warnings

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.config.keys.data import ElasticityConfig
from fds.errors import ConfigError, ElasticityError

ON = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
EXAMPLE = {
    **ON,
    "min_gpus": 1,
    "max_gpus": 10000,
    "min_time": 20,
    "prefer_larger_batch": True,
    "ignore_non_elastic_batch_info": False,
    "version": 0.2,
    "num_gpus_per_node": 8,
    "model_parallel_size": 2,
}


def test_the_documented_example_comes_back_as_it_went_in():
    assert ElasticityConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE


def test_the_documented_name_of_the_preference_is_an_old_spelling():
    with pytest.warns(FutureWarning, match="'prefer_larger_batch'"):
        config = ElasticityConfig.from_dict({**ON, "prefer_large_batch": False})
    assert config.to_dict() == {**ON, "prefer_larger_batch": False}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"enabled": 1}, "enabled"),
        ({"micro_batch_sizes": 4}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, "4"]}, "micro_batch_sizes"),
        ({"min_gpu": 1}, "min_gpu"),
        ({"min_gpus": 0}, "min_gpus"),
        ({"version": 0.3}, "version"),
        ({"min_time": -1}, "min_time"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"micro_batch_sizes": [2, 2001]}, "max_train_batch_size, micro_batch_sizes"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, 0]}, "micro_batch_sizes"),
        ({"min_gpus": 9, "max_gpus": 8}, "min_gpus, max_gpus"),
        ({"version": 0.15}, "version"),
        ({"version": 0.1, "num_gpus_per_node": 8, "model_parallel_size": 2}, "version, model_parallel_size"),
        ({"num_gpus_per_node": 8, "model_parallel_size": 3}, "num_gpus_per_node, model_parallel_size"),
    ],
)
def test_an_enabled_search_that_finds_nothing_is_refused_with_all_keys_of_it(changes, where):
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig.from_dict({**ON, **changes})
    assert refused.value.where == where
    assert ElasticityConfig.from_dict({**ON, **changes, "enabled": False}).to_dict()["enabled"] is False


def test_an_enabled_search_says_its_sizes_itself():
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig(enabled=True)
    assert refused.value.where == "enabled, max_train_batch_size, micro_batch_sizes"
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig(enabled=True, micro_batch_sizes=(2,))
    assert refused.value.where == "enabled, max_train_batch_size"


def test_what_is_not_known_yet_contradicts_nothing():
    unknown = {**ON, "micro_batch_sizes": "auto", "min_gpus": "auto", "model_parallel_size": "auto", "version": "auto"}
    assert ElasticityConfig.from_dict(unknown).to_dict() == unknown


SMALL = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 3]}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DATA = [(torch.arange(3.0) * (i % 5) / 5, torch.tensor([i % 7 / 7])) for i in range(72)]


def trained(ranks: int, **changes: object) -> list[float]:
    """Return the losses of three updates on a number of ranks."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "elasticity": {**SMALL, **changes}}

    def run() -> list[float]:
        torch.manual_seed(0)
        loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        step, state, loader, _ = fds.initialize(nn.Linear(3, 1), loss, config=config, training_data=DATA)
        assert loader is not None
        losses = []
        for batch, _ in zip(loader, range(3), strict=False):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses

    results = fds.simulate(run, ranks)
    assert results == [results[0]] * ranks and len(results[0]) == 3
    return results[0]


def test_numbers_of_ranks_that_share_the_batch_have_the_same_losses():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [torch.tensor(trained(ranks)) for ranks in (1, 2, 4, 6)]
    assert all(torch.allclose(losses[0], other, rtol=24 * torch.finfo(torch.float32).eps) for other in losses)


def test_ranks_that_do_not_share_the_batch_have_their_own_with_a_warning():
    with pytest.warns(UserWarning, match="batches of 20 rows, not the 24 that others share"):
        trained(5)
    with pytest.raises(ElasticityError, match="no batch for this number of ranks"):
        trained(5, version=0.1)


def test_the_sizes_follow_the_number_of_data_ranks_also_when_resolved_again():
    config = TrainingConfig.of({"elasticity": SMALL})
    sizes = lambda config: [config.batch[name] for name in SIZES]
    assert sizes(config.resolve(world_size=4)) == [24, 3, 2]
    assert sizes(config.resolve(world_size=4).resolve(world_size=3)) == [24, 2, 4]
    assert sizes(config.resolve(world_size=8)) == [24, 3, 1]
    read = TrainingConfig.of(json.loads(json.dumps(config.resolve(world_size=4).to_dict())))
    assert sizes(read.resolve(world_size=2)) == [24, 3, 4]
    for wrong in (0, True, 2.0, None):
        with pytest.raises(ElasticityError, match="not a number of data ranks"):
            config.resolve(world_size=wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.sweep
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [8, "auto", None])
def test_sizes_beside_it_are_refused_or_overruled(name, value):
    with pytest.raises(ElasticityError) as refused:
        TrainingConfig.of({"elasticity": SMALL, name: value})
    assert refused.value.where == f"elasticity.enabled, {name}"
    config = TrainingConfig.of({"elasticity": {**SMALL, "ignore_non_elastic_batch_info": True}, name: value})
    assert [config.resolve(world_size=4, auto={name: 8}).batch[size] for size in SIZES] == [24, 3, 2]
    lines = config.explain({"dp": 4}).splitlines()
    assert "#   train_batch_size 24 = 3 rows x 2 microbatches x 4 data ranks" in lines
    assert "#   elastic: 24 rows on 1, 2, 3, 4, 6, 8, 12 data ranks" in lines
    if value == 8:
        _, _, below = config.explain({"dp": 4}).partition("# given, without effect here")
        assert f"#   {name} = 8" in below.partition("\n\n")[0]


def test_auto_says_whether_there_is_elasticity():
    config = TrainingConfig.of({"train_micro_batch_size_per_gpu": 5, "elasticity": {**SMALL, "enabled": "auto"}})
    assert config.resolve(world_size=2)["train_batch_size"] == 10
    with pytest.raises(ElasticityError, match="some are given"):
        config.resolve(world_size=2, auto={"elasticity.enabled": True})


def test_a_mesh_has_as_many_ranks_for_a_copy_of_the_model_as_the_key_says():
    section = {**SMALL, "num_gpus_per_node": 2, "model_parallel_size": 2}
    config = TrainingConfig.of({"elasticity": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    assert "24 = 2 rows x 3 microbatches x 4 data ranks" not in config.explain({"dp": 4, "pp": 2})
    assert "24 = 3 rows x 2 microbatches x 4 data ranks" in config.explain({"dp": 4, "pp": 2})
    with pytest.raises(ConfigError) as refused:
        config.explain({"dp": 4})
    assert refused.value.where == "elasticity.model_parallel_size"


def test_initialize_compares_with_what_the_scheduler_was_told(monkeypatch):
    monkeypatch.setenv("FDS_ELASTICITY_CONFIG", json.dumps(SMALL))
    trained(2)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**SMALL, "min_gpus": 2}))
    with pytest.raises(ElasticityError, match="another one than the scheduler was told"):
        trained(2)
