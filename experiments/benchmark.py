"""Sentences a second in training and in encoding, ours beside sentence-transformers': same encoder, sentences, batches.

Every contender is a process of its own, so that its peak memory is its own, and they take turns, so that a machine
whose speed drifts drifts for all of them. pip install -e '.[bench]' brings the peer; without it only ours is measured.
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

import config as root_config
import train
from evaluate import encode_sentences
from experiments import config
from experiments.run_variant import remove_run
from model import SimCSEEncoder
from support import command_line, files
from support.device import has_bfloat16, pick_device

KNOBS = [
    "INIT", "POOLER", "DROPOUT", "TEMPERATURE", "BATCH_SIZE", "LEARNING_RATE", "MAX_SEQ_LEN", "N_LAYER", "N_EMBD",
    "N_HEAD", "N_POSITIONS", "VOCAB_SIZE", "SEED", "DEVICE", "PRECISION", "ROUNDS",
]  # fmt: skip
PEERS = ["sentence_transformers", "accelerate", "datasets"]
NEVER = 1_000_000_000  # an EVAL_INTERVAL that no run reaches


# ---- contenders: each makes a function that does the work once and returns sentences a second


def train_ours():
    """train.py itself, from the sentences' text on, without its scores: its own count, and the time to tokenise."""
    encoder, folder = (
        SimCSEEncoder.from_pretrained(root_config.INIT),
        files.CHECKPOINTS / root_config.RUN_NAME,
    )
    sentences = train.load_sentences()

    def work():
        started = time.perf_counter()
        idx, _ = train.tokenize_corpus(encoder, sentences)
        seconds = time.perf_counter() - started
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train.main(score=lambda encoder: {"spearman": 0.0})
        trained = len(idx) // root_config.BATCH_SIZE * root_config.BATCH_SIZE
        seconds += trained / files.read_json(folder / "run.json")["sentences_per_second"]
        return trained / seconds

    return work


