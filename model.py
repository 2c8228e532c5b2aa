"""The encoder and the objective of unsupervised SimCSE: BERT, pooling, MLP head, equation 4, alignment and uniformity.

Papers: SimCSE (Gao et al., 2021), BERT (Devlin et al., 2018), alignment and uniformity (Wang & Isola, 2020).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from support import checkpoint, hub
from support.dropout import Dropout  # nn.Dropout with cheaper random numbers on a CPU
from support.tokenizer import load_tokenizer


def simcse_loss(z1, z2, temperature):
    """Contrastive loss of a batch of positive pairs with in-batch negatives.

    z1, z2: (N, C) floats, the two embeddings of N >= 2 sentences. Returns a scalar tensor in nats, log N at chance.
    Raises ValueError for fewer than two sentences, unequal shapes, or a temperature that is not above 0.
    Source: SimCSE, equation 4, which goes from view 1 to view 2; the other direction is the chapter's.
    """
    if z1.shape != z2.shape or z1.dim() != 2:
        raise ValueError(f"the two views must both be (N, C), not {tuple(z1.shape)} and {tuple(z2.shape)}")
    if len(z1) < 2:
        raise ValueError("a batch of one sentence has no negatives: the loss needs at least two")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature!r}")
    z1 = F.normalize(z1, dim=-1)  # of length 1, so that a dot product is a cosine
    z2 = F.normalize(z2, dim=-1)
    sim_12 = z1 @ z2.T / temperature  # (N, N): view 1 of sentence i against view 2 of every j
    sim_21 = z2 @ z1.T / temperature
    labels = torch.arange(len(z1), device=z1.device)  # the positive of row i is column i
    # cross_entropy is -log softmax of each row at its positive, the l_i of equation 4, averaged over the batch
    loss_12 = F.cross_entropy(sim_12, labels)
    loss_21 = F.cross_entropy(sim_21, labels)
    return (loss_12 + loss_21) / 2


def alignment_and_uniformity(z1, z2, t=2.0):
    """How close positive pairs are, and how evenly all embeddings cover the sphere. Both: lower is better.

    z1, z2: (N, C) floats, N >= 1 positive pairs. Returns two floats: alignment, E|x - y|^2 in [0, 4] over the pairs,
    and uniformity, log E exp(-t |x - y|^2) in [-4t, 0] over all pairs of the 2N embeddings (0: all are one point).
    Raises ValueError for unequal shapes.
    Source: Wang & Isola (2020), section 4.1, with alpha = 2; SimCSE, equations 2 and 3.
    """
    if z1.shape != z2.shape:
        raise ValueError(f"the two sides must have one shape, not {tuple(z1.shape)} and {tuple(z2.shape)}")
    z1 = F.normalize(z1, dim=-1)
    z2 = F.normalize(z2, dim=-1)
    alignment = (z1 - z2).square().sum(dim=-1).mean()
    distances = torch.pdist(torch.cat([z1, z2]))  # (2N (2N - 1) / 2)
    uniformity = distances.square().mul(-t).exp().mean().log()
    return alignment.item(), uniformity.item()


class SelfAttention(nn.Module):
    """Bidirectional multi-head attention. Source: BERT, section 3."""

    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_embd, n_embd)
        self.key = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.output = nn.Linear(n_embd, n_embd)
        self.dropout = Dropout(dropout)

    def forward(self, x, context, mask):
        """x: (B, R, C), the tokens that look; context: (B, T, C), at these; mask: (B, 1, 1, T), False at [PAD]."""

        def split_heads(states):  # (B, T, C) -> (B, n_head, T, C / n_head)
            return states.view(*states.shape[:2], self.n_head, -1).transpose(1, 2)

        q = split_heads(self.query(x))
        k = split_heads(self.key(context))
        v = split_heads(self.value(context))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5  # (B, n_head, R, T)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)  # [PAD] gets no weight
        y = self.dropout(weights) @ v  # (B, n_head, R, C / n_head)
        return self.output(y.transpose(1, 2).reshape(x.shape))  # (B, R, C)


class Block(nn.Module):
    """One Transformer block, with LayerNorm after each residual sum. Source: BERT, section 3."""

    def __init__(self, n_embd, n_head, n_inner, dropout, eps):
        super().__init__()
        self.attention = SelfAttention(n_embd, n_head, dropout)
        self.attention_norm = nn.LayerNorm(n_embd, eps)
        self.ffn_in = nn.Linear(n_embd, n_inner)
        self.ffn_out = nn.Linear(n_inner, n_embd)
        self.ffn_norm = nn.LayerNorm(n_embd, eps)
        self.dropout = Dropout(dropout)

    def forward(self, x, context, mask):
        """x: (B, R, C), the tokens whose next states are wanted; context: (B, T, C), all of them. Returns (B, R, C)."""
        x = self.attention_norm(x + self.dropout(self.attention(x, context, mask)))
        return self.ffn_norm(x + self.dropout(self.ffn_out(F.gelu(self.ffn_in(x)))))


class MLPHead(nn.Module):
    """The projection that the loss sees in training and evaluation never does. Source: SimCSE, section 6.3, table 6."""

    def __init__(self, n_embd):
        super().__init__()
        self.dense = nn.Linear(n_embd, n_embd)
        self.activation = nn.Tanh()

    def forward(self, embedding):
        """embedding: (B, C). Returns (B, C) in (-1, 1)."""
        return self.activation(self.dense(embedding))


class SimCSEEncoder(nn.Module):
    """A BERT of any shape that turns sentences into vectors; its tokenizer belongs to it.

    pooler: "cls", the hidden state of [CLS], or "mean", the average over the real tokens.
    max_seq_len: tokens at which a sentence is cut outside training, by default all positions.
    Raises ValueError for another pooler, or a width that the heads do not divide.
    """

    def __init__(self, tokenizer, n_layer=6, n_embd=256, n_head=8, n_inner=None, n_positions=128, vocab_size=None,
                 n_segments=2, dropout=0.1, pooler="cls", eps=1e-12, max_seq_len=None):  # fmt: skip
        super().__init__()
        if pooler not in ("cls", "mean"):
            raise ValueError(f'unknown pooler {pooler!r}: the poolers are "cls" and "mean"')
        if n_embd % n_head:
            raise ValueError(f"the width {n_embd} is not divisible by the number of heads {n_head}")
        n_inner = n_inner or 4 * n_embd
        vocab_size = vocab_size or tokenizer.get_vocab_size()
        self.shape = dict(
            n_layer=n_layer, n_embd=n_embd, n_head=n_head, n_inner=n_inner, n_positions=n_positions,
            vocab_size=vocab_size, n_segments=n_segments, dropout=dropout, eps=eps,
        )  # fmt: skip
        self.tokenizer = tokenizer
        self.pooler = pooler
        self.n_positions = n_positions
        self.max_seq_len = max_seq_len or n_positions
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding(n_positions, n_embd)
        self.segment_embedding = nn.Embedding(n_segments, n_embd)
        self.embedding_norm = nn.LayerNorm(n_embd, eps)
        self.embedding_dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, n_inner, dropout, eps) for _ in range(n_layer))
        self.mlp_head = MLPHead(n_embd)
        self.apply(initialise)

    def forward(self, idx, attention_mask, cls_only=False):
        """Hidden states of the last block. idx: (B, T) token ids; attention_mask: (B, T), 0 at [PAD].

        Returns (B, T, C); with cls_only (B, 1, C), that of [CLS], which spares the last block the other tokens.
        Raises ValueError for more tokens than positions.
        """
        T = idx.shape[1]
        if T > self.n_positions:
            raise ValueError(
                f"an input of {T} tokens is longer than the encoder's {self.n_positions} positions"
            )
        mask = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, T), the same for every head and query
        x = self.token_embedding(idx) + self.position_embedding.weight[:T] + self.segment_embedding.weight[0]
        x = self.embedding_dropout(self.embedding_norm(x))  # (B, T, C)
        for block in self.blocks[:-1]:
            x = block(x, x, mask)
        return self.blocks[-1](x[:, :1] if cls_only else x, x, mask)

    def encode(self, idx, attention_mask, project=False):
        """Sentence embeddings (B, C). idx, attention_mask: (B, T); project: through the MLP head, in training only."""
        if self.pooler == "cls":
            hidden = self(idx, attention_mask, cls_only=True)  # (B, 1, C)
            embedding = hidden[:, 0, :]
        else:
            hidden = self(idx, attention_mask)  # (B, T, C)
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)  # (B, T, 1)
            embedding = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        if project:
            embedding = self.mlp_head(embedding)
        return embedding

    def tokenize(self, sentences, max_seq_len=None):
        """Token ids with [CLS] and [SEP], cut to max_seq_len tokens (default: self.max_seq_len), padded to the longest.

        Returns idx (N, T) int64 and attention_mask (N, T) bool. Raises ValueError for more tokens than positions.
        """
        max_seq_len = max_seq_len or self.max_seq_len
        if max_seq_len > self.n_positions:
            raise ValueError(
                f"MAX_SEQ_LEN={max_seq_len} is more than the encoder's {self.n_positions} positions"
            )
        self.tokenizer.enable_truncation(max_seq_len)
        self.tokenizer.enable_padding(pad_id=self.tokenizer.token_to_id("[PAD]") or 0)
        encodings = self.tokenizer.encode_batch(list(sentences))
        idx = torch.tensor([encoding.ids for encoding in encodings])
        attention_mask = torch.tensor([encoding.attention_mask for encoding in encodings]).bool()
        return idx, attention_mask

    def save_pretrained(self, folder):
        """Write a checkpoint folder in the Hugging Face BERT layout; the MLP head is left out.

        Raises OSError; a save that fails leaves the checkpoint that was there.
        """
        weights = {
            name: tensor for name, tensor in self.state_dict().items() if not name.startswith("mlp_head.")
        }
        checkpoint.save(folder, weights, self.shape, self.tokenizer, self.pooler, self.max_seq_len)

    @classmethod
    def from_pretrained(cls, folder_or_hub_name, pooler=None, dropout=None):
        """Load a BERT checkpoint from a folder in the Hugging Face layout, or from the Hub by its name.

        pooler, dropout: None takes the checkpoint's own (cls and 0.1 where it names none). The weights become float32,
        the MLP head is new. Raises OSError or ValueError, in one line, for anything that can't be had or doesn't fit.
        """
        folder = hub.find(folder_or_hub_name)
        shape = checkpoint.load_shape(folder)
        if dropout is not None:
            shape["dropout"] = dropout
        tokenizer = load_tokenizer(folder, shape["vocab_size"])
        max_seq_len = checkpoint.load_max_seq_len(folder, shape["n_positions"])
        encoder = cls(
            tokenizer,
            **shape,
            pooler=checkpoint.load_pooler(folder, pooler),
            max_seq_len=max_seq_len,
        )
        state = encoder.state_dict()
        shapes = {name: state[name].shape for name in state if not name.startswith("mlp_head.")}
        encoder.load_state_dict(checkpoint.load_weights(folder, shapes), strict=False)  # the head stays new
        return encoder


def initialise(module):
    """First weights. BERT's 0.02 suits its width; ours, 0.8 / sqrt(inputs), keeps a signal's size at any width."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.8 * module.in_features**-0.5)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(
        module, Block
    ):  # visited after its layers: half of that where a layer adds to the residual
        for layer in (module.attention.output, module.ffn_out):
            nn.init.normal_(layer.weight, std=0.4 * layer.in_features**-0.5)
