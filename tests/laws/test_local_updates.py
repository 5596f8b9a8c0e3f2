"""Steps that ranks take apart, and agree on: by hand-written loops, whatever shares the rest of the step."""

import itertools

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import transports
from fds.errors import ComposeError, MeshError
from fds.plans import one_f_one_b
from tests.bits import assert_same_bits, snapshot

EPS = torch.finfo(torch.float64).eps


def problem(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(32, 8, generator=g, dtype=dtype), "v": torch.randn(130, generator=g, dtype=dtype) / 8}
    return params, [torch.randn(12, 32, generator=g, dtype=dtype) for _ in range(9)]


def loss_fn(params, x):
    return ((x @ params["w"]).tanh().sum(1) - params["v"][:32] @ x.T + params["v"].square().mean()).square().mean()


def apart(every=3, *, ranks=2, **more):
    """Return the transform on a mesh of so many replicas, and the axis of everyone's rows."""
    mesh = fds.mesh(replica=ranks, dp=-1)
    return fds.local_updates(mesh["replica"], every=every, **more), mesh


def train(calls, *parts, every=3, ranks=2, stage=None, dtype=torch.float64, inner=None, loss=loss_fn, **more):
    """Return step, state, rows and what every call gave, on one rank."""
    local, mesh = apart(every, ranks=ranks, **more)
    if stage is not None:
        parts = (fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=600), *parts)
    step = fds.compose(local, *parts, fds.adamw(0.05) if inner is None else inner)(loss)
    params, batches = problem(dtype)
    me = mesh["replica", "dp"]
    rows = [x.chunk(me.size)[me.index] for x in batches]
    state, seen = step.init(params), []
    for x in rows[:calls]:
        state, metrics = step(state, x)
        seen.append((step.params(state), metrics))
    return step, state, rows, seen


