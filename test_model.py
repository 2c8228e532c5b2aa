"""The mechanics of SimCSE, checked in seconds: python test_model.py, or pytest."""

import math
import tempfile

import torch
import torch.nn.functional as F

import config
import model
from checkpoint import train_tokenizer
from model import MLPHead, SimCSEEncoder, alignment_and_uniformity, simcse_loss

SENTENCES = ["A man is playing a guitar.", "The stock market fell sharply on Monday after the bank raised its rates.",
             "How do I remove rust?", "Two dogs run through the snow in a park near the old river.", "Yes."]


def tiny_encoder(**options):
    torch.manual_seed(0)
    return SimCSEEncoder(train_tokenizer(SENTENCES, 200), **dict(n_layer=2, n_embd=32, n_head=4, n_positions=64) | options)


def refuses(function, *words):
    """Whether the call raises a ValueError whose text holds all the words."""
    try:
        function()
    except ValueError as error:
        return all(word in str(error) for word in words)
    return False


# ---------------------------------------------------------------------------- the objective

def test_loss_is_equation_4():
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 7, 5, dtype=torch.float64)
    for temperature in (0.05, 0.7):
        total = 0.0
        for a, b in ((z1, z2), (z2, z1)):           # both directions
            for i in range(7):
                def similarity(j):
                    dot = sum(float(x) * float(y) for x, y in zip(a[i], b[j]))
                    return math.exp(dot / (float(a[i].norm()) * float(b[j].norm())) / temperature)
                total -= math.log(similarity(i) / sum(similarity(j) for j in range(7)))
        assert abs(simcse_loss(z1, z2, temperature).item() - total / 14) < 1e-10


def test_loss_gradient():
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(lambda a, b: simcse_loss(a, b, 0.5), (z1, z2))


def test_loss_of_a_collapsed_batch_is_log_n():
    z = torch.ones(8, 16, dtype=torch.float64)
    assert abs(simcse_loss(z, z, 0.05).item() - math.log(8)) < 1e-12


def test_identical_views_are_not_log_n():
    # what dropout at 0 gives: the positive's cosine is 1, but the negatives still tell the loss something
    torch.manual_seed(0)
    z = torch.randn(8, 64)
    assert simcse_loss(z, z, 0.05) < 0.01 < math.log(8)


def test_aligned_pairs_lose_less_than_misaligned_ones():
    torch.manual_seed(0)
    z = torch.randn(16, 32)
    assert simcse_loss(z, z + 0.1 * torch.randn(16, 32), 0.05) < simcse_loss(z, z.roll(1, 0), 0.05)


def test_loss_refuses_what_has_no_meaning():
    z = torch.randn(4, 8)
    assert refuses(lambda: simcse_loss(z[:1], z[:1], 0.05), "at least two")
    assert refuses(lambda: simcse_loss(z, z[:3], 0.05), "(4, 8)", "(3, 8)")
    assert refuses(lambda: simcse_loss(z[0], z[0], 0.05), "(N, C)")
    for temperature in (0, -0.05, math.nan):
        assert refuses(lambda: simcse_loss(z, z, temperature), "temperature")


def test_alignment_and_uniformity():
    # the definitions, pair by pair (Wang & Isola, section 4.1)
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 6, 5, dtype=torch.float64)
    points = [z / z.norm() for z in torch.cat([z1, z2])]
    pairs = [((points[i] - points[j]) ** 2).sum().item() for i in range(12) for j in range(i)]
    alignment, uniformity = alignment_and_uniformity(z1, z2)
    assert abs(alignment - sum(((points[i] - points[i + 6]) ** 2).sum().item() for i in range(6)) / 6) < 1e-12
    assert abs(uniformity - math.log(sum(math.exp(-2 * d) for d in pairs) / len(pairs))) < 1e-12
    # and what they mean: one point for all is perfectly aligned and not uniform at all
    same = torch.ones(6, 5)
    assert alignment_and_uniformity(same, same) == (0.0, 0.0)
    axes = torch.eye(6)                             # twelve points as far apart as can be, the pairs opposite each other
    alignment_of_axes, uniformity_of_axes = alignment_and_uniformity(axes, -axes)
    assert alignment_of_axes == 4.0 and uniformity_of_axes < uniformity < 0


# ---------------------------------------------------------------------------- dropout, the augmentation

