"""Install a wheel into an empty environment, as a user would, and run the README's first example and the command there.

    python -m tests.package.fresh dist/*.whl      # or: make package

pip fetches every dependency, torch among them (the version in constraints.txt), so this takes minutes and a network.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.package.example import ROOT, program


def main(wheel: str) -> None:
    """Install the wheel, and run what is to be run."""
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    path = str(Path(wheel).resolve())
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        bin = Path(folder) / "bin"
        subprocess.run([bin / "python", "-m", "pip", "install", "-q", torch, path], cwd=folder, check=True)
        subprocess.run([bin / "python", "-c", program()], cwd=folder, check=True)
        subprocess.run([bin / "fds", "--version"], cwd=folder, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
