"""Law 11 of averages: wherever they live they have the bits of the plain step, and come to memory a chunk at a time."""

import os
from contextlib import nullcontext
from pathlib import Path

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.errors import ComposeError, DiskError
from fds.media import extent_of, medium_of
from fds.step import Memory, fill, transform
from fds.transforms.ema import Average
from tests.bits import assert_same_bits
from tests.laws import problems as held
from tests.laws.mapped import Mapped, mapped
from tests.laws.test_law_11_gathers import Watched, on_a_gpu
from tests.laws.test_law_11_on_the_host import Hosted, loss, on_cpu, problem
from tests.laws.test_law_11_residency import bad, same_run
from tests.storage.topologies import Topology

DISK = "a small disk"  # whose buffers take a page
WHERE = {
    "disk": {"averages": DISK},
    "host": {"averages": "host"},
    "masters too": {"averages": DISK, "masters": DISK},
    "masters alone": {"masters": DISK},
    "everything": {"moments": "host", "masters": DISK, "gradients": DISK, "averages": DISK},
    "patterns": {"averages": {"*.weight": DISK, "0.*": "host"}, "moments": DISK},
    "a part": {"averages": DISK, "ratio": 0.6},
}
TWO = [fds.ema(0.9), fds.ema(0.5, name="fast")]


def offload(where, folder):
    disk = fds.disk(folder, buffer_bytes=4096)
    return fds.offload(**tree.map(lambda one: disk if one == DISK else one, WHERE[where]))


BOTH = [(where, bool((i + j) % 2)) for i, where in enumerate(WHERE) for j in range(1 + (where in ("disk", "host")))]


@pytest.mark.parametrize(("where", "donated"), BOTH)
def test_averages_have_the_bits_of_the_plain_step_wherever_they_live(tmp_path, where, donated):
    """Of frozen parameters too, which their averages do not equal."""
    case = held.layers(5, torch.float32, 0.3, False)
    parts = [*TWO, fds.freeze("0.*weight"), fds.precision(torch.float16), fds.loss_scale(2.0**10), fds.adamw(0.01)]
    plain = fds.compose(*parts)(case.loss)
    placed = fds.compose(offload(where, tmp_path), *parts, *[fds.donate()] * donated)(case.loss)
    states = [step.init(case.params, key=3) for step in (plain, placed)]
    for state in states:
        for x in tree.leaves(state.slots["fast"]):
            x.add_(1)
    for batch in (case.batch, bad(case.batch), case.batch):
        before = tree.map(torch.clone, states[1]) if not donated else None
        old, found = states[1], [step(state, batch) for step, state in zip((plain, placed), states, strict=True)]
        assert_same_bits(found[1], found[0])
        if before is not None:
            assert_same_bits(old, before)
        states = [state for state, _ in found]
    assert int(states[1].step) == 2
    shown = [
        step.evaluate(attrs.evolve(state, params=state.slots["fast"]), case.batch)
        for step, state in zip((plain, placed), states, strict=True)
    ]
    assert_same_bits(shown[1], shown[0])


@pytest.mark.parametrize("stage", range(4))
def test_at_every_stage_and_through_a_save(tmp_path, stage):
    case = held.layers(7, torch.float32, 0.0, False)
    for name in ("leaves", "saves"):
        (tmp_path / name).mkdir()

    def body():
        parts = [Topology(2, stage, 64).shard(), *TWO, fds.skip_nonfinite(), *[fds.donate()] * (stage % 2)]
        parts += [fds.adamw(0.01)]
        plain = fds.compose(*parts)(case.loss)
        placed = fds.compose(offload("everything", tmp_path / "leaves"), *parts)(case.loss)
        want, state = same_run(plain, placed, case, [case.batch, bad(case.batch), case.batch], donated=stage % 2 == 1)
        if stage < 3:
            return
        fds.save(tmp_path / "saves", state, placed)
        again, _ = fds.load(tmp_path / "saves", placed, case.params)
        assert_same_bits(again, want)
        averages = lambda step, state: step.params(attrs.evolve(state, params=state.slots["ema"]))
        assert_same_bits(averages(placed, again), averages(plain, want))
        assert_same_bits(placed(again, case.batch), plain(want, case.batch))

    fds.simulate(body, 2)


