"""data/sources.json: where the files in data/ came from."""

from support import files
from support.files import read_json, write_json


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


def record(part, **entry):
    """Say where one part of the data comes from; what is said of the other part stays."""
    try:
        parts = recorded()
    except ValueError:  # it is being replaced
        parts = {}
    write_json(files.DATA / "sources.json", {**parts, part: entry})


def stsb_label():
    """What data/stsb holds, as lines that print a score call it: STS-B, a sample (no benchmark), or a folder's name."""
    entry = recorded().get("stsb", {})
    if entry.get("sample"):
        return "sample, no benchmark"
    source = str(entry.get("source", "data/stsb"))
    return "STS-B" if source == "hub" else source.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
