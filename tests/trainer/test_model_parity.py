"""Our BERT against transformers' BertForPreTraining: states, logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers

from pretrain.model import build
from tests.trainer.batches import pack, random_rows, tiny_config


def hf_twin(config):
    """A randomly initialised transformers model of the same shape, with biases away from zero."""
    torch.manual_seed(0)
    hf = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(torch.randn(p.shape) * 0.05)
    return hf.eval()


def copy_weights(pieces, tensors):
    with torch.no_grad():
        for piece in pieces:
            theirs, ours = piece.clip(piece.view(piece.param.view(-1)))
            piece.view(piece.param.view(-1))[ours] = tensors[piece.name][theirs]


def padded_inputs(rows):
    n = max(len(r["ids"]) for r in rows)

    def pad(key):
        return torch.stack([torch.nn.functional.pad(r[key], (0, n - len(r[key]))) for r in rows])

    mask = torch.stack([(torch.arange(n) < len(r["ids"])).long() for r in rows])
    return {"input_ids": pad("ids"), "token_type_ids": pad("types"), "attention_mask": mask}


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def test_one_rank_has_no_collective_on_its_path(monkeypatch):
    """Forward and backward with tp=1, in a process that belongs to a group."""

    def refuse(*_, **__):
        raise AssertionError("a collective")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    verbs = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "send", "recv", "barrier")
    names = [n for n in dir(dist) if any(v in n for v in verbs) and callable(getattr(dist, n))]
    assert {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} <= set(names)
    for name in names:
        monkeypatch.setattr(dist, name, refuse)
    config = tiny_config()
    model, pieces = build(config)
    out = model(pack(random_rows(4, config, 1)))
    (out.mlm_sum + out.nsp_sum).backward()
    assert all(piece.param.grad is not None for piece in pieces)


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_model_equals_transformers(recompute):
    config = tiny_config()
    hf = hf_twin(config)
    model, pieces = build(config, recompute=recompute)
    names = dict(hf.named_parameters())
    assert sorted(p.name for p in pieces) == sorted(names)
    assert all(p.logical_shape == tuple(names[p.name].shape) for p in pieces)
    copy_weights(pieces, names)
    rows = random_rows(7, config, seed=3)
    micro = pack(rows)

    inputs = padded_inputs(rows)
    theirs = hf(**inputs, output_hidden_states=True)
    labels = torch.full(inputs["input_ids"].shape, -100)
    for i, r in enumerate(rows):
        labels[i, r["positions"]] = r["labels"]
    nsp = torch.tensor([r["nsp"] for r in rows])
    loss = torch.nn.functional.cross_entropy(
        theirs.prediction_logits.flatten(0, 1), labels.flatten()
    )
    loss = loss + torch.nn.functional.cross_entropy(theirs.seq_relationship_logits, nsp)
    loss.backward()

    model.eval()
    real = inputs["attention_mask"].bool()
    for a, b in zip(model.states(micro), theirs.hidden_states):
        assert (a[: micro.tokens] - b[real]).abs().max() < 1e-5
    hidden = model.encode(micro)
    assert (
        model.logits(hidden)[: micro.tokens] - theirs.prediction_logits[real]
    ).abs().max() < 1e-5
    first = model.nsp_logits(hidden[micro.first_positions])
    assert (first - theirs.seq_relationship_logits).abs().max() < 1e-5

    sums = model(micro)
    ours = sums.mlm_sum / micro.masked + sums.nsp_sum / micro.rows
    assert abs((ours - loss).item()) < 1e-5
    ours.backward()
    for piece in pieces:
        grad = piece.view(piece.param.grad.view(-1))
        theirs_index, ours_index = piece.clip(grad)
        expected = names[piece.name].grad[theirs_index]
        assert (grad[ours_index] - expected).abs().max() < 1e-5, piece.name
        if "key.bias" not in piece.name:  # its true gradient is zero: both hold rounding noise
            assert relative(grad[ours_index], expected) < 1e-5, piece.name
    padding = model.bert.embeddings.word_embeddings.weight.grad[config.vocab_size :]
    assert padding.numel() and not padding.any()
    right = (theirs.prediction_logits[labels >= 0].argmax(-1) == labels[labels >= 0]).sum()
    assert float(sums.mlm_correct) == float(right)


def test_attention_key_bias_changes_no_output():
    config = tiny_config()
    model, pieces = build(config)
    micro = pack(random_rows(5, config, seed=1))
    before = model.eval().encode(micro)
    with torch.no_grad():
        for piece in pieces:
            if "key.bias" in piece.name:
                piece.view(piece.param.view(-1)).normal_()
    assert (model.encode(micro) - before).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_packed_gradient_equals_one_row_a_batch(dtype, tolerance):
    config = tiny_config(hidden_dropout=0.1, attention_dropout=0.1)
    rows = random_rows(6, config, seed=5)
    for row in rows:
        row["nsp"] = 1  # with both labels the NSP bias gradient cancels to rounding noise
    packed = build(config, seed=2)[0].to(dtype)
    single = build(config, seed=2)[0].to(dtype)
    whole = pack(rows)
    sums = packed(whole)
    (sums.mlm_sum / whole.masked + sums.nsp_sum / whole.rows).backward()
    for row in rows:
        sums = single(pack([row], tokens=32))
        (sums.mlm_sum / whole.masked + sums.nsp_sum / whole.rows).backward()
    for (name, a), b in zip(packed.named_parameters(), single.parameters()):
        if "qkv.bias" in name:
            a_grad, b_grad = (x.grad.view(3, -1)[[0, 2]] for x in (a, b))
        else:
            a_grad, b_grad = a.grad, b.grad
        assert relative(a_grad, b_grad) < tolerance, name


def test_initial_values_are_truncated_normal_and_seeded_by_name():
    config = tiny_config(hidden_size=128, vocab_size=2000)
    model, pieces = build(config, seed=7)
    again, _ = build(config, seed=7)
    other, _ = build(config, seed=8)
    words = model.bert.embeddings.word_embeddings.weight
    assert torch.equal(words, again.bert.embeddings.word_embeddings.weight)
    assert not torch.equal(words, other.bert.embeddings.word_embeddings.weight)
    true = words[: config.vocab_size]
    assert true.abs().max() <= 0.04
    # A normal cut at two standard deviations keeps 0.8796 of its width.
    assert abs(true.std().item() / 0.02 - 0.8796) < 0.01
    assert not words[config.vocab_size :].any()
    queries = [p.view(p.param.view(-1)) for p in pieces if "query.weight" in p.name]
    assert not torch.equal(queries[0], queries[1])


def test_real_weights_give_the_same_states_and_gradients(minilm):
    """The 6-layer encoder of a published package, 1e-4 on hidden states and gradients."""
    hf = transformers.BertModel.from_pretrained(minilm).eval()
    c = hf.config
    config = tiny_config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        max_position_embeddings=c.max_position_embeddings,
    )
    model, pieces = build(config)
    names = {f"bert.{name}": p for name, p in hf.named_parameters()}
    encoder = [p for p in pieces if p.name.startswith("bert.")]
    assert {p.name for p in encoder} == set(names)
    copy_weights(encoder, names)
    rows = random_rows(5, config, seed=9)
    micro, inputs = pack(rows), padded_inputs(rows)
    real = inputs["attention_mask"].bool()
    theirs = hf(**inputs, output_hidden_states=True)
    ours = model.eval().states(micro)
    for a, b in zip(ours, theirs.hidden_states):
        assert (a[: micro.tokens] - b[real]).abs().max() < 1e-4
    direction = torch.randn(
        micro.tokens, config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    (ours[-1][: micro.tokens] * direction).sum().div(100).backward()
    (theirs.last_hidden_state[real] * direction).sum().div(100).backward()
    for piece in encoder:
        if "pooler" in piece.name or "key.bias" in piece.name:
            continue
        grad = piece.view(piece.param.grad.view(-1))
        theirs_index, ours_index = piece.clip(grad)
        assert relative(grad[ours_index], names[piece.name].grad[theirs_index]) < 1e-4, piece.name
