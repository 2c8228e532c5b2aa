"""The STS-B protocol of the paper: dropout off, MLP head off, cosine similarity, Spearman's rank correlation."""

import csv
import functools
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import ConstantInputWarning, spearmanr

import config
from model import SimCSEEncoder, alignment_and_uniformity
from support import command_line, files, hub, runs
from support.baselines import bag_of_words
from support.checkpoint import load_pooler
from support.device import pick_device
from support.sources import stsb_label

KNOBS = ["CHECKPOINT", "EVAL_POOLER", "SPLIT", "DEVICE"]
warnings.simplefilter("ignore", ConstantInputWarning)  # cosines that are all the same give nan, which says it


@functools.cache  # a run is scored on the pairs that it began with
def load_sts_b(split="validation"):
    """The sentence pairs of a split of STS-B, and how alike people found them.

    Returns two lists of N strings and a float array (N,) of scores from 0 to 5.
    Raises FileNotFoundError where the split was not fetched, ValueError where it is damaged or can't be ranked.
    """
    path = files.DATA / "stsb" / f"{split}.csv"
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: run python download_data.py first")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        sentences1, sentences2 = [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]
        scores = np.array([float(row["score"]) for row in rows])
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not as download_data.py writes it ({error}): run that again") from None
    if not all(sentences1 + sentences2) or not ((scores >= 0) & (scores <= 5)).all():
        raise ValueError(f"{path} has an empty sentence or a score not from 0 to 5: run download_data.py")
    if len(set(scores)) < 2:
        raise ValueError(f"{path} has {len(rows)} pairs, no two with different scores: nothing to rank")
    return sentences1, sentences2, scores


@torch.no_grad()
def encode_sentences(encoder, sentences, device=None):
    """Embeddings of sentences, in the order given: dropout off, MLP head off, float32; the encoder's mode is put back.

    device: default is where the encoder is. Returns a float32 numpy array (N, C).
    """
    device = torch.device(device or encoder.token_embedding.weight.device)
    encoder.to(device)
    batch_size = 32 if device.type == "cpu" else 512  # a CPU's caches hold no more
    embeddings = np.empty((len(sentences), encoder.token_embedding.embedding_dim), np.float32)
    was_training = encoder.training
    encoder.eval()  # dropout off
    order = np.argsort([len(sentence) for sentence in sentences], kind="stable")  # to pad little
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        idx, attention_mask = encoder.tokenize([sentences[row] for row in rows])  # (B, T), (B, T)
        embedding = encoder.encode(idx.to(device), attention_mask.to(device), project=False)  # no head
        embeddings[rows] = embedding.float().cpu()
    encoder.train(was_training)
    return embeddings


def evaluate_stsb(encoder, split="validation", device=None, embeddings=None):
    """Spearman correlation x 100 between the cosines of the pairs and the human scores; nan where all are alike.

    embeddings: those of both sides, (N, C) each, where they are at hand. Source: SimCSE, section 6.1 and appendix B.
    """
    sentences1, sentences2, scores = load_sts_b(split)
    if embeddings is None:
        emb1 = encode_sentences(encoder, sentences1, device)
        emb2 = encode_sentences(encoder, sentences2, device)
    else:
        emb1, emb2 = embeddings
    e1 = F.normalize(torch.from_numpy(emb1), dim=-1)
    e2 = F.normalize(torch.from_numpy(emb2), dim=-1)
    cosine = (e1 * e2).sum(dim=-1).numpy()  # (N,)
    return float(spearmanr(cosine, scores).statistic) * 100


def measure(encoder, split="validation", device=None):
    """STS-B, and the geometry of the space as the paper measures it there: alignment over the pairs that people scored
    above 4 (nan where there is none), uniformity over all sentences.

    Returns a dict of three floats: spearman (x 100), alignment, uniformity. Source: SimCSE, section 3.
    """
    sentences1, sentences2, scores = load_sts_b(split)
    emb1, emb2 = (encode_sentences(encoder, side, device) for side in (sentences1, sentences2))
    z1, z2, close = torch.from_numpy(emb1), torch.from_numpy(emb2), torch.from_numpy(scores > 4)
    alignment, _ = alignment_and_uniformity(z1[close], z2[close])
    _, uniformity = alignment_and_uniformity(z1, z2)
    spearman = evaluate_stsb(encoder, split, device, (emb1, emb2))
    return {"spearman": spearman, "alignment": alignment, "uniformity": uniformity}


def print_row(name, pooler, tokens, spearman, *geometry):
    """A line of the table: an encoder, how it pools, at how many tokens it cuts, the data, and its numbers."""
    numbers = [f"{spearman:.2f}", *(f"{number:.3f}" for number in geometry)]
    cells = [f"{number.replace('nan', 'undefined'):>11}" for number in numbers]
    print(f"{name} {pooler:6} {tokens!s:6} {f'{stsb_label()}, {config.SPLIT}':32}", *cells)


def main():
    device = pick_device(config.DEVICE)
    last = hub.find(config.CHECKPOINT) if config.CHECKPOINT else runs.newest_run()
    encoders = {config.CHECKPOINT: last}
    if not config.CHECKPOINT:
        start = runs.start_of(last)
        encoders = {f"start: {files.shown(start)}": start, files.shown(last): last}
    pooler = load_pooler(last, config.EVAL_POOLER or None)  # the start is pooled as the run is
    sentences1, sentences2, scores = load_sts_b(config.SPLIT)
    width = max(map(len, [*encoders, "bag of words"]))
    print(f"{'encoder':{width}} pooler tokens {'data':32}    Spearman   alignment  uniformity")
    for name, folder in encoders.items():
        encoder = SimCSEEncoder.from_pretrained(folder, pooler)
        result = measure(encoder, config.SPLIT, device)
        print_row(name.ljust(width), pooler, encoder.max_seq_len, *result.values())
    for name, tf_idf in (("bag of words", False), ("TF-IDF", True)):
        cosine = bag_of_words(sentences1, sentences2, tf_idf)
        print_row(name.ljust(width), "", "", spearmanr(cosine, scores).statistic * 100)


if __name__ == "__main__":
    command_line.run(main, "evaluate.py", [config], KNOBS)
