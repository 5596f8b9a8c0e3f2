"""The loss curve, as a picture."""

from __future__ import annotations

from pathlib import Path

from gpt.log import Log, smooth


def draw(log: Log, path: Path) -> None:
    """Draw training and held-out loss by step into a PNG. Raises `ImportError` where matplotlib is missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps, losses = [line["step"] for line in log.steps], [line["bits_per_byte"] for line in log.steps]
    axes.plot(steps, losses, color="tab:blue", alpha=0.2, linewidth=0.7)
    axes.plot(steps, smooth(losses), color="tab:blue", label="training, smoothed")
    held_out = [line["held_out"] for line in log.evaluations]
    axes.plot(
        [line["step"] for line in log.evaluations],
        held_out,
        "o-",
        color="tab:orange",
        markersize=3.5,
        label=f"held out: {held_out[-1]:.3f}" if held_out else "held out",
    )
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, min(8.5, 1.05 * max(losses, default=8.5))))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
