"""Chapter 3 in one script: learn a WordPiece vocabulary and a small BERT by filling in masked words.

Text -> whole sentences packed into spans -> masked-language-model loss -> a folder that SimCSE starts from (MLM_FOLDER).
Paper: BERT (Devlin et al., 2018), section 3.1; next-sentence prediction is left out, as RoBERTa (Liu et al., 2019) does.
"""

import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
import zlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
import config
import evaluate
from model import SimCSEEncoder
from sentences import clean, split_sentences

# what a run can't change once it has started; MAX_TOKENS it can
RECIPE = ["N_LAYER", "N_EMBD", "N_HEAD", "N_POSITIONS", "VOCAB_SIZE", "BLOCK_SIZE", "SENTENCE_RATE", "LONG_RATE", "MASK_RATE",
          "TOKENS_PER_STEP", "MLM_LEARNING_RATE", "WARMUP_TOKENS", "DECAY_SHARE", "MLM_DROPOUT", "DROPOUT_SHARE", "HELD_OUT",
          "WEIGHT_DECAY", "GRAD_CLIP", "SEED"]
N_SPECIAL = len(checkpoint.SPECIAL_TOKENS)              # the vocabulary begins with them
PAD, UNK, CLS, SEP, MASK = range(N_SPECIAL)
EXAMPLES = ["the capital of france is [MASK] .", "she was born in [MASK] and studied at the university of london .",
            "the river flows [MASK] the sea .", "he played [MASK] for the national team ."]


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
    """Articles as three arrays, which lose no token: all tokens uint16 (N,), the first token of each sentence (and the end),
    the first sentence of each article (and the end)."""
    tokens, starts, firsts = [], [0], [0]
    for i in tqdm(range(0, len(articles), 100), desc="tokenise", unit="00 articles", leave=False):
        texts = [[s for paragraph in article for s in split_sentences(paragraph)] for article in articles[i:i + 100]]
        rows = iter(tokenizer.encode_batch_fast([s for text in texts for s in text], add_special_tokens=False))
        for text in texts:
            for row in itertools.islice(rows, len(text)):
                if row.ids:
                    tokens.append(np.array(row.ids, np.uint16))
                    starts.append(starts[-1] + len(row.ids))
            firsts.append(len(starts) - 1)
    return np.concatenate(tokens), np.array(starts), np.array(firsts)


def prepare(folder, keep=False):
    """The tokenizer and the tokens of the corpus, made once and kept in `folder`; keep: whatever the corpus is by now.

    Raises ValueError or OSError where the corpus can't be used.
    """
    path = config.PRETRAIN_CORPUS or os.path.join(config.data, "sentences.txt")
    cache = os.path.join(folder, "tokens.npz")
    if keep and os.path.exists(cache):
        return checkpoint.load_tokenizer(folder), dict(np.load(cache))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no {path}: run python download_data.py first, or name a PRETRAIN_CORPUS=")
    with open(path, "rb") as file:
        made_of = f"{hashlib.file_digest(file, 'sha256').hexdigest()} {config.VOCAB_SIZE} {config.HELD_OUT}"
    if os.path.exists(cache):
        corpus = dict(np.load(cache))
        if str(corpus["made_of"]) == made_of:
            return checkpoint.load_tokenizer(folder), corpus
    print(f"learning {config.VOCAB_SIZE:,} tokens from {path}, then applying them: minutes, once")
    articles = read_articles(path)
    if len(articles) < 2:
        raise ValueError(f"{path} holds {len(articles)} articles or lines: too little to train on")
    if config.VOCAB_SIZE > 2**16:
        raise ValueError(f"VOCAB_SIZE={config.VOCAB_SIZE} is more than the 65,536 tokens that the cache can tell apart")
    tokenizer = checkpoint.train_tokenizer([p for i, article in enumerate(articles) if not held_out(i) for p in article],
                                           config.VOCAB_SIZE)
    tokens, starts, firsts = tokenize(articles, tokenizer)
    corpus = {"tokens": tokens, "starts": starts, "firsts": firsts, "made_of": np.array(made_of)}
    buffer = io.BytesIO()
    np.savez(buffer, **corpus)
    checkpoint.write_atomically(os.path.join(folder, "tokenizer.json"), tokenizer.to_str().encode())
    checkpoint.write_atomically(cache, buffer.getvalue())
    return checkpoint.load_tokenizer(folder), corpus


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


