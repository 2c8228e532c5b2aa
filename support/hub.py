"""The Hugging Face Hub: whether it answers, and checkpoints fetched from it."""

import threading
from fnmatch import fnmatch
from pathlib import Path

from support import files
from support.files import first_line

SECONDS = 10  # longest wait for the Hub's answer
down = ""  # why the Hub can't be used, once that is known: nobody waits for it twice

# what a checkpoint may hold beside its weights
SETTINGS = [
    "*config.json",  # 1_Pooling/config.json too
    "config_sentence_transformers.json",
    "modules.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
]
# its weights: the first of these that is there, and with an index the files that it names
WEIGHTS = {
    "model.safetensors": [],
    "model.safetensors.index.json": ["model-*-of-*.safetensors"],
    "pytorch_model.bin": [],
    "pytorch_model.bin.index.json": ["pytorch_model-*-of-*.bin"],
}


def ask(repo, kind):
    """Ask the Hub for a repository, once and briefly, because its clients would retry for minutes.

    repo: "owner/name"; kind: "dataset" or "model". Returns the names of the repository's files; None in offline mode
    (HF_HUB_OFFLINE=1), where nothing is asked. Raises FileNotFoundError where the Hub has no such repository or keeps
    it private, and OSError where the Hub can't be used: after at most SECONDS seconds, and at once from then on.
    """
    global down
    from huggingface_hub import HfApi, constants  # slow to import, and most runs need no Hub

    if constants.HF_HUB_OFFLINE:
        return None
    if down:
        raise OSError(f"{repo}: {down}")
    answers = []

    def put_question():
        try:
            answers.append(HfApi().repo_info(repo, repo_type=kind, timeout=SECONDS))
        except Exception as error:
            answers.append(error)

    # a thread, because no timeout of the client's covers the look-up of the Hub's address
    thread = threading.Thread(target=put_question, daemon=True)
    thread.start()
    thread.join(SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer within {SECONDS} seconds")
    if not isinstance(answer, Exception):
        return [entry.rfilename for entry in answer.siblings]
    status = getattr(getattr(answer, "response", None), "status_code", None)
    if status in (401, 403, 404):
        raise FileNotFoundError(
            f"{repo}: it isn't on the Hub, or is private (HTTP {status}): then log in with hf auth login"
        )
    reason = f"it answers HTTP {status}" if status else first_line(answer)
    down = f"the Hub ({constants.ENDPOINT}) can't be used: {reason}"
    raise OSError(f"{repo}: {down}")


def local_folder(name):
    """The path of a folder, given from where one stands or from where the scripts lie; None where it is neither."""
    places = [Path(name), files.ROOT / name]
    return next((place for place in places if name and place.is_dir()), None)


def find(folder_or_hub_name):
    """The local folder of a checkpoint, as a string: fetched from the Hub, or its cache, where the name is no folder.

    A relative folder is looked for where one stands, then beside the scripts. Raises OSError in one line: no such
    folder, no such repository, or a Hub that can't be used.
    """
    name = str(folder_or_hub_name)
    if local_folder(name):
        return str(local_folder(name))
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except errors.HFValidationError:
        raise FileNotFoundError(f"{name}: no such folder, nor a name that the Hub could have") from None
    try:
        there = ask(name, "model")
        if there is None:
            raise OSError(
                f"{name}: offline mode (HF_HUB_OFFLINE) asks no Hub, and the cache does not hold it"
            )
        if "config.json" in there:
            return snapshot_download(name, allow_patterns=wanted(there), etag_timeout=SECONDS)
    except Exception as error:  # unreachable, too slow, refusing, cut off: the cache may still have it
        try:
            patterns = [*SETTINGS, "model.safetensors", "model-*-of-*.safetensors"]
            return snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        except Exception:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            advice = "name a local folder, or try again later or with HF_ENDPOINT set to a mirror"
            raise kind(f"{name} is no folder here; {first_line(error)}; {advice}") from None
    raise FileNotFoundError(f"{name} on the Hub has no config.json: it is no checkpoint")


def wanted(names):
    """Of the names of a repository's files those that a checkpoint needs: settings, and one form of the weights."""
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in SETTINGS)]
    weights = next((name for name in WEIGHTS if name in names), None)
    if weights:
        patterns = [weights, *WEIGHTS[weights]]
        chosen += [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    return chosen
