"""What was tried for the five-minute BERT and for its rival: every run by its name.

Ours are overrides of the recipe, the rival's are options of bench.five_minute_rival. What came of
them is in bench/RESULTS.md; `python -m bench.five_minute --runs NAME,NAME` does any of them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs import UserError

SIDES = ("ours", "rival")

_BF16 = "train.precision=bf16"  # all runs of ours before the recipe took fp8
# The short tries, with their whole schedule each (bench/RESULTS.md says what came of
# them). They were made before the recipe had its shape, rows and start; `base` and `small` set
# what they had.
_THEN = [
    _BF16,
    "model.nsp_head=false",
    "train.unigram_bias=false",
    "train.sinusoidal_positions=false",
    "phases.0.shards=rows",
    "phases.0.global_batch=256",
    "optimizer.weight_decay=0.1",
    "optimizer.eps=1e-6",
]
_SMALL = [*_THEN, "model.preset=bert-medium", "model.num_layers=12"]
_BASE = [*_THEN, "model.preset=bert-base", "model.num_layers=12"]
TRIES: dict[str, dict[str, list[str]]] = {
    "ours": {
        "base-lr-5e-3": [*_BASE, "phases.0.schedule.lr=0.005"],
        "base-lr-1e-2": [*_BASE, "phases.0.schedule.lr=0.01"],
        "small-lr-1e-2": [*_SMALL, "phases.0.schedule.lr=0.01"],
        "small-lr-2e-2": [*_SMALL, "phases.0.schedule.lr=0.02"],
    },
    "rival": {
        "base-lr-5e-4": ["--shape=768x12", "--lr=5e-4", "--batch=256"],
        "base-lr-5e-4-batch-128": ["--shape=768x12", "--lr=5e-4", "--batch=128", "--dropout=0"],
        "small-lr-1e-3": ["--shape=512x12", "--lr=1e-3", "--batch=256", "--dropout=0"],
        "small-lr-1e-3-batch-128": ["--shape=512x12", "--lr=1e-3", "--batch=128", "--dropout=0"],
    },
}
# Later tries, of one minute to five (bench/RESULTS.md says which): what pairs cost, other rows,
# other shapes and rates of the rival. long: nearly full rows after the first 5,000 updates.
_SCHEDULE = "schedule: {kind: linear, lr: 4.0e-3, warmup: 0.06}"
_LONG = [
    "shards.long={max_length: 128, objective: nsp, single_prob: 0.75, short_seq_prob: 0.1, "
    "mask_cap: 64, dupe_factor: 4}",
    f"phases=[{{name: short, shards: mixed, global_batch: 384, steps: 5000, {_SCHEDULE}}}, "
    f"{{name: long, shards: long, global_batch: 256, steps: 20000, {_SCHEDULE}}}]",
]
_DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
_UNADAPTED = "optimizer.adapt_bias_and_norm=false"
TRIES_LATER: dict[str, dict[str, list[str]]] = {
    "ours": {
        "pairs-only": [_BF16, "shards.mixed.single_prob=0"],
        "single-only": [
            _BF16,
            "shards.mixed.objective=doc-sentences",
            "shards.mixed.single_prob=0",
            "model.nsp_head=false",
        ],
        "long-dropout": [_BF16, *_LONG, *_DROPOUT],
        "long-mask-0.3": [_BF16, *_LONG, "masking.probability=0.3"],
    },
    "rival": {
        "512x8-lr-5e-4": ["--shape=512x8", "--lr=5e-4", "--batch=256", "--dropout=0"],
        "768x6-lr-3e-4": ["--shape=768x6", "--lr=3e-4", "--batch=256", "--dropout=0"],
        "512x8-lr-7e-4": ["--shape=512x8", "--lr=7e-4", "--batch=128", "--dropout=0"],
        "512x6-lr-5e-4": ["--shape=512x6", "--lr=5e-4", "--batch=256", "--dropout=0"],
        "512x6-lr-7e-4": ["--shape=512x6", "--lr=7e-4", "--batch=256", "--dropout=0"],
        "512x6-lr-1.4e-3": ["--shape=512x6", "--lr=1.4e-3", "--batch=256", "--dropout=0"],
        "512x5-lr-7e-4": ["--shape=512x5", "--lr=7e-4", "--batch=256", "--dropout=0"],
        "768x4-lr-7e-4": ["--shape=768x4", "--lr=7e-4", "--batch=256", "--dropout=0"],
        "768x4-lr-1e-3": ["--shape=768x4", "--lr=1e-3", "--batch=256", "--dropout=0"],
        "640x5-lr-1e-3": ["--shape=640x5", "--lr=1e-3", "--batch=256", "--dropout=0"],
    },
}
_CROPS = "shards.mixed.dupe_factor=16"
_MORE_SHORT = "shards.mixed.short_seq_prob=0.75"
_FEWER_PAIRS = ["shards.mixed.single_prob=0.88", _MORE_SHORT]


def _shape(hidden_size: int, num_layers: int) -> list[str]:
    return [
        f"model.hidden_size={hidden_size}",
        f"model.num_layers={num_layers}",
        f"model.num_heads={hidden_size // 64}",
        f"model.intermediate_size={4 * hidden_size}",
    ]


def _falling_masks(end: str, first: str = "mixed", then: str = "mixed", rows: int = 384) -> str:
    """Masks of 0.3 until `end` (steps or until), then of 0.15 (2305.15096 lets the rate fall)."""
    return (
        f"phases=[{{name: more, shards: {first}, global_batch: 384, mask_probability: 0.3, {end}, "
        f"{_SCHEDULE}}}, {{name: fewer, shards: {then}, global_batch: {rows}, "
        f"mask_probability: 0.15, steps: 30000, {_SCHEDULE}}}]"
    )


def _set(name: str, single_prob: float, short_seq_prob: float) -> str:
    """One more set of 16 crops."""
    return (
        f"shards.{name}={{max_length: 128, objective: nsp, single_prob: {single_prob}, "
        f"short_seq_prob: {short_seq_prob}, mask_cap: 64, dupe_factor: 16}}"
    )


_WIDE = [_CROPS, *_shape(1024, 4)]
_LIGHT_DROPOUT = ["model.hidden_dropout=0.05", "model.attention_dropout=0.05"]
_LATE_PAIRS = [
    *(*_WIDE, _MORE_SHORT, _set("few", 0.97, 0.75)),
    _falling_masks("steps: 30000, until: 0.66", first="few"),
]


def _orthogonal(times: float, beta1: float = 0.9) -> list[str]:
    """LAMB with the encoder's matrices orthogonalised, on late pairs."""
    momentum = [] if beta1 == 0.9 else [f"optimizer.beta1={beta1}"]
    return [*_LATE_PAIRS, f"optimizer.orthogonal_lr={times:g}", *momentum]


