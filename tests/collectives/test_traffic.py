"""Counting: calls and bytes by operation and axis, for whoever asks."""

import pytest
import torch

from fds import collectives as c
from fds.collectives.traffic import Count
from tests.collectives.cases import axis


def test_each_rank_counts_what_it_sends():
    def run():
        a, x = axis(), torch.ones(12)
        with c.counted() as traffic:
            c.all_gather(x, a)
            c.all_gather(x.double(), a)
            c.reduce_scatter(x, a)
            c.all_reduce(x, a)
            c.all_reduce(torch.ones(300_000), a)
            c.all_to_all(x, a)
            c.broadcast(x, a, 1)
            if a.index == 0:
                c.send(x, a, 1)
            if a.index == 1:
                c.recv(x, a, 0)
            a.barrier()
            a.exchange([1])
            a.exchange_numbers([1, 2, 3])
        return traffic.counts, traffic.bytes_sent

    for rank, (counts, total) in enumerate(c.simulate(run, 3)):
        want = {
            "all_gather": Count(3, 48 * 2 + 96 * 2 + 24 * 2),  # the third of numbers on the host, 8 bytes each
            "reduce_scatter": Count(1, 16 * 2),
            "all_reduce": Count(2, 48 * 2 + 4 * 400_000),
            "all_to_all": Count(1, 16 * 2),
            "broadcast": Count(1, 48 * 2 if rank == 1 else 0),
            "send": Count(1, 48),
            "recv": Count(1, 0),
            "barrier": Count(1, 2),
            "exchange": Count(1, 6),
        }
        want = {(op, "dp"): count for op, count in want.items() if op != ("recv", "send", "")[rank]}
        if rank == 2:
            want.pop(("send", "dp"))
            want.pop(("recv", "dp"))
        assert counts == want
        assert total == sum(count.bytes_sent for count in want.values())


def test_backward_passes_count_and_axes_are_told_apart():
    def run():
        mesh, x = c.mesh(pp=2, dp=2), torch.ones(4, requires_grad=True)
        with c.counted() as outer:
            y = c.all_gather(x, mesh["dp"])
            with c.counted() as inner:
                c.all_reduce(y, mesh["pp"]).sum().backward()
        c.all_reduce(x, mesh["pp"])
        return outer.counts, inner.counts

    of_backward = {("all_reduce", "pp"): Count(2, 2 * 32), ("reduce_scatter", "dp"): Count(1, 16)}
    for outer, inner in c.simulate(run, 4):
        assert inner == of_backward
        assert outer == {**of_backward, ("all_gather", "dp"): Count(1, 16)}


def test_an_axis_of_one_rank_sends_nothing():
    with c.counted() as traffic:
        c.all_reduce(torch.ones(2), axis())
        axis().start_all_gather(torch.empty(2), torch.ones(2)).wait()
    assert traffic.counts == {} and traffic.bytes_sent == 0 and traffic["all_reduce", "dp"] == Count()


def test_counting_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), c.counted():
        _ = 1 / 0
    assert axis().world.counters == []
