"""Layouts: every element of every parameter lies in one place, and nothing lies in between."""

import math
import os
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from fds.layout import ALIGN, LEAST_BYTES, MOST_BYTES, SHARE, Leaf, plan
from fds.step.pool import Pool
from tests import ranks
from tests.bits import assert_rounding, assert_same_bits
from tests.sharding.models import data_axis

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float16]
SHAPES = st.sampled_from([(), (0,), (3, 0), (1,), (31,), (32,), (33,), (7, 5), (64, 3), (2, 3, 4), (1000,)])
NAMES = st.sampled_from(["w", "b", "scale", "0", "h.3", "attn.q", "a.b.c", "12.7"])


@st.composite
def leaves(draw):
    names = draw(st.lists(st.builds("{}.{}".format, NAMES, NAMES) | NAMES, min_size=1, max_size=12, unique=True))
    made = []
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        trained = dtype.is_floating_point and draw(st.booleans())
        made.append(
            Leaf(
                name,
                draw(SHAPES),
                dtype,
                trained,
                draw(st.sampled_from([0, (1, True)])),
                trained and draw(st.booleans()),
            )
        )
    return made


@given(leaves(), st.integers(1, 9), st.sampled_from([1, 64, 500, 4000, 2**20, None]))
def test_every_element_lies_in_one_place(found, ranks, bucket_bytes):
    layout = plan(found, tree.structure([0] * len(found)), num_ranks=ranks, bucket_bytes=bucket_bytes)
    assert layout.names == tuple(leaf.name for leaf in found)
    assert sorted(leaf.name for b in layout.buckets for leaf in b.leaves) == sorted(layout.names)
    assert len({b.name for b in layout.buckets}) == len(layout.buckets)
    for bucket in layout.buckets:
        assert len({(leaf.dtype, leaf.trained, leaf.kind, leaf.whole) for leaf in bucket.leaves}) == 1
        assert bucket.length > 0 and bucket.length % ALIGN == 0
        owner = torch.full((bucket.numel,), -1)
        for i, (leaf, offset) in enumerate(zip(bucket.leaves, bucket.offsets, strict=True)):
            assert offset % ALIGN == 0
            place = owner[offset : offset + leaf.numel]
            assert len(place) == leaf.numel and bool((place == -1).all())
            place.fill_(i)
        for a, b in bucket.gaps():
            assert bool((owner[a:b] == -1).all())
            owner[a:b] = -2
        assert bool((owner != -1).all())

        flat = torch.arange(bucket.numel)
        views = bucket.views(flat)
        pieces = [[] for _ in bucket.leaves]
        for rank in range(ranks):
            part = bucket.slice(rank, flat)
            for i, segment in enumerate(bucket.segments(rank)):
                assert segment.name == bucket.leaves[i].name and segment.shape == bucket.leaves[i].shape
                assert segment.length in (0, bucket.leaves[i].numel) or not bucket.leaves[i].whole
                if segment.length:
                    assert segment.start == sum(map(len, pieces[i]))
                    pieces[i].append(segment.of(part))
        for view, piece in zip(views, pieces, strict=True):
            assert torch.equal(view.reshape(-1), torch.cat(piece) if piece else view.new_empty(0))
        if len(bucket.leaves) > 1 and not bucket.leaves[0].whole:
            held = sum(-(-leaf.numel // ALIGN) * ALIGN for leaf in bucket.leaves)
            assert held * bucket.dtype.itemsize <= (LEAST_BYTES if bucket_bytes is None else bucket_bytes)
            assert bucket.numel < held + ALIGN * ranks + ALIGN


@given(leaves(), st.integers(1, 4), st.sampled_from([64, 500, 2**20]))
def test_leaves_come_back_as_they_went_in(found, ranks, bucket_bytes):
    layout = plan(found, tree.structure([0] * len(found)), num_ranks=ranks, bucket_bytes=bucket_bytes)
    values = {leaf.name: torch.randn(leaf.shape).to(leaf.dtype) for leaf in found}
    flats = [torch.empty(b.numel, dtype=b.dtype).fill_(1) for b in layout.buckets]
    for bucket, flat in zip(layout.buckets, flats, strict=True):
        bucket.fill(flat, [values[leaf.name] for leaf in bucket.leaves])
        for a, b in bucket.gaps():
            assert not flat[a:b].any()
    back = layout.collect([b.views(flat) for b, flat in zip(layout.buckets, flats, strict=True)])
    assert_same_bits(layout.build(back), [values[name] for name in layout.names])


OPTIMIZERS = {
    "sgd": lambda: fds.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: fds.adamw(0.1, weight_decay=0.1),
    "lion": lambda: fds.lion(0.1, weight_decay=0.1),
    "adagrad": lambda: fds.adagrad(0.1),
    "lamb": lambda: fds.lamb(0.1, weight_decay=0.1),
    "muon": lambda: fds.by_name({"*m*": fds.muon(0.1), "*": fds.adamw(0.1)}),
}


@st.composite
def trees(draw):
    """Draw parameters of all dtypes, some of them matrices by the name `m...`, and patterns of frozen ones."""
    n, params, frozen = draw(st.integers(1, 8)), {}, []
    for i in range(n):
        dtype = draw(st.sampled_from([torch.float32] * 3 + [torch.bfloat16, torch.float64, torch.int64, torch.bool]))
        matrix = dtype is torch.float32 and draw(st.booleans())
        shape = draw(st.sampled_from([(5, 3), (40, 2), (2, 70), (1, 1)])) if matrix else draw(SHAPES)
        name = f"{'m' if matrix else 'v'}.{i}"
        params[name] = torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        if dtype.is_floating_point and i and draw(st.integers(0, 3)) == 0:
            frozen.append(name)
    params["m.always"], params["v.always"] = torch.ones(3, 4), torch.ones(2)
    return params, frozen


def used(params, batch):
    """Depend on every floating parameter, nonlinearly."""
    total = 0.0
    for x in params.values():
        y = x.to(torch.float32)
        total = total + torch.tanh(y * batch.mean() + 0.1 * (y + 1).square()).sum() if y.numel() else total + y.sum()
    return total


@given(
    trees(),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(1, 3),
    st.integers(2, 5),
    st.sampled_from([64, 600, 2**20]),
)
def test_gaps_stay_zero_and_muon_has_whole_parameters(found, optimizer, stage, ranks, size):
    params, frozen = found
    freeze = [fds.freeze(*frozen)] if frozen else []
    batch = torch.arange(2.0 * ranks)

    def make(*more):
        return fds.compose(*more, *freeze, fds.ema(0.5), OPTIMIZERS[optimizer]())(used)

    def run():
        axis = data_axis()
        step = make(fds.shard_optimizer(axis, stage=stage, bucket_bytes=size))
        state = step.init(params)
        assert_same_bits(step.params(state), params)
        for _ in range(5):
            state, _ = step(state, batch.chunk(ranks)[axis.index])
        structure, parts = step.structure_of(state.params)
        slots = [list(slot.values()) for slot in [state.slots["ema"].buckets]]
        trained = [structure.layout.buckets[i] for i in structure.trained]
        for bucket, part in [
            *zip(structure.layout.buckets, parts, strict=True),
            *zip(structure.layout.buckets, slots[0], strict=True),
            *(
                (next(b for b in trained if b.name == name), x)
                for slot in state.opt.values()
                for name, x in slot.items()
                if optimizer != "adagrad"
            ),
        ]:
            rest = part.clone()
            for segment in bucket.segments(axis.index):
                segment.of(rest).zero_()
                if optimizer == "muon" and segment.name.startswith("m") and bucket.trained:
                    assert segment.length in (0, math.prod(segment.shape))
            assert not rest.any()
        return step.params(state)

    got = fds.simulate(run, ranks)
    plain = make(fds.accumulate(ranks))
    state = plain.init(params)
    for _ in range(5):
        state, _ = plain(state, batch)
    for one in got:
        assert_same_bits(one, got[0])
        for name, x in one.items():
            if name in frozen or not x.is_floating_point():
                assert_same_bits({"x": x}, {"x": params[name]})
            else:
                loose = 4.0 if x.dtype is torch.bfloat16 or optimizer in ("lion", "muon") else 1e-3
                assert float((x.double() - state.params[name].double()).abs().max() if x.numel() else 0) <= loose


def one_of_two(params, batch):
    """Depend on one of two parameters, by the batch."""
    rows, which = batch
    return (params["a" if which[0] else "b"] * rows.mean()).square().sum()


@pytest.mark.parametrize("stage", range(4))
def test_what_was_in_memory_before_has_no_part_in_a_step(stage):
    """Neither in padding nor where a rank has no gradient."""
    params, batch = {"a": torch.ones(5), "b": torch.ones(40, 2)}, (torch.arange(4.0), torch.tensor([1, 1, 0, 0]))
    clipped = [fds.clip_by_global_norm(0.1), fds.adamw(0.1)]

    def run(*more):
        step = fds.compose(*more, *clipped)(one_of_two)
        state = step.init(params)
        for _ in range(2):
            state, metrics = step(state, batch if more[0].name == "accumulate" else half())
        return step.params(state), metrics["grad_norm"]

    half = lambda: tree.map(lambda x: x.chunk(2)[data_axis().index], batch)
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        ranks = fds.simulate(lambda: run(fds.shard_optimizer(data_axis(), stage=stage, bucket_bytes=500)), 2)
    finally:
        torch.use_deterministic_algorithms(False)
    want = run(fds.accumulate(2))
    for got in ranks:
        assert_rounding(got, want, additions=64)


@given(leaves(), leaves(), st.integers(1, 3), st.sampled_from([1, 500, None]))
def test_leaves_of_one_kind_lie_alike_whatever_else_a_rank_has(shared, others, ranks, size):
    # ranks of a pipeline add up the slices of tied parameters, and each has other parameters beside them
    shared = [attrs.evolve(leaf, name=f"tied.{leaf.name}", kind="tied") for leaf in shared]
    both = sorted([*shared, *others], key=lambda leaf: leaf.name)
    alone = plan(sorted(shared, key=lambda leaf: leaf.name), None, num_ranks=ranks, bucket_bytes=size)
    among = plan(both, None, num_ranks=ranks, bucket_bytes=size)
    lie = lambda layout: [(b.leaves, b.offsets, b.length) for b in layout.buckets if b.leaves[0].kind == "tied"]
    assert lie(alone) == lie(among)


@given(leaves(), st.integers(1, 4), st.none() | st.integers(1, 4000), st.randoms())
def test_ranks_with_smaller_pieces_put_the_same_leaves_together(found, ranks, size, random):
    smaller = [attrs.evolve(x, shape=(random.randint(0, x.numel),), most=x.numel) for x in found]
    large, small = (plan(x, None, num_ranks=ranks, bucket_bytes=size) for x in (found, smaller))
    for one, other in zip(large.buckets, small.buckets, strict=True):
        assert [leaf.name for leaf in one.leaves] == [leaf.name for leaf in other.leaves]
        assert one.length == one.bound == other.bound >= other.length
        if one.leaves[0].whole:
            assert one.offsets == other.offsets  # so that the same rank has them


def test_pieces_of_other_sizes_make_as_many_buckets():
    large = [Leaf(f"h.{i}.weight", (100,), torch.float32) for i in range(2)]
    small = [attrs.evolve(leaf, shape=(8,), most=100) for leaf in large]
    assert [len(plan(x, None, num_ranks=1, bucket_bytes=600).buckets) for x in (large, small)] == [2, 2]


def test_parameters_that_must_be_whole_are_spread_over_the_ranks():
    whole = [Leaf(f"{i}.weight", (8, 8), torch.float32, whole=True) for i in range(4)]
    (bucket,) = plan(whole, None, num_ranks=2, bucket_bytes=2**20).buckets
    held = [{s.name for s in bucket.segments(rank) if s.length} for rank in range(2)]
    assert sorted(map(len, held)) == [2, 2] and bucket.length == 2 * 64


def stack(layers, width):
    """Return the leaves of a deep model, of so many square matrices."""
    return [Leaf(f"h.{i}.weight", (width, width), torch.float32) for i in range(layers)]


@given(st.integers(40, 200), st.sampled_from([64, 256, 1024]), st.integers(2, 5))
def test_buckets_follow_the_model_within_bounds(layers, width, ranks):
    layout = plan(stack(layers, width), None, num_ranks=ranks, bucket_bytes=None)
    whole, layer = 4 * layers * width**2, 4 * width**2
    bound = min(max(whole // SHARE, LEAST_BYTES), MOST_BYTES)
    sizes = [sum(4 * leaf.numel for leaf in b.leaves) for b in layout.buckets]
    assert sum(sizes) == whole and max(sizes) <= bound
    assert all(size > bound - layer for size in sizes[:-1])  # as full as layers allow


def test_pipeline_ranks_with_other_parameters_size_buckets_of_what_they_share_alike():
    tied = [attrs.evolve(leaf, name=f"tied.{leaf.name}", kind="tied") for leaf in stack(20, 256)]
    few, many = (plan([*tied, *stack(n, 256)], None, num_ranks=2, bucket_bytes=None) for n in (1, 300))
    alone = plan(tied, None, num_ranks=2, bucket_bytes=None)
    lie = lambda layout: [(b.leaves, b.offsets) for b in layout.buckets if b.leaves[0].kind == "tied"]
    assert lie(few) == lie(many) == lie(alone) and len(lie(alone)) > 4


def test_describe_shows_the_buckets_that_were_chosen():
    params = {f"h.{i}": torch.zeros(256, 1024) for i in range(3)}  # of 1 MiB each

    def run(size):
        step = fds.compose(fds.shard_optimizer(data_axis(), stage=1, bucket_bytes=size), fds.sgd(0.1))(
            lambda p, x: sum(w.sum() for w in p.values()) * x.sum()
        )
        return step.describe(step.init(params))

    described, given_size = fds.simulate(lambda: (run(None), run(2**21)), 2)[0]
    assert described.buckets == (2**20,) * 3 and "layout     3 flat buckets of 1,048,576 bytes" in str(described)
    assert given_size.buckets == (2**21, 2**20) and "2 flat buckets of 1,048,576 to 2,097,152 bytes" in str(given_size)


def sizes_by_default(local_world_size: str) -> tuple[int, ...]:
    params = {f"h.{i}": torch.zeros(256, 1024) for i in range(3)}  # of 1 MiB each
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=local_world_size):
        step = fds.compose(fds.shard_optimizer(data_axis(), stage=1), fds.sgd(0.1))(lambda p, x: p["h.0"].sum() * x)
        return step.describe(step.init(params)).buckets


def test_buckets_are_large_where_sending_takes_the_cores_that_compute():
    assert ranks.run(sizes_by_default, "2") == [(3 * 2**20,)] * 2
    assert ranks.run(sizes_by_default, "1") == [(2**20,) * 3] * 2


def test_what_a_pool_gives_twice_is_free():
    pool = Pool()
    a = pool.take(8, torch.float32, torch.device("cpu"))
    view = a[2:4]
    del a
    b = pool.take(8, torch.float32, torch.device("cpu"))
    assert b.data_ptr() != view.data_ptr() - 8
