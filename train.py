"""Unsupervised SimCSE: every sentence goes through the encoder twice, and its two embeddings must find each other."""

import numpy as np
import torch

import config
from evaluate import measure
from model import SimCSEEncoder, simcse_loss
from support import command_line, files, optimization, runs
from support.device import autocast, pick_device, pick_precision, random_source
from support.tokenizer import train_tokenizer

# What makes a run what it is, with the chapter's values: a run is named after what differs from them
SETTINGS = {
    "INIT": "checkpoints/mlm_encoder", "POOLER": "cls", "USE_MLP_HEAD": True, "DROPOUT": 0.1, "FIXED_MASK": False,
    "TEMPERATURE": 0.05, "MAX_SENTENCES": 100_000, "BATCH_SIZE": 64, "EPOCHS": 1, "LEARNING_RATE": 5e-5,
    "WEIGHT_DECAY": 0.01, "WARMUP_RATIO": 0.1, "GRAD_CLIP": 1.0, "MAX_SEQ_LEN": 32, "EVAL_INTERVAL": 50, "N_LAYER": 6,
    "N_EMBD": 256, "N_HEAD": 8, "N_POSITIONS": 128, "VOCAB_SIZE": 8192, "SEED": 42,
}  # fmt: skip
KNOBS = [*SETTINGS, "DEVICE", "PRECISION", "RUN_NAME", "OVERWRITE", "RESUME"]


def load_sentences():
    """The first MAX_SENTENCES sentences of data/sentences.txt, which is shuffled.

    Raises FileNotFoundError where there is no such file, ValueError where it is not UTF-8.
    """
    path = files.DATA / "sentences.txt"
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: run python download_data.py first")
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()][: config.MAX_SENTENCES]
    except UnicodeDecodeError as error:
        remedy = f"python download_data.py CORPUS={path} reads other encodings"
        raise ValueError(f"{path} is not UTF-8 ({error}): {remedy}") from None


def starting_encoder(sentences):
    """The encoder that INIT names; with INIT=random an untrained one, its vocabulary learned from the sentences."""
    torch.manual_seed(config.SEED)
    if config.INIT != "random":
        return SimCSEEncoder.from_pretrained(config.INIT, config.POOLER, config.DROPOUT)
    return SimCSEEncoder(
        train_tokenizer(sentences, config.VOCAB_SIZE), config.N_LAYER, config.N_EMBD, config.N_HEAD,
        n_positions=config.N_POSITIONS, dropout=config.DROPOUT, pooler=config.POOLER,
    )  # fmt: skip


def tokenize_corpus(encoder, sentences):
    """Token ids (N, T) and attention mask (N, T) of the sentences, less those that are equal once cut to MAX_SEQ_LEN.

    Two equal ones in a batch would be each other's negatives. Raises ValueError where less than a batch is left.
    """
    idx, attention_mask = encoder.tokenize(sentences, config.MAX_SEQ_LEN)
    _, first = np.unique(idx.numpy(), axis=0, return_index=True)
    if len(first) < config.BATCH_SIZE:
        left = f"{len(first):,} of {len(sentences):,} sentences differ within their first {config.MAX_SEQ_LEN} tokens"
        raise ValueError(f"BATCH_SIZE={config.BATCH_SIZE} is more than there is to train on: {left}")
    first.sort()
    return idx[first], attention_mask[first]


def random_batches(n):
    """The row numbers (B,) of every batch: n rows in a new random order each epoch, less what does not fill a batch."""
    generator = torch.Generator().manual_seed(config.SEED)
    for _ in range(config.EPOCHS):
        order = torch.randperm(n, generator=generator)
        yield from order[: n // config.BATCH_SIZE * config.BATCH_SIZE].view(-1, config.BATCH_SIZE)


def learning_rate(step, steps):
    """The rate of step 1, 2, ... steps: a linear climb over WARMUP_RATIO of them, then a linear fall towards 0."""
    warmup = max(1, round(config.WARMUP_RATIO * steps))
    return optimization.learning_rate(config.LEARNING_RATE, step, steps + 1, warmup, steps + 1 - warmup)


def main(score=measure):
    """Train and keep the best encoder. score: from an encoder to a dict of floats, `spearman` the one to choose by."""
    device = pick_device(config.DEVICE)
    precision = pick_precision(config.PRECISION, device)
    settings = {name: getattr(config, name) for name in SETTINGS}
    folder = runs.run_folder(config.RUN_NAME, settings, SETTINGS)
    sentences = load_sentences()
    encoder = starting_encoder(sentences).to(device)
    idx, attention_mask = tokenize_corpus(encoder, sentences)  # (N, T), (N, T)
    steps = config.EPOCHS * (len(idx) // config.BATCH_SIZE)
    weights = [(n, p) for n, p in encoder.named_parameters() if config.USE_MLP_HEAD or "mlp_head" not in n]
    optimizer = optimization.make_optimizer(weights, config.WEIGHT_DECAY)
    print(f"{len(idx):,} of {len(sentences):,} sentences, {steps:,} steps of {config.BATCH_SIZE}")
    print(
        f"{sum(p.numel() for _, p in weights):,} weights on {device} in {precision}, into {files.shown(folder)}"
    )

    conditions = runs.conditions(sentences, config.INIT, device, precision)
    with runs.Run(folder, settings, conditions, encoder, optimizer, config.RESUME, config.OVERWRITE) as run:
        if not run.rows:
            run.record(0, score(encoder))  # before training
        for step, rows in run.steps(random_batches(len(idx)), steps, config.BATCH_SIZE):
            T = attention_mask[rows].sum(dim=1).max()  # the longest sentence of the batch
            idx_b, mask_b = idx[rows, :T].to(device), attention_mask[rows, :T].to(device)  # (B, T), (B, T)

            encoder.train()  # dropout on: it is the augmentation
            with autocast(device, precision):
                masks = random_source(device).get_rng_state()
                z1 = encoder.encode(idx_b, mask_b, project=config.USE_MLP_HEAD)  # (B, C)
                if config.FIXED_MASK:  # the second pass draws the dropout masks of the first again
                    random_source(device).set_rng_state(masks)
                z2 = encoder.encode(idx_b, mask_b, project=config.USE_MLP_HEAD)  # (B, C), under other masks
            loss = simcse_loss(z1.float(), z2.float(), config.TEMPERATURE)  # equation 4

            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(encoder.parameters(), config.GRAD_CLIP)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()

            run.log(loss)
            if step % config.EVAL_INTERVAL == 0 or step == steps:
                run.record(step, score(encoder))  # keeps the best encoder
        run.finish()


if __name__ == "__main__":
    command_line.run(main, "train.py", [config], KNOBS)
