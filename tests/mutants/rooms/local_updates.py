"""Mutants of local updates: who agrees, on what, when; whose decisions and whose versions."""

from tests.mutants.mutant import Mutant

LAW = "tests/laws/test_local_updates.py"
FILE = "fds/transforms/local_updates.py"
MUTANTS = (
    Mutant(
        "fragments-agree-together",
        FILE,
        "call.calls + 1 + fragment * self.every // self.fragments",
        "call.calls + 1",
        "all fragments are sent in one call, and it sends as much as without them",
        LAW,
    ),
    Mutant(
        "a-sum-of-ways",
        FILE,
        ".div_(self.axis.size)",
        ".div_(1)",
        "the outer gradient is the sum over ranks, not their mean",
        LAW,
    ),
    Mutant(
        "padding-learns",
        FILE,
        "                    x[at:end].zero_()",
        "                    x[at:at].zero_()",
        "a sign is sent of padding, and a resumed run is another",
        LAW,
    ),
    Mutant(
        "a-skipped-turn-moves",
        FILE,
        "_write(local, agreed, skip)",
        "_write(local, agreed, None)",
        "a skipped step puts every rank back to the anchor",
        LAW,
    ),
    Mutant(
        "errors-of-a-skipped-turn-are-kept",
        FILE,
        "_write(kept, lost.mul_(self.axis.size).split_with_sizes(sizes), skip)",
        "_write(kept, lost.mul_(self.axis.size).split_with_sizes(sizes), None)",
        "what a message with NaN lost is added to all later ones",
        LAW,
    ),
    Mutant(
        "one-rank-skips-alone",
        "fds/step/totals.py",
        "            skip=overflow if empty is None",
        "            skip=self.skip if empty is None",
        "a NaN on one rank is its own affair, and turns are of other ranks than think so",
        LAW,
    ),
    Mutant(
        "a-fresh-anchor-of-each-rank",
        "fds/storage/matching.py",
        "anew = options.params_only or options.without_optimizer",
        "anew = False",
        "ranks whose anchors differ never agree again",
        LAW,
    ),
    Mutant(
        "versions-are-exported",
        "fds/storage/exporting.py",
        " and not split_version(n)[1]}",
        "}",
        "weights have every rank's version under a name that no module has",
        LAW,
    ),
)
