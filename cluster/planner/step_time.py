"""How long an update takes, kernel group by kernel group.

A matmul costs its arithmetic plus the traffic of its operands, never less than the peak allows;
everything else costs its bytes. Collectives cost their bytes over the bus plus a latency. What
overlaps (gradients are reduced while the last backward pass runs) is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.planner.cards import Card, Network
from configs.memory import parameters_per_rank
from configs.model import ModelConfig, padded_vocab

MASKED = 0.15  # of the tokens, where nothing is said


@dataclass(frozen=True)
class Layout:
    """How a run is spread. micro_batch_tokens: packed tokens of one forward pass on one rank."""

    tp: int
    dp: int
    zero_stage: int
    micro_batch_tokens: int
    activation_checkpointing: bool = False
    gpus_per_node: int = 8
    precision: str = "bf16"
    sequence_parallel: bool = False  # tokens are shared out between products
    engine: str = "lean"  # lean | deepspeed, as parallel.engine
    peers: bool = False  # and exchanged by copy engines (pretrain.parallel.peers)

    @property
    def gpus(self) -> int:
        return self.tp * self.dp


@dataclass
class StepTime:
    """Seconds of one update; `parts` adds up to `seconds`."""

    parts: dict[str, float] = field(default_factory=dict)
    micro_batches: int = 1

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def matmul_s(m: float, n: float, k: float, card: Card, precision: str) -> float:
    """[m, k] x [k, n] with 2-byte operands."""
    gain = card.precision_gain.get(precision, 1.0)
    flops, traffic = 2 * m * n * k, 2 * (m * k + k * n + m * n)
    return max(
        flops / (card.gemm_rate * gain) + traffic / card.gemm_bandwidth,
        flops / (card.gemm_peak * gain),
    )


def all_reduce_s(size: float, ranks: int, bus: float, latency_s: float) -> float:
    """A ring all-reduce of `size` bytes; a reduce-scatter or an all-gather takes half."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * size / bus + latency_s


def data_parallel_bus(layout: Layout, card: Card, network: Network) -> float:
    """Bytes/s of a collective over the data-parallel group: NVLink inside a node, else adapters.

    tp groups share a node's adapters, one ring each.
    """
    if layout.gpus <= layout.gpus_per_node:
        return card.nvlink
    adapters = network.bandwidth * network.efficiency * layout.gpus_per_node / layout.tp
    return min(card.nvlink, adapters)


