"""Copies beside a GPU that is not there: begun as late as streams allow, and page-locked memory that is counted."""

import contextlib
import gc
import threading
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import fds
from fds import media, tree
from fds.media import medium
from fds.media.mapping import view
from tests.bits import assert_same_bits
from tests.devices import DefaultDevice
from tests.laws.test_law_11_on_the_host import loss, on_cpu, problem
from tests.pretending import DEVICE, DRIVER, Pretending, pretended

CPU = torch.device("cpu")


class Stream:
    """A stream that does nothing before somebody waits for it; the computing stream does everything at once."""

    def __init__(self, device=None):
        self.work, self.begins = [], False

    def wait_stream(self, other):
        assert other is COMPUTING  # which is done
        self.begins = True

    def wait_event(self, event):
        assert self is COMPUTING
        event.come()


class Event:
    """An event of a stream: what was asked of it before."""

    def __init__(self):
        self.work, self.sources, self.waited = [], [], False

    def record(self, stream):
        assert stream.begins  # after what was computed before
        self.work, stream.work, stream.begins = stream.work, [], False
        places = [(y.data_ptr(), y.nbytes) for _, y in self.work if media.medium_of(y) is not None]
        self.sources = [(place, bytes(view(*place))) for place in places]  # nobody is kept from giving it back
        EVENTS.append(self)

    def come(self):
        """Copy, which may be any time after the record and no later than now."""
        with _disable_current_modes():
            for x, y in self.work:
                x.copy_(y)
        self.work = []

    def synchronize(self):
        """Let the host wait; until now nobody may have written to what is copied."""
        self.come()
        assert all(view(*place) == before for place, before in self.sources)
        self.sources, self.waited = [], True


COMPUTING = Stream()
EVENTS: list[Event] = []  # of this test
now = threading.local()