def train_theirs():
    """The same by SentenceTransformerTrainer, with its defaults where they don't change the method."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    device = pick_device(root_config.DEVICE)
    encoder = SentenceTransformer(root_config.INIT, device=str(device))
    encoder.max_seq_length = root_config.MAX_SEQ_LEN
    sentences = train.load_sentences()
    loss = MultipleNegativesRankingLoss(encoder, scale=1 / root_config.TEMPERATURE)
    pairs = Dataset.from_dict({"anchor": sentences, "positive": sentences})
    arguments = Arguments(
        os.path.join(root_config.INIT, "trainer"),
        num_train_epochs=1,
        per_device_train_batch_size=root_config.BATCH_SIZE,
        learning_rate=root_config.LEARNING_RATE,
        bf16=root_config.PRECISION == "bfloat16",
        use_cpu=device.type == "cpu",
        dataloader_drop_last=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    def work():
        trainer = SentenceTransformerTrainer(encoder, arguments, train_dataset=pairs, loss=loss)
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # the trainer prints its own figures
            trainer.train()
        synchronize()
        trained = len(sentences) // root_config.BATCH_SIZE * root_config.BATCH_SIZE
        return trained / (time.perf_counter() - started)

    return work


def encode_ours():
    """encode_sentences, as evaluate.py calls it."""
    encoder = SimCSEEncoder.from_pretrained(root_config.INIT).to(pick_device(root_config.DEVICE))
    return timed_encoding(lambda sentences: encode_sentences(encoder, sentences))


def encode_theirs(batch_size):
    """A contender that is SentenceTransformer.encode at a batch size."""

    def make():
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(root_config.INIT, device=str(pick_device(root_config.DEVICE)))
        options = {"batch_size": batch_size, "show_progress_bar": False}
        return timed_encoding(lambda sentences: encoder.encode(sentences, **options))

    return make


def timed_encoding(encode):
    """A function that encodes the sentences and returns sentences a second."""
    sentences = train.load_sentences()

    def work():
        started = time.perf_counter()
        encode(sentences)
        synchronize()
        return len(sentences) / (time.perf_counter() - started)

    return work


# task -> contender -> what makes it; encoding is in float32 always
CONTENDERS = {
    "train": {"ours": train_ours, "sentence-transformers": train_theirs},
    "encode": {
        "ours": encode_ours,
        "sentence-transformers, batches of 32": encode_theirs(32),  # its default
        "sentence-transformers, batches of 128": encode_theirs(128),
    },
}


# ---- the measurement


def synchronize():
    """Wait for a GPU to finish."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def peak_memory():
    """The most memory that this process has held so far, in MB: the GPU's where it has used one, else main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 1e6
    if sys.platform == "linux":  # whose ru_maxrss begins with the peak of the process that started this one
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes on macOS


def contend(pipe, task, contender, knobs):
    """The process of a contender: for each turn that is asked for, sentences a second and peak memory go back."""
    command_line.override([f"{name}={value}" for name, value in knobs.items()], [root_config], train.KNOBS)
    work = CONTENDERS[task][contender]()
    while pipe.recv():
        pipe.send((work(), peak_memory()))


def take_turns(task, contenders, knobs):
    """Let the contenders of a task take turns, ROUNDS of them after one to warm up.

    Returns, by contender, the sentences a second of every turn, and the peak memory in MB.
    """
    context, pipes = multiprocessing.get_context("spawn"), {}
    for contender in contenders:
        pipes[contender], end = context.Pipe()
        context.Process(target=contend, args=(end, task, contender, knobs), daemon=True).start()
        end.close()  # so that a process that dies is noticed
    speeds, memory = {contender: [] for contender in contenders}, {}
    for turn in tqdm(range(config.ROUNDS + 1), desc=f"{task}, {knobs['PRECISION']}", unit="round"):
        for contender, pipe in pipes.items():
            try:
                pipe.send(True)
                speed, memory[contender] = pipe.recv()
            except (EOFError, OSError):
                raise ValueError(f"{task}, {contender} has failed: what it said is above") from None
            if turn:
                speeds[contender].append(speed)
    for pipe in pipes.values():
        pipe.send(False)
    return speeds, memory


def print_rows(task, precision, speeds, memory):
    """A line a contender: median, slowest and fastest turn, and by how much ours is faster."""
    ours = statistics.median(speeds["ours"])
    for contender, values in speeds.items():
        median = statistics.median(values)
        numbers = f"{median:12.1f}{f'{min(values):.1f}-{max(values):.1f}':>18}{f'{ours / median:.2f} x':>10}"
        print(f"{task:8}{contender:40}{precision:10}{numbers}{memory[contender]:9.0f}")


def main():
    device = pick_device(root_config.DEVICE)
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"there is no {' and no '.join(missing)}"
        print(f"sentence-transformers is left out, as {reason}: pip install -e '.[bench]'")
    precisions = [root_config.PRECISION]
    if root_config.PRECISION == "auto":
        precisions = ["float32", "bfloat16"] if has_bfloat16(device) else ["float32"]
    sentences = train.load_sentences()
    many = 20 if device.type == "cuda" else 1  # enough work for a second or more
    # half a batch more than is trained on, as equal sentences and a last batch that is not full are left out
    counts = {
        "train": 10 * root_config.BATCH_SIZE * many + root_config.BATCH_SIZE // 2,
        "encode": 1000 * many,
    }
    if len(sentences) < max(counts.values()):
        needed = f"{max(counts.values()):,} are needed"
        raise ValueError(f"{len(sentences):,} sentences are too few to measure with: {needed}")
    found = [name for name in ["torch", *PEERS] if name not in missing]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)
    on_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine()
    threads = f"{torch.get_num_threads()} threads"
    print(f"{device} ({name}), {threads}, Python {platform.python_version()}, {versions}")
    heads = f"{'sentences/s':>12}{'slowest-fastest':>18}{'ours is':>10}{'peak MB':>9}"
    print(f"{'':8}{'':40}{'':10}{heads}")

    run = files.CHECKPOINTS / f"benchmark-{os.getpid()}"
    knobs = {name: getattr(root_config, name) for name in train.KNOBS}
    knobs |= {"EPOCHS": 1, "USE_MLP_HEAD": False, "EVAL_INTERVAL": NEVER}  # the peer has no head in training
    knobs |= {"RUN_NAME": run.name, "OVERWRITE": True, "RESUME": False}
    with tempfile.TemporaryDirectory() as folder:
        train.starting_encoder(sentences).save_pretrained(folder)
        knobs["INIT"] = folder
        try:
            for task, contenders in CONTENDERS.items():
                chosen = [name for name in contenders if name == "ours" or not missing]
                for precision in precisions if task == "train" else ["float32"]:
                    knobs |= {"MAX_SENTENCES": counts[task], "PRECISION": precision}
                    speeds, memory = take_turns(task, chosen, knobs)
                    print_rows(task, precision, speeds, memory)
        finally:
            if run.exists():
                remove_run(run)


if __name__ == "__main__":
    command_line.run(main, "-m experiments.benchmark", [root_config, config], KNOBS)
