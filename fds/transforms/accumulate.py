"""Average gradients over `num_microbatches` consecutive slices of the batch.

Fills:  split                    State:  none
Law:    the hand-written loop over microbatches, bit for bit; accumulate(1) is the identity
Cost:   time x1; activations / n; one gradient buffer, summed into in place
Source: Huang et al. 2019, arXiv:1811.06965, section 2.2
"""

from fds.errors import count
from fds.step import Split, Step, fill, transform


@transform(num_microbatches=count(" takes a number of microbatches"))
def accumulate(num_microbatches: int):
    """Split the batch along dim 0 into `num_microbatches` views and sum their gradients before the update.

    Microbatch means combine as `Mean`s do: sum(total) / sum(weight). Tensors of one or more dims are sliced; 0-d
    tensors, other leaves and `fds.whole(x)` go whole to each microbatch. A list of texts, or anything but a tensor
    that has an entry for each row, is refused: the loss would pair it with other rows.

    Raises `ComposeError` for a count below 1 or a second accumulation; the step raises `BatchError` for leaves that
    disagree in length, do not divide or cannot be cut.
    """

    def apply(step: Step) -> Step:
        product = f"accumulate({step.split.num_microbatches * num_microbatches})"
        if "execute" in step.composing.owners:
            hint, instead = "a pipeline accumulates over its microbatches: pipeline(..., num_microbatches=...)", None
        else:
            hint, instead = f"two accumulations are their product: {product}", product
        return fill(step, split=Split(num_microbatches), hint=hint, instead=instead)

    return apply
