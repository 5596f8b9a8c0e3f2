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
