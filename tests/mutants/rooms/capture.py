"""Mutants of CUDA graphs of a step: memory that stays, seeds of replays, whose state is written over."""

from tests.mutants.mutant import Mutant

LAW = "tests/laws/test_law_17_captures.py tests/transforms/test_cuda_graph.py"

MUTANTS = (
    Mutant(
        "replays-draw-what-was-captured",
        "fds/step/recorded/generators.py",
        "            state.manual_seed(seed_of(fold))",
        "            pass",
        "dropout has the same masks in every replay",
        LAW,
    ),
    Mutant(
        "replays-seed-by-one-scope",
        "fds/step/recorded/generators.py",
        "        self.default.graphsafe_set_state(self.states[i])",
        "        self.default.graphsafe_set_state(self.states[0])",
        "all layers draw from the state of the first one",
        LAW,
    ),
    Mutant(
        "unseeded-draws-stay",
        "fds/step/recorded/generators.py",
        "            self.outside.manual_seed(self.default.initial_seed())",
        "            self.outside.manual_seed(0)",
        "what is drawn outside of all scopes is not what the step draws that is not captured",
        LAW,
    ),
    Mutant(
        "draws-on-the-host-are-kept",
        "fds/step/recorded/generators.py",
        "        if moved:",
        "        if False:",
        "a seed that is drawn on the CPU is the same in every replay, without a word",
        LAW,
    ),
    Mutant(
        "replays-count-no-step",
        "fds/step/recorded/state_memory.py",
        "new, places = [*leaves_of(after, self.structure), after.step], [*self.leaves, self.step]",
        "new, places = leaves_of(after, self.structure), self.leaves",
        "`step` is the same in every replay, and with it learning rates and bias corrections",
        LAW,
    ),
    Mutant(
        "what-is-held-is-written-over",
        "fds/step/recorded/state_memory.py",
        "            if not all(map(operator.is_, writable_leaves, self.leaves)):",
        "            if False:",
        "a tensor of the state that somebody keeps changes in the next call",
        LAW,
    ),
    Mutant(
        "states-share-one-memory",
        "fds/step/recorded/state_memory.py",
        "return list(map(sys.getrefcount, self.leaves)).count(_ALONE) == len(self.leaves)",
        "return True",
        "a state is copied over one that is still in use",
        LAW,
    ),
    Mutant(
        "a-state-from-elsewhere-is-not-read",
        "fds/step/recorded/state_memory.py",
        "        foreach.copy_([*self.leaves, self.step], [*leaves, state.step])",
        "        pass",
        "a state that was loaded is not what the next call goes on from",
        LAW,
    ),
    Mutant(
        "the-first-batch-for-ever",
        "fds/step/recorded/cuda_graphs.py",
        "        self.batch.copy(kind)",
        "        pass",
        "every call trains on the memory of the first batch, as it came",
        LAW,
    ),
    Mutant(
        "metrics-are-written-over",
        "fds/step/recorded/state_memory.py",
        "self._cut(self.buffer.clone())",
        "self._cut(self.buffer)",
        "metrics that somebody keeps become those of later calls",
        LAW,
    ),
    Mutant(
        "saves-read-what-is-written-over",
        "fds/step/recorded/cuda_graphs.py",
        "return not state.token.readers",
        "return True",
        "a save that runs beside the next calls reads their state in the place of its own",
        LAW,
    ),
    Mutant(
        "a-scope-draws-on-in-replays",
        "fds/step/recorded/generators.py",
        "            if offset is not None and self.default.get_offset() != offset:",
        "            if False:",
        "what follows a scope of the user's own draws other numbers in a replay than in the calls before",
        "tests/transforms/test_cuda_graph.py -k would_not_follow",
    ),
)
