"""Chapter 3 in one script: learn a WordPiece vocabulary and a small BERT by filling in hidden words.

Text -> spans of whole sentences (spans.py) -> masked-language-model loss -> MLM_FOLDER, from which SimCSE can start.
Papers: BERT (Devlin et al., 2018), section 3.1. Its task for [CLS], next-sentence prediction, gives way to one that asks more:
the words of the input, from [CLS] alone (Ma et al., 2024, "Drop your Decoder: Pre-training with Bag-of-Word Prediction").
"""

import io
import math
import os
import sys
import time
import zipfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
import config
import spans
from evaluate import computes_in_bf16, evaluate_stsb, pick_device, stsb_name
from model import SimCSEEncoder
from runs import draw_curves, stop_signals, write_table

# what a run keeps once it has started (MAX_TOKENS and CLS_SIF may change)
RECIPE = ["MLM_INIT", "N_LAYER", "N_EMBD", "N_HEAD", "N_POSITIONS", "VOCAB_SIZE", "BLOCK_SIZE", "SENTENCE_RATE", "LONG_RATE",
          "MASK_RATE", "TOKENS_PER_STEP", "MLM_LEARNING_RATE", "WARMUP_TOKENS", "DECAY_SHARE", "CLS_WEIGHT", "MLM_DROPOUT",
          "DROPOUT_SHARE", "HELD_OUT", "WEIGHT_DECAY", "GRAD_CLIP", "SEED"]
EXAMPLES = ["the capital of france is [MASK] .", "she was born in [MASK] and studied at the university of london .",
            "the river flows [MASK] the sea .", "he played [MASK] for the national team ."]


# ---------------------------------------------------------------------------- the model

class MaskedLanguageHead(nn.Module):
    """From hidden states to scores for all tokens of the vocabulary, through the token embedding. Source: BERT's code."""

    def __init__(self, encoder):
        super().__init__()
        vocab_size, n_embd = encoder.token_embedding.weight.shape
        self.dense = nn.Linear(n_embd, n_embd)
        self.norm = nn.LayerNorm(n_embd, encoder.shape["eps"])
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        encoder._initialise(self.dense)

    def forward(self, hidden, embedding):
        """hidden: (..., C); embedding: the encoder's token embedding (V, C). Returns (..., V)."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), embedding, self.bias)

    def weights(self):
        """The weights by the names of Hugging Face's BertForMaskedLM; the decoder is its embedding."""
        return {"cls.predictions.bias": self.bias, "cls.predictions.transform.dense.weight": self.dense.weight,
                "cls.predictions.transform.dense.bias": self.dense.bias,
                "cls.predictions.transform.LayerNorm.weight": self.norm.weight,
                "cls.predictions.transform.LayerNorm.bias": self.norm.bias}


