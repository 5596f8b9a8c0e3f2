"""What is run of an installed fds: the README's first example, and an import of every module."""

from pathlib import Path

from tests.house.test_readme import blocks

ROOT = Path(__file__).parents[2]
AFTERWARDS = """
import importlib, importlib.metadata, pkgutil
assert importlib.metadata.version("fds") == fds.__version__
for module in pkgutil.walk_packages(fds.__path__, "fds."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print("ran with", fds.__file__)
"""


def program() -> str:
    """Return the first Python block of README.md, and then the imports."""
    code = next(code for language, code, _ in blocks((ROOT / "README.md").read_text()) if language == "python")
    return code + AFTERWARDS
