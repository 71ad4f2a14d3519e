"""Mistakes a user makes, each as the command itself: one message, a remedy, no stack trace, no torch."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
work_dir: {work}
sources: [{{kind: text, path: {source}}}]
vocab: {{size: 100}}
prep: {{held_out: 0.2, workers: 1}}
shards: {{len128: {{max_length: 32}}}}
model: {{preset: bert-tiny, max_position_embeddings: 32}}
parallel: {{micro_batch_tokens: 256}}
phases: [{{name: p, shards: len128, global_batch: 8, steps: 4, schedule: {{lr: 1.0e-3}}}}]
train: {{precision: fp32}}
"""
# Stands in front of the interpreter's modules: whoever imports one of them before the refusal fails.
NO_HEAVY = "raise SystemExit('a heavy package was imported before the refusal')\n"


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "heavy"), str(ROOT)])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe t.yaml whose vocabulary and shards are made, and broken things beside it."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("torch", "deepspeed", "transformers", "megatron"):
        (folder / "heavy" / name).mkdir(parents=True)
        (folder / "heavy" / name / "__init__.py").write_text(NO_HEAVY)
    (folder / "src").mkdir()
    for document in range(40):
        lines = [f"The {word} {document} went on. So it is." for word in "abcdefghijkl"]
        (folder / "src" / f"{document}.txt").write_text("\n".join(lines) + "\n")
    (folder / "t.yaml").write_text(RECIPE.format(work="w", source="src"))
    for step in ("vocab", "build"):
        done = run(folder, "data_prep", step, "t.yaml")
        assert done.returncode == 0, done.stderr
    (folder / "empty").mkdir()
    (folder / "blank").mkdir()
    (folder / "blank" / "a.txt").write_text("")
    (folder / "file").write_text("x")
    (folder / "nothing.yaml").write_text("")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "broken.yaml").write_text("a: [1\n b: 2")
    (folder / "circle.yaml").write_text("base: circle.yaml\n")
    (folder / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    (folder / "nomask.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nb\n")
    (folder / "logged" / "train").mkdir(parents=True)
    update = (
        '{"kind": "train", "step": 1, "loss": 9.0, "time": 1.0, "lr": 0.1, "tokens_per_s": 1.0}'
    )
    (folder / "logged" / "train" / "log.jsonl").write_text(update + "\n")
    (folder / "cut.bz2").write_bytes(b"BZh9 no more")
    return folder


@pytest.fixture
def work(base: Path, tmp_path: Path) -> Path:
    """A copy of the finished work_dir, to be damaged."""
    return Path(shutil.copytree(base / "w", tmp_path / "w"))


@pytest.fixture
def scheduler(tmp_path: Path) -> Path:
    """A folder with a `sinfo` that knows one partition; no job can be queued with it."""
    asked = tmp_path / "sinfo"
    asked.write_text("#!/bin/sh\necho 'main*|up|9|99|(null)'\n")
    asked.chmod(0o755)
    return tmp_path


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 2, (done.returncode, said)
    assert "Traceback" not in said and "heavy package" not in said, said
    for word in words:
        assert word in said, f"{word!r} is missing in:\n{said}"


VOCAB, BUILD, TRAIN = ("data_prep", "vocab"), ("data_prep", "build"), ("pretrain", "train")
T = "t.yaml"
MISTAKES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    # recipes and overrides
    ((*VOCAB, T, "vocab.sizee=3"), ("unknown key vocab.sizee", "did you mean vocab.size")),
    ((*TRAIN, T, "paralel.tp=2"), ("unknown key paralel", "did you mean parallel")),
    ((*TRAIN, T, "phases.0.schedule.lr=six"), ("phases.0.schedule.lr", "expected float")),
    (
        (*TRAIN, T, "shards.single_prob=0.5"),
        ("shards.single_prob", "did you mean shards.NAME.single_prob?"),
    ),
    ((*TRAIN, T, "--resume"), ("--resume", "key=value")),
    ((*VOCAB, "."), ("is a folder", "YAML")),
    ((*VOCAB, "bert-bse"), ("no such file", "did you mean bert-base")),
    ((*VOCAB, "nothing.yaml"), ("no sources", "add `sources:`")),
    ((*VOCAB, "list.yaml"), ("list.yaml", "key: value")),
    ((*VOCAB, "broken.yaml"), ("broken.yaml", "indentation")),
    ((*VOCAB, "circle.yaml"), ("circle.yaml", "leads back to itself")),
    ((*VOCAB, "latin.yaml"), ("latin.yaml", "->")),
    ((*VOCAB,), ("required: recipe\n",)),
    (("data_prep", "vocb", T), ("vocb", "did you mean vocab")),
    # text and vocabulary
    ((*VOCAB, T, "sources.0.path=missing"), ("missing", "->")),
    ((*VOCAB, T, "sources.0.path=empty"), ("empty", "->")),
    ((*VOCAB, T, "sources.0.path=blank"), ("a.txt", "empty file")),
    ((*VOCAB, T, "sources.0.kind=wiki"), ("wiki", "wikipedia")),
    ((*VOCAB, T, "work_dir=v", "sources.0.kind=wikipedia", "sources.0.path=cut.bz2"), ("cut.bz2",)),
    ((*VOCAB, T, "work_dir=v", "vocab.file=nomask.txt"), ("nomask.txt", "[MASK]", "->")),
    ((*VOCAB, T, "work_dir=v", "vocab.file=missing.txt"), ("missing.txt", "->")),
    ((*VOCAB, T, "vocab.size=3"), ("vocab.size=3", "6")),
    ((*VOCAB, T, "vocab.kind=wordpeace"), ("wordpeace", "wordpiece")),
    ((*VOCAB, T, "work_dir=file"), ("file: cannot be made", "->")),
    ((*VOCAB, T, "vocab.size=50"), ("w/vocab", "size", "another work_dir")),
    ((*BUILD, T, "work_dir=v"), ("v/vocab", "data_prep vocab")),
    ((*BUILD, T, "--set", "len512"), ("len512", "->")),
    ((*BUILD, T, "shards.len128.max_length=0"), ("shards.len128.max_length=0", "->")),
    ((*BUILD, T, "prep.held_out=1.5"), ("prep.held_out=1.5", "->")),
    (("data_prep", "inspect", "src"), ("src/index.json", "->")),
    (("data_prep", "verify", "missing"), ("missing",)),
    # training
    ((*TRAIN, T, "work_dir=v"), ("v/shards/len128", "data_prep build")),
    ((*TRAIN, T, "parallel.tp=3"), ("parallel.tp=3", "1 processes")),
    ((*TRAIN, T, "model.num_heads=3"), ("model.num_heads=3", "hidden_size=128")),
    ((*TRAIN, T, "phases.0.global_batch=0"), ("phases.0.global_batch=0", "->")),
    ((*TRAIN, T, "phases.0.shards=len512"), ("len512", "len128")),
    ((*TRAIN, T, "model.max_position_embeddings=16"), ("32", "max_position_embeddings")),
    ((*TRAIN, T, "parallel.micro_batch_tokens=10"), ("micro_batch_tokens=10", "at least 32")),
    ((*TRAIN, T, "parallel.zero_stage=3"), ("zero_stage=3", "0, 1 or 2")),
    ((*TRAIN, T, "train.stop_at=-3"), ("train.stop_at=-3", "0 or more")),
    ((*TRAIN, T, "train.log_every=0"), ("train.log_every=0", "1 or more")),
    ((*TRAIN, T, "optimizer.beta1=1.5"), ("optimizer.beta1=1.5", "->")),
    ((*TRAIN, T, "optimizer.eps=nan"), ("optimizer.eps=nan", "->")),
    ((*TRAIN, T, "checkpoint.init_from=missing"), ("missing", "checkpoint")),
    # afterwards
    (("pretrain", "report", "missing"), ("missing", "->")),
    (("pretrain", "report", "logged", "--output", "file/r.html"), ("file", "another --output")),
    (("pretrain", "export", "missing", "out"), ("missing", "->")),
    (("pretrain", "export", "w", "file"), ("file", "-> a part of this path is a file: choose")),
    (("pretrain", "import", "w", "file"), ("file", "-> a part of this path is a file: choose")),
    (("pretrain", "evaluate", "w"), ("--shards", "--blimp")),
    (("pretrain", "finetune", "colla", "--model", "w", "--out", "o"), ("colla", "cola")),
    (("cluster", "submit", T, "--profile", "nosite", "--dry-run"), ("nosite", "gpu-srun")),
    (("cluster", "plan", T, "--gpus", "8", "--card", "H999"), ("H999", "H100")),
    (("cluster", "plan", T, "--gpus", "0"), ("--gpus 0", "at least 1")),
    (("cluster", "plan", T, "--gpus", "8", "--network-gbit", "0"), ("--network-gbit 0",)),
    (("cluster", "plan", T, "--gpus", "8", "--minutes", "-1"), ("--minutes -1",)),
    (("cluster", "hostfile", "--nodes", "n[1-2]", "--slots", "0"), ("--slots 0",)),
    (("cluster", "status", "missing"), ("missing", "->")),
    (("cluster", "demo", "missing.yaml"), ("missing.yaml", "->")),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES, ids=lambda v: " ".join(v)[:60])