def update_time(
    config: ModelConfig,
    layout: Layout,
    card: Card,
    network: Network,
    tokens: float,
    length: float,
    masked: float = MASKED,
) -> StepTime:
    """One update of `tokens` real tokens over all ranks, a share `masked` of them masked, in rows of
    `length` real tokens."""
    own = tokens / layout.dp
    micros = max(1, -(-int(own) // layout.micro_batch_tokens))
    micro = own / micros
    forward, backward = _micro_parts(config, layout, card, micro, length, micro * masked)
    again = 1 if layout.activation_checkpointing else 0
    parts = {name: micros * ((1 + again) * forward[name] + backward[name]) for name in forward}
    n = parameters_per_rank(config, layout.tp)
    # Each micro-batch adds its 2-byte gradients to the fp32 sums.
    parts["gradient sums"] = micros * n * 12 / card.bandwidth
    parts["host"] = micros * card.launch_s + card.update_s
    if layout.engine == "deepspeed":  # its hooks run in Python, for each tensor
        parts["DeepSpeed's hooks"] = micros * tensors(config) * card.hook_s
    shards = layout.dp if layout.zero_stage else 1
    parts["optimizer"] = 42 * n / shards / card.bandwidth
    last_backward = sum(backward.values())
    parts["gradient reduction"], parts["weight gathering"] = _data_parallel(
        n, layout, card, network, last_backward
    )
    return StepTime({name: s for name, s in parts.items() if s > 0}, micros)


def tensors(config: ModelConfig) -> int:
    """Parameter tensors of the model: 12 a layer (query, key and value are one), 9 elsewhere."""
    return 12 * config.num_layers + 9 + 4 * config.nsp_head


def _data_parallel(
    n: float, layout: Layout, card: Card, network: Network, hidden_behind_s: float
) -> tuple[float, float]:
    """What is not hidden of reducing fp32 gradients, and the gathering of updated weights."""
    if layout.dp == 1:
        return 0.0, 0.0
    bus = data_parallel_bus(layout, card, network)
    latency = card.collective_latency_s if bus == card.nvlink else network.latency_s
    buckets = max(1, n // 25_000_000)
    whole = all_reduce_s(4 * n, layout.dp, bus, buckets * latency)
    reduce = whole / 2 if layout.zero_stage else whole
    size = 4 if layout.precision == "fp32" else 2
    gather = (
        all_reduce_s(size * n, layout.dp, bus, buckets * latency) / 2 if layout.zero_stage else 0.0
    )
    # The first bucket is ready, and the last one still to go, at the ends of the backward pass.
    exposed = max(reduce - 0.8 * hidden_behind_s, reduce / buckets)
    return exposed, gather


def _micro_parts(
    c: ModelConfig, layout: Layout, card: Card, t: float, length: float, masked: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Forward and backward seconds of one micro-batch of `t` tokens, `masked` of them masked, by
    kernel group."""
    h, i, tp, layers, precision = (
        c.hidden_size,
        c.intermediate_size,
        layout.tp,
        c.num_layers,
        layout.precision,
    )
    size = 4 if precision == "fp32" else 2

    def mm(m: float, n: float, k: float) -> float:
        return matmul_s(m, n, k, card, precision)

    shapes = [(3 * h / tp, h), (h, h / tp), (i / tp, h), (h, i / tp)]
    linear = [(mm(t, n, k), mm(t, k, n), mm(n, k, t)) for n, k in shapes]
    products = layers * sum(forward for forward, _, _ in linear)
    grads = layers * sum(dgrad + wgrad for _, dgrad, wgrad in linear)
    # Queries times keys, probabilities times values; the backward pass computes 2.5 times that.
    scores = (
        layers
        * 4
        * t
        * length
        * h
        / tp
        / (
            card.attention_rate
            * card.precision_gain.get("fp32" if precision == "fp32" else "bf16", 1)
        )
    )
    qkv = layers * size * t * h / tp / card.bandwidth
    rows = t / (tp if layout.sequence_parallel else 1)
    norm = layers * 2 * size * rows * h / card.bandwidth
    gelu = layers * size * t * i / tp / card.bandwidth
    vocab = padded_vocab(c, tp) / tp
    head = mm(masked, vocab, h) + mm(masked, h, h) + 2 * size * masked * vocab / card.bandwidth
    head_back = mm(masked, h, vocab) + mm(vocab, h, masked) + 2 * mm(masked, h, h)
    head_back += 2 * size * masked * vocab / card.bandwidth
    embed = 5 * size * t * h / card.bandwidth
    if layout.peers and card.copy_engines:
        sent = size * t * h * (tp - 1) / tp
        seen = exchanges_s(linear, sent / card.copy_engines.rate, card.copy_engines.wait_s)
        reduce, reduce_back = (layers * seconds for seconds in seen)
    else:
        # With sequence parallelism a sum is two collectives, and residuals' gradients are added apart.
        # A column layer's second gathering of its input runs beside a product.
        waits = (2 if layout.sequence_parallel else 1) * card.collective_latency_s
        reduce = reduce_back = layers * 2 * all_reduce_s(size * t * h, tp, card.nvlink, waits)
    residuals = layers * 6 * size * rows * h / card.bandwidth if layout.sequence_parallel else 0.0
    forward = {
        "matmuls": products,
        "attention": scores + 4 * qkv,
        "elementwise": 4 * norm + 2 * gelu,
        "heads": head,
        "embeddings": embed,
        "tensor-parallel collectives": reduce,
    }
    backward = {
        "matmuls": grads,
        "attention": 2.5 * scores + 8 * qkv,
        "elementwise": 5 * norm + 3 * gelu + residuals,
        "heads": head_back,
        "embeddings": 2 * embed,
        "tensor-parallel collectives": reduce_back,
    }
    return forward, backward


def exchanges_s(
    linear: list[tuple[float, float, float]], link: float, wait: float
) -> tuple[float, float]:
    """What a layer shows of its exchanges by copy engines, forward and backward, in seconds.

    linear: seconds of the products (forward, for the input's gradient, for the weight's), column and
    row layers in turn. link: what the bytes of one exchange take; wait: what it takes beside them. Half
    of a product needs nothing that is still under way, or is left when the others' part has gone. Every
    layer makes one exchange each way, but a column layer going back two, beside both of its products
    (pretrain.kernels.exchanged).
    """
    forward = backward = 0.0
    for number, (product, dgrad, wgrad) in enumerate(linear):
        made, beside = (2, dgrad / 2 + wgrad) if number % 2 == 0 else (1, dgrad / 2)
        forward += wait + max(0.0, link - product / 2)
        backward += made * wait + max(0.0, made * link - beside)
    return forward, backward
