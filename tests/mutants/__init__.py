"""Mutation: fds is broken on purpose in one place at a time, and the tests have to notice (`make mutants`)."""
