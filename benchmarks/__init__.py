"""fds beside its peers, in one process: see README.md."""
