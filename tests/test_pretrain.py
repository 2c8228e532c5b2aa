"""Pre-training: masking, spans, the neighbour heads, the head that Hugging Face loads, and going on after a stop."""

import csv
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

import config as root_config
import evaluate
from model import SimCSEEncoder
from pretraining import config, pretrain
from pretraining import masked_language_model as mlm
from pretraining import pretraining_batches as batches
from pretraining.neighbours import look_at_neighbours
from support import checkpoint, files, runs
from support.files import read_json
from support.tokenizer import train_tokenizer

KNOBS = {
    "N_LAYER": 2,
    "N_EMBD": 64,
    "N_HEAD": 4,
    "N_POSITIONS": 48,
    "VOCAB_SIZE": 300,
    "BLOCK_SIZE": 24,
    "TOKENS_PER_STEP": 256,
    "MAX_TOKENS": 8_000,
    "WARMUP_TOKENS": 1_000,
    "VALIDATION_TOKENS": 1_000,
    "VALIDATION_INTERVAL": 4_000,
    "HELD_OUT": 10,
    "DEVICE": "cpu",
    "PRECISION": "float32",
}
WORDS = "the a river town king queen war music art of in by near old new great small was is became built wrote saw"
BOTH_FORMATS = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


def text(articles=60, paragraphs=3, sentences=4):
    """An invented corpus: a paragraph a line, a blank line between articles; each sentence names its article."""
    rng = random.Random(0)

    def sentence(article):
        return f"{' '.join(rng.choices(WORDS.split(), k=rng.randint(3, 12))).capitalize()} {article}."

    def paragraph(article):
        return " ".join(sentence(article) for _ in range(sentences))

    return "\n\n".join(
        "\n".join(paragraph(article) for _ in range(paragraphs)) for article in range(articles)
    )


def set_knobs(monkeypatch, **values):
    """Give constants of the two config modules other values for the length of a test."""
    for name, value in values.items():
        monkeypatch.setattr(root_config if hasattr(root_config, name) else config, name, value)


@pytest.fixture(autouse=True)
def one_thread():
    """The last bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a corpus, the knobs of a tiny run set to it, no STS-B, and no curves: to draw takes a second."""
    (tmp_path / "corpus.txt").write_text(text(), encoding="utf-8")
    set_knobs(
        monkeypatch, **KNOBS, PRETRAIN_CORPUS=str(tmp_path / "corpus.txt"), MLM_FOLDER=str(tmp_path / "mlm")
    )
    monkeypatch.setattr(files, "DATA", tmp_path)
    monkeypatch.setattr(runs, "draw_curves", lambda *_: None)
    evaluate.load_sts_b.cache_clear()
    return tmp_path


def rows(folder):
    """metrics.csv as dicts of strings."""
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---- text to batches


def test_the_vocabulary_is_the_same_every_time_and_leaves_rare_characters_out():
    lines = text().split("\n") + ["".join(map(chr, range(0x4E00, 0x4E00 + 2_000)))]
    vocabularies = [train_tokenizer(lines, 600).get_vocab() for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2] and len(vocabularies[0]) <= 600
    assert {"queen", "music"} < set(vocabularies[0])
    assert sum("\u4e00" <= token[-1] for token in vocabularies[0]) < 300


def test_the_corpus_loses_no_token_and_is_tokenised_once(folder):
    tokenizer, corpus = pretrain.prepare_corpus(folder)
    articles = batches.read_articles(folder / "corpus.txt")
    all_tokens = [
        i
        for article in articles
        for paragraph in article
        for i in tokenizer.encode(paragraph, add_special_tokens=False).ids
    ]
    assert corpus["tokens"].tolist() == all_tokens and corpus["tokens"].dtype == np.uint16
    assert len(articles) == len(corpus["article_starts"]) - 1 == 60
    assert corpus["sentence_starts"][-1] == len(all_tokens)
    assert len(corpus["sentence_starts"]) - 1 == 60 * 3 * 4
    made = os.stat(folder / "tokens.npz").st_mtime_ns
    pretrain.prepare_corpus(folder)
    assert os.stat(folder / "tokens.npz").st_mtime_ns == made
    (folder / "corpus.txt").write_text("another\n\ntext\n", encoding="utf-8")
    assert len(pretrain.prepare_corpus(folder)[1]["tokens"]) < len(all_tokens)


