import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster import plan
from cluster.planner.cards import CARDS, H100, NETWORK, find_card
from cluster.planner.layouts import (
    evaluate,
    gpus_for,
    memory_parts,
    quickest,
    recipe_layout,
    share_tokens,
)
from cluster.planner.measured import compare_all
from cluster.planner.step_time import Layout, all_reduce_s, matmul_s, update_time
from cluster.slurm.chain import checkpoint_bytes
from configs import UserError, load_recipe
from configs.memory import training_bytes
from configs.model import PRESETS, ModelConfig, parameter_count, resolve_model
from configs.schema import ParallelConfig, Recipe, ShardsConfig
from data_prep.tokenizer import load
from data_prep.vocab import make_vocab
from tests.data_prep.corpus import build, recipe_file, write_texts

LARGE = resolve_model(ModelConfig(preset="bert-large"), 30522)
FILLS = {"len128": 0.89, "len512": 0.85}


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text(
        "model: {preset: bert-large}\n"
        "shards: {len128: {max_length: 128}, len512: {max_length: 512}}\n"
        "phases:\n"
        "  - {name: p1, shards: len128, global_batch: 65536, steps: 7038}\n"
        "  - {name: p2, shards: len512, global_batch: 32768, steps: 1563}\n"
    )
    return load_recipe(path)


def test_measured_runs_are_predicted():
    """Memory within 10%, step time within 15%, for every run that the benches recorded."""
    comparisons = compare_all(plan.MEASURED)
    assert comparisons, "bench/results/measured.jsonl holds no run"
    assert [c.what for c in comparisons if not c.holds] == []


@pytest.mark.parametrize(
    ("m", "n", "k", "low", "high"),
    [
        (8192, 8192, 8192, 720e12, 745e12),  # the card's ceiling
        (32768, 1024, 1024, 490e12, 600e12),  # attention output of BERT-large, 32768 tokens
        (32768, 4096, 1024, 600e12, 721e12),
    ],
)
def test_matmul_rates_are_those_measured_on_an_h100(m, n, k, low, high):
    assert low <= 2 * m * n * k / matmul_s(m, n, k, H100, "bf16") <= high


def test_the_parts_are_the_whole(large):
    layout = Layout(1, 8, 1, 8192)
    result = evaluate(large, layout, H100, NETWORK, FILLS)
    assert result.phases[0].time.seconds == pytest.approx(sum(result.phases[0].time.parts.values()))
    assert result.memory_bytes == pytest.approx(sum(memory_parts(LARGE, layout).values()))
    # 2 bytes of weight and 4 of gradient stay whole; 12 bytes of state are shared out over 8.
    assert result.memory["weights"] == pytest.approx(0.67e9, rel=0.02)
    assert result.memory["moments"] == pytest.approx(8 * 337e6 / 8, rel=0.02)


def test_more_cards_are_quicker_but_not_more_efficient(large):
    hours = []
    for gpus in (8, 16, 64, 256):
        best = quickest(large, gpus, 8, H100, NETWORK, FILLS)
        assert best
        hours.append(best.hours * gpus)
    assert hours == sorted(hours)
    assert hours[-1] < 1.3 * hours[0]


def test_tensor_parallel_costs_what_its_collectives_cost():
    one = update_time(LARGE, Layout(1, 1, 0, 8192), H100, NETWORK, 32768, 128)
    two = update_time(LARGE, Layout(2, 1, 0, 8192), H100, NETWORK, 32768, 128)
    assert "tensor-parallel collectives" not in one.parts
    expected = 4 * 24 * 4 * all_reduce_s(2 * 8192 * 1024, 2, H100.nvlink, H100.collective_latency_s)
    assert two.parts["tensor-parallel collectives"] == pytest.approx(expected)
    assert one.seconds / 2 < two.seconds < one.seconds


def test_sequence_parallelism_shares_out_what_the_norms_keep():
    plain = Layout(2, 1, 0, 8192)
    shared = replace(plain, sequence_parallel=True)
    kept = [memory_parts(LARGE, layout)["activations"] for layout in (plain, shared)]
    # Of each layer four tensors of [T, H] bf16: the inputs of its halves and what its norms take.
    assert kept[0] - kept[1] == pytest.approx(24 * 4 * (1 - 1 / 2) * 8192 * 1024 * 2)
    # What is on its way lies in four slots of [T, H] beside the allocator's memory.
    outside = [memory_parts(LARGE, x)["context and allocator"] for x in (plain, shared)]
    slots = outside[1] - outside[0] + 0.1 * (kept[0] - kept[1])
    assert slots == pytest.approx(4 * 8192 * 1024 * 2)
    times = [
        update_time(LARGE, layout, H100, NETWORK, 32768, 128).parts for layout in (plain, shared)
    ]
    more = times[1]["tensor-parallel collectives"] - times[0]["tensor-parallel collectives"]
    assert more == pytest.approx(4 * 24 * 4 * H100.collective_latency_s)  # two for each sum