def _short_pairs(share: float, longest: int) -> list[str]:
    """Of `share` of the documents, in rows of at most `longest` tokens."""
    return [
        f"shards.mixed.single_prob={1 - share:g}",
        f"shards.mixed.pair_max_length={longest}",
    ]


def _with(options: list[str], *changes: tuple[str, str]) -> list[str]:
    """The options with parts of them replaced."""
    for old, new in changes:
        options = [option.replace(old, new) for option in options]
    return options


# Orthogonalised at a lower rate, pairs from 12% of the documents all the time.
_ORTHOGONAL_EVEN = [
    *(*_WIDE, *_FEWER_PAIRS, "optimizer.orthogonal_lr=1.4"),
    _falling_masks("steps: 30000, until: 0.66"),
]
_LARGER_BATCH = (("global_batch: 384", "global_batch: 576"), ("lr: 4.0e-3", "lr: 4.9e-3"))
# At 768x6, with masks of 0.2 at the end.
_DEEP = [
    *_with(_ORTHOGONAL_EVEN, *_LARGER_BATCH, ("mask_probability: 0.15", "mask_probability: 0.2")),
    *_shape(768, 6),
]


# Changes of the recipe as it was in bf16, one each, in the whole time; then, all in fp8, two rates in
# 160 s, and changes that were added up, in 103 s, 160 s or the whole time (bench/RESULTS.md says which).
# None was taken over but fp8, for its speed.
ABLATIONS: dict[str, list[str]] = {
    "bf16": [_BF16],
    "bf16-dropout": [_BF16, *_DROPOUT],
    "bf16-decay-0.3": [_BF16, "optimizer.weight_decay=0.3"],
    "bf16-lr-2.5e-3": [_BF16, "phases.0.schedule.lr=2.5e-3"],
    "bf16-unadapted-lr-3e-3": [_BF16, _UNADAPTED, "phases.0.schedule.lr=3e-3"],
    "bf16-unadapted-lr-6e-3": [_BF16, _UNADAPTED, "phases.0.schedule.lr=6e-3"],
    "bf16-unadapted-lr-1e-2": [_BF16, _UNADAPTED, "phases.0.schedule.lr=1e-2"],
    "lr-5.5e-3": ["phases.0.schedule.lr=5.5e-3"],
    "lr-7.5e-3": ["phases.0.schedule.lr=7.5e-3"],
    "crops-16": [_CROPS],
    "1024x4": _WIDE,
    "1280x4": [_CROPS, *_shape(1280, 4)],
    "1024x4-falling-masks": [*_WIDE, _falling_masks("steps: 7000")],
    "1024x4-fewer-pairs-160s": [*_WIDE, _falling_masks("steps: 7000"), *_FEWER_PAIRS],
    "1024x4-fewer-pairs": [*_WIDE, _falling_masks("steps: 15500"), *_FEWER_PAIRS],
    "1024x4-long-rows": [
        *(*_WIDE, _MORE_SHORT, _set("long", 0.75, 0.1)),
        _falling_masks("steps: 12000", then="long", rows=256),
    ],
    "1024x4-late-pairs": _LATE_PAIRS,
    "1024x4-late-pairs-dropout": [*_LATE_PAIRS, *_LIGHT_DROPOUT],
    "1024x4-early-pairs": [
        *(*_WIDE, _MORE_SHORT, _set("few", 0.97, 0.75)),
        _falling_masks("steps: 30000, until: 0.66", then="few"),
        "train.nsp_weight=0.3",
        *_LIGHT_DROPOUT,
    ],
    "1024x4-light-pairs": [
        *(*_WIDE, _MORE_SHORT),
        _falling_masks("steps: 30000, until: 0.66"),
        "train.nsp_weight=0.1",
        *_LIGHT_DROPOUT,
    ],
    "1024x4-late-pairs-103s": _LATE_PAIRS,
    "1024x4-orthogonal-1": _orthogonal(1),
    "1024x4-orthogonal-2": _orthogonal(2),
    "1024x4-orthogonal-4": _orthogonal(4),
    "1024x4-orthogonal-2-momentum-0.95": _orthogonal(2, 0.95),
    "768x6-orthogonal-2-momentum-0.95": [*_orthogonal(2, 0.95), *_shape(768, 6)],
    "1024x4-orthogonal-2.3-momentum-0.95-batch-576": _with(
        _orthogonal(2.3, 0.95), _LARGER_BATCH[0]
    ),
    "1024x4-orthogonal-1.9-dropout": [*_orthogonal(1.9), *_LIGHT_DROPOUT],
    "1024x4-orthogonal-1.4": _ORTHOGONAL_EVEN,
    "1024x4-orthogonal-1.4-dropout-0.1": [*_ORTHOGONAL_EVEN, *_DROPOUT],
    "1024x4-orthogonal-1.4-batch-576": _with(_ORTHOGONAL_EVEN, *_LARGER_BATCH),
    "768x6-orthogonal-1.4-batch-576": _DEEP,
    "768x6-short-pairs-dropout": [*_DEEP, *_short_pairs(0.15, 48), *_LIGHT_DROPOUT],
    "768x6-short-pairs": [*_DEEP, *_short_pairs(0.15, 48)],
    "768x6-fewer-short-pairs-batch-640": [
        *_with(_DEEP, ("global_batch: 576", "global_batch: 640")),
        *_short_pairs(0.08, 64),
    ],
}
# The runs of the full time: the recipe, and the rival's settings with the best held-out loss and BLiMP.
FINALS: dict[str, dict[str, list[str]]] = {
    "ours": {"ours-768x6": []},
    "rival": {
        "rival-512x6": ["--shape=512x6", "--lr=1e-3", "--batch=256", "--dropout=0"],
    },
}


def named(names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The runs of these names, of each side that has any.

    Raises:
        UserError: a name that is not there, or none.
    """
    known = {
        "ours": TRIES["ours"] | TRIES_LATER["ours"] | ABLATIONS | FINALS["ours"],
        "rival": TRIES["rival"] | TRIES_LATER["rival"] | FINALS["rival"],
    }
    runs: dict[str, dict[str, list[str]]] = {}
    for name in filter(None, (name.strip() for name in names)):
        side = next((side for side in SIDES if name in known[side]), "")
        if not side:
            every = ", ".join([*known["ours"], *known["rival"]])
            raise UserError(f"--runs {name} is not known", f"known: {every}")
        runs.setdefault(side, {})[name] = known[side][name]
    if not runs:
        raise UserError(
            "--runs names no run", "leave it out for FINALS of bench/five_minute_tries.py"
        )
    return runs
