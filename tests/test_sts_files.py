"""The reader of STS files: any table comes back row for row, and a damaged line costs that line alone."""

import csv
import io
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from support.sts_files import from_folder, read_pairs
from support.text_files import IRREGULAR, table_rows
from tests.conftest import SHARED

HEADER = "sentence1,sentence2,score\n"
TABS = "sentence1\tsentence2\tscore\n"
# what str.splitlines would end a line at, and a file does not
NO_LINE_ENDS = "\f\v\x1c\x1d\x1e\x85\u2028\u2029"


def read(text, folder, name="validation.csv"):
    path = Path(folder) / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_pairs(path)


@pytest.mark.parametrize(
    "name, text, pairs, left_out",
    [
        (".csv", HEADER + "a b,c d,2.5\n", [("a b", "c d", 2.5)], {}),
        (".csv", "score,genre,sentence2,sentence1\n4,news,c,a\n", [("a", "c", 4.0)], {}),
        (".csv", "Sentence1, Sentence2 ,LABEL,idx\na,c,4,0\n", [("a", "c", 4.0)], {}),
        (".csv", HEADER + '"a, b","c ""d""\ne",1\n', [("a, b", 'c "d" e', 1.0)], {}),
        (".csv", '"sentence1","sentence2","score"\r\n"a","b","1"\r\n', [("a", "b", 1.0)], {}),
        (".csv", HEADER + 'he said "yes" twice,b,1\n', [('he said "yes" twice', "b", 1.0)], {}),
        (".csv", "\ufeff" + HEADER.replace("\n", "\r\n") + "a,b,3\r\n\r\n", [("a", "b", 3.0)], {}),
        (".csv", HEADER.replace("\n", "\r") + "a,b,3\rc,d,4", [("a", "b", 3.0), ("c", "d", 4.0)], {}),
        (
            ".csv",
            HEADER + "a,b,3\na,b,high\na,b,\n",
            [("a", "b", 3.0)],
            {"with a score that is not a number": 2},
        ),
        (
            ".csv",
            HEADER + "a,b, 3 \na,b,5.1\na,b,-0.5\na,b,nan\na,b,inf\n",
            [("a", "b", 3.0)],
            {"with a score not from 0 to 5": 4},
        ),
        (".csv", HEADER + "a,b,3\n,b,3\na,  ,3\n", [("a", "b", 3.0)], {"with an empty sentence": 2}),
        (".csv", HEADER + "a,b,3\na,b,-1\n", [("a", "b", 3.0)], {"with a hidden score (-1)": 1}),
        (".csv", HEADER + "a,b,3\na, b, c,3\na\n", [("a", "b", 3.0)], {IRREGULAR: 2}),
        (".csv", HEADER + "a\0,b\t x,3\n", [("a", "b x", 3.0)], {}),
        (
            ".csv",
            HEADER.encode() + b"caf\xe9,b,3\n",
            [("café", "b", 3.0)],
            {"lines not in UTF-8 (kept: those bytes were read as Windows-1252)": 1},
        ),
        (
            ".csv",
            "pair_ID,sentence_A,sentence_B,entailment_label,relatedness_score,label\n1,a,b,NEUTRAL,4.5,1\n",
            [("a", "b", 4.5)],
            {},
        ),
        (".tsv", TABS + "a, b\tc\t1\n", [("a, b", "c", 1.0)], {}),
        (".tsv", TABS + '"a\tc\t1\nb\td"\t2\n', [('"a', "c", 1.0), ("b", 'd"', 2.0)], {}),
        (".tsv", TABS + '"a\tb"\tc\t1\n', None, {IRREGULAR: 1}),
        (
            ".tsv",
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
            "0\tnews\tx\t2012\t1\tnone\tnone\ta\tb\t2.5\n",
            [("a", "b", 2.5)],
            {},
        ),
        (
            ".tsv",
            "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n1\ta\tb\t4.5\tNEUTRAL\n",
            [("a", "b", 4.5)],
            {},
        ),
        (".TSV", "sentence1\tsentence2\tsimilarity\na\tb\t2\n", [("a", "b", 2.0)], {}),
    ],
)
def test_read_pairs(name, text, pairs, left_out, tmp_path):
    if pairs is None:
        with pytest.raises(ValueError, match=f"1 {IRREGULAR}"):
            read(text, tmp_path, "dev" + name)
    else:
        assert read(text, tmp_path, "dev" + name) == (pairs, left_out)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.csv", "", "needs a header line with sentence1, sentence2, score"),
        ("a.csv", HEADER, "holds no usable sentence pair .it is empty"),
        ("a.csv", HEADER + "a,b,-1\nc,d,-1\n", "2 with a hidden score"),
        ("a.csv", HEADER + '"' + "a" * 200_000 + '",b,3\n', f"1 {IRREGULAR}"),
        ("a.csv", "premise,hypothesis,label\na,b,3\n", "its first line is 'premise, hypothesis, label'"),
        ("a.csv", "a,b,3\nc,d,4\n", "needs a header line"),
        ("a.csv", "sentence1,sentence2,score,score\na,b,3,4\n", "needs a header line"),
        ("a.csv", TABS + "a\tb\t3\n", "what is separated by tabs must be called .tsv"),
        ("a.tsv", HEADER + "a,b,3\n", "separated by tabs; its first line is 'sentence1,sentence2,score'"),
        ("a.txt", HEADER + "a,b,3\n", "is neither .csv .separated by commas, quoted. nor .tsv"),
        ("a.csv", (HEADER + "a,b,3\n").encode("utf-16"), "is UTF-16: save it as UTF-8"),
        ("a.csv", (HEADER + "a,b,3\n").encode("utf-32"), "is UTF-32: save it as UTF-8"),
        ("a.csv", b"PK\x03\x04....", "is a zip or an office file"),
        ("a.csv", b"%PDF-1.7", "is a PDF"),
    ],
)
def test_what_is_refused(name, text, said, tmp_path):
    with pytest.raises(ValueError, match=said) as error:
        read(text, tmp_path, name)
    assert name in str(error.value) and "\n" not in str(error.value)


