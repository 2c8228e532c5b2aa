"""Checkpoints on disk: BERT's weights, shape and tokenizer in the Hugging Face layout, from a folder or from the Hub."""

import json
import os
from collections import Counter

import torch
from safetensors.torch import load_file, save as to_safetensors
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from config import first_line

# what our arguments are called in config.json
SHAPE = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
         "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "vocab_size": "vocab_size",
         "n_segments": "type_vocab_size", "dropout": "hidden_dropout_prob", "eps": "layer_norm_eps"}
SHAPE_DEFAULTS = {"n_segments": 2, "dropout": 0.1, "eps": 1e-12}
# what our modules are called in BertModel, in the order of replacement
NAMES = {"token_embedding": "embeddings.word_embeddings", "position_embedding": "embeddings.position_embeddings",
         "segment_embedding": "embeddings.token_type_embeddings", "embedding_norm": "embeddings.LayerNorm",
         "blocks.": "encoder.layer.", "attention.query": "attention.self.query", "attention.key": "attention.self.key",
         "attention.value": "attention.self.value", "attention.output": "attention.output.dense",
         "attention_norm": "attention.output.LayerNorm", "ffn_in": "intermediate.dense", "ffn_out": "output.dense",
         "ffn_norm": "output.LayerNorm"}
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "modules.json", "1_Pooling/config.json",
         "model.safetensors", "pytorch_model.bin"]
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def hugging_face_name(name):
    """The name that Hugging Face's BertModel gives to one of our weights."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


# ---------------------------------------------------------------------------- save

def write_together(contents):
    """Write files, a dict from path to bytes: none of them is replaced before all are on the disk, which may be full."""
    try:
        for path, content in contents.items():
            with open(path + ".tmp", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in contents:
            os.replace(path + ".tmp", path)
    except OSError as error:
        raise OSError(f"{path} can't be written: {error.strerror or error}") from None
    finally:
        for path in contents:
            if os.path.exists(path + ".tmp"):
                os.remove(path + ".tmp")


def write_atomically(path, content):
    """Write bytes to a file so that it is either the old one or the new one, whole, whatever happens meanwhile."""
    write_together({path: content})


def as_json(content):
    """An object as JSON, in bytes."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path, content):
    """Write an object as JSON, in one step."""
    write_atomically(path, as_json(content))


def save(folder, weights, shape, tokenizer, pooler, head=None):
    """Write a checkpoint folder that transformers and sentence-transformers load as it is.

    weights: tensors by our names; shape: the arguments of SimCSEEncoder by our names; pooler: "cls" or "mean";
    head: masked-language-model weights by BertForMaskedLM's names, which make the folder one of those.
    A disk that fills up leaves the checkpoint that was there.
    """
    os.makedirs(os.path.join(folder, "1_Pooling"), exist_ok=True)
    vocab = tokenizer.get_vocab()
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    module = "sentence_transformers.models."
    prefix = "bert." if head else ""
    tensors = {prefix + hugging_face_name(name): tensor for name, tensor in weights.items()} | (head or {})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    contents = {
        "config.json": as_json({
            "model_type": "bert", "architectures": ["BertForMaskedLM" if head else "BertModel"], "hidden_act": "gelu",
            **{theirs: shape[ours] for ours, theirs in SHAPE.items()}, "attention_probs_dropout_prob": shape["dropout"],
            "pad_token_id": tokenizer.token_to_id("[PAD]")}),
        "tokenizer_config.json": as_json({
            "tokenizer_class": "BertTokenizer", "do_lower_case": normalizer.get("lowercase", False),
            "strip_accents": normalizer.get("strip_accents"), "tokenize_chinese_chars": normalizer.get("handle_chinese_chars", True),
            "model_max_length": shape["n_positions"],
            **{token.strip("[]").lower() + "_token": token for token in SPECIAL_TOKENS}}),
        "modules.json": as_json([
            {"idx": 0, "name": "0", "path": "", "type": module + "Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": module + "Pooling"}]),
        "sentence_bert_config.json": as_json({"max_seq_length": shape["n_positions"], "do_lower_case": False}),
        "1_Pooling/config.json": as_json({
            "word_embedding_dimension": shape["n_embd"], "pooling_mode_cls_token": pooler == "cls",
            "pooling_mode_mean_tokens": pooler == "mean"}),
        "tokenizer.json": tokenizer.to_str().encode(),
        "vocab.txt": "".join(f"{t}\n" for t in sorted(vocab, key=vocab.get)).encode(),
        "model.safetensors": to_safetensors(tensors, metadata={"format": "pt"})}
    write_together({os.path.join(folder, name): content for name, content in contents.items()})


# ---------------------------------------------------------------------------- load

