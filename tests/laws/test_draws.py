"""What fills a station draws from the key of the state: its own numbers, whatever the global generators hold."""

from __future__ import annotations

import contextlib

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from fds.errors import ComposeError
from tests.bits import assert_same_bits

ROWS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.ones(12, 2)


@attrs.frozen
class Drawing:
    """Fillers of every station that may draw, and what each of them drew."""

    drawn: dict[str, list] = attrs.field(factory=dict)
    takes_slices = True
    slot = "noisy"

    def draw(self, name, like=None):
        x = torch.rand(() if like is None else like.shape, dtype=torch.float64)
        if not x.is_meta:
            self.drawn.setdefault(name, []).extend(x.flatten().tolist())
        return x

    def keyed(self, name, call):
        """Draw as `draw`, from the key of the call itself."""
        self.drawn.setdefault(f"{name}, by key", []).extend(call.key.tolist())

    def batch(self, batch, call):
        self.keyed("batch", call)
        return batch[0] + self.draw("batch"), batch[1]

    def view(self, x, leaf, call):
        self.keyed(f"view of {leaf.name}", call)
        return x + 0.1 * self.draw(f"view of {leaf.name}")

    @contextlib.contextmanager
    def context(self, call):
        self.keyed("context", call)
        self.draw("context")
        yield

    def layer(self, calls, call):
        self.keyed("layers", call)
        self.draw("layers")

        for layer_call in calls:  # as a map draws for a layer that it is given, on whatever stage
            self.keyed(f"layer {layer_call.layers}", call.at(layer_call.layers[0]))

        def noisy(one):
            before, after = (f"{at} layer {one.layers}" for at in ("before", "after"))
            return one.replaced(lambda x: one(x + self.draw(before).float()) + self.draw(after).float())

        return [noisy(one) for one in calls]

    def __call__(self, grads, call):
        self.keyed("condition", call)
        return fds.step.Gradients([g + self.draw("condition", g).float() for g in grads.leaves], grads.scale)

    def scale(self, slots, device):
        return 2.0 ** (4 * self.draw("scale")).floor()

    def metrics(self, slots, device):
        return {}

    def rule(self, slot, noted, call):
        self.keyed("rule", call)
        return slot + self.draw("rule").float() * ~call.overflow

    def schedule(self, t):
        return 0.1 + 0.1 * self.draw("schedule")

    def optimizer(self):
        def update(grads, opt, params, *, lr, grad_scale, **rest):
            for p, g in zip(params, grads, strict=True):
                p.sub_(lr * (g / (1 if grad_scale is None else grad_scale) + 0.1 * self.draw("optimizer", p)))
            return params, opt

        return fds.Optimizer(lambda segments, *, params: {}, update, lr=self.schedule)

    def init(self, params, device):
        return tree.map(lambda p: p + self.draw("slots"), params)

    def average(self):
        outer = self

        class After:
            slot = "noisy"

            def __call__(self, slot, params, skip, call):
                outer.keyed("after", call)
                return tree.map(lambda e, p: e.lerp_(p, 0.5).add_(outer.draw("after", p)), slot, params)

        return After()

    def fill(self, step):
        return fds.step.fill(
            step,
            batch=self.batch,
            view=self.view,
            context=self.context,
            layer=self.layer,
            scale=self,
            condition=self,
            after=self.average(),
            slots={"noisy": self.init},
            measure=fds.step.Measure(norm=True, skips=True),
            memory=fds.step.Memory(
                "drawn", lambda shapes, device: torch.zeros(()), "replicated", accept=self.rule, on_skip="run"
            ),
        )


def layers(own):
    """Return a loss of four layers: one draws by itself, and the first and the last share their weight."""
    draws = lambda x: x * own.draw("the layer's").float()
    tied = lambda: fds.TiedLayerSpec("w", nn.Linear, 3, 3)
    criterion = lambda x, y: (x.sum(1) - y.sum(1)).square().mean()
    return fds.Layers([tied(), draws, fds.LayerSpec(nn.Linear, 3, 3), tied()], criterion)


def run(make):
    """Return paths of the state after two steps, metrics, and what was drawn in a step and in an evaluation."""
    own = Drawing()
    loss = layers(own)
    step = fds.compose(*make(), fds.step.Transform("drawing", "drawing()", own.fill), own.optimizer())(loss)
    state = step.init(loss.init, key=3)
    before = torch.get_rng_state()
    state, _ = step(state, ROWS)
    own.drawn.clear()
    state, metrics = step(state, ROWS)
    drawn = dict(own.drawn)
    own.drawn.clear()
    seen = step.evaluate(state, ROWS)
    assert torch.equal(torch.get_rng_state(), before)
    return tree.paths(state), metrics, seen, drawn, dict(own.drawn)


