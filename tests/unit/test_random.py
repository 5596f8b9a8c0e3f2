"""Keys: the same everywhere, different wherever the data differ, and nobody else's generators move."""

import contextvars
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds import random
from fds.errors import FdsError
from tests.bits import assert_same_bits

CPU = [torch.device("cpu")]
data = st.lists(st.integers(-(2**64), 2**64) | st.text(max_size=4), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("got", "golden"),
    [
        (lambda: random.key(0), [-7547183913967088085, 2880732566925708935]),
        (lambda: random.key(1), [-8447760626485232450, -6902025837448968743]),
        (lambda: random.key(-1), [-3973721663066143052, -8293298019676204458]),
        (lambda: random.fold_in(random.key(0), 3, "dropout"), [8849560116515709929, -2412113018094132649]),
    ],
)
def test_keys_never_change(got, golden):
    """Runs are resumed from keys on disk: another hash would be another run."""
    assert got().tolist() == golden


def test_seeds_never_change():
    assert random.seed(random.key(0)) == 4812554971875570867
    assert random.seed(random.key(0), "layer", 2) == 370184172156135461


def test_a_key_is_two_integers_on_the_cpu():
    with torch.device("meta"):
        key = random.fold_in(random.key(5), 1)
    assert (key.shape, key.dtype, key.device.type) == ((2,), torch.int64, "cpu")


def test_a_key_is_a_key_of_itself():
    assert_same_bits(random.key(random.key(3)), random.key(3))


@given(data, data)
def test_distinct_data_give_distinct_keys(one, other):
    a, b = random.fold_in(random.key(0), *one), random.fold_in(random.key(0), *other)
    assert torch.equal(a, b) == (one == other)


@given(st.text("s\0i", max_size=6), st.text("s\0i", max_size=6), st.text("s\0i", max_size=6))
def test_a_name_is_not_two_names(whole, left, right):
    k = random.key(0)
    assert not torch.equal(random.fold_in(k, whole), random.fold_in(k, left, right))


def test_a_name_with_a_nul_is_not_two_names():
    k = random.key(0)
    assert not torch.equal(random.fold_in(k, "a\0sb"), random.fold_in(k, "a", "b"))


def test_a_number_is_not_its_name():
    assert not torch.equal(random.fold_in(random.key(0), 1), random.fold_in(random.key(0), "1"))


@given(st.integers(-(2**63), 2**63), st.integers(-(2**63), 2**63))
def test_distinct_seeds_give_distinct_keys(a, b):
    assert torch.equal(random.key(a), random.key(b)) == (a == b)


@given(st.integers(-(2**63), 2**63), data)
def test_a_seed_fits_every_generator(number, folds):
    seed = random.seed(random.key(number), *folds)
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


def test_the_seed_of_data_is_the_seed_of_the_folded_key():
    k = random.key(7)
    assert random.seed(k, 3, "a") != random.seed(k)
    assert random.seed(k, 3, "a") == random.seed(k, 3, "a")


def test_a_generator_of_a_key_draws_the_same():
    draw = lambda: torch.rand(4, generator=random.generator(random.key(1)))
    assert_same_bits(draw(), draw())
    torch.testing.assert_close(
        torch.rand(2, generator=random.generator(random.key(0))), torch.tensor([0.63922101, 0.02779067])
    )


@pytest.mark.parametrize(
    "seed",
    [
        True,
        1.0,
        "1",
        None,
        np.int64(3),
        torch.tensor(1),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int64),
    ],
)
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(FdsError, match="random"):
        random.key(seed)


@pytest.mark.parametrize("datum", [1.5, None, 2**130, b"a"])
def test_what_cannot_be_folded_is_refused(datum):
    with pytest.raises(FdsError):
        random.fold_in(random.key(0), datum)


def test_a_scope_restores_the_generator():
    before = torch.get_rng_state()
    with random.scope(CPU):
        random.reseed(1, CPU)
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scope_restores_the_generator_when_something_breaks():
    @random.scope(CPU)
    def draw_and_fail():
        torch.rand(5)
        raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_scopes_nest():
    with random.scope([]):
        random.reseed(1, [])
        with random.scope([]):
            random.reseed(2, [])
            torch.rand(3)
        inner = torch.rand(3)
        random.reseed(1, [])
        assert_same_bits(torch.rand(3), inner)


def beside(other, work):
    """Run `work(meet)` and on a thread `other(meet)`, which begins when `work` meets it; return the result of `work`.

    Each goes on from its meeting when the other has come to its own, or cannot: nobody waits long.
    """
    came, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=other, args=(lambda: (came.set(), over.wait(timeout=5)),))

    def meet():
        if not thread.ident:
            thread.start()
            came.wait(timeout=0.1)

    try:
        return work(meet)
    finally:
        over.set()
        thread.join()


def test_scopes_of_two_threads_exclude_one_another():
    def draw(meet, seed=1):
        with random.seeded(random.key(seed)):
            meet()
            return torch.rand(3)

    assert_same_bits(beside(lambda meet: draw(meet, 9), draw), draw(lambda: None))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_draws_the_same_while_another_thread_evaluates(num_ranks):
    def loss_of(meet):
        return lambda p, x: (meet(), (p * torch.rand(4)).sum())[1]

    def steps(meet):
        def run():
            step = fds.compose(fds.sgd(0.1))(loss_of(meet))
            state = step.init(torch.ones(4))
            return [step(state, torch.ones(4))[1]["loss"] for _ in range(2)]

        return run() if num_ranks == 1 else fds.simulate(run, num_ranks)

    def evaluate(meet):
        step = fds.compose(fds.sgd(0.1))(loss_of(meet))
        step.evaluate(step.init(torch.ones(4), key=5), torch.ones(4))

    assert_same_bits(beside(evaluate, steps), steps(lambda: None))


