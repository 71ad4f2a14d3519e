"""Tokenizers: WordPiece, SentencePiece unigram and BPE, byte-level BPE; trained here or loaded.

Whatever the kind, the thing that encodes is a `tokenizers` object, the same that is saved for
`transformers.AutoTokenizer`, so that preparation, training and export agree on every id. One thing
differs: the name of a special token in a text that is prepared is not that token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

from configs.errors import UserError
from configs.files import make_folder, publish_text
from configs.schema import VocabConfig
from data_prep.tokenizer_models import ROLES, build_model, train_model
from data_prep.tokenizer_words import WordCache, flatten

INDEX = "tokenizer.json"


class Tokenizer:
    """A tokenizer with BERT's five special tokens.

    vocab_size: ids are below it. special_ids: pad, unk, cls, sep, mask -> id. word_start: bool
    [vocab_size], whether a token starts a word. fingerprint: changes with anything that changes ids.
    """

    def __init__(
        self, backend: Backend, kind: str, specials: dict[str, str], switches: dict[str, object]
    ) -> None:
        self.backend, self.kind, self.specials, self.switches = backend, kind, specials, switches
        # The words "[PAD]" or "</s>" in a text are text; as in BERT's own tool they are cut up.
        backend.encode_special_tokens = True
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.special_ids = {role: vocab[specials[role]] for role in ROLES}
        self.tokens = [""] * self.vocab_size
        for token, number in vocab.items():
            self.tokens[number] = token
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)
        self._text = backend.to_str()
        self.fingerprint = hashlib.blake2b(self._text.encode(), digest_size=16).hexdigest()

    @cached_property
    def word_start(self) -> np.ndarray:
        if self.kind == "wordpiece":
            starts = [not token.startswith("##") for token in self.tokens]
        else:
            mark = "Ġ" if self.kind == "byte-bpe" else "▁"
            starts = [token.startswith(mark) for token in self.tokens]
        for number in self.special_ids.values():
            starts[number] = True
        return np.array(starts, dtype=bool)

    @cached_property
    def _cache(self) -> WordCache | None:
        parts = json.loads(self._text)
        if not WordCache.usable(parts):
            return None
        return WordCache(self.backend, self.dtype, parts)

    def encode_sentences(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all sentences in a row (uint16 or int32) and offsets (int64 [n + 1]); no special
        tokens are added."""
        if self._cache is not None:
            ids, counts = self._cache.encode(sentences)
        else:
            ids, counts = flatten(self.backend, sentences, self.dtype)
            # Other models than BERT's WordPiece may find such a name in their own vocabulary.
            controls = [number for role, number in self.special_ids.items() if role != "unk"]
            ids[np.isin(ids, controls)] = self.special_ids["unk"]
        offsets = np.zeros(len(sentences) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        return ids, offsets

    def save(self, folder: str | Path) -> Path:
        """Writes a folder that `transformers.AutoTokenizer` opens; each file appears whole."""
        folder = Path(folder)
        make_folder(folder)
        names = {f"{role}_token": token for role, token in self.specials.items()}
        config = {
            "tokenizer_class": "BertTokenizer"
            if self._cache is not None
            else "PreTrainedTokenizerFast",
            "model_max_length": 512,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "lambert_kind": self.kind,
            **self.switches,
            **names,
        }
        publish_text(
            folder / "tokenizer_config.json",
            json.dumps(config, indent=1, ensure_ascii=False) + "\n",
        )
        publish_text(folder / "special_tokens_map.json", json.dumps(names, indent=1) + "\n")
        if self.kind == "wordpiece":
            publish_text(folder / "vocab.txt", "".join(f"{token}\n" for token in self.tokens))
        publish_text(folder / INDEX, self.backend.to_str(pretty=True))
        return folder


def load(config: VocabConfig | str | Path) -> Tokenizer:
    """The tokenizer a recipe's `vocab.file` names, or one saved in a folder.

    Raises:
        UserError: no such file, a special token missing, an entry listed twice.
    """
    if not isinstance(config, VocabConfig):
        config = VocabConfig(file=str(config), kind="")
    return Tokenizer(*build_model(config))


def train(config: VocabConfig, texts: Iterator[str]) -> Tokenizer:
    """Trains a tokenizer of config.kind and config.size on texts.

    Raises:
        UserError: no text at all, of which most kinds would make a vocabulary; no such kind or size.
    """
    first = next((text for text in texts if text.strip()), None)
    if first is None:
        raise UserError("the sources hold no text", "check sources[].kind and path")
    return Tokenizer(*train_model(config, chain([first], texts)))


__all__ = ["Tokenizer", "UserError", "load", "train"]
