"""STS data, pairs of sentences with a score from 0 to 5: STS-B from the Hub, or any STS task from files."""

import csv
import io
from collections import Counter
from pathlib import Path

from support import files
from support.corpora import fetching
from support.files import write_together
from support.sentences import clean
from support.text_files import summary, table_format, table_rows

SAMPLE = files.ROOT / "data" / "stsb_sample"
# the names of the columns, any letter case: ours and those of STS-B, GLUE and SICK
SENTENCES = [("sentence1", "sentence2"), ("sentence_a", "sentence_b")]
SCORES = [
    "score",
    "relatedness_score",
    "similarity",
    "similarity_score",
    "label",
]  # the first of them that is there
# what a folder's files may be called
FILES = {
    "validation": ["validation.csv", "validation.tsv", "dev.csv", "dev.tsv"],
    "test": ["test.csv", "test.tsv"],
}


def read_pairs(path):
    """The pairs of an STS file as [(sentence1, sentence2, score 0-5)], and a Counter of why lines were left out.

    .csv is comma-separated and quoted, .tsv tab-separated and unquoted; the header names the columns. Raises ValueError
    where the file is something else, has other columns or no usable pair.
    """
    if table_format(path) not in (".csv", ".tsv"):
        raise ValueError(
            f"{path} is neither .csv (separated by commas, quoted) nor .tsv (by tabs, not quoted)"
        )
    left_out = Counter()
    rows = table_rows(path, left_out)
    columns = find_columns(next(rows), path)
    return usable_pairs(([row[i] for i in columns] for row in rows), path, left_out)


def find_columns(header, path):
    """Where both sentences and the score stand; raises ValueError where the header does not say, or says it twice."""
    names = [name.strip().lower() for name in header]
    sentences = [pair for pair in SENTENCES if set(pair) <= set(names)]
    scores = [name for name in SCORES if name in names]
    if len(sentences) == 1 and scores:
        wanted = [*sentences[0], scores[0]]
        if all(names.count(name) == 1 for name in wanted):
            return [names.index(name) for name in wanted]
    separated = {".csv": "commas", ".tsv": "tabs"}[table_format(path)]
    if table_format(path) == ".csv" and any("\t" in name for name in header):
        separated += "; what is separated by tabs must be called .tsv"
    raise ValueError(
        f"{path} needs a header line with sentence1, sentence2, score (or sentence_A, sentence_B, relatedness_score) "
        f"among its columns, separated by {separated}; its first line is {', '.join(header)[:80]!r}"
    )


def usable_pairs(rows, name, left_out):
    """The usable ones of rows (sentence1, sentence2, score), cleaned, and the Counter of why others were left out.

    Raises ValueError, with the name of where they come from, if none is usable.
    """
    pairs = []
    for first, second, score in rows:
        first, second = clean(first or ""), clean(second or "")
        try:
            score = float(score)
        except (TypeError, ValueError):
            left_out["with a score that is not a number"] += 1
            continue
        if not first or not second:
            left_out["with an empty sentence"] += 1
        elif score == -1:  # what GLUE's test split has for all of them
            left_out["with a hidden score (-1)"] += 1
        elif not 0 <= score <= 5:  # nor is nan
            left_out["with a score not from 0 to 5"] += 1
        else:
            pairs.append((first, second, score))
    if not pairs:
        raise ValueError(f"{name} holds no usable sentence pair ({summary(left_out) or 'it is empty'})")
    return pairs, left_out


# ---- STS-B, {"validation": (pairs, Counter of what was left out), "test": the same, empty where there is none}


def load(source):
    """STS-B from "hub", "sample", or a folder by its name; raises ValueError or OSError where it can't be used."""
    if source == "hub":
        return from_hub()
    return from_folder(SAMPLE if source == "sample" else Path(source).expanduser())


def from_folder(folder):
    """STS-B, or pairs of one's own, from the files of a folder; raises ValueError where they can't be used."""
    if not folder.is_dir():
        raise ValueError(f"STSB={folder} is neither auto, hub, sample nor a folder")
    splits = {}
    for split, names in FILES.items():
        found = [folder / name for name in names if (folder / name).is_file()]
        if len(found) > 1:
            both = " and ".join(path.name for path in found)
            raise ValueError(f"{folder} holds {both}: leave one of them, so that it is clear which is meant")
        splits[split] = read_pairs(found[0]) if found else ([], Counter())
    if not splits["validation"][0]:
        raise ValueError(f"STSB={folder} holds no validation.csv or .tsv, nor dev.csv or .tsv")
    return splits


def from_hub():
    """STS-B (Cer et al., 2017) from the Hub; raises OSError where it can't be had."""
    with fetching("nyu-mll/glue"):
        from datasets import load_dataset

        glue = load_dataset("nyu-mll/glue", "stsb", split="validation")
    with fetching(
        "sentence-transformers/stsb"
    ):  # GLUE hides the scores of its test split; here they are, from 0 to 1
        labelled = load_dataset("sentence-transformers/stsb", split="test")
    validation = [(row["sentence1"], row["sentence2"], row["label"]) for row in glue]
    test = [(row["sentence1"], row["sentence2"], round(5 * row["score"], 4)) for row in labelled]
    return {
        "validation": usable_pairs(validation, "nyu-mll/glue", Counter()),
        "test": usable_pairs(test, "sentence-transformers/stsb", Counter()),
    }


def write(folder, splits):
    """Write validation.csv and test.csv; an empty split has no file afterwards."""
    contents = {folder / f"{split}.csv": pairs for split, (pairs, _) in splits.items()}
    write_together({path: as_csv(pairs) for path, pairs in contents.items() if pairs})
    for path, pairs in contents.items():
        if not pairs:
            path.unlink(missing_ok=True)  # it came from another source


def as_csv(pairs):
    """Pairs as a CSV file with a header, in bytes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("sentence1", "sentence2", "score"), *pairs])
    return text.getvalue().encode()


def describe(pairs, left_out):
    """In words: how many pairs, what was left out, and a warning where the scores can't be what they should."""
    text = f"{len(pairs):,} pairs" + (f"; left out: {summary(left_out)}" if left_out else "")
    scores = {score for *_, score in pairs}
    if len(scores) == 1:
        text += "\nwarning: all these scores are equal, so there is no order to compare with"
    elif pairs and max(scores) <= 1:
        text += "\nwarning: none of these scores is above 1, yet the scale is 0 to 5"
    return text
