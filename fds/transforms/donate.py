"""Give up the old state: the step writes over it, and allocates no memory for the new one.

Fills:  place                    State:  none
Law:    the same results, bit for bit; a state that was given up is refused by every entry of fds
Cost:   less: no second copy of parameters, optimizer state and averages
Source: jax.jit's donate_argnums, as a transform
"""

from fds.step import Step, fill, transform


@transform
def donate():
    """Let `step(state, batch)` write over the state it is given; use what it returns.

    A tensor that something else holds too (a state that was made of this one by `fds.tree.map`, a view, an array) is
    copied instead of written over, and so is one in a dataclass, a `Mapping` or a class other than dict, list, tuple
    and slotted attrs records, since references to it cannot be counted. An error before the first write leaves the
    state usable. Any function of fds that is given a state which was donated before raises a `DonatedStateError`.
    """

    def apply(step: Step) -> Step:
        return fill(step, place={"donate": True})

    return apply
