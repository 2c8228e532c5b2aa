"""experiments/map.py: the directions against a reference, the choice of topics, and a picture that is whole."""

import struct

import numpy as np
import pytest
import torch
from scipy.linalg import eigh

import config
import train
from experiments import map as space
from model import SimCSEEncoder
from support.tokenizer import train_tokenizer
from tests.conftest import sample_sentences


@pytest.fixture
def results(workshop, monkeypatch):
    monkeypatch.setattr(space, "RESULTS", workshop / "results")
    return workshop / "results"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures, original = [], space.files.save_figure

    def save(figure, path):
        figures.append(figure)
        original(figure, path)

    monkeypatch.setattr(space.files, "save_figure", save)
    return figures


def topic_sentences(n):
    music = [f"The band recorded song number {i} in the old town." for i in range(n)]
    war = [f"Troops of army {i} marched through the old town." for i in range(n)]
    return music, war


def write_sentences(workshop, sentences):
    (workshop / "data" / "sentences.txt").write_text("\n".join(sentences), encoding="utf-8")


def size_of(path):
    """Width and height of a PNG, by its header."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", content[16:24])


def test_the_directions_are_the_eigenvectors_of_the_covariance():
    generator = np.random.default_rng(0)
    embeddings = generator.normal(size=(200, 5)) * [1, 5, 0.5, 3, 2] + [10, 20, 30, 40, 50]
    points, shares = space.principal_directions(embeddings)
    values, vectors = eigh(np.cov(embeddings.T))
    expected = (embeddings - embeddings.mean(axis=0)) @ vectors[:, [-1, -2]]
    for ours, theirs in zip(points.T, expected.T, strict=True):  # a direction has no sign
        assert min(np.abs(ours - theirs).max(), np.abs(ours + theirs).max()) < 1e-9
    assert shares == pytest.approx(values[[-1, -2]] / values.sum())


def test_a_topic_takes_two_words_of_its_own(capsys):
    music, war = topic_sentences(100)
    mixed = ["The army band played a song for the troops."] * 50
    unclear = ["A song was heard."] * 50
    plain = [f"House {i} is red." for i in range(300)]
    found = space.sentences_by_topic([*mixed, *unclear, *plain, *war, *music])
    assert found == {"music": music[:60], "war": war[:60], "no topic": plain[:180]}
    said = capsys.readouterr().out
    left_out = [topic for topic in space.TOPICS if f": {topic} (0)" in said]
    assert left_out == ["sport", "living things", "astronomy", "medicine"]


def test_no_word_belongs_to_two_topics():
    words = [word for keywords in space.TOPICS.values() for word in keywords.split()]
    assert len(words) == len(set(words)) and all(word == word.lower() for word in words)


def test_a_start_and_a_run_side_by_side(results, workshop, drawn):
    music, war = topic_sentences(20)
    write_sentences(workshop, [*music, *war, *(f"House {i} is red." for i in range(40))])
    config.LEARNING_RATE, config.RUN_NAME, config.PRECISION = 1e-2, "one", "float32"
    train.main()
    drawn.clear()
    space.main()
    assert size_of(results / "map.png") == (1100, 950)
    start_map, run_map, start_cosines, run_cosines = drawn[0].axes
    assert start_map.get_title().startswith("start: ") and run_map.get_title().endswith("one")
    for axis in (start_map, run_map):  # a cloud of points a topic, on one scale
        sizes = {cloud.get_label(): len(cloud.get_offsets()) for cloud in axis.collections}
        assert sizes == {"music": 20, "war": 20, "no topic": 40}
        assert axis.get_xlim() == axis.get_ylim() == start_map.get_xlim()
    for axis in (start_cosines, run_cosines):
        assert axis.get_title() == "sample, no benchmark, validation"
        for bars in axis.containers:  # densities: every histogram has an area of 1, so no pair lies outside
            assert sum(bar.get_height() * bar.get_width() for bar in bars) == pytest.approx(1)
    heights = [
        [bar.get_height() for bars in axis.containers for bar in bars]
        for axis in (start_cosines, run_cosines)
    ]
    assert len(heights[0]) == len(heights[1]) == 2 * 40 and heights[0] != heights[1]


def test_one_encoder_by_itself_and_a_text_without_topics(results, workshop, drawn, capsys):
    write_sentences(workshop, [f"House {i} is red." for i in range(5)])
    torch.manual_seed(0)
    tokenizer = train_tokenizer(sample_sentences(), 300)
    SimCSEEncoder(tokenizer, n_layer=1, n_embd=32, n_head=2).save_pretrained(workshop / "tiny")
    config.CHECKPOINT = str(workshop / "tiny")
    space.main()
    assert size_of(results / "map.png") == (550, 950)
    assert capsys.readouterr().out.count("topic left out") == len(space.TOPICS)


def test_too_few_sentences(results, workshop):
    write_sentences(workshop, ["House 1 is red.", "House 2 is red."])
    with pytest.raises(ValueError, match="too few sentences to draw: 2"):
        space.main()
    assert not results.exists()