# STS-B's original layout: seven columns, no quoting, quotation marks as they come

ORIGINAL = "genre\tfilename\tyear\tid\tscore\tsentence1\tsentence2\n"
ROWS = [
    f'main-news\tMSRpar\t2012test\t{i}\t{i % 6}.0\tHe said "yes {i}.\tShe" said no {i}.\n' for i in range(200)
]
EXPECTED = [(f'He said "yes {i}.', f'She" said no {i}.', float(i % 6)) for i in range(200)]


@pytest.mark.parametrize("character", ["", *NO_LINE_ENDS])
@pytest.mark.parametrize("at_end", ["", "\n", "\r\n", "\n\n\n", "no row at all\n"])
@pytest.mark.parametrize("eighth", ["", "\tlicence"])
def test_no_line_of_the_original_layout_changes_how_others_are_read(character, at_end, eighth, tmp_path):
    rows = list(ROWS)
    rows[50] = rows[50].replace("yes 50", f"yes{character} 50")
    expected = list(EXPECTED)
    cell = f'He said "yes{character} 50.'.replace("\x1c", "").replace("\x1d", "").replace("\x1e", "")
    expected[50] = (" ".join(cell.split()), *expected[50][1:])
    left_out = Counter()
    if eighth:
        rows[100] = rows[100].replace("\n", eighth + "\n")
        del expected[100]
        left_out[IRREGULAR] += 1
    left_out[IRREGULAR] += at_end.startswith("no row")
    pairs, found = read(ORIGINAL + "".join(rows) + at_end, tmp_path, "dev.tsv")
    assert len(pairs) == len(expected) and set(pairs) - set(expected) <= {expected[50], pairs[50]}
    assert [pair for i, pair in enumerate(pairs) if i != 50] == [
        pair for i, pair in enumerate(expected) if i != 50
    ]
    assert pairs[50][0].startswith('He said "yes') and pairs[50][0].endswith("50.")
    assert +found == +left_out


# any table

CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
SPECIAL = st.text(st.sampled_from('a ,\t"\n\r;é\u2028\f\x85'), max_size=8)
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\t\r\n"), max_size=12)


def tables(cell, min_rows=0):
    """Lists of rows with as many cells each."""
    columns = st.integers(2, 5)
    return columns.flatmap(
        lambda n: st.lists(st.lists(cell, min_size=n, max_size=n), min_size=min_rows, max_size=12)
    )


