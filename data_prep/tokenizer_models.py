"""Builds and trains the `tokenizers` object behind each kind of tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from configs.errors import UserError
from configs.files import read_json
from configs.schema import VocabConfig
from data_prep.tokenizer_pieces import merges_of, piece_steps, train_pieces
from data_prep.training_text import spooled, without_long_words

ROLES = ("pad", "unk", "cls", "sep", "mask")
# What each role is called, most usual first, in the vocabularies people have.
NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
BERT_SPECIALS = {role: names[0] for role, names in NAMES.items()}
BYTE_SPECIALS = {role: names[1] for role, names in NAMES.items()}
LONGEST_WORD = 100  # characters; a longer one is [UNK] to WordPiece, as to BERT's own
LONGEST_RUN = 1000  # characters byte-level BPE learns from as one word; Thai has sentences of one

SIDE = "tokenizer_config.json"

Built = tuple[Backend, str, dict[str, str], dict[str, object]]


def build_model(config: VocabConfig) -> Built:
    """The backend, its kind, special tokens by role, and switches, from config.file."""
    path = Path(config.file).expanduser()
    if path.is_dir():
        return _from_folder(path, config)
    if not path.is_file():
        what = f"vocab.file={config.file}: no such file"
        raise UserError(what, "give a vocab.txt, tokenizer.json or .model")
    if path.suffix == ".json":
        return _from_json(path, config)
    if path.suffix == ".model":
        return _from_pieces(path.read_bytes(), str(path), config)
    return _wordpiece(read_vocab(path), str(path), config)


def train_model(config: VocabConfig, texts: Iterator[str]) -> Built:
    """Trains on texts; see `build_model` for what comes back."""
    pieces = {"unigram": _train_pieces, "bpe": _train_pieces}
    kinds = {"wordpiece": _train_wordpiece, "byte-bpe": _train_byte_bpe, **pieces}
    if config.kind not in kinds:
        raise UserError(f"vocab.kind={config.kind}", f"known kinds: {', '.join(kinds)}")
    return kinds[config.kind](config, texts)


def read_vocab(path: Path) -> dict[str, int]:
    """token -> id of a vocab.txt; only LF ends a line, a blank last line counts for nothing (B07).

    Raises:
        UserError: not UTF-8, an entry listed twice, a blank line between entries.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        what = f"{path}: not UTF-8 ({error})"
        remedy = f"a vocab.txt has one token a line; iconv -f utf-16 -t utf-8 {path} > NEW.txt"
        remedy += " makes it UTF-8, if UTF-16 is what it is in"
        raise UserError(what, remedy) from None
    lines = [line.removesuffix("\r") for line in lines]
    while lines and not lines[-1].strip():
        lines.pop()
    vocab: dict[str, int] = {}
    for number, token in enumerate(lines):
        if not token:
            what = f"{path}: line {number + 1} is blank"
            raise UserError(what, "remove it; ids are line numbers")
        if token in vocab:
            lines_of = f"lines {vocab[token] + 1} and {number + 1}"
            what = f"{path}: {token!r} is listed twice ({lines_of})"
            raise UserError(what, "each entry has one id: remove one of the two")
        vocab[token] = number
    return vocab


def find_specials(
    has: Callable[[str], bool], origin: str, known: dict[str, str] | None = None
) -> dict[str, str]:
    """The token of each role; raises UserError naming what the vocabulary lacks."""
    found, missing = {}, []
    for role in ROLES:
        names = ((known or {}).get(role), *NAMES[role])
        token = next((name for name in names if name and has(name)), None)
        if token is None:
            missing.append((known or {}).get(role) or NAMES[role][0])
        else:
            found[role] = token
    if missing:
        remedy = "BERT needs [PAD] [UNK] [CLS] [SEP] [MASK]; `python -m data_prep vocab` trains one"
        remedy += " when vocab.file is empty (vocab.file=)"
        raise UserError(f"{origin}: the vocabulary has no {', '.join(missing)}", remedy)
    return found


def _switches(config: VocabConfig) -> dict[str, object]:
    strip = config.lowercase if config.strip_accents is None else config.strip_accents
    return {
        "do_lower_case": config.lowercase,
        "strip_accents": strip,
        "tokenize_chinese_chars": True,
    }


