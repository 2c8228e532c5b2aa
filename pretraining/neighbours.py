"""First values for attention: heads that look one and two tokens to either side. The derivation is in README.md."""

import math

import torch

N_BLOCKS = 2  # blocks, from the first on, that get such heads
OFFSETS = (-1, 1, -2, 2)  # where their first heads look, in tokens from the one that looks
AMPLITUDE = 0.1  # of the clock in the position embedding
TOKEN_SCALE = 0.02  # standard deviation of the token embedding, which the clock is added to
NOISE_LEFT = 0.1  # of the position embedding's random values
AIMED_SCORE = (
    4.0  # attention score, before the softmax, of the token that a head looks at; others get about 0
)


def rotation(angle):
    """The matrix (2H, 2H) that turns H hands, cosines first and then sines, on by an angle (H,) in radians."""
    cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())  # (H, H)
    return torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)])


@torch.no_grad()
def look_at_neighbours(encoder):
    """Start up to four heads of the first two blocks at looking one and two tokens to the left and to the right.

    A new BERT attends evenly to all tokens, sees a bag of words, and learns little more than their frequencies until
    it has found out where a neighbour is, which takes millions of tokens. Here it is told. Changes the encoder's
    segment and position embeddings and its query and key weights; all of them stay free to learn.
    """
    n_embd, n_head = encoder.shape["n_embd"], encoder.shape["n_head"]
    head_width = n_embd // n_head
    n_hands = head_width // 2
    if n_hands == 0:  # heads too narrow for a clock
        return
    speed = math.pi * (torch.arange(n_hands) + 0.5) / n_hands  # (n_hands,), radians a position
    angle = torch.arange(encoder.n_positions)[:, None] * speed  # (n_positions, n_hands)
    clock = torch.cat([angle.cos(), angle.sin()], dim=1)  # (n_positions, 2 n_hands)
    encoder.segment_embedding.weight.zero_()
    encoder.position_embedding.weight.mul_(NOISE_LEFT)
    encoder.position_embedding.weight[:, : 2 * n_hands] = AMPLITUDE * clock

    # the first LayerNorm divides by the size of an embedding, that of its token and its clock together
    embedding_scale = math.sqrt(TOKEN_SCALE**2 + AMPLITUDE**2 * n_hands / n_embd)
    amplitude = AMPLITUDE / embedding_scale
    weight_scale = math.sqrt(AIMED_SCORE * math.sqrt(head_width) / (amplitude**2 * n_hands))
    for block in encoder.blocks[:N_BLOCKS]:
        query, key = block.attention.query.weight, block.attention.key.weight  # (n_embd, n_embd)
        for head, offset in enumerate(OFFSETS[:n_head]):
            rows = slice(head * head_width, (head + 1) * head_width)
            query[rows] = 0
            key[rows] = 0
            query[rows][: 2 * n_hands, : 2 * n_hands] = weight_scale * rotation(speed * offset)
            key[rows][: 2 * n_hands, : 2 * n_hands] = weight_scale * rotation(speed * 0)
