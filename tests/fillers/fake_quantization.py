"""Quantization-aware training: the loss sees matrices of fewer and fewer bits, in a range that the state remembers."""

from collections.abc import Mapping

import torch

from fds.step import Memory, fill, transform


@transform
def fake_quantization(bits: Mapping[int, int], name: str = "ranges"):
    """Round what the loss sees of each matrix to multiples of range / (2^(b-1) - 1), and pass gradients through.

    `bits` says from which update on matrices have how many bits b: `{0: 8, 1000: 4}`. The range of a matrix is the
    largest absolute value that it has had (Jacob et al. 2018, arXiv:1712.05877), `state.slots[name]`.
    Ranks that have pieces of a matrix round by what all have had before, and by the piece's own values.
    """

    def zeros(shapes, device):
        return {path: torch.zeros((), device=device) for path, shape in shapes.items() if len(shape) > 1}

    def view(x, leaf, call):
        if len(leaf.shape) < 2:
            return x
        largest = x.detach().abs().max().float()
        call.note(name, leaf.name, largest)
        levels = torch.ones((), dtype=x.dtype, device=x.device)
        for update, b in sorted(bits.items()):  # a tensor of the schedule: nobody waits for `call.step`
            levels = torch.where(call.step >= update, 2.0 ** (b - 1) - 1, levels)
        limit = torch.maximum(call.slots[name][leaf.name], largest)
        grid = (limit.to(x.dtype) / levels).clamp_min(torch.finfo(x.dtype).tiny)
        rounded = (x / grid).round() * grid
        return x + (rounded - x).detach()

    return lambda step: fill(step, view=view, memory=Memory(name, zeros, "named", merge="max"))
