"""Notes: what may be noted where, how it is put together over ranks, and what that costs."""

import pytest
import torch
from torch import nn

import fds
from fds import collectives, plans
from fds.errors import ComposeError, FdsError
from fds.step import Gradients, Measure, Memory, fill
from tests.bits import assert_same_bits

BATCH = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 1)
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def layers():
    return fds.Layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.MSELoss())


def filled(*memories, **stations):
    def apply(step):
        for memory in memories:
            step = fill(step, memory=memory)
        return fill(step, **stations)

    return fds.step.Transform("mine", "mine()", apply)


def zeros(shapes, device):
    return {name: torch.zeros((), device=device) for name in shapes}


def run(*transforms, batch=BATCH):
    step = fds.compose(*transforms, fds.sgd(0.1))(layers())
    return step(step.init(step.loss.init, key=1), batch)[0]


LARGEST, TOTAL = Memory("largest", zeros, "named", merge="max"), Memory("total", zeros, "named", merge="sum")


def noting(slot="largest", name=None, value=lambda x: x.detach().abs().max()):
    def view(x, leaf, call):
        call.note(slot, leaf.name if name is None else name, value(x))
        return x

    return view


class After:
    slot = "kept"

    def __call__(self, slot, params, skip, call):
        call.note("largest", "0.bias", torch.zeros(()))
        return slot


def squared(grads, call):
    call.note("largest", "0.bias", torch.zeros(()))
    return Gradients(grads.leaves, grads.scale)


