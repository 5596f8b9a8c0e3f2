"""What sinks write, read back; and that a run that was killed and goes on has every step once."""

import csv
import io
import json

import pytest
import rich.console

import fds
from fds.display import read_log
from fds.errors import FdsError
from fds.monitors import CSV, JSONL, Console, TensorBoard
from tests.monitors.runs import Kept, step_and_state, trained, values

LOSS = "Train/Samples/train_loss"


def table(folder, tag):
    with open(folder / f"{tag.replace('/', '_')}.csv", newline="") as file:
        return list(csv.reader(file))


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def logged(tmp_path, tag):
    """Return what the three kinds of files say, as (x, value)."""
    head, *rows = table(tmp_path / "csv", tag)
    assert head == ["step", tag.rpartition("/")[2]]
    return (
        [(int(x), float(value)) for x, value in rows],
        [(line["step"], line[tag]) for line in read_log(tmp_path / "log.jsonl") if tag in line],
        scalars(tmp_path / "tb", tag),
    )


def sinks(tmp_path):
    return CSV(tmp_path / "csv"), JSONL(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "tb")


def test_all_files_say_what_the_metrics_said(tmp_path):
    kept = Kept()
    with fds.monitor(*sinks(tmp_path), kept, batch_size=8) as monitor:
        state = trained(*step_and_state(), 4, monitor)
        monitor.note(state, {"eval_loss": 0.25})
    for tag in (LOSS, "Train/Samples/half", "Train/Samples/lr"):
        *exact, single = logged(tmp_path, tag)
        assert exact == [values(kept, tag)] * 2 and [x for x, _ in single] == [8, 16, 24, 32]
        assert [value for _, value in single] == pytest.approx([value for _, value in values(kept, tag)], rel=6e-8)
    assert logged(tmp_path, "Train/Samples/eval_loss") == ([(32, 0.25)],) * 3
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert next(iter(line)) == "step" and line["seconds"] >= 0


def test_a_run_that_was_killed_behind_its_save_has_every_step_once(tmp_path):
    whole = Kept()
    trained(*step_and_state(), 8, fds.monitor(whole, batch_size=8))
    step, state = step_and_state()
    killed = fds.monitor(*sinks(tmp_path), batch_size=8)
    state = trained(step, state, 3, killed)
    fds.save(tmp_path / "save", state, step)
    trained(step, state, 2, killed)
    killed._queue.sinks[2].sink._writer.flush()  # what reaches the disk by itself, ten seconds later
    for file in (*(tmp_path / "csv").iterdir(), tmp_path / "log.jsonl"):  # killed while it wrote
        with file.open("a") as f:
            f.write('{"step": 4' if file.suffix == ".jsonl" else "4")
    assert [len(each) for each in logged_upto(tmp_path)] == [6, 5, 5]

    step, first = step_and_state()
    state, _ = fds.load(tmp_path / "save", step, first.params)
    with fds.monitor(*sinks(tmp_path), batch_size=8) as monitor:
        trained(step, state, 5, monitor)
    *exact, single = logged(tmp_path, LOSS)
    assert exact == [values(whole, LOSS)] * 2 and [x for x, _ in single] == [x for x, _ in values(whole, LOSS)]
    killed.close()


def test_half_a_row_of_a_killed_process_goes(tmp_path):
    step, state = step_and_state()
    with fds.monitor(CSV(tmp_path), names=["lr"]) as monitor:
        state = trained(step, state, 9, monitor)
    with (tmp_path / "Train_Steps_lr.csv").open("a") as file:
        file.write("1")  # of "10,0.1"
    with fds.monitor(CSV(tmp_path), names=["lr"]) as monitor:
        trained(step, state, 1, monitor)
    assert [row[0] for row in table(tmp_path, "Train/Steps/lr")] == ["step", *map(str, range(1, 11))]


def logged_upto(tmp_path):
    return table(tmp_path / "csv", LOSS)[1:], read_log(tmp_path / "log.jsonl"), scalars(tmp_path / "tb", LOSS)


def test_a_loop_that_goes_back_to_an_earlier_state_has_every_step_once(tmp_path):
    step, state = step_and_state()
    with fds.monitor(*sinks(tmp_path), batch_size=8) as monitor:
        step, state = step_and_state()
        kept = fds.tree.map(lambda x: x.clone(), state)
        trained(step, state, 4, monitor)
        trained(step, kept, 2, monitor)
    assert [[x for x, _ in rows] for rows in logged(tmp_path, LOSS)] == [[8, 16]] * 3


def test_a_note_before_the_first_step_leaves_the_rows_of_other_tags(tmp_path):
    step, state = step_and_state()
    with fds.monitor(CSV(tmp_path)) as monitor:
        state = trained(step, state, 2, monitor)
        monitor.note(state, {"eval_loss": 1.0})
    with fds.monitor(CSV(tmp_path)) as monitor:
        monitor.note(state, {"eval_loss": 2.0})
        trained(step, state, 1, monitor)
    assert [row[0] for row in table(tmp_path, "Train/Steps/train_loss")] == ["step", "1", "2", "3"]
    assert table(tmp_path, "Train/Steps/eval_loss") == [["step", "eval_loss"], ["2", "2.0"]]


def test_tags_that_would_share_a_file_are_refused(tmp_path):
    sink = CSV(tmp_path)
    with pytest.raises(FdsError, match="the same file"):
        sink.write([fds.monitors.Event("a/b", 1.0, 1), fds.monitors.Event("a b", 1.0, 1)])
    sink.close()


def test_the_console_has_a_line_for_every_so_many_calls():
    console = rich.console.Console(file=io.StringIO(), width=40)
    with fds.monitor(Console(every=2, console=console), batch_size=64, names=["loss", "lr"]) as monitor:
        state = trained(*step_and_state(), 5, monitor)
        monitor.note(state, {"eval_loss": 2.0, "[b]": 0.5})
    first, _, note = console.file.getvalue().splitlines()
    assert first.startswith("Train/Samples 128  train_loss ") and first.endswith("  lr 0.1")
    assert note == "Train/Samples 320  eval_loss 2  [b] 0.5"
    console.file.truncate(0)
    Console(console=console).write([fds.monitors.Event("loss", 0.5, 3)])
    assert console.file.getvalue().strip("\0") == "3  loss 0.5\n"


def test_the_console_has_the_time_of_the_call_and_not_of_its_parts():
    console = rich.console.Console(file=io.StringIO(), width=200)
    times = {"forward": 1.0, "backward": 2.0, "call": 3.5}
    sink = fds.monitors.Console(every=1, console=console)
    sink.write([fds.monitors.Event(f"Train/Samples/elapsed_time_ms_{part}", ms, 4) for part, ms in times.items()])
    assert console.file.getvalue() == "Train/Samples 4  elapsed_time_ms_call 3.5\n"
