"""The winner as text: a program that makes the very composition, and a JSON that makes what it can."""

import json

import torch

import fds
from fds.collectives.meshes import planned
from fds.tuning import Report, Row, Space, standard
from fds.tuning.written import json_of, python_of
from tests.tuning.problem import batch, layers, recipe


def base():
    rate = fds.schedules.warmup_cosine(3e-4, warmup_steps=100, total_steps=1000)
    return fds.compose(fds.precision(torch.bfloat16), fds.clip_by_global_norm(1.0), fds.adamw(rate))


def plain():
    return fds.compose(fds.clip_by_global_norm(1.0), fds.adamw(1e-3, betas=(0.8, 0.9), weight_decay=0.1))


def described(composition):
    step = composition(layers())
    return repr(step.composition), str(step.describe(step.structure(layers().init)))


def test_python_makes_the_very_composition(tmp_path):
    media = {"optimizer": ("host", "disk"), "parameters": ("device", "host"), "activations": ("device", "host")}
    ways = {"gradients": ("lossless", "onebit()"), "weights": ("quantized(8)",), "buckets": (None, 4096)}
    space = standard(base, 4, stages=(1, 3), microbatches=(1, 2), **media, **ways, tensor=(1, 2), directory=tmp_path)
    candidates = [*space][::17]
    assert len(candidates) > 20
    for candidate in candidates:
        text = python_of(space, candidate)
        assert text.startswith("import torch\n\nimport fds\n\nmesh = fds.mesh(dp=")
        names = {}
        with planned(candidate.axes, 0) as mesh:
            exec("\n".join(line for line in text.splitlines() if not line.startswith("mesh =")), {"mesh": mesh}, names)
            expected = space.compose(mesh, **candidate.choices)
            assert repr(names["composition"]) == repr(expected)


def test_python_of_a_pipeline_is_described_alike():
    space = standard(plain, 2, stages=(1,), microbatches=(4,), pipelines=(2,), schedules=("zb_h1",), recompute=(True,))
    (candidate,) = space
    names = {}
    with planned(candidate.axes, 0) as mesh:
        text = python_of(space, candidate).partition("\nmesh = ")[2].partition("\n")[2]
        exec(text, {"mesh": mesh, "fds": fds}, names)
        assert described(names["composition"]) == described(space.compose(mesh, **candidate.choices))


def best(space, candidate, num_rows=8):
    return Report([Row(candidate, "tried", measured=1.0, num_bytes=5)], (1.0, 1.0), num_rows, 1.0, space)


def test_a_report_has_a_program_that_trains_by_the_same_bits():
    space = standard(plain, 1, stages=(0,), microbatches=(2,), recompute=(True,))
    (candidate,) = space
    report, names = best(space, candidate), {}
    exec(report.python(), names)
    assert str(report).endswith(report.python().rstrip())
    mesh, states = fds.mesh(dp=1), []
    for composition in (names["composition"], space.compose(mesh, **candidate.choices)):
        step = composition(layers())
        states.append(step(step.init(layers().init, key=0), batch())[0])
    for x, y in zip(fds.tree.leaves(states[0]), fds.tree.leaves(states[1]), strict=True):
        assert not isinstance(x, torch.Tensor) or torch.equal(x, y)


def test_a_json_composes_what_it_says():
    space = standard(plain, 4, stages=(1,), microbatches=(2,), recompute=(False,), optimizer=("host",), buckets=(4096,))
    (candidate,) = space
    told = json.loads(best(space, candidate).to_json())
    assert told["axes"] == {"dp": 4} and told["choices"]["bucket"] == 4096 and told["unsaid"] == []
    assert told["config"] == {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1024, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": told["config"]["optimizer"]["params"]},
    }
    with planned(candidate.axes, 0) as mesh:
        again = fds.compose(*fds.config.TrainingConfig.of(told["config"]).transforms(mesh))
        assert sorted(described(again)[1].splitlines()) == sorted(
            described(space.compose(mesh, **candidate.choices))[1].splitlines()
        )


def test_what_a_json_does_not_say_is_listed():
    space = standard(base, 2, stages=(1,), microbatches=(1,), recompute=(False,), gradients=("onebit()",))
    (candidate,) = space
    sharding, rate = json_of(space, candidate, 8).unsaid
    assert sharding.startswith("shard_optimizer(mesh['dp'], stage=1, gradients=onebit()): the JSON is ")
    assert "warmup_cosine" in rate
    pipeline = standard(
        base, 2, stages=(1,), microbatches=(4,), recompute=(False,), pipelines=(2,), schedules=("gpipe",)
    )
    assert any(text.startswith("pipeline(gpipe") for text in json_of(pipeline, pipeline.candidates()[0], 8).unsaid)
    own = Space(OnOtherAxes(), {"layers": 2, "dp": 1}, {"partition": ["first"]})
    assert json.loads(best(own, own.candidates()[0]).to_json())["unsaid"]
    none = Space(recipe, {"dp": 2}, {"kind": ["sharded"]})
    assert json_of(none, none.candidates()[0], 7).unsaid  # 7 rows are no batch of two ranks


class OnOtherAxes:
    def __call__(self, mesh, partition):
        cut = fds.pipeline(fds.plans.gpipe, mesh["layers"], num_microbatches=2, partition=[0, 1, 2])
        return fds.compose(cut, fds.adamw(1e-3))


class Unprinted:
    def __call__(self, mesh, stage):
        return fds.compose(fds.shard_optimizer(mesh["dp"], stage=stage), fds.sgd(lambda t: 0.1))


def test_a_composition_that_does_not_print_is_called_by_its_choices():
    space = Space(Unprinted(), {"dp": 2}, {"stage": [1]})
    text = python_of(space, space.candidates()[0])
    assert text.endswith(
        "# compose: the function of the space\n\nmesh = fds.mesh(dp=2)\ncomposition = compose(mesh, stage=1)\n"
    )
