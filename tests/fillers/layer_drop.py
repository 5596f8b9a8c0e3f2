"""Progressive layer dropping: the deeper a residual layer and the later the call, the likelier it is skipped."""

import math
from collections.abc import Sequence

import torch

import fds
from fds.step import fill, transform


@transform
def layer_drop(layers: Sequence[int], theta: float = 0.5, gamma: float = 0.001):
    """Skip each residual layer of `layers` at random, in each microbatch anew (Zhang & He 2020, arXiv:2010.13369).

    Layer i of L (from 1) is kept with probability p = 1 - i/L (1 - theta(t)), where theta(t) falls with the calls t
    from 1 to `theta` as (1 - theta) exp(-gamma t) + theta. One that is kept gives x + (layer(x) - x) / p, so that what
    an evaluation computes, with all layers, is the mean.
    """

    def dropping(layer, p):
        def run(x):
            if torch.rand(()) >= p:  # on the CPU: nobody waits; the same again where a checkpoint computes this again
                return x
            return x + (layer(x.clone() if layer.in_place else x) - x) / p

        return layer.replaced(run)

    def drop(calls, call):
        if any(len(layer.layers) != 1 for layer in calls):
            raise fds.FdsError(
                "layer_drop drops single layers",
                got=f"calls of the layers {[layer.layers for layer in calls]}",
                want="a loss that is fds.Layers, and layer_drop after checkpoint_activations(every=2) and the like",
            )
        falling = (1 - theta) * math.exp(-gamma * call.calls) + theta
        keep = {index: 1 - i / len(layers) * (1 - falling) for i, index in enumerate(layers, 1)}
        return [dropping(layer, keep[layer.layers[0]]) if layer.layers[0] in keep else layer for layer in calls]

    return lambda step: fill(step, layer=drop)
