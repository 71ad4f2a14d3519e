"""`python -m pretrain evaluate` on runs and HF folders."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel

from configs import UserError
from configs.schema import MaskingConfig
from data_prep.shards import held_out
from pretrain.convert.export import export
from pretrain.convert.importing import import_model
from pretrain.evaluate import evaluate, main
from pretrain.evaluation import Evaluator
from tests.downstream.test_blimp import blimp_file
from tests.downstream.test_loading import copy_with
from tests.synthetic import make_shards


@pytest.fixture
def shards(tmp_path: Path, tiny_model: Path) -> Path:
    size = len(json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"])
    folder = make_shards(
        tmp_path / "shards", rows=40, max_length=48, vocab_size=size, held_out_rows=24
    )
    shutil.copyfile(tiny_model / "tokenizer.json", folder / "tokenizer.json")
    return folder


def test_run_and_hf_folder_score_alike(
    tmp_path: Path, tiny_model: Path, shards: Path, capsys
) -> None:
    run = import_model(tiny_model, tmp_path / "run")
    rows = held_out(shards)
    scores = [evaluate(path, rows) for path in (run, tiny_model)]
    assert scores[0] == scores[1]
    assert (
        scores[0]["rows"] == 24
        and scores[0]["mlm_loss"] > 0
        and 0 <= scores[0]["nsp_accuracy"] <= 1
    )
    blimp = blimp_file(tmp_path)
    command = [
        str(run),
        "--shards",
        str(shards),
        "--blimp",
        str(blimp),
        "--sample",
        "0.5",
        "--json",
    ]
    assert main(command) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["mlm_loss"] == scores[0]["mlm_loss"] and last["blimp_pairs"] == 30
    assert last["pseudo_perplexity"] != last["mlm_perplexity"] and last["blimp_seconds"] > 0


def test_heads_that_an_import_drew_at_random_are_not_scored(
    tmp_path: Path, tiny_model: Path, shards: Path
) -> None:
    """A run has every head; what its source lacked is noise until it is trained."""
    rows = held_out(shards)
    for lacking, folder in (("cls.", "bare"), ("cls.seq_relationship.", "no-nsp")):
        model = copy_with(
            tiny_model,
            tmp_path / folder,
            lambda t, lacking=lacking: {k: v for k, v in t.items() if not k.startswith(lacking)},
        )
        run = import_model(model, tmp_path / f"{folder}-run")
        card = (export(run, tmp_path / f"{folder}-hf") / "README.md").read_text()
        assert "at random and not trained: cls.seq_relationship.weight" in card
        if folder == "bare":
            with pytest.raises(UserError, match="masked-LM head is drawn at random"):
                evaluate(run, rows)
        else:
            assert evaluate(run, rows) == evaluate(model, rows)
            assert "nsp_loss" not in evaluate(run, rows)


def test_held_out_scores_equal_transformers(tiny_model: Path, shards: Path) -> None:
    """The mean loss by transformers, row after row, over the same masked rows."""
    import torch
    from transformers import BertForPreTraining

    from configs.schema import MaskingConfig
    from pretrain.evaluation import Evaluator

    rows = held_out(shards)
    model = BertForPreTraining.from_pretrained(tiny_model).eval()
    loss, count = 0.0, 0
    for micro in Evaluator(rows, MaskingConfig()).batches():
        starts = micro.cu_seqlens.tolist()
        for a, b in zip(starts, starts[1:]):
            here = (
                (micro.masked_positions >= a)
                & (micro.masked_positions < b)
                & (micro.masked_weights > 0)
            )
            if not here.any():
                continue
            with torch.no_grad():
                logits = model(
                    micro.input_ids[None, a:b], token_type_ids=micro.token_type_ids[None, a:b]
                ).prediction_logits[0]
            picked = logits[micro.masked_positions[here] - a]
            loss += torch.nn.functional.cross_entropy(
                picked, micro.masked_labels[here], reduction="sum"
            ).item()
            count += int(here.sum())
    ours = evaluate(tiny_model, rows)
    assert ours["masked"] == count
    assert ours["mlm_loss"] == pytest.approx(loss / count, abs=1e-5)


def test_pseudo_perplexity_is_the_definition(tiny_model: Path, shards: Path) -> None:
    """By transformers, one forward pass a token: of the rows that were chosen, all tokens but [CLS]
    and [SEP], token types as in the rows."""
    import torch
    from transformers import BertForPreTraining

    from pretrain.data.order import RowOrder

    held = held_out(shards)
    reference = BertForPreTraining.from_pretrained(tiny_model).eval()
    total, count = 0.0, 0
    special = (held.special_ids["cls"], held.special_ids["sep"])
    for row in RowOrder(held.num_rows, 0).rows(0, 3)[1]:
        read = held.rows(np.array([row]))
        ids = torch.from_numpy(read.tokens.astype(np.int64))
        types = (torch.arange(len(ids)) >= int(read.segment_b[0])).long() * int(
            read.segment_b[0] > 0
        )
        assert types.any()  # pairs, so that their types matter
        for place in (i for i, token in enumerate(ids.tolist()) if token not in special):
            masked = ids.clone()
            masked[place] = held.special_ids["mask"]
            with torch.no_grad():
                logits = reference(masked[None], token_type_ids=types[None]).prediction_logits
            total += torch.log_softmax(logits[0, place].double(), -1)[ids[place]].item()
            count += 1
    ours = evaluate(tiny_model, held, pseudo_rows=3)
    assert ours["pseudo_tokens"] == count
    assert ours["pseudo_perplexity"] == pytest.approx(np.exp(-total / count), rel=1e-4)
    assert "pseudo_perplexity" not in evaluate(tiny_model, held)


def test_shards_of_another_tokenizer_are_refused(
    tmp_path: Path, tiny_model: Path, shards: Path
) -> None:
    text = (shards / "tokenizer.json").read_text()
    (shards / "tokenizer.json").write_text(text.replace('"film"', '"movie"'))
    with pytest.raises(UserError, match="made with another tokenizer"):
        evaluate(tiny_model, held_out(shards))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("probability", ["0.15", "0.5"])
def test_a_masking_rate_that_the_shards_do_not_give_is_told(
    tmp_path: Path, tiny_model: Path, capsys, static: bool, probability: str
) -> None:
    """Rows of 48 tokens keep 8 predictions at most; static masks are those of the build."""
    size = len(json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"])
    folder = make_shards(
        tmp_path / "s", rows=8, max_length=48, vocab_size=size, held_out_rows=8, static_masks=static
    )
    shutil.copyfile(tiny_model / "tokenizer.json", folder / "tokenizer.json")
    main(
        [str(tiny_model), "--shards", str(folder), "--pseudo-rows=0", "--probability", probability]
    )
    said = capsys.readouterr().out
    assert ("static masks" in said) == static
    assert ("16.7% of a full row of 48 tokens" in said) == (probability == "0.5" and not static)


def test_a_folder_from_before_tokenizer_json_is_scored(
    tmp_path: Path, tiny_model: Path, shards: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(tiny_model, old)
    (old / "tokenizer.json").unlink()
    wanted = evaluate(tiny_model, held_out(shards), rows=4)
    assert evaluate(old, held_out(shards), rows=4) == wanted
    words = (old / "vocab.txt").read_text().replace("film\n", "movie\n")
    (old / "vocab.txt").write_text(words)
    with pytest.raises(UserError, match="made with another tokenizer"):
        evaluate(old, held_out(shards))


def test_rows_that_are_not_held_out_are_said_to_be(
    tiny_model: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tiny_model), "--rows", "4", "--pseudo-rows", "0", "--shards"]
    for folder in (shards, shards / "held-out"):
        assert main([*command, str(folder)]) == 0
        assert "note" not in capsys.readouterr().out
    shutil.rmtree(shards / "held-out")
    main([*command, str(shards)])
    assert "has no held-out/: all its rows are scored" in capsys.readouterr().out


def test_texts_longer_than_the_models_positions_are_refused(
    tmp_path: Path, tiny_model: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"])
    folder = make_shards(
        tmp_path / "long", rows=40, max_length=256, vocab_size=size, held_out_rows=24
    )
    shutil.copyfile(tiny_model / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(UserError, match=r"rows of up to \d+ tokens, .* has 128 positions"):
        evaluate(tiny_model, held_out(folder))
    table = pq.read_table(blimp_file(tmp_path))
    long = pa.array(["the cat sat " * 50] + ["the cat"] * (len(table) - 1))
    at = table.column_names.index("sentence_bad")
    pq.write_table(table.set_column(at, "sentence_bad", long), tmp_path / "long.parquet")
    (tmp_path / "no.parquet").write_text("no")
    # Before the held-out rows are scored.
    monkeypatch.setattr("pretrain.evaluate._held_out_scores", None)
    for name, said in (
        ("long", "a sentence of 152 word pieces, the model has 128 positions"),
        ("no", ""),
    ):
        file = tmp_path / f"{name}.parquet"
        with pytest.raises(UserError, match=f"^{file}: {said}"):
            evaluate(tiny_model, held_out(shards), blimp=str(file))


@pytest.mark.parametrize("types", [1, 2])
@pytest.mark.parametrize("pairs", [False, True])
def test_pairs_are_refused_where_the_model_has_one_token_type(
    tmp_path: Path, tiny_model: Path, types: int, pairs: bool
) -> None:
    """They ended in an IndexError."""
    from transformers import BertConfig, BertForPreTraining

    shutil.copytree(tiny_model, tmp_path / "hf")
    config = BertConfig.from_pretrained(tiny_model, type_vocab_size=types)
    BertForPreTraining(config).save_pretrained(tmp_path / "hf")
    folder = make_shards(
        tmp_path / "s", rows=8, max_length=32, vocab_size=config.vocab_size, pairs=pairs
    )
    shutil.copyfile(tiny_model / "tokenizer.json", folder / "tokenizer.json")
    if pairs and types == 1:
        with pytest.raises(UserError, match="rows of two segments, .*hf has one token type"):
            evaluate(tmp_path / "hf", held_out(folder))
    else:
        assert evaluate(tmp_path / "hf", held_out(folder), pseudo_rows=1)["mlm_loss"] > 0


def test_a_model_that_computes_nan_has_no_scores(
    tmp_path: Path, tiny_model: Path, shards: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model, tmp_path / "hf")
    tensors = load_file(tiny_model / "model.safetensors")
    tensors["bert.encoder.layer.1.output.dense.weight"].fill_(3e38)
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    for options in ({"held_out": held_out(shards)}, {"blimp": str(blimp_file(tmp_path))}):
        with pytest.raises(UserError, match="logits are not finite"):
            evaluate(tmp_path / "hf", **options)


def test_a_gpu_that_is_not_there(tiny_model: Path, shards: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch finds no GPU"):
        evaluate(tiny_model, held_out(shards), device="cuda")


def test_early_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to evaluate on"):
        main(["x"])
    with pytest.raises(UserError, match="--sample 2.0"):
        main(["x", "--blimp", "b", "--sample", "2"])
    with pytest.raises(UserError, match="no such file"):
        main(["x", "--blimp", str(tmp_path / "b")])
    (tmp_path / "b").touch()
    with pytest.raises(UserError, match="x: no such folder"):
        main(["x", "--blimp", str(tmp_path / "b")])
    for option, value in (("--probability", "1.5"), ("--rows", "-1"), ("--pseudo-rows", "-1")):
        with pytest.raises(UserError, match=f"{option} {value}"):
            main(["x", "--shards", "s", f"{option}={value}"])


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ("blimp", "--rows=0"),
        ("blimp", "--pseudo-rows=16"),
        ("blimp", "--probability=0.15"),
        ("shards", "--sample=1"),
    ],
)
def test_options_of_what_is_not_scored_are_refused(
    tmp_path: Path, tiny_model: Path, shards: Path, given: str, idle: str
) -> None:
    source = {"blimp": str(blimp_file(tmp_path)), "shards": str(shards)}[given]
    with pytest.raises(UserError, match=f"{idle.partition('=')[0]} without --"):
        main([str(tiny_model), f"--{given}", source, idle])


@pytest.mark.parametrize("share", [0.0, 0.45, 0.55, 1.0])
def test_a_saturated_pooler_is_told(
    share: float, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many of the outputs as transformers' pooler has above 0.99, over all micro-batches."""
    size = len(json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"])
    folder = make_shards(tmp_path / "s", rows=9, max_length=48, vocab_size=size, held_out_rows=400)
    shutil.copyfile(tiny_model / "tokenizer.json", folder / "tokenizer.json")
    batches = list(Evaluator(held_out(folder), MaskingConfig(), micro_batch_tokens=8192).batches())
    assert len(batches) > 1
    theirs = AutoModel.from_pretrained(tiny_model).eval()

    def pooled(model: Any) -> torch.Tensor:
        rows = []
        for micro in batches:
            for begin, end in pairwise(micro.cu_seqlens[: micro.rows + 1].tolist()):
                ids, types = micro.input_ids[begin:end], micro.token_type_ids[begin:end]
                with torch.no_grad():
                    rows.append(model(ids[None], token_type_ids=types[None]).pooler_output[0])
        return torch.stack(rows)

    above = torch.quantile(torch.atanh(pooled(theirs)).abs().flatten()[:100_000], 1 - share)
    scale = math.atanh(0.99) / float(above) * (1.01 if share else 0.9)

    def pooler(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v * scale if "pooler.dense" in k else v for k, v in tensors.items()}

    scaled = copy_with(tiny_model, tmp_path / "model", pooler)
    scores = evaluate(scaled, held_out(folder))
    expected = (pooled(AutoModel.from_pretrained(scaled).eval()).abs() > 0.99).float().mean()
    assert scores["pooler_saturated"] == pytest.approx(float(expected), abs=1e-3)
    assert scores["pooler_saturated"] == pytest.approx(share, abs=0.03)
    assert ("may end at one answer" in capsys.readouterr().out) == (share > 0.5)
