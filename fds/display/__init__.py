"""How a run goes, shown while it runs: in a terminal, in a log, in a notebook; and how it is interrupted.

`Progress` puts the parts together; `Interrupt`, `Log` and `draw_curve` can be used without it.
"""

from fds.display.interrupt import Interrupt
from fds.display.jsonl import Log, read_log
from fds.display.pictures import draw_curve
from fds.display.progress import Progress

__all__ = ["Interrupt", "Log", "Progress", "draw_curve", "read_log"]
