"""Boxes of a leaf: what flat ranges of them hold, against NumPy-like indexing of all of it."""

import itertools
import math

import torch
from hypothesis import given, strategies as st

from fds.storage.format import boxes
from fds.storage.format.boxes import apart, copy_common, extent, rectangles, runs
from fds.storage.format.manifest import Chunk, SavedLeaf
from fds.storage.source import placed_chunks


@st.composite
def ranges(draw, shape):
    """Draw a flat range of a box of a leaf: the box, and its first element and the one after its last."""
    box = []
    for n in shape:
        first = draw(st.integers(0, n - 1))
        box.append((first, draw(st.integers(1, n - first))))
    start = draw(st.integers(0, boxes.numel(tuple(box))))
    return tuple(box), start, draw(st.integers(start, boxes.numel(tuple(box))))


shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
one_range = shapes.flatmap(lambda shape: st.tuples(st.just(shape), ranges(shape)))
two_ranges = shapes.flatmap(lambda shape: st.tuples(st.just(shape), ranges(shape), ranges(shape)))


def elements(shape, box, start, end):
    """Return the indices in the flattened leaf of the elements of a range."""
    leaf = torch.arange(math.prod(shape)).view(shape)
    return leaf[tuple(slice(i, i + n) for i, n in box)].reshape(-1)[start:end]


@given(one_range)
def test_rectangles_and_runs_are_the_elements_of_a_range_in_order(drawn):
    shape, (box, start, end) = drawn
    want, found = elements(shape, box, start, end), rectangles(box, start, end)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert [at for at, _ in found] == [sum(boxes.numel(one) for _, one in found[:i]) for i in range(len(found))]
    assert torch.equal(torch.cat([want[:0], *(elements(shape, one, 0, None) for _, one in found)]), want)
    pieces = list(runs(shape, found))
    assert [at for _, at, _ in pieces] == [sum(n for *_, n in pieces[:i]) for i in range(len(pieces))]
    assert torch.equal(torch.cat([want[:0], *(torch.arange(i, i + n) for i, _, n in pieces)]), want)
    for _, one in found:
        inside = elements(shape, one, 0, None)
        assert extent(shape, one) == (int(inside[0]), int(inside[-1]) + 1)


@given(two_ranges)
def test_ranges_of_two_boxes_copy_what_they_have_in_common(drawn):
    shape, one, other = drawn
    wanted, held = elements(shape, *one), elements(shape, *other)
    out = torch.full((len(wanted),), -1)
    a, b = rectangles(*one), rectangles(*other)
    both = torch.isin(wanted, held)
    assert copy_common(out, a, held, b) == int(both.sum())
    assert torch.equal(out, torch.where(both, wanted, -1))
    assert boxes.shares(a, b) == bool(both.any())


def test_a_chunk_that_others_cover_is_not_read_again():
    chunks = [Chunk("a", 0, 0, 10, ""), Chunk("b", 0, 0, 10, "", ((0, 10),)), Chunk("b", 0, 5, 5, "", ((0, 10),))]
    (placed,) = placed_chunks(SavedLeaf("float32", (10,), tuple(chunks)))
    assert placed.chunk is chunks[0]


def test_cells_of_a_grid_are_apart_and_others_are_not():
    assert apart([]) and apart([()]) and apart([((0, 2), (0, 3)), ((0, 2), (3, 1)), ((2, 2), (0, 3))])
    assert not apart([((0, 2), (0, 3)), ((1, 2), (0, 3))])
    assert not apart([((0, 4),), ((0, 2),)])


@st.composite
def split(draw):
    """Draw ranges of every dim, and a flat range of what lies there: shape of the leaf, ranges, start, end."""
    shape = draw(shapes)
    ranges = []
    for n in shape:
        edges = sorted(draw(st.sets(st.integers(0, n), max_size=n + 1)))
        ranges.append(tuple((i, j - i) for i, j in itertools.pairwise(edges) if draw(st.booleans())))
    numel = math.prod(boxes.shape_at(tuple(ranges)))
    start = draw(st.integers(0, numel))
    return shape, tuple(ranges), start, draw(st.integers(start, numel))


@given(split())
def test_a_flat_range_of_what_lies_at_several_ranges_is_a_range_of_each_box(drawn):
    shape, ranges, start, end = drawn
    held = torch.arange(math.prod(shape)).view(shape)
    for dim, along in enumerate(ranges):
        held = held.index_select(dim, torch.tensor([i for first, n in along for i in range(first, first + n)]).long())
    flat = held.reshape(-1)[start:end].clone()
    for i in range(len(flat)):
        index = boxes.index_of(ranges, torch.unravel_index(torch.tensor(start + i), held.shape))
        assert int(torch.arange(math.prod(shape)).view(shape)[tuple(index)]) == flat[i]
    seen: dict[tuple, int] = {}
    for box, first, x in boxes.by_box(flat, ranges, start):
        assert first == seen.get(box, first)
        seen[box] = first + x.numel()
        assert torch.equal(x.reshape(-1), elements(shape, box, first, first + x.numel()))
        x.fill_(-1)
    assert (flat == -1).all()
