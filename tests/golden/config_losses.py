"""Record the losses, learning rates and gradient norms of small trainings by DeepSpeed's engine.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/config_losses.py

config_losses.json, per case: the JSON that drove it, and of each of 20 steps on two gloo ranks: `losses`, the mean of
the global batch; `lrs`, the learning rate of the update; `norms`, of the gradient before it is clipped, null where the
engine does not know it. Model and data: tests/peers/training.py. The configurations: tests/peers/cases.py.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # for a script's own path begins beside it


def main() -> None:
    """Write the file."""
    import attrs

    from tests.peers.cases import CASES, RECORDED
    from tests.peers.worker import train

    with tempfile.TemporaryDirectory() as folder:
        runs = train("deepspeed", Path(folder) / "runs.json", RECORDED)
    lines = ",\n".join(json.dumps({"name": name, "json": CASES[name]} | attrs.asdict(runs[name])) for name in RECORDED)
    versions = json.dumps({name: version(name) for name in ("deepspeed", "torch")})
    (HERE / "config_losses.json").write_text(f'{{"versions": {versions}, "cases": [\n{lines}\n]}}\n')
    print(f"config_losses.json: {len(RECORDED)} cases")


if __name__ == "__main__":
    main()
