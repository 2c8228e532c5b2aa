"""The seven STS tasks of the paper: where they come from, how many pairs they have, and what others have scored."""

from typing import NamedTuple


class Task(NamedTuple):
    """Where a task's pairs come from, and how many there are."""

    file: str  # its name in a folder of one's own, less .csv
    repo: str  # the dataset on the Hub whose split "test" is scored
    pairs: int  # in the paper


TASKS = {
    "STS12": Task("sts12", "mteb/sts12-sts", 3108),
    "STS13": Task("sts13", "mteb/sts13-sts", 1500),
    "STS14": Task("sts14", "mteb/sts14-sts", 3750),
    "STS15": Task("sts15", "mteb/sts15-sts", 3000),
    "STS16": Task("sts16", "mteb/sts16-sts", 1186),
    "STS-B": Task("stsb", "", 1379),  # the test split, which download_data.py has fetched
    "SICK-R": Task(
        "sickr", "mteb/sickr-sts", 4927
    ),  # the paper's is the test part, the Hub's are all 9,927 pairs
}

# Spearman x 100 over all pairs of a task, in the order of TASKS, then the average as printed there.
# Source: SimCSE (Gao et al., 2021), Table 5: the unsupervised rows up to the size of BERT-base
PUBLISHED = {
    "GloVe, averaged": (55.14, 70.66, 59.73, 68.25, 63.66, 58.02, 53.76, 61.32),
    "BERT-base, first-last average": (39.70, 59.38, 49.67, 66.03, 66.19, 53.87, 62.06, 56.70),
    "BERT-base-flow": (58.40, 67.10, 60.85, 75.16, 71.22, 68.66, 64.47, 66.55),
    "BERT-base-whitening": (57.83, 66.90, 60.90, 75.08, 71.31, 68.24, 63.73, 66.28),
    "IS-BERT-base": (56.77, 69.24, 61.21, 75.23, 70.16, 69.21, 64.25, 66.58),
    "CT-BERT-base": (61.63, 76.80, 68.47, 77.50, 76.48, 74.31, 69.19, 72.05),
    "SimCSE-BERT-base": (68.40, 82.41, 74.38, 80.91, 78.56, 76.85, 72.23, 76.25),
}
