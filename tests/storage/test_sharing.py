"""Who writes what: every element once, by ranks that share the load."""

import attrs
import torch
from hypothesis import given, strategies as st

from fds.storage.format.manifest import SavedLeaf
from fds.storage.format.tensors import dtype_name
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart
from fds.storage.ranks.sharing import CUT, AllLeaves, all_pieces, pieces_of_rank

sizes = st.lists(st.tuples(st.sampled_from([0, 1, 7, 1000, 5000, 40_000]), st.sampled_from([1, 2, 4, 8])), max_size=8)
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


@attrs.frozen
class Lying:
    """What a rank writes by, in the place of the dimensions of a step."""

    alike: tuple[int, int] = (0, 1)  # of the ranks that hold a whole leaf, which one this is, and how many
    sliced: tuple[int, int] = (0, 1)  # the same of a slice
    slice: int = 0
    place: int = 0

    def copies(self, name, *, sliced):
        return [self.sliced if sliced else self.alike]


def on(*args, **more):
    return Ranks(dimensions=Lying(*args, **more))


def leaves(spec, prefix):
    return {f"{prefix}{i}": torch.empty(n, dtype=DTYPES[itemsize]) for i, (n, itemsize) in enumerate(spec)}


def union(parts):
    shapes = {name: SavedLeaf(dtype_name(part.tensor.dtype), part.shape, ()) for name, part in parts.items()}
    return AllLeaves(shapes, dict.fromkeys(shapes, 0))


def written(all_pieces, tensors):
    """Return how many bytes each rank writes; fail unless every element is written exactly once."""
    times = {name: torch.zeros(x.numel(), dtype=torch.int64) for name, x in tensors.items()}
    for pieces in all_pieces:
        for piece in pieces:
            times[piece.name][piece.start : piece.start + piece.tensor.numel()] += 1
    assert all((x == 1).all() for x in times.values())
    return [sum(p.tensor.numel() * p.tensor.element_size() for p in pieces) for pieces in all_pieces]


@given(sizes, st.integers(1, 5))
def test_what_all_ranks_have_they_write_in_equal_shares(spec, num_ranks):
    tensors = leaves(spec, "x")
    parts = {name: LeafPart(x, tuple(x.shape)) for name, x in tensors.items()}
    ranks = [on((i, num_ranks)) for i in range(num_ranks)]
    shares = written([pieces_of_rank(parts, union(parts), r) for r in ranks], tensors)
    assert all(abs(share - sum(shares) / num_ranks) < CUT for share in shares)


@given(sizes, sizes, st.integers(1, 3), st.integers(1, 3))
def test_slices_are_written_in_equal_shares_by_those_that_have_copies(split, alike, num_slices, num_replicas):
    tensors = leaves(split, "split") | leaves(alike, "alike")

    def parts(index):
        found = {}
        for name, x in tensors.items():
            low, high = (x.numel() * i // num_slices for i in (index, index + 1))
            cut = name.startswith("split")
            found[name] = LeafPart(x[low:high], tuple(x.shape), low, split=True) if cut else LeafPart(x, tuple(x.shape))
        return found

    ranks = [
        on((r * num_slices + s, num_slices * num_replicas), (r, num_replicas), slice=s)
        for r in range(num_replicas)
        for s in range(num_slices)
    ]
    mine = [pieces_of_rank(parts(r.dimensions.slice), union(parts(r.dimensions.slice)), r) for r in ranks]
    shares = written(mine, tensors)
    bytes_of = lambda xs: sum(x.numel() * x.element_size() for x in xs)
    for r, share in zip(ranks, shares, strict=True):
        slices = bytes_of(p.tensor for p in parts(r.dimensions.slice).values() if p.split) / num_replicas
        rest = bytes_of(p.tensor for p in parts(0).values() if not p.split) / len(ranks)
        assert abs(share - slices - rest) < 2 * CUT


@given(sizes)
def test_pieces_lie_at_multiples_of_their_element_size(spec):
    parts = {name: LeafPart(x, tuple(x.shape)) for name, x in leaves(spec, "x").items()}
    for pieces in (all_pieces(parts), pieces_of_rank(parts, union(parts), Ranks())):
        at = 0
        for piece in pieces:
            assert at % piece.tensor.element_size() == 0
            at += piece.tensor.numel() * piece.tensor.element_size()


def test_large_leaves_are_cut_at_pages_and_small_ones_are_not():
    parts = {name: LeafPart(x, tuple(x.shape)) for name, x in leaves([(10, 4), (100_000, 4), (10, 4)], "x").items()}
    pieces = [pieces_of_rank(parts, union(parts), on((i, 3))) for i in range(3)]
    assert [[(p.name, p.start * 4 % CUT) for p in mine] for mine in pieces] == [
        [("x0", 0), ("x1", 0)],
        [("x1", 0)],
        [("x1", 0), ("x2", 0)],
    ]


def test_leaves_of_other_places_are_theirs():
    parts = {name: LeafPart(x, (1000,)) for name, x in leaves([(1000, 4), (1000, 4)], "x").items()}
    both = AllLeaves(union(parts).leaves, {"x0": 0, "x1": 1})
    assert [p.name for p in pieces_of_rank(parts, both, on(place=1))] == ["x1"]
    assert [p.name for p in pieces_of_rank(parts, both, on(place=0))] == ["x0"]
