"""Tensors that say that they are on a GPU, for what is decided by that alone."""

import torch


class Pretended(torch.Tensor):
    """A tensor on the CPU whose `is_cuda` is true."""

    is_cuda = True
