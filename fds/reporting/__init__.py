"""A page for a run: what it leaves in its directory, as one HTML file that needs no server and no network."""

from fds.reporting._record_run import record_run
from fds.reporting._report import report

__all__ = ["record_run", "report"]
