"""Some hundred compositions that together pass through every branch of a step, and some that are refused."""

from __future__ import annotations

import re
from typing import Any

import torch

import fds
from fds import plans, transports
from tests.compositions import PARTS, Composition, Family, Place, composed, pairs, sequences, transformed, weighed, wide
from tests.laws import problems, test_law_13_axes as transformer
from tests.sequence_axis import language_model
from tests.tensor_axis import splitting

SCALES = ("loss_scale", "static_loss_scale", "skip_nonfinite", "quick_scale")
USUAL = (*SCALES, "clip_norm", "tight_clip", "clip_value", "ema", "slow_ema", "donate", "half", "precision")
COMPUTING = (*USUAL, "checkpoint", "checkpoint_pairs", "references", "autocast", "low_sums", "freeze")
SEPARATE = ("sgd", "momentum", "adam", "adamw", "lion", "adagrad", "groups")
EVERY = sorted(problems.OPTIMIZERS)
LAYERED = (problems.layers, problems.tied_layers, problems.records, weighed)
KINDS = (*LAYERED, problems.opaque, problems.tied_module, problems.raw)
WEIGHED = (problems.tied_layers, problems.records, weighed)  # of which a batch may weigh nothing
ALONE = (Place(microbatches=1), Place(microbatches=3), Place(pipe=plans.one_f_one_b, alone=2, microbatches=4))
ZERO = [
    *(Place(dp=2, stage=stage) for stage in range(4)),
    *(Place(dp=3, stage=stage, microbatches=1, shard={"bucket_bytes": 64}) for stage in range(4)),
    *(Place(dp=2, copies=2, stage=stage, shard={"bucket_bytes": 2**20}) for stage in range(4)),
]
GATHERED = [
    *(Place(dp=2, stage=3, shard={"max_live_bytes": 1200, "prefetch": prefetch}) for prefetch in (0, 1, 2)),
    Place(dp=4, stage=3, shard={"persist_below": 8, "bucket_bytes": 64}),
    *(Place(node=2, dp=2, stage=3, shard={"secondary": True, **more}) for more in ({}, {"max_live_bytes": 1200})),
    Place(copies=2, dp=2, stage=3, shard={"max_live_bytes": 1200, "persist_below": 8}),
    *(Place(dp=2, stage=stage, shard={"predivide": 3.0}) for stage in (0, 1, 2, 3)),
]
SCHEDULES = (plans.gpipe, plans.one_f_one_b, plans.zb_h1, plans.zb_h2)
PIPES = [
    *(Place(pp=2, pipe=one, microbatches=4) for one in (*SCHEDULES, plans.zb_v, plans.dualpipe_v)),
    *(Place(pp=2, dp=2, stage=stage, pipe=SCHEDULES[stage]) for stage in range(4)),
    *(Place(pp=2, copies=2, dp=1, stage=stage, pipe=plans.one_f_one_b) for stage in (1, 2)),
    Place(pp=3, pipe=plans.one_f_one_b, microbatches=4),
    Place(pp=3, pipe=plans.zb_h1, microbatches=6),
    Place(alone=2, pipe=plans.zb_v, microbatches=4),
    Place(alone=3, pipe=plans.gpipe, microbatches=4),
]
WAYS = [
    {"gradients": transports.topk(0.2)},
    {"gradients": transports.onebit(group=32)},
    {"gradients": transports.quantized(4, group=32, feedback=True)},
    {"gradients": transports.quantized(8, stochastic=True)},
    {"gradients": transports.cast(torch.bfloat16, feedback=True)},
    {"gradients": {"*0*": transports.topk(0.2), "*": transports.rows()}},
    {"gradients": transports.quantized(8), "weights": transports.quantized(8)},
    {"weights": transports.cast(torch.bfloat16)},
]
NODES = [
    {"gradients": transports.hierarchical(transports.onebit(group=32))},
    {"gradients": transports.hierarchical(transports.quantized(8), transports.quantized(4, group=32))},
]
SENT = [
    *(Place(dp=2, stage=stage, shard=way) for stage in range(4) for way in WAYS if stage or "weights" not in way),
    *(Place(node=2, dp=2, stage=stage, shard=way) for stage in range(4) for way in NODES),
    *(Place(copies=2, dp=2, stage=stage, shard=WAYS[stage]) for stage in range(4)),
    *(Place(pp=2, dp=2, stage=stage, pipe=plans.one_f_one_b, shard=WAYS[stage]) for stage in (0, 2)),
]
PREDIVIDED = [Place(dp=2, stage=stage, shard={**WAYS[stage], "predivide": 3.0}) for stage in range(4)]
TURNS = [
    {"every": 2},
    {"every": 3, "fragments": 2},
    {"every": 2, "outer": fds.sgd(1.0)},
    {"every": 2, "outer": fds.adam(0.1)},
    {"every": 2, "transport": transports.quantized(4, group=32, feedback=True)},
    {"every": 1, "transport": transports.topk(0.3), "fragments": 1},
]
APART = [
    *(Place(replica=2, local=local) for local in TURNS),
    *(Place(replica=2, dp=2, stage=stage, local=TURNS[stage]) for stage in range(4)),
    *(Place(replica=2, dp=2, stage=stage, local=TURNS[stage + 2]) for stage in range(4)),
    Place(replica=2, pp=2, pipe=plans.one_f_one_b, microbatches=4, local=TURNS[0]),
]
SIGNS = [
    Place(),
    *(Place(dp=n, stage=0) for n in (2, 3)),
    Place(copies=2, dp=2, stage=0),
    Place(pp=2, dp=2, stage=0, pipe=plans.one_f_one_b),
]
PLAN = {"plan": transformer.PLAN}
DIVIDED = [
    Place(tp=2, tensor=PLAN),
    Place(tp=2, tensor={**PLAN, "sequence": True}),
    Place(tp=2, tensor={**PLAN, "overlap": 2}),
    *(Place(tp=2, dp=2, stage=stage, tensor=PLAN) for stage in range(4)),
    Place(tp=2, pp=2, pipe=plans.one_f_one_b, microbatches=4, tensor={**PLAN, "sequence": True}),
]
SOME = [ZERO[1], ZERO[2], ZERO[7], GATHERED[1]]
PIECES = [
    splitting.Place(2),
    splitting.Place(4),
    *(splitting.Place(2, data=2, zero=zero) for zero in range(4)),
    splitting.Place(2, stages=2),
    splitting.Place(2, data=1, zero=1, replicas=2),
]
RING: dict[str, Any] = {"method": "ring", "layout": "zigzag"}
CUT = [
    language_model.Place(2),
    language_model.Place(2, **RING),
    *(language_model.Place(2, data=2, zero=zero) for zero in (0, 1, 3)),
    *(language_model.Place(2, data=2, zero=zero, joint=True) for zero in (1, 2, 3)),
    language_model.Place(2, stages=2, **RING),
]
OFFLOADED = [name for name in PARTS if re.match("(moments|all|gradients|masters|half)_(on|in)|by_pattern", name)]
EARLY = [name for name in PARTS if name.startswith("early")]
CLIPS = ("clip_norm", "wide_clip", "tight_clip", "ema")
RUNS = [("compiled",), ("compiled_loss",), ("graph", "donate")]

