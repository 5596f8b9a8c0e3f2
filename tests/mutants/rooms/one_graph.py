"""Mutants of `fds.compile(whole=True)`: what is recorded, read, drawn before the graph, and whose memory is written."""

from tests.mutants.mutant import Mutant

LAW = "tests/transforms/test_compile_whole.py"

MUTANTS = (
    Mutant(
        "numbers-stay-in-the-graph",
        "fds/reading.py",
        "    return now.recording is None or any(x is one for one in now.recording.host)",
        "    return True",
        "a learning rate is read when the step is recorded, instead of in the graph",
        LAW,
    ),
    Mutant(
        "graphs-draw-once",
        "fds/step/compiled/draws.py",
        "random.reseed(fold.seed(base, number, known), self.devices)",
        "random.reseed(1, self.devices)",
        "dropout has the same masks in every call",
        LAW,
    ),
    Mutant(
        "scopes-are-not-left",
        "fds/step/compiled/draws.py",
        "                            g.set_state(state)",
        "                            pass",
        "what is drawn after a scope follows from what was drawn inside",
        LAW,
    ),
    Mutant(
        "reads-without-an-operator-are-recorded",
        "fds/step/compiled/recording.py",
        "        if func in _READERS and not any(args[0] is x for x in self.host):",
        "        if False:",
        "x.tolist() stays in the graph as it was in the second call, without a word",
        LAW,
    ),
    Mutant(
        "draws-are-read",
        "fds/step/compiled/recording.py",
        "        if reads and not all(_is_constant(x) or any(x is one for one in self.host) for x in given):",
        "        if False:",
        "a random number that the host reads is the same in every call, without a word",
        LAW,
    ),
    Mutant(
        "shapes-by-values-are-recorded",
        "fds/step/compiled/recording.py",
        "        if torch.Tag.dynamic_output_shape in func.tags and _depends_on_values(func, given):",
        "        if False:",
        "x[mask] has as many elements in every call as in the second",
        LAW,
    ),
    Mutant(
        "constants-are-those-of-the-recording",
        "fds/step/compiled/running.py",
        "rest = [*(x.detach() for x in kind.tensors), *draws, *work.recorded.constants]",
        "rest = [*(x.detach() for x in kind.tensors), *draws, *map(torch.clone, work.recorded.constants)]"
        " if work.function is None else [*(x.detach() for x in kind.tensors), *draws, *map(torch.zeros_like,"
        " work.recorded.constants)]",
        "a tensor that the loss closes over is not read in every call",
        LAW,
    ),
    Mutant(
        "what-moved-is-not-returned",
        "fds/step/compiled/running.py",
        "        leaves[i] = x",
        "        pass",
        "the loss scale is the first one in every call",
        LAW,
    ),
    Mutant(
        "graphs-forget-who-was-given-up",
        "fds/step/compiled/running.py",
        "    new.give_up(state)",
        "    pass",
        "a state that was written over can be used again",
        LAW,
    ),
)
