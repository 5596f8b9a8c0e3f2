"""`python -m fds` is `fds`."""

from fds.command_line import run

if __name__ == "__main__":
    run()
