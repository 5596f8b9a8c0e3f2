"""Law 11: any placement of any leaves is the plain step bit for bit, and holds the bytes that it states."""

import itertools
import threading
import zlib

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fds
from fds import tree
from fds.errors import ComposeError, DonatedStateError
from fds.layout import Sharded
from fds.step import Place as Placing, fill, transform
from tests.bits import assert_same_bits, snapshot
from tests.laws import problems as held
from tests.laws.mapped import Mapped, mapped
from tests.laws.places import PLACES, Place
from tests.laws.problems import OPTIMIZERS, compositions, make, optimizers, problems
from tests.storage.topologies import Topology

pytestmark = pytest.mark.filterwarnings("ignore:.*there are no averages")  # kinds are drawn

ALL = {
    **OPTIMIZERS,
    "muon": lambda: fds.by_name({"*0.weight": fds.muon(0.1), "*.weight": fds.lamb(0.1), "*": fds.lion(0.01)}),
}
UNPLACED = compositions(without=("offload", "offload_to_disk"))
KINDS = st.sampled_from(
    [
        ("slots",),
        ("opt",),
        ("gradients",),
        ("opt", "params"),
        ("params", "slots"),
        ("opt", "gradients"),
        ("opt", "params", "slots"),
        ("opt", "params", "slots", "gradients"),
    ]
)
PAIRS = st.sampled_from([(held.layers, name) for name in sorted(ALL)] + [(held.records, name) for name in OPTIMIZERS])
SKIPPING = [
    fds.precision(torch.float16),
    fds.loss_scale(2.0**10),
    fds.ema(0.9),
    fds.clip_by_global_norm(0.5),
    fds.accumulate(2),
]


def bad(batch):
    """Return a batch whose gradients are not finite."""
    return tree.map(lambda x: x * torch.inf if isinstance(x, torch.Tensor) and x.is_floating_point() else x, batch)


def same_run(plain, placed, problem, batches, *, donated=False):
    """Train beside each other; check every state, also those that are held, and every metric."""
    a, b = plain.init(problem.params, key=3), placed.init(problem.params, key=3)
    assert_same_bits(b, a)
    kept = []
    for batch in batches:
        kept += [] if donated else [(b, snapshot(b))]
        (a, said), (b, told) = plain(a, batch), placed(b, batch)
        assert_same_bits((b, told), (a, said))
    for state, before in kept:
        assert_same_bits(state, before)
    return a, b


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("optimizer", ALL)
def test_moments_in_a_mapped_file_change_no_bit(tmp_path, optimizer, donated):
    problem, more = held.layers(5, torch.float32, 0.3, False), [fds.donate()] if donated else []
    residency = Mapped(tmp_path, size=2)
    plain = fds.compose(*SKIPPING, ALL[optimizer]())(problem.loss)
    placed = fds.compose(mapped(residency), *SKIPPING, *more, ALL[optimizer]())(problem.loss)
    batches = [problem.batch, problem.batch, bad(problem.batch), problem.batch]
    _, state = same_run(plain, placed, problem, batches, donated=donated)
    assert int(state.step) == 3  # of the four calls
    assert all(x.data_ptr() in residency.places for x in tree.leaves(state.opt) if x.numel())
    moments = len([x for x in tree.leaves(state.opt) if x.numel()])
    assert len(residency.made) == moments * (1 if donated else 5)  # every state of the five is held


