"""BERT's WordPiece tokenizer: learned from sentences, or read from a checkpoint as transformers reads it."""

from collections import Counter
from pathlib import Path

from tokenizers import (
    AddedToken,
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
# tokenizer classes of transformers, less "Fast": those that are built anew from a vocabulary, and those that are
# tokenizer.json as it stands
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer")
PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")


def wordpiece_tokenizer(vocab=None, lowercase=True, strip_accents=None, chinese=True, added=()):
    """BERT's WordPiece tokenizer over a vocabulary (token to id); without one, ready to be trained.

    strip_accents: None does it where lowercase does; chinese: blanks around each Chinese character; added: AddedTokens
    that are found in the text before it is cut into words. Raises ValueError where vocab lacks a special token.
    Source: BERT (Devlin et al., 2018), section 3.
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
        tokenizer.add_tokens(list(added))
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
        )
    return tokenizer


def train_tokenizer(sentences, vocab_size):
    """Learn a lower-cased WordPiece vocabulary of at most vocab_size tokens from an iterable of strings.

    The same sentences always give the same vocabulary.
    """
    tokenizer, sentences = wordpiece_tokenizer(), list(sentences)
    counts = Counter()
    for sentence in sentences:
        counts.update(tokenizer.normalizer.normalize_str(sentence))
    # the commonest characters: thousands of others occur in a large text, and each would take a place
    characters = [c for c in counts if not c.isspace()]
    alphabet = sorted(characters, key=lambda c: (-counts[c], c))[: min(256, vocab_size // 4)]
    # the trainer numbers what it meets in the order of a hash table, and breaks ties by number: number its pieces first
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


def read_settings(folder, name):
    """The content, a dict, of a JSON file that a checkpoint may lack: {} where it does. Raises ValueError."""
    path = Path(folder) / name
    return read_json(path) if path.exists() else {}


def load_tokenizer(folder, vocab_size=None):
    """A checkpoint's tokenizer as transformers loads it; padding and truncation are the encoder's to do.

    A BertTokenizer takes its vocabulary from tokenizer.json or else vocab.txt, and how it prepares a text from
    tokenizer_config.json; a PreTrainedTokenizerFast is tokenizer.json as it stands.
    vocab_size: rows of the token embedding, which the vocabulary must fill but for a rounding up.
    Raises FileNotFoundError or ValueError, in one line, for what is missing, damaged, or implemented otherwise here.
    """
    folder = Path(folder)
    settings = read_settings(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings = settings | read_settings(folder, "special_tokens_map.json")
    stored = read_settings(folder, "tokenizer.json")
    check_settings(folder, settings, stored)
    path = folder / ("tokenizer.json" if stored else "vocab.txt")
    if not path.exists():
        raise FileNotFoundError(f"{folder} has neither tokenizer.json nor vocab.txt")
    default = read_settings(folder, "config.json").get("tokenizer_class") or "BertTokenizer"
    kind = str(settings.get("tokenizer_class") or default).removesuffix("Fast")
    if kind not in BERT_CLASSES + (PLAIN_CLASSES if stored else ()):
        raise ValueError(f"{folder}: its tokenizer is a {kind}, only BertTokenizer is implemented here")
    try:
        if kind in PLAIN_CLASSES:
            tokenizer = Tokenizer.from_file(str(path))
            lowers = tokenizer.normalizer and tokenizer.normalizer.normalize_str("A") == "a"
            if read_settings(folder, "sentence_bert_config.json").get("do_lower_case") and not lowers:
                raise ValueError(
                    "do_lower_case of sentence_bert_config.json is only implemented for a BertTokenizer"
                )
        else:
            tokenizer = bert_tokenizer(folder, settings, stored)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} can't be read as a tokenizer: {first_line(error)}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.encode("").tokens != ["[CLS]", "[SEP]"] or any(tokenizer.encode("a").type_ids):
        raise ValueError(
            f"{path} does not put a sentence between [CLS] and [SEP]: it is no tokenizer of BERT's"
        )
    tokens = 1 + max(tokenizer.get_vocab().values())
    if vocab_size and not 0 <= vocab_size - tokens < 128:
        raise ValueError(
            f"{path} has {tokens} tokens, the weights have {vocab_size}: they do not belong together"
        )
    return tokenizer


def check_settings(folder, settings, stored):
    """Raise ValueError for a setting of a tokenizer that would change its output and is not implemented here.

    settings: what tokenizer_config.json says; stored: what tokenizer.json says.
    """
    for key in ("auto_map", "split_special_tokens"):
        if settings.get(key):
            raise ValueError(f"{folder}: {key} of tokenizer_config.json is not implemented here")
    for name in ("padding", "truncation"):
        default = stored[name].get("direction") if isinstance(stored.get(name), dict) else None
        side = settings.get(f"{name}_side") or default or "right"
        if str(side).lower() != "right":
            raise ValueError(
                f"{folder}: its tokenizer's {name}_side is {side!r}, only 'right' is implemented here"
            )
    for token in SPECIAL_TOKENS:
        key = token.strip("[]").lower() + "_token"
        value = settings.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if value not in (None, token):
            raise ValueError(
                f"{folder}: its tokenizer's {key} is {value!r}, only {token!r} is implemented here"
            )


def bert_tokenizer(folder, settings, stored):
    """The BertTokenizer of a checkpoint; raises whatever a damaged one leads to."""
    if stored:
        if stored["model"].get("type", "WordPiece") != "WordPiece":
            raise ValueError(f"its model is {stored['model']['type']}, only WordPiece is implemented here")
        vocab = stored["model"]["vocab"]
    else:
        with (folder / "vocab.txt").open(encoding="utf-8") as file:
            vocab = {token.rstrip("\n"): i for i, token in enumerate(file)}
    lowercase, strip_accents = settings.get("do_lower_case", True), settings.get("strip_accents")
    if read_settings(folder, "sentence_bert_config.json").get("do_lower_case") and not lowercase:
        lowercase, strip_accents = True, strip_accents or False  # sentence-transformers leaves the accents
    chinese = settings.get("tokenize_chinese_chars", True)
    return wordpiece_tokenizer(
        vocab, lowercase, strip_accents, chinese, added_tokens(folder, settings, stored)
    )


def added_tokens(folder, settings, stored):
    """The tokens, as AddedTokens, that a checkpoint adds to its vocabulary, in the order of their numbers."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = [token if isinstance(token, dict) else {"content": token} for token in extra]
    if "added_tokens_decoder" in settings:
        numbered = {int(number): fields for number, fields in settings["added_tokens_decoder"].items()}
    else:
        special = {fields["content"] for fields in extra} | set(SPECIAL_TOKENS)
        numbered = {
            number: {"content": token, "special": token in special, "normalized": token not in special}
            for token, number in read_settings(folder, "added_tokens.json").items()
        }
        numbered |= {fields["id"]: fields for fields in stored.get("added_tokens", [])}
    tokens = [numbered[number] for number in sorted(numbered)] + [
        {"special": True} | fields for fields in extra
    ]
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return [
        AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
        for token in tokens
    ]
