"""The encoder and the objective of unsupervised SimCSE: BERT -> pooling -> MLP head, equation 4, and the two metrics.

Papers: SimCSE (Gao et al., 2021), BERT (Devlin et al., 2018), alignment and uniformity (Wang & Isola, 2020).
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint


# ---------------------------------------------------------------------------- the objective

def simcse_loss(z1, z2, temperature):
    """Contrastive loss over a batch of positive pairs with in-batch negatives, averaged over both directions.

    z1, z2: (N, C) floats, the two views of N >= 2 sentences. Returns a scalar tensor in nats, log N at chance.
    Raises ValueError for fewer than two sentences, unequal shapes, or a temperature that is not positive.
    Source: SimCSE, equation 4, which goes from view 1 to view 2; the other direction is the chapter's.
    """
    if z1.shape != z2.shape or z1.dim() != 2:
        raise ValueError(f"the two views must both be (N, C), not {tuple(z1.shape)} and {tuple(z2.shape)}")
    if len(z1) < 2:
        raise ValueError("a batch of one sentence has no negatives: the loss needs at least two")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature!r}")
    h1, h2 = F.normalize(z1, dim=-1), F.normalize(z2, dim=-1)
    similarity = h1 @ h2.T / temperature                            # (N, N), row i: view 1 of i against view 2 of all j
    positive = torch.arange(len(z1), device=z1.device)              # the positives lie on the diagonal
    # cross_entropy is -log softmax of each row at its positive, l_i of equation 4, averaged over the batch
    return (F.cross_entropy(similarity, positive) + F.cross_entropy(similarity.T, positive)) / 2


def alignment_and_uniformity(z1, z2, t=2.0):
    """How close positive pairs are, and how evenly all embeddings cover the sphere. Both: lower is better.

    z1, z2: (N, C) floats, N positive pairs, N >= 1. Returns two floats: alignment E|x - y|^2 in [0, 4] over the pairs,
    uniformity log E exp(-t |x - y|^2) in [-4t, 0] over all pairs of the 2N embeddings (0: all are the same point).
    Raises ValueError for unequal shapes.
    Source: Wang & Isola (2020), section 4.1, with alpha = 2; SimCSE, equations 2 and 3.
    """
    if z1.shape != z2.shape:
        raise ValueError(f"the two sides of the pairs must have one shape, not {tuple(z1.shape)} and {tuple(z2.shape)}")
    h1, h2 = F.normalize(z1, dim=-1), F.normalize(z2, dim=-1)
    alignment = (h1 - h2).square().sum(-1).mean()
    uniformity = torch.pdist(torch.cat([h1, h2])).square().mul(-t).exp().mean().log()
    return alignment.item(), uniformity.item()


# ---------------------------------------------------------------------------- the encoder

def dropout(x, rate):
    """Set each element to 0 with probability `rate` in [0, 1), and scale the others up so that the mean stays. Any shape.

    F.dropout on the CPU draws one random number per element, serially: a fifth of a training step. Here one 64-bit draw serves
    eight elements, a byte each, so the rate is rounded to a multiple of 1/256 (0.1 to 26/256), and the scale is 1 / (1 - that).
    """
    if rate == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, rate)
    dropped = min(max(1, round(256 * rate)), 255)                                       # of the 256 values of a byte
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-2**63, None)   # None: to the largest
    kept = (bits.view(torch.uint8)[:x.numel()] >= dropped).view(x.shape)
    return x * kept.to(x.dtype).mul_(256 / (256 - dropped))


class SelfAttention(nn.Module):
    """Bidirectional multi-head attention over the real tokens. Source: BERT, section 3."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_embd, n_embd)
        self.key = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.output = nn.Linear(n_embd, n_embd)

    def forward(self, x, rows, mask, rate):
        """x: (B, T, C); rows: (B, R, C), the rows of x that ask; mask: (B, 1, 1, T), False at [PAD]. Returns (B, R, C)."""
        def heads(states):
            return states.view(*states.shape[:2], self.n_head, -1).transpose(1, 2)     # (B, T, C) -> (B, n_head, T, C / n_head)

        q, k, v = heads(self.query(rows)), heads(self.key(x)), heads(self.value(x))
        # softmax(q k^T / sqrt(C / n_head)) v, with dropout on the softmax and no weight on [PAD]
        if x.device.type == "cpu":          # written out: for our dropout, and as fast or faster up to 64 tokens
            scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5                       # (B, n_head, R, T)
            scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
            y = dropout(scores.softmax(-1), rate) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate)
        return self.output(y.transpose(1, 2).reshape(rows.shape))


