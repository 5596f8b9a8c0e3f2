"""Law 12 for the rows of gradients that are not 0: they arrive as the sum of whole gradients, bit for bit."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import fds
from fds import reading, transports, tree
from fds.errors import ComposeError, StateError
from fds.step import Named, Transport
from fds.step.sharding.transport import LOSSLESS
from fds.transports._rows import NumberedRows, used_rows
from tests import ranks
from tests.bits import assert_same_bits, snapshot
from tests.laws.test_law_12_transports import by, trained
from tests.storage.topologies import Stages, plain

WHOLE = 10**6  # rows, which are never fewer bytes than all: the same buckets, sent whole
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PARAMS = {"embed": torch.randn(301, 12, generator=torch.Generator().manual_seed(0)), "w": torch.eye(12)}
PARAMS |= {"position": torch.full((7, 12), 0.5), "bias": torch.zeros(12)}
IDS = torch.randint(0, 301, (24, 7), generator=torch.Generator().manual_seed(1))
EMBED = {"embed": transports.rows()}


def loss_of(sparse=False, tied=False):
    def loss(p, ids):
        x = F.embedding(ids, p["embed"], sparse=sparse) + p["position"]
        x = ((x @ p["w"] + p["bias"]).tanh() - 0.1 * x.roll(1, 1)).square()
        return x.mean() + ((x @ p["embed"].T).square().mean() if tied else 0)

    return loss


def run(gradients, *more, stage=1, copies=1, loss=None, calls=3, optimizer=None):
    """Return, on a rank, the state after some calls, that by the plain state's names, metrics and what was sent."""
    mesh = fds.mesh(copies=copies, dp=-1)
    data = mesh["copies", "dp"]
    shard = fds.shard_optimizer(
        mesh["dp"], stage=stage, replicate=mesh["copies"] if copies > 1 else None, gradients=gradients
    )
    step = fds.compose(shard, *more, optimizer or fds.adamw(0.01))(loss or loss_of())
    state, metrics = step.init(PARAMS), {}
    for call in range(calls):
        with fds.collectives.counted() as traffic:
            state, metrics = step(state, IDS.roll(call, 0).chunk(data.size)[data.index])
    sent = {key: one.bytes_sent for key, one in traffic.counts.items()}
    return plain(state, step), metrics, sent, step.describe(state)


CLIPPED = [fds.clip_by_global_norm(0.01), fds.loss_scale(2.0**7), fds.accumulate(2)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse=True"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_are_the_whole_gradient_bit_for_bit(stage, copies, sparse):
    of = lambda most: fds.simulate(
        lambda: run({"embed": transports.rows(most=most)}, *CLIPPED, stage=stage, copies=copies, loss=loss_of(sparse)),
        4,
    )
    want = of(WHOLE)
    for got in (of(None), of(42)):
        for (state, metrics, sent, _), (other, others, whole, _) in zip(got, want, strict=True):
            assert_same_bits(state, other)
            assert_same_bits(metrics, others)
            assert sum(sent.values()) < sum(whole.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("reduce", [None, torch.bfloat16])
def test_without_a_norm_buckets_of_their_own_change_no_bit_either(stage, reduce):
    more = [] if reduce is None else [fds.precision(reduce=reduce)]
    of = lambda gradients: fds.simulate(lambda: run(gradients, *more, stage=stage), 3)
    for gradients in (EMBED, transports.rows(), {"e*": transports.rows(most=56), "*": transports.rows()}):
        for (state, *_), (want, *_) in zip(of(gradients), of(None), strict=True):
            assert_same_bits(state, want)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("copies", [1, 2])
def test_what_is_sent_is_what_is_told(stage, copies):
    def sent(gradients):
        *_, sent, told = fds.simulate(lambda: run(gradients, stage=stage, copies=copies), 4)[0]
        scalars = sum(one.bytes_sent for one in told.messages if one.kind.what == "scalars")
        return sum(n for (op, _), n in sent.items() if op != "exchange") - scalars, sum(told.sent.values()), told

    for most in (42, 60, WHOLE):
        counted, told, description = sent({"embed": transports.rows(most=most)})
        assert counted == told
        assert sum(one.bytes_sent for one in description.messages if one.buckets) == told
    counted, told, _ = sent(EMBED)
    assert counted < told  # the most
    assert sent({"embed": transports.rows(most=42)})[1] < sent(None)[1]


def test_in_a_pipeline_with_tied_ends():
    place = Stages(2, fds.plans.zb_h1, 2, 1)
    way = by(Named({"*": transports.rows()}), Transport())
    for (_, params, *_), (_, want, *_) in zip(trained(place, way), trained(place), strict=True):
        assert_same_bits(params, want)


def test_a_tied_embedding_is_sent_whole():
    of = lambda gradients: fds.simulate(lambda: run(gradients, loss=loss_of(tied=True)), 3)
    for (state, _, sent, _), (want, *_) in zip(of(EMBED), of(None), strict=True):
        assert_same_bits(state, want)
        assert ("all_to_all", "dp") not in sent and ("reduce_scatter", "dp") in sent


@st.composite
def gradients(draw):
    """Draw what each rank has of a bucket: most rows 0, some -0, some whose sum is 0, some not finite."""
    size, width = draw(st.integers(2, 4)), draw(st.sampled_from([2, 3, 8]))
    dtype, num_rows = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 9))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.1, 3e-5, 1e4, float("inf"), float("nan")])
    row = st.one_of(st.just([0.0] * width), st.lists(value, min_size=width, max_size=width))
    one = st.lists(row, min_size=size * num_rows, max_size=size * num_rows)
    return width, [torch.tensor(draw(one), dtype=dtype).flatten() for _ in range(size)]