def by_hand(ranks, every, fragments, calls):
    """Return the parameters of every rank after each call, written with `torch.optim` alone."""
    params, batches = problem()
    own = [{k: p.clone().requires_grad_() for k, p in params.items()} for _ in range(ranks)]
    inner = [torch.optim.AdamW(p.values(), lr=0.05, weight_decay=0.01) for p in own]
    sizes = [p.numel() for p in params.values()]
    total, first = sum(sizes), sizes[0]
    inside = [total * i // fragments for i in range(1, fragments)]  # rounded down inside a parameter
    ends = [0, *(at - (at if at < first else at - first) % 64 for at in inside), total]
    flat = torch.cat([p.view(-1) for p in params.values()])
    anchors = [flat[a:b].clone().requires_grad_() for a, b in itertools.pairwise(ends)]
    outer = [torch.optim.SGD([a], lr=0.7, momentum=0.9, nesterov=True) for a in anchors]
    found = []
    for call in range(calls):
        for r in range(ranks):
            inner[r].zero_grad()
            loss_fn(own[r], batches[call].chunk(ranks)[r]).backward()
            inner[r].step()
        for f, (a, b) in enumerate(itertools.pairwise(ends)):
            if (call + 1 + f * every // fragments) % every:
                continue
            with torch.no_grad():
                flats = [torch.cat([p.view(-1) for p in one.values()]) for one in own]
                anchors[f].grad = torch.stack([anchors[f] - x[a:b] for x in flats]).mean(0)
                outer[f].step()
                for one, x in zip(own, flats, strict=True):
                    x[a:b] = anchors[f]
                    for p, new in zip(one.values(), x.split(sizes), strict=True):
                        p.copy_(new.view_as(p))
        found.append([{k: p.detach().clone() for k, p in one.items()} for one in own])
    return found


@pytest.mark.parametrize(("ranks", "fragments"), [(2, 1), (3, 1), (2, 2), (3, 3)])
def test_ranks_train_apart_and_agree_as_written_by_hand(ranks, fragments):
    found = fds.simulate(
        lambda: train(8, ranks=ranks, fragments=fragments, inner=fds.adamw(0.05, weight_decay=0.01))[3], ranks
    )
    for call, want in enumerate(by_hand(ranks, 3, fragments, 8)):
        for r in range(ranks):
            torch.testing.assert_close(found[r][call][0], want[r], rtol=1e3 * EPS, atol=1e3 * EPS)


@pytest.mark.parametrize("ranks", [2, 3])
def test_agreeing_in_every_call_is_the_mean_of_gradients(ranks):
    def plain():
        mesh = fds.mesh(dp=-1)
        step = fds.compose(fds.shard_optimizer(mesh["dp"], stage=0), fds.sgd(0.01))(loss_fn)
        params, batches = problem()
        state, seen = step.init(params), []
        for x in batches[:4]:
            state, metrics = step(state, x.chunk(ranks)[mesh["dp"].index])
            seen.append((step.params(state), metrics["loss"]))
        return seen

    local = lambda: train(4, every=1, ranks=ranks, inner=fds.sgd(0.01), outer=fds.sgd(1.0))[3]
    got, want = fds.simulate(local, ranks), fds.simulate(plain, ranks)
    for mine, theirs in zip(got, want, strict=True):
        for (params, metrics), (wanted, loss) in zip(mine, theirs, strict=True):
            torch.testing.assert_close((params, metrics["loss"]), (wanted, loss), rtol=100 * EPS, atol=100 * EPS)


def test_one_rank_is_the_identity():
    def plain():
        step = fds.compose(fds.adamw(0.05))(loss_fn)
        state = step.init(problem()[0])
        for x in problem()[1][:4]:
            state, metrics = step(state, x)
        return state, metrics

    (_, state, _, seen), (want, metrics) = train(4, ranks=1), plain()
    assert_same_bits((state, seen[-1][1]), (want, metrics))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_share_a_step_are_one_that_takes_it(stage):
    """Two pairs, each sharing its optimizer, are two ranks that accumulate: at any stage, fragments and all."""
    pairs = fds.simulate(lambda: train(7, fds.clip_by_global_norm(0.5), stage=stage)[3], 4)
    alone = fds.simulate(lambda: train(7, fds.accumulate(2), fds.clip_by_global_norm(0.5))[3], 2)
    for r, seen in enumerate(pairs):
        for (params, metrics), (wanted, whole) in zip(seen, alone[r // 2], strict=True):
            torch.testing.assert_close((params, metrics), (wanted, whole), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("stage", [None, 1, 2])
def test_ranks_agree_bit_for_bit_in_their_turn_and_only_then(stage):
    ranks = 2 if stage is None else 4
    found = fds.simulate(lambda: train(6, stage=stage, transport=transports.quantized(8, feedback=True))[3], ranks)
    for call in range(6):
        (one, metrics), (other, theirs) = found[0][call], found[-1][call]
        assert_same_bits(metrics, theirs)
        if call % 3 == 2:
            assert_same_bits(one, other)
        else:
            assert all(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "way", [transports.cast(torch.bfloat16), transports.quantized(8), transports.quantized(4, stochastic=True)]
)
def test_a_message_loses_no_more_than_its_bound(way):
    exact, coded = (fds.simulate(lambda way=way: train(3, transport=way)[3], 2)[0][-1][0] for way in (None, way))
    start = problem()[0]
    for name, x in exact.items():
        # two messages, of two halves of what a rank went and of their mean; Nesterov's first step is 0.7 x 1.9 of it
        most = float(torch.cat([(start[n] - y).abs().view(-1) for n, y in exact.items()]).max()) / 0.7 / 1.9
        assert float((coded[name] - x).abs().max()) <= 0.7 * 1.9 * 4 * way.bound * 2 * most
        assert not torch.equal(coded[name], x)


@pytest.mark.parametrize(
    ("stage", "more"), [(None, {}), (1, {"fragments": 2}), (2, {"transport": transports.onebit(group=32)})]
)
def test_a_run_resumed_at_any_call_is_the_run_that_was_never_stopped(tmp_path, stage, more):
    """Also between two turns, where every rank has parameters, averages and lost bits of its own."""
    parts = lambda: (fds.ema(0.9), fds.loss_scale(initial=4.0, window=2))

    def run():
        step, state, rows, _ = train(0, *parts(), stage=stage, dtype=torch.float32, **more)
        for i, x in enumerate(rows[:5]):
            fds.save(tmp_path / str(i), state, step)
            again, _ = fds.load(tmp_path / str(i), step, problem(torch.float32)[0])
            assert_same_bits(again, state)
            state, _ = step(state, x)

    fds.simulate(run, 2 if stage is None else 4)


def test_other_ranks_go_on_from_the_versions_that_there_are(tmp_path):
    """Of n versions rank r has the (r modulo n)-th; where the optimizer begins anew all have the first."""

    def begin():
        step, state, _, _ = train(4)
        fds.save(tmp_path, state, step)
        return state

    def go_on(**options):
        step, *_ = train(0, ranks=3)
        return fds.load(tmp_path, step, problem()[0], **options)[0]

    saved = fds.simulate(begin, 2)
    assert not torch.equal(saved[0].params["w"], saved[1].params["w"])
    for r, state in enumerate(fds.simulate(go_on, 3)):
        assert_same_bits((state.params, state.opt), (saved[r % 2].params, saved[r % 2].opt))
    for options in ({"params_only": True}, {"without_optimizer": True}):
        for state in fds.simulate(lambda options=options: go_on(**options), 3):
            assert_same_bits(state.params, saved[0].params)
            assert_same_bits(state.opt["anchor"], saved[0].params)
    plain = fds.compose(fds.adamw(0.05))(loss_fn)
    alone, _ = fds.load(tmp_path, plain, problem()[0], slots="drop")
    assert_same_bits((alone.params, alone.opt["exp_avg"]), (saved[0].params, saved[0].opt["exp_avg"]))
    for tree_, want in (("params", saved[0].params), ("opt.anchor", saved[1].opt["anchor"])):
        (path,) = fds.export_weights(tmp_path, tmp_path / f"{tree_}.safetensors", None, tree=tree_)
        fresh = fds.import_weights(path, plain, problem()[0])
        assert_same_bits(fresh.params, want)


def test_other_stages_go_on_from_what_each_rank_had(tmp_path):
    def begin():
        step, state, _, _ = train(4, stage=2, ranks=2)
        fds.save(tmp_path, state, step)
        return step.params(state)

    def go_on():
        step, *_ = train(0, ranks=2, stage=None)
        return fds.load(tmp_path, step, problem()[0])[0].params

    saved = fds.simulate(begin, 4)
    for r, params in enumerate(fds.simulate(go_on, 2)):
        assert_same_bits(params, saved[2 * r])


@pytest.mark.parametrize("stage", [None, 2])
def test_a_number_that_is_not_finite_on_one_rank_is_a_decision_of_all(stage):
    """A turn in which the step is skipped is lost: nothing changes, and the next turn brings all together."""

    def run():
        way = transports.quantized(8, feedback=True)
        step, state, rows, _ = train(2, fds.skip_nonfinite(), stage=stage, transport=way)
        before = snapshot(attrs.evolve(state, calls=state.calls + 1))
        bad = torch.nan if fds.mesh(all=-1)["all"].index == 1 else 1.0
        state, metrics = step(state, rows[2] * bad)
        assert bool(metrics["skipped"])
        assert_same_bits(state, before)
        for x in rows[3:6]:
            state, metrics = step(state, x)
            fds.check_ranks(state, step)  # what ranks have of their own may differ
        assert not bool(metrics["skipped"])
        return step.params(state)

    first, *others = fds.simulate(run, 2 if stage is None else 4)
    for params in others:
        assert_same_bits(params, first)


def test_a_rank_goes_by_its_own_weights_and_its_own_norm_and_metrics_are_of_all():
    """Targets that one rank has more of change neither gradients nor clips of another."""

    def weighted(params, x):
        return fds.Mean(loss_fn(params, x) * len(x), len(x)), {"rows": len(x)}

    def run():
        step, state, rows, _ = train(0, fds.clip_by_global_norm(0.1), inner=fds.sgd(0.5), loss=weighted)
        index = fds.mesh(replica=-1)["replica"].index
        x = rows[0][: 2 + 3 * index]
        plain = fds.compose(fds.clip_by_global_norm(0.1), fds.sgd(0.5))(loss_fn)
        alone, own = plain(plain.init(problem()[0]), x)
        state, metrics = step(state, x)
        torch.testing.assert_close(state.params, alone.params, rtol=100 * EPS, atol=100 * EPS)
        return metrics, own

    (metrics, one), (same, other) = fds.simulate(run, 2)
    assert_same_bits(metrics, same)
    torch.testing.assert_close(metrics["loss"], (2 * one["loss"] + 5 * other["loss"]) / 7)
    norms = torch.stack([one["grad_norm"], other["grad_norm"]])
    torch.testing.assert_close(metrics["grad_norm"], norms.square().mean().sqrt())
    assert int(metrics["rows"]) == 7


def test_module_buffers_are_averaged_in_every_call():
    layers = fds.Layers([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)], lambda out, y: (out - y).square().mean())

    def run():
        local, mesh = apart()
        step = fds.compose(local, fds.sgd(0.1))(layers)
        state = step.init(layers.init)
        x = torch.arange(32.0).view(8, 4).sin() * (1 + mesh["replica"].index)
        before = state.buffers["1.running_mean"]
        state, _ = step(state, (x, x[:, :1]))
        hidden = x @ step.params(step.init(layers.init))["0.weight"].T + step.params(step.init(layers.init))["0.bias"]
        return state.buffers, before * 0.9 + 0.1 * hidden.mean(0)

    (one, first), (other, second) = fds.simulate(run, 2)
    assert_same_bits(one, other)
    torch.testing.assert_close(one["1.running_mean"], (first + second) / 2)


def test_stages_of_a_pipeline_train_apart_too():
    layers = fds.Layers([nn.Linear(4, 8), torch.tanh, nn.Linear(8, 4), nn.Linear(4, 1)], nn.functional.mse_loss)
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]

    def run(stages):
        mesh = fds.mesh(pp=stages, replica=2)
        parts = [fds.pipeline(one_f_one_b, mesh["pp"], num_microbatches=2)] if stages > 1 else [fds.accumulate(2)]
        local = fds.local_updates(mesh["replica"], every=2)
        step = fds.compose(local, *parts, fds.clip_by_global_norm(0.1), fds.sgd(0.1))(layers)
        state, seen = step.init(layers.init), []
        for x in batches:
            x = x.chunk(2)[mesh["replica"].index]
            state, metrics = step(state, (x, x[:, :1]))
            seen.append((step.params(state), metrics["loss"], metrics["grad_norm"]))
        return seen

    staged, plain = fds.simulate(lambda: run(2), 4), fds.simulate(lambda: run(1), 2)
    for r, seen in enumerate(staged):
        torch.testing.assert_close(seen, plain[r % 2], rtol=1e-5, atol=1e-6)


def test_a_pipeline_resumes_between_two_turns(tmp_path):
    layers = fds.Layers([nn.Linear(4, 8), torch.tanh, nn.Linear(8, 1)], nn.functional.mse_loss)

    def run():
        mesh = fds.mesh(pp=2, replica=2)
        pipe = fds.pipeline(one_f_one_b, mesh["pp"], num_microbatches=2)
        step = fds.compose(fds.local_updates(mesh["replica"], every=3), pipe, fds.adamw(0.1))(layers)
        state = step.init(layers.init)
        x = torch.arange(16.0).view(4, 4).sin() * (1 + mesh["replica"].index)
        state, _ = step(state, (x, x[:, :1]))
        fds.save(tmp_path, state, step)
        fds.check_ranks(state, step)
        assert_same_bits(fds.load(tmp_path, step, layers.init)[0], state)

    fds.simulate(run, 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_turn_lost_comes_back_as_large_on_more_ranks(ranks, tmp_path):
    """The largest of nine numbers is sent in a turn: after nine, eight without a gradient, all have come."""
    went = torch.arange(1.0, 10.0)

    def run(calls, loads):
        way = {"outer": fds.sgd(1.0), "transport": transports.topk(0.1)}
        local, _ = apart(1, ranks=ranks if loads else 2, **way)
        step = fds.compose(local, fds.sgd(1.0))(lambda p, x: (p["w"] * x).mean(0).sum())
        fresh = {"w": torch.zeros(9)}
        state = fds.load(tmp_path, step, fresh)[0] if loads else step.init(fresh)
        for _ in range(calls):
            state, _ = step(state, went[None] * (not loads))
        fds.save(tmp_path, state, step)
        return step.params(state)["w"]

    (first, _), found = fds.simulate(lambda: run(1, False), 2), fds.simulate(lambda: run(9, True), ranks)
    assert not torch.equal(first, -went)
    for got in found:
        torch.testing.assert_close(got, -went, rtol=1e-6, atol=0)


@pytest.mark.parametrize("donated", [False, True])
def test_a_state_stays_as_it_was_unless_it_is_given_up(donated):
    def run():
        step, state, rows, _ = train(2, *[fds.donate()] * donated, fragments=2)
        before, calls = snapshot(state), state.calls
        new, _ = step(state, rows[2])
        if not donated:
            assert_same_bits(state, before)
            again, _ = step(state, rows[2])
            assert_same_bits(again, new)
        assert int(new.calls) == int(calls) + 1
        return snapshot(new)

    kept, given = (fds.simulate(run, 2) for donated in (False, True))
    assert_same_bits(given[1], kept[1])


def test_narrow_parameters_agree_in_float32_and_frozen_ones_are_not_sent():
    def run():
        step, state, _, seen = train(3, fds.freeze("v"), dtype=torch.bfloat16)
        assert state.opt["anchor"].keys() == {"w"}
        assert state.opt["anchor"]["w"].dtype is torch.float32
        assert_same_bits(state.opt["anchor"]["w"].bfloat16(), state.params["w"])
        assert step.describe(state).synchronized == 256 * 4
        return seen[-1][0]["w"]

    one, other = fds.simulate(run, 2)
    assert_same_bits(one, other)


@pytest.mark.sweep
@pytest.mark.parametrize("way", [None, transports.quantized(8, group=32)])
@pytest.mark.parametrize("fragments", [1, 3])
def test_what_is_sent_is_what_is_told(way, fragments):
    def run(every):
        step, state, rows, _ = train(1, every=every, transport=way, fragments=fragments)
        told, sent = step.describe(state), []
        for x in rows[1:7]:
            with fds.collectives.counted() as traffic:
                state, _ = step(state, x)
            sent.append(sum(count.bytes_sent for count in traffic.counts.values()))
        return told, sent

    (told, sent), (_, quiet) = (fds.simulate(lambda every=every: run(every), 2)[0] for every in (3, 300))
    turns = [n - quiet[0] for n in sent]  # beside the message of every call: loss and metrics
    assert turns[:3] == turns[3:]
    assert max(turns) == told.synchronized
    assert round(sum(turns) / 6) == told.sent["after"]
    assert turns.count(0) == (0 if fragments == 3 else 4)
    assert f"{told.synchronized:,} bytes sent at once" in str(told)
    if way is None and fragments == 1:  # of coded messages nobody says what they are, of parts the last is told
        assert sum(one.bytes_sent for one in told.messages) == max(sent)


def test_what_cannot_be_is_refused():
    def run():
        mesh = fds.mesh(replica=-1)
        axis = mesh["replica"]
        for arguments, what in (
            ({"axis": "replica"}, "axis is not an axis"),
            ({"every": 0}, "every is a count"),
            ({"every": True}, "every is a count"),
            ({"outer": 0.7}, "outer is not an optimizer"),
            ({"outer": fds.sgd}, "outer is not an optimizer"),
            ({"outer": fds.lamb()}, "treats every element by itself"),
            ({"transport": "quantized"}, "transport is not a transport"),
            ({"transport": transports.quantized}, "transport is not a transport"),
            ({"fragments": 0}, "a call of its own"),
            ({"fragments": 5}, "a call of its own"),
        ):
            given = {"axis": axis, "every": 4, **arguments}
            with pytest.raises(ComposeError, match=what):
                fds.local_updates(given.pop("axis"), **given)
        local = fds.local_updates(axis, every=2)
        with pytest.raises(ComposeError, match=r"already filled|write it once"):
            fds.compose(local, fds.local_updates(axis, every=3), fds.sgd(0.1))(loss_fn)
        with pytest.raises(ComposeError, match="two axes of one mesh"):
            fds.compose(local, fds.shard_optimizer(axis), fds.sgd(0.1))(loss_fn)
        with pytest.raises(ComposeError, match="live elsewhere"):
            fds.compose(local, fds.offload(masters="host"), fds.sgd(0.1))(loss_fn)
        odd = attrs.evolve(fds.sgd(0.1), init=lambda segments, *, params: {"anchor": list(params)})
        with pytest.raises(ComposeError, match="slot that ranks need"):
            fds.compose(local, odd)(loss_fn).init(problem()[0])
        return mesh

    mesh, _ = fds.simulate(run, 2)
    with pytest.raises(MeshError):
        fds.local_updates(mesh["replica"], every=2)
