"""Unsupervised SimCSE: every sentence goes through the encoder twice, and its two embeddings must find each other."""

import math
import os
import time

import numpy as np
import torch
from tqdm import tqdm

import config
from checkpoint import train_tokenizer
from evaluate import computes_in_bf16, measure, pick_device, sources, stsb_name
from model import SimCSEEncoder, simcse_loss
from runs import (conditions, draw_curves, load_state, open_run, random_source, read_metrics, read_run, run_folder, save_state,
                  update_run, write_table)


def load_sentences():
    """The first MAX_SENTENCES sentences of data/sentences.txt, which is shuffled.

    Raises FileNotFoundError where there is no such file, ValueError where it is not UTF-8.
    """
    path = os.path.join(config.data, "sentences.txt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {path}: run python download_data.py first")
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()][:config.MAX_SENTENCES]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): python download_data.py CORPUS={path} reads other encodings") from None


def starting_encoder(sentences):
    """The encoder that INIT names; with INIT=random an untrained one, its vocabulary learned from the sentences."""
    torch.manual_seed(config.SEED)
    if config.INIT != "random":
        return SimCSEEncoder.from_pretrained(config.INIT, pooler=config.POOLER, dropout=config.DROPOUT)
    return SimCSEEncoder(train_tokenizer(sentences, config.VOCAB_SIZE), config.N_LAYER, config.N_EMBD, config.N_HEAD,
                         n_positions=config.N_POSITIONS, dropout=config.DROPOUT, pooler=config.POOLER)


def tokenize_corpus(encoder, sentences):
    """Token ids (N, T) and attention mask (N, T) of the corpus, less the rows that truncation or lower-casing made equal.

    Two equal rows in one batch would be each other's negatives. Raises ValueError where less than a batch is left.
    """
    idx, attention_mask = encoder.tokenize(sentences, config.MAX_SEQ_LEN)
    _, first = np.unique(idx.numpy(), axis=0, return_index=True)
    kept = torch.from_numpy(np.sort(first))
    if len(kept) < config.BATCH_SIZE:
        raise ValueError(f"BATCH_SIZE={config.BATCH_SIZE} is more than the corpus has different sentences: {len(kept)}")
    return idx[kept], attention_mask[kept]


def batches(idx, attention_mask, device):
    """The batches of every epoch: sentences of one length together, drawn anew each epoch, in random order.

    They waste no padding, and their negatives can't be told apart by length. What does not fill a batch is left out.
    idx, attention_mask: (N, T). Yields idx (B, T') and attention_mask (B, T') on the device, with T' the longest of the batch,
    and None for the mask where nothing is padded.
    """
    lengths = attention_mask.sum(1)
    idx, attention_mask = idx.to(device), attention_mask.to(device)         # once, and the row numbers once an epoch: no step waits
    for epoch in range(config.EPOCHS):
        random = torch.Generator().manual_seed(config.SEED + epoch)
        order = torch.randperm(len(idx), generator=random)[:len(idx) // config.BATCH_SIZE * config.BATCH_SIZE]
        order = order[lengths[order].argsort(stable=True)].view(-1, config.BATCH_SIZE)
        order = order[torch.randperm(len(order), generator=random)]                         # (steps, B) row numbers
        shortest, longest = (ends.tolist() for ends in lengths[order].aminmax(dim=1))
        for rows, low, high in zip(order.to(device), shortest, longest):
            yield idx[rows, :high], attention_mask[rows, :high] if low < high else None


def learning_rate(step, steps):
    """The rate of step 1, 2, ... steps: a linear climb over WARMUP_RATIO of them, then a linear fall towards 0."""
    warmup = max(1, round(config.WARMUP_RATIO * steps))
    if step <= warmup:
        return config.LEARNING_RATE * step / warmup
    return config.LEARNING_RATE * (steps + 1 - step) / (steps + 1 - warmup)


def make_optimizer(encoder):
    """AdamW over the encoder and, if it is used, the head; weight decay on matrices only, as biases need no shrinking."""
    parameters = [p for name, p in encoder.named_parameters() if config.USE_MLP_HEAD or not name.startswith("mlp_head.")]
    return torch.optim.AdamW([{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.WEIGHT_DECAY},
                              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}],
                             fused=parameters[0].device.type != "mps")


def two_views(encoder, idx, attention_mask):
    """The positive pairs of a batch: the same tokens, encoded twice under dropout.

    idx: (B, T); attention_mask: (B, T), or None where nothing is padded. Returns z1, z2, (B, C) each.
    """
    def encode(idx, attention_mask):
        with torch.autocast(idx.device.type, dtype=torch.bfloat16, enabled=computes_in_bf16(idx.device)):
            return encoder.encode(idx, attention_mask, project=config.USE_MLP_HEAD).float()

    if not config.FIXED_MASK:       # both passes as the rows of one: every row draws a mask of its own
        both = encode(idx.repeat(2, 1), None if attention_mask is None else attention_mask.repeat(2, 1))      # (2B, C)
        return both.chunk(2)
    random = random_source(idx.device)
    state = random.get_rng_state()
    z1 = encode(idx, attention_mask)
    random.set_rng_state(state)                         # the second pass draws the same masks again
    return z1, encode(idx, attention_mask)


