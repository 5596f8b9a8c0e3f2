"""`python -m fds.config` is `fds config`."""

from fds.command_line import run

if __name__ == "__main__":
    run("config")
