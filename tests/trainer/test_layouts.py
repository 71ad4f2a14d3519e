"""Ten updates in every layout equal the plain model with the reference LAMB (issue: 1e-5).

All layouts run inside one world of four processes; smaller layouts run beside each other in it.
Attention key biases are left out: their true gradient is zero and Adam-type updates turn its
rounding noise into full steps (test_model_parity shows that outputs do not depend on them).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trainer.launch import world
from tests.trainer.layouts import OPTIMIZER, Layout, reference

ENGINE = {0: "lean", 1: "deepspeed", 2: "deepspeed"}
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
FP32 = [
    Layout(tp, dp, zero, accumulate, ENGINE[zero])
    for tp, dp in SHAPES
    for zero in (0, 1, 2)
    for accumulate in (1, 4)
    if dp > 1 or zero < 2  # with one data-parallel rank ZeRO has nothing to share out
]
FP32 += [Layout(1, 4, 1, 1), Layout(2, 2, 1, 4)]  # the lean engine's ZeRO-1
FP32 += [Layout(2, 1, 0, 1, sequence=True), Layout(2, 2, 1, 4, "deepspeed", sequence=True)]
FP32 += [
    Layout(4, 1, 0, 1, sequence=True, recompute=True),
    Layout(2, 2, 1, 1, "deepspeed", recompute=True),
]
FP32 += [Layout(1, 2, 1, 4, recorded=True), Layout(2, 2, 0, 1, recorded=True)]
LOW = [
    Layout(2, 2, 1, 4, "lean", "bf16", recorded=True),
    Layout(1, 2, 1, 1, "lean", "fp16", recorded=True),
    Layout(1, 1, 0, 4, "lean", "bf16"),
    Layout(1, 2, 1, 4, "lean", "bf16"),
    Layout(2, 2, 1, 4, "lean", "bf16"),
    Layout(1, 2, 1, 4, "deepspeed", "bf16"),
    Layout(2, 2, 1, 4, "deepspeed", "bf16"),
    Layout(2, 2, 2, 4, "deepspeed", "bf16"),
    Layout(1, 1, 0, 4, "lean", "fp16"),
    Layout(2, 2, 1, 4, "deepspeed", "fp16"),
    Layout(1, 2, 2, 4, "deepspeed", "fp16"),
]


RESUMED = [
    Layout(1, 2, 1, 4, "deepspeed", "bf16"),
    Layout(2, 2, 2, 1, "deepspeed", "fp16"),
    Layout(2, 2, 1, 1, "lean", "bf16"),
    Layout(1, 4, 0, 1, "lean", "fp16"),
]

# Matrices that no rank, or not every rank, holds whole are orthogonalised as if it did.
ORTHOGONAL = [
    Layout(),
    Layout(1, 2, 0, 4),
    Layout(1, 4, 1),
    Layout(4, 1, 0),
    Layout(2, 2, 0),
    Layout(2, 2, 1, 4),
    Layout(2, 2, 1, sequence=True),
    Layout(1, 2, 1, 4, "deepspeed"),
    Layout(2, 2, 2, 1, "deepspeed"),
]
ORTHOGONAL_LOW = [
    Layout(2, 2, 1, 4, "lean", "bf16"),
    Layout(1, 2, 2, 4, "deepspeed", "bf16"),
    Layout(1, 4, 1, 1, "lean", "fp16"),
]
MUON = replace(OPTIMIZER, orthogonal_lr=1.5)

SPOILED = [*LOW, Layout(), Layout(1, 4, 1), Layout(2, 2, 0), Layout(2, 2, 2, engine="deepspeed")]


@pytest.fixture(scope="module")
def expected():
    return reference()


def run(size, *jobs):
    """Layout -> result of each job; see `layouts.run_world`."""
    ranks = world(size, "tests.trainer.layouts:run_world", list(jobs))
    return [{k: v for part in parts for k, v in part.items()} for parts in zip(*ranks)]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    jobs = [("whole", FP32 + LOW, ()), ("resume", RESUMED, (folder,)), ("refused", SPOILED, ())]
    return run(4, *jobs, ("whole", ORTHOGONAL + ORTHOGONAL_LOW, (MUON,)))


@pytest.fixture(scope="module")
def results(everything):
    return everything[0]


def worst(tensors, wanted):
    """(largest ||difference|| / ||tensor||, its name) over all tensors but the key biases."""
    return max(
        (float((tensors[k] - w).norm() / w.norm()), k)
        for k, w in wanted.items()
        if "key.bias" not in k
    )


@pytest.mark.parametrize("layout", FP32, ids=str)
def test_b37_layout_equals_the_reference(layout, results, expected):
    losses, norms, tensors = results[str(layout)]
    assert losses == pytest.approx(expected[0], abs=1e-5)
    # the global gradient norm counts replicated tensors once and sharded ones whole
    assert norms == pytest.approx(expected[1], rel=1e-5)
    assert set(tensors) == set(expected[2])
    assert worst(tensors, expected[2])[0] <= 1e-5, worst(tensors, expected[2])


@pytest.mark.parametrize("layout", LOW, ids=str)
def test_low_precision_tracks_the_reference(layout, results, expected):
    """bf16 keeps 8 bits, fp16 11: the losses follow, and layouts agree better than with fp32."""
    losses, norms, tensors = results[str(layout)]
    close = 0.05 if layout.precision == "bf16" else 0.01
    assert losses == pytest.approx(expected[0], abs=close)
    assert norms == pytest.approx(expected[1], rel=close)
    assert worst(tensors, expected[2])[0] < close, worst(tensors, expected[2])


@pytest.fixture(scope="module")
def orthogonal():
    return reference(optimizer=MUON)


@pytest.mark.parametrize("layout", ORTHOGONAL, ids=str)
def test_orthogonal_matrices_equal_the_reference(layout, everything, orthogonal, expected):
    """To ten times the bound above: the polynomials lift small singular values, and their rounding, 290 times."""
    losses, norms, tensors = everything[3][str(layout)]
    assert losses == pytest.approx(orthogonal[0], abs=1e-4)
    assert norms == pytest.approx(orthogonal[1], rel=1e-4)
    assert worst(tensors, orthogonal[2])[0] <= 1e-4, worst(tensors, orthogonal[2])
    assert worst(tensors, expected[2])[0] > 0.05  # LAMB alone goes elsewhere


@pytest.mark.parametrize("layout", ORTHOGONAL_LOW, ids=str)
def test_orthogonal_matrices_in_low_precision(layout, everything, orthogonal):
    losses, _, tensors = everything[3][str(layout)]
    close = 0.05 if layout.precision == "bf16" else 0.01
    assert losses == pytest.approx(orthogonal[0], abs=close)
    assert worst(tensors, orthogonal[2])[0] < 2 * close, worst(tensors, orthogonal[2])


@pytest.mark.parametrize("layout", RESUMED, ids=str)
def test_low_precision_resumes_to_the_last_bit(layout, everything):
    whole, after = everything[1][str(layout)]
    assert after == whole[5:]
    assert len(set(whole)) == 10


@pytest.mark.parametrize("layout", SPOILED, ids=str)
def test_a_refused_first_update_leaves_everything_alone(layout, everything):
    assert everything[2][str(layout)]


@pytest.mark.slow
def test_eight_ranks_equal_the_reference(expected):
    layouts = [
        Layout(4, 2, 1, 4, "deepspeed"),
        Layout(4, 2, 1, 1, "lean", sequence=True),
        Layout(2, 4, 2, 1, "deepspeed"),
        Layout(1, 8, 1, 1, "lean"),
        Layout(1, 8, 0, 1, "lean"),
    ]
    (results,) = run(8, ("whole", layouts, ()))
    for layout in layouts:
        losses, norms, tensors = results[str(layout)]
        assert losses == pytest.approx(expected[0], abs=1e-5), layout
        assert norms == pytest.approx(expected[1], rel=1e-5), layout
        assert worst(tensors, expected[2])[0] <= 1e-5, layout


def test_clipping_is_active(expected):
    assert min(expected[1]) > 1.0, "the limit of the norm must have been felt, or B37 shows nothing"