FAMILIES = {
    "one process": Family(48, KINDS, ALONE[:2], EVERY, may=[*COMPUTING, "whole_map"]),
    "frozen": Family(
        10, [wide], [*ALONE[:2], ZERO[1], ZERO[3]], [*SEPARATE, "muon"], [("freeze_base", "quantize_frozen")], USUAL
    ),
    "recorded": Family(16, KINDS, ALONE[:2], SEPARATE, RUNS, [*USUAL[:7], "whole_map"]),
    "ranks": Family(36, KINDS, ZERO, EVERY, may=COMPUTING),
    "gathered": Family(22, KINDS, GATHERED, SEPARATE, may=COMPUTING),
    "pipelines": Family(32, LAYERED, PIPES, EVERY, may=COMPUTING),
    "offload": Family(28, KINDS, [*ALONE[:2], *SOME], EVERY, [(name,) for name in OFFLOADED], USUAL),
    "offload of stages": Family(
        10, LAYERED, [ALONE[2], PIPES[1], PIPES[8]], EVERY, [(name,) for name in OFFLOADED], USUAL
    ),
    "speculation": Family(
        36,
        KINDS,
        [*ALONE[:2], *SOME, ZERO[0], ZERO[9]],
        SEPARATE,
        [(name, clip) for name in EARLY for clip in CLIPS],
        [*SCALES, "donate", "ema", "half"],
    ),
    "signs": Family(
        30, LAYERED, SIGNS, ["onebit_adam", "onebit_lamb", "zero_one_adam"], may=[*SCALES, *CLIPS, "donate"], calls=9
    ),
    "local": Family(30, LAYERED, APART, SEPARATE, may=USUAL, calls=6),
    "transports": Family(44, LAYERED, SENT, SEPARATE, may=USUAL),
    "divided transports": Family(4, LAYERED, PREDIVIDED, SEPARATE, may=USUAL),
    "tensor": Family(14, [transformed], DIVIDED, ["adamw", "lamb", "momentum", "muon_in_blocks"], may=USUAL),
    "pairs": Family(12, [pairs], PIECES, EVERY, may=[x for x in USUAL if x not in ("half", "precision")]),
    "sequences": Family(12, [sequences], CUT, SEPARATE, may=USUAL, calls=3),
    "notes": Family(16, [problems.layers], [*ALONE, *SOME, *PIPES[:2], PIPES[7]], EVERY, [("noting",)], USUAL),
    "weights": Family(16, WEIGHED, [*SOME, PIPES[6], ALONE[1], APART[0]], EVERY, may=USUAL),
    "loaded": Family(
        20, LAYERED, [*SOME, PIPES[1], SENT[1], APART[1]], EVERY, may=USUAL, elsewhere=[*ALONE[:2], *SOME, *APART[:1]]
    ),
}
# compositions that are refused, each for a reason of its own
REFUSED: list[tuple[Place, str, list[str]]] = [
    (Place(), "adamw", ["graph"]),
    (Place(), "adamw", ["graph", "donate", "moments_on_host"]),
    (Place(dp=2, stage=1), "adamw", ["graph", "donate"]),
    (Place(dp=2, stage=1), "adamw", ["compiled"]),
    (Place(), "adamw", ["compiled", "all_on_disk"]),
    (Place(), "adamw", ["early_on_host", "clip_value"]),
    (Place(), "adamw", ["early_on_host", "whole_map"]),
    (Place(), "lamb", ["early_on_host"]),
    (PIPES[1], "adamw", ["early_on_host"]),
    (PIPES[1], "adamw", ["whole_map"]),
    (Place(dp=2, stage=1), "adamw", ["whole_map"]),
    (Place(dp=2, stage=1), "onebit_adam", []),
    (Place(dp=2, stage=0), "onebit_lamb", ["clip_value"]),
    (Place(dp=2, stage=0), "zero_one_adam", ["moments_on_host"]),
    (Place(dp=2, stage=0, shard=WAYS[0]), "onebit_adam", []),
    (Place(dp=2, stage=0, shard={"weights": transports.quantized(8)}), "adamw", []),
    (Place(dp=2, stage=3, shard={"max_live_bytes": 1200, "bucket_bytes": 4096}), "adamw", []),
    (Place(replica=2, local=TURNS[0]), "adamw", ["moments_on_host"]),
    (Place(replica=2, local=TURNS[0]), "lamb", ["early_on_host"]),
    (Place(replica=2, dp=2, stage=0, local=TURNS[0]), "onebit_adam", []),
    (Place(replica=2, local={"every": 2, "outer": fds.lamb(0.1)}), "adamw", []),
    (Place(), "adamw", ["loss_scale", "skip_nonfinite"]),
    (Place(), "adamw", ["accumulate"]),
    (Place(), "adamw", ["precision", "half"]),
    (Place(), "adamw", ["moments_on_host", "all_on_disk"]),
    (Place(), "adamw", ["clip_norm", "wide_clip"]),
    (Place(), "adamw", ["freeze_base"]),
    (Place(), "muon", []),
]


def compositions() -> list[Composition]:
    """Return all of them."""
    layers = problems.layers(1, torch.float32, 0.3, True)
    refused = [
        composed(f"refused {i}: {optimizer}, {parts}", layers, place, optimizer, parts, 4, None)
        for i, (place, optimizer, parts) in enumerate(REFUSED)
    ]
    return [*(one for name, family in FAMILIES.items() for one in family.deal(name)), *refused]
