"""From text to masked batches: articles, their tokens, spans of whole sentences, batches of one length, masks."""

import gzip
import hashlib
import io
import itertools
import zlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from support.files import first_line, write_atomically
from support.sentences import clean, split_sentences
from support.tokenizer import SPECIAL_TOKENS, train_tokenizer

N_SPECIAL = len(SPECIAL_TOKENS)  # the vocabulary begins with them
PAD, UNK, CLS, SEP, MASK = range(N_SPECIAL)
MAX_VOCAB_SIZE = 2**16  # tokens are kept as 16-bit numbers


# ---- text to tokens


def read_articles(path):
    """The articles of a .txt or .txt.gz file, each a list of paragraphs; without blank lines, every line is an
    article.

    Raises ValueError where a compressed file is damaged.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            lines = [clean(line) for line in file]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from None
    articles = [list(group) for filled, group in itertools.groupby(lines, key=bool) if filled]
    return articles if len(articles) > 1 else [[line] for line in lines if line]


def tokenize_articles(articles, tokenizer):
    """Articles as three arrays that lose no token.

    Returns the tokens, uint16 (N,); where each of the S sentences starts in them (S + 1,); and with which sentence
    each of the A articles starts (A + 1,). The last entry of the two latter is the end.
    """
    tokens, sentence_starts, article_starts = [], [0], [0]
    progress = tqdm(desc="tokenise", total=len(articles), unit=" articles", leave=False)
    for i in range(0, len(articles), 100):
        texts = []
        for article in articles[i : i + 100]:
            texts.append([s for paragraph in article for s in split_sentences(paragraph)])
        flat = [sentence for text in texts for sentence in text]
        encodings = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        for text in texts:
            for encoding in itertools.islice(encodings, len(text)):
                if encoding.ids:
                    tokens.append(np.array(encoding.ids, np.uint16))
                    sentence_starts.append(sentence_starts[-1] + len(encoding.ids))
            article_starts.append(len(sentence_starts) - 1)
        progress.update(len(texts))
    progress.close()
    return np.concatenate(tokens), np.array(sentence_starts), np.array(article_starts)


def load_corpus(path):
    """What prepare_corpus keeps at a path; raises ValueError where it is damaged."""
    try:
        corpus = dict(np.load(path))
        return Tokenizer.from_str(str(corpus["tokenizer"])), corpus
    except Exception as error:  # zipfile, numpy and tokenizers each raise their own for a damaged file
        problem = f"{path} can't be read ({first_line(error)})"
        raise ValueError(f"{problem}: begin again with OVERWRITE=True") from None


def prepare_corpus(kept, path, vocab_size, held_out, tokenizer=None):
    """The tokens of the text file at `path`, made once and kept in the file `kept`; the vocabulary is learned.

    vocab_size: tokens to learn; tokenizer: one to use instead; held_out: one article in so many is kept out of the
    vocabulary. Returns the tokenizer, and a dict of arrays: tokens, sentence_starts and article_starts as
    tokenize_articles makes them, and text, a string that says of which text and vocabulary they are. Raises
    ValueError or OSError for a text that can't be used.
    """
    if not Path(path).is_file():
        advice = "run python download_data.py first, or name a PRETRAIN_CORPUS="
        raise FileNotFoundError(f"there is no {path}: {advice}")
    if tokenizer:
        vocab_size = tokenizer.get_vocab_size()
        vocabulary = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    else:
        vocabulary = vocab_size
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"VOCAB_SIZE={vocab_size}: at most {MAX_VOCAB_SIZE:,} tokens can be kept apart")
    text = f"{hashlib.sha256(Path(path).read_bytes()).hexdigest()} {vocabulary} {held_out}"
    if Path(kept).exists():
        try:
            kept_tokenizer, corpus = load_corpus(kept)
            if str(corpus["text"]) == text:
                return kept_tokenizer, corpus
        except (ValueError, KeyError):
            pass  # damaged, or of an earlier form: it is made anew
    if tokenizer:
        how = "with the vocabulary of the encoder it goes on from"
        print(f"tokenising {path} {how}: minutes, once")
    else:
        print(f"learning {vocab_size:,} tokens from {path}, then applying them: minutes, once")
    articles = read_articles(path)
    if len(articles) < 2:
        raise ValueError(f"{path} holds {len(articles)} articles or lines: too little to train on")
    if not tokenizer:
        training, _ = split_articles(len(articles), held_out)
        tokenizer = train_tokenizer((p for i in training for p in articles[i]), vocab_size)
    tokens, sentence_starts, article_starts = tokenize_articles(articles, tokenizer)
    corpus = {
        "tokens": tokens,
        "sentence_starts": sentence_starts,
        "article_starts": article_starts,
        "tokenizer": np.array(tokenizer.to_str()),
        "text": np.array(text),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **corpus)
    write_atomically(kept, buffer.getvalue())
    return tokenizer, corpus


def split_articles(n_articles, held_out):
    """The numbers of the articles to train on, and of those kept for validation, one in `held_out`."""
    training = [i for i in range(n_articles) if i % held_out != 0]
    validation = [i for i in range(n_articles) if i % held_out == 0]
    return training, validation


def token_frequencies(tokens, vocab_size):
    """How frequent each token of the vocabulary is, as a share above 0: each is counted once more. float32 (V,)."""
    counts = np.bincount(tokens, minlength=vocab_size) + 1
    return torch.from_numpy(counts / counts.sum()).float()


# ---- tokens to batches


def cut_into_spans(corpus, articles, rng, block_size, n_positions, sentence_rate, long_rate):
    """Cut articles, given by their numbers, into spans of whole sentences: as many as fit, or one.

    block_size: tokens that a span may fill, [CLS] and [SEP] included; n_positions: the same for a share long_rate of
    the spans; sentence_rate: share of the spans that are one sentence. Only a sentence too long for its span is cut.
    Returns an int array (spans, 2) of first token and number of tokens.
    """
    room, long_room = min(block_size, n_positions) - 2, n_positions - 2  # beside [CLS] and [SEP]
    sentence_starts = corpus["sentence_starts"].tolist()
    article_starts = corpus["article_starts"].tolist()

    def draw_kind():
        chance = rng.random()
        return chance < sentence_rate, long_room if chance >= 1 - long_rate else room

    spans = []
    for article in articles:
        first, last = article_starts[article], article_starts[article + 1]
        start, *ends = sentence_starts[first : last + 1]
        stop = start  # the span at hand reaches from start to stop
        one_sentence, limit = draw_kind()
        for end in ends:
            if stop > start and (one_sentence or end - start > limit):  # this sentence opens a span
                spans.append((start, stop - start))
                start = stop
                one_sentence, limit = draw_kind()
            while end - start > limit:
                spans.append((start, limit))
                start += limit
            stop = end
        if stop > start:
            spans.append((start, stop - start))
    return np.array(spans)


def group_by_length(spans, rng, tokens_per_step):
    """Spans in random batches of about tokens_per_step tokens, each of one length, so that nothing is padded.

    spans: (spans, 2), see cut_into_spans. Returns a list of such arrays (B, 2).
    """
    spans = rng.permutation(spans)
    spans = spans[np.argsort(spans[:, 1], kind="stable")]
    batches = []
    for group in np.split(spans, np.flatnonzero(np.diff(spans[:, 1])) + 1):  # a group is one length
        rows = max(1, tokens_per_step // (group[0, 1] + 2))
        batches += [group[i : i + rows] for i in range(0, len(group), rows)]
    return [batches[i] for i in rng.permutation(len(batches))]


def token_ids(batch, tokens):
    """The token ids of a batch of spans (B, 2) of one length: [CLS] span [SEP], int64 (B, T)."""
    length = batch[0, 1]
    idx = np.empty((len(batch), length + 2), np.int64)
    idx[:, 0], idx[:, -1] = CLS, SEP
    idx[:, 1:-1] = tokens[batch[:, :1] + np.arange(length)]
    return idx


def mask_tokens(idx, rng, vocab_size, mask_rate):
    """Choose mask_rate of each row's tokens, not [CLS] and [SEP]: 80% become [MASK], 10% a random token, 10% stay.

    idx: (B, T), T >= 3. Returns the ids with the changes (B, T), the positions to predict (B, M), and the tokens that
    stood there (B, M), with M = mask_rate of T - 2, at least 1. Source: BERT, section 3.1.
    """
    B, T = idx.shape
    n_masked = max(1, round(mask_rate * (T - 2)))
    positions = 1 + rng.random((B, T - 2)).argsort(axis=1)[:, :n_masked]  # (B, M)
    targets = np.take_along_axis(idx, positions, axis=1)  # (B, M)
    chance = rng.random(positions.shape)
    random_tokens = rng.integers(N_SPECIAL, vocab_size, positions.shape)
    replacements = np.where(chance < 0.9, random_tokens, targets)
    replacements = np.where(chance < 0.8, MASK, replacements)
    masked = idx.copy()
    np.put_along_axis(masked, positions, replacements, axis=1)
    return masked, positions, targets
