"""What is decided on the device and what the host hears of it later are one thing."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import GuardConfig
from pretrain.agreement import Agreement
from pretrain.guard import LossGuard
from pretrain.optim.budget import TimeBudget

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(numbers, numbers, numbers, st.booleans())
def test_the_device_decides_as_the_guard_does(mlm: float, nsp: float, norm: float, scaled) -> None:
    plan = SimpleNamespace(rank=0, world=1, tp=1, model=SimpleNamespace(nsp_head=True))
    said: list[str] = []
    telemetry = SimpleNamespace(event=lambda step, text: said.append(text))
    run = SimpleNamespace(
        device=torch.device("cpu"), plan=plan, step=6, telemetry=telemetry, say=said.append
    )
    guard = LossGuard(GuardConfig(nan_patience=2), scaled)
    budget, stop = TimeBudget(1.0, 3.0), SimpleNamespace(received="")
    agreement = Agreement(run, guard, budget, stop)
    micro = SimpleNamespace(labelled=4)
    batch = SimpleNamespace(micros=[micro, micro], masked_total=7, rows_total=8)
    on_device = agreement.on(batch, torch.tensor([mlm, nsp, 3.0, 4.0])).asked(torch.tensor(norm))
    assert bool(on_device) is agreement.heard()
    assert bool(on_device) is not any("update 7 skipped" in text for text in said)
    assert budget.spent == 3.0 and not agreement.stopping
    assert agreement.values["mlm_accuracy"] == 3 / 7 and agreement.values["nsp_accuracy"] == 4 / 8
