"""How many launches, and casts, a step of 148 parameters takes, up to the call of the driver of a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
from benchmarks import launches
print(json.dumps(launches.measure([(name, call, 1) for name, call in launches.steps()], 1)))
"""


def test_an_update_of_many_parameters_takes_one_launch_and_lambs_three():
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment = {**plain, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, env=environment, check=True, stdout=subprocess.PIPE)
    found = json.loads(ran.stdout)
    launched = {name: count for name, (_, count, _, _) in found.items()}
    assert launched == {
        "step, adamw, pure": 1,
        "step, adamw, donated": 1,
        "step, lamb, pure": 3,
        "step, lamb, donated": 3,
    }
    assert all(casts <= 5 for *_, casts in found.values())  # of 148 parameters, and as many gradients