def come_back(text, name, header):
    """The rows of a table as the reader gives them, and how many lines it left out."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text.encode())
        counts = Counter()
        first, *rows = table_rows(path, counts)
    assert first == header
    return rows, counts.pop(IRREGULAR, 0), counts


def written(rows, quoting, end="\n"):
    text = io.StringIO()
    csv.writer(text, quoting=quoting, lineterminator=end).writerows(rows)
    return text.getvalue()


def csv_reads(text, rows):
    """Whether csv gets its own rows back: before Python 3.13 it may write a "\r" without quotation marks."""
    try:
        return list(csv.reader(io.StringIO(text, newline=""))) == rows
    except csv.Error:
        return False


@settings(max_examples=200, deadline=None)
@given(
    tables(CELL | SPECIAL),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
@example([["x\na,b\ny", "1"], ["a", "b"]], csv.QUOTE_MINIMAL, "\n")  # a cell that looks like rows
def test_any_table_that_csv_writes_comes_back(rows, quoting, end):
    header = [f"column {i}" for i in range(len(rows[0]) if rows else 2)]
    text = written([header, *rows], quoting, end)
    assume(csv_reads(text, [header, *rows]))
    assert come_back(text, "t.csv", header) == (rows, 0, {})


@settings(max_examples=200, deadline=None)
@given(tables(PLAIN), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_tab_separated_table_comes_back(rows, end):
    header = [f"column {i}" for i in range(len(rows[0]) if rows else 2)]
    text = "".join("\t".join(row) + end for row in [header, *rows])
    assert come_back(text, "t.tsv", header) == (rows, 0, {})


def put_in(lines, damaged, seed):
    lines = list(lines)
    for line in damaged:
        lines.insert(random.Random(f"{seed} {line}").randrange(len(lines) + 1), line)
    return "".join(lines)


@settings(max_examples=200, deadline=None)
@given(
    tables(PLAIN, 1), st.lists(PLAIN.map(lambda text: "x" + text), min_size=1, max_size=4), st.integers(0, 99)
)
def test_damaged_lines_of_a_tab_separated_table_cost_themselves(rows, damaged, seed):
    header = [f"column {i}" for i in range(len(rows[0]))]
    cells = ["\t".join(row) + "\n" for row in rows]
    text = "\t".join(header) + "\n" + put_in(cells, [line + "\n" for line in damaged], seed)
    assert come_back(text, "t.tsv", header) == (rows, len(damaged), {})


WORDS = st.text(st.sampled_from("abc é.;\t\u2028"), min_size=1, max_size=8).map(lambda text: f"x{text}x")
# a quoted cell that is not closed, text behind a closed one, too few cells, too many: never part of a legal record
DAMAGED = st.one_of(
    WORDS.map(lambda word: f'"{word}\n'),
    WORDS.map(lambda word: f'{word},"{word}\n'),
    WORDS.map(lambda word: f'"{word}"{word},{word}\n'),
    WORDS.map(lambda word: f'{word}"{word}\n'),
    WORDS.map(lambda word: f"{word}\n"),
    WORDS.map(lambda word: ",".join([word] * 7) + "\n"),
)


@settings(max_examples=200, deadline=None)
@given(
    tables(st.one_of(WORDS, SPECIAL.map(lambda text: f"x{text}x")), 1),
    st.lists(DAMAGED, min_size=1, max_size=4),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.integers(0, 99),
)
def test_damaged_lines_of_a_quoted_table_cost_themselves(rows, damaged, quoting, seed):
    header = [f"column {i}" for i in range(len(rows[0]))]
    records = [written([row], quoting) for row in rows]
    assume(csv_reads("".join(records), rows))
    text = written([header], quoting) + put_in(records, damaged, seed)
    assert come_back(text, "t.csv", header) == (rows, len(damaged), {})


@settings(max_examples=200, deadline=None)
@given(
    tables(st.text(st.sampled_from('ab, "'), max_size=6), 2),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.data(),
)
def test_a_row_cut_off_anywhere_costs_itself(rows, quoting, data):
    header = [f"column {i}" for i in range(len(rows[0]))]
    records = [written([row], quoting) for row in rows]
    i = data.draw(st.integers(0, len(rows) - 1))
    cut = records[i][: data.draw(st.integers(1, len(records[i]) - 1))].rstrip("\n") + "\n"
    text = written([header, *rows[:i]], quoting) + cut + "".join(records[i + 1 :])
    found, left_out, _ = come_back(text, "t.csv", header)
    assert left_out <= 1  # a row may be cut so that it is still one, or blank
    assert [row for row in found if row in rows[:i]][:i] == rows[:i]
    assert found[len(found) - len(rows[i + 1 :]) :] == rows[i + 1 :]


def test_long_tables_are_read_in_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr("support.text_files.BLOCK", 7)
    rows = [[f"{i}", "several\nlines " * (i % 5), "3"] for i in range(200)]
    records = [written([row], csv.QUOTE_MINIMAL) for row in rows]
    records[20:20] = ['"open,b\n']
    assert come_back("a,b,c\n" + "".join(records), "t.csv", ["a", "b", "c"]) == (rows, 1, {})


# folders


@pytest.mark.parametrize("names", [("dev.tsv", "test.tsv"), ("validation.csv", "test.tsv"), ("dev.csv",)])
def test_names_of_files(names, tmp_path):
    for name in names:
        (tmp_path / name).write_text((TABS if name.endswith("tsv") else HEADER) + "a,b,3\nc\td\t4\n")
    for name in names:
        table = TABS + "c\td\t4\n" if name.endswith("tsv") else HEADER + "c,d,4\n"
        (tmp_path / name).write_text(table)
    splits = from_folder(tmp_path)
    assert splits["validation"][0] == [("c", "d", 4.0)]
    assert bool(splits["test"][0]) == (len(names) == 2)


def test_two_files_for_one_split_are_refused(tmp_path):
    for name in ("validation.csv", "dev.csv"):
        (tmp_path / name).write_text(HEADER + "a,b,3\n")
    with pytest.raises(ValueError, match="holds validation.csv and dev.csv: leave one"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    "path, rows", [("stsb/validation.csv", 1500), ("stsb/test.csv", 1379), ("sts/sts13.csv", 1500)]
)
def test_real_files_come_back_as_csv_reads_them(path, rows):
    if not (SHARED / path).exists():
        pytest.skip("not at hand")
    with (SHARED / path).open(encoding="utf-8", newline="") as file:
        expected = [row for row in csv.DictReader(file)]
    pairs, left_out = read_pairs(SHARED / path)
    assert len(pairs) == rows and not left_out
    assert [score for *_, score in pairs] == [float(row["score"]) for row in expected]
