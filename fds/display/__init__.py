"""How a run goes, shown while it runs: in a terminal, in a log, in a notebook; and how it is interrupted.

`Progress` puts the parts together; `Interrupt`, `Log` and `draw_curve` can be used without it.
"""

from fds.display.log import Log, draw_curve, read_log
from fds.display.progress import Interrupt, Progress

__all__ = ["Interrupt", "Log", "Progress", "draw_curve", "read_log"]
