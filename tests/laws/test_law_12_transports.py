"""Law 12: a lossless transport is invisible, a lossy one keeps to its bound, and what it keeps back is never lost."""

import pytest
import torch
from torch import Tensor

import fds
from fds import tree
from fds.errors import ComposeError
from fds.step import Pending, Reduce, Transport, fill, transform
from tests import ranks
from tests.bits import assert_same_bits, snapshot
from tests.laws import problems
from tests.storage.topologies import Stages, Topology, plain, roll
from tests.tensor_axis import splitting

PLACES = [
    *(Topology(3, stage, 300) for stage in range(4)),
    *(Topology(4, stage, 300, replicas=2) for stage in (0, 3)),
    *(Stages(2, fds.plans.zb_h1, 2, stage) for stage in (1, 2)),
]
NAMES = [f"{type(one).__name__.lower()} of {one.ranks}, stage {one.stage}, {one.replicas} copies" for one in PLACES]


class ByPieces(Transport):
    """Sends by other collectives, and sums in the order of ranks, as reductions do."""

    def reduce(self, axis, whole, out, kept):
        pieces = torch.empty_like(whole)
        return Pending(axis.start_all_to_all(pieces, whole.clone()), lambda: out.copy_(in_order(pieces, axis.size)))

    def combine(self, axis, own, kept):
        everything = own.new_empty(axis.size * len(own))
        return Pending(axis.start_all_gather(everything, own), lambda: own.copy_(in_order(everything, axis.size)))

    def spread(self, axis, own, whole, kept):
        return axis.start_all_to_all(whole, own.repeat(axis.size))

    def gather(self, axis, part, whole):
        return self.spread(axis, part.to(whole.dtype), whole, None)


def in_order(pieces: Tensor, size: int) -> Tensor:
    first, *others = pieces.chunk(size)
    total = first.float() if tree.is_low(first) else first.clone()
    for one in others:
        total += one
    return total


@transform
def by(reduce: Transport, gather: Transport):
    return lambda step: fill(step, reduce={"transport": reduce}, gather={"transport": gather})


def composed(place, *more, optimizer=None):
    """Compose for the ranks of a place; in its pipelines the ends are tied."""
    make = problems.tied_layers if isinstance(place, Stages) else problems.layers
    problem = make(1, torch.float32, 0.3, True)
    cut = [place.shard(), fds.accumulate(2)] if isinstance(place, Topology) else place.transforms()
    step = fds.compose(*cut, *more, optimizer or fds.adamw(0.05))(problem.loss)
    return step, step.init(problem.params, key=3), problem.batch


def lighter(batch, call):
    """Return a batch in which, of four tokens in a row, one fewer counts than in the call before."""
    x, targets = batch
    if targets.is_floating_point():
        return batch
    return x, torch.where(torch.arange(targets.shape[1]) < targets.shape[1] - call, targets, -100)


def trained(place, *more, calls=3, optimizer=None):
    """Return what every rank ends with: its state, the whole parameters, the last metrics, the plain state."""

    def run():
        step, state, batch = composed(place, *more, optimizer=optimizer)
        metrics = {}
        for call in range(calls):
            mine = tree.map(lambda x: roll(x, step.shard.data.index), lighter(batch, call))
            state, metrics = step(state, mine)
        return state, step.params(state), metrics, plain(state, step)

    return place.run(run)


@pytest.mark.parametrize("place", [PLACES[i] for i in (0, 1, 3, 5, 7)], ids=[NAMES[i] for i in (0, 1, 3, 5, 7)])
def test_a_lossless_transport_is_invisible(place):
    more = [fds.precision(reduce=torch.bfloat16), fds.donate()] if place.stage % 2 else [fds.clip_by_global_norm(0.1)]
    run = lambda *by: trained(place, *more, *by, calls=2)
    for got, want in zip(run(by(ByPieces(), ByPieces())), run(), strict=True):
        assert_same_bits(got, want)


class Short(Transport):
    def reduce(self, axis, whole):
        return axis.start_reduce_scatter(whole, whole)


class Keeps(Transport):
    def keeps(self, numel):
        return numel


