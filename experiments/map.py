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


def draw_topics(axis, encoder, topics):
    """Every sentence as a point along the encoder's two principal directions, coloured by topic."""
    sentences = [sentence for chosen in topics.values() for sentence in chosen]
    topic_of = np.array([topic for topic, chosen in topics.items() for _ in chosen])
    embeddings = encode_sentences(encoder, sentences)  # (N, C)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    points, shares = principal_directions(embeddings)
    for i, topic in enumerate(topics):
        style = {"color": "lightgrey", "zorder": 1} if topic == OTHER else {"color": f"C{i}", "zorder": 2}
        axis.scatter(*points[topic_of == topic].T, s=12, label=topic, **style)
    axis.set(xlabel=f"direction 1: {shares[0]:.0%} of the variance", ylabel=f"direction 2: {shares[1]:.0%}")
    axis.set_aspect("equal")


def main():
    from matplotlib.figure import Figure  # slow to import

    device = pick_device(root_config.DEVICE)
    sentences1, sentences2, scores = load_sts_b("validation")
    topics = sentences_by_topic(load_text(files.DATA / "sentences.txt"))
    encoders = load_encoders(root_config.CHECKPOINT, root_config.EVAL_POOLER, device)
    kinds = {"close pairs (score above 4)": scores > 4, "distant pairs (score below 1)": scores < 1}
    cosines = {name: pair_cosines(encoder, sentences1, sentences2) for name, encoder in encoders.items()}
    bins = np.linspace(min(c.min() for c in cosines.values()), 1, 41)

    figure = Figure(figsize=(5.5 * len(encoders), 9), layout="constrained")
    axes = figure.subplots(2, len(encoders), sharex="row", sharey="row", squeeze=False)
    for column, (name, encoder) in enumerate(encoders.items()):
        top, bottom = axes[:, column]
        draw_topics(top, encoder, topics)
        top.set_title(name)
        for kind, chosen in kinds.items():
            values = cosines[name][chosen]
            if len(values):
                bottom.hist(values, bins, density=True, alpha=0.6, label=f"{kind}: mean {values.mean():.2f}")
        bottom.set(title=f"{stsb_label()}, validation", xlabel="cosine of the pair", ylabel="density")
        bottom.legend(loc="upper left")
    axes[0, 0].legend(loc="best")
    files.save_figure(figure, RESULTS / "map.png")
    counts = ", ".join(f"{len(chosen)} {topic}" for topic, chosen in topics.items())
    print(f"{counts} sentences, {len(scores):,} pairs: {files.shown(RESULTS / 'map.png')}")


if __name__ == "__main__":
    command_line.run(main, "-m experiments.map", [root_config, config], KNOBS)
