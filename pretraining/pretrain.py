"""Chapter 3 in one script: learn a WordPiece vocabulary and a small BERT by filling in masked words.

Text, spans of whole sentences and masked batches come from pretraining_batches.py, the objective from
masked_language_model.py; the encoder goes to MLM_FOLDER, from which SimCSE can start.
"""

import contextlib
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import config as root_config
from evaluate import evaluate_stsb
from model import SimCSEEncoder
from pretraining import config
from pretraining import masked_language_model as mlm
from pretraining import pretraining_batches as batches
from pretraining.neighbours import look_at_neighbours
from support import checkpoint, command_line, files, hub, optimization, runs
from support.device import pick_device, pick_precision
from support.sources import stsb_label
from support.tokenizer import SPECIAL_TOKENS

# What a run keeps from its first step to its last
SETTINGS = [
    "MLM_INIT", "N_LAYER", "N_EMBD", "N_HEAD", "N_POSITIONS", "VOCAB_SIZE", "BLOCK_SIZE", "SENTENCE_RATE", "LONG_RATE",
    "MASK_RATE", "TOKENS_PER_STEP", "MLM_LEARNING_RATE", "WARMUP_TOKENS", "DECAY_SHARE", "CLS_WEIGHT", "MLM_DROPOUT",
    "DROPOUT_SHARE", "HELD_OUT", "WEIGHT_DECAY", "GRAD_CLIP", "SEED",
]  # fmt: skip
CHANGEABLE = [
    "CLS_SIF",
    "MAX_TOKENS",
]  # what may be another when it is resumed, and is kept beside the encoder
KNOBS = [
    "PRETRAIN_CORPUS", "MLM_FOLDER", *SETTINGS, *CHANGEABLE, "VALIDATION_TOKENS", "VALIDATION_INTERVAL", "SAVE_MINUTES",
    "DEVICE", "PRECISION", "OVERWRITE", "RESUME",
]  # fmt: skip
# second parts of seeds, which the numbers of epochs do not reach
VALIDATION_STREAM, STEP_STREAM = 2**32, 2**33
EXAMPLES = [
    "the capital of france is [MASK] .",
    "she was born in [MASK] and studied at the university of london .",
    "the river flows [MASK] the sea .",
    "he played [MASK] for the national team .",
]


# ---- a new run, or one that goes on


def current_settings(precision):
    """What a run must keep, as a dict: the SETTINGS, and the number format that it computes in."""
    values = command_line.constants([root_config, config])
    return {name: values[name] for name in SETTINGS} | {"PRECISION": precision}


def check_folders(folder, run):
    """Raise ValueError or OSError where an encoder or a run is there that RESUME and OVERWRITE do not provide for."""
    state = run / "state.pt"
    go_on, replace = root_config.RESUME, root_config.OVERWRITE
    if state.exists() and not (go_on or replace):
        advice = "go on with RESUME=True, or replace it with OVERWRITE=True"
        raise ValueError(f"{files.shown(run)} holds a run already: {advice}")
    if go_on and not state.exists():
        raise ValueError(f"there is no run in {files.shown(run)} to resume")
    if (folder / "config.json").exists() and not (go_on or replace):
        advice = "name another folder with MLM_FOLDER=, or replace it with OVERWRITE=True"
        raise ValueError(f"{files.shown(folder)} holds an encoder: {advice}")
    if go_on and config.MLM_INIT and not (run / "tokens.npz").exists():
        # an encoder's own vocabulary can't be learned again from the text
        raise FileNotFoundError(f"there is no {run / 'tokens.npz'} any more: begin again with OVERWRITE=True")
    if root_config.N_EMBD % root_config.N_HEAD and not config.MLM_INIT:
        shape = f"N_EMBD={root_config.N_EMBD} must be divisible by N_HEAD={root_config.N_HEAD}"
        raise ValueError(shape)


def given_encoder():
    """MLM_INIT's encoder and head. Raises ValueError or OSError where it is not such as this script makes."""
    encoder = SimCSEEncoder.from_pretrained(config.MLM_INIT, "cls", config.MLM_DROPOUT)
    head = mlm.MaskedLanguageHead(encoder)
    try:
        checkpoint.load_head(hub.find(config.MLM_INIT), head.weights())
    except ValueError as error:  # train.py, for one, leaves it out
        problem = f"MLM_INIT={config.MLM_INIT} has no head for masked words to go on with"
        raise ValueError(f"{problem}: {error}") from None
    first_tokens = [encoder.tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS))]
    if first_tokens != SPECIAL_TOKENS:
        asked = f"{', '.join(SPECIAL_TOKENS)}, as that of an encoder made by pretrain.py does"
        raise ValueError(f"MLM_INIT={config.MLM_INIT}: its vocabulary does not begin with {asked}")
    if encoder.n_positions < root_config.N_POSITIONS:
        found = f"MLM_INIT={config.MLM_INIT} has {encoder.n_positions} positions"
        raise ValueError(f"{found}: give N_POSITIONS={encoder.n_positions}")
    return encoder, head


