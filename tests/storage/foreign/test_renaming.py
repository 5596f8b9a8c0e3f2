"""Other names for the leaves of a source."""

import pytest
import torch

from fds.errors import StorageError
from fds.storage.foreign import deepspeed, renamed, weights
from tests.storage.foreign.reading import read


def test_a_function_renames_parameters_buffers_and_slots(golden):
    source = deepspeed(golden / "zero2_ranks2")
    other = renamed(source, lambda name: f"net.{name}")
    assert other.leaves.keys() == {
        name
        if name in ("step", "calls")
        else name.replace(".exp_avg.", ".exp_avg.net.").replace(".exp_avg_sq.", ".exp_avg_sq.net.")
        if name.startswith("opt.")
        else name.replace(".", ".net.", 1)
        for name in source.leaves
    }
    for new, old in (
        ("params.net.first.weight", "params.first.weight"),
        ("buffers.net.scale", "buffers.scale"),
        ("opt.exp_avg_sq.net.head.bias", "opt.exp_avg_sq.head.bias"),
        ("step", "step"),
    ):
        assert torch.equal(read(other, new), read(source, old)) and other.leaves[new] == source.leaves[old]
    assert (other.extra, other.composition) == (source.extra, source.composition)


def test_a_mapping_renames_what_it_names(golden):
    source = deepspeed(golden / "zero2_ranks2")
    other = renamed(source, {"first.weight": "w", "scale": "s"})
    assert torch.equal(read(other, "opt.exp_avg.w"), read(source, "opt.exp_avg.first.weight"))
    assert "params.w" in other.leaves and "params.first.weight" not in other.leaves
    assert "buffers.s" in other.leaves and "params.head.bias" in other.leaves


def test_names_can_be_exchanged(tmp_path):
    torch.save({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "x.pt")
    other = renamed(weights(tmp_path / "x.pt"), {"a": "b", "b": "a"})
    assert read(other, "params.b") == 0 and read(other, "params.a") == 1


@pytest.mark.parametrize(
    ("rename", "what"),
    [
        ({"none": "x"}, "nothing of this name"),
        ({1: "x"}, "nothing of this name"),
        ({"a": "b"}, "two leaves would have one name"),
        (lambda name: "x", "two leaves would have one name"),
        (lambda name: None, "not a string"),
        ({"a": ""}, "not a string"),
    ],
)
def test_names_that_are_not_there_or_collide_are_refused(tmp_path, rename, what):
    torch.save({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(StorageError, match=what):
        renamed(weights(tmp_path / "x.pt"), rename)
