"""Saves in the background and the loader, as records."""

import pytest

from fds.config.field import Elsewhere, keys
from fds.config.keys.data import LoadingConfig, NebulaConfig
from fds.errors import ConfigError

NEBULA = {
    "enabled": True,
    "persistent_storage_path": "/foo/bar",
    "persistent_time_interval": 100,
    "num_of_version_in_retention": 2,
    "enable_nebula_load": True,
}


@pytest.mark.parametrize(
    ("record", "example"),
    [
        (NebulaConfig, NEBULA),
        (LoadingConfig, {"datastates_ckpt": {"host_cache_size": 16}, "dataloader_drop_last": True}),
        (LoadingConfig, {"datastates_ckpt": True}),
    ],
)
def test_a_whole_section_comes_back_as_it_went_in(record, example):
    assert record.from_dict(example).to_dict() == example


def test_other_calls_take_what_these_ask_for():
    known = {**keys(NebulaConfig), **keys(LoadingConfig)}
    others = [name for name, (_, one) in known.items() if not isinstance(one.meaning, Elsewhere)]
    assert others == ["enable_nebula_load"]


@pytest.mark.parametrize(
    ("record", "wrong", "where"),
    [
        (NebulaConfig, {"num_of_version_in_retention": 0}, "num_of_version_in_retention"),
        (NebulaConfig, {"load_path": "/foo"}, "load_path"),
        (LoadingConfig, {"datastates_ckpt": 16}, "datastates_ckpt"),
        (LoadingConfig, {"dataloader_drop_last": 1}, "dataloader_drop_last"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(record, wrong, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(wrong)
    assert refused.value.where == where
