"""Pictures of timelines, and timelines of measured runs."""

import itertools
import json
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import given, strategies as st

from fds.command_line import main
from fds.command_line.plans import SCHEDULES
from fds.errors import PlanError
from fds.plans.lowering import communicate
from fds.plans.pictures import draw_png, draw_text, to_chrome
from fds.plans.plan import Action
from fds.plans.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from fds.plans.simulator import Costs, simulate
from fds.plans.timeline import joined, record, recorder

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def lines_of(text):
    """Drop the axis, and what stands before the bars."""
    return [line.partition("|")[2] for line in text.splitlines()[:-1]]


def test_zero_bubble_as_text():
    assert draw_text(simulate(zb_h1(2, 3)), color=False).splitlines() == [
        "0 |F0 F1    B0 W0 F2 B1 W1 B2 W2",
        "1 |   F0 B0 F1 B1 W0 F2 B2 W1 W2",
        "   0                          10",
    ]


def test_durations_are_lengths():
    text = draw_text(simulate(gpipe(2, 2), Costs(1, [1, 3], [0.5, 1], latency=0.5)), color=False)
    assert lines_of(text) == ["F0 F1                   BW0-        BW1-", "     F0 F1 BW0-------- BW1--------"]


def test_several_stages_of_a_rank_are_told_apart():
    assert lines_of(draw_text(simulate(interleaved(2)(1, 1)), color=False)) == ["0F0 1F0 1BW0--- 0BW0---"]


def test_messages_are_not_drawn():
    plan = one_f_one_b(3, 4)
    assert draw_text(simulate(communicate(plan)), color=False) == draw_text(simulate(plan), color=False)


def test_names_give_way_to_the_width():
    line = simulate(gpipe(2, 2))  # 9 long
    first_at = lambda width: lines_of(draw_text(line, width=3 + width, color=False))[0]
    assert first_at(36) == "F0- F1-             BW0---- BW1----"
    assert first_at(18) == "F0F1      BW0 BW1"
    assert first_at(9) == "FF   B0B1"
    assert first_at(4) == "F BB"


def test_a_stage_is_the_first_to_go():
    line = simulate(interleaved(2)(1, 2))  # 12 long
    first_at = lambda width: lines_of(draw_text(line, width=3 + width, color=False))[0]
    assert first_at(48) == "0F0 1F0 1BW0--- 0F1 0BW0--- 1F1 1BW1--- 0BW1---"
    assert first_at(24) == "F0F0BW0 F1BW0 F1BW1 BW1"
    assert first_at(12) == "FFB0FB0FB1B1"


def test_the_names_of_a_rank_have_one_form():
    for width in range(4, 400, 7):
        for row in lines_of(draw_text(simulate(zb_v(3, 6)), width=width, color=False)):
            names = re.findall(r"\d+[BFW]+\d+(?=[- ]|$)" if re.match(r" *\d", row) else r"[BFW]+\d*(?=[- BFW]|$)", row)
            assert re.sub("[- ]", "", row) == "".join(names)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 120), st.lists(st.floats(0, 9), min_size=5, max_size=5))
def test_no_line_is_wider_than_asked_for(p, m, width, times):
    line = simulate(one_f_one_b(p, m), Costs(forward=times[:p]))
    text = draw_text(line, width=width, color=False)
    assert len(text.splitlines()) == p + 1
    assert all(len(row) <= max(width - 3, 1) for row in lines_of(text))


def test_colours_only_change_the_look():
    line = simulate(one_f_one_b(2, 3))
    colored = draw_text(line, color=True)
    assert "\x1b[" in colored
    assert "\x1b[" not in draw_text(line)  # under pytest, standard output is no terminal
    plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(colored.split("\x1b[")))
    assert [row.rstrip() for row in plain.splitlines()] == draw_text(line, color=False).splitlines()


def test_nothing_as_text():
    assert draw_text(simulate([[], []]), color=False).splitlines()[:2] == ["0 |", "1 |"]


def test_a_plan_is_simulated_before_it_is_drawn(tmp_path):
    for draw in (draw_text, to_chrome, lambda plan: draw_png(plan, tmp_path / "a.png")):
        with pytest.raises(PlanError, match="not a timeline") as error:
            draw(one_f_one_b(2, 2))
        assert "simulate(plan)" in error.value.hint
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing(tmp_path):
    for draw in (draw_png, to_chrome):
        with pytest.raises(PlanError, match="cannot be written"):
            draw(simulate([["0F0"]]), tmp_path / "missing" / "a")


def test_a_png(tmp_path):
    for name, line in {
        "simulated": simulate(interleaved(2)(2, 4)),
        "lowered": simulate(communicate(zb_h1(3, 4)), Costs(latency=0.5)),
        "empty": simulate([[]]),
    }.items():
        draw_png(line, tmp_path / name, title=name)
        assert (tmp_path / name).read_bytes().startswith(SIGNATURE)


