"""Files of other people's: the lines of text, the rows of tables, and neither lost nor merged in silence."""

import contextlib
import csv
import gzip
import io
import re
import zlib
from itertools import islice
from pathlib import Path

from support.files import first_line

# by their first bytes; UTF-32 before UTF-16, whose mark its own begins with
NOT_TEXT = {
    b"PK\x03\x04": "a zip or an office file",
    b"%PDF": "a PDF",
    b"PAR1": "a Parquet file (whose name should end in .parquet)",
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
# what text has none of; tabs, ends of lines and pages, and the escape of coloured output are text
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
# what "surrogateescape" makes of a byte that is not UTF-8: U+DC00 and the byte
STRAY = re.compile("[\udc80-\udcff]")
LONGEST_LINE = 1 << 24  # characters; a longer line comes in pieces
IRREGULAR = "lines with a wrong number of columns or of quotation marks"
BLOCK = 10_000  # lines of a table in memory at once, and the next as many


@contextlib.contextmanager
def open_bytes(path):
    """A file, plain or gzip, to read bytes from; raises ValueError, then or while it is read, where it is damaged."""
    try:
        with Path(path).open("rb") as file:
            yield gzip.open(file) if file.peek(2).startswith(b"\x1f\x8b") else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off ({first_line(error)}): fetch it again") from None


def has_control_characters(text):
    """Whether there are more control characters than strays in a text: more than 3, and 1 in 100."""
    return len(CONTROL.findall(text)) > 3 + len(text) / 100


def refuse_formats(head, path):
    """Raise ValueError where the first bytes of a file give away a format that is no UTF-8 text."""
    for magic, what in NOT_TEXT.items():
        if head.startswith(magic):
            raise ValueError(f"{path} is {what}: save it as UTF-8 text")


def refuse_binary(path):
    """Raise ValueError where a file, of whatever format, is no text by its first 4,096 bytes."""
    with open_bytes(path) as file:
        refuse_formats(file.peek(4), path)
        if has_control_characters(file.peek(4096)[:4096].decode("latin-1")):
            raise ValueError(f"{path} is no text (it is full of control characters): save it as UTF-8 text")


def text_lines(path, counts):
    """The lines of a text file, plain or gzip, as strings with their ends: \\n, \\r\\n or \\r, and no other.

    They are read as UTF-8, with or without its mark; a line that is not adds to the Counter `counts`, and those bytes
    are read as Windows-1252. Raises ValueError where the file is damaged, or its first bytes say that it is no text.
    """
    with open_bytes(path) as file:
        refuse_formats(file.peek(4), path)
        text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        while line := text.readline(LONGEST_LINE):
            if STRAY.search(line):
                counts["lines not in UTF-8 (kept: those bytes were read as Windows-1252)"] += 1
                line = STRAY.sub(as_windows_1252, line)
            yield line


def summary(counts):
    """A Counter in words, the commonest first."""
    return ", ".join(f"{n:,} {what}" for what, n in counts.most_common())


def as_windows_1252(stray):
    """The character that a stray byte stands for in Windows-1252, Latin-1's extension; U+FFFD where it has none."""
    return bytes([ord(stray[0]) - 0xDC00]).decode("cp1252", "replace")


# ---- tables


def table_rows(path, counts):
    """The rows of a table as lists of cells, the header first.

    The extension decides, before a .gz: .csv is comma-separated and quoted, .tsv tab-separated and unquoted. A line
    that makes no row of as many cells as the header is left out, and added to the Counter `counts`. Raises ValueError.
    """
    lines = (line.replace("\0", "") for line in text_lines(path, counts))
    header_line = next(lines, "")
    if table_format(path) == ".tsv":
        header = unquoted_cells(header_line)
        rows = map(unquoted_cells, lines)
    else:
        header = quoted_cells(header_line) or [header_line.strip()]
        rows = quoted_rows(lines, len(header))
    yield header
    for row in rows:
        if row and len(row) == len(header):
            yield row
        elif row not in ([], [""]):  # which a blank line makes
            counts[IRREGULAR] += 1


def table_format(path):
    """The extension of a file, in lower case, and less .gz."""
    return Path(str(path).lower().removesuffix(".gz")).suffix


def unquoted_cells(line):
    """The cells of a line of a .tsv file, where a quotation mark is a character like any other."""
    return line.rstrip("\r\n").split("\t")


def quoted_cells(record):
    """The cells of a record of a .csv file, [] for a blank line; None where it is none."""
    try:
        return next(csv.reader([record], strict=True), [])
    except csv.Error:
        return None


def quoted_rows(lines, columns):
    """The rows of a .csv file, where a quoted cell may go on over lines; None for each line that is left out.

    A line with a quotation mark too many must not swallow those behind it, yet the lines of a good quoted cell can look
    like damage, or like rows. So of all readings that one is taken which leaves out the fewest lines.
    """
    lines = iter(lines)
    block = list(islice(lines, BLOCK))
    while block:
        ahead = block + list(islice(lines, BLOCK))
        records = fewest_left_out(ahead, columns)
        i = 0
        while i < len(block):
            row, length = records[i]
            yield row
            i += length
        block = ahead[i:]


def fewest_left_out(lines, columns):
    """For each line, the row that the best reading begins there (None: it is left out), and how many lines that has."""
    records = [(None, 1)] * len(lines)
    left_out = [0] * (len(lines) + 1)  # from a line to the end, in the best reading
    odd_line = None  # the next one with an odd number of quotation marks, which ends a cell that is open
    for i in reversed(range(len(lines))):
        last = i
        if lines[i].count('"') % 2:
            last, odd_line = odd_line, i
        left_out[i] = 1 + left_out[i + 1]
        if last is None or left_out[last + 1] >= left_out[i]:
            continue
        row = quoted_cells("".join(lines[i : last + 1]))
        if row == [] or row is not None and len(row) == columns:
            records[i] = row, last + 1 - i
            left_out[i] = left_out[last + 1]
    return records
