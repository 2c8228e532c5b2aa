"""Pre-training: masking, packing, the neighbour heads, the head that Hugging Face loads, and going on after a stop."""

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
from safetensors.torch import load_file, save as to_safetensors

import checkpoint
import config
import pretrain
import spans
from model import SimCSEEncoder

HERE = os.path.dirname(os.path.abspath(__file__))
KNOBS = {"N_LAYER": 2, "N_EMBD": 64, "N_HEAD": 4, "N_POSITIONS": 48, "VOCAB_SIZE": 300, "BLOCK_SIZE": 24,
         "TOKENS_PER_STEP": 256, "MAX_TOKENS": 8_000, "WARMUP_TOKENS": 1_000, "VALIDATION_TOKENS": 1_000,
         "VALIDATION_INTERVAL": 4_000, "HELD_OUT": 10, "DEVICE": "cpu"}
WORDS = "the a river town king queen war music art of in by near old new great small was is became built wrote saw".split()


def text(articles=60, paragraphs=3, sentences=4):
    """An invented corpus: a paragraph a line, a blank line between articles; each names its article."""
    rng = random.Random(0)
    return "\n\n".join("\n".join(" ".join(" ".join(rng.choices(WORDS, k=rng.randint(3, 12))).capitalize() + f" {article}."
                                          for _ in range(sentences)) for _ in range(paragraphs)) for article in range(articles))


@pytest.fixture(autouse=True)
def one_thread():
    """The last bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a corpus, the knobs of a tiny run set to it, and no STS-B."""
    (tmp_path / "corpus.txt").write_text(text(), encoding="utf-8")
    for name, value in {**KNOBS, "PRETRAIN_CORPUS": str(tmp_path / "corpus.txt"), "MLM_FOLDER": str(tmp_path / "mlm")}.items():
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr(config, "data", str(tmp_path))
    return tmp_path


def rows(folder):
    """metrics.csv as dicts of strings."""
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------- text to batches

def test_the_vocabulary_is_the_same_every_time_and_leaves_rare_characters_out():
    lines = text().split("\n") + ["".join(map(chr, range(0x4e00, 0x4e00 + 2_000)))]
    vocabularies = [checkpoint.train_tokenizer(lines, 600).get_vocab() for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2] and len(vocabularies[0]) <= 600
    assert {"queen", "music"} < set(vocabularies[0]) and sum("\u4e00" <= token[-1] for token in vocabularies[0]) < 300


def test_the_corpus_loses_no_token_and_is_tokenised_once(folder):
    tokenizer, corpus = spans.prepare(str(folder))
    articles = spans.read_articles(str(folder / "corpus.txt"))
    whole = [i for article in articles for p in article for i in tokenizer.encode(p, add_special_tokens=False).ids]
    assert corpus["tokens"].tolist() == whole and corpus["tokens"].dtype == np.uint16
    assert len(articles) == len(corpus["firsts"]) - 1 == 60 and corpus["starts"][-1] == len(whole)
    assert len(corpus["starts"]) - 1 == 60 * 3 * 4
    cache = os.stat(folder / "tokens.npz").st_mtime_ns
    spans.prepare(str(folder))
    assert os.stat(folder / "tokens.npz").st_mtime_ns == cache
    (folder / "corpus.txt").write_text("another\n\ntext\n", encoding="utf-8")
    assert len(spans.prepare(str(folder))[1]["tokens"]) < len(whole)


