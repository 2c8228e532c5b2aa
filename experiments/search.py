"""The sentences of a text that are nearest to a given one, by an encoder before SimCSE and after it.

python -m experiments.search "a sentence" looks in data/sentences.txt, TEXT=file in a file of one's own, a sentence a
line. Embeddings are kept in data/embeddings/ until the text or the encoder changes.
"""

import hashlib
import os
import re
import shutil
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import config as root_config
from evaluate import encode_sentences
from experiments import config
from experiments.inputs import load_encoders, load_text
from support import command_line, files
from support.device import pick_device
from support.sentences import clean

KNOBS = ["QUERY", "TEXT", "NEAREST", "CHECKPOINT", "EVAL_POOLER", "DEVICE"]
BLOCK = 1024  # sentences that are encoded, or compared, at a time


# ---- embeddings on the disk


def fingerprint(sentences, encoder):
    """A hash of all that the embeddings depend on: the sentences, the weights, the tokenizer and the pooling."""
    encoder.tokenizer.no_truncation()  # which, like padding, is set for every batch anew
    encoder.tokenizer.no_padding()
    settings = [encoder.shape, encoder.pooler, encoder.max_seq_len, encoder.tokenizer.to_str()]
    digest = hashlib.sha256(repr(settings).encode())
    for name, tensor in encoder.state_dict().items():
        if not name.startswith("mlp_head."):  # it is new each time, and not used
            digest.update(tensor.cpu().contiguous().numpy())
    for sentence in sentences:
        digest.update(sentence.encode() + b"\n")
    return digest.hexdigest()[:16]


def write_embeddings(path, sentences, encoder):
    """Write the embeddings of N sentences, made of length 1, as a float32 array (N, C) in numpy's .npy format.

    A block is in memory at a time, and the file gets its name when it is complete. Raises OSError.
    """
    width = encoder.token_embedding.embedding_dim
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(sentences), width)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    quiet = 0.1 if sys.stderr.isatty() else 30  # seconds between two lines of a bar that is kept in a file
    try:
        with (
            open(temporary, "wb") as file,
            tqdm(total=len(sentences), unit="sentence", mininterval=quiet) as bar,
        ):
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, len(sentences), BLOCK):
                block = encode_sentences(encoder, sentences[start : start + BLOCK])  # (B, C)
                block /= np.linalg.norm(block, axis=1, keepdims=True)  # a dot product is now a cosine
                file.write(block.astype("<f4").tobytes())
                bar.update(len(block))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_embeddings(sentences, encoder, name):
    """The embeddings (N, C) of the sentences, of length 1, memory-mapped from data/embeddings/ and written there first
    where it lacks them, in place of those that an earlier text or encoder of this name has left.
    """
    path = files.DATA / "embeddings" / f"{name}.{fingerprint(sentences, encoder)}.npy"
    if not path.exists():
        print(f"encoding {len(sentences):,} sentences into {files.shown(path)}")
        write_embeddings(path, sentences, encoder)
        for other in path.parent.glob(f"{name}.{'?' * 16}.npy"):
            if other != path:
                other.unlink()
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        raise ValueError(f"{path} is damaged: delete it") from None


# ---- the search


def nearest(embeddings, query, k):
    """The k rows of embeddings (N, C) nearest to query (C,), all of length 1, or all N where those are fewer.

    Returns their cosines and their row numbers, the nearest first. A block of the embeddings is in memory at a time.
    """
    cosines, rows = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for start in range(0, len(embeddings), BLOCK):
        block = torch.from_numpy(np.array(embeddings[start : start + BLOCK]))  # (B, C)
        cosines = torch.cat([cosines, block @ query])  # those of the best so far, then those of the block
        rows = torch.cat([rows, torch.arange(start, start + len(block))])
        cosines, best = torch.topk(cosines, min(k, len(cosines)))
        rows = rows[best]
    return cosines.tolist(), rows.tolist()


def print_columns(columns):
    """Print lists of (cosine, sentence) side by side, a dict from heading to list, as wide as the terminal."""
    width = max(40, shutil.get_terminal_size((160, 24)).columns // len(columns) - 2)
    print("  ".join(f"{textwrap.shorten(heading, width):{width}}" for heading in columns).rstrip())
    for found in zip(*columns.values(), strict=True):
        cells = [
            textwrap.wrap(f"{cosine:6.3f}  {sentence}", width, subsequent_indent=" " * 8)
            for cosine, sentence in found
        ]
        for lines in zip_longest(*cells, fillvalue=""):
            print("  ".join(f"{line:{width}}" for line in lines).rstrip())


def main():
    query = clean(config.QUERY)
    if not query:
        raise ValueError('there is no sentence to look for: python -m experiments.search "a sentence"')
    path = Path(config.TEXT).expanduser() if config.TEXT else files.DATA / "sentences.txt"
    sentences = load_text(path)
    encoders = load_encoders(root_config.CHECKPOINT, root_config.EVAL_POOLER, pick_device(root_config.DEVICE))
    columns = {}
    for heading, encoder in encoders.items():
        name = re.sub(r"[^\w=.+-]+", "_", f"{path.name}.{heading}")[:200]
        embeddings = load_embeddings(sentences, encoder, name)
        embedding = torch.from_numpy(encode_sentences(encoder, [query])[0])  # (C,)
        cosines, rows = nearest(embeddings, embedding / embedding.norm(), config.NEAREST)
        columns[heading] = [(cosine, sentences[row]) for cosine, row in zip(cosines, rows, strict=True)]
    print(f'nearest to "{query}" of {len(sentences):,} sentences of {files.shown(path)}, with their cosines')
    print_columns(columns)


def with_query(arguments):
    """A command line's arguments, in which what is neither NAME=value nor a flag is the sentence, as QUERY=sentence."""
    knob = re.compile(r"[A-Z_]+=|\w+=\S*$|--?h(elp)?$")
    words = [argument for argument in arguments if not knob.match(argument)]
    knobs = [argument for argument in arguments if knob.match(argument)]
    return [f"QUERY={' '.join(words)}", *knobs] if words else knobs


if __name__ == "__main__":
    sys.argv[1:] = with_query(sys.argv[1:])
    command_line.run(main, "-m experiments.search", [root_config, config], KNOBS)