@pytest.mark.parametrize("rates", [(0.5, 0.05), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_spans_hold_every_token_once_start_sentences_and_stay_in_their_article(folder, monkeypatch, rates):
    set_knobs(monkeypatch, SENTENCE_RATE=rates[0], LONG_RATE=rates[1])
    _, corpus = pretrain.prepare_corpus(folder)
    training, held_out = batches.split_articles(60, config.HELD_OUT)
    assert len(held_out) == 6 and sorted(training + held_out) == list(range(60))
    spans = {}
    for name, articles in (("held out", held_out), ("training", training)):
        drawn = pretrain.random_batches(corpus, articles, np.random.default_rng(0))
        for batch in drawn:
            assert len(set(batch[:, 1])) == 1
            assert len(batch) * (batch[0, 1] + 2) <= config.TOKENS_PER_STEP
        spans[name] = np.concatenate(drawn)
    everything = np.concatenate(list(spans.values()))
    used = [i for start, length in everything for i in range(start, start + length)]
    assert sorted(used) == list(range(len(corpus["tokens"])))  # each once, so none is in both
    bounds = corpus["sentence_starts"][corpus["article_starts"]]
    for name, articles in (("held out", held_out), ("training", training)):
        article = np.searchsorted(bounds, spans[name][:, 0], "right") - 1
        assert set(article) == set(articles)
        assert (spans[name].sum(axis=1) <= bounds[article + 1]).all()
    assert everything[:, 1].max() <= (46 if rates[1] else 22)
    sentences = set(zip(corpus["sentence_starts"][:-1], np.diff(corpus["sentence_starts"]), strict=True))
    single = np.mean([tuple(span) in sentences for span in spans["training"]])
    assert single == 1 if rates[0] == 1 else single < 0.9
    assert np.isin(spans["training"][:, 0], corpus["sentence_starts"]).all()


def test_a_sentence_longer_than_a_span_is_cut(folder):
    article = "Short one. " + "the river " * 50 + "end. Short two."
    (folder / "corpus.txt").write_text("\n\n".join([article] * 12), encoding="utf-8")
    _, corpus = pretrain.prepare_corpus(folder)
    spans = batches.cut_into_spans(corpus, range(12), np.random.default_rng(0), 24, 48, 0.5, 0.05)
    assert spans[:, 1].sum() == len(corpus["tokens"]) and spans[:, 1].max() <= 46
    assert (spans[1:, 0] == spans[:-1].sum(axis=1)).all()


def test_a_corpus_without_blank_lines_has_an_article_a_line(folder):
    (folder / "lines.txt").write_text("One sentence.\nAnother one.\nA third.\n", encoding="utf-8")
    assert batches.read_articles(folder / "lines.txt") == [["One sentence."], ["Another one."], ["A third."]]


def test_masking_follows_bert():
    rng = np.random.default_rng(0)
    idx = rng.integers(batches.N_SPECIAL, 1000, (1000, 66))
    idx[:, 0], idx[:, -1] = batches.CLS, batches.SEP
    before = idx.copy()
    masked, positions, targets = batches.mask_tokens(idx, rng, 1000, 0.25)
    row = np.arange(1000)[:, None]
    assert (idx == before).all() and (targets == idx[row, positions]).all()
    assert positions.shape == (1000, 16) and all(len(set(chosen)) == 16 for chosen in positions)  # a quarter
    assert set(positions.flat) == set(range(1, 65))  # never [CLS] nor [SEP]
    assert np.ptp(np.bincount(positions.flat)[1:65]) < 100  # everywhere alike: 250 +- 14
    untouched = np.ones(idx.shape, bool)
    untouched[row, positions] = False
    assert (masked[untouched] == idx[untouched]).all()
    now = masked[row, positions]
    hidden, same = now == batches.MASK, now == targets
    assert hidden.mean() == pytest.approx(0.8, abs=0.015) and same.mean() == pytest.approx(0.1, abs=0.012)
    replaced = now[~hidden & ~same]
    assert len(replaced) / now.size == pytest.approx(0.1, abs=0.012) and replaced.min() >= batches.N_SPECIAL
    assert len(set(replaced)) > 700  # from all of the vocabulary
    one_token = np.array([[batches.CLS, 7, batches.SEP]])
    assert batches.mask_tokens(one_token, rng, 1000, 0.25)[1].tolist() == [[1]]


# ---- the model


@pytest.fixture
def model(folder):
    tokenizer, corpus = pretrain.prepare_corpus(folder)
    encoder, head = pretrain.new_encoder(tokenizer, corpus)
    return encoder, head, corpus


@BOTH_FORMATS
def test_only_masked_positions_enter_the_loss(model, precision):
    encoder, head, corpus = model
    vocab_size = encoder.shape["vocab_size"]
    encoder.eval()
    rng = np.random.default_rng(0)
    idx = rng.integers(batches.N_SPECIAL, vocab_size, (4, 12))
    masked = batches.mask_tokens(idx, rng, vocab_size, 0.25)
    logits, targets, cls_logits = mlm.predict(encoder, head, masked, precision)
    assert logits.shape == (*masked[1].shape, vocab_size) and targets.tolist() == masked[2].tolist()
    assert logits.dtype == cls_logits.dtype == torch.float32
    for scores in (logits, cls_logits):  # computed in the format that was asked for
        assert torch.equal(scores, scores.bfloat16().float()) == (precision == "bfloat16")
    hidden = encoder(torch.from_numpy(masked[0]), torch.ones(4, 12))
    everywhere = head(hidden, encoder.token_embedding.weight)  # (4, 12, V)
    expected = everywhere[torch.arange(4)[:, None], torch.from_numpy(masked[1])]
    expected_cls = hidden[:, 0] @ encoder.token_embedding.weight.T + head.bias
    # bfloat16 has 8 bits of mantissa: logits of up to 8 are rounded by up to 1/64, after some ten roundings on the way
    close = {} if precision == "float32" else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(logits, expected, **close)
    torch.testing.assert_close(cls_logits, expected_cls, **close)


def test_bag_of_words_loss_by_hand():
    torch.manual_seed(0)
    logits, idx = torch.randn(3, 20, dtype=torch.float64), torch.randint(20, (3, 6))
    for weight in (torch.ones(20, dtype=torch.float64), torch.rand(20, dtype=torch.float64) + 0.01):
        total = weights = 0.0
        for b in range(3):
            partition = sum(w * math.exp(x) for w, x in zip(weight, logits[b], strict=True))
            for t in range(1, 5):  # neither [CLS] nor [SEP]
                at = idx[b, t]
                p = weight[at] * math.exp(logits[b, at]) / partition
                total, weights = total - weight[at] * math.log(p), weights + weight[at]
        loss = mlm.bag_of_words_loss(logits, idx, weight).item()
        assert loss == pytest.approx((total / weights).item(), abs=1e-12)


def test_a_cls_that_says_nothing_guesses_the_weighted_frequencies():
    """With all-zero [CLS] the distribution is frequency x weight, the best single guess: the loss is its entropy."""
    p = batches.token_frequencies(np.array([5, 5, 5, 6, 6, 7], np.uint16), 8).double()
    assert p.tolist() == pytest.approx([1 / 14] * 5 + [4 / 14, 3 / 14, 2 / 14])
    weight = 0.1 / (0.1 + p)
    as_p_says = [t for t, n in enumerate((1, 1, 1, 1, 1, 4, 3, 2)) for _ in range(n)]
    q = p * weight / (p * weight).sum()
    loss = mlm.bag_of_words_loss(p.log()[None], torch.tensor([[0, *as_p_says, 0]]), weight).item()
    assert loss == pytest.approx(-(q * q.log()).sum().item())


SHAPES = [{"n_embd": 256, "n_head": 8}, {"n_embd": 128, "n_head": 4}, {"n_embd": 64, "n_head": 2}]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_neighbour_heads_look_where_they_should(model, shape):
    tokenizer = model[0].tokenizer
    torch.manual_seed(0)
    encoder = SimCSEEncoder(tokenizer, n_layer=2, **shape).eval()
    look_at_neighbours(encoder)
    T = 40
    idx = torch.randint(batches.N_SPECIAL, tokenizer.get_vocab_size(), (8, T))
    inputs = []
    for block in encoder.blocks:
        block.attention.register_forward_hook(
            lambda attention, arguments, output: inputs.append((attention, arguments[0]))
        )
    with torch.no_grad():
        encoder(idx, torch.ones_like(idx))
    assert len(inputs) == 2
    for attention, x in inputs:
        q, k = (
            layer(x).view(8, T, shape["n_head"], -1).transpose(1, 2)
            for layer in (attention.query, attention.key)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # (8, heads, T, T)
        for head, offset in enumerate((-1, 1, -2, 2)[: shape["n_head"]]):
            positions = torch.arange(max(0, -offset), T - max(0, offset))
            aimed = scores[:, head, positions, positions + offset]
            found = scores[:, head, positions].argmax(-1) == positions + offset
            assert found.float().mean() > 0.99
            assert 2 < aimed.mean() < 5
            others = (scores[:, head, positions].sum(-1) - aimed) / (T - 1)
            assert others.abs().mean() < 0.5


def test_the_folder_loads_in_transformers_with_its_head(model, folder):
    transformers = pytest.importorskip("transformers")
    encoder, head, corpus = model
    with torch.no_grad():
        for p in [*encoder.parameters(), *head.parameters()]:  # no weight may be left at its start
            p.add_(0.05 * torch.randn_like(p)).copy_(p.half())
    mlm.save_pretrained(folder / "mlm", encoder, head)
    theirs, report = transformers.BertForMaskedLM.from_pretrained(
        folder / "mlm", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    encoder.eval()
    theirs.eval()
    idx, attention_mask = encoder.tokenize(["The old king saw the river 7.", "A [MASK] town."])
    with torch.no_grad():
        ours = head(encoder(idx, attention_mask), encoder.token_embedding.weight)
        logits = theirs(idx, attention_mask.long()).logits
    torch.testing.assert_close(ours[attention_mask], logits[attention_mask], atol=1e-4, rtol=1e-4)
    again = SimCSEEncoder.from_pretrained(folder / "mlm").eval()  # SimCSE's start leaves the head out
    torch.testing.assert_close(again(idx, attention_mask), encoder(idx, attention_mask))
    assert again.shape == encoder.shape


def test_filled_masks_are_the_likeliest_tokens_of_transformers(model, folder):
    transformers = pytest.importorskip("transformers")
    encoder, head, corpus = model
    mlm.save_pretrained(folder / "mlm", encoder, head)
    sentences = ["the old [MASK] saw the [MASK] .", "music of the [MASK] ."]
    stored = SimCSEEncoder.from_pretrained(folder / "mlm")  # in half precision, as theirs
    checkpoint.load_head(folder / "mlm", head.weights())
    theirs = transformers.pipeline(
        "fill-mask", str(folder / "mlm"), top_k=5, device="cpu", dtype=torch.float32
    )
    expected = [
        mask for answer in theirs(sentences) for mask in (answer if isinstance(answer[0], list) else [answer])
    ]
    found = mlm.fill_masks(stored, head, sentences)
    assert found == [[guess["token_str"] for guess in mask] for mask in expected] and len(found) == 3


# ---- the run


@BOTH_FORMATS
def test_a_run_learns_and_says_so(folder, capsys, monkeypatch, precision):
    set_knobs(monkeypatch, MAX_TOKENS=24_000, VALIDATION_INTERVAL=12_000, PRECISION=precision)
    pretrain.main()
    first, last = rows(folder / "mlm")
    assert float(last["loss"]) < float(first["loss"]) < np.log(300)
    assert float(last["train_loss"]) < float(first["train_loss"])
    assert 0 < float(last["accuracy"]) < 1 and last["stsb_cls"] == ""  # no STS-B there
    printed = capsys.readouterr().out
    assert "the capital of france is [MASK]" in printed and f"weights on cpu in {precision}, " in printed
    stored = read_json(folder / "mlm" / "pretraining.json")
    assert stored["tokens"] >= 24_000 and stored["settings"]["PRECISION"] == precision
    assert str(folder) not in str(stored)  # nothing of the machine it ran on
    with pytest.raises(ValueError, match="RESUME=True"):
        pretrain.main()
    other = {"float32": "bfloat16", "bfloat16": "float32"}[precision]
    set_knobs(monkeypatch, RESUME=True)
    with (
        monkeypatch.context() as patched,
        pytest.raises(ValueError, match=f"PRECISION={precision}, .* {other}"),
    ):
        set_knobs(patched, PRECISION=other)
        pretrain.main()
    with (
        monkeypatch.context() as patched,
        pytest.raises(ValueError, match="begun with MASK_RATE=0.25, now it is 0.4"),
    ):
        set_knobs(patched, MASK_RATE=0.4)
        pretrain.main()
    set_knobs(monkeypatch, MLM_FOLDER=str(folder / "other"))
    with pytest.raises(ValueError, match="no run"):
        pretrain.main()


def test_the_curves_are_drawn_with_and_without_stsb(tmp_path):
    history = [
        {"step": 1, "train_loss": 2.0, "loss": 2.5, "accuracy": 0.1, "stsb_cls": None, "stsb_mean": None}
    ]
    history.append(history[0] | {"step": 2, "stsb_cls": 50.0, "stsb_mean": 40.0})
    for n in (1, 2):
        pretrain.write_metrics(tmp_path / str(n), history[:n])
        assert (tmp_path / str(n) / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert len(rows(tmp_path / str(n))) == n


def test_stsb_is_scored_under_both_poolings_where_it_is_there(model, folder):
    encoder, head, corpus = model
    assert pretrain.score_stsb(encoder) == {"stsb_cls": None, "stsb_mean": None}
    (folder / "stsb").mkdir()
    sample = files.ROOT / "data" / "stsb_sample" / "validation.csv"
    shutil.copy(sample, folder / "stsb" / "validation.csv")
    encoder.half().float()  # as it will be stored
    scores = pretrain.score_stsb(encoder)
    assert encoder.pooler == "cls"
    mlm.save_pretrained(folder / "mlm", encoder, head)
    for pooler in ("cls", "mean"):
        alone = SimCSEEncoder.from_pretrained(folder / "mlm", pooler)
        assert scores[f"stsb_{pooler}"] == pytest.approx(evaluate.evaluate_stsb(alone), abs=1e-6)
    assert scores["stsb_cls"] != scores["stsb_mean"]


def test_the_learning_rate_climbs_stays_and_falls(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=100_000)
    at = (0, 500, 1_000, 79_000, 90_000, 99_999)
    rates = [pretrain.learning_rate(tokens) / config.MLM_LEARNING_RATE for tokens in at]
    assert 0 < rates[0] < rates[1] < 1 == rates[2] == rates[3]
    assert rates[4] == pytest.approx(0.5) and 0 < rates[5] < 0.001
    set_knobs(monkeypatch, DECAY_SHARE=0.0)
    assert pretrain.learning_rate(99_999) == config.MLM_LEARNING_RATE


@BOTH_FORMATS
def test_validation_is_the_same_every_time_and_leaves_dropout_off(model, monkeypatch, precision):
    encoder, head, corpus = model
    set_knobs(monkeypatch, VALIDATION_TOKENS=500)
    masked = pretrain.validation_batches(corpus, encoder.shape["vocab_size"])
    again = pretrain.validation_batches(corpus, encoder.shape["vocab_size"])
    assert all((a == b).all() for x, y in zip(masked, again, strict=True) for a, b in zip(x, y, strict=True))
    assert 500 <= sum(idx.size for idx, _, _ in masked) < 500 + config.TOKENS_PER_STEP
    results = []
    for rate in (0.0, 0.5, 0.5):
        mlm.set_dropout(encoder, rate)
        results.append(mlm.validate(encoder, head, masked, precision))
    assert results[0] == results[1] == results[2]
    assert encoder.training


def test_dropout_is_off_and_then_on_everywhere(model):
    encoder, head, corpus = model
    idx = torch.randint(batches.N_SPECIAL, encoder.shape["vocab_size"], (2, 20))
    encoder.train()
    mlm.set_dropout(encoder, 0.0)
    assert torch.equal(encoder(idx, torch.ones_like(idx)), encoder(idx, torch.ones_like(idx)))
    mlm.set_dropout(encoder, 0.3)
    rates = [m.p for m in encoder.modules() if "Dropout" in type(m).__name__]
    assert rates == [0.3] * (
        1 + 2 * 2
    )  # on the embeddings; in each of two blocks on attention and on the residuals
    assert not torch.equal(encoder(idx, torch.ones_like(idx)), encoder(idx, torch.ones_like(idx)))


@BOTH_FORMATS
def test_a_killed_run_goes_on_to_the_same_bytes(folder, monkeypatch, precision):
    set_knobs(monkeypatch, MLM_FOLDER=str(folder / "whole"), PRECISION=precision)
    pretrain.main()
    set_knobs(monkeypatch, SAVE_MINUTES=0.0)  # from here on after every step
    knobs = {**KNOBS, "PRECISION": precision, "PRETRAIN_CORPUS": folder / "corpus.txt", "SAVE_MINUTES": 0.0}
    knobs["MLM_FOLDER"] = folder / "mlm"
    process = subprocess.Popen(
        [sys.executable, "-m", "pretraining.pretrain", *(f"{name}={value}" for name, value in knobs.items())],
        cwd=files.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not (folder / "mlm.run" / "state.pt").exists():
        time.sleep(0.001)
    set_knobs(monkeypatch, MLM_FOLDER=str(folder / "mlm"), RESUME=True)
    with pytest.raises(OSError, match=f"run .*mlm.run is in use by process {process.pid}"):
        pretrain.main()
    process.kill()
    assert process.communicate()[1].count(b"error") == 0 and process.returncode == -signal.SIGKILL
    set_knobs(monkeypatch, PRETRAIN_CORPUS="gone.txt")  # its tokens are kept
    saves = []

    def save_and_stop(*arguments, save=pretrain.save_state):
        saves.append(save(*arguments))
        if len(saves) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    # the second time by a polite signal
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt, match="RESUME=True"):
        patched.setattr(pretrain, "save_state", save_and_stop)
        pretrain.main()
    assert len(saves) == 5 and not (folder / "mlm").exists()
    pretrain.main()
    ours, whole = (folder / name / "model.safetensors" for name in ("mlm", "whole"))
    assert ours.read_bytes() == whole.read_bytes()
    ours, whole = ([row | {"hours": 0} for row in rows(folder / name)] for name in ("mlm", "whole"))
    assert ours == whole and len(ours) == 2


def test_going_on_from_an_encoder(folder, monkeypatch):
    pretrain.main()
    (folder / "other.txt").write_text(text(30).replace("king", "queen"), encoding="utf-8")
    set_knobs(
        monkeypatch,
        MLM_INIT=str(folder / "mlm"),
        MLM_FOLDER=str(folder / "more"),
        N_EMBD=32,
        VOCAB_SIZE=200,
        PRETRAIN_CORPUS=str(folder / "other.txt"),
    )
    encoder, head = pretrain.given_encoder()
    stored = load_file(folder / "mlm" / "model.safetensors")  # what transformers reads, see the test above
    ours = {
        "bert." + checkpoint.hugging_face_name(name): tensor
        for name, tensor in encoder.state_dict().items()
        if "mlp_head" not in name
    } | head.weights()
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[name], stored[name].float()) for name in stored)
    pretrain.main()
    begun, before = rows(folder / "more")[0], rows(folder / "mlm")[-1]
    assert float(begun["train_loss"]) < float(before["train_loss"])  # not begun again
    for name in ("tokenizer.json", "vocab.txt", "config.json"):
        assert (folder / "more" / name).read_bytes() == (folder / "mlm" / name).read_bytes()
    settings = read_json(folder / "more" / "pretraining.json")["settings"]
    assert (settings["N_EMBD"], settings["VOCAB_SIZE"]) == (64, encoder.shape["vocab_size"])


def test_a_stopped_run_that_went_on_from_an_encoder_goes_on_without_it(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=2_000)
    pretrain.main()
    set_knobs(monkeypatch, MLM_INIT=str(folder / "mlm"), MLM_FOLDER=str(folder / "whole"), N_EMBD=32)
    pretrain.main()
    set_knobs(monkeypatch, MLM_FOLDER=str(folder / "more"), SAVE_MINUTES=0.0)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        # dies at the end, with the state of the step before
        patched.setattr(mlm, "validate", lambda *_: 1 / 0)
        pretrain.main()
    set_knobs(monkeypatch, RESUME=True)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="begun with MLM_INIT="):
        set_knobs(patched, MLM_INIT="")
        pretrain.main()
    tokens = folder / "more.run" / "tokens.npz"
    tokens.rename(folder / "kept.npz")
    with pytest.raises(FileNotFoundError, match="no .*tokens.npz any more"):
        pretrain.main()
    assert not tokens.exists()
    (folder / "kept.npz").rename(tokens)
    shutil.rmtree(folder / "mlm")
    pretrain.main()
    ours, whole = (folder / name / "model.safetensors" for name in ("more", "whole"))
    assert ours.read_bytes() == whole.read_bytes()


def test_a_run_is_not_resumed_over_the_tokens_of_another(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=1_000)
    pretrain.main()
    (folder / "corpus.txt").write_text(text(30), encoding="utf-8")
    pretrain.prepare_corpus(folder / "mlm.run")  # a new run that got no further than its tokens
    set_knobs(monkeypatch, RESUME=True)
    with pytest.raises(ValueError, match="of another text than tokens.npz.*OVERWRITE=True"):
        pretrain.main()


def test_a_damaged_state_is_refused(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=1_000)
    pretrain.main()
    set_knobs(monkeypatch, RESUME=True)
    path, rng = folder / "mlm.run" / "state.pt", random.Random(0)
    content = path.read_bytes()
    embedding = torch.load(path, weights_only=True)["encoder"]["token_embedding.weight"]
    weights = content.index(embedding.numpy().tobytes())
    for at in (weights + 1000, *(rng.randrange(len(content)) for _ in range(40))):
        path.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
        try:
            pretrain.main()  # a bit that nobody reads
            assert at != weights + 1000
        except ValueError as error:
            assert re.match(r".*state.pt can't be read \(.*\): begin again with OVERWRITE=True$", str(error))
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="state.pt can't be read"):
        pretrain.main()


def test_an_encoder_that_cannot_go_on(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=1_000)
    pretrain.main()
    before = (folder / "mlm.run" / "tokens.npz").read_bytes()
    shutil.copytree(folder / "mlm", folder / "given")
    set_knobs(
        monkeypatch,
        OVERWRITE=True,
        PRETRAIN_CORPUS=str(folder / "gone.txt"),
        MLM_INIT=str(folder / "given"),
    )
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="give N_POSITIONS=48"):
        set_knobs(patched, N_POSITIONS=64)
        pretrain.main()
    vocab = (folder / "given" / "vocab.txt").read_text(encoding="utf-8").split("\n")
    (folder / "given" / "tokenizer.json").unlink()
    moved = vocab[5:9] + vocab[:5] + vocab[9:]
    (folder / "given" / "vocab.txt").write_text("\n".join(moved), encoding="utf-8")
    with pytest.raises(ValueError, match="its vocabulary does not begin with"):  # BERT-base's, say
        pretrain.main()
    weights = load_file(folder / "given" / "model.safetensors")
    del weights["cls.predictions.bias"]
    # as train.py leaves it, with no head
    (folder / "given" / "model.safetensors").write_bytes(to_safetensors(weights))
    with pytest.raises(ValueError, match="no head for masked words .*cls.predictions.bias"):
        pretrain.main()
    assert (folder / "mlm.run" / "state.pt").exists()
    assert (folder / "mlm.run" / "tokens.npz").read_bytes() == before


