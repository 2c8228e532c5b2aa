"""experiments/search.py: neighbours against brute force, the cache and what invalidates it, and clear refusals."""

import gzip
import os

import numpy as np
import pytest
import torch

import config
import experiments.config
import train
from evaluate import encode_sentences
from experiments import search
from experiments.inputs import load_text
from model import SimCSEEncoder
from support import files
from support.tokenizer import train_tokenizer
from tests.conftest import sample_sentences, script


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    tokenizer = train_tokenizer(sample_sentences(), 300)
    return SimCSEEncoder(tokenizer, n_layer=1, n_embd=32, n_head=2, n_positions=64)


@pytest.fixture
def encodings(monkeypatch):
    """The numbers of sentences that are encoded, call by call."""
    calls = []

    def counted(encoder, sentences):
        calls.append(len(sentences))
        return encode_sentences(encoder, sentences)

    monkeypatch.setattr(search, "encode_sentences", counted)
    return calls


def unit(embeddings):
    return embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)


# ---- the neighbours


@pytest.mark.parametrize("n, k", [(1, 1), (5, 10), (50, 7), (100, 100)])
def test_the_nearest_are_those_of_brute_force(n, k, monkeypatch):
    monkeypatch.setattr(search, "BLOCK", 8)  # several blocks, the last one not full, and some smaller than k
    generator = np.random.default_rng(n)
    embeddings = unit(generator.normal(size=(n, 16))).astype(np.float32)
    query = unit(generator.normal(size=16)).astype(np.float32)
    cosines, rows = search.nearest(embeddings, torch.from_numpy(query), k)
    every = [float(np.dot(row, query)) for row in embeddings]
    expected = sorted(range(n), key=lambda row: -every[row])[:k]
    assert rows == expected
    assert cosines == pytest.approx([every[row] for row in expected], abs=1e-6)


def test_before_and_after_side_by_side(workshop, monkeypatch, capsys):
    config.LEARNING_RATE, config.RUN_NAME, config.PRECISION = 1e-2, "one", "float32"
    train.main()
    query = sample_sentences()[3]
    monkeypatch.setattr(experiments.config, "QUERY", query)
    monkeypatch.setattr(experiments.config, "NEAREST", 3)
    monkeypatch.setenv("COLUMNS", "500")
    capsys.readouterr()
    search.main()
    *_, heading, first, second, third = capsys.readouterr().out.splitlines()
    halves = [heading[:248].strip(), heading[248:].strip()]
    assert halves[0].startswith("start: ") and halves[1].endswith("one")
    sentences = list(dict.fromkeys(sample_sentences()[:80]))
    folder = files.CHECKPOINTS / "one"
    for place, half in ((folder / "start", slice(0, 248)), (folder, slice(248, None))):
        embeddings = unit(encode_sentences(SimCSEEncoder.from_pretrained(place), sentences))
        cosines = embeddings @ embeddings[sentences.index(query)]
        for line, row in zip((first, second, third), np.argsort(-cosines), strict=False):
            cosine, _, sentence = line[half].strip().partition("  ")
            assert float(cosine) == pytest.approx(cosines[row], abs=6e-4) and sentence == sentences[row]


# ---- embeddings on the disk


def test_embeddings_are_encoded_once_and_mapped(workshop, encoder, encodings, monkeypatch):
    monkeypatch.setattr(search, "BLOCK", 16)
    sentences = sample_sentences()[:40]
    first = search.load_embeddings(sentences, encoder, "text.one")
    assert encodings == [16, 16, 8] and isinstance(first, np.memmap)
    assert np.abs(first - unit(encode_sentences(encoder, sentences))).max() < 1e-6
    encode_sentences(encoder, sentences[:2])  # which leaves padding and truncation set in the tokenizer
    assert np.array_equal(search.load_embeddings(sentences, encoder, "text.one"), first)
    assert len(encodings) == 3
    (path,) = (workshop / "data" / "embeddings").iterdir()
    assert np.array_equal(np.load(path), first)


def test_they_survive_saving_and_loading_the_encoder(workshop, encoder, encodings):
    encoder.save_pretrained(workshop / "one")
    for _ in range(2):  # the MLP head is new each time, and not used
        search.load_embeddings(["A.", "B."], SimCSEEncoder.from_pretrained(workshop / "one"), "text.one")
    assert encodings == [2]


def other_weight(encoder):
    with torch.no_grad():
        encoder.blocks[0].ffn_in.weight[3, 5] += 1e-3


def other_pooler(encoder):
    encoder.pooler = "mean"


def other_length(encoder):
    encoder.max_seq_len = 5


def other_heads(encoder):
    encoder.shape["n_head"] = 4


def other_tokenizer(encoder):
    encoder.tokenizer = train_tokenizer(sample_sentences()[:50], 300)