def rows_of(batch, tokens):
    """The token ids of a batch of spans: [CLS] span [SEP], int64 (B, T)."""
    idx = np.empty((len(batch), batch[0, 1] + 2), np.int64)
    idx[:, 0], idx[:, -1] = CLS, SEP
    idx[:, 1:-1] = tokens[batch[:, :1] + np.arange(batch[0, 1])]
    return idx


def mask(idx, rng, vocab_size):
    """Hide MASK_RATE of the tokens, none of them special: 80% become [MASK], 10% a random token, 10% stay.

    idx: (B, T). Returns the ids with the changes (B, T), the places to predict as indices into B * T, and what stood there.
    Source: BERT, section 3.1.
    """
    candidates = np.flatnonzero(idx >= N_SPECIAL)
    places = rng.permutation(candidates)[:math.ceil(config.MASK_RATE * len(candidates))]
    hidden = idx.copy()
    first, second = round(0.8 * len(places)), round(0.9 * len(places))
    hidden.flat[places[:first]] = MASK
    hidden.flat[places[first:second]] = rng.integers(N_SPECIAL, vocab_size, second - first)
    return hidden, places, idx.flat[places]


# ---------------------------------------------------------------------------- the model

class MaskedLanguageHead(nn.Module):
    """From hidden states to scores for every token of the vocabulary, through the token embedding. Source: BERT's code."""

    def __init__(self, encoder):
        super().__init__()
        vocab_size, n_embd = encoder.token_embedding.weight.shape
        self.dense = nn.Linear(n_embd, n_embd)
        self.norm = nn.LayerNorm(n_embd, encoder.shape["eps"])
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        encoder._initialise(self.dense)

    def forward(self, hidden, embedding):
        """hidden: (M, C); embedding: the encoder's token embedding (V, C). Returns (M, V)."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), embedding, self.bias)

    def weights(self):
        """The weights by the names of Hugging Face's BertForMaskedLM; the decoder is its embedding."""
        return {"cls.predictions.bias": self.bias, "cls.predictions.transform.dense.weight": self.dense.weight,
                "cls.predictions.transform.dense.bias": self.dense.bias,
                "cls.predictions.transform.LayerNorm.weight": self.norm.weight,
                "cls.predictions.transform.LayerNorm.bias": self.norm.bias}


