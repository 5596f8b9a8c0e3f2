"""A script that `fds tune` runs: it trains by `fds.initialize`, and would take long if nobody ended it."""

import argparse
import time

import torch
from torch import nn

import fds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fails-from", type=int, default=1000)  # rows of a microbatch
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sleeps", action="store_true")
    options = parser.parse_args()
    if options.rows >= options.fails_from:
        raise MemoryError(f"{options.rows} rows")
    if options.sleeps:
        time.sleep(600)
    model, rows = nn.Linear(16, 16), torch.randn(256, 16)
    step, state, loader, _ = fds.initialize(
        model, lambda m, x: m(x).square().mean(), config={"nothing": "that counts"}, training_data=rows
    )
    while True:
        for batch in loader:
            state, _ = step(state, batch)


if __name__ == "__main__":
    main()