def test_copy_engines_cost_less_than_sums():
    layout = Layout(2, 1, 0, 16384)
    peers = share_tokens(layout, Recipe(), H100)
    key = "tensor-parallel collectives"
    sums, copies = (
        update_time(LARGE, each, H100, NETWORK, 16384, 128).parts[key] for each in (layout, peers)
    )
    assert 0 < copies < sums


def test_checkpointing_trades_time_for_memory():
    layout = Layout(1, 1, 0, 16384)
    less = replace(layout, activation_checkpointing=True)
    assert sum(memory_parts(LARGE, less).values()) < sum(memory_parts(LARGE, layout).values())
    assert (
        update_time(LARGE, less, H100, NETWORK, 65536, 128).seconds
        > update_time(LARGE, layout, H100, NETWORK, 65536, 128).seconds
    )


def test_a_model_that_is_too_large_is_spread_or_refused(large):
    large.model.preset = "megatron-8.3b"
    assert quickest(large, 1, 1, H100, NETWORK, FILLS) is None
    best = quickest(large, 8, 8, H100, NETWORK, FILLS)
    assert best is not None
    assert best.fits
    assert best.layout.tp > 1


def test_53_minutes_is_the_smallest_number_of_nodes_that_makes_it(large):
    enough = gpus_for(large, 53 / 60, 8, H100, NETWORK, FILLS)
    assert enough
    assert enough.hours <= 53 / 60
    fewer = quickest(large, enough.layout.gpus - 8, 8, H100, NETWORK, FILLS)
    assert fewer
    assert fewer.hours > 53 / 60
    assert gpus_for(large, 1 / 3600, 8, H100, NETWORK, FILLS) is None


def test_8_3b_on_512_gpus(large):
    large.model.preset = "megatron-8.3b"
    large.parallel.tp = 8
    layout = recipe_layout(large, 512, 8, H100)
    assert (layout.tp, layout.dp) == (8, 64)
    assert evaluate(large, layout, H100, NETWORK, FILLS).fits


def test_more_masks_cost_time_and_memory_where_they_meet_the_vocabulary(large):
    """Of a phase its own rate counts (phases.N.mask_probability), for memory the highest."""

    def planned():
        return evaluate(large, Layout(1, 8, 1, 8192), H100, NETWORK, FILLS)

    usual = planned()
    large.phases[1].mask_probability = 0.3
    more = planned()
    assert more.phases[0].time == usual.phases[0].time
    parts, before = (x.phases[1].time.parts for x in (more, usual))
    assert {name for name in parts if parts[name] != before[name]} == {"heads"}
    assert 1.5 < parts["heads"] / before["heads"] < 2
    assert more.memory["logits"] == pytest.approx(31 / 16 * usual.memory["logits"])
    assert more.memory["activations"] == usual.memory["activations"]
    large.masking.probability, large.phases[1].mask_probability = 0.3, 0.0
    both = planned()
    assert both.memory == more.memory
    assert [phase.time for phase in both.phases][1] == more.phases[1].time
    assert both.phases[0].time.seconds > usual.phases[0].time.seconds


