"""Law 9 as a state machine: random programs of steps, saves, kills, loads and changes of topology, beside a model.

The model keeps for every tag what the ranks gathered when it was saved, without fds.storage: the leaves of the plain
state, and a copy of every rank's own state. A program that is killed loses all but its files.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import fds
from fds import tree
from fds.errors import StorageError
from fds.storage.disk.folders import tags
from fds.storage.opening import open_source
from fds.storage.source import blank_like
from tests.bits import assert_same_bits
from tests.laws.places import PLACES, Place
from tests.laws.problems import OPTIMIZERS, TRANSFORMS, compositions, problems, stacks
from tests.storage.campaign.requests import Killed, close_locks, fail_at, in_hand, kill_at
from tests.storage.states import json_values
from tests.storage.topologies import plain

REQUESTS = 80  # of a save on a few ranks
RECOMPUTE = ("accumulate", "checkpoint", "checkpoint_pairs")  # a place says how much; not over layers in place
TAGS = st.sampled_from([None, "best", "a", "b"])
KEEP = st.sampled_from([None, None, 1, 2])
EXTRA = st.dictionaries(st.text(max_size=3), json_values, max_size=2)


@attrs.frozen(repr=False)
class Kept:
    """What was saved: the leaves of the plain state, every rank's state, where that was, and the extra."""

    leaves: dict[str, torch.Tensor]
    states: list[fds.State]
    place: Place
    extra: dict[str, Any]


