"""Mutants of fds/timing: what a part's time is, when it is there, whose clock it is."""

from tests.mutants.mutant import Mutant

TIMED = "tests/timing/test_timed.py"
MESSAGES = "tests/timing/test_messages.py"
MUTANTS = (
    Mutant(
        "a-part-has-the-parts-inside-it",
        "fds/timing/_timed.py",
        "            inside.pop()\n",
        "            inside.pop(0)\n",
        "what follows a range is counted to it",
        TIMED,
    ),
    Mutant(
        "times-are-read-before-they-arrived",
        "fds/timing/_timed.py",
        "while self._waiting and arrived(self._waiting[0].marks):",
        "while self._waiting:",
        "a GPU is waited for in every timed call",
        TIMED,
    ),
    Mutant(
        "another-turn-than-the-monitors",
        "fds/timing/_timed.py",
        "(int(state.calls) + 1) % self.every:",
        "int(state.calls) % self.every:",
        "a monitor with the same `every` writes the times of another call",
        TIMED,
    ),
    Mutant(
        "a-capture-is-timed",
        "fds/step/ranges.py",
        "if torch.cuda.is_current_stream_capturing():",
        "if False:",
        "events that are captured have no time",
        TIMED,
    ),
    Mutant(
        "waits-are-not-watched",
        "fds/timing/waits.py",
        'return Watched(work, f"{WAIT}/{collective}")',
        "return work",
        "waiting for other ranks counts as reducing",
        TIMED,
    ),
    Mutant(
        "clocks-of-machines-apart",
        "fds/timing/_trace.py",
        'found.append(now - axis.exchange(now, "clocks")[0])',
        'found.append(axis.exchange(now, "clocks")[0] - now)',
        "ranks of another machine are elsewhere in a trace",
        TIMED,
    ),
    Mutant(
        "who-is-late-in-turn-is-not-late",
        "fds/timing/_messages.py",
        "least = sum(map(min, *own.values()))",
        "least = min(map(sum, own.values()))",
        "ranks that are late in turn hide each other",
        MESSAGES + " -k late",
    ),
    Mutant(
        "messages-are-read-before-they-arrived",
        "fds/timing/_messages.py",
        "while self._waiting and all(one.has_come() for one in self._waiting[0][1].messages):",
        "while self._waiting:",
        "a GPU is waited for in every call that is watched",
        MESSAGES + " -k gpu",
    ),
    Mutant(
        "a-gathered-tensor-is-a-slice",
        "fds/collectives/traffic.py",
        'whole = size if collective.op in ("all_gather", "reduce_scatter") else 1',
        "whole = 1",
        "bandwidths of gathers are those of one rank's part",
        MESSAGES + " -k bandwidths",
    ),
    Mutant(
        "gathers-by-formula-alone",
        "fds/step/messages.py",
        '2 * n if plan is None else plan["gather", i]',
        "2 * n",
        "stage 3 is predicted to gather what is still there",
        MESSAGES + " -k 'real and accumulated'",
    ),
    Mutant(
        "every-packet-is-announced",
        "fds/transforms/pipeline/expected.py",
        "border not in announced",
        "border >= 0",
        "headers are predicted for every microbatch",
        MESSAGES + " -k 'real and 1F1B'",
    ),
)
