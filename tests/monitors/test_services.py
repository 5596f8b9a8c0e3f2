"""Weights & Biases and Comet, without a network: what their own files hold."""

import json
import zipfile

import pytest

import fds
from fds.monitors import Comet, WandB
from tests.monitors.runs import Kept, step_and_state, trained, values

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]  # theirs are not ours to mend
LOSS = "Train/Samples/train_loss"


def test_weights_and_biases_holds_every_event(tmp_path):
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    kept = Kept()
    sink = WandB("circles", mode="offline", directory=tmp_path, id="one", name="first")
    with fds.monitor(sink, kept, batch_size=8) as monitor:
        trained(*step_and_state(), 4, monitor)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-one.wandb")
    store, found = DataStore(), []
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
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
