"""Record the loss scale of every step of small trainings in float16 by DeepSpeed's engine.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/float16_scales.py

float16_scales.json, per case: the JSON that drove it, the number of `ranks`, the `gain` of its inputs, and of each of
12 `steps` the loss scale and whether the update was skipped. tests/peers/float16.py says how they were trained.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # for a script's own path begins beside it
NUMBER = 7  # for each number of ranks


def main() -> None:
    """Write the file."""
    from tests.peers.float16 import configurations, train

    lines = []
    for ranks in (1, 2):
        cases = configurations(ranks, NUMBER)
        with tempfile.TemporaryDirectory() as folder:
            runs = train(cases, ranks, Path(folder))
        lines += [json.dumps({"ranks": ranks, **case, "steps": run}) for case, run in zip(cases, runs, strict=True)]
    versions = json.dumps({name: version(name) for name in ("deepspeed", "torch")})
    text = ",\n".join(lines)
    (HERE / "float16_scales.json").write_text(f'{{"versions": {versions}, "cases": [\n{text}\n]}}\n')
    print(f"float16_scales.json: {len(lines)} cases")


if __name__ == "__main__":
    main()
