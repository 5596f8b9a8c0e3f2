"""The Hugging Face section of the guide trains what `Trainer(deepspeed=...)` trains."""

import json
import re
import types
from pathlib import Path

import pytest
import torch

import fds
from tests.peers.launch import torchrun
from tests.peers.trainer import JSON, MICROBATCHES, ROWS, UPDATES, model, padded, rows, settings

pytestmark = pytest.mark.peers
GUIDE = Path(__file__).parents[2] / "docs" / "from-deepspeed.md"
ADAM = {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "fp16": False, "bf16": False}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_of_the_guide_trains_what_trainer_trains(ranks, tmp_path):
    out = tmp_path / "theirs.json"
    torchrun("tests.peers.trainer", out, ranks=ranks)
    theirs = json.loads(out.read_text())
    block = next(
        code for code in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S) if "counted" in code
    )
    here = {"fds": fds}
    exec(block, here)

    def run(loss=here["token_loss"]):
        dp = fds.mesh(dp=-1)["dp"]
        auto = fds.config.training_arguments(types.SimpleNamespace(**settings(**ADAM)), hidden_size=16)
        step, state, *_ = fds.initialize(model(), loss, config=JSON, auto=auto)
        share, data, seen = ROWS * MICROBATCHES, rows(ranks), []
        for update in range(UPDATES):
            first = (update * ranks + dp.index) * share
            state, metrics = step(state, padded(data[first : first + share]))
            seen.append([metrics["loss"], metrics["grad_norm"]])
        return torch.tensor(seen).T

    for losses, norms in fds.simulate(run, ranks):
        torch.testing.assert_close(losses, torch.tensor(theirs["losses"]), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(norms, torch.tensor(theirs["norms"]), rtol=1e-5, atol=0.0)
    assert len(theirs["losses"]) == UPDATES and theirs["losses"][-1] < theirs["losses"][0] - 0.1
    (means,) = fds.simulate(lambda: run(None), 1)[0][:1]  # of the microbatches' means, which is what the model returns
    assert (means / torch.tensor(theirs["losses"]) - 1).abs().max() > 1e-4
