"""Mutants of `fds.compile(whole=True)`: what is recorded, read, drawn before the graph, and whose memory is written."""

from tests.mutants.mutant import Mutant

LAW = "tests/transforms/test_compile_whole.py"

MUTANTS = (
    Mutant(
        "numbers-stay-in-the-graph",
        "fds/reading.py",
        "    return now.recording is None or any(x is tensor for tensor in now.recording.host)",
        "    return True",
        "a learning rate is read when the step is recorded, instead of in the graph",
        LAW,
    ),
    Mutant(
        "graphs-draw-once",
        "fds/step/recorded/generators.py",
        "random.reseed(seed_of(event), self.devices)",
        "random.reseed(1, self.devices)",
        "dropout has the same masks in every call",
        LAW,
    ),
    Mutant(
        "scopes-are-not-left",
        "fds/step/recorded/generators.py",
        "                        g.set_state(state)\n                else:",
        "                        pass\n                else:",
        "what is drawn after a scope follows from what was drawn inside",
        LAW,
    ),
    Mutant(
        "reads-without-an-operator-are-recorded",
        "fds/step/recorded/one_graph.py",
        "        if func in _READERS and not any(args[0] is x for x in self.host):",
        "        if False:",
        "x.tolist() stays in the graph as it was in the second call, without a word",
        LAW,
    ),
    Mutant(
        "draws-are-read",
        "fds/step/recorded/one_graph.py",
        "        if reads and not all(_is_constant(x) or _is_among(x, self.host) for x in tensors):",
        "        if False:",
        "a random number that the host reads is the same in every call, without a word",
        LAW,
    ),
    Mutant(
        "shapes-by-values-are-recorded",
        "fds/step/recorded/one_graph.py",
        "        if torch.Tag.dynamic_output_shape in func.tags and _depends_on_values(func, tensors):",
        "        if False:",
        "x[mask] has as many elements in every call as in the second",
        LAW,
    ),
    Mutant(
        "constants-are-those-of-the-recording",
        "fds/step/recorded/one_graph.py",
        "*self.drawing.again(state.key, state.calls), *self.constants]",
        "*self.drawing.again(state.key, state.calls), *map(torch.zeros_like, self.constants)]",
        "a tensor that the loss closes over is not read in every call",
        LAW,
    ),
    Mutant(
        "what-moved-is-not-returned",
        "fds/step/recorded/one_graph.py",
        "        leaves[i] = x",
        "        pass",
        "the loss scale is the first one in every call",
        LAW,
    ),
    Mutant(
        "graphs-forget-who-was-given-up",
        "fds/step/recorded/one_graph.py",
        "    new.give_up(state)",
        "    pass",
        "a state that was written over can be used again",
        LAW,
    ),
)
