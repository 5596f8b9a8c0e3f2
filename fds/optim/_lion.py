"""Lion: updates by the sign of a momentum."""

from __future__ import annotations

from torch import Tensor

from fds.errors import checked_call
from fds.optim.arguments import call_text, check_betas, check_numbers
from fds.optim.assembly import Now, assemble, lerp
from fds.optim.base import LRSchedule, Optimizer


@checked_call
def lion(
    lr: LRSchedule = 1e-4, betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.99), weight_decay: LRSchedule = 0.0
) -> Optimizer:
    """Move every element by lr against the sign of its momentum.

    Element by element::

        u = sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        p = p - lr * (u + weight_decay * p)

    Slot: exp_avg (m).

    Args:
        lr: learning rate, a third to a tenth of AdamW's; it, the betas and weight_decay may be schedules f(t).
        betas: weight of the momentum in the direction, and in its own update, in [0, 1).
        weight_decay: decoupled, three to ten times AdamW's.

    Torch operators update all parameters. On a GPU a kernel of fds can, float32 and 16-bit ones in one launch, where it
    is chosen (`fds.kernels.chosen`), unless a beta or weight_decay follows a schedule.

    Raises `OptimizerError` for a value out of range.
    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.

    >>> lion(betas=(0.95, 0.98))
    lion(lr=0.0001, betas=(0.95, 0.98))
    """
    text = call_text(lion, locals())
    check_numbers("lion", lr=lr, weight_decay=weight_decay)
    check_betas("lion", betas)
    hyper = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay}
    return assemble(_rule, text=text, hyper=hyper, slots={"exp_avg": 0.0}, elementwise=True, kernel=_kernel)


def _kernel(
    params: list[Tensor], grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now, out: list[Tensor | None]
) -> None:
    from fds.kernels.optimizers import lion_update  # loads Triton, so only where it runs

    beta1, beta2, weight_decay = now.read("beta1", "beta2", "weight_decay")
    lion_update.lion(
        params,
        grads,
        opt["exp_avg"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        out=out,
        **now.read_on_device(),
    )


def _rule(params: list[Tensor], grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    for p, g, m in zip(params, now.unscale(grads), opt["exp_avg"], strict=True):
        direction = lerp(m, g, 1 - beta1).sign_()
        now.write(m, lerp(m, g, 1 - beta2))
        now.write(p, (p * (1 - lr * weight_decay)).sub_(direction.mul_(lr)))