@pytest.mark.parametrize("change", [other_weight, other_pooler, other_length, other_heads, other_tokenizer])
def test_another_encoder_replaces_them(change, workshop, encoder, encodings):
    sentences = sample_sentences()[:4]
    search.load_embeddings(sentences, encoder, "text.one")
    search.load_embeddings(sentences, encoder, "text.two")  # is left alone
    change(encoder)
    embeddings = search.load_embeddings(sentences, encoder, "text.one")
    assert encodings == [4, 4, 4]
    assert np.abs(embeddings - unit(encode_sentences(encoder, sentences))).max() < 1e-6
    names = sorted(path.name for path in (workshop / "data" / "embeddings").iterdir())
    assert len(names) == 2 and names[0].startswith("text.one.") and names[1].startswith("text.two.")


@pytest.mark.parametrize("other", [["A.", "C."], ["A."], ["B.", "A."], ["A.", "B.", "C."]])
def test_another_text_replaces_them(other, workshop, encoder):
    search.load_embeddings(["A.", "B."], encoder, "text.one")
    embeddings = search.load_embeddings(other, encoder, "text.one")
    assert np.abs(embeddings - unit(encode_sentences(encoder, other))).max() < 1e-6
    assert len(list((workshop / "data" / "embeddings").iterdir())) == 1


def test_a_failure_leaves_nothing_half_written(workshop, encoder, monkeypatch):
    def broken(encoder, sentences):
        if sentences[0] == "9":
            raise KeyboardInterrupt
        return encode_sentences(encoder, sentences)

    monkeypatch.setattr(search, "encode_sentences", broken)
    monkeypatch.setattr(search, "BLOCK", 1)
    with pytest.raises(KeyboardInterrupt):
        search.load_embeddings([str(i) for i in range(20)], encoder, "text.one")
    assert not list((workshop / "data" / "embeddings").iterdir())


def test_damaged_embeddings_are_named(workshop, encoder):
    search.load_embeddings(sample_sentences()[:40], encoder, "text.one")
    (path,) = (workshop / "data" / "embeddings").iterdir()
    os.truncate(path, 1000)
    with pytest.raises(ValueError, match="is damaged: delete it"):
        search.load_embeddings(sample_sentences()[:40], encoder, "text.one")


# ---- text and command line


def test_the_lines_of_a_text(tmp_path):
    text = "\ufeffA  cat.\r\n\r\nA cat.\nUn caf\u00e9.\n   \nLast".encode() + b" \xe9."
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    for name in ("a.txt", "a.txt.gz"):
        assert load_text(tmp_path / name) == ["A cat.", "Un caf\u00e9.", "Last \u00e9."]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["A cat sleeps."], ["QUERY=A cat sleeps."]),
        (["A", "cat", "NEAREST=3", "sleeps."], ["QUERY=A cat sleeps.", "NEAREST=3"]),
        (["TEXT=my file.txt", "E = mc2"], ["QUERY=E = mc2", "TEXT=my file.txt"]),
        ([""], ["QUERY="]),
        (["nearest=3"], ["nearest=3"]),
        (["--help"], ["--help"]),
        (["QUERY=A cat."], ["QUERY=A cat."]),
        ([], []),
    ],
)
def test_a_sentence_needs_no_name(arguments, expected):
    assert search.with_query(arguments) == expected


@pytest.mark.parametrize(
    "knobs, said",
    [
        ({"QUERY": ""}, "there is no sentence to look for"),
        ({"QUERY": "  \t"}, "there is no sentence to look for"),
        ({"TEXT": "{folder}/nope.txt"}, "there is no {folder}/nope.txt$"),
        ({"TEXT": "{folder}"}, "there is no {folder}$"),
        ({"TEXT": "{folder}/empty.txt"}, "{folder}/empty.txt is empty"),
        ({"TEXT": "{folder}/blank.txt"}, "{folder}/blank.txt is empty"),
        ({"TEXT": "{folder}/zip.txt"}, "{folder}/zip.txt is "),
    ],
)
def test_what_can_not_be_searched_is_refused(knobs, said, workshop, monkeypatch):
    (workshop / "empty.txt").write_text("")
    (workshop / "blank.txt").write_text(" \n\n")
    (workshop / "zip.txt").write_bytes(b"PK\x03\x04" + bytes(100))
    for name, value in ({"QUERY": "A cat."} | knobs).items():
        monkeypatch.setattr(experiments.config, name, value.format(folder=workshop))
    with pytest.raises((ValueError, FileNotFoundError), match=said.format(folder=workshop)):
        search.main()


def test_without_data(workshop, monkeypatch):
    (workshop / "data" / "sentences.txt").unlink()
    monkeypatch.setattr(experiments.config, "QUERY", "A cat.")
    with pytest.raises(FileNotFoundError, match="run python download_data.py first"):
        search.main()


def test_errors_are_one_line_of_the_command(tmp_path):
    done = script("-m", "experiments.search", "A cat.", f"TEXT={tmp_path}/nope.txt")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: there is no {tmp_path}/nope.txt\n")
    done = script("-m", "experiments.search", "A cat.", "NEAREST=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: NEAREST must be a whole number of at least 1, not 0\n"
