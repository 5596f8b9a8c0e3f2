"""Where the metrics of a run are written: `fds.monitor(...)` takes any of these sinks, and objects of your own."""

from fds.monitors._monitor import Event, Monitor, Sink, monitor
from fds.monitors.files import CSV, JSONL, Console
from fds.monitors.services import Comet, TensorBoard, WandB

__all__ = ["CSV", "JSONL", "Comet", "Console", "Event", "Monitor", "Sink", "TensorBoard", "WandB", "monitor"]
