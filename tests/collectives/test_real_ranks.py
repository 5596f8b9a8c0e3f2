"""Gloo's ranks compute what simulated ranks do, to the bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fds import collectives as c
from fds.collectives.links import ALIKE, dry
from fds.errors import FdsError, MeshError, RankError
from tests import ranks
from tests.bits import assert_same_bits
from tests.collectives.cases import CASES, Example, axis, random_tensors


def every_function(size: int) -> list[Example]:
    shapes = {"all_gather": [(3,), (2, 5), (0, 2)], "all_reduce": [(), (7,), (300, 301)], "broadcast": [(4, 3)]}
    divided = [(2 * size,), (3, 4 * size), (0, size)]
    found = []
    for name, case in CASES.items():
        for i, shape in enumerate(shapes.get(name, divided)):
            arguments = {1: (len(shape) - 1,), 2: (len(shape) - 1, 0)}.get(case.dims, (size - 1,) * case.source)
            dtypes = (torch.float32, torch.bfloat16, torch.int64)
            found += [Example(name, size, shape, dtype, arguments, seed=i) for dtype in dtypes]
    return found


def call_every_function() -> list:
    a, results = axis(), []
    for example in every_function(a.size):
        x = example.inputs()[a.index]
        if not example.dtype.is_floating_point:
            results.append(example(x))
            continue
        x.requires_grad_()
        out = example(x)
        results += [out.detach(), torch.autograd.grad((out * out).sum(), x)[0]]
    return results


def use_the_raw_core(sizes: tuple[int, ...]) -> list:
    """Start everything on two axes at once, at sizes on both sides of every threshold."""
    mesh = c.mesh(a=-1, b=2 if axis().size == 4 else 1)
    results, works = [], []
    for a in (mesh["a"], mesh["b"], mesh["b", "a"]):
        for n in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                part, whole, other = random_tensors([(n,), (a.size * n,), (a.size * n,)], dtype, a.index)
                inside, own = whole.clone(), slice(a.index * n, (a.index + 1) * n)
                gathered = torch.zeros(a.size * n, dtype=dtype)
                gathered[own] = part
                outs = [torch.empty_like(whole), gathered, torch.empty_like(part), inside[own], torch.empty_like(other)]
                reduced = [other.clone(), other.clone(), other.clone()]
                works += [
                    a.start_all_gather(outs[0], part),
                    a.start_all_gather(gathered, gathered[own]),
                    a.start_reduce_scatter(outs[2], whole),
                    a.start_reduce_scatter(outs[3], inside),
                    a.start_all_to_all(outs[4], other),
                    *(a.start_all_reduce(x, op) for x, op in zip(reduced, ("sum", "max", "min"), strict=True)),
                    a.start_broadcast(copied := part.clone(), a.size - 1),
                ]
                if a.size > 1:
                    arrived = torch.empty_like(part)
                    works.append(a.start_send(part, (a.index + 1) % a.size))
                    works.append(a.start_recv(arrived, (a.index - 1) % a.size))
                    outs.append(arrived)
                results += [*outs, *reduced, copied]
        results.append(torch.tensor(a.exchange(mesh.rank)))
        results.append(torch.tensor(a.exchange_numbers([mesh.rank, 2**62])))
    for work in works:
        work.wait()
    mesh["a"].barrier()
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_functions_and_their_gradients(size):
    assert_same_bits(ranks.run(call_every_function, world_size=size), c.simulate(call_every_function, size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_raw_core_with_everything_in_flight(size):
    sizes = (0, 1, 5, 70_001)  # 70_001 float32 are more than is exchanged whole, and do not divide
    real = ranks.run(use_the_raw_core, sizes, world_size=size)
    assert_same_bits(real, c.simulate(lambda: use_the_raw_core(sizes), size))


def count() -> dict:
    with c.counted() as traffic:
        call_every_function()
    return traffic.counts


def test_real_ranks_count_the_same():
    assert ranks.run(count) == c.simulate(count, 2)


def convert() -> tuple:
    mesh = c.mesh(a=2, b=2)
    torchs = mesh.to_torch()
    x = torch.ones(1) * mesh.rank
    dist.all_reduce(x, group=torchs.get_group("a"))
    back = c.from_torch(torchs)
    sub = c.from_torch(torchs["b"])
    with pytest.raises(MeshError, match="no names"):
        c.from_torch(dist.DeviceMesh("cpu", [0, 1, 2, 3]))
    return x.item(), back == mesh, sub.shape, sub["b"].ranks, sub["b"].exchange(mesh.rank), torchs.mesh_dim_names


def test_a_mesh_becomes_torchs_and_comes_back():
    assert ranks.run(convert, world_size=4) == [
        (2, True, {"b": 2}, (0, 1), [0, 1], ("a", "b")),
        (4, True, {"b": 2}, (0, 1), [0, 1], ("a", "b")),
        (2, True, {"b": 2}, (2, 3), [2, 3], ("a", "b")),
        (4, True, {"b": 2}, (2, 3), [2, 3], ("a", "b")),
    ]


def be_somewhere_else() -> tuple:
    c.init_distributed()
    simulated = c.simulate(lambda: (c.init_distributed(), axis().exchange(axis().index))[1], 3)
    with pytest.raises(FdsError, match="gloo carries tensors of the CPU"):
        axis().start_all_reduce(torch.ones(1, device="meta"))
    return axis().size, axis().device, len(simulated), c.mesh(dp=-1)["dp"] == axis()


def test_a_second_start_changes_nothing_and_a_real_rank_may_simulate():
    assert ranks.run(be_somewhere_else) == [(2, torch.device("cpu"), 3, True)] * 2


def scratch_sizes(link: Any) -> list[int]:
    return [len(memory) for memory in link.scratch.free]


def hold(n: int) -> list[int]:
    a, whole, out = axis(), torch.ones(axis().size * n), torch.empty(n)
    for _ in range(5):
        a.start_reduce_scatter(whole[a.index * n : (a.index + 1) * n], whole).wait()
        a.start_reduce_scatter(out, whole).wait()
        a.start_all_reduce(whole).wait()
    return scratch_sizes(a._link)


def test_scratch_is_what_was_in_use_at_once():
    assert ranks.run(hold, 50_000, world_size=3) == [[4 * 50_000] * 2] * 3  # a piece from each of the others


def rehearse(n: int) -> list:
    """Start collectives of what all ranks have alike, then again without the others."""
    a, found = axis(), []
    link: Any = a._link
    for alone in (False, True):
        token = dry.set(ALIKE if alone else None)
        whole, part = torch.arange(a.size * n).float(), torch.arange(n).float()
        outs = [torch.zeros(n), torch.zeros(a.size * n), torch.zeros(a.size * n), whole.clone()]
        works = [
            a.start_reduce_scatter(outs[0], whole),
            a.start_all_gather(outs[1], part),
            a.start_all_to_all(outs[2], whole),
            a.start_all_reduce(outs[3]),
            a.start_reduce_scatter(whole[a.index * n : (a.index + 1) * n], whole),
        ]
        for work in works:
            work.wait()
        dry.reset(token)
        outs.append(whole[a.index * n : (a.index + 1) * n])
        found.append((outs, scratch_sizes(link.alike if alone else link)))
    return found


@pytest.mark.parametrize("n", [5, 50_000])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_alone_has_the_numbers_and_the_memory_of_ranks_that_are_alike(n, size):
    for (outs, memory), (alone, memory_alone) in ranks.run(rehearse, n, world_size=size):
        assert_same_bits(outs, alone)
        assert memory == memory_alone != []


def reduce_large(n: int) -> bool:
    x = (torch.arange(n) % 1000).float() * (axis().index + 1)
    axis().start_all_reduce(x).wait()
    return torch.equal(x, (torch.arange(n) % 1000).float() * 3)


def test_two_ranks_reduce_pieces_beyond_a_size():
    assert ranks.run(reduce_large, 2**23 + 1) == [True, True]


def exchange_for_purposes() -> str:
    with pytest.raises(RankError, match="different collectives") as error:
        axis().exchange(1, f"purpose {axis().index}")
    return str(error.value)


def test_real_ranks_that_exchange_for_different_purposes_are_told():
    for words in ranks.run(exchange_for_purposes):
        assert "purpose 0" in words and "purpose 1" in words
