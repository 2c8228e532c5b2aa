"""What test_model.py leaves out of model.py: refusals, first weights, default shape, each residual branch's dropout."""

import math

import pytest
import torch
import torch.nn.functional as F

from model import Block, SelfAttention, SimCSEEncoder, alignment_and_uniformity, simcse_loss
from support.tokenizer import train_tokenizer
from tests.conftest import sample_sentences


def encoder_of_width(n_embd, n_head):
    torch.manual_seed(0)
    return SimCSEEncoder(train_tokenizer(sample_sentences(), 200), n_layer=1, n_embd=n_embd, n_head=n_head)


def test_loss_and_metrics_refuse_what_has_no_meaning():
    z = torch.randn(4, 8)
    for call, said in (
        (lambda: simcse_loss(z[:1], z[:1], 0.05), "at least two"),
        (lambda: simcse_loss(z, z[:3], 0.05), r"\(4, 8\) and \(3, 8\)"),
        (lambda: simcse_loss(z[0], z[0], 0.05), r"\(N, C\)"),
        (lambda: simcse_loss(z, z, 0), "temperature"),
        (lambda: simcse_loss(z, z, -0.05), "temperature"),
        (lambda: simcse_loss(z, z, math.nan), "temperature"),
        (lambda: alignment_and_uniformity(z, z[:3]), r"\(4, 8\) and \(3, 8\)"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_an_impossible_encoder_is_refused():
    tokenizer = train_tokenizer(sample_sentences(), 200)
    for options, said in (
        ({"n_embd": 32, "n_head": 5}, "width 32 .* 5"),
        ({"pooler": "max"}, 'unknown pooler \'max\': the poolers are "cls" and "mean"'),
        ({"dropout": 1.0}, "dropout rate .* not 1.0"),
        ({"dropout": -0.1}, "dropout rate .* not -0.1"),
    ):
        with pytest.raises(ValueError, match=said):
            SimCSEEncoder(tokenizer, **options)


def test_first_weights_suit_the_width():
    for n_embd in (64, 512):  # a signal keeps its size through a linear layer, at any width
        query = encoder_of_width(n_embd, n_head=4).blocks[0].attention.query
        assert 0.7 < F.linear(torch.randn(256, n_embd), query.weight).std() < 0.9


def test_the_default_shape_is_chapter_3s():
    shape = SimCSEEncoder(train_tokenizer(sample_sentences(), 100)).shape
    expected = {"n_layer": 6, "n_embd": 256, "n_head": 8, "n_inner": 1024, "n_positions": 128}
    assert shape | expected == shape


@pytest.mark.parametrize("silent", ["attention.output", "ffn_out"])
def test_dropout_acts_on_each_residual_branch(silent):
    """One module serves both branches of a block; with either branch silent, the other must still feel it."""
    torch.manual_seed(0)
    block = Block(32, 4, 64, dropout=0.0, eps=1e-12)
    states, mask = torch.randn(3, 5, 32), torch.ones(3, 1, 1, 5, dtype=torch.bool)
    torch.nn.init.zeros_(block.get_submodule(silent).weight)
    torch.nn.init.zeros_(block.get_submodule(silent).bias)
    without = block(states, states, mask)
    assert torch.equal(block(states, states, mask), without)
    block.dropout.p = 0.3
    assert not torch.allclose(block(states, states, mask), without, atol=1e-2)


def test_attention_drops_weights_not_states():
    """With attention's dropout alone, a token that looks at itself only sees 0 or 1 / (1 - p) times its value."""
    torch.manual_seed(0)
    attention = SelfAttention(8, 2, dropout=0.5)
    x, mask = torch.randn(64, 1, 8), torch.ones(64, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad():
        attention.output.weight.copy_(torch.eye(8))
        attention.output.bias.zero_()
    seen = attention(x, x, mask).view(64, 2, 4)  # a weight a head
    value = attention.value(x).view(64, 2, 4)
    dropped = (seen == 0).all(dim=-1)
    assert torch.allclose(seen[~dropped], 2 * value[~dropped], atol=1e-5)
    assert 32 < dropped.sum() < 96 and (dropped[:, 0] != dropped[:, 1]).any()