@pytest.mark.parametrize("rates", [(0.5, 0.05), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_spans_hold_every_token_once_start_sentences_and_stay_in_their_article(folder, monkeypatch, rates):
    monkeypatch.setattr(config, "SENTENCE_RATE", rates[0])
    monkeypatch.setattr(config, "LONG_RATE", rates[1])
    _, corpus = spans.prepare(str(folder))
    held = [i for i in range(60) if spans.held_out(i)]
    training = [i for i in range(60) if not spans.held_out(i)]
    assert len(held) == 6
    packed = {}
    for name, articles in (("held", held), ("training", training)):
        rng = np.random.default_rng(0)
        groups = spans.batches(spans.pack(corpus, articles, rng), rng)
        for batch in groups:
            assert len(set(batch[:, 1])) == 1 and len(batch) * (batch[0, 1] + 2) <= config.TOKENS_PER_STEP
        packed[name] = np.concatenate(groups)
    used = [i for begin, length in np.concatenate(list(packed.values())) for i in range(begin, begin + length)]
    assert sorted(used) == list(range(len(corpus["tokens"])))                       # each once, so none is in both
    bounds = corpus["starts"][corpus["firsts"]]
    for name, articles in (("held", held), ("training", training)):
        article = np.searchsorted(bounds, packed[name][:, 0], "right") - 1
        assert set(article) == set(articles)
        assert (packed[name].sum(1) <= bounds[article + 1]).all()
    lengths = np.concatenate(list(packed.values()))[:, 1]
    assert lengths.max() <= (46 if rates[1] else 22)
    sentences = set(zip(corpus["starts"][:-1], np.diff(corpus["starts"])))
    whole = np.mean([tuple(span) in sentences for span in packed["training"]])
    assert whole == 1 if rates[0] == 1 else whole < 0.9
    assert np.isin(packed["training"][:, 0], corpus["starts"]).all()


def test_a_sentence_longer_than_a_span_is_cut(folder):
    article = "Short one. " + "the river " * 50 + "end. Short two."
    (folder / "corpus.txt").write_text("\n\n".join([article] * 12), encoding="utf-8")
    _, corpus = spans.prepare(str(folder))
    packed = spans.pack(corpus, range(12), np.random.default_rng(0))
    assert packed[:, 1].sum() == len(corpus["tokens"]) and packed[:, 1].max() <= 46
    assert (packed[1:, 0] == packed[:-1].sum(1)).all()


def test_a_corpus_without_blank_lines_has_an_article_a_line(folder):
    (folder / "lines.txt").write_text("One sentence.\nAnother one.\nA third.\n", encoding="utf-8")
    assert spans.read_articles(str(folder / "lines.txt")) == [["One sentence."], ["Another one."], ["A third."]]


def test_masking_follows_bert(monkeypatch):
    monkeypatch.setattr(config, "MASK_RATE", 0.25)
    rng = np.random.default_rng(0)
    idx = rng.integers(spans.N_SPECIAL, 1000, (1000, 66))
    idx[:, 0], idx[:, -1] = spans.CLS, spans.SEP
    before = idx.copy()
    hidden, places, targets = spans.mask(idx, rng, 1000)
    rows = np.arange(1000)[:, None]
    assert (idx == before).all() and (targets == idx[rows, places]).all()
    assert places.shape == (1000, 16) and all(len(set(row)) == 16 for row in places)           # a quarter of every row
    assert set(places.flat) == set(range(1, 65))                                               # never [CLS] nor [SEP]
    assert np.ptp(np.bincount(places.flat)[1:65]) < 100                                        # everywhere alike: 250 +- 14
    untouched = np.ones(idx.shape, bool)
    untouched[rows, places] = False
    assert (hidden[untouched] == idx[untouched]).all()
    now = hidden[rows, places]
    masked, same = now == spans.MASK, now == targets
    assert masked.mean() == pytest.approx(0.8, abs=0.015) and same.mean() == pytest.approx(0.1, abs=0.012)
    replaced = now[~masked & ~same]
    assert len(replaced) / now.size == pytest.approx(0.1, abs=0.012) and replaced.min() >= spans.N_SPECIAL
    assert len(set(replaced)) > 700                                                             # from all of the vocabulary
    assert spans.mask(np.array([[spans.CLS, 7, spans.SEP]]), rng, 1000)[1].tolist() == [[1]]    # one token: it is hidden


# ---------------------------------------------------------------------------- the model

@pytest.fixture
def model(folder):
    tokenizer, corpus = spans.prepare(str(folder))
    encoder, head = pretrain.new_encoder(tokenizer, corpus)
    return encoder, head, corpus


def test_only_masked_positions_enter_the_loss(model):
    encoder, head, corpus = model
    encoder.eval()
    rng = np.random.default_rng(0)
    idx = rng.integers(spans.N_SPECIAL, encoder.shape["vocab_size"], (4, 12))
    masked = spans.mask(idx, rng, encoder.shape["vocab_size"])
    logits, targets, cls_logits = pretrain.predict(encoder, head, masked)
    assert logits.shape == (*masked[1].shape, encoder.shape["vocab_size"]) and targets.tolist() == masked[2].tolist()
    hidden = encoder(torch.from_numpy(masked[0]), torch.ones(4, 12))
    everywhere = head(hidden, encoder.token_embedding.weight)                       # (4, 12, V)
    torch.testing.assert_close(logits, everywhere[torch.arange(4)[:, None], torch.from_numpy(masked[1])])
    torch.testing.assert_close(cls_logits, hidden[:, 0] @ encoder.token_embedding.weight.T + head.bias)


def test_bag_of_words_loss_by_hand():
    torch.manual_seed(0)
    logits, idx = torch.randn(3, 20, dtype=torch.float64), torch.randint(20, (3, 6))
    for weight in (torch.ones(20, dtype=torch.float64), torch.rand(20, dtype=torch.float64) + 0.01):
        total = weights = 0.0
        for b in range(3):
            for t in range(1, 5):                       # neither [CLS] nor [SEP]
                at = idx[b, t]
                p = weight[at] * math.exp(logits[b, at]) / sum(w * math.exp(x) for w, x in zip(weight, logits[b]))
                total, weights = total - weight[at] * math.log(p), weights + weight[at]
        assert pretrain.bag_of_words_loss(logits, idx, weight).item() == pytest.approx((total / weights).item(), abs=1e-12)


def test_a_cls_that_says_nothing_guesses_the_weighted_frequencies(folder):
    """With all-zero [CLS] the distribution is frequency x weight, the best single guess: its loss is the entropy of that."""
    corpus = {"tokens": np.array([5, 5, 5, 6, 6, 7], np.uint16)}
    p = spans.frequencies(corpus, 8).double()
    assert p.tolist() == pytest.approx([1 / 14] * 5 + [4 / 14, 3 / 14, 2 / 14])
    weight = 0.1 / (0.1 + p)
    idx = torch.tensor([[0, *[t for t, n in enumerate((1, 1, 1, 1, 1, 4, 3, 2)) for _ in range(n)], 0]])      # drawn as p says
    q = p * weight / (p * weight).sum()
    assert pretrain.bag_of_words_loss(p.log()[None], idx, weight).item() == pytest.approx(-(q * q.log()).sum().item())


@pytest.mark.parametrize("shape", [{"n_embd": 256, "n_head": 8}, {"n_embd": 128, "n_head": 4}, {"n_embd": 64, "n_head": 2}])
def test_the_neighbour_heads_look_where_they_should(model, shape):
    tokenizer = model[0].tokenizer
    torch.manual_seed(0)
    encoder = SimCSEEncoder(tokenizer, n_layer=2, **shape).eval()
    pretrain.show_neighbours(encoder)
    T = 40
    idx = torch.randint(spans.N_SPECIAL, tokenizer.get_vocab_size(), (8, T))
    inputs = []
    for block in encoder.blocks:
        block.attention.register_forward_hook(lambda module, args, output: inputs.append((module, args[0])))
    with torch.no_grad():
        encoder(idx, None)
    for attention, x in inputs:
        q, k = (layer(x).view(8, T, shape["n_head"], -1).transpose(1, 2) for layer in (attention.query, attention.key))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5                       # (8, heads, T, T)
        for head, offset in enumerate((-1, 1, -2, 2)[:shape["n_head"]]):
            places = torch.arange(max(0, -offset), T - max(0, offset))
            aimed = scores[:, head, places, places + offset]
            assert (scores[:, head, places].argmax(-1) == places + offset).float().mean() > 0.99
            assert 2 < aimed.mean() < 5
            others = (scores[:, head, places].sum(-1) - aimed) / (T - 1)
            assert others.abs().mean() < 0.5


def test_the_folder_loads_in_transformers_with_its_head(model, folder):
    transformers = pytest.importorskip("transformers")
    encoder, head, corpus = model
    with torch.no_grad():
        for p in [*encoder.parameters(), *head.parameters()]:                       # no weight may be left at its start
            p.add_(0.05 * torch.randn_like(p)).copy_(p.half())
    pretrain.save_encoder(str(folder / "mlm"), encoder, head)
    theirs, report = transformers.BertForMaskedLM.from_pretrained(str(folder / "mlm"), output_loading_info=True,
                                                                  dtype=torch.float32)
    assert not any(report.values()), report
    encoder.eval()
    theirs.eval()
    idx, attention_mask = encoder.tokenize(["The old king saw the river 7.", "A [MASK] town."])
    with torch.no_grad():
        ours = head(encoder(idx, attention_mask), encoder.token_embedding.weight)
        logits = theirs(idx, attention_mask.long()).logits
    torch.testing.assert_close(ours[attention_mask], logits[attention_mask], atol=1e-4, rtol=1e-4)
    again = SimCSEEncoder.from_pretrained(str(folder / "mlm")).eval()               # SimCSE's start leaves the head out
    torch.testing.assert_close(again(idx, attention_mask), encoder(idx, attention_mask))
    assert again.shape == encoder.shape


# ---------------------------------------------------------------------------- the run

def test_a_run_learns_and_says_so(folder, capsys, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 24_000)
    monkeypatch.setattr(config, "VALIDATION_INTERVAL", 12_000)
    monkeypatch.setattr(config, "WARMUP_TOKENS", 1_000)
    pretrain.main()
    first, last = rows(folder / "mlm")
    assert float(last["loss"]) < float(first["loss"]) < np.log(300) and float(last["train_loss"]) < float(first["train_loss"])
    assert 0 < float(last["accuracy"]) < 1 and last["stsb_cls"] == ""               # no STS-B there
    assert (folder / "mlm" / "curves.png").stat().st_size > 1000
    assert "the capital of france is [MASK]" in capsys.readouterr().out
    stored = checkpoint.read_json(str(folder / "mlm"), "pretraining.json")
    assert stored["tokens"] >= 24_000 and str(folder) not in str(stored)            # nothing of the machine it ran on
    with pytest.raises(ValueError, match="RESUME=True"):
        pretrain.main()
    monkeypatch.setattr(config, "RESUME", True)
    monkeypatch.setattr(config, "MASK_RATE", 0.4)
    with pytest.raises(ValueError, match="MASK_RATE"):
        pretrain.main()
    monkeypatch.setattr(config, "MLM_FOLDER", str(folder / "other"))
    with pytest.raises(ValueError, match="no run"):
        pretrain.main()


def test_the_learning_rate_climbs_stays_and_falls(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 100_000)
    rates = [pretrain.learning_rate(tokens) / config.MLM_LEARNING_RATE for tokens in (0, 500, 1_000, 79_000, 90_000, 99_999)]
    assert 0 < rates[0] < rates[1] < 1 == rates[2] == rates[3] and rates[4] == pytest.approx(0.5) and 0 < rates[5] < 0.001


def test_validation_is_the_same_every_time(model):
    encoder, head, corpus = model
    rng = np.random.default_rng(1)
    masked = [spans.mask(spans.rows_of(batch, corpus["tokens"]), rng, encoder.shape["vocab_size"])
              for batch in spans.batches(spans.pack(corpus, range(6), rng), rng)[:4]]
    encoder.dropout = 0.5
    assert pretrain.validate(encoder, head, masked) == pretrain.validate(encoder, head, masked)
    assert encoder.training


def test_a_killed_run_goes_on_to_the_same_bytes(folder, monkeypatch):
    curves = {}
    monkeypatch.setattr(pretrain, "keep_metrics", curves.__setitem__)               # drawing takes a second
    monkeypatch.setattr(config, "MLM_FOLDER", str(folder / "whole"))
    pretrain.main()
    monkeypatch.setattr(config, "SAVE_MINUTES", 0.0)                                # from here on after every step
    knobs = [f"{name}={getattr(config, name)}" for name in [*KNOBS, "PRETRAIN_CORPUS", "SAVE_MINUTES"]]
    process = subprocess.Popen([sys.executable, os.path.join(HERE, "pretrain.py"), f"MLM_FOLDER={folder / 'mlm'}", *knobs],
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not (folder / "mlm.run" / "state.pt").exists():
        time.sleep(0.001)
    process.kill()
    assert process.communicate()[1].count(b"error") == 0 and process.returncode == -signal.SIGKILL
    monkeypatch.setattr(config, "MLM_FOLDER", str(folder / "mlm"))
    monkeypatch.setattr(config, "RESUME", True)
    monkeypatch.setattr(config, "PRETRAIN_CORPUS", "gone.txt")                      # its tokens are kept
    saves = []

    def save_and_stop(*arguments, save=pretrain.save_state):
        saves.append(save(*arguments))
        if len(saves) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):          # the second time by a polite signal
        patch.setattr(pretrain, "save_state", save_and_stop)
        pretrain.main()
    assert len(saves) == 5 and not (folder / "mlm").exists()
    pretrain.main()
    assert (folder / "mlm" / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()
    ours, whole = ([row | {"hours": 0} for row in curves[str(folder / name)]] for name in ("mlm", "whole"))
    assert ours == whole and len(ours) == 2


def test_going_on_from_an_encoder(folder, monkeypatch):
    pretrain.main()
    (folder / "other.txt").write_text(text(30).replace("king", "queen"), encoding="utf-8")
    for name, value in {"MLM_INIT": str(folder / "mlm"), "MLM_FOLDER": str(folder / "more"), "N_EMBD": 32, "VOCAB_SIZE": 200,
                        "PRETRAIN_CORPUS": str(folder / "other.txt")}.items():
        monkeypatch.setattr(config, name, value)
    encoder, head = pretrain.given_encoder()
    stored = load_file(folder / "mlm" / "model.safetensors")            # what transformers reads, see the test above
    ours = {"bert." + checkpoint.hugging_face_name(name): tensor for name, tensor in encoder.state_dict().items()
            if "mlp_head" not in name} | head.weights()
    assert ours.keys() == stored.keys() and all(torch.equal(ours[name], stored[name].float()) for name in stored)
    pretrain.main()
    assert float(rows(folder / "more")[0]["train_loss"]) < float(rows(folder / "mlm")[-1]["train_loss"])        # not begun again
    for name in ("tokenizer.json", "vocab.txt", "config.json"):
        assert (folder / "more" / name).read_bytes() == (folder / "mlm" / name).read_bytes()
    settings = checkpoint.read_json(str(folder / "more"), "pretraining.json")["settings"]
    assert (settings["N_EMBD"], settings["VOCAB_SIZE"]) == (64, encoder.shape["vocab_size"])


def test_a_stopped_run_that_went_on_from_an_encoder_goes_on_without_it(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 2_000)
    pretrain.main()
    for name, value in {"MLM_INIT": str(folder / "mlm"), "MLM_FOLDER": str(folder / "whole"), "N_EMBD": 32}.items():
        monkeypatch.setattr(config, name, value)
    pretrain.main()
    monkeypatch.setattr(config, "MLM_FOLDER", str(folder / "more"))
    monkeypatch.setattr(config, "SAVE_MINUTES", 0.0)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(pretrain, "validate", lambda *_: 1 / 0)         # dies at the end, with the state of the step before
        pretrain.main()
    monkeypatch.setattr(config, "RESUME", True)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="begun with MLM_INIT="):
        patched.setattr(config, "MLM_INIT", "")
        pretrain.main()
    tokens = folder / "more.run" / "tokens.npz"
    tokens.rename(folder / "kept.npz")
    with pytest.raises(FileNotFoundError, match="no .*tokens.npz any more"):
        pretrain.main()
    assert not tokens.exists()
    (folder / "kept.npz").rename(tokens)
    shutil.rmtree(folder / "mlm")
    pretrain.main()
    assert (folder / "more" / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()


def test_a_run_is_not_resumed_over_the_tokens_of_another(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 1_000)
    pretrain.main()
    (folder / "corpus.txt").write_text(text(30), encoding="utf-8")
    spans.prepare(str(folder / "mlm.run"))                              # a new run that got no further than its tokens
    monkeypatch.setattr(config, "RESUME", True)
    with pytest.raises(ValueError, match="of another text than tokens.npz.*OVERWRITE=True"):
        pretrain.main()


def test_a_damaged_state_is_refused(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 1_000)
    pretrain.main()
    monkeypatch.setattr(config, "RESUME", True)
    path, rng = folder / "mlm.run" / "state.pt", random.Random(0)
    whole = path.read_bytes()
    weights = whole.index(torch.load(path, weights_only=True)["encoder"]["token_embedding.weight"].numpy().tobytes())
    for at in (weights + 1000, *(rng.randrange(len(whole)) for _ in range(40))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1:])
        try:
            pretrain.main()                                             # a bit that nobody reads
            assert at != weights + 1000
        except ValueError as error:
            assert re.match(r".*state.pt can't be resumed \(.*\); OVERWRITE=True begins again$", str(error))
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="state.pt can't be resumed"):
        pretrain.main()


def test_an_encoder_that_cannot_go_on(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 1_000)
    pretrain.main()
    before = (folder / "mlm.run" / "tokens.npz").read_bytes()
    monkeypatch.setattr(config, "OVERWRITE", True)
    monkeypatch.setattr(config, "PRETRAIN_CORPUS", str(folder / "gone.txt"))
    shutil.copytree(folder / "mlm", folder / "given")
    monkeypatch.setattr(config, "MLM_INIT", str(folder / "given"))
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="give N_POSITIONS=48"):
        patched.setattr(config, "N_POSITIONS", 64)
        pretrain.main()
    vocab = (folder / "given" / "vocab.txt").read_text(encoding="utf-8").split("\n")
    (folder / "given" / "tokenizer.json").unlink()
    (folder / "given" / "vocab.txt").write_text("\n".join(vocab[5:9] + vocab[:5] + vocab[9:]), encoding="utf-8")
    with pytest.raises(ValueError, match="its vocabulary does not begin with"):     # BERT-base's, say
        pretrain.main()
    weights = load_file(folder / "given" / "model.safetensors")
    del weights["cls.predictions.bias"]
    (folder / "given" / "model.safetensors").write_bytes(to_safetensors(weights))   # as train.py leaves it, with no head
    with pytest.raises(ValueError, match="no weight cls.predictions.bias"):
        pretrain.main()
    assert (folder / "mlm.run" / "state.pt").exists() and (folder / "mlm.run" / "tokens.npz").read_bytes() == before


