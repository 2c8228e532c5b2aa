"""evaluate.py: the protocol, Spearman's correlation, the geometry, and the table that it prints."""

import math
import os
import shutil
import time
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file, save_file

import config
import evaluate
import train
from model import SimCSEEncoder
from support import files, runs
from support.baselines import bag_of_words
from support.command_line import run
from support.tokenizer import train_tokenizer
from tests.conftest import SHARED, sample_sentences


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return SimCSEEncoder(train_tokenizer(sample_sentences(), 300), n_layer=1, n_embd=32, n_head=2)


@pytest.fixture
def real_stsb(tmp_path, monkeypatch):
    """STS-B itself, where it is at hand."""
    if not (SHARED / "stsb").is_dir():
        pytest.skip("needs STS-B")
    monkeypatch.setattr(files, "DATA", SHARED)
    evaluate.load_sts_b.cache_clear()
    yield
    evaluate.load_sts_b.cache_clear()


def write_pairs(workshop, rows):
    lines = ["sentence1,sentence2,score", *(f"{one},{two},{score}" for one, two, score in rows)]
    (workshop / "data" / "stsb" / "validation.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    evaluate.load_sts_b.cache_clear()


def table(capsys):
    """The lines that evaluate.py prints."""
    capsys.readouterr()
    evaluate.main()
    return capsys.readouterr().out.splitlines()


# ---- the protocol


def test_dropout_off_head_off_order_and_mode_kept(encoder):
    sentences = sample_sentences()[:70]  # more than a batch, of different lengths
    for mode in (True, False):
        encoder.train(mode)
        first, again = (evaluate.encode_sentences(encoder, sentences) for _ in range(2))
        assert encoder.training is mode and all(module.training is mode for module in encoder.modules())
        assert first.shape == (70, 32) and first.dtype == np.float32 and (first == again).all()
    with torch.no_grad():
        encoder.mlp_head.dense.weight.fill_(math.nan)  # the head is not even looked at
    assert (evaluate.encode_sentences(encoder, sentences) == first).all()
    encoder.eval()
    for sentence, embedding in zip(sentences, first, strict=True):
        with torch.no_grad():
            alone = encoder.encode(*encoder.tokenize([sentence]))[0].numpy()
        assert np.abs(alone - embedding).max() < 1e-5
    assert evaluate.encode_sentences(encoder, []).shape == (0, 32)
    assert (evaluate.encode_sentences(encoder, tuple(sentences), device="cpu") == first).all()


def test_embeddings_are_float32_whatever_training_computes_in(encoder, monkeypatch):
    found = []
    for precision in ("float32", "bfloat16"):
        monkeypatch.setattr(config, "PRECISION", precision)
        found.append(evaluate.encode_sentences(encoder, sample_sentences()[:20]))
    assert (found[0] == found[1]).all()


def ranks(values):
    """Ranks by counting: ties share the mean of theirs."""
    return [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]


def test_spearman_is_over_cosines_with_ties_at_mean_ranks(workshop):
    """Embeddings made by hand, of any length, of which some cosines tie; the correlation by counting and by scipy."""
    rng = np.random.default_rng(0)
    angles = rng.integers(0, 12, 60) * np.pi / 12
    emb1 = np.stack([np.ones(60), np.zeros(60)], axis=1) * 4.0
    emb2 = np.stack([np.cos(angles), np.sin(angles)], axis=1) * 2.0 ** rng.integers(-2, 3, (60, 1))
    scores = rng.integers(0, 6, 60)
    write_pairs(workshop, [(f"a {i}", f"b {i}", score) for i, score in enumerate(scores)])
    pair = emb1.astype(np.float32), emb2.astype(np.float32)
    found = evaluate.evaluate_stsb(None, embeddings=pair)
    # float32 cosines of one angle may lie a rounding apart, so the ranks of equal ones need not be quite equal
    by_count = 100 * np.corrcoef(ranks(np.round(-angles, 6)), ranks(scores))[0, 1]
    assert found == pytest.approx(by_count, abs=1.0)
    cosines = torch.nn.functional.cosine_similarity(*map(torch.from_numpy, pair)).numpy()
    assert found == pytest.approx(100 * scipy.stats.spearmanr(cosines, scores).statistic, abs=1.0)
    # without ties the ranks are exact
    angles = rng.permutation(60) * np.pi / 60
    emb2 = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    found = evaluate.evaluate_stsb(None, embeddings=(pair[0], emb2))
    assert found == pytest.approx(100 * np.corrcoef(ranks(-angles), ranks(scores))[0, 1], abs=1e-9)


def test_measure_takes_alignment_from_close_pairs_and_uniformity_from_all(workshop, encoder):
    with open(workshop / "data" / "stsb" / "validation.csv", "a", encoding="utf-8") as file:
        file.write(
            "A cat sleeps on a warm stone wall.,The dog next door barks.,4.0\n"
        )  # not above 4: no close pair
    sentences1, sentences2, scores = evaluate.load_sts_b()
    emb1, emb2 = (evaluate.encode_sentences(encoder, side).astype(float) for side in (sentences1, sentences2))
    h1, h2 = (emb / np.linalg.norm(emb, axis=1, keepdims=True) for emb in (emb1, emb2))
    points = np.concatenate([h1, h2])
    squares = [((points[i] - points[j]) ** 2).sum() for i in range(len(points)) for j in range(i)]
    result = evaluate.measure(encoder)
    assert list(result) == ["spearman", "alignment", "uniformity"]
    close = [((h1[i] - h2[i]) ** 2).sum() for i in range(len(scores)) if scores[i] > 4]
    assert 0 < len(close) < len(scores) and result["alignment"] == pytest.approx(np.mean(close), abs=1e-5)
    assert result["uniformity"] == pytest.approx(math.log(np.mean(np.exp(-2 * np.array(squares)))), abs=1e-4)
    by_count = 100 * np.corrcoef(ranks((h1 * h2).sum(axis=1)), ranks(scores))[0, 1]
    assert result["spearman"] == pytest.approx(by_count, abs=0.1) == evaluate.evaluate_stsb(encoder)


def test_without_a_close_pair_alignment_is_undefined(workshop, encoder):
    write_pairs(workshop, [("a man", "a woman", 1), ("a dog", "a cat", 2), ("one", "two", 3)])
    result = evaluate.measure(encoder)
    assert math.isnan(result["alignment"]) and math.isfinite(result["spearman"] + result["uniformity"])


def test_one_or_two_threads_give_the_same_score(workshop):
    threads, encoder = torch.get_num_threads(), train.starting_encoder(sample_sentences())
    results = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append(evaluate.measure(encoder)["spearman"])
    finally:
        torch.set_num_threads(threads)
    assert results[0] == pytest.approx(results[1], abs=5e-5)


@pytest.mark.parametrize(
    "content, said",
    [
        ("a,b,c\n1,2,3\n", "is not as download_data.py writes it"),
        ("sentence1,sentence2,score\nx,y,high\n", "is not as download_data.py writes it"),
        ("sentence1,sentence2,score\nx\n", "is not as download_data.py writes it"),
        ("\xff", "is not as download_data.py writes it"),
        ("sentence1,sentence2,score\n", "no two with different scores"),
        ("sentence1,sentence2,score\na b,c d,3.0\ne f,g h,3.0\n", "no two with different scores"),
        ("sentence1,sentence2,score\na,b,50\nc,d,1\n", "a score not from 0 to 5"),
        ("sentence1,sentence2,score\na,b,nan\nc,d,1\n", "a score not from 0 to 5"),
        ("sentence1,sentence2,score\n,b,2\nc,d,1\n", "has an empty sentence"),
    ],
)
def test_sts_b_changed_by_hand(workshop, content, said):
    (workshop / "data" / "stsb" / "validation.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"validation.csv .*{said}") as caught:
        evaluate.load_sts_b()
    assert "\n" not in str(caught.value)


# ---- what it prints


def test_sample_is_called_a_sample_on_every_line_and_so_are_the_tokens(workshop, capsys):
    config.RUN_NAME = "one"
    train.main()
    header, *lines = table(capsys)
    assert header.split() == ["encoder", "pooler", "tokens", "data", "Spearman", "alignment", "uniformity"]
    assert len(lines) == 4 and all(" sample, no benchmark, validation " in line for line in lines)
    one = str(workshop / "checkpoints" / "one")
    assert [line.split()[0] for line in lines] == ["start:", one, "bag", "TF-IDF"]
    for line, folder in zip(lines[:2], (one + "/start", one), strict=True):
        scores = evaluate.measure(SimCSEEncoder.from_pretrained(folder)).values()
        assert line.split()[-3:] == [
            f"{value:.{digits}f}" for value, digits in zip(scores, (2, 3, 3), strict=True)
        ]
        assert line.split(folder)[1].split()[:2] == ["cls", "64"]  # all positions of the tiny encoder
    sentences1, sentences2, scores = evaluate.load_sts_b()
    for line, tf_idf in zip(lines[2:], (False, True), strict=True):
        expected = scipy.stats.spearmanr(bag_of_words(sentences1, sentences2, tf_idf), scores).statistic
        assert line.split()[-1] == f"{100 * expected:.2f}"


def test_the_length_of_the_checkpoint_is_honoured_and_shown(workshop, encoder, capsys):
    long = "a man plays a guitar while "
    write_pairs(
        workshop, [(long + "x", long + "y", 1), ("a dog", "a cat", 2), ("one", "two", 3), ("a", "b", 5)]
    )
    encoder.max_seq_len = 5
    encoder.save_pretrained(workshop / "short")
    config.CHECKPOINT = str(workshop / "short")
    assert table(capsys)[1].split()[:3] == [config.CHECKPOINT, "cls", "5"]
    emb = evaluate.encode_sentences(
        SimCSEEncoder.from_pretrained(workshop / "short"), [long + "x", long + "y"]
    )
    assert np.abs(emb[0] - emb[1]).max() < 1e-6  # they differ behind the fifth token only


def test_constant_embeddings_are_undefined_in_the_table(workshop, encoder, capsys):
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
        encoder.blocks[0].ffn_norm.bias.fill_(1.0)  # every embedding is (1, 1, ...)
    encoder.save_pretrained(workshop / "flat")
    config.CHECKPOINT = str(workshop / "flat")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's, which the script leaves out as well
        assert table(capsys)[1].split()[-3:] == ["undefined", "0.000", "0.000"]
        assert math.isnan(evaluate.evaluate_stsb(encoder))


def test_the_newest_run_the_split_and_the_pooler_that_is_told(workshop, capsys):
    for config.RUN_NAME, config.SEED in (("old", 1), ("new", 2)):
        train.main()
    checkpoints = workshop / "checkpoints"
    os.utime(checkpoints / "old" / "run.json", (1, 1))
    shutil.copytree(
        checkpoints / "old", checkpoints / ".new.old"
    )  # what a kill may leave of a run being replaced
    os.utime(checkpoints / ".new.old" / "run.json", (time.time() + 9, time.time() + 9))
    config.SPLIT, config.EVAL_POOLER = "test", "mean"
    start, run = table(capsys)[1:3]
    for line, folder in ((start, "new/start"), (run, "new")):
        encoder = SimCSEEncoder.from_pretrained(checkpoints / folder, pooler="mean")
        words = line.split()
        assert (
            f"{evaluate.evaluate_stsb(encoder, 'test'):.2f}" in words and "mean" in words and "test" in words
        )
    assert runs.newest_run() == checkpoints / "new"


def test_where_there_is_no_run(workshop):
    with pytest.raises(FileNotFoundError, match="no run in .*python train.py"):
        evaluate.main()
    (workshop / "checkpoints" / "begun").mkdir(parents=True)  # one without an encoder is none
    (workshop / "checkpoints" / "begun" / "run.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no run in .*python train.py"):
        evaluate.main()
    shutil.rmtree(workshop / "data" / "stsb")
    with pytest.raises(FileNotFoundError, match="download_data.py"):
        evaluate.load_sts_b()


def test_weights_that_are_not_finite_are_refused(workshop, encoder, monkeypatch, capsys):
    encoder.save_pretrained(workshop / "sick")
    weights = load_file(workshop / "sick" / "model.safetensors")
    name = "encoder.layer.0.intermediate.dense.weight"
    weights[name][3, 4] = math.nan
    save_file(weights, workshop / "sick" / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("sys.argv", ["evaluate.py", f"CHECKPOINT={workshop / 'sick'}"])
    with pytest.raises(SystemExit) as stopped:
        run(evaluate.main, "evaluate.py", [config], evaluate.KNOBS)
    said = capsys.readouterr().err
    assert stopped.value.code == 1 and said.startswith("error: ") and said.count("\n") == 1 and name in said


# ---- the floors


@pytest.mark.parametrize("split, bag, tf_idf", [("validation", 58.7, 76.2), ("test", 49.4, 70.0)])
def test_floors(split, bag, tf_idf, real_stsb):
    sentences1, sentences2, scores = evaluate.load_sts_b(split)
    for weighted, expected in ((False, bag), (True, tf_idf)):
        cosines = bag_of_words(sentences1, sentences2, weighted)
        assert scipy.stats.spearmanr(cosines, scores).statistic * 100 == pytest.approx(expected, abs=0.05)


def test_bag_of_words_by_hand():
    one, two = bag_of_words(["A cat, a dog!", "x"], ["the dog", "y"])
    assert one == pytest.approx(1 / math.sqrt(4 + 1 + 1) / math.sqrt(2)) and two == 0
    idf = math.log(4 / 2)  # "dog" in two of the four sentences, the others in one
    (one, two) = bag_of_words(["A cat, a dog!", "x"], ["the dog", "y"], tf_idf=True)
    rare = math.log(4)
    expected = idf**2 / math.sqrt((2 * rare) ** 2 + rare**2 + idf**2) / math.sqrt(rare**2 + idf**2)
    assert one == pytest.approx(expected) and two == 0
    assert bag_of_words(["..."], ["..."])[0] == 0  # no words at all