def legs(way, wholes):
    """Return on every rank what arrives by each leg."""

    def on_a_rank():
        axis = fds.mesh(dp=-1)["dp"]
        mine = wholes[axis.index].clone()
        out = mine.new_empty(len(mine) // axis.size)
        way.reduce(axis, mine, out, None).wait()
        everything = mine.new_empty(len(mine))
        way.spread(axis, out.clone(), everything, None).wait()
        copies = wholes[axis.index][: len(out)].clone()
        way.combine(axis, copies, None).wait()
        return {"reduce": out, "spread": everything, "combine": copies}

    return fds.simulate(on_a_rank, len(wholes))


@given(case=gradients(), most=st.sampled_from([None, 1000]))
def test_every_leg_is_lossless(case, most):
    width, wholes = case
    size = len(wholes)
    leaf = fds.layout.Leaf("e", (len(wholes[0]) // width, width), wholes[0].dtype, unit=width)
    bucket = fds.layout.Bucket("0", (leaf,), (0,), len(wholes[0]) // size, size)
    way = attrs.evolve(transports.rows(most=most), bucket=bucket, ranks=size)
    bare = attrs.evolve(way, most=None)
    for got, want, again in zip(legs(way, wholes), legs(LOSSLESS, wholes), legs(bare, wholes), strict=True):
        for leg in want:  # a NaN is one, whatever its bits: those of a sum are the processor's
            for x in (got[leg], again[leg]):
                torch.testing.assert_close(x, want[leg], rtol=0, atol=0, equal_nan=True)
                assert torch.equal(x.signbit() & (x == 0), want[leg].signbit() & (want[leg] == 0))


def test_rows_are_found_by_their_bits():
    x = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, -0.0], [torch.nan, 0.0], [1e-45, 0.0]])
    for dtype in DTYPES:
        assert used_rows(x.to(dtype)).tolist() == [
            True,
            False,
            True,
            True,
            dtype not in (torch.bfloat16, torch.float16),
        ]


def test_nobody_reads_a_number_where_that_would_wait(monkeypatch):
    code = NumberedRows(6, 4, torch.float32)
    x, message = torch.empty(2, 60, device="meta"), torch.empty(2, code.num_bytes(60), dtype=torch.uint8, device="meta")
    code.encode(x, message)
    code.decode(message[0], x[0])

    want = fds.simulate(lambda: run(None), 2)
    monkeypatch.setattr(reading, "is_free", lambda x: False)
    for (state, _, sent, _), (plain_state, *_) in zip(fds.simulate(lambda: run(EMBED), 2), want, strict=True):
        assert_same_bits(state, plain_state)
        assert ("all_to_all", "dp") not in sent
    *_, sent, _ = fds.simulate(lambda: run({"embed": transports.rows(most=84)}), 2)[0]
    assert sent["all_to_all", "dp"] == 84 * (4 + 12 * 4)  # to the other rank


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("most", [None, 40])
def test_a_number_that_is_not_finite_is_a_decision_of_all(stage, most):
    way = {"embed": transports.rows(most=most)}

    def on_a_rank():
        data = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(data, stage=stage, gradients=way), fds.skip_nonfinite(), fds.sgd(0.1))(
            lambda p, x: (p["embed"][x[0]] * x[1]).sum()
        )
        state = step.init({"embed": PARAMS["embed"]})
        before = snapshot(step.params(state))
        bad = torch.nan if data.index == 1 else 1.0
        state, metrics = step(state, (IDS[:1, :1], torch.full((1, 1, 1), bad)))
        assert_same_bits(step.params(state), before)
        return bool(metrics["skipped"])

    assert fds.simulate(on_a_rank, 3) == [True] * 3


