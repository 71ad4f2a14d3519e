"""What is particular to SentencePiece vocabularies: their normaliser, merges and trainer."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from configs.errors import UserError
from configs.schema import VocabConfig


def piece_steps(backend: Backend, charsmap: bytes, config: VocabConfig) -> None:
    steps: list[normalizers.Normalizer] = []
    strip = config.lowercase if config.strip_accents is None else config.strip_accents
    if strip:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")


def merges_of(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece lists BPE pieces by rank; a merge is every way to make a piece of two others."""
    merges = []
    for piece, rank in vocab.items():
        ways = [
            (vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        merges += [(rank, *way) for way in sorted(ways)]
    return [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[0])]


def train_pieces(config: VocabConfig, texts: Iterator[str]) -> bytes:
    """The SentencePiece model of config.kind and config.size of texts.

    Raises:
        UserError: a size that cannot be. What texts raise comes through as it is.
    """
    import sentencepiece

    probe = Backend(models.Unigram())
    piece_steps(probe, b"", config)
    assert probe.normalizer is not None
    model = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": config.kind,
        "vocab_size": config.size,
        "character_coverage": 0.9995,
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": -1,
        "eos_id": -1,
        "pad_piece": "<pad>",
        "unk_piece": "<unk>",
        "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
        "max_sentence_length": 1 << 20,
        "num_threads": 1,  # more of them would sum in another order each time
        "minloglevel": 2,
    }
    normalized = map(probe.normalizer.normalize_str, texts)
    raised: list[BaseException] = []

    def sentences() -> Iterator[str]:
        try:
            yield from normalized
        except BaseException as error:  # of the text, or Ctrl-C: the trainer makes its own of it
            raised.append(error)
            raise

    reading = sentences()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=reading, model_writer=model, **options
        )
    except RuntimeError as error:
        if raised:
            raise raised[0] from None
        # Without the place in its source before, and the options of its own program behind.
        reason = str(error).strip().splitlines()[-1].rsplit("] ", 1)[-1]
        reason = reason.split(" Increase ")[0]
        raise UserError(f"vocab.size={config.size}: {reason}", "choose another size") from None
    return model.getvalue()
