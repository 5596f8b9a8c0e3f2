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
        "again = self.modules.running or mode_of_loss().busy is not None or _saving(True) is not None",
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
    Mutant(
        "memory-forgets-the-next-state",
        "fds/profiling/predicted.py",
        "    if not step.place.donate:",
        "    if step.place.donate:",
        "a step that does not donate is predicted to need no memory for the next state",
        "tests/profiling/test_memory.py::test_predictions_are_within_two_percent_of_what_is_measured",
    ),
    Mutant(
        "memory-counts-what-other-ranks-hold",
        "fds/profiling/holding.py",
        "if performing.get():",
        "if False:",
        "the rank that runs a simulated collective counts the buffers of all ranks",
        "tests/profiling/test_memory.py::test_predictions_are_within_two_percent_of_what_is_measured",
    ),
    Mutant(
        "curvature-of-the-mean-over-ranks",
        "fds/curvature.py",
        "return [x / self.weight for x in found]",
        "return list(found)",
        "products with the Hessian are not divided by the weight of all ranks",
        "tests/profiling/test_curvature.py",
    ),
    Mutant(
        "curvature-unsigned-shift",
        "fds/curvature.py",
        "tol, 0.0, found)[0] + found",
        "tol, 0.0, found)[0]",
        "sharpness is that of the shifted Hessian",
        "tests/profiling/test_curvature.py",
    ),
)