@pytest.mark.parametrize("stage", [0, 1])
def test_more_rows_than_there_is_room_for_arrive_as_nan_at_all_ranks(stage):
    def on_a_rank(most):
        data = fds.mesh(dp=-1)["dp"]
        shard = fds.shard_optimizer(data, stage=stage, gradients={"embed": transports.rows(most=most)})
        step = fds.compose(shard, fds.skip_nonfinite(), fds.sgd(0.1))(lambda p, ids: p["embed"][ids].sum())
        state = step.init({"embed": PARAMS["embed"]})
        ids = torch.arange(9) if data.index else torch.arange(3)  # of the slice of rank 0
        return bool(step(state, ids[None])[1]["skipped"])

    assert fds.simulate(lambda: on_a_rank(8), 2) == [True] * 2
    assert fds.simulate(lambda: on_a_rank(9), 2) == [False] * 2


def test_a_save_goes_on_in_other_buckets_on_other_ranks(tmp_path):
    def step_of(gradients, stage):
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, gradients=gradients)
        return fds.compose(shard, fds.adamw(0.01))(loss_of())

    def before():
        step = step_of(EMBED, 1)
        state, _ = step(step.init(PARAMS), IDS[:4])
        fds.save(tmp_path, state, step)
        return plain(state, step)

    def after(gradients, stage):
        step = step_of(gradients, stage)
        return plain(fds.load(tmp_path, step, PARAMS)[0], step)

    want = fds.simulate(before, 3)[0]
    for gradients, stage, size in ((None, 1, 2), (EMBED, 2, 4), ({"*": transports.rows(most=9)}, 0, 2)):
        assert_same_bits(fds.simulate(lambda g=gradients, s=stage: after(g, s), size)[0], want)


def test_two_patterns_go_two_ways():
    ways = {"embed": transports.rows(), "w": transports.onebit(group=32)}

    def on_a_rank():
        *_, told = run(ways)
        assert "'embed': rows(), 'w': onebit(group=32)" in told.stations["reduce"]

    def kept():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], gradients=ways)
        step = fds.compose(shard, fds.adamw(0.01))(loss_of())
        state, _ = step(step.init(PARAMS), IDS[:4])
        return {name: bool(x.any()) for name, x in state.slots["kept"].items()}

    fds.simulate(on_a_rank, 2)
    assert fds.simulate(kept, 2)[0] == {"embed": False, "position": False, "w": True, "bias": False}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_without_numbers_or_with_rows_of_one_are_sent_as_ever(stage):
    params = {
        "none": torch.zeros(5, 0),
        "no rows": torch.zeros(0, 5),
        "column": torch.ones(9, 1),
        "scalar": torch.ones(()),
    }
    loss = lambda p, x: (p["column"] * p["scalar"] * x).sum() + p["none"].sum() + p["no rows"].sum()

    def after_a_step(gradients):
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, gradients=gradients)
        step = fds.compose(shard, fds.sgd(0.1))(loss)
        return step.params(step(step.init(params), torch.ones(1))[0])

    for got, want in zip(
        *(fds.simulate(lambda w=w: after_a_step(w), 2) for w in (transports.rows(), None)), strict=True
    ):
        assert_same_bits(got, want)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(64, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1)).square().mean()


def beside_ddp():
    """Return, on a real rank, parameters after some steps, and those of DDP, which adds sparse gradients itself."""
    data = fds.mesh(dp=-1)["dp"]
    model, mine = Model(), (IDS % 64).chunk(data.size)[data.index]
    apply, params, _ = fds.functional(model)
    shard = fds.shard_optimizer(data, stage=1, gradients={"embed.weight": transports.rows()})
    step = fds.compose(shard, fds.sgd(0.5))(lambda p, ids: apply(p, ids))
    state, ddp = step.init(params), nn.parallel.DistributedDataParallel(model)
    sgd = torch.optim.SGD(ddp.parameters(), 0.5)
    for _ in range(3):
        state, _ = step(state, mine)
        sgd.zero_grad()
        ddp(mine).backward()
        sgd.step()
    return tree.paths(step.params(state)), {name: x.detach().clone() for name, x in model.named_parameters()}


def test_ddp_adds_sparse_gradients_to_the_same_sums():
    for got, want in ranks.run(beside_ddp, world_size=2):
        assert got.keys() == want.keys()
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "error", "want"),
    [
        (lambda: transports.rows(most=0), ComposeError, "an int >= 1, or None"),
        (lambda: transports.rows(most=2.5), ComposeError, "an int >= 1, or None"),
        (lambda: run({}), ComposeError, "{'*embed*': fds.transports.rows()}".replace("'", '"')),
        (lambda: run({0: transports.rows()}), ComposeError, "rows()"),
        (lambda: run({"embed": "rows"}), ComposeError, "fds.step.Transport"),
        (lambda: run({"embed": None}), ComposeError, "fds.step.Transport"),
        (lambda: run({"embedding.*": transports.rows()}), StateError, "the name of a parameter"),
        (lambda: transports.hierarchical(transports.rows()), ComposeError, "quantized"),
    ],
    ids=range(8),
)
def test_what_cannot_be_sent_so_is_refused(wrong, error, want):
    with pytest.raises(error) as caught:
        fds.simulate(wrong, 2)
    assert want in caught.value.want
