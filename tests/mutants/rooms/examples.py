"""Mutants of examples/train_gpt.py: what a run that was stopped goes on with, and on which ranks."""

from tests.mutants.mutant import Mutant

ALONE = "tests/examples/test_train_gpt.py"

MUTANTS = (
    Mutant(
        "gpt-counts-from-the-start",
        "examples/train_gpt.py",
        "text, done, last = text.to(device), int(state.calls), options.steps",
        "text, done, last = text.to(device), 0, options.steps",
        "a resumed run does all of its steps once more",
        f"{ALONE} -k resumed_equals",
    ),
    Mutant(
        "gpt-resumes-with-another-text",
        "examples/train_gpt.py",
        'if extra["text"] != text.digest:',
        'if extra["text"] is None:',
        "a run goes on with a text that has changed",
        f"{ALONE} -k text",
    ),
    Mutant(
        "log-keeps-a-later-step",
        "fds/display/log.py",
        'line["step"] > upto:',
        'line["step"] > upto + 1:',
        "the log of a resumed run has the step after its save twice",
        "tests/display",
    ),
    Mutant(
        "gpt-goes-on-with-another-run",
        "examples/train_gpt.py",
        'if ranks.started_again() and written(out, {}).get("run") == run:',
        "if ranks.started_again():",
        "ranks that were restarted go on with the run of somebody else",
        f"{ALONE} -k started_again",
    ),
    Mutant(
        "gpt-forgets-its-options",
        "examples/train_gpt.py",
        "parser.set_defaults(**written(Path(first.resume)))",
        "written(Path(first.resume))",
        "a resumed run takes the default sizes",
        "tests/examples/test_train_gpt.py -k resumed_equals",
    ),
    Mutant(
        "gpt-ranks-see-the-same-rows",
        "examples/gpt/ranks.py",
        "return rows.chunk(axis.size)[axis.index] if len(rows) % axis.size == 0 else rows",
        "return rows.chunk(axis.size)[0] if len(rows) % axis.size == 0 else rows",
        "all data ranks train on the first rank's rows",
        "tests/examples/test_train_gpt_on_ranks.py -k one_and_follows",
    ),
    Mutant(
        "one-rank-stops",
        "fds/display/progress.py",
        "return bool(self._axis.all_reduce(torch.tensor(float(self.asked))))",
        "return self.asked",
        "a rank that is interrupted leaves the others in a collective",
        "tests/display",
    ),
    Mutant(
        "progress-waits-at-every-step",
        "fds/display/progress.py",
        "if self._shown_at is None or time.perf_counter()",
        "self._read()\n        if self._shown_at is None or time.perf_counter()",
        "every step waits for the device to show its numbers",
        "tests/display",
    ),
)
