"""Mutants of elastic batches and runs: which batch is chosen, and what a run goes on from when ranks were lost."""

from tests.mutants.mutant import Mutant

SEARCH = "fds/config/elasticity.py"
BATCHES = "tests/elastic/test_batches.py"
OF_A_JSON = "tests/config/test_elasticity.py"
RUN = "fds/elastic/_run.py"
START = "fds/elastic/_start.py"
SHELF = "fds/storage/shelf.py"
RUNS = "tests/elastic/test_run.py"

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
    Mutant(
        "elastic-older-state-let-go-early",
        RUN,
        "self.held.insert(0, Made(new, now(), metrics))",
        "self.held[:] = [Made(new, now(), metrics)]",
        "a rank that has ended a call that others have not has no state in common with them",
        RUNS,
    ),
    Mutant(
        "elastic-donated-state-left",
        RUN,
        "if made.state.token.spent_at is None:",
        "if made.state is not None:",
        "a state that a donating step has written over is left as if it were whole",
        RUNS,
    ),
    Mutant(
        "elastic-handler-stays",
        START,
        "            signal.signal(signal.SIGTERM, self._before)\n",
        "            pass\n",
        "the handler of SIGTERM outlives the run that set it",
        RUNS,
    ),
    Mutant(
        "elastic-others-pieces-cleared",
        RUN,
        "start.shelf.clear(but=start.id)  # of what",
        "start.shelf.clear()  # of what",
        "a rank that passes a boundary removes what another has left since",
        RUNS,
    ),
    Mutant(
        "elastic-all-ranks-train",
        START,
        "max((n for n in numbers if n <= everyone.size), default=0)",
        "max((everyone.size for n in numbers if n <= everyone.size), default=0)",
        "ranks that cannot share the batch train",
        RUNS,
    ),
    Mutant(
        "elastic-call-between-starts-unwatched",
        RUN,
        "if watch is not None and metrics:",
        "if watch is not None and metrics and made > first:",
        "nobody sees the call that a start goes on from, though the rank that saw it may be lost",
        RUNS,
    ),
    Mutant(
        "elastic-part-of-a-state",
        SHELF,
        "if manifests and all(_covers(leaf)",
        "if manifests and any(_covers(leaf)",
        "what lies on the shelves is taken for a state, though the only holder of a slice was lost",
        RUNS,
    ),
    Mutant(
        "elastic-older-than-the-save",
        SHELF,
        "if entry[1] > after]",
        "if entry[1] > 0]",
        "what lies on a shelf is taken though the last save is newer",
        RUNS,
    ),
    Mutant(
        "elastic-pieces-stay-away",
        SHELF,
        "self._carry(id, sorted(bring[id].items()))",
        "self._carry(id, [])",
        "pieces of other nodes are read as if they had come",
        RUNS,
    ),
)