def read_json(folder, name, kind=dict):
    """The content, a dict or else `kind`, of a JSON file; raises FileNotFoundError or ValueError in one line."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {name}")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} is not valid JSON of its kind: it holds a {type(content).__name__}")
    return content


def local_folder(name):
    """The path of a folder, given from where one stands or from where the scripts lie; None where it is neither."""
    places = [name, os.path.join(os.path.dirname(os.path.abspath(__file__)), name)]
    return next((place for place in places if name and os.path.isdir(place)), None)


def find(folder_or_hub_name):
    """The local folder of a checkpoint, fetched from the Hugging Face Hub, or its cache, where the name is no folder.

    Raises OSError in one line: no such folder, no such repository, or the Hub not answering within 10 seconds.
    """
    folder = local_folder(folder_or_hub_name)
    if folder:
        return folder
    from huggingface_hub import HfApi, errors, snapshot_download        # slow to import, and most runs need no Hub
    try:
        files = [entry.rfilename for entry in HfApi().model_info(folder_or_hub_name, timeout=10).siblings]
        wanted = [name for name in files if name in FILES]
        if "model.safetensors" in wanted:
            wanted = [name for name in wanted if name != "pytorch_model.bin"]
        if "config.json" in wanted:
            return snapshot_download(folder_or_hub_name, allow_patterns=wanted, etag_timeout=10)
    except errors.HFValidationError:
        raise FileNotFoundError(f"{folder_or_hub_name}: no such folder, nor a name that the Hub could have") from None
    except Exception as error:              # unreachable, too slow, refusing, cut off: the cache may still have it
        try:
            return snapshot_download(folder_or_hub_name, allow_patterns=FILES[:-1], local_files_only=True)
        except Exception:
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
                raise FileNotFoundError(f"{folder_or_hub_name}: no such folder, and no such model on the Hub, "
                                        "or a private one (then log in with: hf auth login)") from None
            raise OSError(f"{folder_or_hub_name} is no folder, and the Hub can't give it: {first_line(error)}; "
                          "try again later, set HF_ENDPOINT to a mirror, or name a local folder") from None
    raise FileNotFoundError(f"{folder_or_hub_name} on the Hub has no config.json: it is no checkpoint")


def load_shape(folder):
    """The arguments of SimCSEEncoder that a checkpoint's config.json names; raises ValueError where it is not our BERT."""
    config = read_json(folder, "config.json")
    kind = config.get("model_type", "bert")                     # the oldest BERT checkpoints don't say
    if kind != "bert":
        raise ValueError(f"{folder} holds a {kind} model: only BERT is implemented here")
    for key, known in (("hidden_act", "gelu"), ("position_embedding_type", "absolute"), ("is_decoder", False)):
        if config.get(key, known) != known:
            raise ValueError(f"{folder}: {key} is {config[key]!r}, only {known!r} is implemented here")
    shape = {ours: config.get(theirs, SHAPE_DEFAULTS.get(ours)) for ours, theirs in SHAPE.items()}
    for ours, value in shape.items():
        kind = float if ours in ("dropout", "eps") else int
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or value < (0 if kind is float else 1):
            raise ValueError(f"{os.path.join(folder, 'config.json')} gives no number that can be for {SHAPE[ours]}: {value!r}")
    return shape


def load_pooler(folder):
    """The pooling ("cls" or "mean") that sentence-transformers' file names; "cls", the paper's, where there is none.

    Raises ValueError for another pooling, and for a module that would change the embedding, such as Dense.
    """
    if os.path.exists(os.path.join(folder, "modules.json")):
        for module in read_json(folder, "modules.json", list):
            kind = module.get("type") if isinstance(module, dict) else module
            if str(kind).rsplit(".", 1)[-1] not in ("Transformer", "Pooling", "Normalize"):
                raise ValueError(f"{folder} has a {kind} behind its pooling, which is not implemented here")
    if not os.path.exists(os.path.join(folder, "1_Pooling", "config.json")):
        return "cls"
    pooling = read_json(folder, os.path.join("1_Pooling", "config.json"))
    modes = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and on is True]
    modes = modes or [pooling.get("pooling_mode")]
    known = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "cls": "cls", "mean": "mean"}
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in known:
        raise ValueError(f"{folder} pools by {modes}: only cls and mean are implemented here, choose one with POOLER=")
    return known[modes[0]]


