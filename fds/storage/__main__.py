"""`python -m fds.storage` is `fds storage`."""

from fds.command_line import run

if __name__ == "__main__":
    run("storage")
