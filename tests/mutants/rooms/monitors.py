"""Mutants of fds/monitors: where a run goes on, whose turn it is, what arrives when."""

from tests.mutants.mutant import Mutant

SINKS = "tests/monitors/test_sinks.py"
MONITOR = "tests/monitors/test_monitor.py"
MUTANTS = (
    Mutant(
        "a-row-of-csv-comes-twice",
        "fds/monitors/csv_files.py",
        'float(line.split(b",")[0]) < x',
        'float(line.split(b",")[0]) <= x',
        "a run that goes on has its first row twice",
        SINKS,
    ),
    Mutant(
        "a-header-comes-twice",
        "fds/monitors/csv_files.py",
        "        if end == 0:\n            file.write",
        "        if True:\n            file.write",
        "a run that goes on writes a second header, as DeepSpeed does",
        SINKS,
    ),
    Mutant(
        "half-a-row-stays",
        "fds/monitors/csv_files.py",
        'line.endswith(b"\\n") and float',
        "float",
        "the first row after a kill is appended to half a row",
        SINKS,
    ),
    Mutant(
        "a-loop-goes-back-and-rows-stay",
        "fds/monitors/csv_files.py",
        "if x <= self._last.get(tag, math.inf):",
        "if tag not in self._files:",
        "a loop that goes back to an earlier state has steps twice",
        SINKS,
    ),
    Mutant(
        "a-line-of-json-comes-twice",
        "fds/monitors/json_lines.py",
        "upto=math.nextafter(x, -math.inf)",
        "upto=x",
        "a run that goes on has its first line twice",
        SINKS,
    ),
    Mutant(
        "tensorboard-keeps-the-lost-steps",
        "fds/monitors/tensor_board.py",
        "purge_step=first",
        "purge_step=None",
        "TensorBoard shows steps twice after a resume",
        SINKS,
    ),
    Mutant(
        "a-gpu-is-waited-for",
        "fds/monitors/_monitor.py",
        "while self.waiting and self.waiting[0].reading.arrived:",
        "while self.waiting:",
        "each call waits for the metrics of its own step",
        MONITOR,
    ),
    Mutant(
        "a-copy-is-read-before-it-arrived",
        "fds/display/readings.py",
        "return all(event.query() for event in self.events)",
        "return True",
        "numbers are waited for where they have not arrived",
        MONITOR,
    ),
    Mutant(
        "every-rank-writes",
        "fds/monitors/_monitor.py",
        "for sink in sinks if worlds.current().rank == 0]",
        "for sink in sinks]",
        "all ranks write to one file",
        MONITOR,
    ),
    Mutant(
        "a-sink-fails-again-and-again",
        "fds/monitors/_monitor.py",
        "            self.failed = True\n",
        "",
        "a failing sink warns at every step",
        MONITOR,
    ),
    Mutant(
        "a-note-waits-for-its-turn",
        "fds/monitors/_monitor.py",
        "values, self._queue.sinks)",
        "values, [sink for sink in self._queue.sinks if sink.every == 1])",
        "an evaluation is not written by a sink that is given every third call",
        MONITOR,
    ),
)
