"""Mutants of adapters: their scale, who trains, what layers make, how they lie on ranks, and what peft's files say."""

from tests.mutants.mutant import Mutant

LAW, FILES, CODES = "tests/adapters/test_lora.py", "tests/adapters/test_files.py", "tests/compression/test_nf4.py"
RANK, LAYER = "fds/transforms/lora/low_rank.py", "fds/transforms/lora/in_layers.py"

MUTANTS = (
    Mutant(
        "a-scale-that-is-never-stabilized",
        RANK,
        "(math.sqrt(self.rank) if self.stabilized else self.rank)",
        "self.rank",
        "a rank-stabilised adapter is scaled by alpha / rank",
        LAW,
    ),
    Mutant(
        "lengths-with-a-gradient",
        RANK,
        "length(y.detach(), dim)",
        "length(y, dim)",
        "the length of a row of DoRA is no constant in backward",
        LAW,
    ),
    Mutant(
        "factors-of-a-row-layer-whole",
        RANK,
        "if (i == 0) != by_rows else",
        "if i and by_rows else",
        "ranks of a tensor axis hold all of A, of inputs of which they have a part",
        LAW,
    ),
    Mutant(
        "layers-without-a-mixed-term",
        LAYER,
        "((2 * s) * (w @ a.T.to(w.dtype)) + ",
        "(",
        "DoRA in layers scales rows by another length than they have",
        LAW,
    ),
    Mutant("dropout-in-evaluations", LAYER, "training=module.training", "training=True", "an evaluation draws", LAW),
    Mutant(
        "layers-that-draw-are-not-seeded",
        "fds/loss/layers.py",
        "drawing = layer.draws or (draws and len(params) > len(layer.params))",
        "drawing = layer.draws",
        "dropout of factors does not follow the key",
        LAW,
    ),
    Mutant(
        "views-of-frozen-weights-have-no-gradient-at-stage-3",
        "fds/step/sharding/viewed.py",
        "trained = any(x.requires_grad for x in (p, *self.others))",
        "trained = p.requires_grad",
        "factors beside frozen weights are not trained where these are gathered on use",
        LAW,
    ),
    Mutant(
        "added-again-over-what-is-there",
        "fds/step/added.py",
        "return {name: y for name, y in new.items() if name not in names}",
        "return new",
        "an adapter that is given to init is drawn anew",
        LAW,
    ),
    Mutant(
        "baked-without-factors-of-layers",
        "fds/compression/bake.py",
        "            seen = bake_parameters(seen)",
        "            pass",
        "a baked model is the base",
        LAW,
    ),
    Mutant(
        "files-with-what-is-added-to-lengths",
        "fds/adapters/files.py",
        "params[parts[2]] + rows.to(params[parts[2]])",
        "params[parts[2]]",
        "peft would take what is added to lengths for lengths",
        FILES,
    ),
    Mutant(
        "empty-tensors-are-read",
        "fds/adapters/files.py",
        "not x.numel()\n            or ",
        "",
        "an adapter whose tensors peft wrote empty is taken for one",
        FILES,
    ),
    Mutant(
        "the-second-number-in-the-high-bits",
        "fds/compression/nf4.py",
        "(codes[:, ::2] << 4) | codes[:, 1::2]",
        "(codes[:, 1::2] << 4) | codes[:, ::2]",
        "pairs of numbers in 4 bits change places",
        CODES,
    ),
    Mutant(
        "a-scale-for-half-a-block",
        "fds/compression/nf4.py",
        "    x[:, full * BLOCK :].mul_(scales[:, full:])\n",
        "",
        "numbers of a last block that is not full are codes",
        CODES,
    ),
)