def test_a_limit_of_time_bounds_the_hours_and_the_updates(large):
    """Of phases too that end at a share of it; the layout that gets further is still preferred."""
    layout = Layout(1, 64, 1, 8192)

    def planned():
        return evaluate(large, layout, H100, NETWORK, FILLS)

    whole = planned()
    one, two = (phase.hours for phase in whole.phases)
    assert whole.hours == whole.whole_hours
    large.train.max_minutes = 60 * (one + two) * 1.01
    assert planned() == whole

    large.train.max_minutes = 60 * (one + two / 2)
    half = planned()
    assert half.hours == pytest.approx(one + two / 2, rel=1e-3)
    assert half.hours <= one + two / 2 and half.whole_hours == whole.hours
    assert [phase.updates for phase in half.phases] == [7038, 781]
    assert half.updates == 7038 + 781 and half.tokens < whole.tokens

    large.train.max_minutes = 60 * one / 2
    assert [phase.updates for phase in planned().phases] == [7038 // 2, 0]
    large.phases[0].until = 0.5
    shared = planned()
    assert shared.phases[0].hours == pytest.approx(one / 4, rel=1e-3)
    assert shared.phases[1].hours == pytest.approx(min(two, one / 4), rel=1e-2)
    assert shared.hours <= one / 2

    quick = quickest(large, 64, 8, H100, NETWORK, FILLS)
    large.train.max_minutes, large.phases[0].until = 0, 0
    assert quick.layout == quickest(large, 64, 8, H100, NETWORK, FILLS).layout


@pytest.mark.parametrize("every, saves", [(0, 2), (200, 45), (7038, 2), (9000, 2), (1000, 10)])
def test_checkpoints_are_counted_as_they_are_written(capsys, tmp_path, every, saves):
    """At every so many updates of the run (7,038 and 1,563) and at a phase's end; one more is held."""
    options = [f"checkpoint.every={every}", "checkpoint.keep=3"]
    plan.main(["bert-large-64k", "--gpus", "8", f"work_dir={tmp_path}", *options])
    said = capsys.readouterr().out
    assert f"GB of disk, {saves} written" in said
    size = 12 * parameter_count(resolve_model(load_recipe("bert-large-64k").model, 30522)) / 1e9
    assert f"3 kept and one that is written = {4 * size:.1f} GB" in said


def test_what_ends_a_limited_training_is_said(capsys, tmp_path):
    def said(*more):
        plan.main(["bert-large-64k", "--gpus", "8", f"work_dir={tmp_path}", *more])
        return capsys.readouterr().out

    usual = said()
    assert "max_minutes" not in usual and "(7,038 updates, rows" in usual
    cut = said("train.max_minutes=30", "phases.0.until=0.5")
    updates = [line.split()[1] for line in cut.splitlines() if line.startswith("  updates ")]
    assert len(updates) == 2 and "(at most 7,038 updates, rows" in cut
    made = sum(int(number.replace(",", "")) for number in updates)
    start = f"train.max_minutes=30 leaves {made:,} of 8,601 updates ("
    (line,) = (line for line in cut.splitlines() if line.startswith(start))
    assert re.search(r"\((29:\d\d|30:00)\); all of them would take \d+:\d\d:\d\d$", line)
    assert "  hours                                     0.50" in cut
    assert re.search(
        r"finish bert-large-64k in 53 minutes: .* There train.max_minutes=30 leaves", cut
    )
    long = said("train.max_minutes=9999")
    assert re.search(
        r"^train.max_minutes=9999 is more than its 8,601 updates take: \d+:", long, re.M
    )
    assert "There train" not in long


def test_command_prints_its_table(repo, tmp_path):
    line = [sys.executable, "-m", "cluster", "plan", "demo", "--gpus", "4", f"work_dir={tmp_path}"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=repo, check=True)
    for word in ("moments", "matmuls", "GPU-hours", "tokens/s", "a checkpoint has", "53 minutes"):
        assert word in done.stdout


# What the planner has figures for.
PUBLISHED = [
    "optimizer.orthogonal_lr=0",
    "shards.len128.single_prob=0",
    "shards.len128.short_seq_prob=0.1",
]


def test_settings_that_are_not_predicted_are_said(capsys, tmp_path):
    def first_lines(*more):
        plan.main(["demo", *PUBLISHED, "--gpus", "4", f"work_dir={tmp_path}", *more])
        return capsys.readouterr().out.splitlines()[:3]

    usual = first_lines("train.kernels=auto", "train.compile=true")
    assert usual[2] == ""
    for slow in (["train.kernels=plain"], ["train.compile=false"]):
        *same, note = first_lines(*slow)
        assert same == usual[:2]
        assert note.startswith(f"{slow[0]} will be slower: ") and "fused kernels" in note
    both = first_lines("train.kernels=plain", "train.compile=false")[2]
    assert both.startswith("train.kernels=plain and train.compile=false will be slower")


ORTHOGONAL, SINGLE = "optimizer.orthogonal_lr=2", "shards.len128.objective=full-sentences"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([ORTHOGONAL], f"{ORTHOGONAL} will be slower and take more memory"),
        (["vocab.file=v.txt"], "vocab.file=v.txt is not made into .*: 8,192 tokens"),
        (["vocab.file=v.txt", "model.vocab_size=9000"], ""),
        ([SINGLE], "shards.len128 is not built yet: its rows .full-sentences. are planned"),
        ([SINGLE, "--fill", "0.99"], ""),
        (
            ["shards.len128.single_prob=0.75", "shards.len128.pair_max_length=32"],
            "shards.len128 is not built yet: its rows .single_prob 0.75, pair_max_length 32. are",
        ),
        (["shards.len128.short_seq_prob=0.5"], "shards.len128 .* .short_seq_prob 0.5. are"),
        (["shards.more={objective: single}"], ""),  # no phase reads it
    ],
)
def test_what_the_figures_do_not_hold_for_is_said(capsys, tmp_path, more, said):
    plan.main(["demo", *PUBLISHED, "--gpus", "4", f"work_dir={tmp_path}", *more])
    note = capsys.readouterr().out.splitlines()[2]
    assert re.match(said, note) if said else note == ""


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe", "byte-bpe"])
def test_the_vocabulary_is_the_one_that_is_made(capsys, tmp_path, kind):
    """vocab.size is what a training of it aims at, and nothing to a tokenizer from a file."""
    text = write_texts(tmp_path / "text", files=30)
    recipe = recipe_file(tmp_path, text, "model: {preset: bert-tiny}\n")
    recipe.write_text(recipe.read_text().replace("phases: []\n", ""))
    trained = [
        "vocab.file=",
        f"vocab.kind={kind}",
        f"vocab.size={60 if kind == 'unigram' else 300}",
    ]
    overrides = [] if kind == "wordpiece" else trained
    tokens = load(make_vocab(load_recipe(recipe, overrides))).vocab_size

    size = 12 * parameter_count(resolve_model(ModelConfig(preset="bert-tiny"), tokens))

    def right():
        capsys.readouterr()
        plan.main([str(recipe), "--gpus", "1", *overrides])
        said = capsys.readouterr().out
        planned = checkpoint_bytes(load_recipe(recipe, overrides))
        return f", vocabulary {tokens})\n" in said and "is not made" not in said and planned == size

    assert right()
    build(recipe, *overrides)
    shutil.rmtree(tmp_path / "run" / "vocab")
    assert right()


