"""Checkpoints on disk: BERT's weights, shape, pooling and longest input in the layout of Hugging Face."""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from tokenizers import Tokenizer

from support.files import as_json, first_line, read_json, shown, write_together
from support.tokenizer import SPECIAL_TOKENS, read_settings

# what our arguments are called in config.json
SHAPE = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_segments": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "eps": "layer_norm_eps",
}
SHAPE_DEFAULTS = {"n_segments": 2, "dropout": 0.1, "eps": 1e-12}
# what our modules are called in BertModel, in the order of replacement
NAMES = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "blocks.": "encoder.layer.",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_out": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
# settings of config.json that change what is computed, and the values that are implemented here
IMPLEMENTED = {
    "hidden_act": ["gelu", "gelu_python"],  # one function by two names; gelu_new is another
    "position_embedding_type": ["absolute"],
    "is_decoder": [False],
    "quantization_config": [None],
    "auto_map": [None],  # code of the checkpoint's own
}
# settings of sentence_bert_config.json: those that are honoured or change no embedding, and what others must be
SENTENCE_SETTINGS = [
    "max_seq_length",
    "do_lower_case",
    "unpad_inputs",
    "query_length",
    "document_length",
    "query_expansion",
]
SENTENCE_DEFAULTS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
POOLERS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "cls": "cls", "mean": "mean"}


def hugging_face_name(name):
    """The name that Hugging Face's BertModel gives to one of our weights."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


# ---- save


def save(folder, weights, shape, tokenizer, pooler, max_seq_len=None, head=None):
    """Write a checkpoint folder that transformers and sentence-transformers load as it is.

    weights: tensors by our names; shape: the arguments of SimCSEEncoder by our names; pooler: "cls" or "mean";
    max_seq_len: tokens that an input is cut to at evaluation (default: all positions); head: weights of a
    masked-language-model head by BertForMaskedLM's names, which make the folder one of those.
    Raises OSError; a save that fails leaves the checkpoint that was there.
    """
    tokenizer = Tokenizer.from_str(
        tokenizer.to_str()
    )  # a copy, without the last batch's padding and truncation
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab = tokenizer.get_vocab()
    stored = json.loads(tokenizer.to_str())
    normalizer, pre_tokenizer = stored["normalizer"] or {}, stored["pre_tokenizer"] or {}
    is_bert = (normalizer.get("type"), pre_tokenizer.get("type")) == ("BertNormalizer", "BertPreTokenizer")
    module = "sentence_transformers.models."
    prefix = "bert." if head else ""
    tensors = {prefix + hugging_face_name(name): tensor for name, tensor in weights.items()} | (head or {})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM" if head else "BertModel"],
        "hidden_act": "gelu",
        **{theirs: shape[ours] for ours, theirs in SHAPE.items()},
        "attention_probs_dropout_prob": shape["dropout"],
        "pad_token_id": tokenizer.token_to_id("[PAD]"),
    }
    tokenizer_config = {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "do_lower_case": normalizer.get("lowercase", False),
        "strip_accents": normalizer.get("strip_accents"),
        "tokenize_chinese_chars": normalizer.get("handle_chinese_chars", True),
        "model_max_length": shape["n_positions"],
        **{token.strip("[]").lower() + "_token": token for token in SPECIAL_TOKENS},
    }
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": module + "Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": module + "Pooling"},
    ]
    transformer = {
        "max_seq_length": max_seq_len or shape["n_positions"],
        "do_lower_case": False,  # the tokenizer's own setting is enough
    }
    pooling = {
        "word_embedding_dimension": shape["n_embd"],
        "pooling_mode_cls_token": pooler == "cls",
        "pooling_mode_mean_tokens": pooler == "mean",
    }
    contents = {
        "config.json": as_json(config),
        "tokenizer_config.json": as_json(tokenizer_config),
        "modules.json": as_json(modules),
        "sentence_bert_config.json": as_json(transformer),
        "1_Pooling/config.json": as_json(pooling),
        "tokenizer.json": tokenizer.to_str().encode(),
        "vocab.txt": "".join(f"{token}\n" for token in sorted(vocab, key=vocab.get)).encode(),
        "model.safetensors": to_safetensors(tensors, metadata={"format": "pt"}),
    }
    write_together({Path(folder) / name: content for name, content in contents.items()})


# ---- load


def load_shape(folder):
    """The arguments of SimCSEEncoder that a checkpoint's config.json names.

    Raises FileNotFoundError where there is none, ValueError, naming the key, where it is not the BERT implemented here.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter, which is not implemented here: merge it into the weights first"
        )
    config = read_json(path)
    kind = config.get("model_type", "bert")  # the oldest BERT checkpoints don't say
    if kind != "bert":
        raise ValueError(f"{folder} holds a {kind} model: only BERT is implemented here")
    for key, known in IMPLEMENTED.items():
        if config.get(key, known[0]) not in known:
            raise ValueError(f"{folder}: {key} is {config[key]!r}, only {known[0]!r} is implemented here")
    shape = {ours: config.get(theirs, SHAPE_DEFAULTS.get(ours)) for ours, theirs in SHAPE.items()}
    for ours, value in shape.items():
        kind, smallest = (float, 0) if ours in ("dropout", "eps") else (int, 1)
        limit = 1 if ours == "dropout" else math.inf
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not smallest <= value < limit:
            raise ValueError(f"{path} gives no number that can be for {SHAPE[ours]}: {value!r}")
    return shape


