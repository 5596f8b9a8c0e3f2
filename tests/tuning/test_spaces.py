"""What is in a space, and what is none."""

import functools

import pytest

import fds
from fds.errors import FdsError
from fds.tuning import Space, standard
from tests.tuning.problem import recipe


def test_a_space_is_the_product_of_its_choices_in_the_order_of_a_grid():
    space = Space(recipe, [{"dp": 4}, {"pp": 2, "dp": 2}], {"a": [1, 2], "b": [True, False]})
    assert [str(c) for c in space.candidates()][:3] == ["dp=4, a=1, b=True", "dp=4, a=1, b=False", "dp=4, a=2, b=True"]
    assert len({c.key for c in space}) == 8 and {c.num_ranks for c in space} == {4}


def test_a_space_may_leave_combinations_out():
    space = Space(recipe, {"dp": 2}, {"a": [1, 2], "b": [1, 2]}, lambda axes, choices: choices["a"] != choices["b"])
    assert [dict(c.choices) for c in space] == [{"a": 1, "b": 2}, {"a": 2, "b": 1}]


def test_the_standard_space_has_schedules_of_pipelines_alone():
    base = functools.partial(fds.adamw, 1e-3)
    space = standard(
        base, 4, stages=(1,), recompute=(False,), microbatches=(4,), pipelines=(1, 2), schedules=("gpipe", "zb_h1")
    )
    assert [str(c) for c in space] == [
        "dp=4, stage=1, microbatches=4, recompute=False, schedule=gpipe",
        "pp=2, dp=2, stage=1, microbatches=4, recompute=False, schedule=gpipe",
        "pp=2, dp=2, stage=1, microbatches=4, recompute=False, schedule=zb_h1",
    ]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Space(None, {"dp": 2}), "compose"),
        (lambda: Space(recipe, {"dp": 0}), "sizes of axes"),
        (lambda: Space(recipe, []), "as many ranks"),
        (lambda: Space(recipe, [{"dp": 2}, {"dp": 4}]), "as many ranks"),
        (lambda: Space(recipe, {"dp": 2}, {"a": []}), "choose from"),
        (lambda: Space(recipe, {"dp": 2}, {"a": "text"}), "choose from"),
        (lambda: Space(recipe, {"dp": 2}, {"a": [recipe]}), "choose from"),
        (lambda: Space(recipe, {"dp": 2}, [1]), "choose from"),
        (lambda: Space(recipe, {"dp": 2}, {"axes": [1]}), "name of an argument"),
        (lambda: Space(recipe, {"dp": 2}, {"a b": [1]}), "name of an argument"),
        (lambda: Space(recipe, {"dp": 2}, {"a": [1]}, lambda axes, choices: False), "nothing is in the space"),
        (lambda: Space(recipe, {"dp": 2}, {"a": [1]}, 3), "not a function"),
        (lambda: standard(recipe, 0), "number of ranks"),
        (lambda: standard(recipe, 4, pipelines=(3,)), "number of stages"),
        (lambda: standard(recipe, 4, schedules=("fifo",)), "no such schedule"),
        (lambda: standard(fds.adamw(1e-3), 4), "called without arguments"),
        (lambda: fds.tuning.Budget(trials=0), "not a count"),
        (lambda: fds.tuning.Budget(limit=0.0), "not a time"),
        (lambda: fds.tune(None, None, None, space=recipe), "not a space"),
        (lambda: fds.tune(None, None, None, space=standard(recipe, 2), memory=0), "not bytes"),
        (lambda: fds.tune(None, None, None, space=standard(recipe, 2), order="best"), "no such order"),
        (lambda: fds.tune(None, None, None, space=standard(recipe, 2), device="tpu"), "no such device"),
    ],
)
def test_what_is_no_space_is_refused(make, match):
    with pytest.raises(FdsError, match=match):
        make()
