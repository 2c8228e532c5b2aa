"""The paper's Table 5: seven STS tasks, Spearman x 100 over all pairs of a task, each with a 95% bootstrap interval.

python -m experiments.sts scores the newest run beside the encoder that it started from; CHECKPOINT= names another.
The tasks come from the Hub, or with STS=folder from sts12.csv to sts16.csv, stsb.csv and sickr.csv there (or .tsv);
where that has no stsb.csv, STS-B is data/stsb/test.csv.
"""

from collections import Counter
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from tqdm import tqdm

import config as root_config
from evaluate import load_sts_b
from experiments import config
from experiments.inputs import load_encoders, pair_cosines
from experiments.sts_tasks import PUBLISHED, TASKS
from support import command_line
from support.baselines import bag_of_words
from support.bootstrap import bootstrap_spearman, interval
from support.corpora import fetching
from support.device import pick_device
from support.files import first_line
from support.sources import recorded
from support.sts_files import read_pairs, usable_pairs
from support.text_files import summary

KNOBS = ["STS", "CHECKPOINT", "EVAL_POOLER", "DEVICE"]
WIDTH = 52  # characters of the column of names


def own_file(task, folder):
    """The file of a task in a folder of one's own; None where there is none, or the folder is "hub"."""
    paths = [Path(folder).expanduser() / f"{TASKS[task].file}{ending}" for ending in (".csv", ".tsv")]
    return next((path for path in paths if folder != "hub" and path.is_file()), None)


def load_task(task, source):
    """The pairs of a task, as two lists of N strings and a float array (N,) of scores from 0 to 5.

    source: "hub", or a folder. Raises OSError or ValueError in one line where they can't be had.
    """
    path, repo = own_file(task, source), TASKS[task].repo
    if path:
        pairs, left_out = read_pairs(path)
    elif task == "STS-B":
        return load_sts_b("test")
    elif source != "hub":
        raise FileNotFoundError(f"there is no {TASKS[task].file}.csv in {source}")
    else:
        with fetching(repo):
            from datasets import load_dataset  # slow to import

            dataset = load_dataset(repo, split="test")
            rows = [(row["sentence1"], row["sentence2"], row["score"]) for row in dataset]
        pairs, left_out = usable_pairs(rows, repo, Counter())
    if left_out:
        print(f"{task}: left out {summary(left_out)}")
    sentences1, sentences2, scores = zip(*pairs, strict=True)
    return list(sentences1), list(sentences2), np.array(scores)


def load_tasks(source):
    """The tasks that can be had, a dict in the paper's order; the others are named, with the reason.

    Raises ValueError where there is none.
    """
    if source != "hub" and not Path(source).expanduser().is_dir():
        raise ValueError(f"STS={source} is neither hub nor a folder")
    tasks = {}
    for task in TASKS:
        try:
            tasks[task] = load_task(task, source)
        except (OSError, ValueError) as error:
            print(f"{task} is not scored: {first_line(error)}")
    if not tasks:
        raise ValueError(
            "none of the seven tasks can be had (see above): go online, or name a folder with STS="
        )
    return tasks


def score(cosines, scores, seed):
    """Spearman x 100 of a task, and the array (1000,) of what it is when the pairs are drawn anew."""
    return spearmanr(cosines, scores).statistic * 100, bootstrap_spearman(cosines, scores, seed=seed) * 100


def score_tasks(tasks, encoders):
    """The scores of baselines and encoders: a dict from name to a dict from task to (score, resampled scores)."""
    table = {"bag of words": {}, "TF-IDF": {}} | {name: {} for name in encoders}
    for seed, (task, (sentences1, sentences2, scores)) in enumerate(tasks.items()):
        for name, tf_idf in (("bag of words", False), ("TF-IDF", True)):
            table[name][task] = score(bag_of_words(sentences1, sentences2, tf_idf), scores, seed)
        for name, encoder in tqdm(encoders.items(), desc=task, unit="encoder", leave=False, disable=None):
            table[name][task] = score(pair_cosines(encoder, sentences1, sentences2), scores, seed)
    return table


def difference(start, run):
    """A row's scores less another's, resample by resample: pairs that are hard for both then make no difference."""
    return {task: (run[task][0] - start[task][0], run[task][1] - start[task][1]) for task in run}


def print_line(name, cells, note=""):
    """A line of the table; a name too long for its column gets a line of its own above."""
    if len(name) > WIDTH:
        print(name)
        name = ""
    """A line of the table: a name, a cell a task, and what there is to say."""
    print(f"{name:{WIDTH}}" + "".join(f"{cell:>14}" for cell in cells) + note)


def print_row(name, row, average, note, sign=""):
    """A row's scores, and under each its interval. average: whether it is to have one; note: what ends its line."""
    if average:
        values, resampled = zip(*row.values(), strict=True)
        row = row | {"average": (np.mean(values), np.mean(resampled, axis=0))}
    scores, intervals = [], []
    for task in [*TASKS, "average"]:
        value, resampled = row.get(task, (None, None))
        if value is None:
            scores.append("-")
            intervals.append("")
        elif np.isnan(resampled).any():  # embeddings that are all the same, or very few pairs
            scores.append("undefined" if np.isnan(value) else f"{value:{sign}.2f}")
            intervals.append("undefined")
        else:
            low, high = interval(resampled)
            scores.append(f"{value:{sign}.2f}")
            intervals.append(f"{low:{sign}.1f} to {high:{sign}.1f}")
    print_line(name, scores, note)
    print_line("", intervals)


def main():
    device = pick_device(root_config.DEVICE)
    encoders = load_encoders(root_config.CHECKPOINT, root_config.EVAL_POOLER, device)
    tasks = load_tasks(config.STS)
    sample = not own_file("STS-B", config.STS) and recorded().get("stsb", {}).get("sample")
    note = "   STS-B: sample, no benchmark" if sample else ""
    average = len(tasks) == len(TASKS) and not sample  # of all seven tasks, or none
    table = score_tasks(tasks, encoders)

    print_line("Spearman x 100 and its 95% interval", [*TASKS, "average"])
    for name, row in table.items():
        if name in encoders:
            name = f"{name}, {encoders[name].pooler}, {encoders[name].max_seq_len} tokens"
        print_row(name, row, average, note)
    if len(encoders) == 2:
        gain = difference(*(table[name] for name in encoders))
        print_row("the run less its start", gain, average, note, sign="+")
    print("published in SimCSE (Gao et al., 2021), Table 5:")
    for name, values in PUBLISHED.items():
        print_line(name, [f"{value:.2f}" for value in values])
    for task, (_, _, scores) in tasks.items():
        if len(scores) != TASKS[task].pairs:
            print(f"{task}: {len(scores):,} pairs were scored, the paper has {TASKS[task].pairs:,}")


if __name__ == "__main__":
    command_line.run(main, "-m experiments.sts", [root_config, config], KNOBS)