ACCEPTS = Memory(
    "kept",
    lambda shapes, device: torch.zeros(()),
    "replicated",
    accept=lambda slot, noted, call: call.note("largest", "0.bias", slot) or slot,
)
KEPT = Memory("kept", lambda shapes, device: torch.zeros(()), "replicated")
REFUSED = {
    "an unknown slot": (filled(LARGEST, view=noting("largst")), "no entry", "largest"),
    "an unknown name": (filled(LARGEST, view=noting(name="0.weigt")), "no entry", "0.weight"),
    "a slot without merge": (filled(LARGEST, KEPT, view=noting("kept", "")), "no entry", "largest"),
    "another shape": (filled(LARGEST, view=noting(value=lambda x: x.detach().abs())), "not like", "() torch.float32"),
    "another dtype": (filled(LARGEST, view=noting(value=lambda x: x.double().max())), "not like", "torch.float32"),
    "another device": (filled(LARGEST, view=noting(value=lambda x: x.max().to("meta"))), "not like", "on cpu"),
    "a number": (filled(LARGEST, view=noting(value=lambda x: 0.5)), "not like", "() torch.float32"),
    "a step without such a memory": (filled(KEPT, view=noting()), "nothing may be noted", "call.note in"),
    "what follows an update": (filled(LARGEST, KEPT, after=After()), "nothing may be noted", "call.note in"),
    "what accepts": (filled(LARGEST, ACCEPTS), "nothing may be noted", "call.note in"),
    "a gradient map that does not say so": (filled(LARGEST, condition=squared), "nothing may be noted", "notes = True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_note_that_cannot_be_kept_is_refused_with_what_is_wanted(name):
    part, what, want = REFUSED[name]
    with pytest.raises(ComposeError, match=what) as caught:
        run(part)
    assert want in caught.value.want + caught.value.hint and caught.value.got


def test_every_rank_of_a_pipeline_hears_of_a_note_that_one_of_them_cannot_keep():
    def wrong(x, leaf, call):
        call.note("largest", leaf.name if leaf.name != "1.bias" else "2.bias", x.detach().abs().max())
        return x

    def body():
        with pytest.raises(FdsError, match="no entry") as caught:
            run(filled(LARGEST, view=wrong), fds.pipeline(plans.gpipe, fds.mesh(pp=-1)["pp"], num_microbatches=2))
        return caught.value.got

    assert fds.simulate(body, world_size=2) == ["'2.bias'", "'2.bias'"]


def test_a_call_that_is_over_takes_no_notes():
    calls = []

    def view(x, leaf, call):
        calls.append(call)
        return x

    run(filled(LARGEST, view=view))
    with pytest.raises(ComposeError, match="nothing may be noted"):
        calls[0].note("largest", "0.bias", torch.zeros(()))


def test_memories_that_cannot_merge_are_refused():
    flags = lambda shapes, device: {name: torch.zeros((), dtype=torch.bool) for name in shapes}
    with pytest.raises(ComposeError, match="did not return") as caught:
        run(filled(Memory("flags", flags, "named", merge="max")))
    assert "signed integer" in caught.value.want
    for arguments in (
        {"merge": "mean"},
        {"merge": "max", "lies": "parameters"},
        {"accept": lambda slot: slot},
        {"on_skip": "run"},
        {"when": lambda calls: True},
        {"when": 3, "merge": "max"},
    ):
        with pytest.raises(ComposeError, match="a memory needs"):
            Memory("slot", zeros, **{"lies": "named", **arguments})
    with pytest.raises(ComposeError, match="two fillers write"):
        run(filled(Memory("kept", zeros, "named", merge="max"), after=After()))


def test_a_note_of_one_sample_is_refused():
    def mapped(one, call):
        def of_a_row(x):
            call.note("largest", "0.bias", x.abs().max())
            return x

        return one.replaced(lambda x: one(torch.vmap(of_a_row)(x)))

    with pytest.raises(ComposeError, match=r"torch\.func"):
        run(filled(LARGEST, layer=lambda calls, call: [mapped(one, call) for one in calls]))


def test_a_slot_that_is_not_due_keeps_its_bits_and_takes_no_notes():
    asked = []

    def view(x, leaf, call):
        asked.append(call.is_due("largest"))
        if asked[-1]:
            call.note("largest", leaf.name, x.detach().abs().max())
        return x

    third = Memory(
        "largest", zeros, "named", merge="max", accept=lambda slot, noted, call: noted, when=lambda n: n == 2
    )
    step = fds.compose(filled(third, view=view), fds.sgd(0.1))(layers())
    state, was = step.init(step.loss.init, key=1), []
    for _ in range(4):
        was.append(float(state.slots["largest"]["0.bias"]))
        state, _ = step(state, BATCH)
    assert was[:3] == [0, 0, 0] and was[3] > 0 and float(state.slots["largest"]["0.bias"]) == was[3]
    assert asked == [False] * 8 + [True] * 4 + [False] * 4
    with pytest.raises(ComposeError, match="does not change in this call") as caught:
        run(filled(third, view=noting()))
    assert "call.is_due" in caught.value.want
    with pytest.raises(ComposeError, match="due in a call or is not"):
        run(filled(Memory("largest", zeros, "named", merge="max", when=lambda n: None), view=noting()))


def test_a_rule_may_say_what_a_skipped_step_makes_of_a_slot():
    def accept(slot, noted, call):
        return {name: torch.where(call.overflow, x - 1, x + noted[name]) for name, x in slot.items()}

    told = Memory("total", zeros, "named", merge="sum", accept=accept, on_skip="run")
    view = noting("total", value=lambda x: torch.ones(()))
    part = filled(told, view=view, measure=Measure(norm=True, skips=True))
    assert set(map(float, run(part).slots["total"].values())) == {1.0}
    after = run(part, batch=(BATCH[0] * torch.inf, BATCH[1]))
    assert set(map(float, after.slots["total"].values())) == {-1.0}
    with pytest.raises(ComposeError, match="nothing is skipped"):
        run(filled(told, view=view))


BROKEN = {
    "another structure": lambda slot, noted, call: torch.zeros(()),
    "another dtype": lambda slot, noted, call: {name: x.double() for name, x in slot.items()},
    "what it was given": lambda slot, noted, call: {name: x.add_(1) for name, x in slot.items()},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_accepts_must_return_a_new_slot_like_the_old_one(name):
    with pytest.raises(ComposeError, match="what fills a station") as caught:
        run(filled(Memory("slot", zeros, "named", merge="max", accept=BROKEN[name])))
    assert "'memory'" in caught.value.where


def test_notes_see_the_slots_of_before_the_step():
    seen = []

    def view(x, leaf, call):
        seen.append(float(call.slots["total"]["0.bias"]))
        call.note("total", "0.bias", torch.ones(()))
        for read in (call.slots, call.slots["total"]):
            with pytest.raises(ComposeError, match="writes into the slots"):
                read["total"] = torch.ones(())
        return x

    step = fds.compose(filled(TOTAL, view=view), fds.accumulate(2), fds.sgd(0.1))(layers())
    state = step.init(step.loss.init)
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert seen == [0.0] * 8 + [8.0] * 8


KINDS = {"float16": 60000.0, "bfloat16": 1.5, "float32": -2.5, "float64": -1e300, "int8": -128, "int64": -(2**62) - 1}


@pytest.mark.parametrize("merge", ["max", "sum"])
def test_ranks_put_every_kind_of_number_together_exactly(merge):
    half = lambda x: type(x)(x // 2 if isinstance(x, int) else x / 2)
    told = [
        {name: torch.tensor([half(x), 0], dtype=getattr(torch, name)) for name, x in KINDS.items()},
        {name: torch.tensor([x, 1], dtype=getattr(torch, name)) for name, x in KINDS.items()},
    ]
    told[0]["special"] = torch.full((5,), -5.0)
    told[1]["special"] = torch.tensor([-torch.inf, -1.0, 0.0, torch.inf, torch.nan])

    def init(shapes, device):
        with device:
            return {
                **{name: torch.zeros_like(x) for name, x in told[0].items()},
                "untold": torch.zeros(()),
                "empty": torch.zeros(0, 3),
            }

    def note(batch, call):
        for name, value in told[fds.mesh(dp=-1).rank].items():
            call.note("slot", name, value)
        return batch

    memory = Memory("slot", init, "named", merge=merge, accept=lambda slot, noted, call: noted)
    sharded = lambda: fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1)
    found = fds.simulate(lambda: run(filled(memory, batch=note), sharded()).slots["slot"], world_size=2)
    assert_same_bits(found[0], found[1])
    together = torch.maximum if merge == "max" else torch.add
    assert_same_bits(
        {name: found[0][name] for name in told[0]}, {name: together(told[0][name], told[1][name]) for name in told[0]}
    )
    assert float(found[0]["untold"]) == (-torch.inf if merge == "max" else 0) and found[0]["empty"].shape == (0, 3)


def messages(*transforms):
    def body():
        step = fds.compose(*transforms, fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1), fds.sgd(0.1))(layers())
        state = step.init(step.loss.init)
        state, _ = step(state, BATCH)
        with collectives.counted() as traffic:
            step(state, BATCH)
        return sum(count.calls for count in traffic.counts.values())

    return fds.simulate(body, world_size=2)[0]


def test_notes_ride_with_what_ranks_agree_on_and_late_ones_take_one_more_message():
    class Noting:
        takes_slices = notes = True

        def __call__(self, grads, call):
            return grads

    alone = messages()
    assert messages(filled(TOTAL, view=noting("total"))) == messages(filled(KEPT)) == alone
    assert messages(filled(LARGEST, view=noting())) == alone
    assert messages(filled(TOTAL, view=noting("total"), condition=Noting())) == alone + 1