def some_of(seed):
    """Return a function that says of every leaf whether it is one of about half of them, of all for the seed 0."""
    return lambda leaf: not seed or zlib.crc32(f"{seed} {leaf}".encode()) % 2 == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(problems(), optimizers(), UNPLACED, KINDS, st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_any_leaves_in_any_chunks_change_no_bit(tmp_path, problem, optimizer, names, kinds, size, donated, seed):
    plain, residency = make(names, optimizer, problem), Mapped(tmp_path, kinds, size, some_of(seed))
    placed = make(names, optimizer, problem, mapped(residency), *[fds.donate()] * donated)
    same_run(plain, placed, problem, [problem.batch] * 3, donated=donated)


def test_a_leaf_is_known_by_its_kind_and_parameters_and_those_that_stay_are_updated_where_they_are(tmp_path):
    known = {}

    def body():
        asked = known[fds.mesh(dp=-1).rank] = set()
        residency = Mapped(
            tmp_path, ("opt", "params", "slots"), 2, lambda leaf: asked.add(leaf) or "0.weight" in leaf.names
        )
        problem, shard = held.layers(5, torch.float32, 0.0, False), Topology(2, 1, 64).shard()
        parts = [shard, fds.ema(0.9), fds.donate(), fds.adamw(0.01)]
        plain, step = fds.compose(*parts)(problem.loss), fds.compose(mapped(residency), *parts)(problem.loss)
        same_run(plain, step, problem, [problem.batch] * 2, donated=True)
        state = step.init(problem.params)
        places = [x.data_ptr() in residency.places for x in tree.leaves((state.params, state.opt, state.slots))]
        assert places.count(True) == 4  # a master, two moments, an average: of one slice
        state, _ = step(state, problem.batch)
        assert places == [x.data_ptr() in residency.places for x in tree.leaves((state.params, state.opt, state.slots))]
        return {name: {leaf.names for leaf in asked if leaf.kind == name} for name in ("params", "opt", "slots")}

    first, second = fds.simulate(body, 2)
    assert first == second and first["params"] == first["opt"] == first["slots"]
    assert {leaf.count for leaf in known[0]} == {len(first["params"])}
    assert {leaf.index for leaf in known[0]} == set(range(len(first["params"])))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 4)
@given(PAIRS, PLACES, KINDS, st.booleans(), st.integers(0, 99))
def test_on_ranks_and_in_pipelines_too(tmp_path, pair, place, kinds, donated, seed):
    kind, optimizer = pair
    problem = kind(seed, torch.float32, 0.3, False)
    ranks_and_pipelines(tmp_path, problem, optimizer, place.fit(problem), kinds, donated, some_of(seed))


def ranks_and_pipelines(tmp_path, problem, optimizer, place, kinds, donated, some):
    def body():
        parts = [*place.transforms(), fds.skip_nonfinite(), fds.ema(0.9), ALL[optimizer]()]
        placing = [mapped(Mapped(tmp_path, kinds, some=some)), *[fds.donate()] * donated]
        plain, placed = fds.compose(*parts)(problem.loss), fds.compose(*placing, *parts)(problem.loss)
        batch = place.batch(problem, plain)
        _, state = same_run(plain, placed, problem, [batch, bad(batch), batch], donated=donated)
        assert_same_bits(placed.evaluate(state, batch), plain.evaluate(state, batch))
        return isinstance(state.params, Sharded)

    where = place.sharded if place.piped is None else place.piped
    return where.run(body)


@pytest.mark.parametrize("stage", range(4))
def test_chunks_of_slices_at_every_stage(tmp_path, stage):
    place = Place(Topology(2, stage, 64), None, 2)
    problem = held.layers(7, torch.float32, 0.0, False)
    sharded = ranks_and_pipelines(
        tmp_path, problem, "muon", place, ("opt", "params", "slots"), stage % 2 == 1, some_of(stage)
    )
    assert sharded == [stage > 0] * 2


def network(kinds=("opt",), *parts, optimizer=None, tmp=None, size=1):
    """Return a plain step, the same one with leaves in files, and its residency."""
    problem, residency = held.layers(5, torch.float32, 0.0, False), Mapped(tmp, kinds, size)
    made = [optimizer or fds.adamw(0.01)]
    return (
        problem,
        fds.compose(*parts, *made)(problem.loss),
        fds.compose(*parts, mapped(residency), *made)(problem.loss),
        residency,
    )


def test_one_chunk_is_read_ahead_while_one_is_updated_and_one_written(tmp_path):
    problem, _, step, residency = network(tmp=tmp_path)
    state = step.init(problem.params)
    residency.log.clear()
    step(state, problem.batch)
    log, slices = residency.log, len(tree.leaves(problem.params))
    order = [word for word in log if word in ("write", *(f"read {n}" for n in range(slices)))]
    assert order[:4] == ["read 0", "read 1", "write", "read 2"] and order[-2:] == ["write", "write"]
    assert log[-1] == "has written" and log.count("has written") == slices == log.count("write")


