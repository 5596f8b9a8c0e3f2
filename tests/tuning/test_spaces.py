"""What is in a space, and what is none."""

import functools

import attrs
import pytest

import fds
from fds.collectives.meshes import planned
from fds.errors import FdsError
from fds.tuning import Report, Row, Space, standard
from fds.tuning.footprints import Footprint, weigh
from fds.tuning.problem import Problem
from tests.tuning.problem import batch, layers, recipe

BASE = functools.partial(fds.adamw, 1e-3)


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


def test_the_standard_space_has_media_transports_and_buckets_where_they_are_asked_for(tmp_path):
    media = {"optimizer": ("device", "disk"), "parameters": ("host",), "activations": ("device", "host")}
    ways = {"gradients": ("lossless", "onebit()"), "weights": ("lossless", "quantized(8)"), "buckets": (None, 4096)}
    space = standard(BASE, 4, stages=(0, 1), microbatches=(2,), **media, **ways, tensor=(1, 2, 4), directory=tmp_path)
    texts = {str(c): composed(space, c) for c in space}
    shard = "shard_optimizer(mesh['dp'], stage=1, bucket_bytes=4096, weights=quantized(8), gradients=onebit())"
    where = f"fds.disk({str(tmp_path)!r})"
    assert texts[
        "dp=2, tp=2, stage=1, microbatches=2, recompute=True, optimizer=disk, parameters=host, activations=host, "
        "gradients=onebit(), weights=quantized(8), bucket=4096"
    ] == (
        f"compose(checkpoint_activations(store='host'), accumulate(2), tensor_parallel(mesh['tp']), {shard}, "
        f"offload(moments={where}, gradients={where}, masters='host'), adamw(lr=0.001))"
    )
    alone = [text for text in texts if text.startswith("dp=1")]
    assert alone and not any(word in text for text in alone for word in ("onebit", "quantized", "4096"))
    assert not any("stage=0" in text and "weights=quantized" in text for text in texts)
    assert not any("recompute=False" in text and "activations=host" in text for text in texts)
    assert len({(*c.axes.items(), texts[str(c)]) for c in space}) == len(texts)


def test_partitions_of_pipelines_are_a_choice():
    space = standard(BASE, 2, stages=(1,), microbatches=(2,), pipelines=(1, 2), partitions=("uniform", "parameters"))
    first, *others = [c for c in space if not c.choices["recompute"]]
    assert str(first) == "dp=2, stage=1, microbatches=2, recompute=False, partition=uniform"
    assert [c.choices["partition"] for c in others] == ["uniform", "parameters"]
    assert "num_microbatches=2, partition='uniform')" in composed(space, others[0])


def test_what_lives_on_a_disk_is_not_in_the_bytes_of_a_rank(tmp_path):
    loss = layers()
    space = standard(
        BASE, 2, stages=(1,), microbatches=(1,), recompute=(False,), optimizer=("device", "disk"), directory=tmp_path
    )
    footprints = []
    weigh(footprints.append, Problem(space, loss, loss.init, batch()), space.candidates())
    on_device, on_disk = footprints
    assert on_disk["is_whole"] and on_disk["num_bytes"] < on_device["num_bytes"]
    (tmp_path / "file").write_text("")
    space = attrs.evolve(space, compose=attrs.evolve(space.compose, directory=str(tmp_path / "file")))
    weigh(footprints.append, Problem(space, loss, loss.init, batch()), space.candidates()[1:])
    assert not footprints[2]["is_whole"] and footprints[2]["num_bytes"] < on_device["num_bytes"]
    shown = footprints[2]
    row = Row(space.candidates()[1], "not tried", footprint=Footprint(**shown))
    report = Report([row], (1.0, 1.0), 8, 1.0, space)
    assert str(report).endswith(f"1 predicted without activations, by formulas: {footprints[2]['unknown']}")
    assert "by formulas" in report._repr_html_()


def composed(space, candidate):
    with planned(candidate.axes, 0) as mesh:
        return repr(space.compose(mesh, **candidate.choices))


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
        (lambda: standard(recipe, 4, pipelines=(3,)), "pipelines\n  got:   3\n  want:  a divisor of 4"),
        (lambda: standard(recipe, 4, schedules=("fifo",)), "schedules\n  got:   'fifo'"),
        (lambda: standard(recipe, 4, stages=(4,)), "not a value to try"),
        (lambda: standard(recipe, 4, stages=3), "not values to try"),
        (lambda: standard(recipe, 4, microbatches=(0,)), "not a value to try"),
        (lambda: standard(recipe, 4, recompute=("yes",)), "True or False"),
        (lambda: standard(recipe, 4, tensor=(3,)), "no sizes divide the ranks"),
        (lambda: standard(recipe, 4, partitions=(2,)), "not a value to try"),
        (lambda: standard(recipe, 4, buckets=(0,)), "not a value to try"),
        (lambda: standard(recipe, 4, optimizer=("nvme",)), "device, host, disk"),
        (lambda: standard(recipe, 4, activations=("disk",)), "a disk needs a directory"),
        (lambda: standard(recipe, 4, directory=3), "not a directory"),
        (lambda: standard(recipe, 4, gradients=("onebit",)), "lossless, quantized"),
        (lambda: standard(recipe, 4, weights=("onebit()",)), "lossless, quantized"),
        (lambda: Space(recipe, {"dp": 2}, {"a": [1, 1]}), "choose from"),
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