def test_what_is_there_is_not_lost_to_a_mistake(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=1_000)
    (folder / "mlm").mkdir()
    (folder / "mlm" / "config.json").write_text("somebody's encoder")
    with pytest.raises(ValueError, match="holds an encoder: name another folder with MLM_FOLDER="):
        pretrain.main()
    visible = [path.name for path in folder.iterdir() if "mlm" in path.name and path.name[0] != "."]
    assert visible == ["mlm"]
    set_knobs(monkeypatch, OVERWRITE=True)
    pretrain.main()
    state = (folder / "mlm.run" / "state.pt").read_bytes()
    with monkeypatch.context() as patched, pytest.raises(FileNotFoundError):
        set_knobs(patched, PRETRAIN_CORPUS=str(folder / "typo.txt"))
        pretrain.main()
    assert (folder / "mlm.run" / "state.pt").read_bytes() == state
    set_knobs(monkeypatch, OVERWRITE=False, RESUME=True)
    pretrain.main()  # finished: the encoder is written once more
    kept = torch.load(folder / "mlm.run" / "state.pt", weights_only=True)
    kept["progress"]["history"] = []  # as it is before the first validation
    torch.save(kept, folder / "mlm.run" / "state.pt")
    set_knobs(monkeypatch, MAX_TOKENS=500)
    with pytest.raises(ValueError, match="MAX_TOKENS=500 asks for no more"):
        pretrain.main()


