"""One training of the ablations: train.py, with all that their tables tell measured at every score.

python -m experiments.run_variant NAME=value ... takes the knobs of train.py, and HEAD_AT_EVALUATION.
"""

import re
import shutil
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

import config as root_config
import train
from evaluate import encode_sentences, evaluate_stsb, load_sts_b
from experiments import config
from model import SimCSEEncoder, alignment_and_uniformity, simcse_loss
from support import command_line
from support.device import autocast, pick_precision, random_source

KNOBS = [*train.KNOBS, "HEAD_AT_EVALUATION"]


class ProjectingEncoder(SimCSEEncoder):
    """An encoder that leaves its MLP head on wherever it encodes."""

    def encode(self, idx, attention_mask, project=True):
        return super().encode(idx, attention_mask, project=True)


def with_head(encoder):
    """A copy of an encoder that leaves its head on."""
    with torch.random.fork_rng(devices=[]):  # to make it draws weights, which the run must not notice
        copy = ProjectingEncoder(
            encoder.tokenizer, **encoder.shape, pooler=encoder.pooler, max_seq_len=encoder.max_seq_len
        )
    copy.load_state_dict(encoder.state_dict())
    return copy.to(encoder.token_embedding.weight.device)


def word_count(sentence):
    """How many words a sentence has."""
    return len(re.findall(r"\w+", sentence))


def measure_sts_b(encoder):
    """Scores on STS-B dev, a dict of floats: those of evaluate.measure; length, Spearman x 100 of the cosine of a pair
    with the difference of its lengths in words; and test, the score on the test pairs.
    """
    sentences1, sentences2, scores = load_sts_b("validation")
    emb1, emb2 = encode_sentences(encoder, sentences1), encode_sentences(encoder, sentences2)
    z1, z2, close = torch.from_numpy(emb1), torch.from_numpy(emb2), torch.from_numpy(scores > 4)
    alignment, _ = alignment_and_uniformity(z1[close], z2[close])
    _, uniformity = alignment_and_uniformity(z1, z2)
    pairs = zip(sentences1, sentences2, strict=True)
    difference = np.array([abs(word_count(one) - word_count(other)) for one, other in pairs])
    length = spearmanr(F.cosine_similarity(z1, z2).numpy(), difference).statistic
    return {
        "spearman": evaluate_stsb(encoder, "validation", embeddings=(emb1, emb2)),
        "alignment": alignment,
        "uniformity": uniformity,
        "length": float(length) * 100,
        "test": evaluate_stsb(encoder, "test"),
    }


@torch.no_grad()
def measure_views(encoder, sentences):
    """Loss and alignment of the two views of sentences, computed as in training, the mean over whole batches of them.

    The dropout masks are the same at every call, and those that the run will draw next are left as they were.
    Returns a dict of two floats: views_loss, in nats, and views_alignment.
    """
    device, was_training = encoder.token_embedding.weight.device, encoder.training
    precision = pick_precision(root_config.PRECISION, device)
    idx, attention_mask = encoder.tokenize(sentences, root_config.MAX_SEQ_LEN)  # (N, T), (N, T)
    whole = len(idx) // root_config.BATCH_SIZE * root_config.BATCH_SIZE
    rows = torch.arange(whole).view(-1, root_config.BATCH_SIZE)
    losses, alignments = [], []
    source = random_source(device)
    state = source.get_rng_state()
    source.manual_seed(0)
    encoder.train()
    for batch in rows:
        idx_b, mask_b = idx[batch].to(device), attention_mask[batch].to(device)  # (B, T), (B, T)
        with autocast(device, precision):
            masks = source.get_rng_state()
            z1 = encoder.encode(idx_b, mask_b, project=root_config.USE_MLP_HEAD)  # (B, C)
            if root_config.FIXED_MASK:
                source.set_rng_state(masks)
            z2 = encoder.encode(idx_b, mask_b, project=root_config.USE_MLP_HEAD)  # (B, C)
        z1, z2 = z1.float(), z2.float()
        losses.append(simcse_loss(z1, z2, root_config.TEMPERATURE).item())
        alignment, _ = alignment_and_uniformity(z1.cpu(), z2.cpu())  # Apple's GPU has no pdist
        alignments.append(alignment)
    encoder.train(was_training)
    source.set_rng_state(state)
    return {"views_loss": statistics.mean(losses), "views_alignment": statistics.mean(alignments)}


def remove_run(folder):
    """Remove a run folder, and beside it the file of its lock and what it was to replace."""
    for path in [folder, *folder.parent.glob(f".{folder.name}.*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main():
    sentences = train.load_sentences()[: 4 * root_config.BATCH_SIZE]

    def score(encoder):
        evaluated = with_head(encoder) if config.HEAD_AT_EVALUATION else encoder
        return measure_sts_b(evaluated) | measure_views(encoder, sentences)

    train.main(score)


if __name__ == "__main__":
    command_line.run(main, "-m experiments.run_variant", [root_config, config], KNOBS)
