"""`fds.display`: a run that is shown is the one that is not, nothing waits between two views, Ctrl-C ends a step."""

import io
import json
import os
import signal
import threading

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds.display import Interrupt, Log, Progress, draw_curve, read_log
from fds.display.log import MOST, Curve, smooth, spark
from fds.display.readings import read
from fds.display.screens import Lines, Notebook, Terminal, View, screen_for
from fds.errors import FdsError
from tests.bits import bits
from tests.unit.test_html import Balanced


def loss_fn(params, batch):
    loss = ((params["w"] * batch) ** 2).mean()
    return loss, {"half": loss / 2}


def step_and_state():
    step = fds.compose(fds.skip_nonfinite(), fds.clip_by_global_norm(1.0), fds.adamw(0.1), fds.donate())(loss_fn)
    return step, step.init({"w": torch.arange(8.0)}, key=3)


def batch(i):
    return torch.full((4, 8), float(i + 1))


def quiet(width=120, **options):
    return Console(file=io.StringIO(), width=width, **options)


def test_a_run_that_is_shown_is_bit_for_bit_the_one_that_is_not(tmp_path):
    before = torch.get_rng_state()
    step, plain = step_and_state()
    for i in range(6):
        plain, _ = step(plain, batch(i))
    step, state = step_and_state()
    with Progress(6, interval=0.0, console=quiet(), log=tmp_path / "log.jsonl") as progress:
        for i in progress:
            state, metrics = step(state, batch(i))
            progress(metrics, tokens=32)
    assert all(bits(a).equal(bits(b)) for a, b in zip(fds.tree.leaves(plain), fds.tree.leaves(state), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


class Reads(TorchDispatchMode):
    """Count what waits for a device: elements that become Python's numbers, and copies to the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_between_two_views_nothing_is_asked_of_the_device():
    console = quiet()
    with Progress(50, interval=1e9, console=console) as progress:
        for i in progress:
            metrics = {"loss": torch.tensor(float(i)), "lr": torch.tensor(0.1)}
            if i == 0:  # the first step is shown
                progress(metrics)
                continue
            if i == 49:
                break
            with Reads() as reads:
                progress(metrics, tokens=10)
            assert not reads.found
        progress(metrics)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "50/50"]


def test_many_steps_are_read_with_one_copy_for_each_dtype():
    many = [{"loss": torch.tensor(1.5 * i), "n": torch.tensor(i), "skipped": torch.tensor(i == 2)} for i in range(20)]
    with Reads() as reads:
        rows = read([*many, {"loss": 7, "outputs": torch.ones(3), "name": "x"}])
    assert sum(name == "stack" for name in reads.found) == 3 and "_local_scalar_dense" not in reads.found[:-60]
    assert rows[2] == {"loss": 3.0, "n": 2, "skipped": True} and rows[20] == {"loss": 7}
    assert list(rows[5]) == ["loss", "n", "skipped"]


def test_lines_show_numbers_speeds_counts_and_notes(tmp_path):
    console = quiet()
    with Progress(10, title="[a run]", interval=0.0, console=console, names=("loss", "lr", "skipped")) as progress:
        for i in range(3):
            progress(
                {"loss": torch.tensor(2.5), "lr": torch.tensor(1e-3), "skipped": torch.tensor(i == 1), "other": 1.0},
                tokens=1000,
                samples=4,
            )
        with progress.paused():
            progress.note({"held_out": torch.tensor(2.625)})
    title, first, second, _, last = console.file.getvalue().splitlines()
    assert title == "[a run]" and first.startswith("step 1/10  loss 2.5  lr 0.001  tokens/s ")
    assert "skipped" not in first and "skipped 1" in second and "other" not in last
    assert "held_out 2.625" in last and "samples/s" in last and "time left 0:0" in last


def test_a_terminal_gets_a_panel_with_every_number():
    console = quiet(force_terminal=True, _environ={"TERM": "xterm"})
    with Progress(100, title="title", start=49, interval=0.0, console=console) as progress:
        progress({"loss": torch.tensor(2.5), "lr": torch.tensor(1e-3)}, tokens=1000)
    for word in ("title", "loss", "2.5", "lr", "0.001", "tokens/s", "time left", "50", "100", "▁"):
        assert word in console.file.getvalue()
    assert isinstance(screen_for(quiet()), Lines)
    screen = screen_for(console)
    assert isinstance(screen, Terminal)
    screen.close()


def test_a_notebook_has_one_output_that_is_replaced():
    class Handle:
        def __init__(self, view, display_id):
            assert display_id is True
            outputs.append([view])

        def update(self, view):
            outputs[-1].append(view)

    outputs, screen = [], Notebook(Handle)  # as IPython.display.display
    views = [View("run", i, 3, {"loss": str(i)}) for i in range(3)]
    for view in views:
        screen.show(view)
    screen.close()
    assert outputs == [views]


def test_numbers_are_short_and_an_interruption_is_said():
    console = quiet()
    with Progress(9, interval=0.0, console=console) as progress:
        for i in progress:
            if i == 1:
                signal.raise_signal(signal.SIGTERM)
            progress({"loss": 0.123456, "lr": 0.5, "lr/*": 0.5, "loss_scale": 65536.0})
    last = console.file.getvalue().splitlines()[-1]
    assert last == "step 2/9  loss 0.1235  lr 0.5  loss_scale 65536  interrupted after step 2"


def test_a_terminal_that_has_no_blocks_gets_lines():
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"), force_terminal=True, width=80)
    with Progress(1, interval=0.0, console=console) as progress:
        progress({"loss": torch.tensor(1.0)})
    console.file.seek(0)
    assert console.file.read().startswith("step 1/1  loss 1  ")


def test_html_of_a_view_is_balanced_and_escaped():
    view = View("<b>", 3, 10, {"<i>": "1"}, (1.0, 2.0))
    page = Balanced(view._repr_html_())
    assert all(words in page.words for words in ("<b>", "<i>", "step 3 of 10"))
    assert repr(view) == "step 3/10  <i> 1"
    Balanced(View("", 0, 0, {})._repr_html_())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_loop_after_the_step_that_runs(number):
    seen, before = [], signal.getsignal(number)
    with Progress(10, console=quiet()) as progress:
        for i in progress:
            if i == 3:
                os.kill(os.getpid(), number)
            seen.append(i)
            progress({"loss": torch.tensor(1.0)})
    assert seen == [0, 1, 2, 3] and progress.interrupted and progress.ends and progress.done == 4
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_program():
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell has started this in the background
    with Interrupt() as interrupt:
        assert not interrupt.agreed()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.agreed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_one_rank_that_is_interrupted_ends_all_after_the_same_step_and_the_first_alone_shows():
    def body():
        axis, console = fds.mesh(dp=-1)["dp"], quiet()
        with Progress(9, interval=0.0, console=console) as progress:
            for i in progress:
                if (i, axis.index) == (4, 1):
                    progress._interrupt.asked = True  # as its handler does: signals reach the main thread alone
                progress({"loss": torch.tensor(1.0)})
        return progress.done, progress.interrupted, len(console.file.getvalue().splitlines())

    assert fds.simulate(body, 3) == [(5, True, 5), (5, True, 0), (5, True, 0)]


def test_threads_that_get_no_signals_do_without():
    found = []

    def body():
        with Interrupt() as interrupt:
            found.append(interrupt.agreed())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_resumed_run_continues_its_log_and_its_curve(tmp_path):
    path, loss = tmp_path / "deep" / "log.jsonl", lambda i: {"loss": torch.tensor(float(i)), "step": torch.tensor(i)}
    with Progress(6, interval=0.0, console=quiet(), log=path) as progress:
        for i in range(4):
            progress(loss(i), tokens=5)
    seconds = read_log(path)[-1]["seconds"]
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    with Progress(6, start=3, interval=0.0, console=quiet(), log=path) as progress:
        for i in progress:
            progress(loss(i))
        progress.note({"held_out": 2.0})
    lines = read_log(path)
    assert [(line["step"], line.get("loss")) for line in lines] == [*((i + 1, float(i)) for i in range(6)), (6, None)]
    assert lines[-1]["seconds"] >= seconds - 1 and lines[-1]["held_out"] == 2.0
    assert lines[0]["tokens_per_s"] > 0 and set(lines[0]) == {"step", "loss", "tokens_per_s", "seconds"}
    assert len(progress._curve.points) == 6


def test_a_log_keeps_its_clock_and_is_cut_at_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(f'{{"step": {i}, "loss": 1.0, "seconds": {i}.0}}\n' for i in range(1, 6)) + '{"step": 6, "lo'
    )
    with Log(path, upto=9) as log:
        assert [line["step"] for line in log.kept] == [1, 2, 3, 4, 5] and 5 <= log.seconds < 6
    with Log(path, upto=3) as log:
        assert len(path.read_text().splitlines()) == len(log.kept) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(FdsError, match="cannot be written"):
        Log(tmp_path / "file" / "log.jsonl")


@pytest.mark.parametrize("written", [b"my notes\n", b"my notes", b'{"a": 1}\n', b"\0\0\0\n", b'{"step": 1, \0\n'])
def test_a_file_that_is_no_log_is_refused_and_stays_as_it_is(written, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(written)
    for use in (read_log, Log, lambda path: Log(path, upto=9)):
        with pytest.raises(FdsError, match=r"not a line of a log\n  where: .*notes.txt, line 1\n"):
            use(path)
    assert path.read_bytes() == written
    with pytest.raises(FdsError, match="cannot be read"):
        read_log(tmp_path / "nowhere.jsonl")
    with pytest.raises(FdsError, match="cannot be written"):
        Log(tmp_path)


def test_a_note_cannot_change_the_number_of_its_step(tmp_path):
    path = tmp_path / "log.jsonl"
    with Progress(9, interval=0.0, console=quiet(), log=path) as progress:
        for i in range(8):
            progress({"loss": torch.tensor(1.0)})
            if i == 4:
                progress.note({"step": 99, "seconds": -1.0, "held_out": 2.0})
    with Log(path, upto=7) as log:
        assert [line["step"] for line in log.kept] == [1, 2, 3, 4, 5, 5, 6, 7] and log.seconds >= 0


def test_a_curve_is_drawn_of_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 1 / i, "seconds": 0}) + "\n" for i in range(1, 9)))
    draw_curve(path, tmp_path / "curve.png", note="held_out")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FdsError, match="no such metric") as refused:
        draw_curve(path, tmp_path / "curve.png", metric="los")
    assert refused.value.want == "step, loss, seconds"


def test_smoothing_passes_over_what_is_not_finite_and_a_curve_stays_short():
    assert smooth([2.0, float("nan"), 2.0, float("inf")]) == [2.0] * 4
    assert spark([3.0, 2.0, 1.0], width=3) == "█▅▁" and spark([], width=3) == ""
    curve = Curve()
    for i in range(20 * MOST):
        curve.add(float(i))
    assert MOST / 2 <= len(curve.points) <= MOST and curve.points == sorted(curve.points)


def test_a_step_that_is_not_reported_is_an_error():
    with pytest.raises(FdsError, match="was not reported"), Progress(3, console=quiet()) as progress:
        for _ in progress:
            pass


@pytest.mark.parametrize(
    "arguments", [{"total_steps": -1}, {"total_steps": 2, "start": 0.5}, {"total_steps": 2, "interval": -1}]
)
def test_wrong_sizes_are_refused(arguments):
    with pytest.raises(FdsError, match="not a number of"):
        Progress(**arguments)


def test_an_error_of_the_loop_passes_through_without_another_reading():
    console = quiet()

    def failing():
        with Progress(9, interval=1e9, console=console) as progress:
            progress({"loss": torch.tensor(1.0)})
            progress({"loss": torch.tensor(1.0)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert len(console.file.getvalue().splitlines()) == 1