@torch.no_grad()
def show_neighbours(encoder):
    """Start four heads of the first two layers at looking one and two tokens to the left and to the right.

    A new BERT attends evenly to all tokens, sees a bag of words, and learns little more than their frequencies until it
    has found out where a neighbour is, which takes millions of tokens. Here it is told. Position t is a clock with D/2
    hands, D the width of a head: hand k stands at the angle w_k t, w_k = 2 pi (k + 1/2) / D. Two such clocks match
    (sum_k cos w_k (i - j) is D/2) where i = j, and cancel to 0 at every other distance below D. So a query that
    turns its hands on by w_k * offset finds exactly the token at that offset. All of it are ordinary first values of BERT's
    weights, free to change in training.
    """
    size = encoder.token_embedding.embedding_dim // encoder.shape["n_head"] // 2 * 2        # D, even
    amplitude, n_embd = 0.1, encoder.token_embedding.embedding_dim
    speed = 2 * math.pi * (torch.arange(size // 2) + 0.5) / size                            # (D/2,) angle per position
    angle = torch.arange(encoder.n_positions)[:, None] * speed                              # (positions, D/2)
    encoder.segment_embedding.weight.zero_()
    encoder.position_embedding.weight.mul_(0.1)
    encoder.position_embedding.weight[:, :size] = amplitude * torch.cat([angle.cos(), angle.sin()], 1)
    # the LayerNorm divides by the embedding's size: tokens' 0.02 in every dimension, and the clock's in the first D
    shown = amplitude / math.sqrt(0.02**2 + amplitude**2 * size / 2 / n_embd)
    scale = math.sqrt(4 * math.sqrt(n_embd / encoder.shape["n_head"]) / (shown**2 * size / 2))      # a logit of 4
    for block in encoder.blocks[:2]:
        for head, offset in enumerate((-1, 1, -2, 2)[:encoder.shape["n_head"]]):
            turn, eye = speed * offset, torch.eye(size // 2)
            rows = slice(head * (n_embd // encoder.shape["n_head"]), (head + 1) * (n_embd // encoder.shape["n_head"]))
            for layer, cos, sin in ((block.attention.query, turn.cos(), turn.sin()),
                                    (block.attention.key, torch.ones_like(turn), torch.zeros_like(turn))):
                weight = torch.zeros_like(layer.weight[rows])
                weight[:size, :size] = scale * torch.cat([torch.cat([eye * cos, -eye * sin], 1),
                                                          torch.cat([eye * sin, eye * cos], 1)])
                layer.weight[rows] = weight


def computes_bf16(device):
    """Whether the hardware multiplies in bfloat16: a CPU that merely emulates it is many times slower than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def predict(encoder, head, masked):
    """Scores for the hidden tokens of a masked batch. Returns logits (M, V) and the tokens that stood there (M,)."""
    device = encoder.token_embedding.weight.device
    idx, places, targets = (torch.from_numpy(array).to(device) for array in masked)
    with torch.autocast(device.type, torch.bfloat16, enabled=computes_bf16(device)):
        hidden = encoder(idx, None)                                             # (B, T, C)
        hidden = hidden.flatten(0, 1)[places]                                   # (M, C), M = MASK_RATE of B * T
        return head(hidden, encoder.token_embedding.weight).float(), targets


@torch.no_grad()
def validate(encoder, head, masked_batches):
    """Mean loss in nats, and accuracy, over the hidden tokens of masked batches; dropout off."""
    encoder.eval()
    loss = right = count = 0
    for masked in masked_batches:
        logits, targets = predict(encoder, head, masked)
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
        right += (logits.argmax(1) == targets).sum().item()
        count += len(targets)
    encoder.train()
    return loss / count, right / count


def set_dropout(encoder, rate):
    """Set every dropout of the encoder."""
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        elif hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = rate


def stsb(encoder):
    """STS-B dev (Spearman x 100) of the encoder as it is under both poolings, for interest; "" where it was not fetched."""
    scores, pooler = {}, encoder.pooler
    for encoder.pooler in ("cls", "mean"):
        try:
            scores[f"stsb_{encoder.pooler}"] = round(evaluate.measure(encoder, "validation")["spearman"], 2)
        except (OSError, ValueError):
            scores[f"stsb_{encoder.pooler}"] = ""
    encoder.pooler = pooler
    return scores


# ---------------------------------------------------------------------------- the run

def build(tokenizer, corpus, device):
    """A new encoder and its head, and the optimiser for both."""
    torch.manual_seed(config.SEED)
    encoder = SimCSEEncoder(tokenizer, config.N_LAYER, config.N_EMBD, config.N_HEAD, n_positions=config.N_POSITIONS,
                            dropout=config.MLM_DROPOUT).to(device)
    head = MaskedLanguageHead(encoder).to(device)
    show_neighbours(encoder)
    counts = np.bincount(corpus["tokens"], minlength=len(head.bias)) + 1
    with torch.no_grad():                                       # start at the tokens' frequencies
        head.bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
    named = [(name, p) for name, p in [*encoder.named_parameters(), *head.named_parameters()] if not name.startswith("mlp_head")]
    # without decay: vectors, and positions, or those that few inputs reach would fade
    matrices = [p for name, p in named if p.dim() > 1 and "position" not in name]
    others = [p for name, p in named if not (p.dim() > 1 and "position" not in name)]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": config.WEIGHT_DECAY},
                                   {"params": others, "weight_decay": 0.0}],
                                  lr=config.MLM_LEARNING_RATE, betas=(0.9, 0.98), eps=1e-6, fused=device.type != "mps")
    return encoder, head, optimizer


def learning_rate(tokens):
    """The rate after so many tokens: up over WARMUP_TOKENS, constant, down to 0 over the last DECAY_SHARE."""
    up = (tokens + config.TOKENS_PER_STEP) / (config.WARMUP_TOKENS + config.TOKENS_PER_STEP)
    down = (1 - tokens / config.MAX_TOKENS) / config.DECAY_SHARE if config.DECAY_SHARE else 1
    return config.MLM_LEARNING_RATE * max(0.0, min(1.0, up, down))


def stream(corpus, articles, epoch, position):
    """Endless batches of spans from a place in the text on: (epoch, position of the next batch, batch)."""
    while True:
        rng = np.random.default_rng([config.SEED, epoch])
        groups = batches(pack(corpus, articles, rng), rng)
        for position in range(position, len(groups)):
            yield epoch, position + 1, groups[position]
        epoch, position = epoch + 1, 0


def load_state(path, encoder, head, optimizer):
    """Put a stopped run's state in place; returns its progress. Raises ValueError where it is damaged or another recipe's."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:          # zipfile and pickle each raise their own for a damaged file
        raise ValueError(f"{path} can't be read: {str(error).splitlines()[0]}") from None
    for name in RECIPE:
        if state["recipe"].get(name, getattr(config, name)) != getattr(config, name):
            raise ValueError(f"{path} was made with {name}={state['recipe'][name]}, not {getattr(config, name)}")
    encoder.load_state_dict(state["encoder"])
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return state["progress"]


def save_state(path, encoder, head, optimizer, progress):
    """Write all that a stopped run needs, in one step. No generator's state: every step draws from a seed of its own."""
    buffer = io.BytesIO()
    torch.save({"recipe": {name: getattr(config, name) for name in RECIPE}, "encoder": encoder.state_dict(),
                "head": head.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}, buffer)
    checkpoint.write_atomically(path, buffer.getvalue())


def save_encoder(folder, encoder, head):
    """Write the encoder with its head as a checkpoint in half precision: BertForMaskedLM to Hugging Face, a start to SimCSE."""
    weights = {name: tensor.half() for name, tensor in encoder.state_dict().items() if not name.startswith("mlp_head.")}
    checkpoint.save(folder, weights, encoder.shape, encoder.tokenizer, encoder.pooler,
                    head={name: tensor.half() for name, tensor in head.weights().items()})


def write_metrics(folder, history):
    """metrics.csv and the curve drawn from it."""
    if not history:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, history[-1].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    checkpoint.write_atomically(os.path.join(folder, "metrics.csv"), text.getvalue().encode())
    from matplotlib.figure import Figure                        # slow to import
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(xlabel="tokens (millions)", ylabel="loss on masked tokens (nats)")
    millions = [row["tokens"] / 1e6 for row in history]
    axes.plot(millions, [row["train_loss"] for row in history], label="training")
    axes.plot(millions, [row["loss"] for row in history], label="held-out articles")
    axes.legend()
    figure.tight_layout()
    figure.savefig(os.path.join(folder, "curve.png"), dpi=120)


@torch.no_grad()
def fill_masks(encoder, head, sentences):
    """For each sentence with a [MASK], its five likeliest tokens; a list of lists of strings."""
    encoder.eval()
    idx, attention_mask = (tensor.to(encoder.token_embedding.weight.device) for tensor in encoder.tokenize(sentences))
    logits = head(encoder(idx, attention_mask)[idx == MASK], encoder.token_embedding.weight)        # (masks, V)
    return [[encoder.tokenizer.id_to_token(i) for i in row] for row in logits.topk(5).indices.tolist()]


def main():
    device = evaluate.pick_device()
    run = config.MLM_FOLDER.rstrip("/\\") + ".run"
    state_path = os.path.join(run, "state.pt")
    stopped = os.path.exists(state_path)
    if stopped and not (config.RESUME or config.OVERWRITE):
        raise ValueError(f"{run} holds a run already: RESUME=True goes on with it, OVERWRITE=True starts anew")
    resume = stopped and not config.OVERWRITE
    os.makedirs(run, exist_ok=True)
    tokenizer, corpus = prepare(run, keep=resume)
    articles = range(len(corpus["firsts"]) - 1)
    training = [i for i in articles if not held_out(i)]
    encoder, head, optimizer = build(tokenizer, corpus, device)
    progress = {"tokens": 0, "step": 0, "epoch": 0, "position": 0, "seconds": 0.0, "losses": [], "history": []}
    if resume:
        progress = load_state(state_path, encoder, head, optimizer)

    rng = np.random.default_rng([config.SEED, 2**32])           # the same text under the same masks, always
    validation, left = [], config.VALIDATION_TOKENS
    for batch in batches(pack(corpus, [i for i in articles if held_out(i)], rng), rng):
        if left > 0:
            validation.append(mask(rows_of(batch, corpus["tokens"]), rng, tokenizer.get_vocab_size()))
            left -= validation[-1][0].size

    stopping = []
    for number in (signal.SIGINT, signal.SIGTERM):              # finish the step, keep the state
        signal.signal(number, lambda *_: stopping.append(True))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    bar = tqdm(total=config.MAX_TOKENS, initial=progress["tokens"], unit=" tokens", unit_scale=True,
               mininterval=1 if sys.stderr.isatty() else 60)
    saved = clock = time.monotonic()
    encoder.train()
    for epoch, position, batch in stream(corpus, training, progress["epoch"], progress["position"]):
        if stopping or progress["tokens"] >= config.MAX_TOKENS:
            break
        rng = np.random.default_rng([config.SEED, 2**33, progress["step"]])     # each step's own seed: no state to keep
        torch.manual_seed(int(rng.integers(2**63)))
        left = 1 - progress["tokens"] / config.MAX_TOKENS
        set_dropout(encoder, config.MLM_DROPOUT if left <= config.DROPOUT_SHARE else 0.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress["tokens"])
        idx = rows_of(batch, corpus["tokens"])                                  # (B, T)
        logits, targets = predict(encoder, head, mask(idx, rng, tokenizer.get_vocab_size()))
        loss = F.cross_entropy(logits, targets, reduction="sum") / max(1, len(targets))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.GRAD_CLIP)
        optimizer.step()

        before, now = progress["tokens"], time.monotonic()
        progress["losses"].append(loss.item())
        progress.update(tokens=before + idx.size, step=progress["step"] + 1, epoch=epoch, position=position,
                        seconds=progress["seconds"] + now - clock)
        clock = now
        bar.update(idx.size)
        bar.set_postfix(loss=f"{np.mean(progress['losses'][-100:]):.3f}", refresh=False)
        done = progress["tokens"] >= config.MAX_TOKENS
        if done or progress["tokens"] // config.VALIDATION_INTERVAL > before // config.VALIDATION_INTERVAL:
            loss, accuracy = validate(encoder, head, validation)
            row = {"tokens": progress["tokens"], "hours": round(progress["seconds"] / 3600, 3), "rate": group["lr"],
                   "train_loss": round(float(np.mean(progress["losses"])), 4), "loss": round(loss, 4),
                   "accuracy": round(accuracy, 4), **stsb(encoder)}
            progress.update(losses=[], history=[*progress["history"], row])
            bar.write("  ".join(f"{name} {value}" for name, value in row.items()))
            write_metrics(run, progress["history"])
            save_encoder(os.path.join(run, "latest"), encoder, head)
        if stopping or done or now - saved > 60 * config.SAVE_MINUTES:
            save_state(state_path, encoder, head, optimizer, progress)
            saved = now
    bar.close()
    if stopping:
        print(f"what RESUME=True needs is in {run}")
        raise KeyboardInterrupt

    save_encoder(config.MLM_FOLDER, encoder, head)
    write_metrics(config.MLM_FOLDER, progress["history"])
    checkpoint.write_json(os.path.join(config.MLM_FOLDER, "pretraining.json"), {
        "settings": {name: getattr(config, name) for name in [*RECIPE, "MAX_TOKENS"]}, "corpus_sha256": str(corpus["made_of"]).split()[0],
        **{name: progress[name] for name in ("tokens", "step", "epoch", "seconds")}, **progress["history"][-1]})
    print(f"the encoder is in {config.MLM_FOLDER}; what it fills in, likeliest first:")
    for sentence, tokens in zip(EXAMPLES, fill_masks(encoder, head, EXAMPLES)):
        print(f"  {sentence:70} {' '.join(tokens)}")


if __name__ == "__main__":
    config.run(main, __file__)
