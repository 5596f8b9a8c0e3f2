"""Mutants of fds/step/captured: memory that stays, seeds of replays, whose state is written over."""

from tests.mutants.mutant import Mutant

LAW = "tests/laws/test_law_17_captures.py tests/transforms/test_cuda_graph.py"

MUTANTS = (
    Mutant(
        "replays-draw-what-was-captured",
        "fds/step/captured/seeding.py",
        "            state.manual_seed(fold.seed(base, number, known))",
        "            pass",
        "dropout has the same masks in every replay",
        LAW,
    ),
    Mutant(
        "replays-seed-by-one-scope",
        "fds/step/captured/seeding.py",
        "        self.default.graphsafe_set_state(self.states[at])",
        "        self.default.graphsafe_set_state(self.states[min(at, 1)])",
        "all layers draw from the state of the first one",
        LAW,
    ),
    Mutant(
        "unseeded-draws-stay",
        "fds/step/captured/seeding.py",
        "            self.outside.manual_seed(self.default.initial_seed())",
        "            self.outside.manual_seed(0)",
        "what is drawn outside of all scopes is not what the step draws that is not captured",
        LAW,
    ),
    Mutant(
        "draws-on-the-host-are-kept",
        "fds/step/captured/seeding.py",
        "if self.host is not None and not torch.equal(self.host, torch.default_generator.get_state()):",
        "if False:",
        "a seed that is drawn on the CPU is the same in every replay, without a word",
        LAW,
    ),
    Mutant(
        "replays-count-no-step",
        "fds/step/captured/memory.py",
        "new, places = [*leaves_of(after, self.structure), after.step], [*self.leaves, self.step]",
        "new, places = leaves_of(after, self.structure), self.leaves",
        "`step` is the same in every replay, and with it learning rates and bias corrections",
        LAW,
    ),
    Mutant(
        "what-is-held-is-written-over",
        "fds/step/captured/memory.py",
        "            if not all(map(operator.is_, found, self.leaves)):",
        "            if False:",
        "a tensor of the state that somebody keeps changes in the next call",
        LAW,
    ),
    Mutant(
        "states-share-one-memory",
        "fds/step/captured/memory.py",
        "return list(map(sys.getrefcount, self.leaves)).count(_ALONE) == len(self.leaves) and not any(",
        "return True or not any(",
        "a state is copied over one that is still in use",
        LAW,
    ),
    Mutant(
        "a-state-from-elsewhere-is-not-read",
        "fds/step/captured/memory.py",
        "        foreach.copy_([*self.leaves, self.step], [*leaves, state.step])",
        "        pass",
        "a state that was loaded is not what the next call goes on from",
        LAW,
    ),
    Mutant(
        "the-first-batch-for-ever",
        "fds/step/captured/running.py",
        "        work.batch.take(kind)",
        "        pass",
        "every call trains on the memory of the first batch, as it came",
        LAW,
    ),
    Mutant(
        "metrics-are-written-over",
        "fds/step/captured/memory.py",
        "self._cut(self.buffer.clone())",
        "self._cut(self.buffer)",
        "metrics that somebody keeps become those of later calls",
        LAW,
    ),
    Mutant(
        "saves-read-what-is-written-over",
        "fds/step/captured/running.py",
        "if recordings.at is None or state.token.readers:",
        "if recordings.at is None:",
        "a save that runs beside the next calls reads their state in the place of its own",
        LAW,
    ),
    Mutant(
        "a-scope-draws-on-in-replays",
        "fds/step/captured/running.py",
        "call.run(device.strict(), rehearsing=True)",
        "call.run(device.strict())",
        "what follows a scope of the user's own draws other numbers in a replay than in the calls before",
        "tests/transforms/test_cuda_graph.py -k would_not_follow",
    ),
)
