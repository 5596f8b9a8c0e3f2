"""Record which experiments DeepSpeed's autotuner runs, in which order, around measurements that are made up.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/autotuning_search.py

autotuning_search.json: `cases`, each with its JSON (`config`), `ranks`, `memory` of a rank, `model`, the number of
`trials`, the `last` of them, and the `digest` of all their names and configurations. DeepSpeed's own `Autotuner`
searches, around a manager of resources that answers at once and whose answers are those of the experiment that was
asked for (its own reads an older file for some, and forgets what has run before). Combinations stay in their order,
which DeepSpeed leaves to the hashes of strings.
"""

import copy
import hashlib
import json
import random
import sys
import tempfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_CASES = 120
MEBI = 2**20


def measured(config: dict[str, Any], case: dict[str, Any]) -> float | None:
    """Return made up samples a second of a configuration, None where it needs more than the memory."""
    zero, rows, model = config["zero_optimization"], config["train_micro_batch_size_per_gpu"], case["model"]
    shared = [1 if zero["stage"] <= i else case["ranks"] for i in range(3)]
    half = config.get("fp16", {}).get("enabled", False)
    sizes = (16, 2, 2) if half else (8, 4, 4)
    state = model["num_params"] * sum(size / n for size, n in zip(sizes, shared, strict=True))
    if state + case["needs"] * model["activation_bytes"] * rows > case["memory"]:
        return None
    speed = 1000 * rows / (rows + case["half"]) * (1 - 0.02 * zero["stage"])
    speed *= 1 + (zero.get("reduce_bucket_size", 5e8) % 7e7) / 1e9 + 0.03 * bool(zero.get("overlap_comm"))
    speed *= 1 + (zero.get("allgather_bucket_size", 5e8) % 3e8) / 1e10 + 0.01 * bool(zero.get("contiguous_gradients"))
    return speed / (1 + 0.001 * (config["gradient_accumulation_steps"] % 5))


