"""Meshes and topologies: names, sizes, coordinates, and what is refused."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fds import collectives as c
from fds.errors import MeshError

SHAPES = st.dictionaries(st.sampled_from(["pp", "dp", "tp", "ep"]), st.integers(1, 4), min_size=1)


@given(SHAPES)
def test_the_last_axis_varies_fastest(shape):
    grid, names = c.Topology.of(**shape), list(shape)
    for rank, at in enumerate(itertools.product(*(range(size) for size in shape.values()))):
        coord = dict(zip(names, at, strict=True))
        assert grid.get_coord(rank) == coord
        assert grid.get_rank(**coord) == rank
        assert rank in grid.filter_match(**{names[0]: at[0]})
    assert grid.filter_match() == list(range(math.prod(shape.values())))


@given(SHAPES, st.data())
def test_comm_lists_are_the_ranks_that_differ_along_the_named_axes(shape, data):
    grid = c.Topology.of(**shape)
    axes = data.draw(st.permutations(list(shape)).map(lambda names: names[: 1 + len(names) // 2]))
    lists = grid.get_axis_comm_lists(*axes)
    assert sorted(itertools.chain(*lists)) == list(grid.ranks)
    for ranks in lists:
        coords = [grid.get_coord(rank) for rank in ranks]
        assert [tuple(coord[n] for n in axes) for coord in coords] == list(
            itertools.product(*(range(shape[n]) for n in axes))
        )
        assert len({tuple(coord[n] for n in shape if n not in axes) for coord in coords}) == 1


def test_as_deepspeed_lays_ranks_out():
    """From the docstring of ProcessTopology.get_axis_comm_lists: pipe=2, data=2."""
    grid = c.Topology.of(pipe=2, data=2)
    assert grid.get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]
    assert grid.get_axis_comm_lists("data") == [[0, 1], [2, 3]]
    assert grid.filter_match(pipe=0) == [0, 1]


def test_an_axis_knows_its_ranks_and_its_place():
    def run():
        mesh = c.mesh(pp=2, dp=-1, tp=1)
        seen = [(a.name, a.size, a.index, a.ranks, a.device) for a in (mesh["pp"], mesh["dp"], mesh["tp"])]
        return mesh.rank, mesh.size, mesh.shape, mesh.coordinate(), mesh.coordinate(1), seen

    cpu = torch.device("cpu")
    rank, size, shape, own, other, seen = c.simulate(run, 6)[4]
    assert (rank, size, shape) == (4, 6, {"pp": 2, "dp": 3, "tp": 1})
    assert own == {"pp": 1, "dp": 1, "tp": 0} and other == {"pp": 0, "dp": 1, "tp": 0}
    assert seen == [("pp", 2, 1, (1, 4), cpu), ("dp", 3, 1, (3, 4, 5), cpu), ("tp", 1, 0, (4,), cpu)]


def test_flattened_axes_follow_the_order_that_is_named():
    def run():
        mesh = c.mesh(a=2, b=2)
        return [(x.name, x.ranks, x.index, x.exchange(mesh.rank)) for x in (mesh["a", "b"], mesh["b", "a"], mesh["a",])]

    assert c.simulate(run, 4)[1] == [
        ("a,b", (0, 1, 2, 3), 1, [0, 1, 2, 3]),
        ("b,a", (0, 2, 1, 3), 2, [0, 2, 1, 3]),
        ("a", (1, 3), 0, [1, 3]),
    ]


def test_equal_axes_are_the_same_ranks_under_the_same_name_in_the_same_world():
    def run():
        one, two = c.mesh(a=2, b=2), c.mesh(a=2, b=2)
        other = c.mesh(b=2, a=2)
        assert one == two and one["a"] == two["a"] and hash(one["a"]) == hash(two["a"])
        assert one != other and one["a"] != other["a"] and one["a"] != one["b"]
        assert one["a"].mesh is one
        return one["a", "b"]

    axes = c.simulate(run, 4)
    assert len(set(axes)) == 4, "the ranks of one process must not share what is cached by axis"


def test_one_rank_is_a_mesh():
    mesh = c.mesh(pp=1, dp=-1)
    assert mesh.shape == {"pp": 1, "dp": 1} and mesh.coordinate() == {"pp": 0, "dp": 0}
    assert mesh["pp", "dp"].ranks == (0,)
    assert mesh.get_rank(pp=0, dp=0) == 0 and mesh.get_coord(0) == {"pp": 0, "dp": 0}
    assert mesh.get_axis_comm_lists("dp") == [[0]] and mesh.filter_match(pp=0) == [0]


REFUSED = {
    "no axes": (lambda: c.mesh(), "a mesh needs an axis"),
    "too many": (lambda: c.mesh(dp=3), "do not fit 4 ranks"),
    "too few": (lambda: c.mesh(dp=2), "multiply to 4"),
    "no divisor": (lambda: c.mesh(pp=3, dp=-1), "divide 4"),
    "two rests": (lambda: c.mesh(pp=-1, dp=-1), "-1 once"),
    "zero": (lambda: c.mesh(dp=0), "not a size of an axis"),
    "true": (lambda: c.mesh(dp=True), "not a size of an axis"),
    "a typo": (lambda: c.mesh(data=4)["dat"], "did you mean 'data'"),
    "twice": (lambda: c.mesh(dp=4)["dp", "dp"], "named twice"),
    "nothing": (lambda: c.mesh(dp=4)[()], "an axis has a name"),
    "a rank": (lambda: c.mesh(dp=4).get_coord(4), "no such rank"),
    "a coordinate": (lambda: c.mesh(dp=4).get_rank(dp=4), "0 to 3"),
    "half of a coordinate": (lambda: c.mesh(pp=2, dp=2).get_rank(dp=1), "pp too"),
    "torch's": (lambda: c.mesh(dp=4).to_torch(), "torch.distributed"),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_mesh_is_refused(build, words):
    def run():
        with pytest.raises(MeshError) as error:
            build()
        return str(error.value)

    assert all(words in text for text in c.simulate(run, 4))
