"""What is written to a medium is what is read from it."""

import pytest
import torch

import fds
from fds import media

CPU = torch.device("cpu")


@pytest.fixture
def kinds(tmp_path):
    return {"disk": fds.disk(tmp_path), "host": media.Host(), "device": media.Device()}


@pytest.mark.parametrize("name", ["disk", "host", "device"])
def test_a_leaf_reads_as_it_was_written(kinds, name):
    values = [torch.randn(1000, 1001), torch.arange(3, dtype=torch.bfloat16), torch.tensor(2.0), torch.empty(0, 2)]
    made = [kinds[name].make(x) for x in values]
    kinds[name].write(values, made)()
    read = kinds[name].read(made, CPU)()
    for x, leaf, copy in zip(values, made, read, strict=True):
        assert torch.equal(x, leaf) and torch.equal(x, copy) and x.dtype == leaf.dtype == copy.dtype
        copy.zero_()
        assert torch.equal(x, leaf)


def test_leaves_of_several_media_are_read_and_written_together(kinds):
    values = [torch.randn(7) for _ in range(9)]
    new = [kinds[name].make(x) for name, x in zip([*kinds] * 3, values, strict=True)]
    media.write(values, new)()
    read = media.read(new, CPU)()
    assert all(map(torch.equal, values, read)) and all(map(torch.equal, values, new))
    found = [media.medium_of(x) for x in new]
    assert found[:3] == found[3:6] == [kinds["disk"], kinds["host"], None]


def test_every_leaf_has_a_storage_of_its_own(kinds):
    for medium in kinds.values():
        a, b = medium.make(torch.empty(4)), medium.make(torch.empty(4))
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
        assert a.untyped_storage().nbytes() == 16


def test_an_extent_has_the_values_of_a_leaf(kinds):
    import os

    leaf = kinds["disk"].make(torch.empty(5000))
    kinds["disk"].write([values := torch.randn(5000)], [leaf])()
    extent = media.extent_of(leaf)
    with open(f"/proc/self/fd/{extent.fd}", "rb") as file:
        assert os.pread(file.fileno(), extent.nbytes, extent.offset) == values.numpy().tobytes()
    assert media.extent_of(values) is None and media.extent_of(leaf[1:]).offset == extent.offset + 4
