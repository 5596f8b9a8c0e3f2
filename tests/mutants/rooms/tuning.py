"""Mutants of tuning: what fits, what a trial's end means, and what a journal keeps."""

from tests.mutants.mutant import Mutant

SEARCH = "fds/tuning/search.py"
TESTS = "tests/tuning/test_search.py"

MUTANTS = (
    Mutant(
        "tuning-json-without-comparison",
        "fds/tuning/written.py",
        "elif repr(_call(other)[1]) != repr(arguments):",
        "elif False:",
        "a JSON is said to compose what it does not",
        "tests/tuning/test_written.py",
    ),
    Mutant(
        "tuning-journal-on-all-ranks",
        "fds/tuning/search.py",
        "kept = Journal(journal if place.is_first else None, _name(problem))",
        "kept = Journal(journal, _name(problem))",
        "all ranks of a launcher write into one journal",
        "tests/tuning/test_places.py",
    ),
    Mutant(
        "tuning-disk-in-memory",
        "fds/tuning/rehearsal.py",
        'if place != "device")',
        "if False)",
        "what lives on a disk is taken to be in memory, and does not fit",
        "tests/tuning/test_spaces.py",
    ),
    Mutant(
        "tuning-weights-at-stage-0",
        "fds/tuning/spaces.py",
        '"weights": shares and choices["stage"] > 0,',
        '"weights": shares,',
        "transports of weights are tried at stage 0, where none are sent",
        "tests/tuning/test_spaces.py",
    ),
    Mutant(
        "tuning-options-of-auto",
        "fds/tuning/scripts.py",
        'if value is None or value == "auto":',
        "if value is None:",
        "a script is given the word auto in the place of a number",
        "tests/tuning/test_scripts.py",
    ),
    Mutant(
        "tuning-tries-what-does-not-fit",
        SEARCH,
        "fits = footprint.num_bytes <= room",
        "fits = True",
        "candidates are tried that need more memory than there is",
        TESTS,
    ),
    Mutant(
        "tuning-failed-trials-are-fast",
        SEARCH,
        "self.rows[candidate.key].measured or math.inf",
        "self.rows[candidate.key].measured or 0.0",
        "after a trial that died no other is better",
        TESTS,
    ),
    Mutant(
        "tuning-journal-keeps-torn-lines",
        "fds/tuning/journal.py",
        'file.truncate(len((whole + "\\n").encode()))',
        "pass",
        "what follows a line that was not written whole cannot be read",
        TESTS,
    ),
    Mutant(
        "tuning-blames-the-first-rank",
        "fds/tuning/processes.py",
        '": RankError" in end.why, end.how == "hung"',
        'end.how == "hung"',
        "a rank that lost another is blamed for it",
        TESTS,
    ),
    Mutant(
        "tuning-plans-buckets-of-a-cable",
        "fds/collectives/meshes.py",
        "shares_cores=worlds.current().shares_cores",
        "shares_cores=False",
        "ranks that share cores are planned with the small buckets of those that do not",
        "tests/tuning/test_search.py",
    ),
    Mutant(
        "planned-ranks-receive-in-no-memory",
        "fds/collectives/gloo.py",
        "return Echoes(self, collective, mine=mine)",
        "return Echoes(GlooLink(self.group, self.ranks, self.index), collective, mine=mine)",
        "the memory into which gloo receives is taken anew each time",
        "tests/collectives/test_real_ranks.py",
    ),
    Mutant(
        "tuning-forgets-the-container",
        SEARCH,
        "min(available, limit)",
        "available",
        "a container is killed for memory that only the machine has",
        TESTS,
    ),
    Mutant(
        "tuning-ranks-the-rest-by-no-factors",
        "fds/tuning/report.py",
        "row.prediction.seconds(factors)",
        "row.prediction.seconds()",
        "what was not tried is ordered by other seconds than the table shows",
        TESTS,
    ),
)
