"""`fds`, the command. A command's own modules are imported once it is chosen, so that `fds --help` answers at once."""

from fds.command_line.program import main, run

__all__ = ["main", "run"]
