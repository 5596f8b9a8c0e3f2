"""Mutants of fds/timing: what a part's time is, when it is there, whose clock it is."""

from tests.mutants.mutant import Mutant

TIMED = "tests/timing/test_timed.py"
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
)