def load_pooler(folder, pooler=None):
    """The pooling, "cls" or "mean", that sentence-transformers' files name; "cls", the paper's, where there are none.

    pooler: the pooling to take instead. Raises ValueError for another pooling and, whatever `pooler` says, for modules
    that would change the embedding. Prints a line for each setting that is left out here.
    """
    folder, place = Path(folder), "1_Pooling"
    if (folder / "modules.json").exists():
        modules = read_json(folder / "modules.json", list)
        check_modules(folder, modules)
        place = str(modules[1].get("path", place))
    elif not (folder / place / "config.json").exists():
        pooler = pooler or "cls"
    if pooler:
        return pooler
    path = folder / place / "config.json"
    pooling = read_json(path)
    modes = pooling.get("pooling_mode")
    if modes is None:  # older files have a switch for each mode, and mean where none is on
        modes = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and on] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or str(modes[0]) not in POOLERS:
        said = " and ".join(map(str, modes))
        raise ValueError(
            f"{path} pools by {said}: only cls and mean are implemented here, choose one with "
            "POOLER= (training) or EVAL_POOLER= (evaluation)"
        )
    return POOLERS[modes[0]]


def check_modules(folder, modules):
    """Check what sentence-transformers would put together.

    Raises ValueError where modules.json lists more than BERT, a pooling and a normalisation, which the cosine undoes.
    Prints a line for each setting of config_sentence_transformers.json that is left out here.
    """
    kinds = []
    for module in modules:
        kind = str(module.get("type")) if isinstance(module, dict) else "no module"
        if kind.startswith("sentence_transformers."):
            kind = kind.rsplit(".", 1)[-1]
        kinds.append(kind)
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{folder / 'modules.json'} lists {', '.join(kinds)}: "
            "only Transformer, Pooling and Normalize, in this order, are implemented here"
        )
    if modules[0].get("path"):
        raise ValueError(
            f"{folder / 'modules.json'} has BERT in {modules[0]['path']}: name that folder instead"
        )
    settings = read_settings(folder, "config_sentence_transformers.json")
    kind = settings.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ValueError(f"{folder} holds a {kind}: only a SentenceTransformer is implemented here")
    left_out = []
    prompts = settings.get("prompts")
    prompt = isinstance(prompts, dict) and prompts.get(str(settings.get("default_prompt_name")))
    if prompt:
        left_out.append(f"the prompt {prompt!r} is not put before the sentences")
    if settings.get("truncate_dim"):
        left_out.append(f"embeddings are not cut to {settings['truncate_dim']} dimensions")
    if settings.get("similarity_fn_name") not in (None, "cosine"):
        left_out.append(f"similarity is the cosine, not {settings['similarity_fn_name']}")
    for line in left_out:
        print(f"{shown(folder)}: {line}", file=sys.stderr)