@torch.no_grad()
def show_neighbours(encoder):
    """Start four heads of the first two layers at looking one and two tokens to the left and to the right.

    A new BERT attends evenly to all tokens, sees a bag of words, and learns little more than their frequencies until it has
    found out where a neighbour is, which takes millions of tokens. Here it is told. Position t is a clock of D/2 hands, D the
    width of a head; hand k stands at the angle w_k t, with w_k = 2 pi (k + 1/2) / D. The product of two clocks,
    sum_k cos w_k (i - j), is D/2 where i = j and 0 at every other distance below D. So a query that turns its hands on by
    w_k times an offset finds the key at just that offset. These are first values of BERT's ordinary weights, free to change.
    """
    n_embd, n_head = encoder.token_embedding.embedding_dim, encoder.shape["n_head"]
    width, hands, amplitude, logit = n_embd // n_head, n_embd // n_head // 2, 0.1, 4.0
    if hands == 0:                                                                          # heads too narrow for a clock
        return
    speed = math.pi * (torch.arange(hands) + 0.5) / hands                                   # (hands,) angle a position
    angle = torch.arange(encoder.n_positions)[:, None] * speed                              # (positions, hands)
    encoder.segment_embedding.weight.zero_()
    encoder.position_embedding.weight.mul_(0.1)
    encoder.position_embedding.weight[:, :2 * hands] = amplitude * torch.cat([angle.cos(), angle.sin()], 1)
    # what the first LayerNorm makes of the amplitude: it divides by the size of tokens (0.02 in each dimension) and clock
    seen = amplitude / math.sqrt(0.02**2 + amplitude**2 * hands / n_embd)
    scale = math.sqrt(logit * math.sqrt(width) / (seen**2 * hands))
    for block in encoder.blocks[:2]:
        for head, offset in enumerate((-1, 1, -2, 2)[:n_head]):
            for layer, turn in ((block.attention.query, speed * offset), (block.attention.key, speed * 0)):
                cos, sin = torch.diag(turn.cos()), torch.diag(turn.sin())                   # (hands, hands)
                rows = layer.weight[head * width:(head + 1) * width]                        # (width, C), a view
                rows.zero_()[:2 * hands, :2 * hands] = scale * torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def predict(encoder, head, masked):
    """Scores for the hidden tokens of a masked batch, and for all of its tokens from [CLS] alone.

    Returns logits (B, M, V), the tokens that stood there (B, M), and the logits of [CLS] (B, V): no layer between, so that
    words lie along directions of the embedding, where a cosine can see them.
    """
    device, words = encoder.token_embedding.weight.device, encoder.token_embedding.weight
    idx, places, targets = (torch.from_numpy(array).to(device) for array in masked)
    with torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bf16(device)):
        hidden = encoder(idx, None, F.pad(places, (1, 0)))                      # (B, 1 + M, C), [CLS] first
        return head(hidden[:, 1:], words).float(), targets, F.linear(hidden[:, 0], words, head.bias).float()


def bag_of_words_loss(logits, idx, weight):
    """Weighted mean -log p in nats of a span's tokens, wherever in it they stand, under the one distribution of its [CLS].

    logits: (B, V); idx: (B, T), the tokens before masking, [CLS] first and [SEP] last; weight: (V,) above 0, what each token
    counts. Sources: Ma et al. (2024), section 3.2; for weights a / (a + frequency), Arora et al. (2017), section 3.
    """
    # the best guess for any span is frequency x weight: the bias starts at log frequency, this adds log weight
    log_p = (logits + weight.log()).log_softmax(1).gather(1, idx[:, 1:-1])                      # (B, T - 2)
    weight = weight[idx[:, 1:-1]]
    return -(weight * log_p).sum() / weight.sum()


@torch.no_grad()
def validate(encoder, head, masked_batches):
    """Mean loss in nats, and accuracy, over the hidden tokens of masked batches; dropout off."""
    encoder.eval()
    loss = right = count = 0
    for masked in masked_batches:
        logits, targets, _ = predict(encoder, head, masked)
        loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        right += (logits.argmax(-1) == targets).sum().item()
        count += targets.numel()
    encoder.train()
    return loss / count, right / count


def stsb(encoder):
    """STS-B dev, or its sample (Spearman x 100), of the encoder as it is, under both poolings; None where it was not fetched."""
    scores, own = {}, encoder.pooler
    for pooler in ("cls", "mean"):
        encoder.pooler = pooler
        try:
            scores[f"stsb_{pooler}"] = evaluate_stsb(encoder)
        except FileNotFoundError:
            scores[f"stsb_{pooler}"] = None
    encoder.pooler = own
    return scores


# ---------------------------------------------------------------------------- the run

def given_encoder():
    """MLM_INIT's encoder and head. Raises ValueError or OSError where it is not such as this script makes."""
    encoder = SimCSEEncoder.from_pretrained(config.MLM_INIT, "cls", config.MLM_DROPOUT)
    head = MaskedLanguageHead(encoder)
    checkpoint.load_head(config.MLM_INIT, head.weights())
    if [encoder.tokenizer.id_to_token(i) for i in range(spans.N_SPECIAL)] != checkpoint.SPECIAL_TOKENS:
        raise ValueError(f"MLM_INIT={config.MLM_INIT}: its vocabulary does not begin with {', '.join(checkpoint.SPECIAL_TOKENS)}, "
                         "as that of an encoder made by pretrain.py does")
    if encoder.n_positions < config.N_POSITIONS:
        raise ValueError(f"MLM_INIT={config.MLM_INIT} has {encoder.n_positions} positions: give N_POSITIONS={encoder.n_positions}")
    return encoder, head


