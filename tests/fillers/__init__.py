"""Fillers as a user writes them, with `docs/write-your-own.md` and the public names of fds alone."""