def load_max_seq_len(folder, n_positions):
    """Tokens that an input is cut to at evaluation: what sentence-transformers' files say, at most n_positions.

    Raises ValueError for a setting there that would change the embedding and is not implemented here.
    """
    path = Path(folder) / "sentence_bert_config.json"
    settings = read_settings(folder, path.name)
    for key, value in settings.items():
        if value and key not in SENTENCE_SETTINGS and value != SENTENCE_DEFAULTS.get(key):
            raise ValueError(f"{path}: {key} is {value!r}, which is not implemented here")
    limit = settings.get("max_seq_length")
    if limit is None:
        path = Path(folder) / "tokenizer_config.json"
        limit = read_settings(folder, path.name).get("model_max_length", n_positions)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 3:
        raise ValueError(f"{path}: an input of {limit!r} tokens is too short, [CLS], a token and [SEP] are 3")
    return int(min(limit, n_positions))


def load_tensors(folder):
    """All tensors that a checkpoint stores, by their names there, and the path of the file that holds or lists them.

    Reads the first that is there of model.safetensors, its index of several files, pytorch_model.bin (never as code)
    and its index. Raises FileNotFoundError where there is none, ValueError where one is damaged.
    """
    folder = Path(folder)
    names = [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin, nor an index of either"
        )
    parts = [path]
    if path.suffix == ".json":
        listed = read_json(path).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ValueError(f"{path} has no weight_map from weights to files")
        parts = [folder / name for name in sorted(set(listed.values()))]
    tensors = {}
    for part in parts:
        if not part.exists():
            raise FileNotFoundError(f"{path} names {part.name}, which is not there")
        try:
            if part.suffix == ".safetensors":
                tensors |= load_file(part)
            else:
                tensors |= torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):  # the file itself is sound
            raise
        except Exception as error:  # safetensors, zipfile and pickle each raise their own for a damaged file
            raise ValueError(f"{part} can't be read as weights: {first_line(error)}") from None
    return tensors, path


def load_weights(folder, shapes):
    """The encoder's weights by our names, float32.

    shapes: the shape that each weight must have, by our names. Reads names with and without the prefix bert., gamma and
    beta as well as weight and bias; leaves out BERT's pooler, its pre-training heads and position_ids.
    Raises ValueError, naming the weight, where one is missing, has another shape, is not finite, or is none of BERT's.
    """
    stored, path = load_tensors(folder)
    theirs = {}
    for name, tensor in stored.items():
        name = name.removeprefix("bert.")
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.startswith(("pooler.", "cls.")) and not name.endswith("position_ids"):
            theirs[name] = tensor
    weights = {name: take(theirs, hugging_face_name(name), shape, path) for name, shape in shapes.items()}
    if theirs:
        raise ValueError(f"{path} holds a weight that BERT does not have: {min(theirs)}")
    return weights


def take(stored, name, shape, path):
    """Take one weight, as float32, out of those stored at `path`; raises ValueError, naming it, if it can't be used."""
    if name not in stored:
        raise ValueError(f"{path} lacks the weight {name}")
    tensor = stored.pop(name)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise ValueError(f"{path}: {name} is no tensor of floating-point numbers")
    if tensor.shape != shape:
        found, asked = tuple(tensor.shape), tuple(shape)
        raise ValueError(f"{path}: {name} has the shape {found}, config.json asks for {asked}")
    if not tensor.isfinite().all():
        raise ValueError(f"{path}: {name} holds NaN or infinity")
    return tensor.float()


@torch.no_grad()
def load_head(folder, weights):
    """Fill the tensors of a masked-language-model head, by BertForMaskedLM's names, from a checkpoint folder.

    Raises ValueError, naming the weight, where the checkpoint has no such head, or one that can't be used.
    """
    stored, path = load_tensors(folder)
    for name, tensor in weights.items():
        tensor.copy_(take(stored, name, tensor.shape, path))
