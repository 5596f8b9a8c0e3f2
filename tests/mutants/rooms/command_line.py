"""Mutants of fds/command_line: exit codes, and what a check that fails does to the others."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "doctor-ends-with-a-check",
        "fds/command_line/doctor/__init__.py",
        "    except Exception as error:\n",
        "    except OSError as error:\n",
        "a check that fails ends the doctor",
        "tests/command_line/test_doctor.py -k fails",
    ),
    Mutant(
        "doctor-is-always-content",
        "fds/command_line/doctor/__init__.py",
        "return 1 if report.problems() else 0",
        "return 0",
        "a problem is not in the exit code",
        "tests/command_line/test_doctor.py -k problem",
    ),
    Mutant(
        "doctor-takes-any-two-ranks",
        "fds/command_line/doctor/ranks.py",
        "((rank, process) for rank, process in enumerate(ended) if process.code != 0)",
        "((rank, process) for rank, process in enumerate(ended) if process.code)",
        "ranks that were killed after the time limit count as met",
        "tests/command_line/test_doctor.py -k ranks",
    ),
    Mutant(
        "errors-exit-with-0",
        "fds/command_line/__init__.py",
        '        print("\\n".join(map(escaped, lines)), file=sys.stderr)\n        return 2',
        '        print("\\n".join(map(escaped, lines)), file=sys.stderr)\n        return 0',
        "a command that fails exits as if it had not",
        "tests/command_line -k 'error or wrong'",
    ),
)
