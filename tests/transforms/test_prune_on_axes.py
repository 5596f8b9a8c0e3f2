"""Pruned weights of which the ranks of a tensor axis have parts: the masks, and the training, of one rank."""

import functools
from collections.abc import Iterable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.collectives.traffic import Traffic, counting
from fds.compression import sensitivity, with_scores
from tests import ranks
from tests.bits import assert_same_bits
from tests.transforms.test_prune_structures import HEADS, WIDTH, Attention

MICROBATCHES, CALLS, LR = 2, 4, 0.2
LATE: dict[str, Any] = {"offset": 1, "end": 3, "stride": 2}
PLAN = {
    "1": fds.nn.heads("num_heads"),
    "1.qkv": fds.nn.column(parts=3),
    "1.out": "row",
    "2.up": "column",
    "2.down": "row",
}


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 26), nn.Linear(26, WIDTH)  # ranks have 13 columns, or 7, 7, 6 and 6

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)))


@attrs.frozen
class Case:
    """What is pruned, and of what there are scores: (pattern, of what)."""

    transforms: tuple
    scores: tuple = ()
    sums: bool = False

    def loss(self):
        torch.manual_seed(0)
        layers = []
        for key, layer in enumerate((nn.Linear(4, WIDTH), Attention(), Feed(), nn.Linear(WIDTH, 2))):
            for pattern, of in self.scores:
                number, _, name = pattern.partition(".")
                more = {"num_heads": HEADS} if of == "heads" else {}
                if number == str(key):
                    layer = with_scores(layer, name, of=of, zeros=self.sums, key=key, **more)
            layers.append(layer.double())
        return fds.Layers(layers, lambda out, y: (out - y).square().mean())


@attrs.frozen
class Place:
    tensor: int = 1
    data: int = 1
    stages: int = 1
    zero: int = 0
    arguments: dict = attrs.Factory(dict)

    @property
    def ranks(self):
        return self.tensor * self.data * self.stages

    def transforms(self):
        mesh = fds.mesh(pp=self.stages, dp=self.data, tp=self.tensor)
        count = MICROBATCHES // self.data
        pipeline = [fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=count)]
        data = [fds.shard_optimizer(mesh["dp"], stage=self.zero, **self.arguments)]
        return [
            fds.tensor_parallel(mesh["tp"], PLAN),
            *(pipeline if self.stages > 1 else [fds.accumulate(count)]),
            *(data if self.data > 1 else []),
        ]


def heads(**more):
    return fds.prune_heads("1.out.weight", num_heads=HEADS, density=0.5, related="1.qkv.weight", **more)


def rows(**more):
    return fds.prune_rows("2.up.weight", density=0.3, related="2.down.weight", **more)


weights = fds.prune_weights
CASES = {
    "magnitudes": Case(
        (
            weights("[012].*weight", density=0.4, excluded=["1.out.*"], **LATE),
            heads(offset=1),
            rows(offset=2),
            # of what a row of the plan makes each rank has a term
            fds.prune_rows("1.out.weight", "2.down.weight", density=0.6, initial=True, name="pruned_outputs"),
        )
    ),
    "blocks": Case(
        (
            weights("1.*.weight", density=0.4, block="4x1", **LATE),
            weights("2.up.weight", "3.weight", block="2:4", name="pruned_pairs"),
        )
    ),
    "learned": Case(
        (
            weights("1.qkv.weight", "2.down.weight", method="topk", density=0.4, offset=1),
            heads(method="topk"),
            rows(method="topk", offset=1),
        ),
        (("1.qkv.weight", "weights"), ("2.down.weight", "weights"), ("1.out.weight", "heads"), ("2.up.weight", "rows")),
    ),
    "sums": Case(
        (
            weights("1.qkv.weight", method="snip_momentum", density=0.4, block="4x1", **LATE),
            heads(method="sensitivity", offset=2),
            rows(method="sensitivity", offset=2),
        ),
        (("1.qkv.weight", "weights"), ("1.out.weight", "heads"), ("2.up.weight", "rows")),
        sums=True,
    ),
    "together": Case(
        (
            weights("1.qkv.weight", "2.down.weight", method="snip_momentum", scope="global", density=0.4, **LATE),
            weights("0.weight", "2.up.weight", scope="global", density=0.4, offset=1, name="pruned_others"),
        ),
        (("1.qkv.weight", "weights"), ("2.down.weight", "weights")),
        sums=True,
    ),
}
TIGHT = {"bucket_bytes": 512, "prefetch": 0, "max_live_bytes": 4096}  # views run where the loss reads a matrix
PLACES = [
    ("magnitudes", Place(4)),
    ("magnitudes", Place(2, 2, zero=3, arguments=TIGHT)),
    ("blocks", Place(2, stages=2)),
    ("learned", Place(2, 2, stages=2, zero=1)),
    ("sums", Place(2, 2, zero=3)),
    ("together", Place(2, 2, zero=3, arguments=TIGHT)),
]