def test_a_mistake_is_named_with_its_remedy(base, command, words):
    refused(run(base, *command), *words)


# Folders that nobody can make, not even root, whose rights go past modes.
IMPOSSIBLE = ["/proc/x", "/dev/null/x", "/sys/x", "file/x", "w/" + 300 * "x"]
MAKERS: list[tuple[str, ...]] = [
    (*VOCAB, T, "work_dir={}"),
    ("data_prep", "sample", "{}"),
    (*TRAIN, T, "work_dir={}"),
    ("pretrain", "report", "logged", "--output={}/r.html"),
    ("cluster", "submit", T, "--profile", "cpu", "work_dir={}"),
    ("cluster", "preflight", "--no-all-reduce", "--folder={}"),
    ("cluster", "hostfile", "--nodes=n[1-2]", "-o={}/hosts"),
]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda v: " ".join(v[:2]))
def test_a_folder_that_cannot_be_made_is_named(base, scheduler, maker):
    for folder in IMPOSSIBLE:
        command = [word.format(folder) for word in maker]
        refused(run(base, *command, PATH=f"{scheduler}:{os.environ['PATH']}"), folder, "->")


@pytest.mark.parametrize("path", [".", "..", "/"])
def test_paths_without_a_name_of_their_own(base, path):
    """Run inside a shard folder, so that `.` is one."""
    lines = [
        ("data_prep", "verify", path),
        ("data_prep", "inspect", path),
        ("data_prep", "audit", path),
        ("pretrain", "report", path),
        ("pretrain", "export", "../..", path),
        ("pretrain", "import", path, "out"),
        ("pretrain", "finetune", "cola", "--model", path, "--data", path, "--out", path),
        ("cluster", "status", path),
    ]
    for line in lines:
        done = run(base / "w" / "shards" / "len128", *line, PYTHONPATH=str(ROOT))
        assert "Traceback" not in done.stderr, (line, done.stderr)
        good = path == "." and line[0] == "data_prep" or line[1:] == ("verify", "..")
        assert done.returncode == 0 if good else done.returncode in (1, 2), line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda w: next((w / "shards/len128").glob("part-*")).unlink(), ("part-00000", "build")),
        (lambda w: (w / "shards/len128/index.json").unlink(), ("index.json", "build")),
        (lambda w: (w / "shards/len128/index.json").write_text("{"), ("index.json", "build")),
        (lambda w: (w / "shards/len128/index.json").write_text("[]"), ("index.json", "build")),
        (lambda w: shutil.rmtree(w / "vocab"), ("vocab/tokenizer.json", "data_prep vocab")),
        (lambda w: (w / "shards/len128/tokenizer.json").write_text("x"), ("tokenizer.json",)),
    ],
    ids=["part", "no-index", "half-index", "foreign-index", "no-vocab", "tokenizer"],
)
def test_a_damaged_work_dir_is_named(base, work, damage, words):
    damage(work)
    refused(run(base, *TRAIN, T, f"work_dir={work}"), *words)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("vocab/vocab.json", (*VOCAB, T)),
        ("shards/len128/.build/settings.json", (*BUILD, T)),
    ],
)
def test_a_damaged_note_of_our_own_is_named(base, work, file, command):
    if ".build" in file:
        (work / "shards/len128/index.json").unlink()
    (work / file).parent.mkdir(exist_ok=True)
    (work / file).write_text("{")
    refused(run(base, *command, f"work_dir={work}"), file, "is damaged", "->")


