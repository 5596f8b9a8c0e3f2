"""Mutants of fds/trainer, as far as tests without transformers notice them."""

from tests.mutants.mutant import Mutant

ARGUMENTS = "tests/trainer/test_arguments.py"
MUTANTS = (
    Mutant(
        "a-rate-one-update-late",
        "fds/trainer/_arguments.py",
        "[args.learning_rate * factors[0](t) for t in range(updates + 1)]",
        "[args.learning_rate * factors[0](max(t - 1, 0)) for t in range(updates + 1)]",
        "every update of a Trainer has the rate of the one before it",
        ARGUMENTS,
    ),
    Mutant(
        "rates-beyond-the-last",
        "fds/trainer/_arguments.py",
        ".clamp(0, len(self.table) - 1)",
        ".clamp(min=0)",
        "a Trainer's rates end with an error of an index after the last update",
        ARGUMENTS,
    ),
    Mutant(
        "norms-decay",
        "fds/trainer/_arguments.py",
        'by_name({decays: make(args.weight_decay), "*": make(0.0)})',
        'by_name({decays: make(args.weight_decay), "*": make(args.weight_decay)})',
        "norms and biases decay under a Trainer",
        ARGUMENTS,
    ),
    Mutant(
        "adam-with-its-own-betas",
        "fds/trainer/_arguments.py",
        '"betas": (args.adam_beta1, args.adam_beta2)',
        '"betas": (0.9, args.adam_beta2)',
        "adam_beta1 of the arguments is not heard",
        ARGUMENTS,
    ),
    Mutant(
        "said-twice",
        "fds/trainer/_arguments.py",
        "if value != defaults[name] and value not in _ABSENT:",
        "if False:",
        "a learning rate of the arguments is ignored beside a composition's",
        ARGUMENTS,
    ),
    Mutant(
        "fsdp-unheard",
        "fds/trainer/_arguments.py",
        "        if value not in _ABSENT and value not in ([], {}):\n",
        "        if False:\n",
        "arguments that a step does not follow are ignored without a word",
        ARGUMENTS,
    ),
)
