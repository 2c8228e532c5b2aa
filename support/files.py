"""Files: where they lie, written whole or not at all, and held by one process at a time."""

import contextlib
import csv
import io
import json
import os
import zipfile
from pathlib import Path

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parent.parent
DATA, CHECKPOINTS = ROOT / "data", ROOT / "checkpoints"


def shown(path):
    """A path as one would type it: from the scripts' folder where it lies in there."""
    path = Path(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def first_line(error):
    """What an error says, in one line of at most 300 characters; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- writing


def write_together(contents):
    """Write files, a dict from path to bytes: none is replaced before all are on the disk, which may be full."""
    temporary = {path: f"{path}.{os.getpid()}.tmp" for path in contents}
    path = ""
    try:
        for path, content in contents.items():
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(temporary[path], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in contents:
            os.replace(temporary[path], path)
    except OSError as error:
        raise OSError(f"{path} can't be written: {error.strerror or error}") from None
    finally:
        for name in temporary.values():
            with contextlib.suppress(OSError):
                os.remove(name)


def write_atomically(path, content):
    """Write bytes to a file so that it is either the old one or the new one, whole, whatever happens meanwhile."""
    write_together({path: content})


def as_json(content):
    """An object as JSON, in bytes."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def write_json(path, content):
    """Write an object as JSON, in one step."""
    write_atomically(path, as_json(content))


def write_table(path, rows):
    """Write rows, dicts with the same keys, as a CSV file, in one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def save_figure(figure, path):
    """Write a matplotlib figure as PNG, in one step."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    write_atomically(path, image.getvalue())


def save_state(path, state):
    """Write a dict of tensors, numbers and strings that a stopped run needs, in one step."""
    import torch  # slow to import, and download_data.py needs none

    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


# ---- reading


def read_json(path, kind=dict):
    """The content, a dict or else `kind`, of a JSON file; raises FileNotFoundError or ValueError in one line."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {first_line(error)}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} is not valid JSON of its kind: it holds a {type(content).__name__}")
    return content


def load_state(path):
    """What save_state wrote, on the CPU; raises ValueError where it is damaged, by a single bit even."""
    import torch

    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():  # torch.load does not compare checksums
                raise ValueError("a checksum is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:  # the state is sound
        raise
    except Exception as error:  # zipfile, pickle and torch each raise their own for a damaged file
        raise ValueError(
            f"{path} can't be read ({first_line(error)}): begin again with OVERWRITE=True"
        ) from None


# ---- two at once


@contextlib.contextmanager
def lock(path, what):
    """Hold what lies at `path` for this process alone: a second one gets an OSError that names the first.

    The lock is the operating system's and dies with its process, however that ends. Its hidden file stays.
    what: the words for it in the message, "the run simcse" say.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    held, holder = FileLock(path.parent / f".{path.name}.lock"), path.parent / f".{path.name}.holder"
    try:
        held.acquire(timeout=0)
    except Timeout:
        user = "another process"
        with contextlib.suppress(OSError):
            user = holder.read_text(encoding="utf-8").strip() or user
        raise OSError(f"{what} is in use by {user}: wait until it ends, or stop it") from None
    try:
        holder.write_text(f"process {os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        held.release()
