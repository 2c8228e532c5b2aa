"""The floor: what counting words gives, without any encoder."""

import math
import re
from collections import Counter

import numpy as np


def bag_of_words(sentences1, sentences2, tf_idf=False):
    """Cosines of the pairs' word counts, lower-cased, or of tf-idf weights whose idf is of these same sentences.

    Two lists of N strings. Returns a float array (N,).
    """
    bags = [Counter(re.findall(r"\w+", sentence.lower())) for sentence in [*sentences1, *sentences2]]
    if tf_idf:
        df = Counter(word for bag in bags for word in bag)
        bags = [{word: n * math.log(len(bags) / df[word]) for word, n in bag.items()} for bag in bags]
    norms = [math.sqrt(sum(weight**2 for weight in bag.values())) or 1.0 for bag in bags]
    n = len(sentences1)
    cosines = np.zeros(n)
    for i in range(n):
        dot = sum(weight * bags[n + i].get(word, 0) for word, weight in bags[i].items())
        cosines[i] = dot / (norms[i] * norms[n + i])
    return cosines
