"""Progressive layer dropping, as a record."""

import pytest

from fds.config.keys.model import ProgressiveLayerDropConfig
from fds.errors import ConfigError


def test_a_whole_section_comes_back_as_it_went_in():
    example = {"enabled": True, "theta": 0.5, "gamma": 0.001}
    assert ProgressiveLayerDropConfig.from_dict(example).to_dict() == example


@pytest.mark.parametrize(
    ("wrong", "where"),
    [({"enabled": 1}, "enabled"), ({"theta": 1.5}, "theta"), ({"gamma": "small"}, "gamma"), ({"beta": 1}, "beta")],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        ProgressiveLayerDropConfig.from_dict(wrong)
    assert refused.value.where == where