data = lambda stage: lambda: [fds.accumulate(2), fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
staged = lambda: [fds.pipeline(plans.one_f_one_b, fds.mesh(pp=2, dp=-1)["pp"], num_microbatches=3)]
both = lambda: [*staged(), fds.shard_optimizer(fds.mesh(pp=2, dp=-1)["dp"], stage=1)]
WAYS = {
    "plain": (list, 1),
    "accumulated": (lambda: [fds.accumulate(3)], 1),
    "checkpointed": (lambda: [fds.checkpoint_activations(), fds.accumulate(3)], 1),
    "played": (lambda: [fds.pipeline(plans.zb_h1, 2, num_microbatches=3)], 1),
    "staged": (staged, 2),
    "both": (both, 4),
    **{f"stage {i}": (data(i), 2) for i in range(4)},
}


@pytest.mark.parametrize(("make", "num_ranks"), WAYS.values(), ids=WAYS)
def test_all_random_numbers_follow_the_key(make, num_ranks):
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append([run(make)] if num_ranks == 1 else fds.simulate(lambda: run(make), num_ranks))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one[:3], other[:3])
        assert one[3:] == other[3:]
    for _, _, _, drawn, held_out in found[0]:
        numbers = [x for some in (drawn, held_out) for xs in some.values() for x in set(xs)]
        assert len(set(numbers)) == len(numbers), "two fillers, or a filler and a layer, drew the same"
        if make in (list, WAYS["accumulated"][0]):  # others recompute, or run a filler on several stages
            every = [x for some in (drawn, held_out) for xs in some.values() for x in xs]
            assert len(set(every)) == len(every), "two microbatches drew the same"
        names = {"batch", "context", "layers", "condition", "after", "rule"}
        assert drawn.keys() >= names | {f"{name}, by key" for name in names} | {
            "scale",
            "rule",
            "schedule",
            "optimizer",
        }
        assert any(name.startswith("view of") for name in drawn) and any(name.startswith("before") for name in drawn)
        assert held_out.keys() >= {"batch", "context", "batch, by key"}


@pytest.mark.parametrize("stage", range(4))
def test_ranks_draw_alike_for_what_they_share_and_differently_for_what_each_has(stage):
    (a, *_, one, _), (b, *_, other, _) = fds.simulate(lambda: run(data(stage)), 2)
    shared = {"schedule", "scale", "rule"} | ({"condition", "optimizer", "after"} if stage == 0 else set())
    for name, numbers in one.items():
        assert (numbers == other[name]) == (name.removesuffix(", by key") in shared), name
    if stage == 0:
        assert_same_bits(a, b)


def test_slices_of_a_slot_begin_with_numbers_of_their_own():
    def begin():
        slot = fds.step.Memory("noise", lambda params, device: tree.map(torch.rand_like, params), "parameters")
        noise = fds.step.Transform("noise", "noise()", lambda step: fds.step.fill(step, memory=slot))
        loss = layers(Drawing())
        state = fds.compose(*data(1)(), noise, fds.sgd(0.1))(loss).init(loss.init, key=3)
        return torch.cat(tree.leaves(state.slots["noise"]))

    one, other = fds.simulate(begin, 2)
    assert not set(one.tolist()) & set(other.tolist())


def test_stage_0_adds_the_noise_of_the_plain_step_to_the_same_gradients():
    plain, (sharded, _) = run(list), fds.simulate(lambda: run(data(0)), 2)
    for name in ("condition", "optimizer", "after", "schedule"):
        assert plain[3][name] == sharded[3][name]


@pytest.mark.parametrize("make", [staged, WAYS["played"][0]], ids=["staged", "played"])
def test_a_microbatch_draws_alike_on_whatever_stage_its_layers_are(make):
    """Views by parameter, layer maps by layer, contexts by microbatch: tied parameters and contexts on each stage."""
    plain = run(lambda: [fds.accumulate(3)])[3]
    ranks = [run(make)] if make is not staged else fds.simulate(lambda: run(make), 2)
    seen = set()
    for _, _, _, drawn, _ in ranks:
        for name, numbers in drawn.items():
            if name.startswith(("view", "context", "before", "after layer", "layer (", "batch")):
                assert set(numbers) <= set(plain[name]), name
                seen.add(name)
    assert seen >= {name for name in plain if name.startswith(("view", "context", "before", "after layer", "layer ("))}


def test_what_is_tied_over_stages_stays_alike_whatever_was_drawn_for_it():
    (a, *_), (b, *_) = fds.simulate(lambda: run(staged), 2)
    shared = [name for name in a if name in b and name.startswith("params.")]
    assert shared
    for name in shared:
        assert_same_bits(a[name], b[name])


def test_a_filler_that_draws_nothing_is_not_seeded(monkeypatch):
    step = fds.compose(
        fds.clip_by_global_norm(1.0),
        fds.loss_scale(),
        fds.ema(0.9),
        fds.autocast(),
        fds.precision(),
        fds.by_name({"*": fds.adamw(fds.schedules.warmup(1e-3))}),
    )(lambda p, x: (p["w"] * x).sum())
    state, seeds = step.init({"w": torch.ones(2)}), []
    state, _ = step(state, torch.ones(4, 2))
    monkeypatch.setattr(fds.random, "reseed", lambda *args: seeds.append(args))
    step(state, torch.ones(4, 2))
    assert len(seeds) == 1  # of the loss


def test_what_says_that_it_draws_nothing_has_no_key():
    def view(x, leaf, call):
        return x + call.at("mine").key[0]

    step = fds.compose(fds.step.Transform("mine", "mine()", lambda s: fds.step.fill(s, view=view)), fds.sgd(0.1))(
        lambda p, x: (p["w"] * x).sum()
    )
    state = step.init({"w": torch.ones(2)})
    step(state, torch.ones(2))
    view.draws = False
    with pytest.raises(ComposeError, match="asks for a random key"):
        step(state, torch.ones(2))