def test_two_passes_differ_only_under_dropout():
    encoder = tiny_encoder(dropout=0.1)
    batch = encoder.tokenize(SENTENCES)
    encoder.train()
    assert not torch.allclose(encoder.encode(*batch), encoder.encode(*batch), atol=1e-3)
    encoder.eval()
    assert torch.equal(encoder.encode(*batch), encoder.encode(*batch))
    without = tiny_encoder(dropout=0.0).train()
    assert torch.equal(without.encode(*batch), without.encode(*batch))


def test_every_row_draws_its_own_mask():
    encoder = tiny_encoder(dropout=0.1).train()
    first, second = encoder.encode(*encoder.tokenize([SENTENCES[0]] * 2))
    assert not torch.allclose(first, second, atol=1e-3)
    encoder.eval()
    first, second = encoder.encode(*encoder.tokenize([SENTENCES[0]] * 2))
    assert torch.allclose(first, second, atol=1e-6)


def test_every_dropout_of_the_paper_is_there():
    # on the embeddings, and in each block on the attention weights and on both residual branches
    encoder = tiny_encoder(dropout=0.3).train()
    batch = encoder.tokenize(SENTENCES)
    idx = batch[0]
    calls, ours = [], model.dropout
    try:
        model.dropout = lambda x, rate: calls.append((tuple(x.shape), rate)) or x
        without = encoder(*batch)
        B, T = idx.shape
        block = [((B, 4, T, T), 0.3), ((B, T, 32), 0.3), ((B, T, 32), 0.3)]
        assert calls == [((B, T, 32), 0.3)] + 2 * block
        for alone in range(len(calls)):             # and each of them changes what comes out
            turn = iter(range(len(calls)))
            model.dropout = lambda x, rate: ours(x, rate) if next(turn) == alone else x
            assert not torch.allclose(encoder(*batch), without, atol=1e-4)
    finally:
        model.dropout = ours


def test_dropout_rate_and_scale():
    torch.manual_seed(0)
    for rate in (0.01, 0.05, 0.1, 0.15, 0.2, 0.5, 0.999):
        x = torch.ones(1001, 1003)                  # not a multiple of eight
        y = model.dropout(x, rate)
        dropped = (y == 0).double().mean().item()
        exact = round(rate * 256) / 256 if rate < 0.999 else 255 / 256
        assert abs(exact - rate) <= 1 / 256 and abs(dropped - exact) < 5 * math.sqrt(exact * (1 - exact) / x.numel())
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - exact)).item()}      # so the mean stays
    assert torch.equal(model.dropout(x, 0.0), x)
    assert (model.dropout(x, 0.0001) == 0).any()    # a rate above 0 is never rounded to 0
    assert model.dropout(torch.ones(0, 3), 0.1).shape == (0, 3) and model.dropout(torch.ones(4, dtype=torch.bfloat16), 0.1).dtype == torch.bfloat16


def test_dropout_draws_are_independent():
    # correlations between the masks of neighbours (within and across the 64 bits drawn at a time), rows, and calls
    torch.manual_seed(0)
    for rate in (0.1, 0.5):
        first, second = (model.dropout(torch.ones(512, 2048), rate) == 0 for _ in range(2))

        def correlation(a, b):
            return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item() * math.sqrt(a.numel())

        found = [correlation(first, second)] + [correlation(first[:-i], first[i:]) for i in (1, 2, 7)]
        found += [correlation(first[:, :-i], first[:, i:]) for i in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64)]
        assert max(map(abs, found)) < 4.5           # standard deviations
        rows = first.double().mean(1)               # each row's own rate, spread as that many coins would be
        assert abs(rows.std().item() / math.sqrt(rows.mean() * (1 - rows.mean()) / 2048) - 1) < 0.15


def test_dropout_gradient_is_its_mask():
    torch.manual_seed(0)
    x = torch.randn(5, 7, requires_grad=True)
    y = model.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad * x, y) and 0 < (x.grad == 0).sum() < 35


def test_attention_is_pytorchs():
    # on the CPU attention is written out, elsewhere it is PyTorch's own: the same numbers
    torch.manual_seed(0)
    attention, x = model.SelfAttention(32, 4), torch.randn(3, 9, 32)
    for mask in (None, (torch.arange(9) < torch.tensor([[9], [5], [1]]))[:, None, None, :]):
        q, k, v = (layer(x).view(3, 9, 4, 8).transpose(1, 2) for layer in (attention.query, attention.key, attention.value))
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(3, 9, 32)
        assert torch.allclose(attention(x, x, mask, 0.0), attention.output(y), atol=1e-6)


