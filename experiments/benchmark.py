"""Sentences a second in training and in encoding, ours beside sentence-transformers': same encoder, sentences and batches.

Every contender is a process of its own, so that its peak memory is its own, and they take turns, so that a machine whose speed
drifts drifts for all of them. pip install -e .[bench] brings the peer; without it, only ours is measured.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import time

import torch
from tqdm import tqdm

import config
import train
from evaluate import computes_in_bf16, encode_sentences, pick_device
from model import SimCSEEncoder

ROUNDS = 5                      # turns that count; one more before them warms up
PEERS = ["sentence_transformers", "accelerate", "datasets"]


def train_ours(folder, bf16):
    """A function that trains on sentences as train.py does, from their text on, and returns how many it trained on."""
    train.computes_in_bf16 = lambda device: bf16
    encoder = SimCSEEncoder.from_pretrained(folder, config.POOLER, config.DROPOUT).to(pick_device(config.DEVICE))
    optimizer = train.make_optimizer(encoder)

    def run(sentences):
        count = 0
        for idx, attention_mask in train.batches(*train.tokenize_corpus(encoder, sentences), pick_device(config.DEVICE)):
            train.train_step(encoder, optimizer, idx, attention_mask, config.LEARNING_RATE)
            count += len(idx)
        return count
    return run


def encode_ours(folder, bf16):
    """A function that encodes sentences as evaluate.py does."""
    encoder = SimCSEEncoder.from_pretrained(folder, config.POOLER).to(pick_device(config.DEVICE))
    return lambda sentences: len(encode_sentences(encoder, sentences))


def train_theirs(folder, bf16):
    """The same by SentenceTransformerTrainer, with its defaults where they don't change the method."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    device = pick_device(config.DEVICE)
    encoder = SentenceTransformer(folder, device=str(device))
    encoder.max_seq_length = config.MAX_SEQ_LEN
    arguments = SentenceTransformerTrainingArguments(
        os.path.join(folder, "trainer"), num_train_epochs=config.EPOCHS, per_device_train_batch_size=config.BATCH_SIZE, bf16=bf16,
        use_cpu=device.type == "cpu", dataloader_drop_last=True, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True)

    def run(sentences):
        with contextlib.redirect_stdout(io.StringIO()):         # the trainer prints its own figures
            SentenceTransformerTrainer(
                encoder, arguments, train_dataset=Dataset.from_dict({"anchor": sentences, "positive": sentences}),
                loss=MultipleNegativesRankingLoss(encoder, scale=1 / config.TEMPERATURE)).train()
        return len(sentences) // config.BATCH_SIZE * config.BATCH_SIZE
    return run


def encode_theirs(batch_size):
    """The same by SentenceTransformer.encode."""
    def make(folder, bf16):
        from sentence_transformers import SentenceTransformer
        encoder = SentenceTransformer(folder, device=str(pick_device(config.DEVICE)))
        return lambda sentences: len(encoder.encode(sentences, batch_size=batch_size, show_progress_bar=False))
    return make


CONTENDERS = {
    ("train", "ours", "float32"): (train_ours, False),
    ("train", "sentence-transformers", "float32"): (train_theirs, False),
    ("train", "ours", "bfloat16"): (train_ours, True),
    ("train", "sentence-transformers", "bfloat16"): (train_theirs, True),
    ("encode", "ours", "float32"): (encode_ours, False),
    ("encode", "sentence-transformers, batches of 32", "float32"): (encode_theirs(32), False),
    ("encode", "sentence-transformers, batches of 128", "float32"): (encode_theirs(128), False),
}


def peak_memory():
    """The most memory that this process has held so far, in MB: the GPU's where it has used one, else main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 1e6
    if sys.platform == "linux":     # whose ru_maxrss begins with the peak of the process that started this one
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:             # Windows
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6         # bytes on macOS


def contend(pipe, knobs, contender, folder):
    """A contender's process: for every list of sentences that comes through the pipe, sentences a second and peak memory go back."""
    vars(config).update(knobs, EPOCHS=1)
    make, bf16 = CONTENDERS[contender]
    run = make(folder, bf16)
    for sentences in iter(pipe.recv, None):
        started = time.perf_counter()
        count = run(sentences)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        pipe.send((count / (time.perf_counter() - started), peak_memory()))


def measure(contenders, folder, sentences):
    """Let contenders take turns on the sentences. Returns for each the sentences a second of every round, and the peak memory in MB."""
    context, pipes = multiprocessing.get_context("spawn"), {}
    knobs = {name: getattr(config, name) for name in config.DEFAULTS}
    for contender in contenders:
        pipes[contender], end = context.Pipe()
        context.Process(target=contend, args=(end, knobs, contender, folder), daemon=True).start()
        end.close()                                     # so that a process that dies is noticed
    speeds, memory = {contender: [] for contender in contenders}, {}
    for turn in tqdm(range(ROUNDS + 1), desc=contenders[0][0], unit="round"):
        for contender, pipe in pipes.items():
            try:
                pipe.send(sentences)
                speed, memory[contender] = pipe.recv()
            except (EOFError, OSError):
                raise ValueError(f"{', '.join(contender)} has failed; what it said is above") from None
            if turn:
                speeds[contender].append(speed)
    for pipe in pipes.values():
        pipe.send(None)
    return speeds, memory


def main():
    device = pick_device(config.DEVICE)
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"sentence-transformers is left out, as there is no {' and no '.join(missing)}: pip install -e .[bench]")
    contenders = [contender for contender in CONTENDERS if (contender[1] == "ours" or not missing)
                  and (contender[2] == "float32" or computes_in_bf16(device))]
    sentences = train.load_sentences()
    many = 20 if device.type == "cuda" else 1           # enough work for a second or more
    if len(sentences) < max(1000, 11 * config.BATCH_SIZE) * many:
        raise ValueError(f"{len(sentences):,} sentences are too few to measure with: {max(1000, 11 * config.BATCH_SIZE) * many:,} are needed")
    with tempfile.TemporaryDirectory() as folder:
        train.starting_encoder(sentences).save_pretrained(folder)
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ["torch", *PEERS] if name not in missing)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor() or platform.machine()}"
        print(f"{device} ({name}), {torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}")
        print(f"{'':8}{'':40}{'':10}{'sentences/s':>12}{'slowest-fastest':>18}{'ours is':>10}{'peak MB':>9}")
        # half a batch more than is trained on, as equal sentences and a last batch that is not full are left out
        for task, count, spare in (("train", 10 * config.BATCH_SIZE * many, config.BATCH_SIZE // 2), ("encode", 1000 * many, 0)):
            of_task = [contender for contender in contenders if contender[0] == task]
            speeds, memory = measure(of_task, folder, sentences[:count + spare])
            for _, contender, precision in of_task:
                own = sorted(speeds[task, contender, precision])
                ratio = statistics.median(speeds[task, "ours", precision]) / statistics.median(own)
                print(f"{task:8}{contender:40}{precision:10}{statistics.median(own):12.1f}{f'{own[0]:.1f}-{own[-1]:.1f}':>18}"
                      f"{f'{ratio:.2f} x':>10}{memory[task, contender, precision]:9.0f}")


if __name__ == "__main__":
    config.run(main, __file__)
