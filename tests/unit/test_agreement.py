"""What ranks agree on: entries of several kinds in one message, exactly where they are integers or maxima."""

import pytest
import torch

import fds
from fds.errors import RankError
from fds.step.agreement import Agreement

EDGES = [-torch.inf, -2.5, -0.0, 0.0, 3e300, torch.inf, torch.nan]


def together(job, ranks=3):
    return fds.simulate(lambda: job(fds.mesh(dp=-1)["dp"]), ranks)


@pytest.mark.parametrize("many", [False, True])
def test_the_largest_of_floats_and_integers_are_exact_in_one_message_or_two(many):
    floats = torch.tensor(EDGES, dtype=torch.float64).repeat(20 if many else 1)
    ints = torch.tensor([-(2**63), -1, 0, 2**53 + 1, 2**63 - 1])

    def job(axis):
        agreement = Agreement(axis, 4)
        most = agreement.largest(floats.roll(axis.index)), agreement.largest(ints.roll(axis.index))
        total = agreement.sum(ints[3:4])
        messages = [*agreement.messages()]
        agreement.count()
        assert torch.equal(total.value, 3 * ints[3:4])
        return [entry.value for entry in most], len(messages)

    shifted = torch.stack([floats.roll(i) for i in range(3)])
    want = shifted.amax(0)  # NaN where one is
    for (got, got_ints), messages in together(job):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got_ints, torch.stack([ints.roll(i) for i in range(3)]).amax(0))
        assert messages == 1 + many


def test_of_two_zeros_the_positive_one_is_larger():
    def job(axis):
        agreement = Agreement(axis, 0)
        entry = agreement.largest(torch.tensor([-0.0, -0.0 if axis.index else 0.0]))
        agreement.count()
        return entry.value.signbit().tolist()

    assert together(job) == [[True, False]] * 3


def test_one_rank_alone_sends_nothing_and_keeps_what_it_put_in():
    agreement, x = Agreement(None, 0), torch.tensor(3.0)
    entries = agreement.sum(x), agreement.norm(x), agreement.largest(x)
    agreement.count()
    assert all(entry.value is x for entry in entries) and not [*agreement.messages()]


def test_ranks_at_different_calls_are_told_so():
    def job(axis):
        agreement = Agreement(axis, 10**6 + axis.index)
        agreement.sum(torch.ones(()))
        with pytest.raises(RankError, match="different calls"):
            agreement.count()
        return True

    assert all(together(job))


def test_what_only_some_ranks_have_goes_beside():
    def job():
        mesh = fds.mesh(dp=2, tp=2)
        agreement = Agreement(mesh["dp", "tp"], 0)
        whole = agreement.sum(torch.ones(()))
        part = agreement.among(mesh["dp"], "buffers").sum(torch.tensor(1.0 + mesh["tp"].index))
        sizes = [(one.kind.what, one.count) for one in agreement.messages()]
        agreement.count()
        return float(whole.value), float(part.value), sizes

    assert [x[:2] for x in fds.simulate(job, 4)] == [(4.0, 2.0), (4.0, 4.0)] * 2
    assert fds.simulate(job, 4)[0][2] == [("scalars", 1), ("buffers", 1)]