class Block(nn.Module):
    """One Transformer block with LayerNorm after each residual sum. Source: BERT, section 3."""

    def __init__(self, n_embd, n_head, n_inner, eps):
        super().__init__()
        self.attention = SelfAttention(n_embd, n_head)
        self.attention_norm = nn.LayerNorm(n_embd, eps)
        self.ffn_in = nn.Linear(n_embd, n_inner)
        self.ffn_out = nn.Linear(n_inner, n_embd)
        self.ffn_norm = nn.LayerNorm(n_embd, eps)

    def forward(self, x, rows, mask, rate):
        """x: (B, T, C); rows: (B, R, C), those of x whose new states are wanted, x itself for all. Returns (B, R, C)."""
        x = self.attention_norm(rows + dropout(self.attention(x, rows, mask, rate), rate))
        return self.ffn_norm(x + dropout(self.ffn_out(F.gelu(self.ffn_in(x))), rate))


class MLPHead(nn.Module):
    """The projection that the loss sees in training and evaluation never does. Source: SimCSE, section 6.3, table 6."""

    def __init__(self, n_embd):
        super().__init__()
        self.dense = nn.Linear(n_embd, n_embd)

    def forward(self, embedding):
        return torch.tanh(self.dense(embedding))


class SimCSEEncoder(nn.Module):
    """A BERT of any shape that turns sentences into vectors; its tokenizer belongs to it.

    pooler: "cls", the hidden state of [CLS], or "mean", the average over the real tokens; anything else is a ValueError.
    """

    def __init__(self, tokenizer, n_layer=6, n_embd=256, n_head=8, n_inner=None, n_positions=128, vocab_size=None,
                 n_segments=2, dropout=0.1, pooler="cls", eps=1e-12):
        super().__init__()
        if pooler not in ("cls", "mean"):
            raise ValueError(f'unknown pooler {pooler!r}: the poolers are "cls" and "mean"')
        if n_embd % n_head:
            raise ValueError(f"the width {n_embd} is not divisible by the number of heads {n_head}")
        n_inner, vocab_size = n_inner or 4 * n_embd, vocab_size or tokenizer.get_vocab_size()
        self.shape = dict(n_layer=n_layer, n_embd=n_embd, n_head=n_head, n_inner=n_inner, n_positions=n_positions,
                          vocab_size=vocab_size, n_segments=n_segments, dropout=dropout, eps=eps)
        self.tokenizer, self.pooler, self.n_positions, self.dropout = tokenizer, pooler, n_positions, dropout
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding(n_positions, n_embd)
        self.segment_embedding = nn.Embedding(n_segments, n_embd)
        self.embedding_norm = nn.LayerNorm(n_embd, eps)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, n_inner, eps) for _ in range(n_layer))
        self.mlp_head = MLPHead(n_embd)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module):
        # BERT's 0.02 for every weight is 0.55 / sqrt(768): what keeps a signal's size through a layer depends on the width.
        # Our choice, which is not the paper's: 0.8 / sqrt(inputs), and half of that where a layer writes into the residual
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.8 * module.in_features ** -0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Block):             # visited after its layers
            for layer in (module.attention.output, module.ffn_out):
                nn.init.normal_(layer.weight, std=0.4 * layer.in_features ** -0.5)

    def forward(self, idx, attention_mask, wanted=None):
        """Hidden states of the last block. idx: (B, T) token ids; attention_mask: (B, T), 0 at [PAD], or None where there is
        no [PAD]; wanted: (B, R), the positions to compute the last block for, or None for all. Returns (B, R or T, C)."""
        T = idx.shape[1]
        if T > self.n_positions:
            raise ValueError(f"an input of {T} tokens is longer than the encoder's {self.n_positions} positions")
        # (B, 1, 1, T), the same for every head and query; none where no position is [PAD]
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.token_embedding(idx) + self.position_embedding.weight[:T] + self.segment_embedding.weight[0]
        rate = self.dropout if self.training else 0.0
        x = dropout(self.embedding_norm(x), rate)
        for block in self.blocks[:-1]:
            x = block(x, x, mask, rate)
        rows = x if wanted is None else x.gather(1, wanted[:, :, None].expand(-1, -1, x.shape[2]))      # (B, R, C)
        return self.blocks[-1](x, rows, mask, rate)

    def encode(self, idx, attention_mask, project=False):
        """Sentence embeddings. idx, attention_mask: (B, T); project: through the MLP head (training only). Returns (B, C)."""
        if self.pooler == "cls":
            first = torch.zeros_like(idx[:, :1])                    # the last block is computed for [CLS] alone
            embedding = self(idx, attention_mask, first)[:, 0]      # (B, 1, C) -> (B, C)
        else:
            hidden = self(idx, attention_mask)                      # (B, T, C)
            mask = torch.ones_like(idx) if attention_mask is None else attention_mask
            mask = mask.unsqueeze(-1).to(hidden.dtype)              # (B, T, 1)
            embedding = (hidden * mask).sum(1) / mask.sum(1)
        return self.mlp_head(embedding) if project else embedding

    def tokenize(self, sentences, max_seq_len=None):
        """Token ids with [CLS] and [SEP], cut to max_seq_len tokens (default: all positions) and padded to the longest.

        Returns idx (N, T) int64 and attention_mask (N, T) bool. Raises ValueError where max_seq_len exceeds the positions.
        """
        limit = max_seq_len or self.n_positions
        if limit > self.n_positions:
            raise ValueError(f"MAX_SEQ_LEN={limit} is more than the encoder's {self.n_positions} positions")
        rows = []
        for start in range(0, len(sentences), 10_000):              # in pieces: the tokenizer's own objects are large
            for encoding in self.tokenizer.encode_batch(list(sentences[start:start + 10_000])):
                ids = encoding.ids
                rows.append(torch.tensor(ids if len(ids) <= limit else ids[:limit - 1] + ids[-1:]))     # [SEP] stays
        idx = torch.full((len(rows), max(map(len, rows), default=0)), self.tokenizer.token_to_id("[PAD]") or 0)
        attention_mask = torch.zeros_like(idx, dtype=torch.bool)
        for i, row in enumerate(rows):
            idx[i, :len(row)], attention_mask[i, :len(row)] = row, True
        return idx, attention_mask

    def save_pretrained(self, folder):
        """Write a checkpoint folder in the Hugging Face BERT layout; the MLP head is left out.

        A save that fails leaves the checkpoint that was there.
        """
        weights = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("mlp_head.")}
        checkpoint.save(folder, weights, self.shape, self.tokenizer, self.pooler)

    @classmethod
    def from_pretrained(cls, folder_or_hub_name, pooler=None, dropout=None):
        """Load a BERT checkpoint from a folder in the Hugging Face layout, or from the Hub by its name.

        pooler, dropout: None takes the checkpoint's own (cls and 0.1 where it names none). The weights become float32,
        the MLP head is new. Raises OSError or ValueError, in one line, for anything that can't be had or doesn't fit.
        """
        folder = checkpoint.find(folder_or_hub_name)
        shape = checkpoint.load_shape(folder)
        if dropout is not None:
            shape["dropout"] = dropout
        encoder = cls(checkpoint.load_tokenizer(folder, shape["vocab_size"]), **shape,
                      pooler=pooler or checkpoint.load_pooler(folder))
        weights = checkpoint.load_weights(folder, {name: tensor.shape for name, tensor in encoder.state_dict().items()
                                                   if not name.startswith("mlp_head.")})
        encoder.load_state_dict(weights, strict=False)              # not strict: the head has no weights there
        return encoder