def test_the_last_block_computes_what_is_wanted():
    encoder = tiny_encoder().eval()
    idx, attention_mask = encoder.tokenize(SENTENCES)
    wanted = torch.randint(idx.shape[1], (5, 3))
    everywhere = encoder(idx, attention_mask)
    assert torch.allclose(encoder(idx, attention_mask, wanted), everywhere[torch.arange(5)[:, None], wanted], atol=1e-6)
    assert torch.allclose(encoder.encode(idx, attention_mask), everywhere[:, 0], atol=1e-6)


# ---------------------------------------------------------------------------- the encoder

def test_padding_changes_nothing():
    for pooler in ("cls", "mean"):
        encoder = tiny_encoder(pooler=pooler).eval()
        together = encoder.encode(*encoder.tokenize(SENTENCES))
        for sentence, embedding in zip(SENTENCES, together):
            assert torch.allclose(encoder.encode(*encoder.tokenize([sentence]))[0], embedding, atol=1e-5)


def test_pooling():
    encoder = tiny_encoder().eval()
    idx, attention_mask = encoder.tokenize(SENTENCES)
    hidden = encoder(idx, attention_mask)
    assert torch.allclose(encoder.encode(idx, attention_mask), hidden[:, 0], atol=1e-6)
    encoder.pooler = "mean"
    for row in range(len(SENTENCES)):
        n = int(attention_mask[row].sum())
        assert torch.allclose(encoder.encode(idx, attention_mask)[row], hidden[row, :n].mean(0), atol=1e-6)
    assert refuses(lambda: tiny_encoder(pooler="max"), "max", "cls", "mean")


def test_head_is_one_tanh_layer_and_only_on_request():
    encoder = tiny_encoder().eval()
    batch = encoder.tokenize(SENTENCES)
    plain, projected = encoder.encode(*batch), encoder.encode(*batch, project=True)
    head = encoder.mlp_head
    assert torch.allclose(projected, torch.tanh(plain @ head.dense.weight.T + head.dense.bias), atol=1e-6)
    assert sum(p.numel() for p in MLPHead(32).parameters()) == 32 * 32 + 32


def test_gradients_reach_encoder_and_head():
    encoder = tiny_encoder().train()
    batch = encoder.tokenize(SENTENCES)
    simcse_loss(encoder.encode(*batch, project=True), encoder.encode(*batch, project=True), 0.05).backward()
    for name, parameter in encoder.named_parameters():
        if not name.endswith("key.bias"):           # which adds the same to every score of a query: softmax doesn't see it
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_truncation_keeps_sep():
    encoder = tiny_encoder()
    idx, attention_mask = encoder.tokenize(["word " * 100, "Yes."], 12)
    assert idx.shape == (2, 12) and attention_mask[0].all()
    cls, sep = (encoder.tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    assert idx[0, 0] == cls and idx[0, -1] == sep and idx[1, attention_mask[1].sum() - 1] == sep
    assert refuses(lambda: encoder.tokenize(["Yes."], 65), "65", "64")
    assert refuses(lambda: encoder(torch.zeros(1, 65, dtype=torch.long), torch.ones(1, 65)), "65", "64")


def test_initial_weights_suit_the_width():
    # a signal keeps its size through a linear layer, at any width
    for n_embd in (64, 512):
        query = tiny_encoder(n_layer=1, n_embd=n_embd).blocks[0].attention.query
        x = torch.randn(256, n_embd)
        assert 0.7 < F.linear(x, query.weight).std() < 0.9


def test_save_and_load_give_the_same_embeddings():
    for pooler in ("cls", "mean"):
        encoder = tiny_encoder(pooler=pooler, dropout=0.2).eval()
        with tempfile.TemporaryDirectory() as folder:
            encoder.save_pretrained(folder)
            again = SimCSEEncoder.from_pretrained(folder).eval()
        assert again.pooler == pooler and again.shape == encoder.shape
        batch, batch_again = encoder.tokenize(SENTENCES), again.tokenize(SENTENCES)
        assert torch.equal(batch[0], batch_again[0])
        assert torch.equal(encoder.encode(*batch), again.encode(*batch_again))


def test_default_encoder_is_chapter_3s():
    defaults = config.DEFAULTS
    assert (defaults["N_LAYER"], defaults["N_EMBD"], defaults["N_HEAD"], defaults["N_POSITIONS"]) == (6, 256, 8, 128)
    shape = SimCSEEncoder(train_tokenizer(SENTENCES, 100)).shape
    assert (shape["n_layer"], shape["n_embd"], shape["n_head"], shape["n_inner"], shape["n_positions"]) == (6, 256, 8, 1024, 128)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"ok  {name[5:].replace('_', ' ')}")