ALL_LEGS = "fds.step.Transport, with reduce(axis, whole, out, kept)"


@pytest.mark.parametrize(
    ("wrong", "want"),
    [
        (Short(), "reduce(axis, whole, out, kept)"),
        (Keeps(), "keeps: bool"),
        (ByPieces, ALL_LEGS),
        ("lossless", ALL_LEGS),
        (None, ALL_LEGS),
    ],
    ids=range(5),
)
def test_what_is_no_transport_is_refused_with_the_contract(wrong, want):
    whole = transform(lambda: lambda step: fill(step, reduce=Reduce(transport=wrong)))
    for one in (by(wrong, Transport()), by(Transport(), wrong), whole()):
        with pytest.raises(ComposeError) as caught:
            fds.compose(one, fds.sgd(0.1))(lambda params, batch: params.sum())
        assert want in caught.value.want


@pytest.mark.parametrize("leg", ["reduce", "combine", "spread", "gather"])
def test_a_leg_that_returns_nothing_is_refused_with_the_contract(leg):
    def run(place):
        wrong = type("Wrong", (Transport,), {leg: lambda self, *args: None})()
        step, state, batch = composed(place, by(wrong, wrong))
        before = snapshot(state)
        with pytest.raises(ComposeError, match=rf"'{leg if leg == 'gather' else 'reduce'}', Wrong(?s:.*){leg}\(axis"):
            step(state, batch)
        assert_same_bits(state, before)
        return True

    for stage in (1, 3) if leg != "spread" else (0,):
        place = Topology(4, stage, 300, replicas=2)
        assert place.run(lambda place=place: run(place)) == [True] * 4


def test_the_slot_of_what_is_kept_is_filled_once():
    mine = transform(lambda: lambda step: fill(step, slots={"kept": lambda params, device: {}}))
    with pytest.raises(ComposeError, match="the slot 'kept' is already filled by by"):
        fds.compose(LOSSY, mine(), fds.sgd(0.1))(lambda params, batch: params.sum())


class Bfloat16(Transport):
    """Messages of 16 bits, summed in float32 where they arrive; what they lose goes into the next ones."""

    keeps, bound = True, 2.0**-8

    def reduce(self, axis, whole, out, kept):
        given = whole + kept
        message = given.bfloat16()
        torch.sub(given, message, out=kept)
        pieces = torch.empty_like(message)
        work = axis.start_all_to_all(pieces, message)
        return Pending(work, lambda: out.copy_(pieces.view(axis.size, -1).sum(0, dtype=torch.float32)))

    def bytes_sent(self, leg, numel, dtype, size):
        return super().bytes_sent(leg, numel, torch.bfloat16 if leg == "reduce" else dtype, size)


class Watched(Bfloat16):
    """Checks every message: what is sent and what is kept are what was given, and the bound holds."""

    def reduce(self, axis, whole, out, kept):
        given = whole + kept
        work = super().reduce(axis, whole, out, kept)
        assert torch.equal(given.bfloat16().float() + kept, given)
        assert kept.abs().max() <= self.bound * given.abs().max()
        return work


LOSSY = by(Bfloat16(), Transport())


def total_kept(states):
    """Return the sums over ranks of what they keep, by parameter."""
    kept = {}
    for state in states:
        for name, x in state.slots.get("kept", {}).items():
            kept[name] = kept.get(name, 0) + x.double()
    return kept