def new_encoder(tokenizer, corpus):
    """An untrained encoder and its head; their first guess of a masked token is how frequent each one is."""
    torch.manual_seed(root_config.SEED)
    encoder = SimCSEEncoder(
        tokenizer, root_config.N_LAYER, root_config.N_EMBD, root_config.N_HEAD,
        n_positions=root_config.N_POSITIONS, dropout=config.MLM_DROPOUT,
    )  # fmt: skip
    head = mlm.MaskedLanguageHead(encoder)
    look_at_neighbours(encoder)
    with torch.no_grad():
        head.bias.copy_(batches.token_frequencies(corpus["tokens"], len(head.bias)).log())
    return encoder, head


def prepare_corpus(run, tokenizer=None):
    """The tokenizer, and the tokens of PRETRAIN_CORPUS, which are kept in the run's folder."""
    kept = run / "tokens.npz"
    if root_config.RESUME and kept.exists():  # the text may have gone or changed
        return batches.load_corpus(kept)
    path = config.PRETRAIN_CORPUS or files.DATA / "sentences.txt"
    return batches.prepare_corpus(kept, path, root_config.VOCAB_SIZE, config.HELD_OUT, tokenizer)


def make_optimizer(encoder, head):
    """AdamW over an encoder and its head, on the device where they are."""
    parameters = [(name, p) for name, p in encoder.named_parameters() if "mlp_head" not in name]
    parameters += head.named_parameters()

    def decays(name, p):  # not vectors, nor positions, of which few inputs reach the last: they would fade
        return p.dim() >= 2 and "position" not in name

    return optimization.make_optimizer(
        parameters, root_config.WEIGHT_DECAY, decays, lr=config.MLM_LEARNING_RATE, betas=(0.9, 0.98), eps=1e-6
    )


def learning_rate(tokens):
    """The rate after so many tokens: up over WARMUP_TOKENS, constant, down to 0 over the last DECAY_SHARE."""
    step = config.TOKENS_PER_STEP
    return optimization.learning_rate(
        config.MLM_LEARNING_RATE,
        done=tokens + step,
        total=config.MAX_TOKENS + step,
        warmup=config.WARMUP_TOKENS + step,
        decay=config.DECAY_SHARE * config.MAX_TOKENS,
    )


def save_state(path, encoder, head, optimizer, corpus, progress, precision):
    """Write all that a stopped run needs, in one step; no generator's state, as every step has a seed of its own."""
    state = {
        "settings": current_settings(precision),
        "text": str(corpus["text"]),
        "shape": encoder.shape,
        "encoder": encoder.state_dict(),
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": progress,
    }
    files.save_state(path, state)


def load_state(path, tokenizer, corpus, device, precision):
    """A stopped run's encoder, head, optimizer and progress.

    Raises ValueError where the state is damaged, was begun under other settings, or is of another text.
    """
    state = files.load_state(path)
    begun, problem = state.get("settings", {}), ""
    for name, value in current_settings(precision).items():
        if begun.get(name) != value:
            problem = f"it was begun with {name}={begun.get(name)}, now it is {value}"
            break
    if not problem and state["text"] != str(corpus["text"]):
        problem = "it is of another text than tokens.npz beside it"
    if problem:
        raise ValueError(f"{files.shown(path)} can't be resumed ({problem}); OVERWRITE=True begins again")
    progress = state["progress"]
    scored = progress["history"][-1]["tokens"] if progress["history"] else 0
    if config.MAX_TOKENS <= progress["tokens"] and scored < progress["tokens"]:
        read = f"{files.shown(path.parent)} has read {progress['tokens']:,} tokens already"
        raise ValueError(f"{read}, and MAX_TOKENS={config.MAX_TOKENS:,} asks for no more")
    encoder = SimCSEEncoder(tokenizer, **state["shape"]).to(device)
    head = mlm.MaskedLanguageHead(encoder).to(device)
    encoder.load_state_dict(state["encoder"])
    head.load_state_dict(state["head"])
    optimizer = make_optimizer(encoder, head)
    optimizer.load_state_dict(state["optimizer"])
    return encoder, head, optimizer, progress


# ---- training


def random_batches(corpus, articles, rng):
    """The spans of some articles in random batches of one length."""
    spans = batches.cut_into_spans(
        corpus,
        articles,
        rng,
        config.BLOCK_SIZE,
        root_config.N_POSITIONS,
        config.SENTENCE_RATE,
        config.LONG_RATE,
    )
    return batches.group_by_length(spans, rng, config.TOKENS_PER_STEP)