def test_what_is_there_is_not_lost_to_a_mistake(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 1_000)
    (folder / "mlm").mkdir()
    (folder / "mlm" / "config.json").write_text("somebody's encoder")
    with pytest.raises(ValueError, match="holds an encoder: name another folder with MLM_FOLDER="):
        pretrain.main()
    assert [path.name for path in folder.iterdir() if "mlm" in path.name] == ["mlm"]
    monkeypatch.setattr(config, "OVERWRITE", True)
    pretrain.main()
    state = (folder / "mlm.run" / "state.pt").read_bytes()
    with monkeypatch.context() as patched, pytest.raises(FileNotFoundError):
        patched.setattr(config, "PRETRAIN_CORPUS", str(folder / "typo.txt"))
        pretrain.main()
    assert (folder / "mlm.run" / "state.pt").read_bytes() == state
    monkeypatch.setattr(config, "OVERWRITE", False)
    monkeypatch.setattr(config, "RESUME", True)
    pretrain.main()                                         # finished: the encoder is written once more
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="MAX_TOKENS=500 asks for no more"):
        progress = torch.load(folder / "mlm.run" / "state.pt", weights_only=True)
        progress["progress"]["history"] = []                # as it is before the first validation
        torch.save(progress, folder / "mlm.run" / "state.pt")
        patched.setattr(config, "MAX_TOKENS", 500)
        pretrain.main()