class Programs(RuleBasedStateMachine):
    """Programs that train, save, die and go on elsewhere."""

    def __init__(self):
        super().__init__()
        self.dir = Path(tempfile.mkdtemp(prefix="law9"))
        self.kept: dict[str, Kept] = {}  # by tag, the last saved at the end
        self.latest: str | None = None
        self.clean = True  # whether no save was killed since the last one that was not

    @initialize(
        problem=problems() | stacks(torch.float32),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        names=compositions(without=RECOMPUTE),
        donates=st.booleans(),
        place=PLACES,
    )
    def begin(self, problem, optimizer, names, donates, place):
        self.problem, self.optimizer, self.names, self.donates = problem, optimizer, names, donates
        self.start(place)

    @rule(calls=st.integers(1, 2))
    def train(self, calls):
        def body(step, rank):
            state = self.states[rank]
            for _ in range(calls):
                state, _ = step(state, self.place.batch(self.problem, step))
            return state

        self.states = self.on_ranks(body)

    @rule(tag=TAGS, keep=KEEP, extra=EXTRA)
    def save(self, tag, keep, extra):
        kept = self.gathered(extra)
        folders = self.on_ranks(lambda step, rank: self.saved(fds.save, self.states, step, rank, tag, keep, extra))
        self.published(self.named(tag, kept), kept, keep)
        assert set(folders) == {self.dir / str(self.latest)}

    @rule(
        tag=TAGS,
        keep=KEEP,
        extra=EXTRA,
        meanwhile=st.lists(st.sampled_from(["train", "evaluate", "done"]), max_size=3),
        end=st.sampled_from(["wait", "context", "next save", "nobody waits"]),
    )
    def save_async(self, tag, keep, extra, meanwhile, end):
        kept = self.gathered(extra)

        def body(step, rank):
            state, batch = self.states[rank], self.place.batch(self.problem, step)
            saving = self.saved(fds.save_async, self.states, step, rank, tag, keep, extra)
            for what in meanwhile:
                if what == "train":
                    state, _ = step(state, batch)
                elif what == "evaluate":
                    step.evaluate(state, batch)
                else:
                    saving.done()
            if end == "wait":
                assert saving.wait() == self.dir / self.named(tag, kept)
                assert saving.done()
            elif end == "context":
                with saving:
                    pass
            elif end == "next save":
                fds.save(self.dir, state, step, "next", {"rank": rank})
            return state, saving

        states, savings = zip(*self.on_ranks(body), strict=True)
        join_saves()
        assert [saving.error for saving in savings] == [None] * len(savings), savings
        self.states = list(states)
        self.published(self.named(tag, kept), kept, keep)
        if end == "next save":
            self.published("next", self.gathered({}), None)

    @rule(
        n=st.integers(0, REQUESTS),
        save=st.sampled_from([fds.save, fds.save_async]),
        tag=TAGS,
        keep=KEEP,
        extra=EXTRA,
        place=PLACES,
    )
    def killed_while_saving(self, n, save, tag, keep, extra, place):
        kept = self.gathered(extra)
        outcomes, _ = self.interrupted(kill_at(n), save, tag, keep, extra)
        close_locks()
        self.settle(self.named(tag, kept), kept, keep, all(outcome is None for outcome in outcomes))
        self.clean = False
        self.load(place, 0 if self.latest is None else None, True) if self.kept else self.start(place)

    @rule(
        n=st.integers(0, REQUESTS),
        code=st.sampled_from([errno.ENOSPC, errno.EIO]),
        tag=TAGS,
        keep=KEEP,
        extra=EXTRA,
        save=st.sampled_from([fds.save, fds.save_async]),
    )
    def refused_by_the_file_system(self, n, code, save, tag, keep, extra):
        kept, before = self.gathered(extra), dict(self.kept)
        outcomes, made = self.interrupted(fail_at(n, code), save, tag, keep, extra)
        assert all(outcome is None or isinstance(outcome, StorageError) for outcome in outcomes), outcomes
        assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
        named = outcomes[0] is None or os.strerror(code) in str(outcomes[0]) or made[n] == "flock"
        assert named, f"at {made[n]}: {outcomes[0]}"
        self.settle(self.named(tag, kept), kept, keep, outcomes[0] is None)
        # Clearing up may be what failed, and a rank may still write in the background when another clears up.
        writing = outcomes[0] is not None and save is fds.save_async and len(outcomes) > 1
        self.clean = not writing and made[n : n + 1] not in (["open"], ["rmdir"], ["unlink"])
        if outcomes[0] is not None and "replace" not in made[:n]:  # else it has its name already
            assert list(self.kept) == list(before), "a save that was refused changed something"

    @rule(place=PLACES, which=st.none() | st.integers(0, 9), on_meta=st.booleans())
    def load(self, place, which, on_meta):
        """Load, the last save or any, on other ranks or the same."""
        place = place.fit(self.problem)
        if not self.kept or (which is None and self.latest is None):  # the first save was killed before it was the last
            with pytest.raises(StorageError, match="not known which save is the last" if self.kept else "no save here"):
                self.on_ranks(lambda step, rank: fds.load(self.dir, step, self.problem.params), place)
            return
        tag = None if which is None else list(self.kept)[which % len(self.kept)]
        kept = self.kept[self.latest if tag is None else tag]
        same = place == kept.place
        params = self.problem.params
        given = tree.map(lambda x: x.to("meta"), params) if on_meta else params

        def body(step, rank):
            state, extra = fds.load(self.dir, step, given, tag=tag)
            assert extra == {**kept.extra, "rank": 0}
            assert tree.structure(state) == tree.structure(step.init(params))
            return state, plain(state, step)

        def goes_on(states):
            states = [tree.map(torch.clone, state) for state in states]
            batch = lambda step: place.batch(self.problem, step)
            return self.on_ranks(lambda step, rank: step(states[rank], batch(step)), place)

        states, leaves = zip(*self.on_ranks(body, place), strict=True)
        assert_same_bits(joined(leaves), kept.leaves)
        if same:
            assert_same_bits(list(states), kept.states)  # padding included
            assert_same_bits(goes_on(states), goes_on(kept.states))
        self.place, self.states = place, list(states)

    @rule(which=st.integers(0, 9), on_meta=st.booleans())
    def load_where_it_was_saved(self, which, on_meta):
        if self.kept:
            index = which % len(self.kept)
            self.load(list(self.kept.values())[index].place, index, on_meta)

    @invariant()
    def tags_are_those_of_the_model(self):
        found = tags(self.dir)
        assert found == sorted(self.kept), f"{found} are there, and {sorted(self.kept)} were saved"
        if self.latest is not None:
            assert (self.dir / "latest").read_text() == f"{self.latest}\n"
        if self.clean:
            there = {*os.listdir(self.dir)} - {*self.kept}
            assert there <= {".lock", "latest"}, f"{there} is left"

    def teardown(self):
        shutil.rmtree(self.dir)

    def start(self, place: Place) -> None:
        self.place = place.fit(self.problem)
        self.states = self.on_ranks(lambda step, rank: step.init(self.problem.params, key=3))

    def on_ranks(self, body: Callable[[fds.Step, int], Any], place: Place | None = None) -> list[Any]:
        """Return what `body(step, rank)` returns on every rank of a place, the current one unless given."""
        at = place or self.place

        def rank() -> Any:
            made = [TRANSFORMS[name].make() for name in self.names] + [fds.donate()] * self.donates
            step = fds.compose(*made, *at.transforms(), OPTIMIZERS[self.optimizer]())(self.problem.loss)
            return body(step, fds.mesh(dp=-1).rank)

        return (at.piped or at.sharded).run(rank)

    def saved(self, save: Callable, states: list, step: fds.Step, rank: int, tag, keep, extra) -> Any:
        return save(self.dir, states[rank], step, tag, {**extra, "rank": rank}, keep=keep)

    def gathered(self, extra: dict) -> Kept:
        """Return what a save of the current states must give back."""
        leaves = joined(self.on_ranks(lambda step, rank: plain(self.states[rank], step)))
        return Kept(leaves, [tree.map(torch.clone, state) for state in self.states], self.place, extra)

    def named(self, tag: str | None, kept: Kept) -> str:
        return f"step{int(kept.leaves['calls']):08d}" if tag is None else tag

    def published(self, tag: str, kept: Kept, keep: int | None) -> None:
        """Tell the model of a save that is complete."""
        self.kept.pop(tag, None)
        self.kept[tag] = kept
        self.latest, self.clean = tag, True
        unnamed = [name for name in self.kept if re.fullmatch(r"step\d{8,}", name)]
        for old in unnamed[: -keep if keep else 0]:
            del self.kept[old]

    def interrupted(self, act, save: Callable, tag, keep, extra) -> tuple[list[BaseException | None], list[str]]:
        """Save with its requests in other hands; return what every rank raised, and the requests."""

        def body(step, rank):
            try:
                saving = self.saved(save, self.states, step, rank, tag, keep, extra)
                if save is fds.save_async:
                    saving.wait()
            except (Killed, StorageError) as error:
                return error
            return None

        with in_hand(act) as made, mock.patch.object(threading, "excepthook"):
            outcomes = self.on_ranks(body)
            join_saves()
        return outcomes, made

    def settle(self, tag: str, kept: Kept, keep: int | None, returned: bool) -> None:
        """Find out what an interrupted save has left, as far as that is open, and hold the rest."""
        found = tags(self.dir)
        latest = (self.dir / "latest").read_text().removesuffix("\n") if (self.dir / "latest").exists() else None
        before, old = dict(self.kept), self.kept.get(tag)
        new, same = (tag in found and one is not None and holds(self.dir, tag, one) for one in (kept, old))
        is_new = new and (latest == tag or not same)
        assert is_new or not returned, "a save that returned is not there"
        if is_new and latest != tag:
            assert found == sorted({*before, tag}) and latest == self.latest
            self.kept.pop(tag, None)
            self.kept[tag] = kept  # complete, and not yet the last
        elif is_new:
            self.published(tag, kept, keep)
            spared = {**before, tag: kept}
            assert {*self.kept} <= {*found} <= {*spared}, (found, list(self.kept), list(before))
            ages = [*(t for t in before if t != tag), tag]
            self.kept = {t: spared[t] for t in ages if t in found}
        else:
            assert (found, latest) == (sorted(before), self.latest)
        for name in found:
            assert holds(self.dir, name, self.kept[name]), f"{name} is not what was saved"


def holds(dir: Path, tag: str, kept: Kept) -> bool:
    """Return whether a save has exactly these leaves and this extra."""
    source = open_source(dir, tag)
    leaves = {}
    for name, leaf in source.leaves.items():
        flat = blank_like(leaf, torch.Size(leaf.shape).numel())
        source.read(name, 0, flat)
        leaves[name] = flat.view(leaf.shape)
    try:
        assert_same_bits(leaves, kept.leaves)
    except AssertionError:
        return False
    return source.extra == {**kept.extra, "rank": 0}


def joined(found: Any) -> dict[str, torch.Tensor]:
    """Return the plain state's leaves, given those of every rank; what several have they have alike."""
    whole: dict[str, torch.Tensor] = {}
    for leaves in found:
        both = whole.keys() & leaves.keys()
        assert_same_bits({n: leaves[n] for n in both}, {n: whole[n] for n in both})
        whole |= leaves
    return whole


def join_saves() -> None:
    """Wait for what still writes in the background, though nobody has its handle any more."""
    for thread in threading.enumerate():
        if thread.name == "fds-save":
            thread.join()