def training_batches(corpus, epoch, position):
    """Endless batches of the articles to train on, from a place in the text on; each epoch has its own spans and
    order.

    Yields the epoch, the position in it after the batch, and the token ids, int64 (B, T).
    """
    articles, _ = batches.split_articles(len(corpus["article_starts"]) - 1, config.HELD_OUT)
    while True:
        rng = np.random.default_rng([root_config.SEED, epoch])
        drawn = random_batches(corpus, articles, rng)
        for i in range(position, len(drawn)):
            yield epoch, i + 1, batches.token_ids(drawn[i], corpus["tokens"])
        epoch, position = epoch + 1, 0


def validation_batches(corpus, vocab_size):
    """Masked batches of about VALIDATION_TOKENS held-out tokens: always the same text under the same masks."""
    _, articles = batches.split_articles(len(corpus["article_starts"]) - 1, config.HELD_OUT)
    rng = np.random.default_rng([root_config.SEED, VALIDATION_STREAM])
    masked, left = [], config.VALIDATION_TOKENS
    for batch in random_batches(corpus, articles, rng):
        if left > 0:
            idx = batches.token_ids(batch, corpus["tokens"])  # (B, T)
            masked.append(batches.mask_tokens(idx, rng, vocab_size, config.MASK_RATE))
            left -= idx.size
    return masked


def score_stsb(encoder):
    """STS-B dev, or its sample (Spearman x 100), of the encoder under both poolings; None where it was not fetched."""
    scores, own_pooler = {}, encoder.pooler
    for pooler in ("cls", "mean"):
        encoder.pooler = pooler
        try:
            scores[f"stsb_{pooler}"] = evaluate_stsb(encoder)
        except FileNotFoundError:
            scores[f"stsb_{pooler}"] = None
    encoder.pooler = own_pooler
    return scores


def write_metrics(folder, history):
    """metrics.csv and curves.png."""
    titles = {
        "train_loss": "loss (nats)",
        "loss": "loss on held-out articles (nats)",
        "accuracy": "accuracy on held-out articles",
        "stsb_cls": f"{stsb_label()}, [CLS]",
        "stsb_mean": f"{stsb_label()}, mean pooling",
    }
    files.write_table(folder / "metrics.csv", history)
    runs.draw_curves(folder, history, titles)


