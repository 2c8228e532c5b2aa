"""The source that data is taken from, and data/sources.json, which says where the files in data/ came from."""

import hashlib
from pathlib import Path

from support import files
from support.files import first_line, read_json, write_json


def first_that_works(names, load):
    """(name, load(name)) of the first of the names that loads; prints why one did not. ValueError where none does."""
    if len(names) == 1:
        return names[0], load(names[0])
    for name, after in zip(names, [*names[1:], ""], strict=True):
        try:
            return name, load(name)
        except (OSError, ValueError) as error:
            print(f"{name} failed: {first_line(error)}" + (f"; trying {after}" if after else ""))
    raise ValueError(
        "no source could be used (see above): go online, set HF_ENDPOINT to a mirror, or name a file of yours"
    )


def recorded():
    """What data/sources.json says, a dict from part ("sentences", "stsb") to its entry; {} where there is no such file.

    Raises ValueError where the file is damaged.
    """
    path = files.DATA / "sources.json"
    if not path.exists():
        return {}
    parts = read_json(path)
    if not all(isinstance(entry, dict) for entry in parts.values()):
        raise ValueError(f"{path} is not as download_data.py writes it: run that again")
    return parts


def record(part, paths, **entry):
    """Say where one part of the data, the files `paths`, comes from; what is said of the other part stays."""
    try:
        parts = recorded()
    except ValueError:  # it is being replaced
        parts = {}
    write_json(files.DATA / "sources.json", {**parts, part: {**entry, "sha256": sha256(*paths)}})


def sha256(*paths):
    """The SHA-256 of files read one after the other, missing ones left out."""
    digest = hashlib.sha256()
    for path in map(Path, paths):
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def unchanged(part, asked, *paths):
    """What was recorded of a part that was made by the same request and whose files are as they were; else None."""
    try:
        entry = recorded().get(part, {})
    except ValueError:  # it is being replaced
        return None
    return entry if entry.get("asked") == asked and entry.get("sha256") == sha256(*paths) else None


def stsb_label():
    """What data/stsb holds, as lines that print a score call it: STS-B, a sample (no benchmark), or a folder's name."""
    entry = recorded().get("stsb", {})
    if entry.get("sample"):
        return "sample, no benchmark"
    source = str(entry.get("source", "data/stsb"))
    return "STS-B" if source == "hub" else source.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
