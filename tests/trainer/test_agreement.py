"""What is decided on the device and what the host hears of it later are one thing."""

from types import SimpleNamespace
from weakref import ref

import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import GuardConfig, Recipe
from pretrain.agreement import Agreement
from pretrain.data.batches import GlobalBatch
from pretrain.guard import LossGuard
from pretrain.optim.budget import TimeBudget

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


def make_agreement(scaled: bool, said: list[str]) -> Agreement:
    """On update 7."""
    model = SimpleNamespace(nsp_head=True)
    plan = SimpleNamespace(rank=0, world=1, tp=1, model=model, recipe=Recipe())
    telemetry = SimpleNamespace(event=lambda step, text: said.append(text))
    run = SimpleNamespace(
        device=torch.device("cpu"), plan=plan, step=6, telemetry=telemetry, say=said.append
    )
    guard = LossGuard(GuardConfig(nan_patience=2), scaled)
    return Agreement(run, guard, TimeBudget(1.0, 3.0), SimpleNamespace(received=""))


class FourLabelled:
    labelled = 4


def make_batch() -> GlobalBatch:
    return GlobalBatch([FourLabelled(), FourLabelled()], 7, 8, 100, 1000, 0.0, 0.1)  # type: ignore


@given(numbers, numbers, numbers, st.booleans())
def test_the_device_decides_as_the_guard_does(mlm: float, nsp: float, norm: float, scaled) -> None:
    said: list[str] = []
    agreement = make_agreement(scaled, said)
    sums = torch.tensor([mlm, nsp, 3.0, 4.0])
    on_device = agreement.on(make_batch(), sums).asked(torch.tensor(norm))
    assert bool(on_device) is agreement.heard()
    assert bool(on_device) is not any("update 7 skipped" in text for text in said)
    assert agreement.budget.spent == 3.0 and not agreement.stopping
    assert agreement.values["mlm_accuracy"] == 3 / 7 and agreement.values["nsp_accuracy"] == 4 / 8


def test_a_batch_is_let_go_of_before_the_next_but_one_comes_to_the_device() -> None:
    agreement, batch = make_agreement(False, []), make_batch()
    held = ref(batch.micros[0])
    agreement.on(batch, torch.ones(4))
    del batch
    assert held() is None
    assert agreement.asked(torch.tensor(1.0)) and agreement.heard()
