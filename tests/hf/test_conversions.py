"""Conversions of tensors in files to parameters, by converters that move rows and such that do more."""

import math

import pytest
import torch
from torch import nn

from fds.errors import StorageError
from fds.hf._names import Conversion
from fds.storage.foreign.foreign_leaf import ForeignLeaf, whole

EXPERTS, WIDTH, LENGTH = 3, 4, 6


class Converter:
    """A converter as transformers has them: it collects tensors by pattern, and converts what it has."""

    def __init__(self, convert):
        self.change, self.tensors = convert, {}

    def add_tensor(self, target, name, pattern, x):
        self.tensors.setdefault(pattern, []).append(x)

    def convert(self, target, model, config):
        return self.change(self.tensors)


def stacked(tensors):
    gate, up = (torch.stack(tensors[name]) for name in ("gate", "up"))
    return {"experts.gate_up": torch.cat([gate, up], 1)}


def in_three(tensors):
    return dict(zip(("q", "k", "v"), ([x.contiguous()] for x in tensors["qkv"][0].chunk(3)), strict=True))


def interleaved(tensors):
    x = tensors["qkv"][0]
    return {"q": x.view(2, len(x) // 2, -1).transpose(0, 1).reshape(x.shape)}


def transposed(tensors):
    return {"q": tensors["qkv"][0].t().contiguous()}


def shifted(tensors):
    return {"q": tensors["qkv"][0] + 1}


CASES = {
    "stacked": (stacked, [*(("gate", i) for i in range(EXPERTS)), *(("up", i) for i in range(EXPERTS))], True),
    "in_three": (in_three, [("qkv", 0)], True),
    "interleaved": (interleaved, [("qkv", 0)], True),
    "transposed": (transposed, [("qkv", 0)], False),
    "shifted": (shifted, [("qkv", 0)], False),
}


@pytest.mark.parametrize("case", CASES)
def test_every_range_of_a_converted_parameter_is_what_the_converter_makes(case):
    change, sources, moves_rows = CASES[case]
    torch.manual_seed(0)
    tensors = [torch.randn(3 * WIDTH, LENGTH) for _ in sources]
    counted = []

    def leaf(x):
        read = whole(x, "").read
        return ForeignLeaf(whole(x, "").leaf, lambda start, out: counted.append(out.numel()) or read(start, out))

    conversion = Conversion(Converter(change), "q", nn.Module(), "folder", [])
    conversion.sources += [(f"{p}.{i}", p, leaf(x)) for (p, i), x in zip(sources, tensors, strict=True)]
    by_pattern: dict = {}
    for (pattern, _), x in zip(sources, tensors, strict=True):
        by_pattern.setdefault(pattern, []).append(x)
    want = {name: x[0] if isinstance(x, list) else x for name, x in change(by_pattern).items()}
    leaves = conversion.leaves()
    assert leaves.keys() == want.keys() and not counted
    for name, (made, names) in leaves.items():
        x = want[name].reshape(-1)
        assert made.leaf.shape == tuple(want[name].shape) and len(names) == len(sources)
        for start in (0, 1, LENGTH, 3 * LENGTH + 2):
            for length in (1, LENGTH, 5 * LENGTH + 3, x.numel() - start):
                end = min(start + length, x.numel())
                counted.clear()
                out = torch.empty(end - start)
                made.read(start, out)
                assert torch.equal(out, x[start:end])
                if moves_rows:
                    assert sum(counted) == end - start
    assert math.prod(tensors[0].shape) == 3 * WIDTH * LENGTH


def test_tensors_that_cannot_be_converted_are_named():
    conversion = Conversion(Converter(lambda tensors: tensors["other"]), "q", nn.Module(), "folder", [])
    conversion.sources.append(("layer.qkv.weight", "qkv", whole(torch.zeros(3, 2), "")))
    with pytest.raises(StorageError, match=r"folder: layer\.qkv\.weight"):
        conversion.leaves()