class Late(Pretending):
    """Copies on a side stream wait there; a number that the host reads shows that the computing stream is done."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream = getattr(now, "stream", COMPUTING)
        if stream is not COMPUTING:
            assert func.overloadpacket is torch.ops.aten.copy_ and args[2] is True
            held = [x.held if x.is_cuda else x for x in args[:2]]
            stream.work.append(tuple(held))
            return args[0]
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].is_cuda and not args[0].dim():
            for event in [e for e in EVENTS if not e.work]:
                event.synchronize()
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def on(stream):
    now.stream = stream
    yield
    now.stream = COMPUTING


@pytest.fixture
def gpu():
    """Pretend that there is a GPU whose copies are late; in the end all of them have come."""
    there = {"Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda device=None: COMPUTING}
    EVENTS.clear()
    medium._stream.cache_clear()
    with pretended(), contextlib.ExitStack() as stack:
        for name, value in there.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(Late())
        stack.enter_context(DefaultDevice(DEVICE))
        yield DEVICE
    medium._stream.cache_clear()
    assert not any(event.work for event in EVENTS)


PLACES = {
    "moments": {"moments": "host"},
    "moments and gradients": {"moments": "host", "gradients": "host"},
    "a part": {"moments": "host", "masters": "host", "ratio": 0.5},
    "everything": {"moments": "host", "masters": "host", "gradients": "host"},
    "on a disk too": {"moments": "disk", "masters": "host", "gradients": "disk"},
    "before it is decided": {"moments": "host", "masters": "host", "speculate": True},
}


def trained(parts, donated):
    """Return the states of a run and what was evaluated, as tensors of the CPU."""
    params, batch = problem()
    here = torch.empty(0).device
    optimizer = fds.by_name({"*.bias": fds.sgd(0.1, momentum=0.9), "*": fds.adamw(lambda t: 0.01 / (t + 1))})
    step = fds.compose(*parts, fds.skip_nonfinite(), fds.accumulate(2), *[fds.donate()] * donated, optimizer)(loss)
    state, found = step.init(tree.map(lambda x: x.to(here), params), key=1), []
    for factor in (1.0, torch.inf, 2.0):
        metrics = step.evaluate(state, batch.to(here))
        state, said = step(state, batch.to(here) * factor)
        found.append(on_cpu((state, metrics["loss"], said["loss"], said["skipped"])))
    return found, state


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("where", PLACES)
def test_copies_that_come_as_late_as_they_may_change_no_bit(gpu, tmp_path, where, donated):
    disk = fds.disk(tmp_path)
    told = {kind: disk if medium == "disk" else medium for kind, medium in PLACES[where].items()}
    got, state = trained([fds.offload(**told)], donated)
    assert EVENTS
    with contextlib.ExitStack() as stack:
        stack.enter_context(DefaultDevice(CPU))
        want, _ = trained([], donated)
    assert_same_bits(got, want)
    assert {x.device.type for x in tree.leaves(state.opt)} >= {"cpu"}


def test_memory_of_a_state_that_was_evaluated_is_not_written_while_it_is_copied(gpu):
    params, batch = problem()
    step = fds.compose(fds.offload(moments="host", masters="host"), fds.adamw(0.01))(loss)
    states = [step.init(tree.map(lambda x: x.to(gpu), params))]
    for _ in range(2):
        states.append(step(states[-1], batch.to(gpu))[0])
    step.evaluate(states[1], batch.to(gpu))
    assert not EVENTS[-1].waited
    places = {x.data_ptr() for x in tree.leaves(states[1].params)}
    del states[:2]
    state, _ = step(states[0], batch.to(gpu))  # into the memory of the state that was evaluated
    assert {x.data_ptr() for x in tree.leaves(state.params)} == places


def test_memory_is_locked_in_whole_pages_and_given_back_with_its_last_tensor(gpu):
    gc.collect()
    before = dict(DRIVER.locked)
    leaf = media.Host().make(torch.empty(5000, device=gpu))
    (address,) = DRIVER.locked.keys() - before.keys()
    assert leaf.data_ptr() == address and DRIVER.locked[address] == 5 * 4096  # of 20,000 bytes, not 32,768
    view = leaf[10:].view(-1, 10)
    del leaf
    assert address in DRIVER.locked
    del view
    assert DRIVER.locked == before
    media.Host().make(torch.empty(5000, device=CPU))
    media.Host(cached=True).make(torch.empty(5000, device=gpu))
    assert DRIVER.locked == before


def test_memory_is_given_back_after_the_copies_from_it(gpu):
    leaf = media.Host().make(torch.empty(5000, device=gpu))
    leaf.fill_(3.0)
    wait = media.read([leaf], gpu)
    (copy,) = wait()
    assert not EVENTS[-1].waited  # the computing stream waits, the host does not
    del leaf, wait
    gc.collect()
    assert EVENTS[-1].waited
    assert copy.tolist() == [3.0] * 5000


def test_what_comes_from_the_gpu_is_there_when_the_host_has_waited(gpu):
    x = torch.arange(10.0, device=gpu)
    leaf = media.Host().make(x)
    leaf.zero_()
    wait = media.write([x], [leaf])
    assert leaf.tolist() == [0.0] * 10
    wait()
    assert leaf.tolist() == list(range(10)) and EVENTS[-1].waited


def test_memory_that_the_driver_refuses_is_used_all_the_same_with_a_warning(gpu):
    with (
        mock.patch.object(type(DRIVER), "cudaHostRegister", return_value=2),
        pytest.warns(RuntimeWarning, match=r"not page-locked.* cuda:0: the driver refused 20,480 bytes \(error 2\)"),
    ):
        leaf = media.Host().make(torch.empty(5000, device=gpu))
    media.write([torch.ones(5000, device=gpu)], [leaf])()
    assert leaf.tolist() == [1.0] * 5000
    del leaf  # and nothing is unlocked


def test_activations_come_back_as_they_were_in_memory_that_is_used_again(gpu):
    before, groups, kept = dict(DRIVER.locked), media.KeptGroups(media.Host(cached=True)), []
    for i in range(4):
        groups.open()
        kept.append(groups.keep(torch.full((5,), float(i), device=gpu)))
    assert [event.waited for event in EVENTS] == [True, True, True, False]  # the last group is on its way
    assert [one.get().tolist() for one in kept[::-1]] == [[float(i)] * 5 for i in (3, 2, 1, 0)]
    assert DRIVER.locked == before
    kept[-1].settle()  # as the next microbatch does