def batch(call):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(2 * MICROBATCHES, 5, n, generator=g, dtype=torch.float64) for n in (4, 2)]


def composed(name, place, *more):
    case = CASES[name]
    optimizer = fds.by_name({"*_scores": sensitivity(), "*": fds.sgd(LR)}) if case.sums else fds.sgd(LR)
    transforms = [*place.transforms(), *case.transforms, *more, fds.clip_by_global_norm(0.5), optimizer]
    return fds.compose(*transforms)(case.loss())


def train(step, state, calls: Iterable[int] = range(CALLS)):
    data, losses = step.dimensions.data, []
    for call in calls:
        mine = batch(call) if data is None else [x.chunk(data.size)[data.index] for x in batch(call)]
        state, metrics = step(state, mine)
        losses.append(torch.stack([metrics["loss"], metrics["grad_norm"]]))
    return state, losses


def trained(name, place, *more):
    """Return the masks, and all else that a rank computes: the baked model, too."""
    step = composed(name, place, *more)
    state, losses = train(step, step.init(step.loss.init))
    module = fds.bake(step, state).module
    out = module(batch(99)[0])
    return state.slots, (losses, step.params(state), out, step.evaluate(state, batch(99))["loss"]), repr(module)


@functools.cache
def alone(name):
    return trained(name, Place())


def assert_is_that_of_one_rank(results, name):
    slots, numbers, module = alone(name)
    for result in results:
        assert_same_bits(result[0], slots)
        torch.testing.assert_close(result[1], numbers, rtol=0, atol=1e-10)
        assert result[2] == module


@pytest.mark.parametrize(("name", "place"), PLACES, ids=str)
def test_ranks_of_a_tensor_axis_choose_the_masks_of_one(name, place):
    assert_is_that_of_one_rank(fds.simulate(lambda: trained(name, place), place.ranks), name)


def test_real_ranks_choose_the_masks_of_one():
    assert_is_that_of_one_rank(ranks.run(trained, "learned", Place(2)), "learned")


def test_a_run_goes_on_over_another_number_of_ranks(tmp_path):
    def begun():
        step = composed("sums", Place(2))
        state, _ = train(step, step.init(step.loss.init), range(3))
        fds.save(tmp_path, state, step)
        return train(step, state, [3])[0]

    def goes_on(place):
        step = composed("sums", place)
        return train(step, fds.load(tmp_path, step, step.loss.init)[0], [3])[0]

    want = fds.simulate(begun, 2)
    for result, state in zip(fds.simulate(lambda: goes_on(Place(2)), 2), want, strict=True):
        assert_same_bits(result, state)
    for place in (Place(), Place(4)):
        for result in fds.simulate(lambda place=place: goes_on(place), place.ranks):
            assert_same_bits(result.slots, want[0].slots)


def test_scores_lie_as_their_weights_do():
    def body():
        state = composed("learned", Place(2)).init(CASES["learned"].loss().init)
        return {name: tuple(x.shape) for name, x in state.params.items()}

    shapes = fds.simulate(body, 2)[0]
    assert shapes["1.qkv.weight_scores"] == shapes["1.qkv.weight"] == (18, WIDTH)
    assert shapes["2.down.weight_scores"] == shapes["2.down.weight"] == (WIDTH, 13)
    assert (shapes["1.out.weight_head_scores"], shapes["2.up.weight_row_scores"]) == ((1, HEADS), (26, 1))


def test_calls_that_make_no_mask_send_nothing_for_masks():
    def body():
        def sent(*transforms):
            parts = *Place(2).transforms(), *transforms, fds.clip_by_global_norm(0.5), fds.sgd(LR)
            step = fds.compose(*parts)(Case(()).loss())
            state, traffic = step.init(step.loss.init), Traffic()
            state, _ = train(step, state, [0])  # in which ranks learn of each other
            with counting(traffic):
                train(step, state, [1])
            return traffic.bytes_sent

        prune = lambda **more: (weights("1.*.weight", density=0.5, **more), heads(**more), rows(**more))
        assert sent(*prune(offset=2)) == sent() < sent(*prune(offset=1))

    fds.simulate(body, 2)