def train_step(encoder, optimizer, idx, attention_mask, rate):
    """One step of SimCSE on a batch (B, T): two views, equation 4, and AdamW at a learning rate. Returns the loss, a scalar."""
    encoder.train()                                     # dropout on: it is the augmentation
    z1, z2 = two_views(encoder, idx, attention_mask)
    loss = simcse_loss(z1, z2, config.TEMPERATURE)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(encoder.parameters(), config.GRAD_CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return loss.detach()


def rank(row):
    """What the best row of the metrics is chosen by: its Spearman, where that is defined."""
    return -math.inf if math.isnan(row["spearman"]) else row["spearman"]


def main():
    started, device, folder = time.time(), pick_device(config.DEVICE), run_folder(config.RUN_NAME)
    sentences = load_sentences()
    encoder = starting_encoder(sentences).to(device)
    idx, attention_mask = tokenize_corpus(encoder, sentences)
    optimizer = make_optimizer(encoder)
    steps = config.EPOCHS * (len(idx) // config.BATCH_SIZE)
    equal = f", less {len(sentences) - len(idx)} equal to others once cut" if len(idx) < len(sentences) else ""
    few = f" (all there are, of MAX_SENTENCES={config.MAX_SENTENCES:,})" if len(sentences) < config.MAX_SENTENCES else ""
    print(f"{len(idx):,} sentences{few}{equal}, {steps:,} steps of {config.BATCH_SIZE}, "
          f"{sum(p.numel() for p in encoder.parameters()):,} weights on {device}"
          f"{' in bfloat16' if computes_in_bf16(device) else ''}, into {config.shown(folder)}")

    done, rows, losses = 0, [], []
    if open_run(folder, config.INIT, conditions(sentences, config.INIT, device)):
        done = load_state(folder, encoder, optimizer, device)
        rows = read_metrics(folder, done)
    elif config.INIT == "random":
        encoder.save_pretrained(os.path.join(folder, "start"))
    update_run(folder, sources=sources())
    before = read_run(folder)["seconds"]

    def finite(losses):
        """The losses since the last score as floats; raises ValueError where one isn't finite. Waits for the GPU."""
        values = torch.stack(losses).tolist()
        for at, value in enumerate(values, start=rows[-1]["step"] + 1):
            if not math.isfinite(value):
                kept = f"the best encoder up to step {rows[-1]['step']} is in {config.shown(folder)}" \
                    if any(rank(row) > -math.inf for row in rows[1:]) else "there was no score yet, so no encoder was kept"
                raise ValueError(f"the loss is {value} at step {at}, learning rate {learning_rate(at, steps):.2e}; {kept}")
        return values

    def score(step):
        """Measure on STS-B dev, keep the encoder if it is the best so far, and write down where the run stands."""
        loss = sum(finite(losses)) / len(losses) if losses else None
        losses.clear()
        now = {"step": step, "epoch": step * config.EPOCHS / steps, "loss": loss, **measure(encoder, "validation")}
        best = max(map(rank, rows[1:]), default=-math.inf)
        rows.append(now)
        write_table(os.path.join(folder, "metrics.csv"), rows)
        draw_curves(folder, rows, {"loss": "loss (nats)", "spearman": f"Spearman x 100 ({stsb_name()})",
                                   "alignment": "alignment (lower is better)", "uniformity": "uniformity (lower is better)"})
        if step and rank(now) > best:
            encoder.save_pretrained(folder)
        save_state(folder, encoder, optimizer, step, device)
        update_run(folder, seconds=before + time.time() - started, last=now)
        return now["spearman"]

    spearman = score(0) if not rows else rows[-1]["spearman"]
    print(f"{stsb_name()}, validation: {spearman:.2f} at step {done}")
    last_shown, name = 0.0, stsb_name().split(",")[0]
    with tqdm(total=steps, initial=done, unit="step") as bar:
        for step, batch in enumerate(batches(idx, attention_mask, device), start=1):
            if step <= done:
                continue
            losses.append(train_step(encoder, optimizer, *batch, learning_rate(step, steps)))
            now = time.time()
            if now - last_shown > 1:                                     # seldom, as to read a loss is to wait for the GPU
                rate = (bar.n - bar.initial) / bar.format_dict["elapsed"] * config.BATCH_SIZE
                bar.set_postfix_str(f"loss {finite(losses)[-1]:.3g}, {name} {spearman:.2f}, {rate:.0f} sentences/s", refresh=False)
                last_shown = now
            if step % config.EVAL_INTERVAL == 0 or step == steps:
                spearman = score(step)
                bar.set_postfix_str(f"{name} {spearman:.2f}", refresh=False)
            bar.update()

    best = max(rows[1:], key=rank)
    if math.isnan(best["spearman"]):
        raise ValueError("no score was defined, as the embeddings are all the same or not finite: no encoder was kept")
    update_run(folder, finished=True, start=rows[0], best=best)
    os.remove(os.path.join(folder, "state.safetensors"))
    print(f"{stsb_name()}, validation: {rows[0]['spearman']:.2f} before, {best['spearman']:.2f} at best (step {best['step']}), "
          f"{rows[-1]['spearman']:.2f} at the end; encoder, metrics.csv and curves.png in {config.shown(folder)}")


if __name__ == "__main__":
    config.run(main, __file__)
