"""What sts.py, search.py and map.py look at: encoders, the cosines of pairs, a text."""

from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

from evaluate import encode_sentences
from model import SimCSEEncoder
from support import files, hub, runs
from support.checkpoint import load_pooler
from support.sentences import clean
from support.text_files import refuse_binary, summary, text_lines


def load_encoders(checkpoint, pooler, device):
    """A run beside the encoder that it started from, or any other encoder by itself: a dict from name to SimCSEEncoder.

    checkpoint: a folder or Hub name, "" for the newest run; pooler: cls, mean, or "" for the checkpoint's own, by
    which its start is pooled as well. Raises OSError or ValueError in one line.
    """
    folder = hub.find(checkpoint) if checkpoint else runs.newest_run()
    places = {checkpoint or files.shown(folder): folder}
    if (Path(folder) / "run.json").exists():
        start = runs.start_of(folder)
        places = {f"start: {files.shown(start)}": start} | places
    pooler = load_pooler(folder, pooler or None)
    return {name: SimCSEEncoder.from_pretrained(place, pooler).to(device) for name, place in places.items()}


def pair_cosines(encoder, sentences1, sentences2):
    """The cosines of N pairs of sentences, as evaluate.py takes them. Returns a float32 numpy array (N,)."""
    e1 = F.normalize(torch.from_numpy(encode_sentences(encoder, sentences1)), dim=-1)  # (N, C)
    e2 = F.normalize(torch.from_numpy(encode_sentences(encoder, sentences2)), dim=-1)
    return (e1 * e2).sum(dim=-1).numpy()


def load_text(path):
    """The lines of a text file, plain or gzip, cleaned, each once and none empty.

    Raises FileNotFoundError where there is no such file, ValueError where it is no text or holds no line.
    """
    if not path.is_file():
        advice = ": run python download_data.py first" if path.parent == files.DATA else ""
        raise FileNotFoundError(f"there is no {path}{advice}")
    refuse_binary(path)
    counts = Counter()
    sentences = dict.fromkeys(clean(line) for line in text_lines(path, counts))
    sentences.pop("", None)
    if not sentences:
        raise ValueError(f"{path} is empty: it needs a sentence a line")
    if counts:
        print(f"{path}: {summary(counts)}")
    return list(sentences)
