"""Where the metrics of a run are written: `fds.monitor(...)` takes any of these sinks, and objects of your own."""

from fds.monitors._monitor import Monitor, monitor
from fds.monitors.comet_experiment import Comet
from fds.monitors.console import Console
from fds.monitors.csv_files import CSV
from fds.monitors.json_lines import JSONL
from fds.monitors.sink import Event, Sink
from fds.monitors.tensor_board import TensorBoard
from fds.monitors.weights_and_biases import WandB

__all__ = ["CSV", "JSONL", "Comet", "Console", "Event", "Monitor", "Sink", "TensorBoard", "WandB", "monitor"]