def test_a_png_leaves_pyplot_alone(tmp_path):
    code = f"""
import sys
from fds.plans.pictures import draw_png
from fds.plans.simulator import simulate
draw_png(simulate([["0F0", "0BW0"]]), {str(tmp_path / "a.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PlanError) as error:
        draw_png(simulate([["0F0"]]), tmp_path / "a.png")
    assert error.value.hint == "pip install matplotlib"


def test_a_trace_for_perfetto(tmp_path):
    line = simulate(communicate(one_f_one_b(2, 2)), Costs(latency=0.25))
    trace = to_chrome(line, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == sum(map(len, line.rows))
    first = next(event for event in shown if event["name"] == "1F0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 1.25e6, 1e6)
    assert first["args"] == {"stage": 1, "microbatch": 0}
    waits = next(event for event in shown if event["name"] == "1RECV_ACT0")
    assert (waits["pid"], waits["tid"], waits["ts"], waits["dur"]) == (1, 1, 0, 1.25e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "compute", "messages"}


def test_computations_of_a_rank_do_not_overlap_in_a_trace():
    events = to_chrome(simulate(zb_h1(3, 5), Costs(0.1, 0.2, 0.3, latency=0.05)))["traceEvents"]
    for rank in range(3):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == rank)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_recording_is_of_its_block_and_of_its_thread():
    assert recorder() is None
    seen = []
    with record() as outer:
        assert recorder() is outer
        thread = threading.Thread(target=lambda: seen.append(recorder()))
        thread.start()
        thread.join()
        with record() as inner:
            assert recorder() is inner
        assert recorder() is outer
    assert recorder() is None
    assert seen == [None]


def test_a_measured_run_is_a_timeline():
    expected = simulate(one_f_one_b(3, 5), Costs(1, 2, 3, latency=0.5))
    texts = []
    for row in expected.rows:
        with record() as recording:
            for event in row:
                recording.add(event.action, event.start + 100, event.end + 100)
        texts.append(recording.json())
    assert json.loads(texts[0])[0] == ["0F0", 100, 101]
    assert recording.rows[0] == (Action.parse("2F0"), 103, 104)
    found = joined(texts)
    assert found == expected
    assert draw_text(found, color=False) == draw_text(expected, color=False)


def test_ranks_that_did_nothing_are_joined_too():
    assert joined(["[]", '[["0F0", 5, 6]]']).rows[0] == ()
    assert joined([]).makespan == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["0F0", 1]]', '[["0F0", "a", 2]]', "null"])
def test_what_is_no_recording_is_refused(text):
    with pytest.raises(PlanError) as error:
        joined(["[]", text])
    assert error.value.where == "rank 1"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_from_the_command_line(name, capsys):
    stages = "1" if name == "data_parallel" else "4"
    assert main(["plans", name, "--stages", stages, "--microbatches", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: {stages} stages on ")
    assert "bubble" in out and "peak live" in out


def test_all_that_the_command_line_shows(capsys, tmp_path):
    png, chrome = tmp_path / "a.png", tmp_path / "a.json"
    arguments = "one_f_one_b --stages 2 --microbatches 2 --forward 1,2 --latency 0.5 --plan"
    assert main(["plans", *arguments.split(), "--png", str(png), "--chrome", str(chrome)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one_f_one_b: 2 stages on 2 ranks, 2 microbatches",
        "0 |F0 F1             BW0--       BW1--",
        "1 |    F0--- BW0-- F1--- BW1--",
        "   0                                12",
        "time 12, bubble 33.3%, idle 41.7%, peak live 2 1 (per rank)",
        "",
        "0: 0F0 0F1 0BW0 0BW1",
        "1: 1F0 1BW0 1F1 1BW1",
    ]
    assert png.read_bytes().startswith(SIGNATURE)
    assert json.loads(chrome.read_text())["traceEvents"]
    assert main(["plans", "gpipe", "--stages", "2", "--microbatches", "2", "--width", "21"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "0 |F0F1      BW0 BW1"
    assert main(["plans", "one_f_one_b", "--stages", "2", "--microbatches", "1", "--lower"]) == 0
    assert "1: 1RECV_ACT0@0 1LOAD0@0 1F0@0 1BW0@0 1SEND_GRAD0@0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("one_f_one_bee", "did you mean 'one_f_one_b'?"),
        ("interleaved --stages 5", "a multiple of 2"),
        ("1F1B", "did you mean 'one_f_one_b'?"),
        ("zbh1", "did you mean 'zb_h1'?"),
        ("ZB-V", "did you mean 'zb_v'?"),
        ("ScheduleDualPipeV", "did you mean 'dualpipe_v'?"),
        ("dualpipe", "did you mean 'dualpipe_v'?"),
        ("gpipe --forward one", "not a list of numbers"),
        ("gpipe --forward 1,2", "no cost for this stage"),
        ("gpipe --forward -1", "negative or not finite"),
        ("gpipe --memory-bound 3", "searched --memory-bound"),
        ("gpipe --width 0", "--width"),
        ("gpipe --png missing/a.png", "cannot be written"),
        ("gpipe --chrome missing/a.json", "cannot be written"),
        ("gpipe --forward 1,2,3,4,5", "more costs than stages"),
        ("searched --memory-bound 0.5", "at least 1.0"),
        ("dualpipe_v --stages 8 --microbatches 2", "too few microbatches"),
    ],
)
def test_what_the_command_line_refuses(arguments, words, capsys):
    assert main(["plans", *arguments.split()]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("PlanError: ")
    assert words in shown


@pytest.mark.parametrize("option", ["--stages", "--microbatches", "--chunks"])
def test_a_size_that_is_no_count_is_refused_by_the_name_of_its_option(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plans", "interleaved", option, "0"])
    assert ended.value.code == 2 and f"argument {option}: not an integer, 1 or more: '0'" in capsys.readouterr().err


def test_a_schedule_that_resembles_none_is_refused_with_the_list_once(capsys):
    assert main(["plans", "xyz"]) == 2
    assert capsys.readouterr().err.count("data_parallel") == 1


def test_the_command_itself():
    command = [sys.executable, "-m", "fds.plans", "gpipee"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "did you mean 'gpipe'?" in done.stderr