def test_the_shipped_encoder_is_refused_from_wherever_one_stands(tmp_path, monkeypatch):
    """Relative folders lie beside the scripts; a stand-in for these, as a lock is left where a run would be."""
    (tmp_path / "house" / "checkpoints" / "mlm_encoder").mkdir(parents=True)
    (tmp_path / "house" / "checkpoints" / "mlm_encoder" / "config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(files, "ROOT", tmp_path / "house")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("mlm_encoder", "mlm_encoder/"):
        set_knobs(monkeypatch, MLM_FOLDER=f"checkpoints/{name}")
        with pytest.raises(ValueError, match="checkpoints.mlm_encoder holds an encoder: name another folder"):
            pretrain.main()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_impossible_shape_is_refused_before_minutes_of_work(folder, monkeypatch):
    set_knobs(monkeypatch, N_HEAD=5)
    with pytest.raises(ValueError, match="N_EMBD=64 must be divisible by N_HEAD=5"):
        pretrain.main()
    assert not (folder / "mlm.run").exists()


def test_a_state_that_does_not_fit_in_memory_is_not_called_damaged(folder, monkeypatch):
    set_knobs(monkeypatch, MAX_TOKENS=1_000)
    pretrain.main()
    set_knobs(monkeypatch, RESUME=True, MAX_TOKENS=2_000)
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):

        def fail(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(pretrain, "make_optimizer", fail)
            pretrain.main()
    pretrain.main()


def test_damaged_tokens_are_made_anew_or_refused(folder, monkeypatch):
    _, corpus = pretrain.prepare_corpus(folder)
    (folder / "tokens.npz").write_bytes((folder / "tokens.npz").read_bytes()[:500])
    with monkeypatch.context() as patched:
        set_knobs(patched, RESUME=True)
        with pytest.raises(ValueError, match="tokens.npz can't be read .*OVERWRITE=True"):
            pretrain.prepare_corpus(folder)
    _, again = pretrain.prepare_corpus(folder)
    assert (again["tokens"] == corpus["tokens"]).all()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("none.txt", None, "download_data.py"),
        ("line.txt", b"one line only", "too little"),
        ("cut.gz", b"\x1f\x8b\x08cut", "damaged"),
    ],
)
def test_a_corpus_that_is_none_is_one_line(folder, monkeypatch, name, content, message):
    if content:
        (folder / name).write_bytes(content)
    set_knobs(monkeypatch, PRETRAIN_CORPUS=str(folder / name))
    with pytest.raises((ValueError, OSError), match=message) as error:
        pretrain.main()
    assert "\n" not in str(error.value)
