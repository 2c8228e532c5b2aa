"""How far a score would move if other pairs had been drawn: the bootstrap (Efron, 1979)."""

import numpy as np


def bootstrap_spearman(x, y, resamples=1000, seed=0):
    """Spearman's correlation of N pairs (x, y) in each of many resamples: N of the pairs, drawn with replacement.

    Every resample is ranked anew, equal values by the mean of their ranks. Returns a float array (resamples,), nan
    where a resample holds one value alone. The same N and seed draw the same pairs, so that two encoders can be
    compared draw by draw. Takes some 0.1 s for 1,500 pairs.
    """
    x_values, x_of_pair = np.unique(
        x, return_inverse=True
    )  # the place of each pair among the different values
    y_values, y_of_pair = np.unique(y, return_inverse=True)
    random, n = np.random.default_rng(seed), len(x)
    correlations = np.empty(resamples)
    for i in range(resamples):
        times = np.bincount(random.integers(n, size=n), minlength=n)  # (N,) how often each pair was drawn
        x_ranks = centred_ranks(x_of_pair, len(x_values), times)
        y_ranks = centred_ranks(y_of_pair, len(y_values), times)
        spread = np.sqrt((times @ x_ranks**2) * (times @ y_ranks**2))
        correlations[i] = times @ (x_ranks * y_ranks) / spread if spread else np.nan
    return correlations


def centred_ranks(value_of_pair, values, times):
    """Ranks (N,) less their mean in a resample that holds pair i times[i] times; value_of_pair: 0 for the smallest."""
    copies = np.bincount(value_of_pair, times, minlength=values)  # (values,) how often each value was drawn
    ranks = np.cumsum(copies) - (copies - 1) / 2  # the mean of the ranks that its copies take
    return ranks[value_of_pair] - (len(times) + 1) / 2


def interval(values):
    """The bounds between which 95% of a bootstrap's values lie: two floats, nan where a value is."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
