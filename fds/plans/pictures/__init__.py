"""Pictures of timelines, simulated or measured: text for a terminal, a PNG, a trace for Perfetto."""

from fds.plans.pictures.bars import draw_png
from fds.plans.pictures.terminal import draw_text
from fds.plans.pictures.trace import to_chrome

__all__ = ["draw_png", "draw_text", "to_chrome"]
