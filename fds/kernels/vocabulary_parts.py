"""Cross-entropy of tokens whose logits lie in parts of the vocabulary: a message of each part, and its gradient.

For the row x (V,) of one token with target t, of which part r has the columns J_r, smoothing e, and z::

    part r:    m_r = max_j(x_j)    s_r = sum_j(exp(x_j - m_r))    a_r = x_t if t in J_r else 0    b_r = sum_j(x_j)
    all:       m = max_r(m_r)      l = log(sum_r(s_r * exp(m_r - m)))             lse = m + l
    loss = l + (1 - e) * (m - sum_r(a_r)) + e * (m - sum_r(b_r) / V) + z * lse^2
    dx_j = dloss * (exp(x_j - m) * exp(-l) * (1 + 2 * z * lse) - (1 - e) * [j = t] - e / V)

Logits (N, V_r), `columns` (N,) int64: the target's column in this part, ELSEWHERE or IGNORED. A part's message is
(3, N), or (4, N) with b_r, in float32 (float64 for float64). A part may have no columns.

Moves: `statistics` reads logits once, `gradient` reads them and writes their gradient, in blocks of rows that a cache
holds: beside logits and their gradient there is one block in float32. Saves: logits, columns, m and l.
Sources:
1. Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3: maxima and sums of parts combined.
2. Shoeybi et al. 2019, arXiv:1909.08053, section 3: the loss of parts of the vocabulary, without gathering logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fds.kernels import arguments
from fds.kernels.operators import operator

ELSEWHERE, IGNORED = -1, -2
# Of a block of rows: what the cache of a core holds (4096 rows of 25k columns: 0.12 s with 1 to 8 MB, 0.15 with 16 MB
# and 0.31 without blocks), and on a GPU few launches.
BLOCK_BYTES = {"cpu": 2**22, "cuda": 2**28}


@operator("vocabulary_statistics", lambda *args: _message(*args))
def statistics(logits: Tensor, columns: Tensor, smoothed: bool) -> Tensor:
    """Return the message of a part: (m_r, s_r, a_r), each (N,), and b_r if smoothed."""
    message = _message(logits, columns, smoothed).zero_()
    lowest = torch.finfo(message.dtype).min  # finite: two minus infinities have no difference
    if not logits.shape[1]:
        message[0] = lowest
        return message
    for rows, x, block in _blocks(logits, message.dtype):
        torch.amax(x, 1, out=message[0, rows]).clamp_(min=lowest)
        if smoothed:
            torch.sum(x, 1, out=message[3, rows])
        torch.sum(torch.sub(x, message[0, rows, None], out=block).exp_(), 1, out=message[1, rows])
    message[2] = logits.gather(1, columns.clamp(min=0)[:, None])[:, 0].masked_fill(columns < 0, 0.0)
    return message


def _message(logits: Tensor, columns: Tensor, smoothed: bool) -> Tensor:
    return logits.new_empty(4 if smoothed else 3, len(columns), dtype=arguments.width(logits))


def combined(
    messages: Tensor, label_smoothing: float, per_class: float | Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token (N,) and norms (2, N), m and l, of messages (parts, 3 or 4, N).

    `per_class` is e / V.
    """
    top = messages[:, 0].amax(0)
    log_sum = (messages[:, 1] * (messages[:, 0] - top).exp_()).sum(0).log_()
    loss = log_sum + (1 - label_smoothing) * (top - messages[:, 2].sum(0))
    if label_smoothing:
        loss += label_smoothing * top - per_class * messages[:, 3].sum(0)
    if z_loss:
        loss += z_loss * (top + log_sum).square()
    return loss, torch.stack([top, log_sum])


def factors(dloss: Tensor, norms: Tensor, label_smoothing: float, per_class: float | Tensor, z_loss: float) -> Tensor:
    """Return factors (3, N) for `gradient`: of exp(x - m), of the target, and of every column if smoothed."""
    of_probability = dloss * (-norms[1]).exp()
    if z_loss:
        of_probability = of_probability * (1 + 2 * z_loss * norms.sum(0))
    return torch.stack([of_probability, dloss * (1 - label_smoothing), dloss * per_class])


def write_gradient(
    logits: Tensor, columns: Tensor, norms: Tensor, factors: Tensor, smoothed: bool, out: Tensor
) -> None:
    """Write the gradient of this part's logits to `out`, which may be the logits."""
    top, is_ignored, at = norms[0], columns == IGNORED, columns.clamp(min=0)[:, None]
    of_probability, of_target, of_every = factors[:, :, None]
    of_target = -of_target.masked_fill(columns[:, None] < 0, 0.0)
    for rows, x, dx in _blocks(logits, top.dtype):
        torch.sub(x, top[rows, None], out=dx).exp_().mul_(of_probability[rows])
        if smoothed:
            dx -= of_every[rows]
        dx.scatter_add_(1, at[rows], of_target[rows])
        _zero_rows(dx, is_ignored[rows])
        out[rows] = dx


@operator("vocabulary_gradient", lambda logits, *_: torch.empty_like(logits))
def gradient(
    logits: Tensor, columns: Tensor, norms: Tensor, factors: Tensor, smoothed: bool, num_columns: int
) -> Tensor:
    """Return the gradient of logits, of which the first `num_columns` count; that of the rest is zero."""
    out = torch.empty_like(logits)
    out[:, num_columns:].zero_()
    write_gradient(logits[:, :num_columns], columns, norms, factors, smoothed, out[:, :num_columns])
    return out


def _zero_rows(x: Tensor, which: Tensor) -> None:
    """Fill rows with zeros, whatever they hold."""
    if x.is_cuda:
        x.masked_fill_(which[:, None], 0.0)
    else:  # a mask of rows costs half as much again as the rest of the gradient, and here nobody waits for a number
        x.index_fill_(0, which.nonzero()[:, 0], 0.0)


def _blocks(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of rows, their logits in `dtype`, and memory for as many, which may be that of the logits.

    About `BLOCK_BYTES` at a time; nothing if there are no columns.
    """
    num_rows, num_columns = logits.shape
    most = BLOCK_BYTES["cpu" if logits.device.type == "cpu" else "cuda"] // (dtype.itemsize * max(num_columns, 1))
    step = min(max(most, 1), num_rows)
    memory = logits.new_empty(step, num_columns, dtype=dtype)
    for start in range(0, num_rows if num_columns else 0, max(step, 1)):
        rows, block = slice(start, start + step), memory[: num_rows - start]
        yield rows, logits[rows] if logits.dtype == dtype else block.copy_(logits[rows]), block
