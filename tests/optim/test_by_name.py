"""One optimizer per group of parameters."""

from __future__ import annotations

import pytest
import torch

import fds
from fds.errors import OptimizerError
from fds.optim import Optimizer, Segment, adamw, by_name, muon, sgd
from fds.schedules import warmup_decay

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
SHAPES = [(5, 3), (5,), (2, 5), (2,)]


def test_each_group_is_updated_by_its_own_optimizer(train, draw):
    params, batches = draw(SHAPES)
    bias, rest = adamw(lambda t: 0.1 / (t + 1), weight_decay=0.0), sgd(0.1, momentum=0.9)
    both, opt = train(by_name({"*.bias": bias, "*": rest}), params, batches, names=NAMES)
    for member, indices in ((bias, (1, 3)), (rest, (0, 2))):
        alone, slots = train(member, [params[i] for i in indices], [[g[i] for i in indices] for g in batches])
        assert all(torch.equal(both[i], p) for i, p in zip(indices, alone, strict=True))
        for slot, tensors in slots.items():
            assert all(torch.equal(opt[slot][i], x) for i, x in zip(indices, tensors, strict=True))
    assert [x is None for x in opt["exp_avg"]] == [True, False, True, False]
    assert [x is None for x in opt["momentum_buffer"]] == [False, True, False, True]


def test_the_first_match_wins_and_is_the_group():
    optimizer = by_name({"0.*": sgd(), "*.bias": adamw(), "*": sgd(0.5)})
    assert [optimizer.group(name) for name in NAMES] == [0, 0, 2, 1]
    assert adamw().group("0.bias") == adamw().group("1.weight")


def test_a_learning_rate_that_is_passed_is_ignored(train, draw):
    params, batches = draw(SHAPES, num_steps=3)
    optimizer = by_name({"*.bias": sgd(0.1), "*": sgd(0.2)})
    passed, _ = train(optimizer, params, batches, names=NAMES, edit=lambda t, _: {"lr": torch.tensor(9.0)})
    own, _ = train(optimizer, params, batches, names=NAMES)
    assert all(torch.equal(a, b) for a, b in zip(passed, own, strict=True))


def test_the_rate_of_every_group_is_reported_and_one_for_all_where_they_agree():
    rates = lambda optimizer: {n: float(x) for n, x in optimizer.values(torch.tensor(2)).rates().items()}
    falling = warmup_decay(0.5, total_steps=4, warmup_steps=0)
    assert rates(adamw(falling)) == {"lr": 0.25}
    assert rates(by_name({"a": sgd(falling), "*": adamw(0.1)})) == {"lr/a": 0.25, "lr/*": 0.1}
    same = by_name({"a": sgd(falling), "*": adamw(warmup_decay(0.5, total_steps=4, warmup_steps=0), weight_decay=0.0)})
    assert rates(same) == {"lr": 0.25, "lr/a": 0.25, "lr/*": 0.25}
    nested = by_name({"a": by_name({"b": sgd(1.0), "c": sgd(2.0)}), "*": same})
    assert rates(nested) == {"lr/a/b": 1.0, "lr/a/c": 2.0, "lr/*": 0.25, "lr/*/a": 0.25, "lr/*/*": 0.25}


SMALL = lambda name, shape: len(shape) < 2
NORMS = lambda number: [f"{i}.scale" for i in range(number)]


def net(number: int) -> dict[str, torch.Tensor]:
    """A matrix and a vector of each of so many layers."""
    return {
        f"{i}.{name}": torch.full(shape, 0.5)
        for i in range(number)
        for name, shape in {"w": (2, 2), "scale": (2,)}.items()
    }


def square(params, batch):
    return sum((x * x).sum() for x in params.values()) * batch


def trained(optimizer, *, number=6, stage=None):
    """Return the metrics, parameters, buckets and state of two steps of a net."""
    more = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
    step = fds.compose(*more, optimizer)(square)
    state = step.init(net(number))
    for _ in range(2):
        state, metrics = step(state, torch.tensor(1.0))
    buckets = (
        []
        if stage is None
        else [[leaf.name for leaf in b.leaves] for b in step.structure_of(state.params)[0].layout.buckets]
    )
    return metrics, step.params(state), buckets


