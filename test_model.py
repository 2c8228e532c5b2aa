"""The mechanics of SimCSE, checked in seconds: python test_model.py, or pytest. The chapter's checks come first."""

import math
import tempfile

import torch
import torch.nn.functional as F

from model import MLPHead, SelfAttention, SimCSEEncoder, alignment_and_uniformity, simcse_loss
from support.device import autocast
from support.dropout import Dropout
from support.tokenizer import train_tokenizer

CPU = torch.device("cpu")
FORMATS = {"float32": 1e-5, "bfloat16": 0.05}  # of the products, and what it may change in numbers around 1
SENTENCES = [
    "A man is playing a guitar.",
    "The stock market fell sharply on Monday after the bank raised its rates.",
    "How do I remove rust?",
    "Two dogs run through the snow in a park near the old river.",
    "Yes.",
]


def tiny_encoder(**options):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64} | options
    return SimCSEEncoder(train_tokenizer(SENTENCES, 200), **shape)


def refuses(function, *words):
    """Whether the call raises a ValueError whose text holds all the words."""
    try:
        function()
    except ValueError as error:
        return all(word in str(error) for word in words)
    return False


# ---- what the chapter checks


def test_two_passes_differ_only_under_dropout():
    encoder = tiny_encoder(dropout=0.1)
    batch = encoder.tokenize(SENTENCES)
    for precision, tolerance in FORMATS.items():
        with autocast(CPU, precision):
            encoder.train()
            assert not torch.allclose(encoder.encode(*batch), encoder.encode(*batch), atol=tolerance)
            encoder.eval()
            assert torch.equal(encoder.encode(*batch), encoder.encode(*batch))
            without = tiny_encoder(dropout=0.0).train()
            assert torch.equal(without.encode(*batch), without.encode(*batch))


def test_aligned_pairs_lose_less_than_misaligned_ones():
    torch.manual_seed(0)
    z = torch.randn(16, 32)
    near = z + 0.1 * torch.randn(16, 32)
    assert simcse_loss(z, near, 0.05) < 0.01 < math.log(16) < simcse_loss(z, near.roll(1, 0), 0.05)


def test_gradients_reach_encoder_and_head():
    for precision in FORMATS:
        encoder = tiny_encoder().train()
        batch = encoder.tokenize(SENTENCES)
        with autocast(CPU, precision):
            z1, z2 = encoder.encode(*batch, project=True), encoder.encode(*batch, project=True)
        simcse_loss(z1.float(), z2.float(), 0.05).backward()
        for name, parameter in encoder.named_parameters():
            if not name.endswith(
                "key.bias"
            ):  # adds the same to every score of a query: softmax does not see it
                assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


# ---- the objective


def test_loss_is_equation_4():
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 7, 5, dtype=torch.float64)
    for temperature in (0.05, 0.7):
        total = 0.0
        for a, b in ((z1, z2), (z2, z1)):  # both directions
            for i in range(7):
                cosines = [a[i].dot(b[j]).item() / (a[i].norm() * b[j].norm()).item() for j in range(7)]
                exponentials = [math.exp(cosine / temperature) for cosine in cosines]
                total -= math.log(exponentials[i] / sum(exponentials))
        assert abs(simcse_loss(z1, z2, temperature).item() - total / 14) < 1e-10


def test_loss_gradient():
    torch.manual_seed(0)
    z1, z2 = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: simcse_loss(a, b, 0.5), (z1, z2))


def test_loss_at_chance_is_log_n():
    z = torch.ones(8, 16, dtype=torch.float64)  # all embeddings are one point
    assert abs(simcse_loss(z, z, 0.05).item() - math.log(8)) < 1e-12
    # identical views of different sentences, as without dropout, are not at chance: their negatives still count
    torch.manual_seed(0)
    z = torch.randn(8, 64)
    assert simcse_loss(z, z, 0.05) < 0.01


def test_alignment_and_uniformity():
    # the definitions, pair by pair (Wang & Isola, section 4.1)
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 6, 5, dtype=torch.float64)
    points = [z / z.norm() for z in torch.cat([z1, z2])]
    distances = [[((p - q) ** 2).sum().item() for q in points] for p in points]
    pairs = [math.exp(-2 * distances[i][j]) for i in range(12) for j in range(i)]
    alignment, uniformity = alignment_and_uniformity(z1, z2)
    assert abs(alignment - sum(distances[i][i + 6] for i in range(6)) / 6) < 1e-12
    assert abs(uniformity - math.log(sum(pairs) / len(pairs))) < 1e-12
    # what they mean: one point for all is perfectly aligned and not uniform at all, opposite points the reverse
    same, axes = torch.ones(6, 5), torch.eye(6)
    assert alignment_and_uniformity(same, same) == (0.0, 0.0)
    alignment, uniformity_of_axes = alignment_and_uniformity(axes, -axes)
    assert alignment == 4.0 and uniformity_of_axes < uniformity < 0


# ---- dropout, the augmentation


