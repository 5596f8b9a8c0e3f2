"""Mutants of fds/debugging."""

from tests.mutants.mutant import Mutant

_WATCH, _RANKS = "tests/debugging/test_watch.py", "tests/debugging/test_check_ranks.py"

MUTANTS = (
    Mutant(
        "watch-blames-who-was-given-it",
        "fds/debugging/checking.py",
        "if not bad and not meant:",
        "if not meant:",
        "an operator that was given what is not finite counts as its source",
        f"{_WATCH} -k module_is_named",
    ),
    Mutant(
        "watch-blames-masks",
        "fds/debugging/_watch.py",
        "loss = checking.of_loss if lost else None",
        "loss = None",
        "the first operator that makes infinities is named, though the loss does not come from it",
        f"{_WATCH} -k mask",
    ),
    Mutant(
        "watch-blames-forward-for-a-finite-loss",
        "fds/debugging/_watch.py",
        'if lost or culprit.part != "forward"]',
        "if True]",
        "what was hidden again in forward is named in the place of what went wrong in backward",
        f"{_WATCH} -k mask_in_forward",
    ),
    Mutant(
        "watch-misses-what-is-written-in-place",
        "fds/debugging/checking.py",
        "for x in (*tensors_of(out), *written)",
        "for x in tensors_of(out)",
        "what operators on lists write over is not looked at",
        f"{_WATCH} -k overflow_of_float16",
    ),
    Mutant(
        "watch-hears-its-own-rank-alone",
        "fds/debugging/_watch.py",
        "key=lambda rank: (sent[rank][0], rank)",
        "key=lambda rank: rank",
        "what the first rank found counts, though it came later",
        f"{_WATCH} -k which_of_them",
    ),
    Mutant(
        "watch-replays-the-call-after",
        "fds/debugging/_watch.py",
        "calls=self.after.calls - 1",
        "calls=self.after.calls",
        "of a step that donates the call after the skipped one is run again",
        f"{_WATCH} -k draws",
    ),
    Mutant(
        "check-ranks-compares-slices-with-each-other",
        "fds/debugging/states.py",
        "fingerprint((name, part.start, numel, part.ranges, part.term))",
        "fingerprint((name, numel, part.ranges, part.term))",
        "slices of one leaf that lie elsewhere in it are compared",
        f"{_RANKS} -k sharded_state",
    ),
    Mutant(
        "check-ranks-forgets-where-a-slice-begins",
        "fds/debugging/states.py",
        "unravel(part.start + i, shape_at(ranges))",
        "unravel(i, shape_at(ranges))",
        "the index is that in the slice of the rank",
        f"{_RANKS} -k replicas",
    ),
    Mutant(
        "check-ranks-leaves-others-waiting",
        "fds/debugging/states.py",
        "        error = caught\n",
        "        raise\n",
        "a rank without a state raises alone",
        f"{_RANKS} -k none_waiting",
    ),
)
