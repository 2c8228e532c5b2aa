"""The STS-B protocol of the paper: dropout off, MLP head off, cosine similarity, Spearman correlation."""

import csv
import math
import os
import re
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

import config
from checkpoint import find, load_pooler, read_json
from config import first_line
from model import SimCSEEncoder, alignment_and_uniformity


def pick_device(name):
    """The torch device of a name; "auto" takes cuda, else mps, else cpu. Raises ValueError for one that isn't there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)                   # torch's random state and clocks are those of the current one
        (torch.zeros(1, device=device) + 1).item()          # some devices exist by name only
        return device
    except Exception as error:                              # each back end has its own
        raise ValueError(f"DEVICE={name} can't be used: {first_line(error)}") from None


def computes_in_bf16(device):
    """Whether bfloat16 arithmetic is in the hardware; emulated, it is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def load_sts_b(split="validation"):
    """The sentence pairs of a split and their scores, as download_data.py wrote them.

    Returns two lists of N strings and a float array (N,) of human scores from 0 to 5.
    Raises FileNotFoundError where the split was not fetched, ValueError where it is damaged or its scores can't be ranked.
    """
    path = os.path.join(config.data, "stsb", f"{split}.csv")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {path}: run python download_data.py first")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [(row["sentence1"], row["sentence2"], float(row["score"])) for row in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not as download_data.py writes it ({error}): run that again, STSB= takes your own") from None
    sentences1, sentences2, scores = zip(*rows) if rows else ((), (), ())
    if not all(sentence for sentence in sentences1 + sentences2) or not all(0 <= score <= 5 for score in scores):
        raise ValueError(f"{path} has an empty sentence or a score not from 0 to 5: run download_data.py STSB= on it")
    if len(set(scores)) < 2:
        raise ValueError(f"{path} holds {len(rows)} pairs and no two different scores: there is nothing to rank")
    return list(sentences1), list(sentences2), np.array(scores)


def sources():
    """What download_data.py wrote down of where the data comes from; {} where it was put there by hand."""
    return read_json(config.data, "sources.json") if os.path.exists(os.path.join(config.data, "sources.json")) else {}


def stsb_name():
    """What data/stsb holds, for every line that prints a score: STS-B, a sample that is no benchmark, or a folder's name."""
    stsb = sources().get("stsb", {})
    if not isinstance(stsb, dict) or not isinstance(stsb.get("source", ""), str):
        raise ValueError(f"{os.path.join(config.data, 'sources.json')} is not as download_data.py writes it: run that again")
    if stsb.get("sample"):
        return "sample, no benchmark"
    return "STS-B" if stsb.get("source") == "hub" else os.path.basename(stsb.get("source", "data/stsb").rstrip("/\\"))


@torch.no_grad()
def encode_sentences(encoder, sentences, device=None):
    """Embeddings of sentences in the order given, dropout off, MLP head off; the encoder's mode is put back afterwards.

    device: default is where the encoder is. Returns a float32 numpy array (N, n_embd).
    """
    if device is not None:
        encoder.to(device)
    device = encoder.token_embedding.weight.device
    batch_size = 32 if device.type == "cpu" else 512                    # a CPU's caches hold no more
    idx, attention_mask = encoder.tokenize(sentences)
    lengths = attention_mask.sum(1)
    embeddings = torch.empty(len(sentences), encoder.token_embedding.embedding_dim)
    was_training = encoder.training
    encoder.eval()                                                      # dropout off
    try:
        for rows in lengths.argsort(stable=True).split(batch_size):     # sentences of one length waste no padding
            if len(rows):
                T, padded = lengths[rows[-1]], bool(lengths[rows[0]] < lengths[rows[-1]])
                mask = attention_mask[rows, :T].to(device) if padded else None
                embeddings[rows] = encoder.encode(idx[rows, :T].to(device), mask, project=False).float().cpu()     # head off
    finally:
        encoder.train(was_training)
    return embeddings.numpy()


def measure(encoder, split="validation", device=None):
    """STS-B as the paper measures it: Spearman x 100, alignment over the pairs scored above 4, uniformity over all sentences.

    And length, the Spearman x 100 of the cosine with the difference of a pair's lengths in words, to see whether embeddings
    tell length. Returns a dict of floats: spearman, alignment, uniformity, length; nan where one is not defined.
    Source: SimCSE, sections 3 and 6; alpha = 2, t = 2.
    """
    sentences1, sentences2, scores = load_sts_b(split)
    # in float64: the cosines of an untrained encoder lie so close together that float32 would make ties of them
    z1, z2 = torch.from_numpy(encode_sentences(encoder, sentences1 + sentences2, device)).double().chunk(2)     # (N, C) each
    cosine = F.cosine_similarity(z1, z2)
    close = torch.from_numpy(scores > 4)
    alignment, _ = alignment_and_uniformity(z1[close], z2[close])
    _, uniformity = alignment_and_uniformity(z1, z2)
    words = np.array([[len(re.findall(r"\w+", sentence)) for sentence in side] for side in (sentences1, sentences2)])
    return {"spearman": spearman(cosine.numpy(), scores), "alignment": alignment, "uniformity": uniformity,
            "length": spearman(cosine.numpy(), np.abs(words[0] - words[1]))}


