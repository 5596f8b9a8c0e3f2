"""Trials in processes that are forked from one that has imported torch, which takes a fresh interpreter 3 s."""

import sys
import types
from pathlib import Path

from tests.programs import Program
from tests.ranks import forkserver


class Script(Program):
    """What `fds tune` starts by `subprocess.Popen`: a script, in a session of its own, that writes to a file."""

    def __init__(self, command, *, env, stdout, stderr, start_new_session):
        assert command[0] == sys.executable and stdout is stderr and start_new_session
        super().__init__(Path(command[1]), *command[2:], env=env, log=Path(stdout.name), leads_session=True)


def warm(patch):
    """Fork what a search starts."""
    context = types.SimpleNamespace(get_context=lambda kind: {"spawn": forkserver}[kind])
    patch.setattr("fds.tuning.processes.multiprocessing", context)
    patch.setattr("fds.tuning.scripts.subprocess", types.SimpleNamespace(Popen=Script))
