"""Bad arguments are refused where they are written; good ones are the optimizer's name."""

from __future__ import annotations

import pytest
import torch

import fds.optim
from fds.errors import OptimizerError
from fds.optim import (
    Segment,
    adagrad,
    adam,
    adamw,
    by_name,
    lamb,
    lion,
    muon,
    onebit_adam,
    onebit_lamb,
    sgd,
    zero_one_adam,
)
from fds.schedules import warmup_decay

NAN = float("nan")
BAD = [
    (adam, {"lr": -1.0}),
    (adam, {"lr": NAN}),
    (adam, {"lr": "fast"}),
    (adam, {"betas": (1.0, 0.9)}),
    (adam, {"betas": (0.9, -0.1)}),
    (adam, {"betas": 0.9}),
    (adam, {"betas": (0.9,)}),
    (adam, {"eps": -1e-8}),
    (adam, {"eps": lambda t: 1e-8}),
    (adam, {"weight_decay": -0.1}),
    (adamw, {"lr": -1.0}),
    (adamw, {"betas": (2, 0)}),
    (sgd, {"lr": -1.0}),
    (sgd, {"momentum": -0.1}),
    (sgd, {"weight_decay": -0.1}),
    (sgd, {"dampening": NAN}),
    (sgd, {"nesterov": True}),
    (sgd, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    (adagrad, {"lr": -1.0}),
    (adagrad, {"lr_decay": -1.0}),
    (adagrad, {"initial_accumulator_value": -1.0}),
    (adagrad, {"eps": -1.0}),
    (adagrad, {"weight_decay": -0.1}),
    (lamb, {"lr": -1.0}),
    (lamb, {"betas": (0.9, 1.0)}),
    (lamb, {"eps": -1.0}),
    (lamb, {"min_coeff": -1.0}),
    (lamb, {"min_coeff": 2.0, "max_coeff": 1.0}),
    (lion, {"lr": -1.0}),
    (lion, {"betas": (0.9, 1.0)}),
    (lion, {"weight_decay": -0.1}),
    (muon, {"lr": -1.0}),
    (muon, {"momentum": -0.1}),
    (muon, {"eps": -1.0}),
    (muon, {"adjust_lr": "match_rms_adam"}),
    (muon, {"ns_coefficients": (1.0, 2.0)}),
    (muon, {"weight_decay": -1.0}),
]


@pytest.mark.parametrize(("factory", "arguments"), BAD)
def test_a_bad_argument_is_refused_by_name(factory, arguments):
    with pytest.raises(OptimizerError) as error:
        factory(**arguments)
    e = error.value
    assert e.what.startswith(factory.__name__) and e.where.split("[")[0] in arguments and e.got and e.want


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_muon_refuses_what_is_not_a_matrix(shape):
    segments = [[Segment("0.weight", (2, 2), 0, 4), Segment("0.bias", shape, 4, 4)]]
    with pytest.raises(OptimizerError) as error:
        muon().init(segments, params=[torch.zeros(8)])
    assert error.value.where == "0.bias" and str(shape) in error.value.got and "by_name" in error.value.hint


def slow(t):
    return 0.1


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (adam(), "adam(lr=0.001)"),
        (adamw(lr=3e-4, weight_decay=0.1), "adamw(lr=0.0003, weight_decay=0.1)"),
        (
            adamw(slow, betas=(0.9, slow), bias_correction=False),
            "adamw(lr=slow, betas=(0.9, slow), bias_correction=False)",
        ),
        (sgd(0.1, 0.9, nesterov=True), "sgd(lr=0.1, momentum=0.9, nesterov=True)"),
        (adagrad(eps=1e-6), "adagrad(lr=0.01, eps=1e-06)"),
        (lamb(max_coeff=1.0), "lamb(lr=0.001, max_coeff=1.0)"),
        (lion(1e-3), "lion(lr=0.001)"),
        (muon(adjust_lr="match_rms_adamw"), "muon(lr=0.001, adjust_lr='match_rms_adamw')"),
        (adamw(warmup_decay(0.1, total_steps=9)), "adamw(lr=warmup_decay(0.1, total_steps=9, kind='linear'))"),
        (onebit_adam(), "onebit_adam(lr=0.001)"),
        (onebit_lamb(), "onebit_lamb(lr=0.001)"),
        (zero_one_adam(), "zero_one_adam(lr=0.001)"),
        (by_name({"*.bias": sgd(), "*": adam(0.1)}), "by_name({'*.bias': sgd(lr=0.001), '*': adam(lr=0.1)})"),
    ],
)
def test_an_optimizer_prints_its_rate_and_what_is_not_at_its_default(optimizer, text):
    assert repr(optimizer) == optimizer.text == text


def test_no_public_name_is_a_submodules():
    import pkgutil

    assert not {module.name for module in pkgutil.iter_modules(fds.optim.__path__)} & set(fds.optim.__all__)
