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
    Mutant(
        "cables-compared-with-the-loopback",
        "fds/command_line/doctor/links.py",
        "return KINDS[self.ranks[pair[0]].node != self.ranks[pair[1]].node]",
        "return KINDS[0]",
        "every link between two machines is slow beside those within one",
        "tests/command_line/test_links.py",
    ),
    Mutant(
        "links-of-a-slow-rank-one-by-one",
        "fds/command_line/doctor/links.py",
        "if len(its) > 1 and",
        "if len(its) > 2000 and",
        "a rank with a slow interface is not named, but a thousand links are",
        "tests/command_line/test_links.py",
    ),
    Mutant(
        "links-both-ways-as-one",
        "fds/collectives/measuring.py",
        "there_and_back.seconds / 2",
        "there_and_back.seconds / 1",
        "a link takes twice as long as it does",
        "tests/command_line/test_links.py",
    ),
)
