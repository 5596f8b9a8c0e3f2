"""Gradual magnitude pruning: after some updates the smallest weights of all matrices together become and stay zero."""

from collections.abc import Callable

import torch
from torch import Tensor

import fds
from fds.collectives import Axis
from fds.step import fill, transform


class Prunes:
    """Write the mask, which lies as the optimizer's slots do, and zeros into the parameters."""

    writes, draws = "params", False

    def __init__(self, sparsity, every, axis):
        self.sparsity, self.every, self.axis = sparsity, every, axis

    def init(self, segments, *, params):
        return {"mask": [torch.ones_like(p) for p in params]}

    def owns(self, slot):
        return slot == "mask"

    agrees = owns

    def __call__(self, structure, params, opt, *, skip, call):
        group = call.dimensions.group  # the ranks that make one update together
        if (1 if group is None else group.size) != (1 if self.axis is None else self.axis.size):
            raise fds.FdsError("magnitude_pruning needs the axis of all ranks that share the step", got=f"{self.axis}")
        # of this rank's slices, which have padding and parts of all parameters, those of matrices
        parts = [(i, s) for i, segments in enumerate(structure.segments) for s in segments if len(s.shape) > 1]
        weights, masks = ([x[i][s.offset : s.offset + s.length] for i, s in parts] for x in (params, opt["mask"]))
        if (call.calls + 1) % self.every == 0:  # known on the host, since ranks meet
            bits = [x.abs().float().view(torch.int32) for x in weights]  # integers in the order of the magnitudes
            places = [entry.placement for entry in call.dimensions.entries]
            counts = [all(place.counts([s.name])[0] for place in places) for _, s in parts]
            counted = [b for b, is_counted in zip(bits, counts, strict=True) if is_counted]  # on one of the ranks
            least = self.threshold(counted, self.sparsity((call.step + 1).double()), call.device)
            for mask, b in zip(masks, bits, strict=True):
                new = (b >= least).to(mask.dtype)
                mask.copy_(new if skip is None else torch.where(skip, mask, new))
        for x, mask in zip(weights, masks, strict=True):
            x.mul_(mask)  # in a skipped step too: what is masked is zero already

    def threshold(self, bits, share, device):
        """Return the largest integer below which are no more than this share of all elements on all ranks."""
        total = self.summed(torch.tensor(sum(b.numel() for b in bits), device=device))
        least = torch.zeros((), dtype=torch.int64, device=device)
        for digit in reversed(range(31)):
            higher = least + 2**digit
            below = self.summed(sum(((b < higher).sum() for b in bits), torch.zeros_like(total)))
            least = torch.where(below <= share * total, higher, least)
        return least

    def summed(self, count):
        if self.axis is not None and self.axis.size > 1:
            self.axis.start_all_reduce(count).wait()
        return count

    def bytes_sent(self, structure):
        sent = 0 if self.axis is None else 2 * 32 * 8 * (self.axis.size - 1) / self.axis.size
        return sent, sent / self.every  # the most in a call, the mean

    def messages(self, structure):
        return []


@transform
def magnitude_pruning(sparsity: Callable[[Tensor], Tensor], every: int, axis: Axis | None = None):
    """Zero the share `sparsity(t)` of all elements of matrices, the smallest, and keep them zero until it is more.

    The mask is made anew in every `every`th call, after t updates (Zhu & Gupta 2017, arXiv:1710.01878); a skipped one
    leaves it to the next. `axis` has all ranks that share the step, such as `mesh["dp"]` or `mesh["pp", "dp"]`.
    """
    rule = Prunes(sparsity, every, None if axis is None else axis.channel("magnitude_pruning"))
    return lambda step: fill(step, after=rule)
