"""Mutants of fds/reporting: what is read, once and as it was last; what is found; what is escaped."""

from tests.mutants.mutant import Mutant

REPORT = "tests/reporting/test_report.py"
RECORD = "tests/reporting/test_record_run.py"
FINDINGS = "tests/reporting/test_findings.py"
MUTANTS = (
    Mutant(
        "a-step-is-on-the-page-twice",
        "fds/reporting/series.py",
        "while self.rows and self.rows[-1][0] >= x:",
        "while self.rows and self.rows[-1][0] > x:",
        "a resumed run has a step twice",
        "tests/reporting/test_report.py",
    ),
    Mutant(
        "half-a-row-is-a-number",
        "fds/reporting/series.py",
        'text[: text.rfind("\\n") + 1]',
        "text",
        "the last row of a killed run is read as far as it goes",
        REPORT,
    ),
    Mutant(
        "thinning-loses-extremes",
        "fds/reporting/series.py",
        "low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)",
        "low, high = mean, mean",
        "a spike of one step is nowhere in a long run",
        FINDINGS,
    ),
    Mutant(
        "a-wait-counts-twice",
        "fds/reporting/charts.py",
        "ms = np.maximum(used[name].y - sum(used[other].y for other in inside), 0.0)",
        "ms = np.maximum(used[name].y, 0.0)",
        "parts add up to more than the call",
        FINDINGS,
    ),
    Mutant(
        "a-script-ends-the-data",
        "fds/reporting/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        "the name of a metric ends the script that it is in",
        REPORT,
    ),
    Mutant(
        "text-is-markup",
        "fds/reporting/page.py",
        "return escape(text[:MOST_TEXT] + more)",
        "return text[:MOST_TEXT] + more",
        "an option is part of the page's HTML",
        REPORT,
    ),
    Mutant(
        "noise-is-a-spike",
        "fds/reporting/findings.py",
        "DEVIATIONS = 8.0",
        "DEVIATIONS = 2.0",
        "every noisy loss has spikes",
        FINDINGS,
    ),
    Mutant(
        "one-damaged-file-ends-the-page",
        "fds/reporting/run.py",
        "except (FdsError, OSError, RecursionError) as error:",
        "except OSError as error:",
        "a damaged file hides a run",
        REPORT,
    ),
    Mutant(
        "one-rank-alone-hears-of-an-error",
        "fds/reporting/record.py",
        'problem = axis.exchange(problem, "the record of a run")[0]',
        "pass",
        "the first rank raises, and the others go on without it",
        RECORD,
    ),
    Mutant(
        "starts-are-forgotten",
        "fds/reporting/record.py",
        "starts=(*earlier, Start(",
        "starts=(*(one for one in earlier if one.calls < calls), Start(",
        "a start is forgotten that a later one went back behind",
        RECORD,
    ),
)
