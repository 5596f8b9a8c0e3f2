"""`fds doctor`: what it finds here, what it says of machines that are not well, and that nothing ends it."""

import importlib
import io
import json
import os
import sys

import pytest
import torch
from rich.console import Console

from fds.command_line import doctor, main
from fds.command_line.doctor import Finding, Report, Settings, examine, machine, ranks, software

QUICK = lambda path: Settings(path, quick=True)


def test_quick_finds_every_check_and_exits_with_0_here(capsys, tmp_path):
    assert main(["doctor", "--quick", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    levels, names = {line.split()[0] for line in lines[:-1]}, {line.split()[1] for line in lines[:-1]}
    assert levels <= {"ok", "note"} and names == set(doctor.CHECKS)
    assert lines[-1].startswith("0 problems, ") and any(f"  {torch.__version__}, built for" in line for line in lines)


def test_json_holds_what_the_lines_say_and_its_numbers(capsys, tmp_path):
    assert main(["doctor", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == 0 and list(found["checks"]) == list(doctor.CHECKS)
    [cores] = [one for one in found["checks"]["host"] if one["what"] == "cores"]
    assert cores["values"]["threads"] == torch.get_num_threads()


def test_a_check_that_fails_ends_neither_the_doctor_nor_the_other_checks(capsys, tmp_path, monkeypatch):
    def broken(settings):
        yield Finding("half", "of it")
        raise RuntimeError("the rest\x1b[2J")

    monkeypatch.setattr(machine, "devices", broken)
    monkeypatch.setitem(doctor.CHECKS, "kernels", "no_such_module")
    assert main(["doctor", "--quick", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("half" in line and line.startswith("ok") for line in lines)
    assert any(r"failed: RuntimeError: the rest\x1b[2J" in line and line.startswith("note") for line in lines)
    assert any("failed: ModuleNotFoundError" in line for line in lines) and any(" host " in line for line in lines)


def test_a_problem_is_the_exit_code(capsys, tmp_path):
    assert main(["doctor", "--quick", "--dir", str(tmp_path / "nowhere")]) == 1
    assert "1 problem, " in (out := capsys.readouterr().out) and "fds doctor --dir" in out


@pytest.mark.parametrize(
    ("name", "number", "level"),
    [
        ("torch", "2.10.1", "problem"),
        ("torch", "2.11.0+cu128", "ok"),
        ("torch", "2.13.9", "ok"),
        ("torch", "2.14.0a0+git1", "note"),
        ("Python", "3.9.1", "problem"),
        ("Python", "3.14.0", "note"),
    ],
)
def test_versions_are_compared_with_those_that_were_tried(name, number, level):
    assert software.in_range(name, number, number).level == level


def test_all_of_it_in_spite_of_a_launchers_variables(tmp_path, monkeypatch, capsys):
    """Fresh processes: two ranks that meet, and a kernel in Triton's interpreter."""
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert main(["doctor", "--json", "--dir", str(tmp_path)]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    found = {one["what"]: one for findings in checks.values() for one in findings}
    assert found["two ranks"]["values"]["latency_us"] > 0 and found["two ranks"]["level"] == "ok"
    assert 0 < found["interpreter"]["values"]["max_error"] <= found["interpreter"]["values"]["bound"]
    assert found["speed"]["values"]["bytes"] == 64 * 2**20 and not os.listdir(tmp_path)
    assert found["SLURM_PROCID"]["found"] == "5"


def test_ranks_that_do_not_meet_in_time_are_a_problem():
    found = ranks.handshake(0.01)
    assert found.level == "problem" and "no answer within the time limit" in found.found
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_ranks_are_not_started_on_a_loopback_that_does_not_answer(monkeypatch):
    def unreachable(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(ranks.socket, "create_connection", unreachable)
    found = ranks.handshake(60.0)
    assert found.level == "problem" and "loopback, does not answer: Network is unreachable" in found.found
    assert found.advice == "ip link set lo up"


def test_processes_that_hang_are_killed_in_time():
    ended = doctor.run_together("http.server", [{}, {}], arguments="0 --bind 127.0.0.1", limit=0.5)
    assert [one.code for one in ended] == [None, None] and "no answer within the time limit" in ended[0].reason


def test_a_process_finds_the_modules_that_this_one_finds_whatever_lies_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "platform.py").write_text("raise RuntimeError('not that of Python')")
    monkeypatch.chdir(tmp_path)
    [ended] = doctor.run_together("platform", [{}], arguments="terse", limit=60.0)
    assert ended.code == 0 and ended.out.startswith(sys.platform.title()), ended


ILLEGAL = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write({"x86_64": b"\\x0f\\x0b", "aarch64": bytes(4)}[__import__("platform").machine()])  # what no CPU has
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""


def test_packages_that_end_the_process_are_named_with_the_signal_and_the_others_are_tried(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "of_another_cpu.py").write_text(ILLEGAL)
    (tmp_path / "that_aborts.py").write_text("print('half a line', end=''); import os; os.abort()")
    (tmp_path / "that_raises.py").write_text("raise OSError('libmissing.so')")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("of_another_cpu", "xxhash", "that_aborts", "that_raises", "numpy")
    monkeypatch.setattr(software, "COMPILED", (*names, "not_there"))
    for name in names[0], names[2]:
        monkeypatch.setitem(sys.modules, name, sys)  # taken out again afterwards
    found = {one.what: one for one in software.software(Settings(tmp_path, quick=False))}
    assert "of_another_cpu" in found and found["of_another_cpu"].level == "problem"
    assert "ended by SIGILL" in found["of_another_cpu"].found and "another CPU" in found["of_another_cpu"].advice
    assert "ended by SIGABRT" in found["that_aborts"].found
    assert found["that_raises"].found == "does not work: OSError: libmissing.so"
    assert found["numpy"].level == found["xxhash"].level == "ok"
    with pytest.raises(ImportError):  # not the end of the doctor
        importlib.import_module("that_aborts")


def test_a_folder_that_may_not_be_written_to_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    found = list(machine.disk(QUICK(tmp_path / "file")))
    assert [one.level for one in found] == ["ok", "problem"] and "saves fail there" in found[1].advice


@pytest.mark.parametrize(
    ("interfaces", "wanted", "level", "words"),
    [
        ({"lo": "127.0.0.1", "ib0": "10.0.0.1"}, "eth7", "problem", "export GLOO_SOCKET_IFNAME=ib0"),
        ({"lo": "127.0.0.1", "ib0": "10.0.0.1"}, "ib0", "ok", ""),
        ({"lo": "127.0.0.1", "ib0": "10.0.0.1"}, "", "ok", "on several nodes: export GLOO_SOCKET_IFNAME=ib0"),
        ({"lo": "127.0.0.1", "ib0": ""}, "", "ok", "other nodes cannot be reached"),
    ],
)
def test_the_interface_of_gloo(interfaces, wanted, level, words, monkeypatch):
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "localhost")
    found = machine.gloo_interface(interfaces, wanted)
    assert found.level == level and words in found.advice


def test_a_machine_whose_loopback_is_down_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine, "address", lambda name: "")
    found = next(machine.network(QUICK(tmp_path)))
    assert (found.level, found.advice) == ("problem", "ip link set lo up")


def test_a_host_without_a_name_or_with_a_strange_one_is_noted(monkeypatch):
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "no.such.host.invalid")
    assert "has no address" in machine.gloo_interface({"lo": "127.0.0.1"}, "").found


def test_more_threads_than_a_container_allows_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    found = {one.what: one for one in machine.host(QUICK(tmp_path))}
    if torch.get_num_threads() > 1:
        assert found["cores"].level == "note" and "OMP_NUM_THREADS=1" in found["cores"].advice
    assert found["memory"].level == "note" and "limited to 1.0" in found["memory"].found
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert {one.what: one for one in machine.host(QUICK(tmp_path))}["cores"].values["quota"] is None


def test_what_a_launcher_left_half_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = {one.what: one for one in ranks.launcher(QUICK(tmp_path))}
    assert found["launcher"].level == "problem" and "unset RANK" in found["launcher"].advice
    assert found["RANK"].found == "3" and found["TRITON_INTERPRET"].level == "note"


def test_a_gpu_that_torch_cannot_use_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n")
    [found] = machine.devices(QUICK(tmp_path))
    assert found.level == "problem" and "570.86.15" in found.found


def test_examining_nothing_finds_nothing(tmp_path):
    assert list(examine(lambda settings: iter(()), QUICK(tmp_path))) == []


def test_in_a_terminal_a_report_is_tables(tmp_path):
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    report = Report(console)
    report.add("disk", [Finding("speed", "[bold]slow[/]", "note", "use another")])
    report.conclude()
    text = console.export_text()
    assert "!  speed          [bold]slow[/]" in text and "use another" in text and "0 problems, 1 note: " in text


def test_in_a_terminal_of_ascii_a_report_is_lines():
    console = Console(force_terminal=True, width=80, file=io.TextIOWrapper(io.BytesIO(), "ascii"))
    Report(console).add("disk", [Finding("speed", "slow", "note", "use another")])
    console.file.seek(0)
    assert console.file.read() == "note     disk         speed          slow  (use another)\n"


def test_extras_are_advised_by_their_packages_since_the_fds_of_pypi_is_another_project(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "version", lambda package: "not installed")
    advice = [found.advice for found in software.software(QUICK(tmp_path)) if found.what.startswith("fds[")]
    packages = ["matplotlib", "hjson", "tensorboard", "wandb", "comet_ml"]
    assert [words.split(": ")[-1] for words in advice] == [f"pip install {package}" for package in packages]


def test_the_interpreter_of_python_is_named(tmp_path):
    found = {one.what: one for one in software.software(QUICK(tmp_path))}
    assert sys.executable in found["Python"].found and found["fds"].found.endswith("fds")
