"""What ranks along an axis do, and how a parameter may lie along it: the rest is refused, by the table of both."""

import pytest
import torch

import fds
from fds.collectives import all_gather, all_reduce
from fds.errors import ComposeError
from fds.step import Dimension, Placement, Replicated, SplitDim, fill, transform

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=DRAW, dtype=torch.float64)
PARAMS = {"w": torch.randn(4, 6, generator=DRAW, dtype=torch.float64), "v": torch.randn(4, generator=DRAW).double()}
PLAIN = lambda p, x: (torch.tanh(x @ p["w"].T) @ p["v"]).square().mean()

FITS = {  # how a parameter lies -> in which roles
    SplitDim(0): ("tensor", "data", "sequence"),
    Replicated("same"): ("tensor",),
    Replicated("sum"): ("data", "sequence", "stage"),  # and tensor, of what meets pieces
}
ROLES = ("tensor", "data", "sequence", "stage", "local")


@transform
def dimension(axis, role, lies):
    class Lying(Placement):
        def __init__(self):
            self.axis = axis

        def lies(self, name):
            return lies

    return lambda step: fill(step, topology=Dimension(axis, role, Lying()))


def divided(axis, role, lies):
    """Return a loss that ranks of the role compute, as one rank computes it of all rows."""

    def loss(p, x):
        if not isinstance(lies, SplitDim):
            return PLAIN(p, x)
        part = torch.tanh((x if role == "tensor" else all_gather(x, axis)) @ p["w"].T) @ p["v"]
        if role == "tensor":
            return (part + (all_reduce(part.detach(), axis) - part.detach())).square().mean()
        return all_reduce(part, axis).chunk(axis.size)[axis.index].square().mean()

    return loss


def trained(role, lies):
    axis = fds.mesh(n=2)["n"]
    step = fds.compose(dimension(axis, role, lies), fds.sgd(0.1))(divided(axis, role, lies))
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, X if role in ("tensor", "stage") else X.chunk(2)[axis.index])
    return step.params(state)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("lies", FITS, ids=str)
def test_what_fits_is_one_rank_and_the_rest_is_refused(role, lies):
    if (role, lies) == ("tensor", Replicated("sum")):
        return  # an odd use here; `tensor_parallel` has it for norms of heads
    if role in FITS[lies]:
        plain = fds.compose(fds.sgd(0.1))(PLAIN)
        state = plain.init(PARAMS)
        for _ in range(2):
            state, _ = plain(state, X)
        for found in fds.simulate(lambda: trained(role, lies), 2):
            torch.testing.assert_close(found, state.params, rtol=1e-14, atol=1e-15)
        return
    with pytest.raises(ComposeError, match="contradicts the role of its axis") as caught:
        fds.simulate(lambda: trained(role, lies), 2)
    assert f"{role} over n (2 ranks)" in caught.value.where and str(lies) in caught.value.got


def test_copies_of_their_own_are_of_a_local_axis_alone():
    for role in ROLES[:-1]:
        with pytest.raises(ComposeError):
            fds.simulate(lambda role=role: trained(role, fds.step.placements.Local()), 2)
