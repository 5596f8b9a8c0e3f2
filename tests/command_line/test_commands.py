"""`fds`: one program, whose help teaches, whose errors are short, and which imports only what a command needs."""

import argparse
import os
import shlex
import subprocess
import sys

import pytest

import fds
from fds import command_line
from fds.command_line import Parser, main


def commands(parser: Parser) -> list[Parser]:
    """Return a parser and those of all its commands, filled."""
    found = [parser.filled()]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for choice in action.choices.values() for one in commands(choice)]
    return found


ALL = {parser.prog: parser for parser in commands(command_line.top())}


def test_the_commands_that_there_are():
    assert {"fds", "fds explain", "fds config schema", "fds plans", "fds storage diff"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_help_says_what_a_command_does_and_shows_examples_that_parse(name):
    text = ALL[name].format_help()
    assert ALL[name].description and ALL[name].examples
    for line in ALL[name].examples:
        assert f"  {line}" in text
        first = line.split(" > ")[0].split(" | ")[0]
        words = shlex.split(first)
        after = words.index("-m") + 2 if words[0] == "torchrun" else 1  # torchrun ... -m fds COMMAND
        options = command_line.top().parse_args(words[after:])
        assert options.command is not None and callable(options.run), line


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_explained(name):
    for action in ALL[name]._actions:
        positional = not action.option_strings
        assert action.help or positional, f"{name}: {action.dest}"


def test_without_a_command_the_help_is_shown_as_an_error(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out and "examples:" in err and all(f"  {name}" in err for name in command_line.COMMANDS)


@pytest.mark.parametrize(
    ("line", "words"),
    [("explian x.json", "invalid choice: 'explian'"), ("storage", "required: COMMAND"), ("explain", "required: FILE")],
)
def test_a_wrong_line_names_the_help_that_helps(line, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    err = capsys.readouterr().err
    prog = " ".join(["fds", *(word for word in line.split() if word in command_line.COMMANDS)])
    assert ended.value.code == 2 and words in err and f"help: {prog} --help" in err


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{command_line.versions()}\n"
    assert command_line.versions().startswith(f"fds {fds.__version__}, torch ")
    assert command_line.version("no-such-package-as-this") == "not installed"


def test_terminal_codes_in_an_error_are_escaped(capsys):
    assert main(["explain", "\x1b[2Jnowhere.json"]) == 2
    assert "\x1b" not in (err := capsys.readouterr().err) and r"\x1b[2Jnowhere.json" in err


@pytest.mark.parametrize("line", ["--help", "--version", "doctor --help"])
def test_a_help_text_does_not_wait_for_torch(line):
    code = f"""if True:
        import sys
        from fds.command_line import main
        try:
            main({line.split()})
        except SystemExit:
            pass
        assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("module", ["fds", "fds.config", "fds.plans", "fds.storage"])
def test_a_room_that_has_a_command_runs_as_a_module(module, monkeypatch, capsys):
    import runpy

    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0 and f"usage: {module.replace('.', ' ')} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["config table", "doctor --quick"])  # by print, and by rich
def test_a_command_whose_output_nobody_reads_ends_quietly(line, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "argv", ["fds", *line.split()])
        with pytest.raises(SystemExit) as error:
            command_line.run()
        monkeypatch.undo()
    assert error.value.code == 141


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(command_line.COMMANDS, "config", ("test:fill", "waits"))
    monkeypatch.setattr(command_line, "load", lambda _: lambda parser: parser.set_defaults(run=interrupted))
    assert main(["config"]) == 130
