"""Saves and loads of states whose leaves live elsewhere: they are made there, and nowhere else first."""

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds import plans, tree
from fds.layout import Sharded
from tests.bits import assert_same_bits
from tests.laws import problems
from tests.laws.mapped import Mapped, mapped
from tests.laws.places import Place
from tests.storage.topologies import Stages, Topology

ALL = ("opt", "params", "slots")
PLACES = {
    "one": None,
    **{f"stage {n}": Place(Topology(2, n, 64), None, 1) for n in range(4)},
    "pipeline": Place(Topology(1, 0), Stages(2, plans.one_f_one_b, data=2, stage=1), 1),
}


class Allocated(TorchDispatchMode):
    """Sum the bytes of memory on the CPU that operators return and were not given, but for mapped files."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = lambda held: [x for x in tree.leaves(held) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        given, out = tensors((args, kwargs or {})), func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in given}
        for x in tensors(out) if func is not torch.ops.aten.from_file.default else ():
            self.num_bytes += 0 if x.untyped_storage().data_ptr() in known else x.untyped_storage().nbytes()
        return out


def steps(problem, residency, place, *more):
    """Return the plain step, and the same one with leaves elsewhere."""
    parts = [*(place.transforms() if place else []), fds.ema(0.9), *more, fds.adamw(0.01)]
    return fds.compose(*parts)(problem.loss), fds.compose(mapped(residency), *parts)(problem.loss)


def sizes(state, kinds):
    """Return the bytes of all leaves of some kinds, sorted, with their kinds."""
    return sorted((kind, x.nbytes) for kind in kinds for x in tree.leaves(getattr(state, kind)) if x.numel())


def run(place, body):
    if place is None:
        return body()
    where = place.sharded if place.piped is None else place.piped
    return where.run(body)


@pytest.mark.parametrize("name", PLACES)
def test_a_state_is_loaded_to_where_its_leaves_live(tmp_path, name):
    place, kinds = PLACES[name], ("opt",) if name in ("one", "stage 1", "stage 3") else ALL
    problem = problems.layers(3, torch.float32, 0.0, False)

    def body():
        residency = Mapped(tmp_path, kinds)
        plain, step = steps(problem, residency, place)
        batch = problem.batch if place is None else place.batch(problem, plain)
        state, _ = step(step.init(problem.params, key=1), batch)
        wanted = sizes(state, kinds)
        fds.save(tmp_path / "elsewhere", state, step)
        fds.save(tmp_path / "plain", plain(plain.init(problem.params, key=1), batch)[0], plain)
        for saved in ("elsewhere", "plain"):
            residency.made.clear()
            loaded, _ = fds.load(tmp_path / saved, step, problem.params)
            assert_same_bits(loaded, state)
            assert sorted(residency.made) == wanted
            places = [x.data_ptr() for kind in kinds for x in tree.leaves(getattr(loaded, kind)) if x.numel()]
            assert residency.places.issuperset(places)
        assert_same_bits(fds.load(tmp_path / "elsewhere", plain, problem.params)[0], state)
        assert_same_bits(step(loaded, batch), plain(attrs.evolve(loaded), batch))

    run(place, body)


@pytest.mark.parametrize("stage", [None, 2])
def test_neither_loads_nor_first_states_have_moments_in_memory_first(tmp_path, stage):
    big = {"a": torch.randn(300, 100), "b": torch.randn(300, 100), "c": torch.randn(100, 300)}
    loss = lambda params, batch: sum((x * batch.mean()).sum() for x in params.values())
    each = big["a"].nbytes // (1 if stage is None else 2)

    def allocated(work):
        with Allocated() as found:
            work()
        return found.num_bytes / each

    def body():
        residency = Mapped(tmp_path)
        shard = [] if stage is None else [Topology(2, stage, big["a"].nbytes).shard()]
        step = fds.compose(mapped(residency), *shard, fds.adamw(0.01))(loss)
        state = step.init(big)
        assert isinstance(state.params, Sharded) is (stage is not None)
        fds.save(tmp_path / "run", state, step)
        assert 3 <= allocated(lambda: fds.load(tmp_path / "run", step, big)) < 3.1  # masters
        assert len(residency.made) == 12

    run(None if stage is None else Place(Topology(2, stage), None, 1), body)


def test_a_first_state_has_the_moments_of_one_chunk_in_memory(tmp_path):
    live = {"now": 0, "most": 0}
    adam = fds.adamw(0.01)

    def init(segments, *, params):
        live["now"] = sum(x.numel() for x in params)
        live["most"] = max(live["most"], 0 if params[0].is_meta else live["now"])
        return adam.init(segments, params=params)

    step = fds.compose(mapped(Mapped(tmp_path)), attrs.evolve(adam, init=init))(lambda params, batch: 0)
    step.init({name: torch.randn(10) for name in "abcdef"})
    assert live["most"] == 10


def test_a_save_in_the_background_reads_what_a_donating_step_leaves_alone(tmp_path):
    problem = problems.layers(3, torch.float32, 0.0, False)
    _, step = steps(problem, Mapped(tmp_path, ALL), None, fds.donate())
    state, _ = step(step.init(problem.params), problem.batch)
    want = tree.map(torch.clone, state)
    saving = fds.save_async(tmp_path / "run", state, step)
    for _ in range(3):
        state, _ = step(state, problem.batch)
    saving.wait()
    assert_same_bits(fds.load(tmp_path / "run", step, problem.params)[0], want)


def test_a_moment_that_somebody_else_holds_is_copied_to_where_it_lives(tmp_path):
    problem, residency = problems.layers(3, torch.float32, 0.0, False), Mapped(tmp_path)
    plain, step = steps(problem, residency, None, fds.donate())
    state, other = step.init(problem.params), plain.init(problem.params)
    held = next(iter(state.opt["exp_avg"].values()))
    view, made = held.view(-1)[:2], len(residency.made)
    before = view.clone()
    (state, _), (other, _) = step(state, problem.batch), plain(other, problem.batch)
    assert torch.equal(view, before) and len(residency.made) == made + 1
    assert_same_bits(state, other)
    assert all(x.data_ptr() in residency.places for x in tree.leaves(state.opt))
