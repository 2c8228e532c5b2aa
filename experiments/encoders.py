"""The encoders that sts.py, search.py and map.py look at, and the cosines of pairs."""

from pathlib import Path

import torch
import torch.nn.functional as F

from evaluate import encode_sentences
from model import SimCSEEncoder
from support import files, hub, runs
from support.checkpoint import load_pooler


def load_encoders(checkpoint, pooler, device):
    """A run beside the encoder that it started from, or any other encoder by itself: a dict from name to SimCSEEncoder.

    checkpoint: a folder or Hub name, "" for the newest run; pooler: cls, mean, or "" for the checkpoint's own, which its
    start is pooled by as well. Raises OSError or ValueError in one line.
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
