"""`fds.monitor`: a run that is watched is the one that is not, a failing sink ends no run, nothing waits for a GPU."""

import gc
from unittest import mock

import attrs
import pytest
import torch

import fds
from fds.display import readings
from fds.errors import FdsError
from tests.bits import bits
from tests.monitors.runs import Kept, batch, step_and_state, trained, values


def test_a_run_that_is_watched_is_bit_for_bit_the_one_that_is_not(tmp_path):
    before = torch.get_rng_state()
    step, plain = step_and_state()
    for _ in range(5):
        plain, _ = step(plain, batch(plain))
    sinks = fds.monitors.CSV(tmp_path), fds.monitors.JSONL(tmp_path / "log.jsonl"), Kept()
    with fds.monitor(*sinks, batch_size=4) as monitor:
        watched = trained(*step_and_state(), 5, monitor)
    assert all(bits(a).equal(bits(b)) for a, b in zip(fds.tree.leaves(plain), fds.tree.leaves(watched), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_tags_are_deepspeeds_and_x_is_samples():
    kept = Kept()
    with fds.monitor(kept, batch_size=32) as monitor:
        trained(*step_and_state(), 2, monitor)
    tags = ["train_loss", "lr", "grad_norm", "skipped", "half"]
    assert {event.tag for event in kept.events} == {f"Train/Samples/{tag}" for tag in tags}
    assert [event.x for event in kept.events if event.tag.endswith("lr")] == [32, 64]
    assert values(kept, "Train/Samples/skipped") == [(32, 0), (64, 0)]
    assert all(type(event.value) is not bool for event in kept.events)  # JSON's `false` is no number


def test_tags_x_and_names_may_be_ones_own():
    kept = Kept()
    with fds.monitor(kept, x=lambda calls: calls * 0.5, names=["loss", "none such"], tags=lambda it: f"gpt/{it}") as m:
        with pytest.warns(UserWarning, match="the first metrics have no none such"):
            state = trained(*step_and_state(), 2, m)
        m.note(state, {"eval_loss": torch.tensor(2.5), "text": "left out", "many": torch.ones(3)})
    assert [(event.tag, event.x) for event in kept.events] == [
        ("gpt/loss", 0.5),
        ("gpt/loss", 1.0),
        ("gpt/eval_loss", 1),
    ]
    steps = Kept()
    trained(*step_and_state(), 1, fds.monitor(steps, names=["loss"]))
    assert [(event.tag, event.x) for event in steps.events] == [("Train/Steps/train_loss", 1)]


def test_each_sink_has_its_turn_and_notes_come_to_all():
    often, seldom = Kept(), Kept()
    seldom.every = 3
    with fds.monitor(often, seldom) as monitor:
        state = trained(*step_and_state(), 7, monitor)
        monitor.note(state, {"eval_loss": 1.0})
    assert [x for x, _ in values(often, "Train/Steps/train_loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert [x for x, _ in values(seldom, "Train/Steps/train_loss")] == [
        3,
        6,
    ]  # whichever call a resumed run begins with
    assert values(seldom, "Train/Steps/eval_loss") == values(often, "Train/Steps/eval_loss") == [(7, 1.0)]


def test_the_first_rank_alone_writes():
    def run():
        kept = Kept()
        with fds.monitor(kept) as monitor:
            trained(*step_and_state(), 2, monitor)
        return len(kept.events)

    first, *others = fds.simulate(run, 3)
    assert first > 0 and others == [0, 0]


class Failing(Kept):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def __repr__(self):
        return "Failing()"

    def write(self, events):
        super().write(events)
        raise self.error

    def close(self):
        raise AssertionError("it is left out")


def test_a_sink_that_fails_warns_once_and_the_others_go_on(tmp_path):
    kept, failing = Kept(), Failing(OSError("no space left"))
    with (
        pytest.warns(UserWarning, match=r"Failing\(\) failed.*OSError: no space left") as warned,
        fds.monitor(failing, kept) as monitor,
    ):
        trained(*step_and_state(), 3, monitor)
    assert len(warned) == 1 and len(failing.events) == 5 and len(kept.events) == 15


def test_a_file_that_is_not_a_sinks_stays_as_it_is(tmp_path):
    foreign = tmp_path / "Train_Steps_train_loss.csv", tmp_path / "log.jsonl"
    for path in foreign:
        path.write_text("mine\n")
    sinks = fds.monitors.CSV(tmp_path), fds.monitors.JSONL(foreign[1])
    with pytest.warns(UserWarning, match="is left out") as warned, fds.monitor(*sinks, names=["loss"]) as monitor:
        trained(*step_and_state(), 2, monitor)
    assert len(warned) == 2 and [path.read_text() for path in foreign] == ["mine\n"] * 2


def test_an_interrupt_is_no_failure_of_a_sink():
    sink = Kept()
    sink.write = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trained(*step_and_state(), 1, fds.monitor(sink))


def test_what_waits_is_written_when_the_monitor_is_dropped_and_the_sinks_are_closed():
    class Closed(Kept):
        closed = 0

        def close(self):
            self.closed += 1

    kept = Closed()
    monitor = fds.monitor(kept)
    trained(*step_and_state(), 1, monitor)
    del monitor
    gc.collect()
    assert kept.closed == 1
    with fds.monitor(kept) as monitor:
        pass
    monitor.close()
    assert kept.closed == 2
    with pytest.raises(FdsError, match="closed"):
        monitor(step_and_state()[1], {})


class Event:
    """What torch.cuda.Event is, for a device that works when it is told to."""

    done = False

    def record(self, stream):
        pass

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


class OnGPU(torch.Tensor):
    """A number that says that it is on a GPU, and is refused to whoever waits for it there."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    def to(self, device, *, non_blocking):
        assert device == "cpu" and non_blocking
        return self.as_subclass(torch.Tensor).clone()

    def tolist(self):
        raise AssertionError("this waits")

    item = __float__ = __bool__ = tolist


def test_a_gpu_is_not_waited_for_and_what_it_has_computed_is_written_at_a_later_call():
    events, kept = [], Kept()
    _, state = step_and_state()

    def made():
        events.append(Event())
        return events[-1]

    with mock.patch("torch.cuda.Event", made), mock.patch("torch.cuda.current_stream"):
        monitor = fds.monitor(kept)
        at = lambda calls: attrs.evolve(state, calls=torch.tensor(calls))
        gpu = lambda value: {"loss": torch.tensor(value).as_subclass(OnGPU), "lr": 0.1}
        monitor(at(1), gpu(1.0))
        monitor(at(2), gpu(2.0))
        assert len(events) == 2 and not kept.events
        events[1].done = True
        monitor(at(3), gpu(3.0))
        assert not kept.events  # the order of calls is kept
        events[0].done = True
        monitor(at(4), gpu(4.0))
        assert values(kept, "Train/Steps/train_loss") == [(1, 1.0), (2, 2.0)]
        monitor.close()
    assert values(kept, "Train/Steps/train_loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert readings.read([{"a": torch.tensor(1.0)}]) == [{"a": 1.0}]


@pytest.mark.parametrize(
    ("made", "where"),
    [
        (lambda: fds.monitor(3), "monitor"),
        (lambda: fds.monitor(Kept), "monitor"),
        (lambda: fds.monitor(mock.Mock(every=0)), ".every"),
        (lambda: fds.monitor(batch_size=0), "batch_size"),
        (lambda: fds.monitor(batch_size=True), "batch_size"),
        (lambda: fds.monitor(batch_size=1, x=lambda calls: calls), "monitor"),
        (lambda: fds.monitor(x=3), "monitor, x"),
        (lambda: fds.monitor(x=str), "monitor, x"),
        (lambda: fds.monitor(names="loss"), "names"),
        (lambda: fds.monitor(names=[1]), "names"),
        (lambda: fds.monitor(names=3), "names"),
        (lambda: fds.monitor(names=(name for name in ["loss"])), "names"),
        (lambda: fds.monitor(x=lambda: 1), "monitor, x"),
        (lambda: fds.monitor(tags={"loss": "x"}), "tags"),
        (lambda: fds.monitor(tags=len), "tags"),
        (lambda: fds.monitor()({}, {}), "monitor"),
        (lambda: fds.monitor()(step_and_state()[1], 3.0), "monitor"),
        (lambda: fds.monitor().note(step_and_state()[1], None), "monitor"),
        (lambda: fds.monitors.CSV(3), "CSV"),
        (lambda: fds.monitors.CSV("x", every=0), "CSV, every"),
        (lambda: fds.monitors.JSONL(""), "JSONL"),
        (lambda: fds.monitors.JSONL("x", every=1.5), "JSONL, every"),
        (lambda: fds.monitors.Console(every="1"), "Console, every"),
        (lambda: fds.monitors.Console(console="stdout"), "Console"),
        (lambda: fds.monitors.TensorBoard(None), "TensorBoard"),
        (lambda: fds.monitors.TensorBoard("x", flush_seconds=0), "flush_seconds"),
        (lambda: fds.monitors.WandB(3), "WandB, project"),
        (lambda: fds.monitors.WandB(mode="loud"), "WandB, mode"),
        (lambda: fds.monitors.Comet(mode="append"), "Comet, mode"),
        (lambda: fds.monitors.Comet(online="yes"), "Comet, online"),
        (lambda: fds.monitors.Comet(api_key=b""), "Comet, api_key"),
    ],
)
def test_arguments_of_another_kind_are_refused(made, where):
    with pytest.raises(FdsError) as refused:
        made()
    assert where in refused.value.where


def test_what_was_meant_by_something_that_is_no_sink_is_said(tmp_path):
    meant = {
        "runs": "fds.monitors.CSV('runs')",
        tmp_path: f"fds.monitors.CSV('{tmp_path}')",
        fds.monitors.Console: "Console(...): it is to be called",
        (fds.monitors.Console(),): "monitor(*sinks)",
        3: "",
    }
    for wrong, hint in meant.items():
        with pytest.raises(FdsError, match="not a sink") as refused:
            fds.monitor(wrong)
        assert refused.value.hint == hint


@pytest.mark.parametrize("name", ["TensorBoard", "WandB", "Comet"])
def test_a_package_that_is_missing_is_named_with_its_extra(name):
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(FdsError, match=r"pip install 'fds\["),
    ):
        getattr(fds.monitors, name)("runs")


def test_a_name_that_the_first_metrics_have_not_is_warned_of_once():
    step, state = step_and_state()
    monitor = fds.monitor(Kept(), names=["los", "lr"])
    after, metrics = step(state, batch(state))
    with pytest.warns(UserWarning, match="no los; did you mean 'loss'"):
        monitor(after, metrics)
    monitor(after, metrics)
    assert repr(monitor).startswith("monitor(<") and repr(fds.monitor()) == "monitor(nothing is written here)"


def test_a_state_that_is_not_the_one_that_came_with_the_metrics_is_warned_of_once():
    step, state = step_and_state()
    after, metrics = step(state, batch(state))
    monitor = fds.monitor(Kept())
    with pytest.warns(UserWarning, match="rows are written a call early"):
        monitor(state, metrics)
    monitor(state, metrics)
    right = fds.monitor(Kept())
    right(state, {**metrics, "skipped": torch.tensor(True), "step": state.step})  # of a skipped step they are equal
    with pytest.warns(UserWarning, match="of update 1, and the state is after 0"):
        right(state, metrics)
    fds.monitor(Kept())(after, metrics)


@pytest.mark.parametrize(
    "make", [fds.monitors.CSV, fds.monitors.TensorBoard, lambda at: fds.monitors.JSONL(at / "log")]
)
def test_a_sink_that_can_write_nothing_is_refused_when_it_is_made(make, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(FdsError, match="nothing can be written there"):
        make(tmp_path / "file")
    with pytest.raises(FdsError, match="a directory, not a file"):
        fds.monitors.JSONL(tmp_path)
