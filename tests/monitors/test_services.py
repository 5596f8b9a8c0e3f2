"""Weights & Biases and Comet, without a network: what their own files hold."""

import json
import zipfile

import pytest

import fds
from fds.monitors import Comet, WandB
from tests.monitors.runs import Kept, step_and_state, trained, values

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]  # theirs are not ours to mend
LOSS = "Train/Samples/train_loss"


def records(data):
    """Yield the records of a file of W&B: 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    at, record = 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:  # no room for a header: padding
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_weights_and_biases_holds_every_event(tmp_path):
    import wandb
    from wandb.proto import wandb_internal_pb2

    kept = Kept()
    sink = WandB("circles", mode="offline", directory=tmp_path, id="one", name="first")
    with fds.monitor(sink, kept, batch_size=8) as monitor:
        trained(*step_and_state(), 4, monitor)
    wandb.teardown()  # its own process writes the file, and ends here
    (path,) = tmp_path.glob("wandb/offline-run-*/run-one.wandb")
    found = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((row["_step"], row[LOSS]))
    assert found == values(kept, LOSS)


def test_comet_holds_every_event(tmp_path):
    kept = Kept()
    sink = Comet("circles", online=False, directory=tmp_path, name="first")
    with fds.monitor(sink, kept, batch_size=8) as monitor:
        trained(*step_and_state(), 4, monitor)
    (path,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [it["payload"]["metric"] for it in messages if it["type"] == "metric_msg"]
    found = [(it["step"], it["metricValue"]) for it in metrics if it["metricName"] == LOSS]
    assert found == values(kept, LOSS)