PLAIN, DECAY = sgd(0.1, momentum=0.9), sgd(0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("stage", [None, 0, 2])
@pytest.mark.parametrize(
    "patterns",
    [
        {**{name: sgd(0.1, momentum=0.9) for name in NORMS(6)}, "*": DECAY},
        {("*norm*", "*.bias", SMALL): PLAIN, "*": DECAY},
        {SMALL: PLAIN, "*": DECAY},
        {tuple(NORMS(6)): PLAIN, (lambda name, shape: shape == (2, 2),): DECAY},
        {"3.*": by_name({SMALL: PLAIN, "*": DECAY}), SMALL: PLAIN, "*": DECAY},
    ],
    ids=["a pattern a name", "a tuple", "a function", "a tuple of names", "nested"],
)
def test_patterns_tuples_and_functions_of_shapes_are_the_groups_that_they_take(patterns, stage):
    want = trained(by_name({"*.scale": PLAIN, "*": DECAY}))[1]
    run = lambda: trained(by_name(patterns), stage=stage)
    for metrics, params, buckets in [run()] if stage is None else fds.simulate(run, 2):
        assert all(torch.equal(params[name], x) for name, x in want.items())
        nested = any(not isinstance(k, tuple) and k == "3.*" for k in patterns)
        assert nested or sum(name.startswith("lr/") for name in metrics) == 2
        for names in buckets:
            assert len({name.endswith("scale") for name in names}) == 1
        assert nested or stage != 2 or len(buckets) == 2


def test_a_function_gets_whole_shapes_and_alone_is_asked_once_a_name():
    asked = []

    def small(name, shape):
        asked.append((name, shape))
        return len(shape) < 2

    fds.simulate(lambda: trained(by_name({small: PLAIN, "*": DECAY}), number=1, stage=2), 2)
    assert set(asked) == {("0.w", (2, 2)), ("0.scale", (2,))}


def test_a_learning_rate_is_reported_by_the_first_pattern_of_its_group():
    optimizer = by_name({"a": sgd(0.1), ("*b*", SMALL): sgd(0.2), "c": sgd(0.1), SMALL: sgd(0.3), "*": sgd(0.3)})
    assert list(optimizer.values(torch.tensor(0)).rates()) == ["lr/a", "lr/*b*, lambda", "lr/lambda"]
    two = by_name({SMALL: sgd(0.1), (lambda name, shape: True): sgd(0.2)})
    assert list(two.members) == ["lambda", "lambda'"]
    assert str(two) == "by_name({lambda: sgd(lr=0.1), lambda: sgd(lr=0.2)})"


def fails(name, shape):
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({fails: sgd(), "*": adamw()}, ["fails, 0.w", "no such thing"]),
        ({(lambda name: True): sgd(), "*": adamw()}, ["lambda, 0.w", "positional"]),
        ({(lambda name, shape: len(shape)): sgd(), "*": adamw()}, ["lambda, 0.w", "2"]),
        ({(lambda name, shape: False): sgd(), "*": adamw()}, ["a pattern matches no parameter", "a tuple"]),
        ({("*norm*", "*.bias"): sgd(), "*": adamw()}, ["('*norm*', '*.bias')", "a tuple"]),
        ({"*": adamw(), "0.*": sgd()}, ["earlier patterns take", "0.*", "comes last"]),
    ],
)
def test_a_function_that_fails_and_a_tuple_that_takes_nothing_are_refused(patterns, words):
    with pytest.raises(OptimizerError) as error:
        trained(by_name(patterns))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("pattern", [(), 3, ("a", 3)])
def test_what_is_not_a_pattern_is_refused(pattern):
    with pytest.raises(OptimizerError, match="not a pattern"):
        by_name({pattern: sgd()})


def test_groups_nest(train, draw):
    params, batches = draw(SHAPES, num_steps=3)
    flat = by_name({"0.bias": sgd(0.1), "*.bias": sgd(0.2, momentum=0.9), "*": adamw()})
    nested = by_name({"*.bias": by_name({"0.*": sgd(0.1), "*": sgd(0.2, momentum=0.9)}), "*": adamw()})
    a, b = (train(optimizer, params, batches, names=NAMES) for optimizer in (flat, nested))
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and set(a[1]) == set(b[1])


def test_muon_takes_the_matrices_and_makes_the_whole_whole(train, draw):
    params, batches = draw(SHAPES, num_steps=3)
    optimizer = by_name({"*.weight": muon(), "*": adamw()})
    assert optimizer.whole and not adamw().whole
    train(optimizer, params, batches, names=NAMES)


def test_a_slice_without_parameters_belongs_to_the_last_group():
    optimizer = by_name({"*.bias": sgd(momentum=0.9), "*": adamw()})
    segments = [[Segment("0.bias", (2,), 0, 2)], [Segment("0.weight", (2,), 0, 2)], []]
    opt = optimizer.init(segments, params=[torch.zeros(2)] * 3)
    assert [x is None for x in opt["exp_avg"]] == [True, False, False]


def test_a_slice_of_two_groups_is_a_bug_of_ours():
    segments = [[Segment("0.bias", (2,), 0, 2), Segment("0.weight", (2,), 2, 2)]]
    with pytest.raises(AssertionError, match="mixes the groups"):
        by_name({"*.bias": sgd(), "*": adamw()}).init(segments, params=[torch.zeros(4)])


@pytest.mark.parametrize(
    ("patterns", "where"), [({"*.bias": sgd()}, "0.weight"), ({"*.bais": sgd(), "*": adamw()}, "'*.bais'")]
)
def test_a_parameter_without_a_pattern_and_a_pattern_without_a_parameter_are_refused(patterns, where):
    with pytest.raises(OptimizerError) as error:
        by_name(patterns).check(NAMES)
    assert error.value.where == where and error.value.got and error.value.want and error.value.hint


@pytest.mark.parametrize("optimizers", [{}, {"*": "adamw"}, {"*": adamw}])
def test_what_is_not_an_optimizer_is_refused(optimizers):
    with pytest.raises(OptimizerError, match="by_name"):
        by_name(optimizers)


def test_what_its_optimizers_return_is_taken():
    def init(segments, *, params):
        return {"count": [torch.zeros_like(p) for p in params]}

    def update(grads, opt, params, **rest):
        return [p - 0.5 * g for p, g in zip(params, grads, strict=True)], {"count": [x + 1 for x in opt["count"]]}

    def stepped(optimizer):
        step = fds.compose(optimizer)(lambda params, batch: sum((x * batch).sum() for x in params.values()))
        state = step.init({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
        return step(state, torch.ones(2))[0]

    fresh = Optimizer(init, update, lr=0.5, draws=False)
    for pair in ({"b": fresh, "*": sgd(0.25)}, {"b": by_name({"*": fresh}), "*": sgd(0.25)}):
        state = stepped(by_name(pair))
        assert [x.tolist() for x in state.params.values()] == [[0.75, 0.75], [0.5, 0.5], [0.75, 0.75]]
        assert state.opt["count"]["b"].tolist() == [1, 1]
    alone = stepped(fresh)
    assert [x.tolist() for x in alone.params.values()] == [[0.5, 0.5]] * 3