def digest(trials: list[tuple[str, dict[str, Any]]]) -> str:
    """Return a digest of names and configurations, in their order; sizes count in whole elements."""
    rows = []
    for name, config in trials:
        config = {key: value for key, value in config.items() if key != "autotuning"}
        whole = lambda value: int(value) if isinstance(value, float) else value
        config["zero_optimization"] = {key: whole(value) for key, value in config["zero_optimization"].items()}
        rows.append([name, config])
    text = json.dumps(rows, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a case without its answer."""
    section: dict[str, Any] = {"enabled": True, "fast": rng.random() < 0.3}
    if rng.random() < 0.5:
        section["tuner_type"] = rng.choice(["gridsearch", "random"])
    if rng.random() < 0.5:
        section["tuner_early_stopping"] = rng.randint(1, 12)
    if rng.random() < 0.5:
        section["tuner_num_trials"] = rng.randint(1, 30)
    if rng.random() < 0.4:
        section["max_train_batch_size"] = rng.choice([64, 256, 1024])
    if rng.random() < 0.4:
        section["max_train_micro_batch_size_per_gpu"] = rng.randint(2, 64)
    if rng.random() < 0.3:
        section["num_tuning_micro_batch_sizes"] = rng.randint(1, 6)
    if rng.random() < 0.3:
        section["min_train_micro_batch_size_per_gpu"] = 1
    config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98]}}}
    config["autotuning"] = section
    if rng.random() < 0.5:
        config["fp16"] = {"enabled": True}
    if rng.random() < 0.3:
        config["gradient_accumulation_steps"] = rng.choice([1, 2, 4, "auto"])
    if rng.random() < 0.5:
        config["train_micro_batch_size_per_gpu"] = rng.choice([1, 2, 8, [2, 4, 16], [8, 3], "auto"])
    if rng.random() < 0.3:
        config["gradient_clipping"] = rng.choice([0.5, [0.5, 1.0]])
    if rng.random() < 0.9:
        config["zero_optimization"] = {"stage": rng.choice([0, 1, 2, 3, [1, 2], [3, 0], "all", "all", "all"])}
    model = {"num_params": rng.randint(1, 40) * MEBI, "activation_bytes": rng.randint(1, 40) * MEBI}
    if rng.random() < 0.5:
        model["hidden_size"] = rng.choice([128, 768])
    memory = rng.randint(300, 2000) * MEBI
    made_up = {"needs": rng.choice([0.7, 1.0, 1.0, 1.5]), "half": rng.randint(1, 20)}
    return {"config": config, "ranks": rng.choice([1, 2, 4, 8]), "memory": memory, "model": model, **made_up}


class Answers:
    """A manager of resources that answers at once."""

    def __init__(self, case: dict[str, Any], directory: str):
        self.case, self.exps_dir = case, directory
        self.nodes, self.num_gpus_per_node = [None], case["ranks"]
        self.values: dict[str, float | None] = {}
        self.trials: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[dict[str, Any]] = []
        self.metrics = Path(directory) / "metrics.json"
        self.finished_experiments = self

    def schedule_experiments(self, paths: list[str]) -> None:
        self.asked += [json.loads(Path(path).read_text()) for path in paths]

    def run(self) -> None:
        for experiment in self.asked:
            name, config = experiment["name"], experiment["ds_config"]
            config["autotuning"]["metric_path"] = str(self.metrics)
            if name not in self.values:
                self.values[name] = measured(config, self.case)
                self.trials.append((name, config))

    def items(self) -> Any:
        """Yield the finished experiments; the file has the metrics of the one that was yielded last."""
        for i, experiment in enumerate(self.asked):
            self.write(experiment)
            yield i, (experiment, None)

    def write(self, experiment: dict[str, Any]) -> float | None:
        value = self.values[experiment["name"]]
        self.metrics.unlink(missing_ok=True)
        if value is not None:
            self.metrics.write_text(json.dumps({"throughput": value}))
        return value

    def parse_results(self, _: str) -> tuple[dict[str, Any], float | None]:
        return self.asked[-1], self.write(self.asked[-1])

    def clear(self) -> None:
        self.asked.clear()


def answered(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with what the autotuner ran."""
    from deepspeed.autotuning import autotuner  # pyright: ignore[reportMissingImports]
    from deepspeed.autotuning.config import DeepSpeedAutotuningConfig  # pyright: ignore[reportMissingImports]

    for stage in range(4):
        name = f"DEFAULT_TUNING_SPACE_ZERO_{stage}"
        setattr(autotuner, name, copy.deepcopy(getattr(autotuner.sys_constants, name)))
    tuner = object.__new__(autotuner.Autotuner)
    tuner.user_config = copy.deepcopy(case["config"])
    tuner.autotuning_config = DeepSpeedAutotuningConfig(tuner.user_config)
    tuner.args, tuner.records = Namespace(user_args=[], hostfile=""), {}
    tuner.exp_num_gpus, tuner.exp_num_nodes = case["ranks"], 1
    model = {**case["model"], "activation_mem_per_gpu": case["model"]["activation_bytes"]}
    tuner.model_info_profile_run = lambda: model
    tuner.get_gpu_memory_info = lambda: case["memory"]
    random.seed(0)
    with tempfile.TemporaryDirectory() as directory:
        tuner.exps_dir = tuner.results_dir = directory
        tuner.rm = Answers(case, directory)
        error = ""
        try:
            tuner.tune()
        except Exception as e:
            error = type(e).__name__
    trials = tuner.rm.trials
    out = {**case, "trials": len(trials), "last": trials[-1][0] if trials else "", "digest": digest(trials)}
    return out | ({"error": error} if error else {})


def main() -> None:
    """Write the file."""
    import logging

    from deepspeed.autotuning import autotuner, constants  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import logger  # pyright: ignore[reportMissingImports]

    logger.setLevel(logging.CRITICAL)
    autotuner.sys_constants = constants
    autotuner.prune_configs = lambda configs: configs
    rng = random.Random(0)
    lines = ",\n".join(json.dumps(answered(drawn(rng))) for _ in range(NUM_CASES))
    (HERE / "autotuning_search.json").write_text(
        f'{{"deepspeed": "{version("deepspeed")}",\n"cases": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    sys.exit(main())