class Reading(Watched):
    """Reads copies of leaves too."""

    def read(self, old, device):
        for x in old:
            self.names.setdefault(x.data_ptr(), "a copy")
        return super().read(old, device)


@pytest.mark.parametrize("where", ["host", "disk", "masters too", "masters on the host", "on the device", "files"])
def test_beside_a_gpu(tmp_path, where):
    donated = where in ("host", "masters too", "files")
    told = {
        "masters on the host": lambda: fds.offload(masters="host"),
        "on the device": lambda: mapped(Reading(tmp_path, ("slots", "params"))),
        "files": lambda: mapped(Hosted(tmp_path, "files", kinds=("slots",), some=lambda x: "0.bias" not in x.names)),
    }
    params, batch = problem()

    def trained(parts):
        here = torch.empty(0).device
        step = fds.compose(*parts, *TWO, fds.skip_nonfinite(), *[fds.donate()] * donated, fds.adamw(0.01))(loss)
        state, found = step.init(tree.map(lambda x: x.to(here), params), key=1), []
        for factor in (1.0, torch.inf, 2.0):
            state, metrics = step(state, batch.to(here) * factor)
            averages = attrs.evolve(state, params=tree.map(lambda x: x.to(here), state.slots["ema"]))
            shown = step.evaluate(averages, batch.to(here))["loss"]
            found.append(on_cpu((state, metrics["loss"], metrics["skipped"], shown)))
        return found, {x.device.type for x in tree.leaves(state.slots)}

    want, _ = trained([])
    with on_a_gpu():
        got, devices = trained([told.get(where, lambda: offload(where, tmp_path))()])
    assert_same_bits(got, want)
    assert devices == {"masters on the host": {"cuda"}, "files": {"cuda", "cpu"}}.get(where, {"cpu"})


@attrs.frozen
class Towards:
    """What follows an update: a slot that moves by a part of the way, all of it at once or a piece at a time."""

    elementwise: bool
    by: float = 0.25
    slot = "towards"
    draws = False

    def __call__(self, slot, params, skip, call):
        return tree.map(lambda e, p: e + (p - e) * self.by, slot, params)


@transform
def towards(*those):
    def apply(step):
        for one in those:
            step = fill(step, after=one)
        first = lambda params, device: tree.map(torch.zeros_like, params)
        return fill(step, memory=Memory("towards", first, "parameters"))

    return apply


@pytest.mark.parametrize("elementwise", [(True,), (True, True), (True, False), (False, True)])
def test_several_may_write_a_slot_and_one_that_is_given_it_whole_is(tmp_path, elementwise):
    case = held.layers(5, torch.float32, 0.0, False)
    parts = [towards(*(Towards(one, 0.25 / (i + 1)) for i, one in enumerate(elementwise))), fds.sgd(0.1)]
    plain = fds.compose(*parts)(case.loss)
    residency = Mapped(tmp_path, ("slots",))
    placed = fds.compose(mapped(residency), *parts)(case.loss)
    same_run(plain, placed, case, [case.batch] * 2)
    calls = 0 if not all(elementwise) else 2 * len(elementwise) * len(tree.leaves(case.params))
    assert sum(line.startswith("has read") for line in residency.log) == calls


@pytest.mark.parametrize("masters", [None, "host"])
def test_one_that_is_given_the_slot_whole_is_refused_beside_a_gpu(tmp_path, masters):
    params, _ = problem()
    step = fds.compose(fds.offload(averages="host", masters=masters), towards(Towards(False)), fds.sgd(0.1))(loss)
    fds.save(tmp_path, step.init(params), step)
    with on_a_gpu():
        there = tree.map(lambda x: x.to(torch.empty(0).device), params)
        for refused in (lambda: step.init(there), lambda: fds.load(tmp_path, step, there)):
            with pytest.raises(ComposeError, match="follows an update all at once"):
                refused()