def test_the_memory_of_states_that_nobody_holds_is_used_again(tmp_path):
    problem, _, step, residency = network(tmp=tmp_path)
    state = step.init(problem.params)
    for _ in range(5):
        state, _ = step(state, problem.batch)
    assert len(residency.made) == 3 * len(tree.leaves(state.opt))  # of the first state, and of two by turns


def test_threads_that_step_at_once_get_memory_of_their_own(tmp_path):
    problem, plain, step, _ = network(tmp=tmp_path)
    state, found = step.init(problem.params), {}

    def run(i):
        a = state
        for _ in range(3):
            a, _ = step(a, problem.batch)
        found[i] = a

    threads = [threading.Thread(target=run, args=[i]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = plain.init(problem.params)
    for _ in range(3):
        want, _ = plain(want, problem.batch)
    for i in range(3):
        assert_same_bits(found[i], want)


def coupled(draws):
    """Return an optimizer that looks at all slices together, or draws for all of them in a row."""

    def update(grads, opt, params, *, lr, **rest):
        size = torch.stack([g.norm() for g in grads]).norm()
        noise = [torch.rand_like(p) if draws else 1.0 for p in params[::-1]][::-1]
        for p, g, m, r in zip(params, grads, opt["m"], noise, strict=True):
            m.add_(g / size)
            p.sub_(0.1 * r * m)
        return params, opt

    init = lambda segments, *, params: {"m": [torch.zeros_like(p) for p in params]}
    return fds.Optimizer(init, update, lr=0.1, draws=draws)


@pytest.mark.parametrize("draws", [False, True])
def test_an_optimizer_that_looks_at_all_slices_sees_all_of_them(tmp_path, draws):
    problem, plain, step, residency = network(tmp=tmp_path, optimizer=coupled(draws))
    same_run(plain, step, problem, [problem.batch] * 3)
    assert sum(word.startswith("read") for word in residency.log) == 3


def renewing(grads, opt, params, *, lr, **rest):
    """Return new tensors instead of writing."""
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], {"m": [m + 1 for m in opt["m"]]}


@pytest.mark.parametrize("donated", [False, True])
def test_what_an_optimizer_returns_anew_is_written_back(tmp_path, donated):
    init = lambda segments, *, params: {"m": [torch.zeros_like(p) for p in params]}
    optimizer = fds.Optimizer(init, renewing, separate=True, draws=False)
    more = [fds.donate()] * donated
    problem, plain, step, residency = network(("opt",), *more, tmp=tmp_path, optimizer=optimizer)
    _, state = same_run(plain, step, problem, [problem.batch] * 3, donated=donated)
    assert all(x.data_ptr() in residency.places for x in tree.leaves(state.opt))


class Failing(Mapped):
    """Fail at one of the reads or writes."""

    fails = ("", 0)

    def check(self, what):
        """Raise at the chosen place."""
        name, rest = self.fails
        self.fails = (name, rest - (name == what))
        if name == what and rest == 0:
            raise OSError("the disk is full")


def failing(donated, tmp_path, kinds=("opt",), size=1):
    """Return a step whose update can be made to fail, its residency, a state after a call, and the plain step."""
    residency, adam = Failing(tmp_path, kinds, size), fds.adamw(0.01)

    def update(*args, **kwargs):
        residency.check("update")
        return adam.update(*args, **kwargs)

    problem = held.layers(5, torch.float32, 0.0, False)
    optimizer = attrs.evolve(adam, update=update)
    plain = fds.compose(fds.ema(0.9), adam)(problem.loss)
    step = fds.compose(mapped(residency), fds.ema(0.9), *[fds.donate()] * donated, optimizer)(problem.loss)
    state, _ = step(step.init(problem.params), problem.batch)
    return problem, plain, step, state, residency


@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("fails", [("read", 0), ("read", 2), ("update", 0), ("update", 3), ("write", 0), ("write", 9)])
def test_a_failure_leaves_an_old_state_as_it_was_or_says_that_it_is_lost(tmp_path, fails, donated):
    problem, plain, step, state, residency = failing(donated, tmp_path)
    before = snapshot(state)
    residency.fails = fails
    with pytest.raises(OSError, match="the disk is full"):
        step(state, problem.batch)
    residency.fails = ("", 0)
    if donated and fails != ("read", 0):  # before the first write
        with pytest.raises(DonatedStateError, match="now hold parts of one"):
            step(state, problem.batch)
        return
    assert_same_bits(state, before)
    want, _ = plain(before, problem.batch)
    assert_same_bits(step(state, problem.batch)[0], want)


def test_a_donated_state_into_which_nothing_was_written_is_as_it_was(tmp_path):
    problem, plain, step, _, residency = failing(True, tmp_path, ("opt", "params"), 99)
    state = step.init(problem.params)
    before, residency.fails = snapshot(state), ("update", 0)
    with pytest.raises(OSError, match="the disk is full"):
        step(state, problem.batch)
    assert_same_bits(state, before)
    assert_same_bits(step(state, problem.batch)[0], plain(before, problem.batch)[0])


def test_a_state_that_was_given_to_a_step_that_returned_holds_a_later_one(tmp_path):
    problem, _, step, state, _ = failing(True, tmp_path)
    step(state, problem.batch)
    with pytest.raises(DonatedStateError, match="now hold a later state"):
        step(state, problem.batch)


def test_two_residencies_are_refused(tmp_path):
    with pytest.raises(ComposeError, match="the station 'place' is already filled by mapped"):
        fds.compose(mapped(Mapped(tmp_path)), mapped2(Mapped(tmp_path)), fds.sgd(0.1))(lambda p, b: 0)


@transform
def mapped2(residency):
    return lambda step: fill(step, place={"residency": residency})


@transform
def placed(place):
    return lambda step: fill(step, place=place)


@pytest.mark.parametrize("first", [lambda r: mapped(r), lambda r: fds.donate()], ids=["residency", "donate"])
def test_a_whole_place_beside_a_part_of_one_is_refused(tmp_path, first):
    part, whole = first(Mapped(tmp_path)), placed(Placing(donate=True))
    for parts in ((part, whole), (whole, part)):
        with pytest.raises(ComposeError, match="the station 'place' is already filled"):
            fds.compose(*parts, fds.sgd(0.1))(lambda p, b: 0)


MISSHAPEN = {
    "a string": "disk",
    "no kinds": attrs.make_class("Bare", [])(),
    "an unknown kind": ("moments",),
    "kinds that are a word": "opt",
}


@pytest.mark.parametrize("wrong", MISSHAPEN.values(), ids=MISSHAPEN)
def test_what_is_not_a_residency_is_refused_with_the_contract(tmp_path, wrong):
    residency = wrong if not isinstance(wrong, tuple) else Mapped(tmp_path, wrong)
    with pytest.raises(ComposeError) as caught:
        fds.compose(mapped(residency), fds.sgd(0.1))(lambda p, b: 0)
    assert "'place', residency" in caught.value.where and "write(worked, new)" in caught.value.want


def broken(tmp_path, **methods):
    residency = Mapped(tmp_path, ("opt", "params"))
    for name, method in methods.items():
        setattr(residency, name, method)
    return residency


BROKEN = {
    "a slice that is missing": ({"chunks": lambda s: [[0], [1]]}, "chunks", "each of 0 to"),
    "a slice that is there twice": ({"chunks": lambda s: [[0], range(len(s.segments))]}, "chunks", "once"),
    "no answer": ({"holds": lambda leaf: None}, "holds(Resident(kind='params'", "True or False"),
    "a number": ({"chunks": lambda s: 3}, "chunks", "lists of indices"),
    "another shape": ({"make": lambda x, leaf: torch.empty(3)}, "make(x, Resident(kind='params'", "contiguous memory"),
    "meta": (
        {"make": lambda x, leaf: torch.empty_like(x, device="meta")},
        "make(x, Resident(kind='params'",
        "contiguous memory",
    ),
    "nothing read": ({"read": lambda old, device: lambda: None}, "read", "copied to cpu"),
    "no function that reads": ({"read": lambda old, device: old}, "read", "a function () that waits"),
    "no function that writes": ({"write": lambda worked, new: None}, "write", "a function () that waits"),
    "the old memory": ({"read": lambda old, device: lambda: old}, "read", "copies"),
}


@pytest.mark.parametrize(("methods", "where", "want"), BROKEN.values(), ids=BROKEN)
def test_a_residency_that_breaks_its_contract_is_named(tmp_path, methods, where, want):
    problem = held.layers(5, torch.float32, 0.0, False)
    step = fds.compose(mapped(broken(tmp_path, **methods)), fds.adamw(0.01))(problem.loss)
    with pytest.raises(ComposeError) as caught:
        step(step.init(problem.params), problem.batch)
    assert f"station 'place', {where}" in caught.value.where and "of Mapped(" in caught.value.where
    assert want in caught.value.want


def one_memory(tmp_path, kinds=("opt",), shift=0):
    """Return a residency that gives the same memory for all leaves, some elements further each time."""
    memory, count = torch.zeros(4096), itertools.count()

    def make(x, leaf):
        at = shift * next(count)
        return memory[at : at + x.numel()].view(x.shape)

    residency = Mapped(tmp_path, kinds)
    residency.make = make
    return residency


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kinds", [("opt",), ("params",), ("slots",)], ids=", ".join)
def test_memory_that_two_leaves_have_is_refused(tmp_path, kinds, shift):
    problem = held.layers(5, torch.float32, 0.0, False)
    step = fds.compose(mapped(one_memory(tmp_path, kinds, shift)), fds.ema(0.9), fds.adamw(0.01))(problem.loss)
    plain = fds.compose(fds.ema(0.9), fds.adamw(0.01))(problem.loss)
    state = plain.init(problem.params)
    fds.save(tmp_path / "run", state, plain)
    uses = [
        lambda: step.init(problem.params),
        lambda: fds.load(tmp_path / "run", step, problem.params),
        lambda: step(state, problem.batch),
    ]
    for use in uses:
        with pytest.raises(ComposeError) as caught:
            use()
        assert "make(x, leaf) of Mapped" in caught.value.where and "memory of its own" in caught.value.want


def test_memory_of_the_old_state_is_refused(tmp_path):
    problem, residency = held.layers(5, torch.float32, 0.0, False), Mapped(tmp_path)
    step = fds.compose(mapped(residency), fds.sgd(0.01, momentum=0.9))(problem.loss)
    state = step.init(problem.params)
    held_there = iter(tree.leaves(state.opt))
    residency.make = lambda x, leaf: next(held_there)
    with pytest.raises(ComposeError, match="what fills a station did not return"):
        step(state, problem.batch)


def test_ranks_with_other_chunks_are_refused_on_all(tmp_path):
    problem = held.layers(5, torch.float32, 0.0, False)

    def body():
        residency = Mapped(tmp_path)
        size = 1 + fds.mesh(dp=-1).rank
        residency.chunks = lambda s: [range(len(s.segments))[i : i + size] for i in range(0, len(s.segments), size)]
        step = fds.compose(mapped(residency), Topology(2, 2, 64).shard(), fds.lamb(0.01))(problem.loss)
        with pytest.raises(ComposeError, match="in the same chunks"):
            step(step.init(problem.params), problem.batch)

    fds.simulate(body, 2)


def test_describe_says_where_leaves_live_and_the_bytes_of_chunks(tmp_path):
    problem, plain, step, _ = network(("opt", "params"), fds.donate(), tmp=tmp_path, size=2)
    state = step.init(problem.params)
    told = step.describe(state)
    sizes = [3 * x.nbytes for x in tree.leaves(problem.params)][::-1]
    pairs = [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    assert told.num_bytes["chunks"] == max(sum(pairs[i : i + 3]) for i in range(len(pairs)))
    there = plain.describe(state).num_bytes
    assert told.num_bytes["opt"] == there["opt"] and "chunks" not in there
    assert told.lives == {"opt": "files", "params": "files"} and "bytes in files" in str(told)
    assert told.places == {"files": there["params"] + there["opt"]}
    assert told.stations["place"] == f"the old state is given up; opt, params in Mapped({tmp_path.name!r})"