def test_dropout_acts_at_every_place_of_the_paper():
    encoder = tiny_encoder(dropout=0.3).train()
    batch = encoder.tokenize(SENTENCES)
    places = {name: module for name, module in encoder.named_modules() if isinstance(module, Dropout)}
    in_block = ["attention.dropout", "dropout"]  # on the attention weights, and on both residual branches
    assert list(places) == ["embedding_dropout"] + [f"blocks.{n}.{name}" for n in (0, 1) for name in in_block]
    assert all(module.p == 0.3 for module in places.values())
    for module in places.values():
        module.p = 0.0
    without = encoder(*batch)
    for name, module in places.items():  # each alone changes what comes out
        module.p = 0.3
        assert not torch.allclose(encoder(*batch), without, atol=1e-2), name
        module.p = 0.0


def test_every_row_draws_its_own_mask():
    encoder = tiny_encoder(dropout=0.1)
    batch = encoder.tokenize([SENTENCES[0]] * 2)
    for precision, tolerance in FORMATS.items():
        with autocast(CPU, precision):
            first, second = encoder.train().encode(*batch)
            assert not torch.allclose(first, second, atol=tolerance)
            first, second = encoder.eval().encode(*batch)
            assert torch.allclose(first, second, atol=tolerance)


# ---- the encoder


def test_attention_is_pytorchs():
    torch.manual_seed(0)
    attention, x = SelfAttention(32, 4, dropout=0.1).eval(), torch.randn(3, 9, 32)
    mask = (torch.arange(9) < torch.tensor([[9], [5], [1]]))[:, None, None, :]
    for precision, tolerance in FORMATS.items():
        with autocast(CPU, precision):
            layers = (attention.query, attention.key, attention.value)
            q, k, v = (layer(x).view(3, 9, 4, 8).transpose(1, 2) for layer in layers)
            y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(3, 9, 32)
            assert torch.allclose(attention(x, x, mask), attention.output(y), atol=tolerance)


def test_pooling_is_over_real_tokens_and_padding_changes_nothing():
    encoder = tiny_encoder().eval()
    idx, attention_mask = encoder.tokenize(SENTENCES)
    for precision, tolerance in FORMATS.items():
        with autocast(CPU, precision):
            hidden = encoder(
                idx, attention_mask
            )  # the last block for all tokens; for "cls", encode asks for one
            assert torch.allclose(encoder(idx, attention_mask, cls_only=True), hidden[:, :1], atol=tolerance)
            for encoder.pooler in ("cls", "mean"):
                embeddings = encoder.encode(idx, attention_mask)
                for row, sentence in enumerate(SENTENCES):
                    n = int(attention_mask[row].sum())
                    expected = hidden[row, 0] if encoder.pooler == "cls" else hidden[row, :n].mean(dim=0)
                    assert torch.allclose(embeddings[row], expected, atol=tolerance)
                    alone = encoder.encode(*encoder.tokenize([sentence]))[0]
                    assert torch.allclose(embeddings[row], alone, atol=tolerance)
    assert refuses(lambda: tiny_encoder(pooler="max"), "max", "cls", "mean")


def test_head_is_one_tanh_layer_and_only_on_request():
    encoder = tiny_encoder().eval()
    batch, head = encoder.tokenize(SENTENCES), encoder.mlp_head
    for precision, tolerance in FORMATS.items():
        with autocast(CPU, precision):
            plain, projected = encoder.encode(*batch), encoder.encode(*batch, project=True)
            expected = torch.tanh(plain @ head.dense.weight.T + head.dense.bias)
            assert torch.allclose(projected.float(), expected.float(), atol=tolerance)
            assert not torch.allclose(projected.float(), plain.float(), atol=tolerance)
    assert sum(p.numel() for p in MLPHead(32).parameters()) == 32 * 32 + 32


def test_truncation_keeps_sep():
    encoder = tiny_encoder(max_seq_len=12)
    idx, attention_mask = encoder.tokenize(["word " * 100, "Yes."])
    assert (
        idx.shape == (2, 12)
        and attention_mask[0].all()
        and encoder.tokenize(["word " * 100], 20)[0].shape == (1, 20)
    )
    cls, sep = (encoder.tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    assert idx[0, 0] == cls and idx[0, -1] == sep and idx[1, attention_mask[1].sum() - 1] == sep
    assert refuses(lambda: encoder.tokenize(["Yes."], 65), "65", "64")
    assert refuses(lambda: encoder(torch.zeros(1, 65, dtype=torch.long), torch.ones(1, 65)), "65", "64")


def test_save_and_load_give_the_same_embeddings():
    for pooler in ("cls", "mean"):
        encoder = tiny_encoder(pooler=pooler, dropout=0.2, max_seq_len=20).eval()
        with tempfile.TemporaryDirectory() as folder:
            encoder.save_pretrained(folder)
            again = SimCSEEncoder.from_pretrained(folder).eval()
        assert (again.pooler, again.shape, again.max_seq_len) == (pooler, encoder.shape, 20)
        batch, batch_again = encoder.tokenize(SENTENCES), again.tokenize(SENTENCES)
        assert torch.equal(batch[0], batch_again[0])
        assert torch.equal(encoder.encode(*batch), again.encode(*batch_again))


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"ok  {name[5:].replace('_', ' ')}")
