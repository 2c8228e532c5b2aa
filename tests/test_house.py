"""The house itself: its files, who imports whom, their sizes, and the chapter's excerpts under their names."""

import ast
import inspect
import subprocess
import sys

import pytest

import config
import evaluate
import model
import train
from tests.conftest import ROOT

SCRIPTS = ["config", "model", "download_data", "train", "evaluate", "test_model"]
ROOMS = ["support", "pretraining", "experiments", "tests"]
# what each may import of the house; a room stands for its files
ROOT_AND_SUPPORT = {"config", "model", "download_data", "train", "evaluate", "support"}
MAY_IMPORT = {
    "config": set(),
    "model": {"support"},
    "download_data": {"config", "support"},
    "evaluate": {"config", "model", "support"},
    "train": {"config", "model", "evaluate", "support"},
    "test_model": {"config", "model", "support"},
    "support": {"support"},
    "pretraining": ROOT_AND_SUPPORT | {"pretraining"},
    "experiments": ROOT_AND_SUPPORT | {"pretraining", "experiments"},
}
PRODUCT = [path for path in sorted(ROOT.glob("*.py")) if path.stem in SCRIPTS]
PRODUCT += [path for room in ROOMS[:-1] for path in sorted((ROOT / room).glob("*.py"))]
ALL = PRODUCT + sorted((ROOT / "tests").glob("*.py"))
CONFIGS = ["config.py", "pretraining/config.py", "experiments/config.py"]


