"""Mutants of fds/profiling."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "profile-gives-backward-to-the-module-after",
        "fds/profiling/modules.py",
        "bisect.bisect_right(self._starts, node._sequence_nr()) - 1]",
        "min(bisect.bisect_right(self._starts, node._sequence_nr()), len(self._starts) - 1)]",
        "operators of backward are counted for the module that ran next",
        "tests/profiling/test_profile.py::test_a_step_counts_what_its_layers_multiply",
    ),
    Mutant(
        "profile-takes-recomputation-for-backward",
        "fds/profiling/counting.py",
        "again = torch.is_grad_enabled() or self.modules.running or _saving(True) is not None",
        "again = bool(self.modules.running)",
        "what is run again outside of modules counts as backward",
        "tests/profiling/test_profile.py",
    ),
    Mutant(
        "profile-counts-hidden-pairs",
        "fds/profiling/formulas.py",
        "sum(min(i + 1, keys) for i in range(queries))",
        "sum(min(i, keys) for i in range(queries))",
        "of a causal mask the diagonal counts as hidden",
        "tests/profiling/test_profile.py::test_a_step_counts_what_its_layers_multiply",
    ),
    Mutant(
        "profile-donates",
        "fds/profiling/_profile.py",
        "attrs.evolve(step.place, donate=False)",
        "attrs.evolve(step.place)",
        "a profile gives the caller's state up",
        "tests/profiling/test_profile.py::test_a_profile_changes_nothing_and_donates_nothing",
    ),
)