def test_the_shipped_encoder_is_refused_from_wherever_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mlm_encoder", "mlm_encoder/"):
        monkeypatch.setattr(config, "MLM_FOLDER", f"checkpoints/{name}")
        with pytest.raises(ValueError, match="mlm_encoder holds an encoder: name another folder"):
            pretrain.main()
    assert not list(tmp_path.iterdir())


def test_a_state_that_does_not_fit_in_memory_is_not_called_damaged(folder, monkeypatch):
    monkeypatch.setattr(config, "MAX_TOKENS", 1_000)
    pretrain.main()
    monkeypatch.setattr(config, "RESUME", True)
    monkeypatch.setattr(config, "MAX_TOKENS", 2_000)
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        def fail(*_, error=error, **__):
            raise error
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(pretrain, "make_optimizer", fail)
            pretrain.main()
    pretrain.main()


def test_damaged_tokens_are_made_anew_or_refused(folder):
    _, corpus = spans.prepare(str(folder))
    (folder / "tokens.npz").write_bytes((folder / "tokens.npz").read_bytes()[:500])
    with pytest.raises(ValueError, match="tokens.npz can't be read .*OVERWRITE=True"):
        spans.prepare(str(folder), keep=True)
    _, again = spans.prepare(str(folder))
    assert (again["tokens"] == corpus["tokens"]).all()


@pytest.mark.parametrize("name, content, message", [
    ("none.txt", None, "download_data.py"), ("line.txt", b"one line only", "too little"),
    ("cut.gz", b"\x1f\x8b\x08cut", "damaged")])
def test_a_corpus_that_is_none_is_one_line(folder, monkeypatch, name, content, message):
    if content:
        (folder / name).write_bytes(content)
    monkeypatch.setattr(config, "PRETRAIN_CORPUS", str(folder / name))
    with pytest.raises((ValueError, OSError), match=message) as error:
        pretrain.main()
    assert "\n" not in str(error.value)
