"""Law 11 on a GPU, or one that is pretended: where leaves live that are updated on the host changes no bit."""

import pytest
import torch

import fds
from fds import tree
from fds.media import Host, medium_of
from tests import devices, pretending
from tests.bits import assert_same_bits
from tests.laws.test_law_11_gathers import on_a_gpu
from tests.laws.test_law_11_on_the_host import loss, on_cpu, problem

GPU = torch.device("cuda", 0)
PLACES = {
    "masters too": {"moments": "host", "masters": "host"},
    "gradients too": {"moments": "host", "gradients": "host"},
    "everything": {"moments": "host", "masters": "host", "gradients": "host"},
    "on a disk": {"moments": "disk", "gradients": "disk"},
    "here and there": {"moments": {"0.*": "disk", "*": "host"}, "masters": {"*.bias": "host"}},
}


def is_locked(x):
    """Say whether a leaf is in page-locked memory."""
    return x.is_pinned() if devices.NAME == "cuda" else x.data_ptr() in pretending.DRIVER.locked


def memory(state):
    return [x.data_ptr() for x in tree.leaves((state.params, state.opt)) if not x.is_cuda]


def trained(place, donated):
    """Return what a run with leaves in a place returned, as tensors of the CPU, and its last state."""
    params, batch = problem()
    parts = [fds.offload(**place), *[fds.donate()] * donated, fds.skip_nonfinite(), fds.accumulate(2)]
    step = fds.compose(*parts, fds.adamw(0.01))(loss)
    state, found = step.init(tree.map(lambda x: x.to(GPU), params), key=1), []
    for factor in (1.0, torch.inf, 2.0, 3.0):
        before, places = step.evaluate(state, batch.to(GPU))["loss"], memory(state)
        state, metrics = step(state, batch.to(GPU) * factor)
        assert memory(state) == places or not donated
        found.append(on_cpu((before, state, metrics)))
    return found, state


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("place", PLACES)
def test_where_leaves_live_that_are_updated_on_the_host_changes_no_bit(tmp_path, place, donated):
    disk = fds.disk(tmp_path)
    told = tree.map(lambda one: disk if one == "disk" else one, PLACES[place])
    with on_a_gpu():
        want, _ = trained({"moments": "host"}, donated)
        got, state = trained(told, donated)
        assert_same_bits(got, want)
        leaves = [x for x in tree.leaves((state.params, state.opt)) if isinstance(medium_of(x), Host)]
        assert all(map(is_locked, leaves)) and bool(leaves) == (place != "on a disk")