def evaluate_stsb(encoder, split="validation", device=None):
    """Spearman correlation x 100 between the cosines of the embeddings and the human scores of a split."""
    return measure(encoder, split, device)["spearman"]


def spearman(predicted, scores):
    """Spearman's rank correlation x 100 of two arrays (N,): Pearson's, of the ranks. nan where a side is constant or not finite."""
    def ranks(values):
        _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[which]            # equal values share the mean of their ranks

    if not np.isfinite(predicted).all() or np.ptp(predicted) == 0 or np.ptp(scores) == 0:
        return math.nan
    return float(np.corrcoef(ranks(predicted), ranks(scores))[0, 1]) * 100


def bag_of_words(sentences1, sentences2, tf_idf=False):
    """The floor: cosine of the pairs' word counts (lower-cased), or of tf-idf weights over these same sentences. Array (N,)."""
    bags = [Counter(re.findall(r"\w+", sentence.lower())) for sentence in sentences1 + sentences2]
    if tf_idf:
        df = Counter(word for bag in bags for word in bag)
        bags = [{word: n * math.log(len(bags) / df[word]) for word, n in bag.items()} for bag in bags]
    norms = [math.sqrt(sum(weight ** 2 for weight in bag.values())) or 1.0 for bag in bags]
    n = len(sentences1)
    return np.array([sum(weight * bags[n + i].get(word, 0) for word, weight in bags[i].items()) / norms[i] / norms[n + i]
                     for i in range(n)])


def newest_run():
    """The run folder that was written last; raises FileNotFoundError where there is none."""
    runs = [entry.path for entry in os.scandir(config.checkpoints) if os.path.exists(os.path.join(entry.path, "run.json"))
            and os.path.exists(os.path.join(entry.path, "model.safetensors"))] if os.path.isdir(config.checkpoints) else []
    if not runs:
        raise FileNotFoundError(f"there is no run in {config.checkpoints}: train one with python train.py, or name a CHECKPOINT=")
    return max(runs, key=lambda run: os.path.getmtime(os.path.join(run, "run.json")))


def print_table(rows):
    """Print rows of (encoder, pooler, Spearman, alignment, uniformity), numbers or None, each with the name of its data."""
    def number(value, digits):
        return "" if value is None else "undefined" if math.isnan(value) else f"{value:.{digits}f}"
    table = [("encoder", "pooler", "data", "Spearman", "alignment", "uniformity")]
    table += [(encoder, pooler, f"{stsb_name()}, {config.SPLIT}", number(score, 2), number(alignment, 3), number(uniformity, 3))
              for encoder, pooler, score, alignment, uniformity in rows]
    widths = [max(len(row[column]) for row in table) for column in range(6)]
    for row in table:
        print("  ".join(cell.ljust(width) if column < 3 else cell.rjust(width)
                        for column, (cell, width) in enumerate(zip(row, widths))).rstrip())


def main():
    device = pick_device(config.DEVICE)
    if config.CHECKPOINT:
        last = find(config.CHECKPOINT)
        rows = {config.CHECKPOINT: last}
    else:
        last = newest_run()
        init = config.located(read_json(last, "run.json").get("init", "random"))
        rows = {f"start: {config.shown(init)}": os.path.join(last, "start") if init == "random" else init, config.shown(last): last}
    sentences1, sentences2, scores = load_sts_b(config.SPLIT)
    # the start is pooled as the run is, and the run as it was trained, unless the shell says otherwise
    pooler = config.POOLER if "POOLER" in config.overridden else load_pooler(last)
    table = []
    for name, folder in rows.items():
        result = measure(SimCSEEncoder.from_pretrained(folder, pooler=pooler), config.SPLIT, device)
        table.append((name, pooler, result["spearman"], result["alignment"], result["uniformity"]))
    for name, tf_idf in (("bag of words", False), ("TF-IDF", True)):
        table.append((name, "", spearman(bag_of_words(sentences1, sentences2, tf_idf), scores), None, None))
    print_table(table)


if __name__ == "__main__":
    config.run(main, __file__)
