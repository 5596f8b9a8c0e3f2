"""Record how often DeepSpeed's curriculum sampler draws each sample, over many seeds.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/curriculum_samples.py

curriculum_samples.json, per case: the metrics and the sections of its JSON that drove it; `drawn[p]`, how often each
sample was drawn in the batches of phase p, `phases[p]` to `phases[p + 1]`, summed over all seeds; and `easiest[p]`, in
how many batches of it 0, 1, 2, ... rows were of the first cluster. Every seed has a folder of its own: what another run
left there would be taken for clusters.
"""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SAMPLES, ROWS, BATCHES, SEEDS = 100, 16, 24, 60  # of fewer than 100 samples no percentile but the last has any there
LENGTHS = [1 + 7 * i % SAMPLES // 5 for i in range(SAMPLES)]  # 1 to 20, five samples of each
RARITIES = [1 + 11 * i % SAMPLES // 10 for i in range(SAMPLES)]  # 1 to 10, ten of each


def metric(kind, clustering, least, greatest, ends, difficulties):
    """Return the section of a metric, but for its paths."""
    return {
        "difficulty_type": kind,
        "clustering_type": clustering,
        "min_difficulty": least,
        "max_difficulty": greatest,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": difficulties, "max_step": ends},
    }


CASES = {
    "value": {"length": metric("value", "schedule_based", 4, 20, [6, 14], [4, 10, 20])},
    "percentile": {"length": metric("percentile", "schedule_based", 20, 100, [6, 14], [20, 55, 100])},
    "intersection": {
        "length": metric("value", "schedule_based", 10, 20, [6], [10, 20]),
        "rarity": metric("percentile", "schedule_based", 50, 100, [14], [50, 100]),
    },
    "single": {
        "length": metric("value", "schedule_based", 5, 20, [14], [5, 20]),
        "rarity": metric("value", "single_cluster", 2, 10, [6], [2, 10]),
    },
    "whole": {"length": metric("value", "single_cluster", 5, 20, [14], [5, 20])},
}
METRICS = {"length": LENGTHS, "rarity": RARITIES}
PHASES = [0, 6, 14, BATCHES]


def main() -> None:
    """Write the file."""
    import deepspeed
    import deepspeed.comm as dist
    import numpy as np
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
    from deepspeed.runtime.data_pipeline.data_sampling.utils import (
        close_mmap_dataset_builder,
        create_mmap_dataset_builder,
    )

    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
    }
    deepspeed.init_distributed("gloo")
    group = dist.new_group([0])

    def write(path, rows):
        builder = create_mmap_dataset_builder(str(path), np.int64)
        for row in rows:
            builder.add_item_numpy(np.array(row, np.int64))
        close_mmap_dataset_builder(builder, str(path))
        return str(path)

    def batches(sections, seed):
        with tempfile.TemporaryDirectory() as folder:
            metrics = {}
            for name, section in sections.items():
                values = sorted(set(METRICS[name]))
                of = [[i for i, x in enumerate(METRICS[name]) if x == value] for value in values]
                metrics[name] = section | {
                    "index_to_sample_path": write(Path(folder) / f"{name}_samples", of),
                    "index_to_metric_path": write(Path(folder) / f"{name}_values", [[value] for value in values]),
                }
            curriculum = {"enabled": True, "data_cluster_path": f"{folder}/clusters", "curriculum_metrics": metrics}
            config = {"seed": seed, "data_sampling": {"num_epochs": 1000, "curriculum_learning": curriculum}}
            sampler = iter(DeepSpeedDataSampler(config, SAMPLES, ROWS, 0, 1, group, 1, 0))
            return [[int(i) for i in next(sampler)] for _ in range(BATCHES)]

    cases = []
    for name, sections in CASES.items():
        drawn = [[0] * SAMPLES for _ in PHASES[1:]]
        easiest = [[0] * (ROWS + 1) for _ in PHASES[1:]]
        runs = [batches(sections, seed) for seed in range(SEEDS)]
        first = {i for run in runs for batch in run[: PHASES[1]] for i in batch}
        for number, batch in (pair for run in runs for pair in enumerate(run)):
            phase = sum(number >= end for end in PHASES[1:-1])
            easiest[phase][sum(i in first for i in batch)] += 1
            for i in batch:
                drawn[phase][i] += 1
        cases.append({"name": name, "metrics": sections, "drawn": drawn, "easiest": easiest})
    lines = ",\n".join(map(json.dumps, cases))
    data = {"values": METRICS, "rows": ROWS, "seeds": SEEDS, "phases": PHASES}
    versions = {name: version(name) for name in ("deepspeed", "torch", "numpy")}
    head = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {"versions": versions, **data}.items()
    )
    (HERE / "curriculum_samples.json").write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')
    print(f"curriculum_samples.json: {len(cases)} cases")


if __name__ == "__main__":
    main()
