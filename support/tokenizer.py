"""BERT's WordPiece tokenizer: learned from sentences, or read from a checkpoint."""

from collections import Counter
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from support.files import first_line, read_json

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece_tokenizer(vocab=None, lowercase=True, strip_accents=None, chinese=True):
    """BERT's WordPiece tokenizer over a vocabulary (token to id); without one, ready to be trained.

    strip_accents: None does it where lowercase does; chinese: blanks around each Chinese character. Raises ValueError where
    the vocabulary lacks a special token. Source: BERT (Devlin et al., 2018), section 3.
    """
    tokenizer = Tokenizer(models.WordPiece(vocab or {}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if vocab is not None:
        missing = [token for token in SPECIAL_TOKENS if token not in vocab]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}")
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
        )
    return tokenizer


def train_tokenizer(sentences, vocab_size):
    """Learn a lower-cased WordPiece vocabulary of at most vocab_size tokens from an iterable of strings; always the same."""
    tokenizer, sentences = wordpiece_tokenizer(), list(sentences)
    counts = Counter()
    for sentence in sentences:
        counts.update(tokenizer.normalizer.normalize_str(sentence))
    # the commonest characters: thousands of others occur in a large text, and each would take a place
    characters = [c for c in counts if not c.isspace()]
    alphabet = sorted(characters, key=lambda c: (-counts[c], c))[: min(256, vocab_size // 4)]
    # the trainer numbers what it meets in the order of a hash table, and breaks ties by number: number its pieces beforehand
    pieces = alphabet + ["##" + c for c in alphabet]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS + pieces,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return wordpiece_tokenizer(tokenizer.get_vocab())


def load_tokenizer(folder, vocab_size=None):
    """A checkpoint's tokenizer, from tokenizer.json or else vocab.txt; padding and truncation are the encoder's to do.

    vocab_size: rows of the token embedding, which the vocabulary must fill but for a rounding up. Raises ValueError.
    """
    path = Path(folder) / "tokenizer.json"
    if path.exists():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} can't be read as a tokenizer: {first_line(error)}") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
    else:
        path = Path(folder) / "vocab.txt"
        if not path.exists():
            raise FileNotFoundError(f"{folder} has neither tokenizer.json nor vocab.txt")
        options = {}
        if (Path(folder) / "tokenizer_config.json").exists():
            options = read_json(Path(folder) / "tokenizer_config.json")
        try:
            with path.open(encoding="utf-8") as file:
                vocab = {token.rstrip("\n"): i for i, token in enumerate(file)}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None
        tokenizer = wordpiece_tokenizer(
            vocab,
            options.get("do_lower_case", True),
            options.get("strip_accents"),
            options.get("tokenize_chinese_chars", True),
        )
    if tokenizer.encode("").tokens != ["[CLS]", "[SEP]"]:
        raise ValueError(
            f"{path} does not put a sentence between [CLS] and [SEP]: it is no tokenizer of BERT's"
        )
    tokens = 1 + max(tokenizer.get_vocab().values())
    if vocab_size and not 0 <= vocab_size - tokens < 128:
        raise ValueError(
            f"{path} has {tokens} tokens, the weights have {vocab_size}: they do not belong together"
        )
    return tokenizer