def load_weights(folder, shapes):
    """The encoder's weights by our names, float32, from model.safetensors or else pytorch_model.bin (never as code).

    shapes: the shape that each weight must have, by our names. Reads names with and without the prefix bert., gamma/beta
    as well as weight/bias; leaves out BERT's pooler, its pre-training heads and position_ids. Raises ValueError, naming
    the weight, where one is missing, has another shape, or is none of BERT's.
    """
    path = os.path.join(folder, "model.safetensors")
    try:
        if os.path.exists(path):
            stored = load_file(path)
        else:
            path = os.path.join(folder, "pytorch_model.bin")
            if not os.path.exists(path):
                raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin (weights in several files "
                                        "are not read here)")
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:      # safetensors, zipfile and pickle each raise their own for a damaged file
        raise ValueError(f"{path} can't be read as weights: {first_line(error)}") from None
    theirs = {}
    for name, tensor in stored.items():
        name = name.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.startswith(("pooler.", "cls.")) and not name.endswith("position_ids"):
            theirs[name] = tensor
    weights = {}
    for name, shape in shapes.items():
        their_name = hugging_face_name(name)
        if their_name not in theirs:
            raise ValueError(f"{path} lacks the weight {their_name}")
        weights[name] = theirs.pop(their_name).float()
        if weights[name].shape != shape:
            raise ValueError(f"{path}: {their_name} has the shape {tuple(weights[name].shape)}, "
                             f"config.json asks for {tuple(shape)}")
    if theirs:
        raise ValueError(f"{path} holds a weight that BERT does not have: {min(theirs)}")
    return weights


@torch.no_grad()
def load_head(folder_or_hub_name, weights):
    """Fill the tensors of a masked-language-model head, by BertForMaskedLM's names, from a checkpoint's model.safetensors.

    Raises ValueError where the checkpoint has no such head, or one of another shape.
    """
    path = os.path.join(find(folder_or_hub_name), "model.safetensors")
    stored = load_file(path)
    for name, tensor in weights.items():
        if name not in stored or stored[name].shape != tensor.shape:
            raise ValueError(f"{path} has no weight {name} of shape {tuple(tensor.shape)}: it is no encoder of pretrain.py's")
        tensor.copy_(stored[name])


# ---------------------------------------------------------------------------- the tokenizer

def wordpiece_tokenizer(vocab=None, lowercase=True, strip_accents=None, chinese=True):
    """BERT's WordPiece tokenizer over a vocabulary (token to id); without one, ready to be trained."""
    tokenizer = Tokenizer(models.WordPiece(vocab or {}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if vocab is not None:
        missing = [token for token in SPECIAL_TOKENS if token not in vocab]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}")
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return tokenizer


def train_tokenizer(sentences, vocab_size):
    """Learn a lower-cased WordPiece vocabulary of at most vocab_size tokens from an iterable of strings; always the same."""
    tokenizer, sentences = wordpiece_tokenizer(), list(sentences)
    counts = Counter()
    for sentence in sentences:
        counts.update(tokenizer.normalizer.normalize_str(sentence))
    # the commonest characters: thousands of others occur in a large text, and each would take a place
    alphabet = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[:min(256, vocab_size // 4)]
    # the trainer numbers what it meets in the order of a hash table, and breaks ties by number: number its pieces beforehand
    pieces = alphabet + ["##" + c for c in alphabet]
    tokenizer.train_from_iterator(sentences, trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS + pieces, initial_alphabet=alphabet,
        limit_alphabet=len(alphabet), show_progress=False))
    return wordpiece_tokenizer(tokenizer.get_vocab())


def load_tokenizer(folder, vocab_size=None):
    """A checkpoint's tokenizer, from tokenizer.json or else vocab.txt; padding and truncation are the encoder's to do.

    vocab_size: rows of the token embedding, which the vocabulary must fill but for a rounding up. Raises ValueError.
    """
    path = os.path.join(folder, "tokenizer.json")
    if os.path.exists(path):
        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:      # the library raises bare Exceptions
            raise ValueError(f"{path} can't be read as a tokenizer: {first_line(error)}") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
    else:
        path = os.path.join(folder, "vocab.txt")
        if not os.path.exists(path):
            raise FileNotFoundError(f"{folder} has neither tokenizer.json nor vocab.txt")
        options = {}
        if os.path.exists(os.path.join(folder, "tokenizer_config.json")):
            options = read_json(folder, "tokenizer_config.json")
        try:
            with open(path, encoding="utf-8") as file:
                vocab = {token.rstrip("\n"): i for i, token in enumerate(file)}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None
        tokenizer = wordpiece_tokenizer(vocab, options.get("do_lower_case", True), options.get("strip_accents"),
                                        options.get("tokenize_chinese_chars", True))
    if tokenizer.encode("").tokens != ["[CLS]", "[SEP]"]:
        raise ValueError(f"{path} does not put a sentence between [CLS] and [SEP]: it is no tokenizer of BERT's")
    tokens = 1 + max(tokenizer.get_vocab().values())
    if vocab_size and not 0 <= vocab_size - tokens < 128:
        raise ValueError(f"{path} has {tokens} tokens, the weights have {vocab_size}: they do not belong together")
    return tokenizer
