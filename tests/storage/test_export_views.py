"""`export_weights(view=True)` writes, bit for bit, what the loss sees of every parameter when it is evaluated."""

import attrs
import pytest
import torch
from safetensors.torch import load_file

import fds
from fds import plans, tree
from fds.errors import StorageError
from fds.step import fill, transform
from tests.bits import assert_same_bits
from tests.storage.test_export import layers
from tests.storage.topologies import Stages, Topology

PARAMS = {"w": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), "b": torch.randn(5)}


@transform
def rounded():
    def view(w, leaf, call):
        scale = w.detach().abs().amax() / 7 * (1 + call.step)  # what a view may read of a call
        return w + ((w / scale).round() * scale - w).detach() if w.dim() > 1 else w

    return lambda step: fill(step, view=view)


def seen_and_written(path, *transforms):
    """Return what the loss was given, and what the file has."""
    seen = {}

    def loss(params, batch):
        if not torch.is_grad_enabled():
            seen.update({name: torch.ops.aten.clone(x) for name, x in tree.paths(params).items()})
        return (batch @ params["w"].T + params["b"]).square().mean()

    step = fds.compose(rounded(), *transforms, fds.sgd(0.1))(loss)
    state, _ = step(step.init(PARAMS, key=1), torch.ones(2, 7))
    step.evaluate(state, torch.ones(2, 7))
    masters = tree.paths(step.params(state))
    fds.export_weights(state, path, None, step=step, view=True)
    return seen, load_file(path), masters


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_what_the_loss_sees_is_written(tmp_path, stage):
    path = tmp_path / "x.safetensors"
    topology = None if stage is None else Topology(2, stage)
    body = lambda *more: seen_and_written(path, *more)
    for seen, written, masters in [body()] if topology is None else topology.run(lambda: body(topology.shard())):
        assert_same_bits(written, seen)
        assert not torch.equal(written["w"], masters["w"]) and torch.equal(written["b"], masters["b"])


def test_in_a_lower_precision_it_is_what_the_loss_sees(tmp_path):
    seen, written, _ = seen_and_written(tmp_path / "x.safetensors", fds.precision(torch.bfloat16))
    assert written["w"].dtype is torch.bfloat16
    assert_same_bits(written, seen)


def test_without_the_step_of_a_state_it_is_refused(tmp_path):
    step = fds.compose(rounded(), fds.ema(0.9), fds.sgd(0.1))(lambda params, batch: params["w"].sum())
    state = step.init(PARAMS)
    fds.save(tmp_path / "run", state, step)
    for source, more in ((state, {}), (tmp_path / "run", {"step": step}), (state, {"step": step, "tree": "slots.ema"})):
        with pytest.raises(StorageError, match="what the loss sees") as caught:
            fds.export_weights(source, tmp_path / "x.safetensors", view=True, **more)
        assert "fds.load" in caught.value.hint
    averaged = attrs.evolve(state, params=state.slots["ema"])
    fds.export_weights(averaged, tmp_path / "x.safetensors", view=True, step=step)


@pytest.mark.parametrize("stages", [Stages(2), Stages(2, plans.gpipe, 2, 3)], ids=["pp2", "pp2 x dp2, stage 3"])
def test_all_stages_of_a_pipeline_are_in_the_file(tmp_path, stages):
    path = tmp_path / "x.safetensors"

    def body(*more):
        step = fds.compose(rounded(), *more, fds.sgd(0.1))(layers())
        state = step.init(step.loss.init, key=1)
        fds.export_weights(state, path, None, step=step, view=True)
        return load_file(path), path.unlink(missing_ok=True) if not more else None

    ((want, _),) = [body()]
    for written, _ in stages.run(lambda: body(*stages.transforms())):
        assert_same_bits(dict(sorted(written.items())), dict(sorted(want.items())))