def test_a_loss_may_evaluate_another_step_also_on_a_thread_of_its_context():
    inner = fds.compose(fds.sgd(0.1))(lambda p, x: (p * torch.rand(4)).sum())
    state = inner.init(torch.ones(4))

    def loss(p, x):
        inner.evaluate(state, x)
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(inner.evaluate, state, x))
        thread.start()
        thread.join(timeout=5)
        assert not thread.is_alive()
        return (p * torch.rand(4)).sum()

    outer = fds.compose(fds.sgd(0.1))(loss)
    outer(outer.init(torch.ones(4)), torch.ones(4))


def on_a_thread(work):
    """Return what `work` returns, or the error that it raises, on a thread of its own."""
    found = []

    def run():
        try:
            found.append(work())
        except FdsError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=30)
    return found[0]


@pytest.mark.parametrize("within", ["a rank", "a loss"])
def test_a_thread_that_waits_for_who_waits_for_it_says_so(within, monkeypatch):
    monkeypatch.setattr(random, "PATIENCE_S", 0.3)
    inner = fds.compose(fds.sgd(0.1))(lambda p, batch: (p["w"] * batch).sum())
    state = inner.init({"w": torch.ones(2)})
    evaluate = lambda: inner.evaluate(state, torch.ones(2))
    found = []

    def loss(params, batch):
        found.append(on_a_thread(evaluate))
        return (params["w"] * batch).sum()

    if within == "a rank":
        found += fds.simulate(lambda: on_a_thread(evaluate), 2)
    else:
        outer = fds.compose(fds.sgd(0.1))(loss)
        outer(outer.init({"w": torch.ones(2)}), torch.ones(2))
    assert all(isinstance(error, FdsError) and "copy_context" in error.hint for error in found) and found
    assert evaluate()["loss"] == 2.0


def test_who_waits_for_work_goes_on_waiting(monkeypatch):
    monkeypatch.setattr(random, "PATIENCE_S", 0.05)
    came, found = threading.Event(), []

    def work():
        came.set()
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass

    def held():
        with random.scope(CPU):
            work()

    thread = threading.Thread(target=held)
    thread.start()
    came.wait(timeout=5)
    with random.scope(CPU):
        found.append(thread.is_alive())
    thread.join()
    assert found


def test_a_child_of_a_fork_has_the_generators_though_a_thread_of_its_parent_held_them():
    def work(meet):
        with random.scope(CPU):
            meet()

    def other(meet):
        child = os.fork()
        if not child:
            signal.alarm(5)
            with random.scope(CPU):
                os._exit(0)
        status.append(os.waitpid(child, 0)[1])

    status = []
    beside(other, work)
    assert status == [0]


def test_reseeding_repeats_the_draws():
    with random.scope(CPU):
        random.reseed(5, CPU)
        first = torch.rand(3)
        random.reseed(5, CPU)
        assert_same_bits(torch.rand(3), first)


def test_a_stream_leaves_the_default_one_where_it_was_and_differs_by_name_rank_and_use():
    def drawn(*data):
        torch.manual_seed(0)
        with random.stream(*data):
            inside = torch.rand(4)
        with random.stream(*data):
            again = torch.rand(4)
        return inside, again, torch.rand(4)

    first, again, after = drawn("noise")
    others = [drawn("dropout"), drawn("noise", 0), drawn("noise", 1)]
    assert all(torch.equal(after, other[2]) for other in others)
    every = [first, again, *(x for other in others for x in other[:2])]
    assert all(not torch.equal(a, b) for i, a in enumerate(every) for b in every[:i])
    assert all(torch.equal(a, b) for a, b in zip(drawn("noise"), (first, again, after), strict=True))


def test_a_stream_in_a_loss_follows_from_the_key_also_where_it_is_computed_again():
    def layer(x):
        with random.stream("noise", 3):
            return x * torch.rand_like(x) * torch.rand_like(x)

    def run(*transforms, key):
        loss = fds.Layers(
            [torch.nn.Linear(3, 3), layer, torch.nn.Linear(3, 1)], lambda out, y: (out - y).square().mean()
        )
        step = fds.compose(*transforms, fds.sgd(0.1))(loss)
        params = {name: torch.full_like(x, 0.3) for name, x in loss.init(random.key(0)).items()}
        state, metrics = step(step.init(params, key=key), (torch.ones(4, 3), torch.zeros(4, 1)))
        return [*state.params.values(), metrics["loss"]]

    plain = run(key=1)
    assert all(map(torch.equal, plain, run(key=1)))
    assert all(map(torch.equal, plain, run(fds.checkpoint_activations(), key=1)))
    assert not torch.equal(plain[-1], run(key=2)[-1])


@pytest.mark.parametrize("data", [(1.5,), ("noise", None)])
def test_a_stream_refuses_what_no_key_is_folded_with(data):
    with pytest.raises(FdsError), random.stream(*data):
        pass
