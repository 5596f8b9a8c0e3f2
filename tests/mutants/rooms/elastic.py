"""Mutants of elastic batches: which is chosen, for how many ranks, and whether a scheduler was told the same."""

from tests.mutants.mutant import Mutant

SEARCH = "fds/config/elasticity.py"
BATCHES = "tests/elastic/test_batches.py"
OF_A_JSON = "tests/config/test_elasticity.py"

MUTANTS = (
    Mutant(
        "elastic-bound-rounded-down",
        SEARCH,
        "-(-config.min_gpus // node)",
        "config.min_gpus // node",
        "fewer ranks than `min_gpus` share the batch",
        BATCHES,
    ),
    Mutant(
        "elastic-least-of-several",
        SEARCH,
        "sign = 1 if config.prefer_larger_batch else -1",
        "sign = 1",
        "`prefer_larger_batch` has no effect",
        BATCHES,
    ),
    Mutant(
        "elastic-microbatch-of-all-ranks",
        SEARCH,
        "if rows // data % n == 0)",
        "if rows // ranks % n == 0)",
        "with model parallelism the microbatch is one of the rows of all ranks",
        BATCHES,
    ),
    Mutant(
        "elastic-without-the-common-multiple",
        SEARCH,
        "for base in (*sizes, math.lcm(*sizes)):",
        "for base in sizes:",
        "batches of the least common multiple are not looked at",
        BATCHES,
    ),
    Mutant(
        "elastic-multiples-that-do-not-fit",
        SEARCH,
        "for n in config.micro_batch_sizes if n * data <= config.max_train_batch_size]",
        "for n in config.micro_batch_sizes]",
        "a batch may have no rows",
        BATCHES,
    ),
    Mutant(
        "elastic-alone-in-0.1",
        SEARCH,
        "if config.version == 0.1 or not multiples:",
        "if not multiples:",
        "version 0.1 has a batch for every number of ranks",
        BATCHES,
    ),
    Mutant(
        "elastic-scheduler-without-bounds",
        SEARCH,
        'SCHEDULERS = ("FDS_ELASTICITY_CONFIG", "DEEPSPEED_ELASTICITY_CONFIG")',
        'SCHEDULERS = ("FDS_ELASTICITY_CONFIG",)',
        "what a scheduler of DeepSpeed was told is not compared",
        BATCHES,
    ),
    Mutant(
        "elastic-auto-is-kept",
        "fds/elastic/_batches.py",
        'reading.fill({"elasticity": data["elasticity"]}, {})',
        '{"elasticity": data["elasticity"]}',
        'an "auto" reaches the search',
        BATCHES,
    ),
    Mutant(
        "elastic-resolved-once",
        "fds/config/keys/__init__.py",
        "elasticity=self.elasticity.with_keys(ignore_non_elastic_batch_info=True)",
        "elasticity=self.elasticity",
        "a resolved configuration cannot be resolved again",
        OF_A_JSON,
    ),
    Mutant(
        "elastic-without-a-warning",
        "fds/config/initialize.py",
        "    _warn_of_other_rows(config)\n",
        "",
        "ranks train with a batch of their own, and nobody says so",
        OF_A_JSON,
    ),
)