def new_encoder(tokenizer, corpus):
    """An untrained encoder and its head; their first guess of a hidden token is how frequent each one is."""
    torch.manual_seed(config.SEED)
    encoder = SimCSEEncoder(tokenizer, config.N_LAYER, config.N_EMBD, config.N_HEAD, n_positions=config.N_POSITIONS,
                            dropout=config.MLM_DROPOUT)
    head = MaskedLanguageHead(encoder)
    show_neighbours(encoder)
    with torch.no_grad():
        head.bias.copy_(spans.frequencies(corpus, len(head.bias)).log())
    return encoder, head


def make_optimizer(encoder, head):
    """AdamW over an encoder and its head, on the device where they are."""
    named = [(name, p) for module in (encoder, head) for name, p in module.named_parameters() if "mlp_head" not in name]
    # no decay for vectors, nor for positions, of which few inputs reach the last: they would fade
    others = [p for name, p in named if p.dim() < 2 or "position" in name]
    matrices = [p for name, p in named if p.dim() >= 2 and "position" not in name]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": config.WEIGHT_DECAY},
                              {"params": others, "weight_decay": 0.0}],
                             lr=config.MLM_LEARNING_RATE, betas=(0.9, 0.98), eps=1e-6, fused=matrices[0].device.type != "mps")


def learning_rate(tokens):
    """The rate after so many tokens: up over WARMUP_TOKENS, constant, down to 0 over the last DECAY_SHARE."""
    up = (tokens + config.TOKENS_PER_STEP) / (config.WARMUP_TOKENS + config.TOKENS_PER_STEP)
    down = (1 - tokens / config.MAX_TOKENS) / config.DECAY_SHARE if config.DECAY_SHARE else 1
    return config.MLM_LEARNING_RATE * max(0.0, min(1.0, up, down))


def save_state(path, encoder, head, optimizer, corpus, progress):
    """Write all that a stopped run needs, in one step. No generator's state: every step draws from a seed of its own."""
    buffer = io.BytesIO()
    torch.save({"recipe": {name: getattr(config, name) for name in RECIPE}, "text": str(corpus["made_of"]),
                "shape": encoder.shape, "encoder": encoder.state_dict(), "head": head.state_dict(),
                "optimizer": optimizer.state_dict(), "progress": progress}, buffer)
    checkpoint.write_atomically(path, buffer.getvalue())