class AtOnce(Average):
    """An average whose memory is written in place, all of it at once."""

    elementwise = False


@pytest.mark.parametrize("kind", [Average, AtOnce])
def test_what_is_read_of_averages_is_compared_with_what_was_written(tmp_path, kind):
    params, batch = problem()
    disk, average = fds.disk(tmp_path, checksums=True), kind("towards", 0.9)
    parts = [towards(average), fds.donate(), fds.sgd(0.1)]
    plain, step = fds.compose(*parts)(loss), fds.compose(fds.offload(averages=disk), *parts)(loss)
    want, state = plain.init(params), step.init(params)
    for _ in range(3):
        want, state = plain(want, batch)[0], step(state, batch)[0]
    leaves = tree.leaves(state.slots)
    assert_same_bits(disk.read(leaves, leaves[0].device)(), tree.leaves(want.slots))
    extent = extent_of(leaves[0])
    assert extent is not None
    with open(f"/proc/self/fd/{extent.fd}", "r+b", buffering=0) as file:  # what no write of ours put there
        os.pwrite(file.fileno(), bytes(16), extent.offset)
    with pytest.raises(DiskError, match="other bytes than were written") if average.elementwise else nullcontext():
        step(state, batch)


@pytest.mark.parametrize("masters", [(), ("params",)])
def test_no_more_is_read_at_once_than_is_told(tmp_path, masters):
    case = held.layers(5, torch.float32, 0.0, False)
    residency = Watched(tmp_path, ("slots", *masters), size=2)
    step = fds.compose(mapped(residency), *TWO, fds.donate(), fds.adamw(0.01))(case.loss)
    state = step.init(case.params)
    state, _ = step(state, case.batch)
    residency.most = 0
    state, _ = step(state, case.batch)
    told = step.describe(state).num_bytes
    assert 0 < told["chunks"] / 2 < residency.most <= told["chunks"] < tree.num_bytes(state.slots)


def mapped_bytes():
    """Return the bytes of files that are in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile:"))


@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
def test_averages_on_a_disk_do_not_come_to_memory_through_its_mapping(tmp_path, donated):
    numel = 2**22
    disk = fds.disk(tmp_path, buffer_bytes=2**20)
    loss = lambda params, batch: (params["w"] * batch).sum()
    step = fds.compose(fds.offload(averages=disk), fds.ema(0.9), *[fds.donate()] * donated, fds.sgd(0.1))(loss)
    state = step.init({"w": torch.ones(numel)})
    before = mapped_bytes()
    for _ in range(3):
        state, _ = step(state, torch.ones(()))
    assert mapped_bytes() - before < numel  # of 4 numel
    assert medium_of(state.slots["ema"]["w"]) is disk


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_in_an_average_ends_the_call_on_all_ranks_and_leaves_the_state(tmp_path, ranks):
    case = held.layers(5, torch.float32, 0.0, False)

    class Failing(Watched):
        def write(self, worked, new):
            if self.fails_at == 0:
                raise OSError("the disk fails")
            return super().write(worked, new)

    def body():
        residency = Failing(tmp_path, ("slots",))
        parts = [Topology(ranks, 1, 64).shard()] if ranks > 1 else []
        step = fds.compose(mapped(residency), *parts, *TWO, fds.adamw(0.01))(case.loss)
        state = step.init(case.params)
        before = tree.map(torch.clone, state)
        mine = fds.mesh(dp=-1).rank == 0
        residency.fails_at = 0 if mine else -1
        with pytest.raises((OSError, DiskError), match="the disk fails") as caught:
            step(state, case.batch)
        residency.fails_at = -1
        assert_same_bits(state, before)
        step(state, case.batch)
        return caught.type

    assert fds.simulate(body, ranks) == [OSError, DiskError][:ranks]
