"""Fetch the data: sentences to train on, and STS-B to be scored on.

Writes data/sentences.txt, data/stsb/{validation,test}.csv, and data/sources.json, which says where they came from.
A file is replaced once the new one is complete: a run that fails leaves the data of the one before.
"""

import hashlib
import random
from collections import Counter
from pathlib import Path

from tqdm import tqdm

import config
from support import command_line, corpora, files, sources, sts_files
from support.sentences import clean, count_words, split_sentences
from support.text_files import summary

CORPORA = {  # in the order in which auto tries them
    "wikitext": (corpora.wikitext, "WikiText-103, the chapter's corpus"),
    "wiki1m": (corpora.wiki1m, "a million sentences of Wikipedia, the paper's corpus"),
    "vital": (corpora.vital, "the introductions of Wikipedia's vital articles, CC BY-SA 4.0"),
}


def problem(sentence):
    """Why a sentence is of no use for training; "" where it is."""
    if len(sentence) < 20:
        return "shorter than 20 characters"
    if len(sentence) > 200:
        return "longer than 200 characters"
    if "<unk>" in sentence:
        return "with <unk>"
    if "\ufffd" in sentence:
        return "with an unreadable character"
    return "fewer than 3 words" if count_words(sentence) < 3 else ""


def draw_sentences(paragraphs, counts):
    """Up to MAX_SENTENCES unique, usable sentences of an iterable of texts: a fair draw from all of it, shuffled.

    Adds to the Counter `counts` what was read, and why something was left out. In memory are the sentences kept so far,
    and some 80 bytes for each different one seen.
    """
    limit, draw, seen, kept = config.MAX_SENTENCES, random.Random(config.SEED), set(), []
    for paragraph in paragraphs:
        counts["paragraphs read"] += 1
        for sentence in [s for line in paragraph.splitlines() for s in split_sentences(clean(line))]:
            counts["sentences found"] += 1
            letters = "".join(sentence.casefold().split())
            key = hashlib.blake2b(letters.encode(), digest_size=8).digest()
            reason = problem(sentence) or ("seen before (case and spacing aside)" if key in seen else "")
            if reason:
                counts[reason] += 1
                continue
            seen.add(key)
            # reservoir sampling: each sentence is as likely to stay as any other
            if len(kept) < limit:
                kept.append(sentence)
            elif (place := draw.randrange(len(seen))) < limit:
                kept[place] = sentence
    if len(seen) > limit:
        counts[f"not drawn (MAX_SENTENCES={limit:,})"] = len(seen) - limit
    draw.shuffle(kept)
    return kept


def load_sentences(source):
    """(sentences, Counter of what was read and left out) of a corpus by its name, or of a file."""
    counts = Counter({"paragraphs read": 0, "sentences found": 0})
    paragraphs = CORPORA[source][0](counts) if source in CORPORA else corpora.own_file(source, counts)
    progress = tqdm(paragraphs, desc=source, unit=" paragraphs", unit_scale=True, leave=False, delay=1)
    kept = draw_sentences(progress, counts)
    if not kept:
        raise ValueError(f"{source} holds no usable sentence ({summary(counts)})")
    return kept, counts


def get_sentences():
    """Write data/sentences.txt from the source that config.CORPUS names, unless that is done already."""
    path = files.DATA / "sentences.txt"
    asked = [config.CORPUS, config.SEED, config.MAX_SENTENCES]
    done = sources.unchanged("sentences", asked, path)
    if done and config.CORPUS in ("auto", *CORPORA):
        kept = f"{done['kept']:,} from {done['source']}"
        print(f"sentences: {kept}, there already; delete data/sentences.txt to fetch anew")
        return
    choices = list(CORPORA) if config.CORPUS == "auto" else [config.CORPUS]
    source, (kept, counts) = sources.first_that_works(choices, load_sentences)
    name = CORPORA[source][1] if source in CORPORA else Path(source).name
    files.write_atomically(path, "".join(sentence + "\n" for sentence in kept).encode())
    numbers = {"read": counts["sentences found"], "kept": len(kept), "seed": config.SEED}
    sources.record("sentences", [path], source=source, name=name, asked=asked, **numbers)
    print(f"sentences: {source} ({name})")
    for reason, n in {**counts, "kept in data/sentences.txt": len(kept)}.items():
        print(f"  {reason:70}{n:>12,}")
    if len(kept) < config.BATCH_SIZE:
        print(f"warning: that is less than BATCH_SIZE={config.BATCH_SIZE}, too little to train on")


def get_stsb():
    """Write data/stsb/{validation,test}.csv from the source that config.STSB names, unless that is done already."""
    folder = files.DATA / "stsb"
    paths = [folder / "validation.csv", folder / "test.csv"]
    done = sources.unchanged("stsb", config.STSB, *paths)
    if done and config.STSB in ("auto", "hub"):
        sample = " (a sample, no benchmark; STSB=hub asks the Hub again)" if done["sample"] else ""
        print(f"STS-B: {done['source']}{sample}, there already; delete data/stsb to fetch anew")
        return
    choices = ["hub", "sample"] if config.STSB == "auto" else [config.STSB]
    source, splits = sources.first_that_works(choices, sts_files.load)
    sources.record("stsb", [])  # until all is written, data/stsb is nobody's
    sts_files.write(folder, splits)
    numbers = {split: len(pairs) for split, (pairs, _) in splits.items()}
    sample = source == "sample"
    sources.record("stsb", paths, source=source, sample=sample, asked=config.STSB, **numbers)
    for split, (pairs, left_out) in splits.items():
        label = "STS-B sample (no benchmark)" if sample else f"STS-B from {source}"
        print(f"{label}: {split}, {sts_files.describe(pairs, left_out)}")


def main():
    # held against a second download_data.py; a training run beside it finds each file whole, the old one or the new
    with files.lock(files.DATA, "data/"):
        get_sentences()
        get_stsb()


if __name__ == "__main__":
    knobs = ["CORPUS", "STSB", "MAX_SENTENCES", "SEED", "BATCH_SIZE"]
    command_line.run(main, "download_data.py", [config], knobs)