def test_a_corrupted_tokenizer_is_named(base, work):
    (work / "vocab" / "tokenizer.json").write_text("garbage")
    refused(run(base, *BUILD, T, f"work_dir={work}"), "vocab/tokenizer.json", "->")


def test_a_port_in_use_is_named(base):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        world = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        done = run(base, *TRAIN, T, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **world)
    refused(done, f"port {port}", "MASTER_PORT")


def test_a_machine_with_a_gpu_and_no_compiler_is_named(base, tmp_path):
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 81559\n")
    asked.chmod(asked.stat().st_mode | stat.S_IXUSR)
    done = run(base, *TRAIN, T, CUDA_VISIBLE_DEVICES="0", PATH=str(tmp_path), CC="")
    refused(done, "compiler", "gcc")


def test_a_second_training_in_the_same_folder_is_refused(base, work):
    import fcntl

    (work / "train").mkdir()
    with (work / "train" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(run(base, *TRAIN, T, f"work_dir={work}"), str(work / "train"), "running")


@pytest.mark.parametrize("room", ["data_prep", "pretrain", "cluster"])
def test_help_of_a_room_and_of_its_commands_imports_nothing_heavy(base, room):
    listed = run(base, room, "--help")
    assert listed.returncode == 0
    commands = [line.split()[0] for line in listed.stdout.split("commands:")[1].splitlines()
                if line.startswith("  ") and line[2] != " "]  # fmt: skip
    assert len(commands) >= 5
    for command in commands:
        done = run(base, room, command, "--help")
        assert done.returncode == 0 and "usage:" in done.stdout, (command, done.stderr)
