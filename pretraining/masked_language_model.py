"""The masked-language model: scores for masked tokens, a task for [CLS], and what is measured and saved of both.

Papers: BERT (Devlin et al., 2018), section 3.1. Its task for [CLS], next-sentence prediction, gives way to one that
asks more: the words of the input, from [CLS] alone (Ma et al., 2024, "Drop your Decoder: Pre-training with Bag-of-
Word Prediction").
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import initialise
from pretraining.pretraining_batches import MASK
from support import checkpoint
from support.device import autocast
from support.dropout import Dropout


class MaskedLanguageHead(nn.Module):
    """From hidden states to scores for all tokens, through the token embedding. Source: BERT's code."""

    def __init__(self, encoder):
        super().__init__()
        vocab_size, n_embd = encoder.token_embedding.weight.shape
        self.dense = nn.Linear(n_embd, n_embd)
        self.norm = nn.LayerNorm(n_embd, encoder.shape["eps"])
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        initialise(self.dense)

    def forward(self, hidden, embedding):
        """hidden: (..., C); embedding: the encoder's token embedding (V, C). Returns (..., V)."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), embedding, self.bias)

    def weights(self):
        """The weights by the names of Hugging Face's BertForMaskedLM, whose decoder is its embedding."""
        return {
            "cls.predictions.bias": self.bias,
            "cls.predictions.transform.dense.weight": self.dense.weight,
            "cls.predictions.transform.dense.bias": self.dense.bias,
            "cls.predictions.transform.LayerNorm.weight": self.norm.weight,
            "cls.predictions.transform.LayerNorm.bias": self.norm.bias,
        }


def set_dropout(encoder, rate):
    """Set the rate of every dropout of the encoder."""
    for module in encoder.modules():
        if isinstance(module, Dropout):
            module.p = rate


def predict(encoder, head, masked, precision):
    """Scores for the masked tokens of a batch, and for all of its tokens from [CLS] alone.

    masked: what mask_tokens returns; precision: "float32" or "bfloat16". Returns float32 logits (B, M, V), the tokens
    that stood there (B, M), and float32 logits of [CLS] (B, V): between these and the embedding lies no layer, so
    that words are directions of the sentence embedding, where a cosine can see them.
    """
    embedding = encoder.token_embedding.weight  # (V, C)
    device = embedding.device
    idx, positions, targets = (torch.from_numpy(array).to(device) for array in masked)
    with autocast(device, precision):
        hidden = encoder(idx, torch.ones_like(idx))  # (B, T, C); a batch has one length, no [PAD]
        at_masks = torch.take_along_dim(hidden, positions[:, :, None], dim=1)  # (B, M, C)
        logits = head(at_masks, embedding)  # (B, M, V)
        cls_logits = F.linear(hidden[:, 0, :], embedding, head.bias)  # (B, V)
    return logits.float(), targets, cls_logits.float()


def bag_of_words_loss(logits, idx, weight):
    """Weighted mean -log p in nats of a span's tokens, in any order, under the one distribution of its [CLS].

    logits: (B, V); idx: (B, T), the tokens before masking, [CLS] first and [SEP] last; weight: (V,) above 0, what
    each token counts. Sources: Ma et al. (2024), section 3.2; for weights a / (a + frequency), Arora et al. (2017),
    section 3.
    """
    words = idx[:, 1:-1]  # (B, T - 2)
    # the best guess for any span is frequency x weight: the bias starts at log frequency, this adds log weight
    log_p = (logits + weight.log()).log_softmax(dim=1).gather(1, words)  # (B, T - 2)
    word_weight = weight[words]
    return -(word_weight * log_p).sum() / word_weight.sum()


@torch.no_grad()
def validate(encoder, head, masked_batches, precision):
    """Mean loss in nats, and accuracy from 0 to 1, over the masked tokens of batches; dropout off."""
    encoder.eval()
    loss = right = count = 0
    for masked in masked_batches:
        logits, targets, _ = predict(encoder, head, masked, precision)
        loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        right += (logits.argmax(dim=-1) == targets).sum().item()
        count += targets.numel()
    encoder.train()
    return loss / count, right / count


@torch.no_grad()
def fill_masks(encoder, head, sentences):
    """For each [MASK] of some sentences, the five likeliest tokens; a list of lists of strings."""
    encoder.eval()
    embedding = encoder.token_embedding.weight
    idx, attention_mask = (tensor.to(embedding.device) for tensor in encoder.tokenize(sentences))
    hidden = encoder(idx, attention_mask)  # (B, T, C)
    likeliest = head(hidden[idx == MASK], embedding).topk(5).indices  # (masks, 5)
    return [[encoder.tokenizer.id_to_token(i) for i in row] for row in likeliest.tolist()]


def save_pretrained(folder, encoder, head):
    """Write the encoder and its head in half precision: a BertForMaskedLM to Hugging Face, a start to SimCSE."""
    weights = {
        name: tensor.half()
        for name, tensor in encoder.state_dict().items()
        if not name.startswith("mlp_head.")
    }
    head_weights = {name: tensor.half() for name, tensor in head.weights().items()}
    checkpoint.save(folder, weights, encoder.shape, encoder.tokenizer, encoder.pooler, head=head_weights)
