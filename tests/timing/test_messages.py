"""`fds.messages`: every message, once, with its bytes and times; as predicted, and without another bit."""

import contextlib
import json
import math
import time
from collections import Counter
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

import fds
from fds.collectives import worlds
from fds.collectives.links import Collective
from fds.errors import ConfigError, FdsError, MeshError
from fds.step import Description, Transport
from fds.timing import MessageTable, _messages
from tests import ranks
from tests.bits import bits
from tests.timing.compositions import CASES, OTHERS, run, table_of
from tests.timing.test_timed import Ticks
from tests.traffic import SMALL
from tests.unit.step.problem import BATCH, make, make_params

# a directory of leaves is one process's
REAL = [name for name, (shape, _, _) in CASES.items() if math.prod(shape.values()) == 2 and "disk" not in name]


# rounds in which ranks agree on an order of buckets, ranks with updates of their own, notes of gradient maps
MORE = {
    "1F1B, stage 2": {"step": 5},
    "1F1B, stage 3, 16 bits": {"step": 8},
    "stage 3, weights of a Mean": {"step": 1},
    "stage 2, Mean, scale, notes": {"notes": 1},
    "local updates, stage 1": {"scalars": 2},
}


def expected_small_ones(name):
    """Ranks decide a call in one message, and end it by one where a disk may fail, or hear of stages in one."""
    counts = Counter({"scalars": 1, **MORE.get(name, {})})
    counts["what lives elsewhere"] = int("disk" in name or "host" in name)
    counts["weights"] = int("Mean" in name)  # before the first backward, or the last
    piped = any(word in name for word in ("1F1B", "GPipe", "ZB"))
    counts["batch"] = int(piped or "tensor" in name)  # before anything else
    counts["step"] += piped + ("stage 3" in name)
    return +counts


def small_ones(table):
    """Return the small messages of a call, which `describe` predicts."""
    counts = Counter()
    for row in table.rows:
        assert row.kind.op != "exchange", "ranks tell each other in words what is new or goes wrong, in no steady call"
        if row.kind.what in SMALL and (row.kind.what, row.predicted_count) != ("step", None):  # an optimizer's own
            assert row.predicted_count == row.count, row
            counts[row.kind.what] += row.count // table.calls
    return counts


def assert_as_predicted(table, name):
    assert table.rows and table.count
    for row in table.rows:
        assert row.predicted_count == row.count, row
        assert row.kind.op == "exchange" or row.predicted_bytes == row.bytes_sent, row
        assert row.timed == row.count and not row.at_most
    assert small_ones(table) == expected_small_ones(name)


@pytest.mark.parametrize("name", REAL)
def test_real_ranks_send_the_messages_that_describe_predicts(name):
    for table in ranks.run(table_of, name):
        assert_as_predicted(table, name)
        assert table.calls == 2 and [one.rank for one in table.ranks] == [0, 1]
        assert all(0 <= one.for_others_ms <= one.waited_ms for one in table.ranks)
        assert table.waited_ms <= sum(row.latency_ms for row in table.rows)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REAL])
def test_simulated_ranks_send_the_messages_that_describe_predicts(name):
    for table in fds.simulate(lambda: table_of(name), math.prod(CASES[name][0].values())):
        assert_as_predicted(table, name)


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_send_the_small_messages_that_describe_predicts(name):
    for table in fds.simulate(lambda: table_of(name), math.prod(OTHERS[name][0].values())):
        assert small_ones(table) == expected_small_ones(name)


def test_simulated_ranks_send_what_real_ones_send():
    def counts(tables):
        return [[(row.kind, row.count, row.bytes_sent, row.buckets) for row in one.rows] for one in tables]

    name = "stage 3, accumulated"
    assert counts(fds.simulate(lambda: table_of(name), 2)) == counts(ranks.run(table_of, name))


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2, accumulated", "stage 3", "1F1B", "1F1B, stage 1"])
def test_a_step_that_is_watched_is_bit_for_bit_the_one_that_is_not(name):
    size = math.prod(CASES[name][0].values())

    watched, plain = (fds.simulate(lambda every=every: run(name, every=every)[1], size) for every in (1, None))
    for one, other in zip(watched, plain, strict=True):
        pairs = zip(fds.tree.leaves(one), fds.tree.leaves(other), strict=True)
        assert all(bits(a).equal(bits(b)) for a, b in pairs)


def sharded(*parts, stage=1, axis=None, **options):
    axis = fds.mesh(dp=-1)["dp"] if axis is None else axis
    return make(*parts, fds.shard_optimizer(axis, stage=stage, **options))


