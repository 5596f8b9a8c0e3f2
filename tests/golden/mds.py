"""Write `mds.json`, the files of a folder of MDS, by mosaicml-streaming 0.13.0: `python tests/golden/mds.py`."""

import json
import tempfile
from pathlib import Path

import numpy as np

COLUMNS = {
    "text": "str",
    "raw": "bytes",
    "count": "int",
    "half": "float16",
    "words": "str_int",
    "more": "json",
    "tokens": "ndarray:uint16",
    "pair": "ndarray:int64:2",
    "any": "ndarray",
}


def samples():
    for i in range(5):
        yield {
            "text": "é" * i,
            "raw": bytes(range(i)),
            "count": -i,
            "half": np.float16(i / 2),
            "words": 10**i,
            "more": {"i": [i, None]},
            "tokens": np.arange(1, i + 2, dtype=np.uint16),
            "pair": np.array([i, -i]),
            "any": np.full((1, i + 1), i, np.float32),
        }


if __name__ == "__main__":
    from streaming import MDSWriter  # which other environments lack

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        with MDSWriter(out=str(folder), columns=COLUMNS, size_limit=560) as out:
            for sample in samples():
                out.write(sample)
        files = {path.name: path.read_bytes().hex() for path in sorted(folder.iterdir())}
    Path(__file__).with_suffix(".json").write_text(json.dumps(files, indent=1) + "\n")
