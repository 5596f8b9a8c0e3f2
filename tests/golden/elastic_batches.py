"""Record what elasticity 0.1 and 0.2 of DeepSpeed answer to 2,000 questions, and where that is not what was meant.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/elastic_batches.py

elastic_batches.json: `configs`, each with its `keys`, the `lists` of valid numbers of data ranks that were answered,
and `questions`: [ranks, answer], an answer being null for a refusal, [rows of the batch, which of the lists,
microbatch], or the name of a Python error that says nothing of the configuration. Where DeepSpeed is wrong, a question
has the defect's name and the answer that was meant too: DeepSpeed's own where the question goes around the defect.
"""

import json
import math
import random
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_CONFIGS, NUM_QUESTIONS = 500, 4
LARGE = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
KNOWN = [  # of DeepSpeed's documentation, and of each defect
    {"version": 0.1, **LARGE},
    {"version": 0.1, "max_train_batch_size": 64, "micro_batch_sizes": [4, 8], "max_gpus": 2},
    {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8, "model_parallel_size": 2},
    {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8, "max_gpus": 7},
    {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8, "min_gpus": 12},
    {"max_train_batch_size": 64, "micro_batch_sizes": [4, 32], "prefer_larger_batch": False, "max_gpus": 3},
    {"version": 0.1, "max_train_batch_size": 8, "micro_batch_sizes": [4], "min_gpus": 3, "prefer_larger_batch": False},
]  # fmt: skip
DEFAULTS = {"version": 0.2, "min_gpus": 1, "max_gpus": 10000, "prefer_larger_batch": True}
DEFAULTS |= {"num_gpus_per_node": 1, "model_parallel_size": 1}


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return the keys of a configuration; those that are at their default are left out."""
    micro = sorted(rng.sample(range(1, 33), rng.randint(1, 4)), key=lambda _: rng.random())
    keys: dict[str, Any] = {"max_train_batch_size": max(micro) * rng.randint(1, 120), "micro_batch_sizes": micro}
    if rng.random() < 0.4:
        keys["version"] = 0.1
    else:
        keys["num_gpus_per_node"] = node = rng.choice([1, 2, 4, 8])
        if rng.random() < 0.5:
            keys["model_parallel_size"] = rng.choice([n for n in (1, 2, 4) if node % n == 0])
    if rng.random() < 0.4:
        keys["min_gpus"] = rng.randint(1, 40)
    if rng.random() < 0.4:
        keys["max_gpus"] = keys.get("min_gpus", 1) + rng.randint(0, 60)
    if rng.random() < 0.5:
        keys["prefer_larger_batch"] = False
    return {name: value for name, value in keys.items() if DEFAULTS.get(name) != value}


def ask(keys: dict[str, Any], ranks: int) -> Any:
    """Return [rows, valid numbers, microbatch], None for a refusal, or the name of an error of Python's."""
    from deepspeed.elasticity import compute_elastic_config  # pyright: ignore[reportMissingImports]
    from deepspeed.elasticity.config import ElasticityError  # pyright: ignore[reportMissingImports]

    try:
        config = {"elasticity": {"enabled": True, **keys}}
        rows, valid, micro = compute_elastic_config(config, version("deepspeed"), world_size=ranks)
    except (ElasticityError, ValueError):
        return None
    except Exception as error:
        return type(error).__name__
    return [int(rows), [int(n) for n in valid], int(micro)]


def meant(keys: dict[str, Any], ranks: int) -> tuple[Any, str]:
    """Return the answer around all defects, and the name of the first that the question meets."""
    from deepspeed.elasticity.elasticity import _get_compatible_gpus_v01 as search  # pyright: ignore[reportMissingImports]

    full, defect = DEFAULTS | keys, ""
    of_nodes = full["version"] == 0.2
    node = full["num_gpus_per_node"] if of_nodes else 1
    model = full["model_parallel_size"] if of_nodes else 1
    least, most = math.ceil(full["min_gpus"] / node), full["max_gpus"] // node
    micro, rows = full["micro_batch_sizes"], full["max_train_batch_size"]
    if most == 0:
        return None, "max_gpus"
    if least != max(full["min_gpus"] // node, 1):
        defect = "min_gpus"
    if least > most:
        return None, defect
    per_node, data = node // model, ranks // model
    fits = max(micro) <= rows // per_node
    if fits and not search(micro, rows // per_node, least, most, full["prefer_larger_batch"])[1]:
        return None, defect or "no candidate"
    if model > 1:
        defect = defect or "model_parallel_size"
    if ranks % model:
        return None, defect
    around = {
        name: full[name] for name in ("version", "max_train_batch_size", "micro_batch_sizes", "prefer_larger_batch")
    }
    around |= {"num_gpus_per_node": per_node, "min_gpus": least * per_node, "max_gpus": most * per_node}
    answer = ask(around, data)
    if isinstance(answer, list) and answer[0] == 0:  # by hand: DeepSpeed takes the microbatches that do not fit, too
        fitting = [rows // (n * data) * n * data for n in micro if n * data <= rows]
        whole = min(fitting, default=0)
        best = max((n for n in micro if whole // data % n == 0), default=0)
        return ([whole, [data], best] if whole else None), defect or "a batch of 0 rows"
    return answer, defect


def questions(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a configuration with its questions and answers."""
    model = keys.get("model_parallel_size", 1)
    valid = next((answer[1] for n in range(1, 65) if isinstance(answer := ask(keys, n), list)), [1])
    ranks = [rng.choice(valid) * model for _ in range(2)] + [rng.randint(1, 48) for _ in range(NUM_QUESTIONS - 2)]
    lists: list[list[int]] = []
    rows = []
    for n in ranks:
        asked, (right, defect) = ask(keys, n), meant(keys, n)
        row = [n, compact(asked, lists)]
        rows.append(row if asked == right else [*row, defect, compact(right, lists)])
    return {"keys": keys, "lists": lists, "questions": rows}


def compact(answer: Any, lists: list[list[int]]) -> Any:
    """Return an answer with the place of its list among the lists, to which a new one is added."""
    if not isinstance(answer, list):
        return answer
    rows, valid, micro = answer
    if valid not in lists:
        lists.append(valid)
    return [rows, lists.index(valid), micro]


def main() -> None:
    """Write the file."""
    import logging

    from deepspeed.utils import logger  # pyright: ignore[reportMissingImports]

    logger.setLevel(logging.ERROR)
    rng = random.Random(0)
    configs = [*KNOWN, *(drawn(rng) for _ in range(NUM_CONFIGS - len(KNOWN)))]
    lines = ",\n".join(json.dumps(questions(keys, rng), separators=(",", ":")) for keys in configs)
    text = f'{{"deepspeed": "{version("deepspeed")}",\n"configs": [\n{lines}\n]}}\n'
    (HERE / "elastic_batches.json").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