def test_nothing_is_watched_in_the_calls_between():
    def watch():
        step, messages, seen = sharded(), fds.messages(every=2), []
        state = step.init(make_params())
        for _ in range(4):
            with messages(state):
                seen.append(len(worlds.current().counters))
                state, _ = step(state, BATCH)
        with fds.messages(every=None)(state):
            seen.append(len(worlds.current().counters))
        return seen, messages.table.calls

    assert fds.simulate(watch, 2) == [([0, 1, 0, 1, 0], 2)] * 2


def in_ticks(work, size):
    """Return what ranks return, whose clock goes on by what they are told."""
    ticks = Ticks()
    with mock.patch.object(time, "perf_counter", ticks):
        return fds.simulate(lambda: work(ticks), size)


def test_who_comes_late_is_waited_for():
    def train(ticks):
        axis = fds.mesh(dp=-1)["dp"]

        def loss(params, batch):
            if axis.index == 1:
                ticks.spend(50)
            return (params["net"]["w"] * batch["x"].sum()).sum()

        step, messages = fds.compose(fds.shard_optimizer(axis, stage=1), fds.sgd(0.1))(loss), fds.messages()
        state = step.init({"net": {"w": torch.ones(3)}})
        state, _ = step(state, BATCH)
        for _ in range(3):
            with messages(state):
                state, _ = step(state, BATCH)
        return messages.summary()

    for table in in_ticks(train, 2):
        assert [(one.waited_ms, one.for_others_ms) for one in table.ranks] == [pytest.approx((150, 150)), (0, 0)]
        late = [row for row in table.rows if row.for_others.max_ms]  # simulated ranks take turns: some wait longer
        assert {row.kind.what for row in late} <= {"gather", "reduce"}
        assert sum(row.for_others.max_ms * row.count for row in late) == pytest.approx(150)
        assert all(row.for_others.min_ms == 0 and 2 * row.for_others.mean_ms == row.for_others.max_ms for row in late)


def test_who_is_late_in_turn_is_found_message_by_message():
    def send(ticks):
        axis, messages = fds.mesh(dp=-1)["dp"], fds.messages()
        state = make().init(make_params())
        x = torch.ones(4)
        with messages(state):
            for i in range(4):
                if axis.index == i % 2:
                    ticks.spend(10)
                axis.all_reduce(x)
        return [one.for_others_ms for one in messages.summary().ranks]

    first, second = in_ticks(send, 2)[0]
    assert first == pytest.approx(20) and second == pytest.approx(10)  # both are waited for, whatever the sums are


def test_ranks_of_other_groups_are_not_compared():
    def send(ticks):
        mesh, messages = fds.mesh(a=2, b=2), fds.messages()
        state = make().init(make_params())
        with messages(state):
            if mesh.rank == 1:
                ticks.spend(10)
            mesh["b"].all_reduce(torch.ones(1))
        return [one.for_others_ms for one in messages.summary().ranks]

    assert in_ticks(send, 4)[0] == pytest.approx([10, 0, 0, 0])


def test_times_and_bandwidths_of_each_operation():
    def send(ticks):
        axis, messages = fds.mesh(dp=-1)["dp"], fds.messages()
        state, part, whole = make().init(make_params()), torch.ones(250), torch.ones(1000)
        with messages(state):
            for work in (
                lambda: axis.start_all_reduce(whole),
                lambda: axis.start_all_gather(whole, part),
                lambda: axis.start_reduce_scatter(part, whole),
                lambda: axis.start_all_to_all(whole.clone(), whole),
                lambda: axis.start_broadcast(whole, 0),
            ):
                started = work()
                if axis.index == 3:  # all others are there
                    ticks.spend(4)
                started.wait()
                started.wait()  # which counts once
            axis.barrier()
        return messages.table

    table = in_ticks(send, 4)[3]
    speeds = {row.kind.op: (row.algorithm_gb_per_s, row.bus_gb_per_s) for row in table.rows}
    assert {row.kind.num_bytes for row in table.rows} == {4000, 1}
    assert [row.latency_ms for row in table.rows] == pytest.approx([4] * 5 + [0]) and table.waited_ms == 0
    own = 4000 / 4e-3 / 1e9
    want = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75, "broadcast": 1}
    assert speeds.pop("barrier") == (None, None)
    assert speeds == {op: pytest.approx((own, own * factor)) for op, factor in want.items()}
    row = table.rows[0]
    assert (row.shortest_ms, row.longest_ms, row.timed) == (pytest.approx(4), pytest.approx(4), 1)
    assert row.to_dict()["op"] == "all_reduce" and json.loads(json.dumps(table.to_dict()))["calls"] == 1