@settings(max_examples=100, deadline=None)
@given(
    preset=st.sampled_from(list(PRESETS)),
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 8, 64]),
    zero=st.sampled_from([0, 1, 2]),
    again=st.booleans(),
    card=st.sampled_from(list(CARDS.values())),
    precision=st.sampled_from(["bf16", "fp32"]),
)
def test_micro_batches_of_the_largest_size_are_the_trainers(
    preset, tp, dp, zero, again, card, precision
):
    recipe = Recipe(shards={"len128": ShardsConfig()})
    recipe.model.preset, recipe.train.precision = preset, precision
    recipe.parallel = ParallelConfig(tp, zero, micro_batch_tokens=0, activation_checkpointing=again)
    model = resolve_model(recipe.model, recipe.vocab.size)
    assume(model.num_heads % tp == 0)
    tokens = recipe_layout(recipe, tp * dp, 8, card).micro_batch_tokens
    need = [
        training_bytes(model, recipe.parallel, dp, precision, n, recipe.masking.probability)
        for n in (tokens, tokens + 128)
    ]
    assert tokens % 128 == 0 and 128 <= tokens <= 65536
    assert need[0] <= card.memory_bytes or tokens == 128  # one row: the trainer refuses it
    assert need[1] > card.memory_bytes or tokens == 65536


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpus", "4", "--card", "H10"], "did you mean H100"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "3", "parallel.tp=2"], "--gpus 3"),
        (["--gpus", "4", "parallel.tp=4"], "2 heads"),
        (["--gpus", "4", "--card", "A100", "train.precision=fp8"], "fp8"),
        (["--gpus", "4", "paralel.tp=2"], "did you mean parallel"),
        (["--gpus", "4", "phases=[]"], "phases is empty"),
    ],
)
def test_bad_input(arguments, named):
    with pytest.raises(UserError) as caught:
        plan.main(["demo", *arguments])
    assert named in str(caught.value)


def test_a_broken_measured_file_is_named(tmp_path):
    path = tmp_path / "measured.jsonl"
    assert compare_all(path) == []
    path.write_text('{"model": "bert-large", "card": "H100"}\n')
    with pytest.raises(UserError, match="measured.jsonl:1.*gpus"):
        compare_all(path)


def test_cards_are_found_in_any_case():
    assert find_card("h100") is H100