def sums(place, *more):
    """Return the sums over some calls of the mean gradients, and of what all ranks keep, by parameter."""
    momentum = fds.sgd(0.0, momentum=1.0)  # parameters stay, so every run has the same gradients
    found = trained(place, *more, optimizer=momentum)
    leaves = {name: x.double() for *_, leaves in found for name, x in leaves.items()}
    return {n: x for n, x in leaves.items() if n.startswith("opt.")}, total_kept([state for state, *_ in found])


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_what_is_sent_and_what_is_kept_is_what_is_given(place):
    more = [fds.freeze("2.bias" if isinstance(place, Stages) else "1.norm.*")]
    want, _ = sums(place, *more)
    got, kept = sums(place, *more, by(Watched(), Transport()))
    assert {f"opt.momentum_buffer.{name}" for name in kept} == want.keys() == got.keys()
    assert any(not torch.equal(got[name], want[name]) for name in got)
    for name, x in kept.items():
        whole = want[f"opt.momentum_buffer.{name}"]
        rounding = torch.finfo(torch.float32).eps * 3 * 2 * place.ranks * float(whole.abs().max())  # additions
        torch.testing.assert_close(whole - got[f"opt.momentum_buffer.{name}"], x, atol=rounding, rtol=0)
        assert x.abs().max() > 8 * rounding


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_what_is_sent_is_what_is_told_and_within_the_bound_of_the_sum(place):
    def run():
        step, state, batch = composed(place, LOSSY, optimizer=fds.sgd(1.0))
        old, found = snapshot(state.slots), []
        for _ in range(2):  # the first also agrees on what comes
            with fds.collectives.counted() as traffic:
                after, _ = step(state, batch)
            found.append(after.slots)
        assert_same_bits(state.slots, old)
        assert_same_bits(*found)
        sent = {leg: count.bytes_sent for leg, count in traffic.counts.items()}
        told = step.describe(state)
        assert "Bfloat16" in told.stations["reduce"] and told.num_bytes["kept"] >= told.memory["kept"]
        return sent, told.sent, step.params(state), step.params(after)

    plain = place.run(
        lambda: (lambda step, state, batch: step.params(step(state, batch)[0]))(
            *composed(place, optimizer=fds.sgd(1.0))
        )
    )
    for (sent, told, old, new), want in zip(place.run(run), plain, strict=True):
        legs = {("all_to_all", "dp"), ("all_reduce", "copies"), ("all_gather" if place.stage == 0 else "", "dp")}
        assert sum(sent[leg] for leg in legs & sent.keys()) == told["reduce"]
        for name, x in tree.paths(new).items():
            step = tree.paths(want)[name] - tree.paths(old)[name]
            bound = Bfloat16.bound * 2 * place.ranks * max(1.0, float(step.abs().max()))
            assert (x - tree.paths(want)[name]).abs().max() <= bound


def resumed(place, dir, *more):
    """Return the state after four calls, and that of a run which was stopped after two and resumed."""
    step, state, batch = composed(place, LOSSY, fds.loss_scale(8.0), *more)
    mine = tree.map(lambda x: roll(x, step.shard.data.index), batch)
    for _ in range(2):
        state, _ = step(state, mine)
    fds.save(dir, state, step)
    for _ in range(2):
        state, _ = step(state, mine)
    other, fresh, _ = composed(place, LOSSY, fds.loss_scale(8.0), *more)
    again, _ = fds.load(dir, other, other.params(fresh))
    for _ in range(2):
        again, _ = other(again, mine)
    return state, again


def resumed_leaves(dir):
    return [tree.paths(state) for state in resumed(Topology(2, 2, 300), dir)]


