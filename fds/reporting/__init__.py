"""A page for a run: what it leaves in its directory, as one HTML file that needs no server and no network."""

from fds.reporting.page import report
from fds.reporting.record import record_run

__all__ = ["record_run", "report"]
