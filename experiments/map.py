"""What SimCSE does to the space, as a picture: an encoder before it and after it, side by side.

python -m experiments.map draws results/map.png. Above: sentences of data/sentences.txt along the two directions in
which their embeddings differ most, coloured by topic. Below: how the cosines of close and of distant pairs of STS-B
are spread. CHECKPOINT= names another run than the newest, or an encoder to draw by itself.
"""

import re
from pathlib import Path

import numpy as np

import config as root_config
from evaluate import encode_sentences, load_sts_b
from experiments import config
from experiments.inputs import load_encoders, load_text, pair_cosines
from support import command_line, files
from support.device import pick_device
from support.sources import stsb_label

KNOBS = ["CHECKPOINT", "EVAL_POOLER", "DEVICE"]
RESULTS = Path(__file__).resolve().parent / "results"

# a sentence is of a topic if it holds two of its words, and no two of another's
TOPICS = {
    "music": "album band bands composer concert guitar jazz lyrics music musical musician musicians opera orchestra "
    "piano recorded singer song songs symphony violin",
    "sport": "athlete athletes baseball basketball championship coach cricket football goals league match matches "
    "olympic player players season sport sports team teams tennis tournament",
    "war": "armies army attack battle battles cavalry commander enemy fleet forces infantry military navy siege "
    "soldiers tanks troops war weapons",
    "living things": "animal animals bird birds egg eggs feed female fish flowers forests genus habitat insects leaves "
    "mammals plants prey seeds species",
    "astronomy": "asteroid astronomers comet earth galaxies galaxy jupiter mars moon moons orbit orbits planet planets "
    "saturn solar star stars sun telescope",
    "medicine": "blood cancer cells clinical disease diseases doctors drug drugs hospital infection medical medicine "
    "pain patient patients surgery symptoms therapy treatment",
}
OTHER = "no topic"
SENTENCES = 60  # of a topic at most, and three times as many of none
FEWEST = 10  # of a topic, to be drawn


def sentences_by_topic(sentences):
    """The first SENTENCES of each topic, a dict from topic to list; topics of fewer than FEWEST are named, not drawn.

    "no topic" are sentences without a word of any.
    """
    found = {topic: [] for topic in [*TOPICS, OTHER]}
    for sentence in sentences:
        words = set(re.findall(r"\w+", sentence.lower()))
        hits = {topic: len(words.intersection(keywords.split())) for topic, keywords in TOPICS.items()}
        topics = [topic for topic in TOPICS if hits[topic] >= 2]
        if len(topics) == 1 and len(found[topics[0]]) < SENTENCES:
            found[topics[0]].append(sentence)
        elif not any(hits.values()) and len(found[OTHER]) < 3 * SENTENCES:
            found[OTHER].append(sentence)
    for topic in TOPICS:
        if len(found[topic]) < FEWEST:
            print(
                f"topic left out, as less than {FEWEST} sentences are of it: {topic} ({len(found.pop(topic))})"
            )
    return {topic: chosen for topic, chosen in found.items() if chosen}


def principal_directions(embeddings):
    """Where the embeddings (N, C), N >= 2, lie along the two directions in which they differ most.

    Returns the coordinates (N, 2), and the shares of the variance that lie along the two. Source: principal component
    analysis, by the singular value decomposition of what is left when the mean is taken away.
    """
    centred = embeddings - embeddings.mean(axis=0)
    left, singular_values, _ = np.linalg.svd(centred, full_matrices=False)
    variance = singular_values**2
    return left[:, :2] * singular_values[:2], variance[:2] / variance.sum()


def draw_topics(axis, points, shares, topics):
    """Every sentence as a point (N, 2), coloured by its topic; shares: of the variance, along the two directions."""
    topic_of = np.array([topic for topic, chosen in topics.items() for _ in chosen])
    for i, topic in enumerate(topics):
        style = {"color": "lightgrey", "zorder": 1} if topic == OTHER else {"color": f"C{i}", "zorder": 2}
        axis.scatter(*points[topic_of == topic].T, s=12, label=topic, **style)
    axis.set(xlabel=f"direction 1: {shares[0]:.0%} of the variance", ylabel=f"direction 2: {shares[1]:.0%}")


def draw_cosines(axis, cosines, scores, bins):
    """How the cosines (N,) of close and of distant pairs are spread, by the scores (N,) that people gave them."""
    kinds = {"close pairs (score above 4)": scores > 4, "distant pairs (score below 1)": scores < 1}
    for i, (kind, chosen) in enumerate(kinds.items()):
        if chosen.any():
            label = f"{kind}: mean {cosines[chosen].mean():.2f}"
            axis.hist(cosines[chosen], bins, density=True, alpha=0.6, color=f"C{i}", label=label)
    axis.set(title=f"{stsb_label()}, validation", xlabel="cosine of the pair", ylabel="density")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper left")


def main():
    from matplotlib.figure import Figure  # slow to import

    sentences1, sentences2, scores = load_sts_b("validation")
    topics = sentences_by_topic(load_text(files.DATA / "sentences.txt"))
    sentences = [sentence for chosen in topics.values() for sentence in chosen]
    if len(sentences) < 3:
        raise ValueError(f"{files.DATA / 'sentences.txt'} has too few sentences to draw: {len(sentences)}")
    points, shares, cosines = {}, {}, {}
    device = pick_device(root_config.DEVICE)
    for name, encoder in load_encoders(root_config.CHECKPOINT, root_config.EVAL_POOLER, device).items():
        embeddings = encode_sentences(encoder, sentences)  # (N, C)
        embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        points[name], shares[name] = principal_directions(embeddings)
        cosines[name] = pair_cosines(encoder, sentences1, sentences2)

    bins = np.linspace(min(values.min() for values in cosines.values()), 1, 41)
    edge = 1.05 * max(np.abs(values).max() for values in points.values())  # one scale, to compare by
    figure = Figure(figsize=(5.5 * len(points), 9.5), layout="constrained")
    axes = figure.subplots(2, len(points), sharex="row", sharey="row", squeeze=False)
    for name, (top, bottom) in zip(points, axes.T, strict=True):
        draw_topics(top, points[name], shares[name], topics)
        top.set(title=name, xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal")
        draw_cosines(bottom, cosines[name], scores, bins)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    files.save_figure(figure, RESULTS / "map.png")
    counts = ", ".join(f"{len(chosen)} {topic}" for topic, chosen in topics.items())
    print(f"sentences: {counts}; {len(scores):,} pairs; picture: {files.shown(RESULTS / 'map.png')}")


if __name__ == "__main__":
    command_line.run(main, "-m experiments.map", [root_config, config], KNOBS)