def named(path):
    return str(path.relative_to(ROOT))


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree):
    """What a file imports anywhere in it: pairs of the name that it has there, and the full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name what they import in full"
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def modules(tree):
    """The names under which a file has modules: of the house by their files, of libraries as far as they are loaded."""
    of_the_house = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PRODUCT} | set(ROOMS)
    plain = {name for node in ast.walk(tree) if isinstance(node, ast.Import) for name, _ in imports(node)}
    return plain | {name for name, full in imports(tree) if full in of_the_house or full in sys.modules}


# ---- files


def test_the_root_holds_the_chapters_files_and_four_rooms():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to tell the project's files from a reader's own")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name.partition("/")[0] for name in listed.splitlines()}
    others = {"README.md", "pyproject.toml", "Makefile", "data", "checkpoints", *ROOMS}
    assert {name for name in names if not name.startswith(".")} == {f"{name}.py" for name in SCRIPTS} | others


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_a_package_and_says_what_it_is_for(room):
    assert (ROOT / room / "__init__.py").exists()
    assert room == "tests" or (ROOT / room / "README.md").exists()


@pytest.mark.parametrize(
    "name, most", [("config.py", 70), ("train.py", 150), ("evaluate.py", 130), ("README.md", 180)]
)
def test_sizes(name, most):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_main_of_train_py_and_the_readme_are_short():
    (main,) = [node for node in parse(ROOT / "train.py").body if getattr(node, "name", "") == "main"]
    assert main.end_lineno - main.lineno + 1 <= 45
    assert (ROOT / "README.md").stat().st_size <= 12_000


@pytest.mark.parametrize("path", ALL, ids=named)
def test_no_line_is_wider_than_120(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, start=1) if len(line) > 120] == []


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_ruff_is_content(command):
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_files_and_public_functions_say_what_they_are_for(path):
    tree = parse(path)
    if path.name == "__init__.py":
        assert not tree.body  # a folder, no code
        return
    assert ast.get_docstring(tree)
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith(("_", "test_"))
    ]
    if path.stem != "test_model":
        assert [node.name for node in public if node.name != "main" and not ast.get_docstring(node)] == []


# ---- imports


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_imports_go_one_way(path):
    place = path.stem if path.parent == ROOT else path.parent.name
    of_the_house = {full.partition(".")[0] for _, full in imports(parse(path))} & {*SCRIPTS, *ROOMS}
    assert of_the_house <= MAY_IMPORT[place]


def test_no_imports_run_in_a_circle():
    paths = {named(path).removesuffix(".py").replace("/", "."): path for path in PRODUCT}
    needs = {}
    for name, path in paths.items():
        found = {full for _, full in imports(parse(path))}
        found |= {full.rpartition(".")[0] for full in found}
        needs[name] = (found & set(paths)) - {name}
    while needs:
        free = {name for name, others in needs.items() if not others & set(needs)}
        assert free, f"a circle: {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_only_scripts_read_constants(path):
    """A module that reads constants of a config is one that is run; what else needs a value gets it as an argument."""
    tree = parse(path)
    reads = any(full.partition(".")[0] == "config" or full.endswith(".config") for _, full in imports(tree))
    is_script = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
    assert is_script or not reads


def changes_to_modules(tree):
    """The places where a file sets or deletes what belongs to another module, as source."""
    named_here = modules(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = ast.unparse(node.value)
            if isinstance(node, ast.Attribute) and owner.partition(".")[0] in named_here:
                yield ast.unparse(node)  # module.NAME = ..., in whatever statement
            if owner in {f"vars({name})" for name in named_here} | {
                f"{name}.__dict__" for name in named_here
            }:
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            of_modules = [f"vars({name})." for name in named_here] + [
                f"{name}.__dict__." for name in named_here
            ]
            if called in ("setattr", "delattr") or called.startswith(tuple(of_modules)):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_no_file_changes_another_module(path):
    changes = list(changes_to_modules(parse(path)))
    # the command line sets the constants of the modules that it is handed
    assert changes == ["setattr(config, name, values[name])"] * (named(path) == "support/command_line.py")


@pytest.mark.parametrize(
    "line",
    [
        "files.DATA = 1",
        "files.DATA, x = 1, 2",
        "files.DATA += 1",
        "del files.DATA",
        "for files.DATA in (1, 2): pass",
        "torch.backends.flag = 1",
        "setattr(files, 'DATA', 1)",
        "vars(files).update(DATA=1)",
        "vars(files)['DATA'] = 1",
        "files.__dict__['DATA'] = 1",
    ],
)
def test_changes_to_another_module_would_be_seen(line):
    head = "import torch\nfrom support import files\n"
    assert list(changes_to_modules(ast.parse(head + line)))
    assert not list(
        changes_to_modules(ast.parse(head + "x.DATA = files.DATA; y['DATA'] = vars(files)['DATA']"))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_hold_constants_only(name):
    docstring, *lines = parse(ROOT / name).body
    assert isinstance(docstring, ast.Expr) and lines
    for line in lines:
        assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name), ast.unparse(line)
        assert line.targets[0].id.isupper() and line.lineno == line.end_lineno
        assert type(ast.literal_eval(line.value)) in (bool, int, float, str)
    text = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert all("  # " in text[line.lineno - 1] for line in lines)  # what it is, its unit, the chapter's value


# ---- the chapter


def test_the_defaults_are_the_chapters():
    chapter = {
        "MAX_SENTENCES": 100_000, "BATCH_SIZE": 64, "TEMPERATURE": 0.05, "LEARNING_RATE": 5e-5, "MAX_SEQ_LEN": 32,
        "USE_MLP_HEAD": True, "DROPOUT": 0.1, "POOLER": "cls", "EPOCHS": 1, "N_LAYER": 6, "N_EMBD": 256, "N_HEAD": 8,
        "N_POSITIONS": 128,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in chapter} == chapter


SIGNATURES = {
    model.simcse_loss: "(z1, z2, temperature)",
    model.alignment_and_uniformity: "(z1, z2, t=2.0)",
    model.MLPHead: "(n_embd)",
    model.SimCSEEncoder.encode: "(self, idx, attention_mask, project=False)",
    model.SimCSEEncoder.save_pretrained: "(self, folder)",
    model.SimCSEEncoder.from_pretrained: "(folder_or_hub_name, pooler=None, dropout=None)",
    evaluate.load_sts_b: "(split='validation')",
    evaluate.encode_sentences: "(encoder, sentences, device=None)",
    evaluate.evaluate_stsb: "(encoder, split='validation', device=None",
}
# in the order in which the chapter has them
EXCERPTS = {
    model.simcse_loss: [
        "z1 = F.normalize(z1", "z2 = F.normalize(z2", "sim_12 = z1 @ z2", "/ temperature", "sim_21 = z2 @ z1",
        "labels = torch.arange(", "loss_12 = F.cross_entropy(sim_12, labels)",
        "loss_21 = F.cross_entropy(sim_21, labels)", "return (loss_12 + loss_21) / 2",
    ],
    model.MLPHead: [
        "self.dense = nn.Linear(n_embd, n_embd)", "self.activation = nn.Tanh()", "self.activation(self.dense(",
    ],
    model.SimCSEEncoder.encode: [
        'if self.pooler == "cls":', "hidden[:, 0, :]", "mask = attention_mask.unsqueeze(-1)",
        "(hidden * mask).sum(dim=1) / mask.sum(dim=1)", "if project:", "self.mlp_head(",
    ],
    model.alignment_and_uniformity: [
        "z1 = F.normalize(z1", "z2 = F.normalize(z2", "alignment = (z1 - z2)", "torch.pdist(torch.cat([z1, z2]",
        "uniformity = ", ".exp().mean().log()",
    ],
    train.main: [
        "encoder.train()", "z1 = encoder.encode(idx", "project=config.USE_MLP_HEAD", "z2 = encoder.encode(idx",
        "project=config.USE_MLP_HEAD", "loss = simcse_loss(z1", "config.TEMPERATURE",
        "loss.backward()", "optimizer.step()",
    ],
    evaluate.encode_sentences: ["@torch.no_grad()", "encoder.eval()", "encoder.encode(idx", "project=False"],
    evaluate.evaluate_stsb: [
        "load_sts_b(split)", "emb1 = encode_sentences(encoder", "emb2 = encode_sentences(encoder",
        "e1 = F.normalize(torch.from_numpy(emb1)", "e2 = F.normalize(torch.from_numpy(emb2)",
        "cosine = (e1 * e2).sum(dim=-1).numpy()", "spearmanr(cosine", ".statistic", "* 100",
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_the_chapters_names_are_called_as_in_the_chapter(function):
    assert str(inspect.signature(function)).startswith(SIGNATURES[function])


@pytest.mark.parametrize("function", EXCERPTS, ids=lambda function: function.__name__)
def test_the_chapters_excerpts_are_found_under_their_names(function):
    source, place = " ".join(inspect.getsource(function).split()), 0
    for excerpt in EXCERPTS[function]:
        assert excerpt in source[place:], f"{excerpt} is not there, or not behind what comes before it"
        place = source.index(excerpt, place) + len(excerpt)
