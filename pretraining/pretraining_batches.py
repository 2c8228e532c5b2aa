"""From text to masked batches: articles -> tokens -> spans of whole sentences -> batches of one length -> hidden tokens."""

import gzip
import hashlib
import io
import itertools
import os
import zlib

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

import checkpoint
import config
from sentences import clean, split_sentences

N_SPECIAL = len(checkpoint.SPECIAL_TOKENS)              # the vocabulary begins with them
PAD, UNK, CLS, SEP, MASK = range(N_SPECIAL)


# ---------------------------------------------------------------------------- text to tokens

def read_articles(path):
    """The articles of a .txt or .txt.gz file, each a list of paragraphs; without blank lines, every line is an article."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace") as file:
            lines = [clean(line) for line in file]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from None
    articles = [list(group) for filled, group in itertools.groupby(lines, key=bool) if filled]
    return articles if len(articles) > 1 else [[line] for line in lines if line]


def tokenize(articles, tokenizer):
    """Articles as three arrays that lose no token: the tokens uint16 (N,), where each of the S sentences starts (S + 1,), and
    with which sentence each of the A articles starts (A + 1,); the last entry is the end.
    """
    tokens, starts, firsts = [], [0], [0]
    for i in tqdm(range(0, len(articles), 100), desc="tokenise", unit_scale=100, unit=" articles", leave=False):
        texts = [[s for paragraph in article for s in split_sentences(paragraph)] for article in articles[i:i + 100]]
        rows = iter(tokenizer.encode_batch_fast([s for text in texts for s in text], add_special_tokens=False))
        for text in texts:
            for row in itertools.islice(rows, len(text)):
                if row.ids:
                    tokens.append(np.array(row.ids, np.uint16))
                    starts.append(starts[-1] + len(row.ids))
            firsts.append(len(starts) - 1)
    return np.concatenate(tokens), np.array(starts), np.array(firsts)


def prepare(folder, tokenizer=None, keep=False):
    """The tokenizer, which is learned where none is given, and the tokens of the corpus, made once and kept in `folder`.

    keep: take the kept tokens even if the corpus has changed since (RESUME). Raises ValueError or OSError where the corpus can't be used.
    """
    path = config.PRETRAIN_CORPUS or os.path.join(config.data, "sentences.txt")
    cache = os.path.join(folder, "tokens.npz")
    try:
        cached = dict(np.load(cache)) if os.path.exists(cache) else None
    except Exception as error:      # zipfile and numpy each raise their own for a damaged file
        if keep:
            raise ValueError(f"{cache} can't be read ({config.first_line(error)}): begin again with OVERWRITE=True") from None
        cached = None               # it is made anew
    if cached and keep:
        return Tokenizer.from_str(str(cached["tokenizer"])), cached
    if keep and config.MLM_INIT:    # its vocabulary can't be learned again from the corpus
        raise FileNotFoundError(f"there is no {cache} any more: begin again with OVERWRITE=True")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no {path}: run python download_data.py first, or name a PRETRAIN_CORPUS=")
    vocabulary = hashlib.sha256(tokenizer.to_str().encode()).hexdigest() if tokenizer else config.VOCAB_SIZE
    if (tokenizer.get_vocab_size() if tokenizer else config.VOCAB_SIZE) > 2**16:
        raise ValueError("a vocabulary of more than the 65,536 tokens that the cache can tell apart: VOCAB_SIZE must be smaller")
    with open(path, "rb") as file:
        made_of = f"{hashlib.sha256(file.read()).hexdigest()} {vocabulary} {config.HELD_OUT}"
    if cached and str(cached["made_of"]) == made_of:
        return Tokenizer.from_str(str(cached["tokenizer"])), cached
    print(f"tokenising {path} with the vocabulary of the encoder it goes on from: minutes, once" if tokenizer else
          f"learning {config.VOCAB_SIZE:,} tokens from {path}, then applying them: minutes, once")
    articles = read_articles(path)
    if len(articles) < 2:
        raise ValueError(f"{path} holds {len(articles)} articles or lines: too little to train on")
    tokenizer = tokenizer or checkpoint.train_tokenizer([p for i, article in enumerate(articles) if not held_out(i) for p in article],
                                                        config.VOCAB_SIZE)
    tokens, starts, firsts = tokenize(articles, tokenizer)
    corpus = {"tokens": tokens, "starts": starts, "firsts": firsts, "tokenizer": np.array(tokenizer.to_str()),
              "made_of": np.array(made_of)}
    buffer = io.BytesIO()
    np.savez(buffer, **corpus)
    checkpoint.write_atomically(cache, buffer.getvalue())
    return tokenizer, corpus


def frequencies(corpus, vocab_size):
    """The share of the corpus that each token of the vocabulary is, each counted once more so that none is 0. float32 (V,)."""
    counts = np.bincount(corpus["tokens"], minlength=vocab_size) + 1
    return torch.from_numpy(counts / counts.sum()).float()


def held_out(article):
    """Whether an article, given by its number, is kept for validation."""
    return article % config.HELD_OUT == 0


# ---------------------------------------------------------------------------- tokens to batches

def pack(corpus, articles, rng):
    """Cut articles into spans of whole sentences: as many as fit, or (SENTENCE_RATE) one, as SimCSE will see them.

    Only a sentence too long for any span is cut. Returns an int array (spans, 2) of first token and number of tokens.
    """
    spans = []
    starts, firsts = corpus["starts"].tolist(), corpus["firsts"].tolist()
    room, long_room = min(config.BLOCK_SIZE, config.N_POSITIONS) - 2, config.N_POSITIONS - 2     # beside [CLS] and [SEP]

    def draw():
        chance = rng.random()
        return chance < config.SENTENCE_RATE, long_room if chance >= 1 - config.LONG_RATE else room

    for article in articles:
        begin, *ends = starts[firsts[article]:firsts[article + 1] + 1]
        stop = begin
        alone, limit = draw()
        for end in ends:
            if stop > begin and (alone or end - begin > limit):         # this sentence opens the next span
                spans.append((begin, stop - begin))
                begin = stop
                alone, limit = draw()
            while end - begin > limit:
                spans.append((begin, limit))
                begin += limit
            stop = end
        if stop > begin:
            spans.append((begin, stop - begin))
    return np.array(spans)


def batches(spans, rng):
    """Spans in random batches of about TOKENS_PER_STEP tokens. A batch holds one length, so that nothing is padded."""
    spans = rng.permutation(spans)
    spans = spans[np.argsort(spans[:, 1], kind="stable")]
    groups = []
    for group in np.split(spans, np.flatnonzero(np.diff(spans[:, 1])) + 1):
        rows = max(1, config.TOKENS_PER_STEP // (group[0, 1] + 2))
        groups += [group[i:i + rows] for i in range(0, len(group), rows)]
    return [groups[i] for i in rng.permutation(len(groups))]


def stream(corpus, epoch, position):
    """Endless batches of all articles but the held-out ones, from a place in the text on.

    Yields the epoch, the position in it after the batch, and the batch of spans; each epoch has its own spans and order.
    """
    articles = [i for i in range(len(corpus["firsts"]) - 1) if not held_out(i)]
    while True:
        rng = np.random.default_rng([config.SEED, epoch])
        groups = batches(pack(corpus, articles, rng), rng)
        for position in range(position, len(groups)):
            yield epoch, position + 1, groups[position]
        epoch, position = epoch + 1, 0


def rows_of(batch, tokens):
    """The token ids of a batch of spans: [CLS] span [SEP], int64 (B, T)."""
    idx = np.empty((len(batch), batch[0, 1] + 2), np.int64)
    idx[:, 0], idx[:, -1] = CLS, SEP
    idx[:, 1:-1] = tokens[batch[:, :1] + np.arange(batch[0, 1])]
    return idx


def mask(idx, rng, vocab_size):
    """Hide MASK_RATE of the tokens of each row, [CLS] and [SEP] apart: 80% become [MASK], 10% a random token, 10% stay.

    idx: (B, T), T >= 3. Returns the ids with the changes (B, T), the places to predict (B, M), and the tokens that stood there
    (B, M), with M = MASK_RATE of T - 2 or 1. Source: BERT, section 3.1.
    """
    B, T = idx.shape
    places = 1 + rng.random((B, T - 2)).argsort(1)[:, :max(1, round(config.MASK_RATE * (T - 2)))]
    targets, chance = np.take_along_axis(idx, places, 1), rng.random(places.shape)
    others = np.where(chance < 0.9, rng.integers(N_SPECIAL, vocab_size, places.shape), targets)
    hidden = idx.copy()
    np.put_along_axis(hidden, places, np.where(chance < 0.8, MASK, others), 1)
    return hidden, places, targets


def validation(corpus, vocab_size):
    """Masked batches of about VALIDATION_TOKENS tokens of the held-out articles: always the same text under the same masks."""
    rng = np.random.default_rng([config.SEED, 2**32])
    masked, left = [], config.VALIDATION_TOKENS
    for batch in batches(pack(corpus, [i for i in range(len(corpus["firsts"]) - 1) if held_out(i)], rng), rng):
        if left > 0:
            masked.append(mask(rows_of(batch, corpus["tokens"]), rng, vocab_size))
            left -= masked[-1][0].size
    return masked