def test_the_table_says_what_the_messages_were_for(capsys):
    def watch():
        messages = fds.messages(ops=["reduce_scatter", "all_reduce"], verbose=True)
        step = sharded(fds.clip_by_global_norm(1.0))
        state = step.init(make_params())
        state, _ = step(state, BATCH)
        assert messages.metrics() == {}
        assert str(messages) == "Messages of 0 calls: 0, 0 bytes sent, 0.00 ms waited"
        with messages(state):
            state, _ = step(state, BATCH)
        return messages.summary(step.describe(state)), messages.metrics()

    table, metrics = fds.simulate(watch, 2)[0]
    lines = str(table).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["reduce", "reduce_scatter"], ["scalars", "all_reduce"]]
    assert len(lines) == 6 and lines[-1].startswith("rank 1 waited ")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in printed] == [["call 2", " reduce"], ["call 2", " scalars"]]  # of one rank
    sent = {row.kind.op: row.bytes_sent for row in table.rows}
    assert metrics["messages"] == 2 and metrics["messages_bytes_sent"] == sum(sent.values())
    assert metrics["messages_all_reduce"] == 1 and metrics["messages_all_reduce_bytes_sent"] == sent["all_reduce"]
    waited = [metrics[f"messages_{op}_waited_ms"] for op in sent]
    assert metrics["messages_waited_ms"] == pytest.approx(sum(waited))


def test_the_caller_is_the_line_that_asks():
    def watch():
        axis = fds.mesh(dp=-1)["dp"]

        def loss(params, batch):
            return fds.collectives.all_reduce((params["net"]["w"] * batch["x"].sum()).sum(), axis)

        step, messages = fds.compose(fds.shard_optimizer(axis), fds.sgd(0.1))(loss), fds.messages(debug=True)
        state = step.init({"net": {"w": torch.ones(3)}})
        with messages(state):
            step(state, BATCH)
        return messages.summary(step.describe(state))

    table = fds.simulate(watch, 2)[0]
    rows = {row.kind.what: row for row in table.rows}
    forward = rows[""].callers[0]
    assert forward.startswith("tests.timing.test_messages:") and forward.endswith(" loss")
    assert rows[""].predicted_count is None  # it is the loss's own
    assert any(caller.startswith("fds.step.agreement:") for caller in rows["scalars"].callers)
    assert "asked for by" in str(table)


def test_what_the_step_has_not_learned_yet_is_a_bound_or_unknown():
    def fresh():
        mesh = fds.mesh(pp=2, dp=2)
        step = sharded(axis=mesh["dp"], stage=3, bucket_bytes=8)
        bound = [one for one in step.describe(step.init(make_params())).messages if one.kind.what == "gather"]
        layers = fds.Layers([nn.Linear(3, 4), nn.Linear(4, 2)], nn.MSELoss())
        piped = fds.compose(fds.pipeline(fds.plans.gpipe, mesh["pp"], num_microbatches=2), fds.sgd(0.1))(layers)
        unknown = piped.describe(piped.init(layers.init)).messages
        return all(one.at_most for one in bound), bound, [one.kind.what for one in unknown]

    for at_most, bound, unknown in fds.simulate(fresh, 4):
        assert at_most and bound and unknown == ["step", "batch", "scalars"]
    none_came = MessageTable((), 3).beside(Description({}, "", messages=tuple(bound)))
    assert none_came.rows[0].predicted_count == 3 * bound[0].count
    assert f"<= {3 * bound[0].count}" in str(none_came)


class Doubled(Transport):
    """A transport of one's own."""

    def gather(self, axis, part, whole):
        axis.start_all_reduce(torch.ones(1)).wait()
        return super().gather(axis, part, whole)


def test_what_others_send_is_counted_and_not_predicted():
    def watch(step):
        state, messages = step.init(make_params()), fds.messages()
        state, _ = step(state, BATCH)
        with messages(state):
            state, _ = step(state, BATCH)
        rows = messages.summary(step.describe(state)).rows
        return {(row.kind.what, row.kind.op): row.predicted_count for row in rows}

    @fds.step.transform
    def doubled():
        return lambda step: fds.step.fill(step, gather=fds.step.Gather(transport=Doubled()))

    found = fds.simulate(lambda: watch(sharded(doubled())), 2)[0]
    assert found["gather", "all_gather"] is None and found["gather", "all_reduce"] is None
    assert found["reduce", "reduce_scatter"] == 1
    lamb = lambda: fds.compose(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1), fds.lamb(0.1))(make().loss)
    found = fds.simulate(lambda: watch(lamb()), 2)[0]
    assert found["optimizer", "all_reduce"] is None and found["gather", "all_gather"] == 1


