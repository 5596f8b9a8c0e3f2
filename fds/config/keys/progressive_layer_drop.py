"""Progressive layer dropping: layers are skipped at random, more of them as training progresses.

The probability of keeping falls with the step t: (1 - theta) * exp(-gamma * t) + theta.

Source: `runtime/progressive_layer_drop.py` of 0.19.6; Zhang and He 2020, arXiv:2010.13369.
"""

from __future__ import annotations

import attrs

from fds.config.field import key
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config


@attrs.frozen
class ProgressiveLayerDropConfig(Config):
    """`progressive_layer_drop`."""

    enabled: bool = key(False, "leave out layers at random", NotYet("progressive layer dropping"))
    theta: float = key(0.5, "probability of keeping a layer in the end", PartOf(), low=0, high=1)
    gamma: float = key(0.001, "how fast it falls to that: the rate of an exponential, by step", PartOf(), low=0)