@contextlib.contextmanager
def stop_signals():
    """A list that fills when the process is told to stop (Ctrl-C, kill), so that the step at hand can be finished."""
    received, before = [], {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *_: received.append(True))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(encoder, head, optimizer, corpus, progress, run, precision):
    """Train until MAX_TOKENS or a signal, keeping the state in the folder `run`; returns whether it is done.

    progress: where the run stands, which is brought up to date: counters of tokens, steps, epochs, batches of the
    epoch (position) and seconds, the losses since the last validation, and a row of metrics for each validation.
    """
    vocab_size, device = encoder.shape["vocab_size"], encoder.token_embedding.weight.device
    frequencies = batches.token_frequencies(corpus["tokens"], vocab_size)
    word_weight = (1 / (1 + frequencies / config.CLS_SIF)).to(device)  # a / (a + p), which is 1 for inf
    validation = validation_batches(corpus, vocab_size)
    text = training_batches(corpus, progress["epoch"], progress["position"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = clock = time.monotonic()
    seldom = 1 if sys.stderr.isatty() else 60  # seconds between two lines of the progress bar
    bar = tqdm(
        total=config.MAX_TOKENS,
        initial=progress["tokens"],
        unit=" tokens",
        unit_scale=True,
        mininterval=seldom,
    )
    encoder.train()
    with stop_signals() as stopped, bar:
        while progress["tokens"] < config.MAX_TOKENS and not stopped:
            # a generator of its own for every step: a stopped run has no generator's state to keep
            rng = np.random.default_rng([root_config.SEED, STEP_STREAM, progress["step"]])
            torch.manual_seed(int(rng.integers(2**63)))  # for dropout
            share_left = 1 - progress["tokens"] / config.MAX_TOKENS
            mlm.set_dropout(encoder, config.MLM_DROPOUT if share_left <= config.DROPOUT_SHARE else 0.0)
            rate = learning_rate(progress["tokens"])

            epoch, position, idx = next(text)  # (B, T)
            masked = batches.mask_tokens(idx, rng, vocab_size, config.MASK_RATE)
            logits, targets, cls_logits = mlm.predict(encoder, head, masked, precision)
            mlm_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            cls_loss = mlm.bag_of_words_loss(cls_logits, torch.from_numpy(idx).to(device), word_weight)
            loss = mlm_loss + config.CLS_WEIGHT * cls_loss
            if not torch.isfinite(loss):
                where = f"at step {progress['step']}, learning rate {rate:.1e}"
                raise ValueError(f"the loss is {loss.item()} {where}")

            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, root_config.GRAD_CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

            tokens_before, now = progress["tokens"], time.monotonic()
            progress["losses"].append(mlm_loss.item())
            progress["tokens"] += idx.size
            progress["step"] += 1
            progress["epoch"], progress["position"] = epoch, position
            progress["seconds"] += now - clock
            clock = now
            bar.update(idx.size)
            bar.set_postfix(loss=f"{np.mean(progress['losses'][-100:]):.3f}", refresh=False)

            done = progress["tokens"] >= config.MAX_TOKENS
            interval = config.VALIDATION_INTERVAL
            if done or progress["tokens"] // interval > tokens_before // interval:
                held_out_loss, accuracy = mlm.validate(encoder, head, validation, precision)
                row = {
                    "step": progress["step"],
                    "tokens": progress["tokens"],
                    "hours": progress["seconds"] / 3600,
                    "rate": rate,
                    "train_loss": float(np.mean(progress["losses"])),
                    "loss": held_out_loss,
                    "accuracy": accuracy,
                    **score_stsb(encoder),
                }
                progress["losses"] = []
                progress["history"].append(row)
                numbers = "  ".join(f"{name} {value:.5g}" for name, value in row.items() if value is not None)
                bar.write(f"{numbers}  ({stsb_label()})")
                write_metrics(run, progress["history"])
                mlm.save_pretrained(run / "latest", encoder, head)  # to try it while the run goes on
            if stopped or done or now - saved >= 60 * config.SAVE_MINUTES:
                save_state(run / "state.pt", encoder, head, optimizer, corpus, progress, precision)
                saved = now
    return progress["tokens"] >= config.MAX_TOKENS


def save_result(folder, encoder, head, corpus, progress, precision):
    """The encoder with its metrics, and pretraining.json, which says how it was made."""
    values = command_line.constants([root_config, config])
    settings = current_settings(precision) | {name: values[name] for name in CHANGEABLE}
    if config.MLM_INIT:  # which brought its shape
        settings["MLM_INIT"] = files.shown(config.MLM_INIT)
        for name in ("N_LAYER", "N_EMBD", "N_HEAD", "VOCAB_SIZE"):
            settings[name] = encoder.shape[name.lower()]
    made = {"settings": settings, **progress["history"][-1], "epochs": progress["epoch"]}
    mlm.save_pretrained(folder, encoder, head)
    write_metrics(folder, progress["history"])
    files.write_json(folder / "pretraining.json", made | {"corpus_sha256": str(corpus["text"]).split()[0]})


def main():
    device = pick_device(root_config.DEVICE)
    precision = pick_precision(root_config.PRECISION, device)
    folder = files.ROOT / config.MLM_FOLDER  # beside the scripts, from wherever they are called
    run = Path(f"{folder}.run")
    with files.lock(run, f"the run {files.shown(run)}"):
        check_folders(folder, run)
        if root_config.RESUME:
            tokenizer, corpus = prepare_corpus(run)
            encoder, head, optimizer, progress = load_state(
                run / "state.pt", tokenizer, corpus, device, precision
            )
        else:
            if config.MLM_INIT:  # checked before anything is overwritten
                encoder, head = given_encoder()
                tokenizer, corpus = prepare_corpus(run, encoder.tokenizer)
            else:
                tokenizer, corpus = prepare_corpus(run)
                encoder, head = new_encoder(tokenizer, corpus)
            optimizer = make_optimizer(encoder.to(device), head.to(device))
            progress = {
                "tokens": 0,
                "step": 0,
                "epoch": 0,
                "position": 0,
                "seconds": 0.0,
                "losses": [],
                "history": [],
            }
            (run / "state.pt").unlink(missing_ok=True)
        n_weights = sum(p.numel() for p in encoder.parameters())
        computing = f"{n_weights:,} weights on {device} in {precision}"
        print(f"{len(corpus['tokens']):,} tokens of text, {computing}, into {files.shown(folder)}")

        if not train(encoder, head, optimizer, corpus, progress, run, precision):
            raise KeyboardInterrupt("RESUME=True goes on from what was saved")
        save_result(folder, encoder, head, corpus, progress, precision)
        print(f"the encoder is in {files.shown(folder)}; what it fills in, likeliest first:")
        for sentence, tokens in zip(EXAMPLES, mlm.fill_masks(encoder, head, EXAMPLES), strict=True):
            print(f"  {sentence:70} {' '.join(tokens)}")


if __name__ == "__main__":
    command_line.run(main, "-m pretraining.pretrain", [root_config, config], KNOBS)
