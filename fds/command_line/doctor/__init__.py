"""`fds doctor`: what this machine has, what of it works, and what to write where it does not."""

from fds.command_line.doctor.command import fill

__all__ = ["fill"]