def _finish(backend: Backend, specials: dict[str, str]) -> None:
    """Special tokens are known as such, and a pair gets [CLS] A [SEP] B [SEP]."""
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    backend.add_special_tokens(
        [
            AddedToken(specials[role], special=True, normalized=False)
            for role in ROLES
            if specials[role] not in known
        ]
    )
    backend.no_truncation()
    backend.no_padding()
    cls, sep = specials["cls"], specials["sep"]
    ids = [(cls, backend.token_to_id(cls)), (sep, backend.token_to_id(sep))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=ids,
    )


def _wordpiece(vocab: dict[str, int], origin: str, config: VocabConfig) -> Built:
    specials = find_specials(vocab.__contains__, origin)
    backend = Backend(
        models.WordPiece(vocab, unk_token=specials["unk"], max_input_chars_per_word=LONGEST_WORD)
    )
    bert_steps(backend, config)
    _finish(backend, specials)
    return backend, "wordpiece", specials, _switches(config)


def bert_steps(backend: Backend, config: VocabConfig) -> None:
    """BERT's normaliser and splitting into words, with the switches of `vocab`."""
    strip = config.lowercase if config.strip_accents is None else config.strip_accents
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip, lowercase=config.lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")


def _train_wordpiece(config: VocabConfig, texts: Iterator[str]) -> Built:
    """Same text, same vocabulary. The trainer numbers letters inside words in an order that changes
    from run to run and breaks ties between merges by number, so it gets them with numbers here."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    bert_steps(backend, config)
    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    assert normalizer is not None and pre_tokenizer is not None
    with spooled(without_long_words(texts, backend, LONGEST_WORD)) as (counts, again):
        characters: Counter[str] = Counter()
        for raw, count in counts.items():
            for character in normalizer.normalize_str(raw).strip():
                characters[character] += count
        often = sorted(characters, key=lambda c: (-characters[c], c))
        enough = [c for c in often if characters[c] >= config.min_frequency]
        alphabet = sorted(enough[: config.size // 4])
        inside = [f"##{c}" for c in alphabet if len(pre_tokenizer.pre_tokenize_str(f"a{c}")) == 1]
        specials = list(BERT_SPECIALS.values())
        trainer = trainers.WordPieceTrainer(
            vocab_size=config.size,
            min_frequency=config.min_frequency,
            special_tokens=specials + inside,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        backend.train_from_iterator(again, trainer)
    ids = backend.get_vocab(with_added_tokens=True)
    learnt = sorted(
        (token for token in ids if token not in {*specials, *inside}), key=ids.__getitem__
    )
    tokens = [*specials, *alphabet, *inside, *(t for t in learnt if t not in set(alphabet))]
    return _wordpiece({t: i for i, t in enumerate(tokens)}, "the trained vocabulary", config)


def byte_steps(backend: Backend) -> None:
    """Words of bytes, as in GPT-2 and RoBERTa."""
    # A sentence starts with a space, so that its first word is the same token as elsewhere.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()


def _byte_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], origin: str) -> Built:
    specials = find_specials(vocab.__contains__, origin)
    backend = Backend(models.BPE(vocab, merges))
    byte_steps(backend)
    _finish(backend, specials)
    return backend, "byte-bpe", specials, {"add_prefix_space": True}


def _train_byte_bpe(config: VocabConfig, texts: Iterator[str]) -> Built:
    backend = Backend(models.BPE())
    byte_steps(backend)
    trainer = trainers.BpeTrainer(
        vocab_size=config.size,
        min_frequency=config.min_frequency,
        special_tokens=list(BYTE_SPECIALS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    steps = Backend(models.BPE())
    byte_steps(steps)
    backend.train_from_iterator(without_long_words(texts, steps, LONGEST_RUN), trainer)
    model = json.loads(backend.to_str())["model"]
    return _byte_bpe(model["vocab"], [(a, b) for a, b in model["merges"]], "the trained vocabulary")


def _from_folder(folder: Path, config: VocabConfig) -> Built:
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json", config)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(folder)
    if (folder / "vocab.txt").is_file():
        said = read_json(file, "delete it") if (file := folder / SIDE).is_file() else {}
        names = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
        known = {ours: said[key] for key, ours in names.items() if type(said.get(key)) is bool}
        config = replace(config, **known)
        return _wordpiece(read_vocab(folder / "vocab.txt"), str(folder / "vocab.txt"), config)
    remedy = "a folder holds tokenizer.json, or vocab.json with merges.txt, or vocab.txt"
    raise UserError(f"{folder}: no tokenizer in it", remedy)


def _from_merges(folder: Path) -> Built:
    vocab = read_json(folder / "vocab.json", "get it again")
    if len({n for n in vocab.values() if type(n) is int and 0 <= n < 2 * len(vocab)}) < len(vocab):
        what = f"{folder / 'vocab.json'} is damaged: its ids are not numbers from 0 up, each once"
        raise UserError(what, "get it again")
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        return _byte_bpe(vocab, [(a, b) for a, b in pairs], str(folder))
    except UserError:
        raise
    except Exception as error:  # of tokenizers
        what = f"{folder / 'merges.txt'}: not the pairs of tokens in vocab.json ({error})"
        raise UserError(what, "get both again") from None


def _from_json(path: Path, config: VocabConfig) -> Built:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:
        remedy = "it may be cut off: get it again"
        if path.name == "vocab.json" and (path.parent / "merges.txt").is_file():
            remedy = f"name its folder: vocab.file={path.parent}"
        elif not config.kind and path.parent.name == "vocab":  # work_dir's, not somebody's file
            remedy = f"delete {path.parent} and run `python -m data_prep vocab RECIPE` again"
        raise UserError(f"{path}: not a tokenizer.json ({error})", remedy) from None
    side: dict[str, object] = {}
    if (path.parent / SIDE).is_file():
        side = read_json(path.parent / SIDE, "get it again, or delete it")
    known = {}
    for role in ROLES:
        value = side.get(f"{role}_token")
        known[role] = str(value.get("content") if isinstance(value, dict) else value or "")
    specials = find_specials(lambda name: backend.token_to_id(name) is not None, str(path), known)
    _finish(backend, specials)
    content = json.loads(path.read_text(encoding="utf-8"))
    kind = {"WordPiece": "wordpiece", "Unigram": "unigram"}.get(content["model"]["type"], "bpe")
    if kind == "bpe" and "ByteLevel" in json.dumps(content.get("pre_tokenizer")):
        kind = "byte-bpe"
    keep = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space")
    switches = {key: side[key] for key in keep if key in side}
    normalizer = content.get("normalizer") or {}
    if normalizer.get("type") == "BertNormalizer":
        lower, strip = normalizer["lowercase"], normalizer["strip_accents"]
        switches = {
            "do_lower_case": lower,
            "strip_accents": lower if strip is None else strip,
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }
    return backend, kind, specials, switches


def _from_pieces(model: bytes, origin: str, config: VocabConfig) -> Built:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(model)
    except Exception as error:
        what = f"{origin}: not a SentencePiece model ({error})"
        raise UserError(what, "it may be cut off") from None
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
    specials = find_specials(vocab.__contains__, origin)
    if proto.trainer_spec.model_type == 1:
        kind = "unigram"
        backend = Backend(
            models.Unigram(pieces, vocab[specials["unk"]], proto.trainer_spec.byte_fallback)
        )
    else:
        kind = "bpe"
        merges = merges_of(vocab)
        backend = Backend(models.BPE(vocab, merges, unk_token=specials["unk"], fuse_unk=True))
    piece_steps(backend, proto.normalizer_spec.precompiled_charsmap, config)
    _finish(backend, specials)
    return _settled(backend), kind, specials, _switches(config)


def _settled(backend: Backend) -> Backend:
    """The tokenizer as it is after being written and read: reading a score may change its last
    digit, and what is used here must be what is opened later."""
    text = backend.to_str()
    for _ in range(8):
        backend = Backend.from_str(text)
        text, before = backend.to_str(), text
        if text == before:
            break
    return backend


def _train_pieces(config: VocabConfig, texts: Iterator[str]) -> Built:
    return _from_pieces(train_pieces(config, texts), "the trained vocabulary", config)
