"""The tables of mutants, one module for each room of fds or a few small ones."""
