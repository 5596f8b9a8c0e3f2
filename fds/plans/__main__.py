"""`python -m fds.plans` is `fds plans`."""

from fds.command_line import run

if __name__ == "__main__":
    run("plans")