def load_state(path, tokenizer, corpus, device):
    """A stopped run's encoder, head, optimiser and progress. Raises ValueError where damaged, of another recipe or of another text."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():                                  # torch.load does not look whether a bit has changed
                raise ValueError("a checksum is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name in RECIPE:
            if state["recipe"][name] != getattr(config, name):
                raise ValueError(f"it was begun with {name}={state['recipe'][name]}, now it is {getattr(config, name)}")
        if state["text"] != str(corpus["made_of"]):
            raise ValueError("it is of another text than tokens.npz beside it")
        encoder = SimCSEEncoder(tokenizer, **state["shape"]).to(device)
        head = MaskedLanguageHead(encoder).to(device)
        encoder.load_state_dict(state["encoder"])
        head.load_state_dict(state["head"])
        optimizer = make_optimizer(encoder, head)
        optimizer.load_state_dict(state["optimizer"])
        return encoder, head, optimizer, state["progress"]
    except (MemoryError, torch.OutOfMemoryError):               # the state is sound
        raise
    except Exception as error:          # zipfile, pickle and torch each raise their own for a damaged file
        raise ValueError(f"{path} can't be resumed ({config.first_line(error)}); OVERWRITE=True begins again") from None


def save_encoder(folder, encoder, head):
    """Write the encoder and its head in half precision: a BertForMaskedLM to Hugging Face, a start to SimCSE."""
    weights = {name: tensor.half() for name, tensor in encoder.state_dict().items() if not name.startswith("mlp_head.")}
    checkpoint.save(folder, weights, encoder.shape, encoder.tokenizer, encoder.pooler,
                    head={name: tensor.half() for name, tensor in head.weights().items()})


def keep_metrics(folder, history):
    """metrics.csv and curves.png."""
    if history:
        write_table(os.path.join(folder, "metrics.csv"), history)
        draw_curves(folder, history, {"train_loss": "loss (nats)", "loss": "loss on held-out articles (nats)",
                                      "accuracy": "accuracy on held-out articles", "stsb_cls": f"{stsb_name()}, [CLS]",
                                      "stsb_mean": f"{stsb_name()}, mean pooling"})


@torch.no_grad()
def fill_masks(encoder, head, sentences):
    """For each [MASK] of some sentences, the five likeliest tokens; a list of lists of strings."""
    encoder.eval()
    idx, attention_mask = (tensor.to(encoder.token_embedding.weight.device) for tensor in encoder.tokenize(sentences))
    logits = head(encoder(idx, attention_mask)[idx == spans.MASK], encoder.token_embedding.weight)      # (masks, V)
    return [[encoder.tokenizer.id_to_token(i) for i in row] for row in logits.topk(5).indices.tolist()]


def train(encoder, head, optimizer, corpus, progress, run):
    """Train from `progress` on until MAX_TOKENS or a signal, keeping the state in the folder `run`; returns whether it is done.

    progress: counters of tokens, steps, epochs, batches of the epoch (position) and seconds, the losses since the last
    validation, and a row of metrics for each validation.
    """
    vocab_size, device = encoder.shape["vocab_size"], encoder.token_embedding.weight.device
    weight = (1 / (1 + spans.frequencies(corpus, vocab_size) / config.CLS_SIF)).to(device)      # a / (a + p), 1 for inf
    validation = spans.validation(corpus, vocab_size)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    batches = spans.stream(corpus, progress["epoch"], progress["position"])
    saved = clock = time.monotonic()
    encoder.train()
    with stop_signals() as stopped, tqdm(total=config.MAX_TOKENS, initial=progress["tokens"], unit=" tokens", unit_scale=True,
                                         mininterval=1 if sys.stderr.isatty() else 60) as bar:
        while progress["tokens"] < config.MAX_TOKENS and not stopped:
            rng = np.random.default_rng([config.SEED, 2**33, progress["step"]])     # each step's own: no state to keep
            torch.manual_seed(int(rng.integers(2**63)))                             # for dropout
            left = 1 - progress["tokens"] / config.MAX_TOKENS
            encoder.dropout = config.MLM_DROPOUT if left <= config.DROPOUT_SHARE else 0.0
            rate = learning_rate(progress["tokens"])
            for group in optimizer.param_groups:
                group["lr"] = rate
            epoch, position, batch = next(batches)
            idx = spans.rows_of(batch, corpus["tokens"])                            # (B, T)
            logits, targets, cls_logits = predict(encoder, head, spans.mask(idx, rng, vocab_size))
            mlm_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss = mlm_loss + config.CLS_WEIGHT * bag_of_words_loss(cls_logits, torch.from_numpy(idx).to(device), weight)
            if not torch.isfinite(loss):
                raise ValueError(f"the loss is {loss.item()} at step {progress['step']}, learning rate {rate:.1e}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.GRAD_CLIP)
            optimizer.step()

            before, now = progress["tokens"], time.monotonic()
            progress["losses"].append(mlm_loss.item())
            progress.update(tokens=before + idx.size, step=progress["step"] + 1, epoch=epoch, position=position,
                            seconds=progress["seconds"] + now - clock)
            clock = now
            bar.update(idx.size)
            bar.set_postfix(loss=f"{np.mean(progress['losses'][-100:]):.3f}", refresh=False)
            done = progress["tokens"] >= config.MAX_TOKENS
            if done or progress["tokens"] // config.VALIDATION_INTERVAL > before // config.VALIDATION_INTERVAL:
                held_out_loss, accuracy = validate(encoder, head, validation)
                row = {"step": progress["step"], "tokens": progress["tokens"], "hours": progress["seconds"] / 3600,
                       "rate": rate, "train_loss": float(np.mean(progress["losses"])), "loss": held_out_loss,
                       "accuracy": accuracy, **stsb(encoder)}
                progress.update(losses=[], history=[*progress["history"], row])
                bar.write("  ".join(f"{name} {value:.5g}" for name, value in row.items() if value is not None) + f"  ({stsb_name()})")
                keep_metrics(run, progress["history"])
                save_encoder(os.path.join(run, "latest"), encoder, head)            # to try it while the run goes on
            if stopped or done or now - saved >= 60 * config.SAVE_MINUTES:
                save_state(os.path.join(run, "state.pt"), encoder, head, optimizer, corpus, progress)
                saved = now
    return progress["tokens"] >= config.MAX_TOKENS


def main():
    device = pick_device(config.DEVICE)
    folder = os.path.join(config.here, config.MLM_FOLDER.rstrip("/\\"))      # beside the scripts, from wherever they are called
    run = folder + ".run"
    state = os.path.join(run, "state.pt")
    if os.path.exists(state) and not (config.RESUME or config.OVERWRITE):
        raise ValueError(f"{config.shown(run)} holds a run already: go on with RESUME=True, or replace it with OVERWRITE=True")
    if config.RESUME and not os.path.exists(state):
        raise ValueError(f"there is no run in {config.shown(run)} to resume")
    if os.path.exists(os.path.join(folder, "config.json")) and not (config.RESUME or config.OVERWRITE):
        raise ValueError(f"{config.shown(folder)} holds an encoder: name another folder with MLM_FOLDER=, or replace it with OVERWRITE=True")
    given = given_encoder() if config.MLM_INIT and not config.RESUME else None      # checked before anything is overwritten
    os.makedirs(run, exist_ok=True)
    tokenizer, corpus = spans.prepare(run, given and given[0].tokenizer, keep=config.RESUME)
    if config.RESUME:
        encoder, head, optimizer, progress = load_state(state, tokenizer, corpus, device)
        if config.MAX_TOKENS <= progress["tokens"] and (not progress["history"] or progress["history"][-1]["tokens"] < progress["tokens"]):
            raise ValueError(f"{config.shown(run)} has read {progress['tokens']:,} tokens already, and MAX_TOKENS={config.MAX_TOKENS:,} asks for no more")
    else:
        encoder, head = (module.to(device) for module in given or new_encoder(tokenizer, corpus))
        optimizer = make_optimizer(encoder, head)
        progress = {"tokens": 0, "step": 0, "epoch": 0, "position": 0, "seconds": 0.0, "losses": [], "history": []}
        if os.path.exists(state):
            os.remove(state)
    print(f"{len(corpus['tokens']):,} tokens of text, {sum(p.numel() for p in encoder.parameters()):,} weights on {device}"
          f"{' in bfloat16' if computes_in_bf16(device) else ''}, into {config.shown(folder)}")
    if not train(encoder, head, optimizer, corpus, progress, run):
        raise KeyboardInterrupt

    save_encoder(folder, encoder, head)
    keep_metrics(folder, progress["history"])
    settings = {name: getattr(config, name) for name in [*RECIPE, "CLS_SIF", "MAX_TOKENS"]}
    if config.MLM_INIT:                                         # which brought its shape
        settings |= {name: encoder.shape[name.lower()] for name in ("N_LAYER", "N_EMBD", "N_HEAD", "VOCAB_SIZE")}
        settings["MLM_INIT"] = config.portable(config.MLM_INIT)
    checkpoint.write_json(os.path.join(folder, "pretraining.json"), {
        "settings": settings, **progress["history"][-1], "epochs": progress["epoch"],
        "corpus_sha256": str(corpus["made_of"]).split()[0]})
    print(f"the encoder is in {config.shown(folder)}; what it fills in, likeliest first:")
    for sentence, tokens in zip(EXAMPLES, fill_masks(encoder, head, EXAMPLES)):
        print(f"  {sentence:70} {' '.join(tokens)}")


if __name__ == "__main__":
    config.run(main, __file__)
