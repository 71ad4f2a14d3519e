"""Cards and networks in numbers, each with where it comes from.

`measured` says whether runs of this trainer bear a card's constants out (bench/results/measured.jsonl);
the other cards take the H100's shares of their data sheets' figures and are marked as estimates in the
output. Copy engines were timed on H200s alone, whose links are the H100's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from configs import UserError


@dataclass(frozen=True)
class CopyEngines:
    """Of GPUs that reach each other's memory. rate: bytes/s that one sends to all the others; wait_s:
    seconds that an exchange takes beside its bytes."""

    rate: float
    wait_s: float


@dataclass(frozen=True)
class Card:
    """One GPU model.

    gemm_peak: largest bf16 rate of a matmul (FLOP/s); gemm_rate: rate of the arithmetic alone, to
    which the memory traffic of the operands is added (gemm_bandwidth, bytes/s). attention_rate:
    the same for attention. bandwidth: of elementwise kernels and the optimiser (bytes/s).
    """

    name: str
    memory_bytes: float
    gemm_peak: float
    gemm_rate: float
    gemm_bandwidth: float
    attention_rate: float
    bandwidth: float
    nvlink: float  # bus bandwidth of a collective among the GPUs of a node, bytes/s a GPU
    collective_latency_s: float
    copy_engines: CopyEngines | None
    launch_s: float  # host time a micro-batch that no kernel hides
    update_s: float  # host time an update: clipping, logging, planning the next batch
    hook_s: float  # DeepSpeed's Python hooks, per parameter tensor and micro-batch
    precision_gain: dict[str, float]  # speed of matmuls against bf16
    measured: bool


@dataclass(frozen=True)
class Network:
    """Between nodes. bandwidth: bytes/s a GPU can send (its share of the node's adapters)."""

    bandwidth: float
    latency_s: float
    efficiency: float  # share of the line rate that NCCL's rings reach


# gemm_peak: 8192^3 in bf16 measured on an H100 SXM. gemm_rate and gemm_bandwidth: fitted to the
# measured rates of BERT-large's shapes (494-720 TFLOP/s, 86-93 ms for 32768 tokens). bandwidth:
# LAMB over 336M parameters moves 42 bytes each in 4.8 ms. attention_rate: 0.47 ms a layer forward
# and backward at length 128, of which 0.27 are traffic. nvlink: NCCL's bus bandwidth over NVLink 4.
# Fitted to the runs in bench/results/measured.jsonl: hook_s (dp 2 with the DeepSpeed engine), fp8's
# gain (128 and 512), collective_latency_s (tp 2 and 4: what a sum costs beside its bytes, start and
# waiting for the other rank included, less what runs beside a product), copy_engines
# (1.3B at tp 2 and 3.9B at tp 4, on H200s); everything else was set before those runs.
H100 = Card(
    name="H100",
    memory_bytes=79.6e9,
    gemm_peak=743e12,
    gemm_rate=880e12,
    gemm_bandwidth=3.53e12,
    attention_rate=300e12,
    bandwidth=2.9e12,
    nvlink=340e9,
    collective_latency_s=55e-6,
    copy_engines=CopyEngines(rate=270e9, wait_s=22e-6),
    launch_s=0.3e-3,
    update_s=3e-3,
    hook_s=105e-6,
    precision_gain={"bf16": 1.0, "fp16": 1.0, "fp8": 1.35, "fp32": 0.075},
    measured=True,
)

CARDS = {
    "H100": H100,
    # Same chip with 4.8 TB/s instead of 3.35 (data sheets); thirteen runs were within 9% of that.
    "H200": replace(
        H100,
        name="H200",
        memory_bytes=141e9,
        bandwidth=H100.bandwidth * 4.8 / 3.35,
        gemm_bandwidth=H100.gemm_bandwidth * 4.8 / 3.35,
    ),
    # Data sheet: 312 TFLOP/s bf16 (H100: 989), 2.04 TB/s, NVLink 3 at two thirds, no fp8.
    "A100": Card(
        name="A100",
        memory_bytes=79.1e9,
        gemm_peak=0.85 * 312e12,
        gemm_rate=312e12,
        gemm_bandwidth=2.1e12,
        attention_rate=120e12,
        bandwidth=1.75e12,
        nvlink=230e9,
        collective_latency_s=55e-6,
        copy_engines=CopyEngines(rate=180e9, wait_s=22e-6),
        launch_s=0.3e-3,
        update_s=3e-3,
        hook_s=105e-6,
        precision_gain={"bf16": 1.0, "fp16": 1.0, "fp32": 0.06},
        measured=False,
    ),
    # Data sheet: 165 TFLOP/s bf16 with fp32 accumulation, 1.01 TB/s, PCIe 4 instead of NVLink.
    "RTX4090": Card(
        name="RTX4090",
        memory_bytes=24.0e9,
        gemm_peak=150e12,
        gemm_rate=165e12,
        gemm_bandwidth=1.0e12,
        attention_rate=80e12,
        bandwidth=0.87e12,
        nvlink=12e9,
        collective_latency_s=90e-6,
        copy_engines=None,
        launch_s=0.3e-3,
        update_s=3e-3,
        hook_s=105e-6,
        precision_gain={"bf16": 1.0, "fp16": 1.0, "fp32": 0.4},
        measured=False,
    ),
}

# NDR InfiniBand or 400 Gbit/s Ethernet: 400 Gbit/s a GPU, as in DGX H100 nodes.
NETWORK = Network(bandwidth=50e9, latency_s=75e-6, efficiency=0.8)


def find_card(name: str) -> Card:
    """The card called `name` in any case; raises UserError naming the known ones."""
    by_lower = {key.lower(): card for key, card in CARDS.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = get_close_matches(name.upper(), CARDS, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"--card {name} is not known", f"{hint}known: {', '.join(CARDS)}")