@pytest.mark.parametrize("place", [PLACES[i] for i in (1, 3, 4, 7)], ids=[NAMES[i] for i in (1, 3, 4, 7)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(place, tmp_path):
    donate = [fds.donate()] if place.stage % 2 else []

    for state, again in place.run(lambda: resumed(place, tmp_path, *donate)):
        assert_same_bits(again, state)


def test_real_ranks_keep_and_resume_what_simulated_ones_do(tmp_path):
    simulated = fds.simulate(lambda: resumed_leaves(tmp_path / "simulated"), 2)
    for (state, again), (want, _) in zip(ranks.run(resumed_leaves, tmp_path / "real"), simulated, strict=True):
        assert_same_bits(again, state)
        assert_same_bits(state, want)


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_nothing_is_sent_of_a_step_that_is_skipped(stage, donated):
    """A scale that is a power of two is invisible too: what is kept is of the loss itself."""
    place = Topology(2, stage, 300)

    def run(*scale):
        step, state, batch = composed(place, LOSSY, *scale, *([fds.donate()] if donated else []))
        seen = []
        for call in range(4):
            x = batch[0] * torch.inf if call == 2 and scale else batch[0]
            state, metrics = step(state, (x, batch[1]))
            seen.append((int(state.step), {n: k.clone() for n, k in state.slots["kept"].items()}))
            assert bool(metrics.get("skipped", False)) == bool(call == 2 and scale)
        return seen

    scaled = place.run(lambda: run(fds.loss_scale(2.0**7)))
    for (_, one, skipped, last), (_, unscaled, after, _) in zip(scaled, place.run(run), strict=True):
        assert_same_bits(skipped[1], one[1])
        assert skipped[0] == one[0] == 2 and last[0] == 3
        assert_same_bits(one[1], unscaled[1])
        assert last[1].keys() == after[1].keys()


MOVES = [
    (Topology(4, 2, 300), Topology(3, 0, 64)),
    (Topology(4, 0, 300, replicas=2), Topology(1, 1)),
    (Topology(2, 3, 64), Topology(5, 1)),
    (Stages(2, fds.plans.zb_h1, 2, 1), Stages(2, fds.plans.gpipe, 1)),
    (Stages(2, fds.plans.zb_h1, 2, 2), Stages(2, fds.plans.gpipe, 2, alone=True)),
]


@pytest.mark.parametrize(("old", "new"), MOVES, ids=range(len(MOVES)))
def test_sums_of_what_is_kept_are_preserved_on_other_ranks(old, new, tmp_path):
    def before():
        step, state, batch = composed(old, LOSSY)
        state, _ = step(state, tree.map(lambda x: roll(x, step.shard.data.index), batch))
        fds.save(tmp_path, state, step)
        return state

    def after():
        step, state, _ = composed(new, LOSSY)
        return fds.load(tmp_path, step, step.params(state))[0]

    states, loaded = old.run(before), new.run(after)
    want, got = total_kept(states), total_kept(loaded)
    assert want.keys() == got.keys()
    for name, x in want.items():
        assert x.abs().max() > 0
        torch.testing.assert_close(got[name], x, atol=1e-6 * float(x.abs().max()), rtol=0)
    if isinstance(new, Topology):
        for rank, state in enumerate(loaded):
            for name, x in state.slots["kept"].items():
                terms = [one.slots["kept"][name] for one in states[rank :: new.ranks]]
                assert torch.equal(x, sum(terms, torch.zeros_like(x)))


def test_what_is_kept_of_pieces_is_preserved_on_other_pieces(tmp_path):
    def before():
        step = splitting.Place(tensor=2, data=2, zero=2).step(LOSSY, optimizer=fds.adamw(0.01))
        state, _ = step(step.init(splitting.model(None).init, key=3), splitting.share(step, 0))
        fds.save(tmp_path, state, step)
        whole = {}
        for name, x in state.slots["kept"].items():
            index, count, first = step.dimensions.terms(name)
            assert (index < count) and (count == 4) == name.endswith("inner")
            shape, _ = step.dimensions.cells(name, x.shape) or (x.shape, None)
            whole[name] = torch.zeros(shape)
            places = step.dimensions.cut(name, torch.arange(whole[name].numel()).view(shape))
            whole[name].view(-1)[places.reshape(-1)] = (x * first).reshape(-1)
        return whole

    def after(place):
        step = place.step(LOSSY, optimizer=fds.adamw(0.01))
        state, _ = fds.load(tmp_path, step, splitting.model(None).init)
        return state.slots["kept"], {name: step.dimensions.cut(name, x) for name, x in total.items()}

    found = fds.simulate(before, 4)
    total = {name: sum(one[name] for one in found) for name in found[0]}
    one = after(splitting.Place())
    two = fds.simulate(lambda: after(splitting.Place(tensor=2)), 2)
    for name, x in total.items():
        assert x.abs().max() > 0
        for got, want in [one, *(two if not name.endswith("inner") else [])]:
            torch.testing.assert_close(got[name], want[name], atol=1e-6 * float(x.abs().max()), rtol=0)
        if name.endswith("inner"):
            torch.testing.assert_close(two[0][0][name] + two[1][0][name], x, atol=1e-6 * float(x.abs().max()), rtol=0)
