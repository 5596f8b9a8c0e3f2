"""Draw the pictures of docs/pipelines.md: every schedule at four ranks and eight microbatches."""

from __future__ import annotations

import sys
from pathlib import Path

from fds import plans

RANKS, MICROBATCHES = 4, 8
SCHEDULES = {  # and how many stages a rank has
    "gpipe": (plans.gpipe, 1),
    "one_f_one_b": (plans.one_f_one_b, 1),
    "interleaved": (plans.interleaved(2), 2),
    "zb_h1": (plans.zb_h1, 1),
    "zb_h2": (plans.zb_h2, 1),
    "zb_v": (plans.zb_v, 2),
    "dualpipe_v": (plans.dualpipe_v, 2),
    "inference": (plans.inference, 1),
}


def simulated(name: str) -> plans.Timeline:
    """Return the timeline of a schedule: F, B and W of a microbatch take a rank one unit each, in all its stages."""
    schedule, stages = SCHEDULES[name]
    share = 1 / stages
    costs = plans.Costs(forward=share, backward_input=share, backward_weight=share, activation_bytes=share)
    return plans.simulate(schedule(RANKS, MICROBATCHES), costs)


def main(folder: Path) -> None:
    """Write a PNG per schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEDULES:
        line = simulated(name)
        title = f"{name}: bubble {line.bubble_fraction:.1%}, idle {line.idle_fraction:.1%}"
        plans.draw_png(line, folder / f"{name}.png", title=title)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