def test_a_call_that_raises_is_not_counted():
    def watch():
        step, messages = sharded(), fds.messages()
        state = step.init(make_params())
        with contextlib.suppress(ZeroDivisionError), messages(state):
            step(state, BATCH)
            raise ZeroDivisionError
        return messages.table.calls, messages.last, len(worlds.current().counters)

    assert fds.simulate(watch, 2) == [(0, (), 0)] * 2


def test_ranks_that_watch_other_calls_are_not_compared():
    def watch():
        step, index = sharded(), fds.mesh(dp=-1)["dp"].index
        state, messages = step.init(make_params()), fds.messages(every=1 + index)
        for _ in range(3):
            with messages(state):
                state, _ = step(state, BATCH)
        return messages.summary()

    for table in fds.simulate(watch, 2):
        assert all(row.for_others is None for row in table.rows if row.kind.what != "scalars") and len(table.ranks) == 2


class Event:
    """A moment on a GPU, which says that it has come when it is told so."""

    made: ClassVar = []
    has_come = False

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at = len(Event.made)
        Event.made.append(self)

    def record(self, stream):
        pass

    def query(self):
        return Event.has_come

    def elapsed_time(self, other):
        return 2.0 * (other.at - self.at)


def test_a_gpu_is_not_waited_for_and_what_is_captured_has_no_times():
    Event.made, Event.has_come = [], False
    axis, gpu = mock.Mock(size=2, index=0, ranks=(0, 1)), torch.device("cuda", 0)
    capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
    state, messages = make().init(make_params()), fds.messages()
    made = _messages.Log(gpu, messages.ops, debug=False)
    log = mock.patch.object(_messages, "Log", return_value=made)
    with mock.patch("torch.cuda.Event", Event), mock.patch("torch.cuda.current_stream"), capturing as captures, log:
        with messages(state):
            for kind in ("plain", "captured", "on the host"):
                captures.return_value = kind == "captured"
                one = Collective("all_reduce", "dp", (2,), torch.float32, what=kind, on_gpu=kind != "on the host")
                made.add(one, axis)
                work = made.watched(one, mock.Mock())
                work.wait()
                work.work.wait.assert_called_once_with()
        assert messages.metrics() == {} and messages.table.calls == 0 and len(Event.made) == 3
        Event.has_come = True
        plain, captured, host = messages.last
    assert (plain.latency_ms, plain.waited_ms) == (4.0, 2.0)
    assert (captured.latency_ms, captured.waited_ms) == (None, None) and "no times" in str(captured)
    assert 0 <= host.waited_ms <= host.latency_ms
    assert [row.timed for row in messages.table.rows] == [1, 0, 1] and messages.table.rows[1].algorithm_gb_per_s is None


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda: fds.messages(every=0), "every"),
        (lambda: fds.messages(every=True), "every"),
        (lambda: fds.messages(every="2"), "every"),
        (lambda: fds.messages(ops="all_reduce"), "ops"),
        (lambda: fds.messages(ops=3), "ops"),
        (lambda: fds.messages(ops=["all_reduc"]), "ops"),
        (lambda: fds.messages(ops=[None]), "ops"),
        (lambda: fds.messages(verbose=1), "verbose"),
        (lambda: fds.messages(debug="yes"), "debug"),
        (lambda: fds.messages()(None).__enter__(), "messages"),
        (lambda: fds.messages().summary("description"), "description"),
        (lambda: fds.messages().table.beside("description"), "description"),
    ],
)
def test_arguments_of_another_kind_are_refused(wrong, where):
    with pytest.raises(FdsError) as refused:
        wrong()
    assert where in refused.value.where


def test_an_argument_that_there_is_not_is_refused():
    with pytest.raises(FdsError, match="op"):
        fds.messages(op=["all_reduce"])


def test_comms_logger_says_what_is_watched():
    def of(**keys):
        return fds.config.TrainingConfig.of({"train_batch_size": 8, "comms_logger": keys}).messages(fds.mesh(dp=1))

    off, all_ = of(), of(enabled=True, verbose=True, debug=True, prof_ops=["all_reduce"])
    assert off.every is None and (all_.every, all_.verbose, all_.debug) == (1, True, True)
    assert all_.ops == frozenset(fds.timing.OPERATIONS)  # prof_all is true
    some = of(enabled=True, prof_all=False, prof_ops=["all_reduce", "all_gather_into_tensor", "isend", "scatter"])
    assert some.ops == {"all_reduce", "all_gather", "send"} and of(enabled=True, prof_all=False).ops == frozenset()
    with pytest.raises(ConfigError, match="did you mean 'all_gather'") as refused:
        of(enabled=True, prof_all=False, prof_ops=["all_gathr"])
    assert refused.value.where == "comms_logger.prof_ops"
    with pytest.raises(MeshError):
        fds.config.TrainingConfig.of({"train_batch_size": 8}).messages(None)
