"""The page of a run, made from what real runs leave, whole or damaged."""

import json
import math
import re

import attrs
import pytest
import torch

import fds
from fds.command_line import main
from fds.display import read_log
from fds.errors import FdsError
from fds.monitors import CSV, JSONL, Event
from tests.reporting.runs import CONFIG, Page, loss_fn, pipelined, plain_step, reported, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of 40 calls, two of which are skipped, with a save."""
    folder = tmp_path_factory.mktemp("plain") / "plain"
    step, state = train(folder, until=40, wrong=(20, 30))
    fds.save(folder / "save", state, step)
    return folder


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages") / "stages"
    pipelined(folder)
    return folder


def test_the_curves_are_what_was_logged(plain):
    page = reported(plain)
    lines = read_log(plain / "log.jsonl")
    for name, tag in (("loss", "train_loss"), ("half", "half"), ("lr", "lr"), ("tokens_per_s", "tokens_per_s")):
        x, y = page.line(name)
        want = [(one["step"], one[f"Train/Samples/{tag}"]) for one in lines if f"Train/Samples/{tag}" in one]
        assert x == [at for at, _ in want]
        assert [math.nan if v is None else v for v in y] == pytest.approx(
            [v if math.isfinite(v) else math.nan for _, v in want], rel=1e-5, nan_ok=True
        )
    x, _ = page.line("loss", "eval_loss")  # beside the loss that it is the same of
    assert x == [80, 160, 240, 320] and "eval_loss" not in {one["title"] for one in page.data["charts"]}


def test_the_parts_of_a_call_add_up_to_it(plain):
    page = reported(plain)
    parts = ("gather", "forward", "backward", "reduce", "wait", "optimizer", "other")
    sums = [sum(ms) for ms in zip(*(page.line("parts of a call", part)[1] for part in parts), strict=True)]
    assert sums == pytest.approx(page.line("elapsed_time_ms_call")[1], rel=1e-4) and len(sums) == 39  # from the second


def test_all_that_the_run_says_of_itself_is_there(plain):
    text = reported(plain).text
    assert {"glance", "findings", "curves", "speed", "time", "memory", "configuration", "environment"} <= text.keys()
    step, state = plain_step()
    for line in str(step.describe(state)).splitlines():
        assert line in text["configuration"]
    assert "fds.compose(...)" in text["configuration"] and "optimizer.params.lr" in text["configuration"]
    assert f" fds {fds.__version__} " in " ".join(text["environment"].split())
    assert "at call 0" in text["environment"] and "save/step00000040" in text["files"]
    assert "messages" not in text and "timeline" not in text and "differences" not in text
    glance = " ".join(text["glance"].split())
    assert "samples 320" in glance and "skipped 2" in glance and "ranks 1" in glance and " tokens/s" in glance


def test_what_deserves_a_look_is_named_and_leads_to_its_chart(plain):
    page = reported(plain)
    text = page.text["findings"]
    assert "the update was skipped at 2 steps, after 168, 248 samples (5.0% of those logged)" in text
    assert "loss is not finite at 2 steps, after 168, 248 samples" in text and "jumps" not in text
    inside = [one[1:] for one in page.addresses if one.startswith("#")]
    assert len(inside) > 10 and set(inside) <= set(page.ids) and len(page.ids) == len({*page.ids})
    [chart] = [one for one in page.data["charts"] if one["title"] == "loss"]
    assert [[run, x] for run, x, _ in chart["marks"]] == [[0, 168], [0, 248]]


def test_a_pipeline_is_shown_as_planned_and_as_it_ran(stages):
    page = reported(stages)
    text = " ".join(page.text["timeline"].split())
    assert "gpipe, as if all stages cost the same" in text and "bubble 33.3%" in text and "1F1: " in text
    assert "by trace.json" in text and "forward/stage0/microbatch1: " in text and "ms from left to right" in text
    assert "the bubble of gpipe is 33% of the time" in page.text["findings"]
    messages = " ".join(page.text["messages"].split())
    assert "sends in a step" in messages and "reduce" in messages and "wait" in page.text["time"]
    assert "pp=2, dp=2" in page.text["environment"]
    assert page.line("loss")[0] == [1, 2, 3] and page.data["charts"][0]["axis"] == "steps"


def test_the_table_of_messages_is_shown_beside_what_was_predicted(tmp_path):
    kind = {"what": "reduce", "op": "reduce_scatter", "axis": "dp", "ranks": 2, "num_bytes": 4096}
    row = {**kind, "count": 6, "bytes_sent": 12288, "predicted_count": 6, "predicted_bytes": 12000, "timed": 3}
    row |= {"latency_ms": 6.0, "waited_ms": 1.5, "bus_gb_per_s": None, "callers": [], "for_others": None}
    ranks = [{"rank": rank, "waited_ms": 9.0, "for_others_ms": 8.0 * (rank != 1)} for rank in range(4)]
    (tmp_path / "messages.json").write_text(json.dumps({"calls": 3, "rows": [row], "ranks": ranks}))
    lines = [{"step": step, "messages": 6, "messages_reduce_scatter_bytes_sent": 4096} for step in (1, 2)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = reported(tmp_path)
    words = " ".join(page.text["messages"].split())
    assert "reduce: reduce_scatter of 4.1 kB on dp 6 6 12.3 kB 12.0 kB 2.000 ms 0.500 ms –" in words
    assert "rank 1 9.0 ms 0.0 ms" in words and "the others wait for rank 1" in page.text["findings"]
    [chart] = [one for one in page.data["charts"] if one["title"] == "messages_reduce_scatter_bytes_sent"]
    assert chart["unit"] == "B" and "curves" not in page.text
    (tmp_path / "messages.json").write_text('{"calls": 1, "rows": [{}]}')
    assert "messages.json was not read" in reported(tmp_path).text["findings"]


def test_runs_beside_each_other_share_charts_and_differ_where_they_differ(plain, tmp_path):
    train(tmp_path / "other", until=10, config={**CONFIG, "rows": 8, "seed": 1})
    page = reported(plain, tmp_path / "other", path=tmp_path / "both.html")
    assert page.data["runs"] == ["plain", "other"]
    assert page.line("loss", run=0)[0][:10] == page.line("loss", run=1)[0]
    assert page.line("loss", run=0)[1][:10] == page.line("loss", run=1)[1]
    rows = [row.split() for row in page.text["differences"].split("\n")]
    words = " ".join(word for row in rows for word in row)
    assert "seed – 1" in words and "rows" not in words and "optimizer" not in words
    assert len([one for one in page.data["charts"] if one["title"] == "parts of a call"]) == 2
    assert "plain" in page.text["glance"] and "other" in page.text["glance"]


def test_runs_of_one_name_are_told_apart(plain, tmp_path):
    train(tmp_path / "plain", until=2)
    names = reported(plain, tmp_path / "plain", path=tmp_path / "both.html").data["runs"]
    assert names == [f"{plain.parent.name}/plain", f"{tmp_path.name}/plain"]
    assert reported(plain, plain, path=tmp_path / "both.html").data["runs"] == [f"{plain} (1)", f"{plain} (2)"]


def test_nothing_is_asked_of_a_network(plain, stages):
    for run in (plain, stages):
        page = reported(run)
        assert all(one.startswith(("#", "data:")) for one in page.addresses)
        text = page.bytes.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
        assert "default-src 'none'" in text


def test_a_run_that_was_killed_and_resumed_has_every_step_once(tmp_path):
    folder = tmp_path / "run"
    step, state = train(folder, until=8)
    fds.save(folder / "save", state, step)
    train(folder, until=13, state=state)  # it is killed here, five calls behind its save
    with (folder / "log.jsonl").open("a") as log, (folder / "Train_Samples_half.csv").open("a") as table:
        log.write('{"step": 112, "Train/Sampl')
        table.write("112,")
    page = reported(folder)
    assert page.line("loss")[0] == page.line("half")[0] == [8 * i for i in range(1, 14)]
    assert page.text["findings"].count("ends in half a line") == 2
    train(folder, until=20, state=fds.load(folder / "save", step, state.params)[0])
    page = reported(folder)
    assert page.line("loss")[0] == [8 * i for i in range(1, 21)] and "half a line" not in page.text["findings"]
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [one["calls"] for one in starts] == [0, 8, 8] and "went on" in page.text["environment"]


def test_files_that_another_program_appended_to_have_every_step_once_too(tmp_path):
    lines = [(1, 5.0), (2, 4.0), (3, 3.0), (2, 2.0), (3, 1.0)]  # DeepSpeed's own monitor writes steps again
    rows = "".join(f"{x},{y}\n" for x, y in lines)
    (tmp_path / "Train_Samples_train_loss.csv").write_text("step,train_loss\n" + rows)
    assert reported(tmp_path).line("loss") == ([1, 2, 3], [5, 2, 1])
    (tmp_path / "Train_Samples_train_loss.csv").unlink()
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": x, "loss": y}) + "\n" for x, y in lines))
    assert reported(tmp_path).line("loss") == ([1, 2, 3], [5, 2, 1])


def test_tables_and_lines_of_one_monitor_are_one_metric(tmp_path):
    sinks = CSV(tmp_path), JSONL(tmp_path / "log.jsonl")
    tags = ("Train/Samples/train_loss", "gpt/head/loss", "my own", "Train/Samples/lr/*norm*")
    for sink in sinks:
        for x in (1, 2):
            sink.write([Event(tag, float(x), x) for tag in tags])
        sink.close()
    titles = [one["title"] for one in reported(tmp_path).data["charts"]]
    assert sorted(titles) == ["gpt/head/loss", "loss", "lr/*norm*", "my own"]
    (tmp_path / "log.jsonl").unlink()
    titles = [one["title"] for one in reported(tmp_path).data["charts"]]
    assert sorted(titles) == ["gpt_head/loss", "loss", "lr/*norm*", "my own"]


def test_names_and_values_are_text_whatever_they_hold(tmp_path):
    evil = "</script><script>throw 1</script><img src=x onerror=alert(1)>\"'&\ud800"
    folder = tmp_path / "<i>run<i>"
    train(folder, until=2, config={evil: evil, "deep": {evil: [evil, None, {1: math.nan}]}})
    log = folder / "log.jsonl"
    line = {"step": 24, evil: 1.0, f"lr/{evil}": 2.0, "loss": math.inf, "text": evil, "none": None, "big": 10**400}
    log.write_text(log.read_text() + json.dumps(line) + "\n")
    (folder / f"{evil[10:30].replace('/', '_')}.csv").write_text("nothing")
    (folder / "trace.json").write_text(
        json.dumps({"traceEvents": [{"ph": "X", "pid": 0, "name": evil, "ts": 0.0, "dur": 1.0}, 3]})
    )
    page = reported(folder)
    shown = page.bytes.decode()
    assert shown.count("<script") == 2 and "<img" not in shown and "<i>run" not in shown
    assert evil.replace("\ud800", "\\ud800") in page.text["configuration"].replace("\\\\", "\\")
    assert page.line("big")[1] == [None] and "none" not in {one["title"] for one in page.data["charts"]}


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(plain, tmp_path):
    folder = tmp_path / "run"
    train(folder, until=3)
    (folder / "other.jsonl").write_text("no log\n")
    (folder / "other.csv").write_bytes(b"\xff\xfe\x00")
    (folder / "wrong.csv").write_text("step,loss\n1,two\n")
    (folder / "trace.json").write_text('{"traceEvents": 3}')
    (folder / "run.json").write_text('{"format": 1, "starts": "yesterday", "num_bytes": [3]}')
    (folder / "options.json").write_text("not of fds")
    (folder / "save" / "one").mkdir(parents=True)
    (folder / "save" / "one" / "manifest.json").write_text("{}")
    page = reported(folder)
    assert page.line("loss")[0] == [8, 16, 24]
    for name in ("other.jsonl", "other.csv", "wrong.csv", "trace.json", "run.json", "save/one"):
        assert name in page.text["files"] and f"{name} was not read" in page.text["findings"], name
    assert "options.json" not in page.text["files"]


def test_a_run_of_another_format_is_not_misread(tmp_path):
    train(tmp_path, until=1)
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "format": 2}))
    assert "run.json was not read: a record of another format" in reported(tmp_path).text["findings"]


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    fds.record_run(tmp_path, *plain_step())
    page = reported(tmp_path)
    assert page.data["charts"] == [] and "curves" not in page.text and "accumulate" not in page.text["glance"]
    assert "Split(num_microbatches=2)" in page.text["configuration"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "an empty directory"),
        (lambda path: None, "there is no run"),
        (lambda path: path.write_text(""), "hint:  fds report "),
        (lambda path: train(path / "one", until=1), "its folders are runs: fds report "),
        (lambda path: (path.mkdir(), (path / "log.jsonl").write_text("no\n")), "no file of this run can be read"),
    ],
    ids=["empty", "missing", "a file", "runs inside", "damaged"],
)
def test_a_directory_without_a_run_is_an_error_of_the_command(make, words, tmp_path, capsys):
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("FdsError: ") and words in err


def test_the_command_says_where_the_page_is(plain, tmp_path, capsys, monkeypatch):
    assert main(["report", str(plain)]) == 0
    assert capsys.readouterr().out == f"{plain / 'report.html'}\n"
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(plain), str(plain)]) == 0
    assert capsys.readouterr().out == "report.html\n" and Page(tmp_path / "report.html").data["runs"]
    assert main(["report", str(plain), "-o", str(tmp_path)]) == 2
    assert "the page cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("runs", "path"), [((), None), ((3,), None), (("",), None), (("",), 3)])
def test_runs_are_directories(runs, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FdsError):
        fds.report(*runs, path=path)


def test_a_path_may_begin_with_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    loss = lambda params, batch: params["w"].square().sum()
    step = fds.compose(fds.sgd(0.1))(loss)
    fds.record_run("~/run", step, step.init({"w": torch.ones(2)}))
    assert fds.report("~/run", path="~/page.html") == tmp_path / "page.html"
    assert (tmp_path / "run" / "run.json").exists() and (tmp_path / "page.html").exists()


def test_a_table_without_a_row_is_no_curve(tmp_path):
    (tmp_path / "Train_Steps_loss.csv").write_text("step,loss\n")
    (tmp_path / "Train_Steps_lr.csv").write_text("step,lr\n1,0.5\n")
    page = reported(tmp_path)
    assert [one["title"] for one in page.data["charts"]] == ["lr"] and page.line("lr") == ([1], [0.5])


def test_a_long_run_of_many_metrics_makes_a_small_page(tmp_path):
    steps, names = 4000, [f"layer{i}/norm" for i in range(40)] + ["loss", "elapsed_time_ms_forward"]
    with (tmp_path / "log.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            values = {name: math.sin(step * (i + 1)) for i, name in enumerate(names)}
            log.write(json.dumps({"step": step, **values, "seconds": step / 7}) + "\n")
    runs = [tmp_path] * 6
    page = reported(*runs, path=tmp_path / "many.html")
    assert len(page.bytes) < 2_000_000
    x, y = page.line("loss", run=5)
    assert 100 < len(x) == len(y) <= 600 and x[-1] == steps
    one = reported(tmp_path)
    assert len(one.line("loss")[0]) == 600 and len(one.bytes) < 2_000_000


def test_a_page_is_written_over_an_older_one_and_is_no_part_of_the_run(plain):
    first = reported(plain).bytes
    assert reported(plain).bytes == first


@pytest.mark.parametrize("batch_size", [None, 32])
@pytest.mark.parametrize("every", [1, 5])
def test_a_run_that_went_on_with_other_ranks_has_the_numbers_of_each(tmp_path, every, batch_size):
    """Two ranks to call 40, killed at 46, then one rank from 40 to 60, at half the speed."""

    def log(ranks, begin, end, speed):
        def rank():
            mesh = fds.mesh(dp=-1)
            step = fds.compose(fds.shard_optimizer(mesh["dp"]), fds.adamw(0.01))(loss_fn)
            state = attrs.evolve(step.init({"w": torch.zeros(4)}), calls=torch.tensor(begin))
            fds.record_run(tmp_path, step, state)
            with fds.monitor(JSONL(tmp_path / "log.jsonl", every=every), batch_size=batch_size) as monitor:
                for calls in range(begin + 1, end + 1):
                    metrics = {"loss": 1.0, "samples_per_s": speed, "elapsed_time_ms_call": 1000 / speed}
                    monitor(attrs.evolve(state, calls=torch.tensor(calls)), metrics)

        fds.simulate(rank, ranks)

    log(2, 0, 46, 100.0)
    log(1, 40, 60, 50.0)
    page = reported(tmp_path)
    glance, about = page.text["glance"], page.text["environment"]
    assert re.search(r"speed on 2 ranks, dp=2\s+100 samples/s", glance)
    assert re.search(r"speed on 1 rank\s+50 samples/s", glance)
    assert re.search(r"started\s+.*, at call 0, 2 ranks, dp=2\s+went on\s+.*, at call 40, 1 rank", about)
    assert "from call 40 on the run was on 1 rank, before on 2 ranks, dp=2" in page.text["findings"]
    assert "fell" not in page.text["findings"]
