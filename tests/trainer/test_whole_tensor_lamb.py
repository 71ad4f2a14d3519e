"""The wrapper around FusedLamb and FusedLAMB, with stand-ins that compute what their kernels do.

The real ones need a GPU and a compiler; what is tested here is that they are handed the right
tensors, groups, steps and gradients, and that their state is the checkpoint's.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from configs.errors import UserError
from configs.schema import OptimizerConfig, Recipe
from pretrain.engine import LeanEngine
from pretrain.kernels import plain
from pretrain.model import build
from pretrain.parallel.groups import SINGLE
from tests.trainer.batches import pack, random_rows, tiny_config


class FusedLamb(torch.optim.Optimizer):
    """deepspeed/ops/lamb/fused_lamb.py: a step count per tensor, limits of the ratio."""

    def __init__(self, params, lr, betas, eps, bias_correction, max_coeff, min_coeff):
        assert not bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.limits = min_coeff, max_coeff

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] += 1
                update = moments(p, state, group)
                ratio = (
                    (p.data.norm() / update.norm()).clamp(*self.limits)
                    if p.data.any() and update.any()
                    else 1.0
                )
                p.data.sub_(group["lr"] * ratio * update)


class FusedLAMB(torch.optim.Optimizer):
    """apex/optimizers/fused_lamb.py: a step count per group, bias correction, use_nvlamb."""

    def __init__(self, params, lr, betas, eps, bias_correction, max_grad_norm, use_nvlamb):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.use_nvlamb, self.bias_correction = use_nvlamb, bias_correction

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            power = group["step"] if self.bias_correction else None
            for p in group["params"]:
                update = moments(p, self.state[p], group, power)
                adapt = self.use_nvlamb or group["weight_decay"] != 0
                both = p.data.any() and update.any()
                ratio = p.data.norm() / update.norm() if adapt and both else 1.0
                p.data.sub_(group["lr"] * ratio * update)


def moments(p, state, group, power=None):
    b1, b2 = group["betas"]
    state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
    state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
    c1, c2 = (1 - b1**power, 1 - b2**power) if power else (1.0, 1.0)
    update = (state["exp_avg"] / c1) / ((state["exp_avg_sq"] / c2).sqrt() + group["eps"])
    return update + group["weight_decay"] * p.data


def run(config: OptimizerConfig, precision: str = "fp32") -> LeanEngine:
    model, pieces = build(tiny_config(), seed=1)
    recipe = Recipe(optimizer=config)
    recipe.train.precision = precision
    engine = LeanEngine(recipe, model, pieces, SINGLE, plain, torch.device("cpu"))
    for step in range(4):
        micro = pack(random_rows(6, tiny_config(), seed=step))
        engine.backward(engine.model(micro).mlm_sum / micro.masked, last=True)
        engine.step(0.01)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "deepspeed", "bias_correction": False},
        {
            "implementation": "deepspeed",
            "bias_correction": False,
            "trust_ratio_max": 0.5,
            "trust_ratio_min": 0.1,
        },
        {"implementation": "apex"},
        {"implementation": "apex", "adapt_bias_and_norm": False, "max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_it_is_handed_what_makes_it_exact(options, monkeypatch):
    for name, kind in (("deepspeed.ops.lamb", FusedLamb), ("apex.optimizers", FusedLAMB)):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    other = run(OptimizerConfig(**options))
    ours = run(OptimizerConfig(**{**options, "implementation": "lambert"}))
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        a, b = other.shard.tensor(kind), ours.shard.tensor(kind)
        assert (a - b).norm() / b.norm() < 1e-5, kind
    assert other.state()["optimizer_steps"] == 4
    low = run(OptimizerConfig(**options), "bf16")
    assert torch.equal(low.weights, low.shard.master.bfloat16())


def test_a_missing_implementation_is_a_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    with pytest.raises(UserError, match="implementation=apex cannot be used here"):
        run(OptimizerConfig(implementation="apex"))
