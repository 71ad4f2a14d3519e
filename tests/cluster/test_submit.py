import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import hostfile, submit
from cluster.launch import training_processes
from cluster.slurm.chain import build_chain
from cluster.slurm.check_chain import seconds_of
from cluster.slurm.client import count_gpus
from cluster.slurm.render import work_key
from configs import UserError, load_profile, load_recipe
from configs.errors import PREEMPTED_EXIT

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: r\nwork_dir: {tmp_path}/my run\nmodel: {{preset: bert-tiny}}\n"
        "phases:\n  - {name: one, steps: 30}\n  - {name: two, steps: 12}\n"
    )
    return str(path)


@pytest.fixture
def profile(tmp_path):
    def write(text):
        path = tmp_path / "site.yaml"
        path.write_text(text)
        return str(path)

    return write


def dry_run(capsys, recipe, profile, *more):
    submit.main([recipe, "--profile", profile, "--dry-run", *more])
    text = capsys.readouterr().out
    pieces = re.split(r"^# =+ (\S.*)\.sbatch =+\n", text, flags=re.M)[1:]
    return {path.rsplit("/", 1)[1]: script for path, script in zip(pieces[::2], pieces[1::2])}


@pytest.mark.parametrize("site", ["gpu-srun", "gpu-container", "cpu"])
def test_shipped_profiles_make_scripts_that_bash_accepts(capsys, recipe, site):
    scripts = dry_run(capsys, recipe, site)
    assert list(scripts) == ["prep", "train-one", "train-two", "export", "evaluate"]
    for script in scripts.values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "train.stop_at=30" in scripts["train-one"]
    assert "train.stop_at=42" in scripts["train-two"]  # updates of the whole run


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "configs/recipes").glob("*.yaml")))
def test_every_shipped_recipe_is_a_chain_on_the_readmes_profile(capsys, profile, name):
    text = (ROOT / "README.md").read_text()
    site = profile(re.search(r"```yaml\n(name: my-site\n.*?)```", text, re.S)[1])
    scripts = dry_run(capsys, name, site)
    assert len(scripts) == len(load_recipe(name).phases) + 3
    for script in scripts.values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_slurm_without_a_cluster_is_told(recipe, profile, tmp_path, monkeypatch):
    text = "sinfo: fatal: Could not establish a configuration source"
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\necho {text} >&2\nexit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="login node, or set SLURM_CONF"):
        submit.main([recipe, "--profile", profile("nodes: 1")])


def test_what_a_profile_says_is_in_the_scripts(capsys, recipe, profile):
    site = profile(
        "partition: p\naccount: a\nqos: q\nnodes: 2\ngpus_per_node: 4\ncpus_per_task: 6\n"
        "modules: [cuda/13]\nsetup: ['source env.sh']\nenvironment: {NCCL_DEBUG: 'IN FO'}\n"
        "container: apptainer exec --nv x.sif\nsrun_options: --foo\npython: py\noffline: true\n"
        "wheelhouse: /w\nstage_shards_to: /local\nsignal: USR2\nsignal_lead_s: 77\n"
        "sbatch_options: {exclusive: '', reservation: r1}\nprep_nodes: 2\n"
    )
    scripts = dry_run(capsys, recipe, site)
    for line in (
        "#SBATCH --partition=p\n#SBATCH --account=a\n#SBATCH --qos=q\n",
        "#SBATCH --exclusive\n#SBATCH --reservation=r1\n",
        "#SBATCH --gres=gpu:4\n",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n",
        "#SBATCH --signal=B:USR2@77\n",
        "#SBATCH --open-mode=append\n#SBATCH --requeue\n",
        "module load cuda/13\n",
        "export NCCL_DEBUG='IN FO'\n",
        "export HF_HUB_OFFLINE=1",
        "export PIP_FIND_LINKS=/w\n",
        "source env.sh\n",
        "--cpus-per-task=6 --foo apptainer exec --nv x.sif py -m pretrain train",
        "guard.save_signals=[SIGTERM,SIGINT,SIGUSR2]",
        "train.shards_dir=/local/r",
        "-m cluster preflight --folder",
    ):
        assert line in scripts["train-one"], line
    assert "--mpi=pmix" in scripts["prep"]
    assert "prep.executor=mpi" in scripts["prep"]


def srun_calls(script, folder):
    """Runs a script's shell text; the words of each of its srun commands, as srun would get them."""
    srun = folder / "srun"
    srun.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" END >> "{folder}/calls"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    subprocess.run(["bash"], input=script, text=True, check=True, env=env, timeout=600)
    return [
        call.strip("\n").split("\n") for call in (folder / "calls").read_text().split("END\n")[:-1]
    ]


@pytest.fixture
def in_work_dir(recipe, tmp_path, monkeypatch):
    """Scripts write their events below work_dir, from a folder with a blank in its name."""
    (tmp_path / "my run" / "slurm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my run")
    return tmp_path


def test_pyxis_gets_the_options_it_documents(capsys, recipe, in_work_dir):
    # Of `srun --help` with pyxis 0.20; an unknown one would end the job at once.
    known = {"image", "mounts", "workdir"}
    script = dry_run(capsys, recipe, "gpu-container")["train-one"]
    calls = srun_calls(script, in_work_dir)
    assert len(calls) == 2  # preflight and training
    for words in calls:
        options = words[: words.index("python3")]
        assert all(word.startswith("--") for word in options), options
        ours = dict(
            w.removeprefix("--container-").split("=", 1)
            for w in options
            if w.startswith("--container-")
        )
        assert set(ours) == known
        assert re.fullmatch(r"/[^:]+\.sqsh", ours["image"])
        assert re.fullmatch(r"/[^:,]+:/[^:,]+(:[a-z+]+)?", ours["mounts"])
        assert ours["workdir"] == str(in_work_dir / "my run")
        assert "--no-container-mount-home" in options
    assert calls[1][calls[1].index("python3") :][:4] == ["python3", "-m", "pretrain", "train"]


def test_apptainer_runs_each_task_in_the_image(capsys, recipe, in_work_dir):
    comment = (ROOT / "configs/profiles/gpu-container.yaml").read_text()
    container = re.search(r"container: (apptainer .*)", comment)[1]
    change = ["--set", "srun_options=", "--set", f"container={container}"]
    script = dry_run(capsys, recipe, "gpu-container", *change)["train-one"]
    for words in srun_calls(script, in_work_dir):
        start = words.index("apptainer")
        assert all(word.startswith("--") for word in words[:start])
        # apptainer exec [options] IMAGE COMMAND: --nv shows the GPUs, --bind a folder of the host
        assert words[start:][:5] == ["apptainer", "exec", "--nv", "--bind", "/lustre"]
        assert words[start + 5].endswith(".sif")
        assert words[start + 6 : start + 8] == ["python3", "-m"]


@pytest.mark.parametrize("starter", ["torchrun", "deepspeed"])
def test_starters_run_once_a_node(capsys, recipe, profile, starter):
    site = profile(f"nodes: 2\ntasks_per_node: 4\npreflight: false\nstarter: {starter}\n")
    line = re.search(r"^train (.*)$", dry_run(capsys, recipe, site)["train-one"], re.M)[1]
    assert line.startswith("srun --ntasks=2 --ntasks-per-node=1 ")
    assert (
        f"-m cluster launch --starter {starter} --processes 4 -- python -m pretrain train" in line
    )


@pytest.mark.parametrize(
    ("site", "arguments", "named"),
    [
        ("nods: 2", [], "did you mean nodes"),
        ("nodes: two", [], "nodes"),
        ("starter: srunn", [], "starter=srunn"),
        ("nodes: 0", [], "nodes=0"),
        ("{gpus_per_node: 2, tasks_per_node: 4}", [], "tasks_per_node=4"),
        ("{nodes: 3, tasks_per_node: 3}", ["parallel.tp=2"], "divide the 9 processes"),
        ("{nodes: 2, tasks_per_node: 1}", ["parallel.tp=2"], "within a node"),
        (
            "tasks_per_node: 2",
            ["parallel.engine=lean", "parallel.zero_stage=2"],
            "parallel.engine=lean has no zero_stage=2",
        ),
        (
            "tasks_per_node: 2",
            ["optimizer.implementation=reference", "parallel.zero_stage=1"],
            "optimizer.implementation=reference takes each tensor's norm on one rank",
        ),
        (
            "tasks_per_node: 1",
            ["optimizer.implementation=apex", "optimizer.orthogonal_lr=2"],
            "optimizer.implementation=apex knows no optimizer.orthogonal_lr",
        ),
        ("nodes: 1", ["parallel.tq=2"], "known here: tp"),
        ("nodes: 1", ["phases.1.name=one"], "one, one"),
        ("{nodes: 1, time_limit: '2', signal_lead_s: 180}", [], "signal_lead_s=180"),
        ("time_limit: soon", [], "time_limit=soon is no time"),
        ("prep_time_limit: 1-2-3", [], "prep_time_limit=1-2-3 is no time"),
        ("signal: FOO", [], "signal=FOO is not known"),
        ("signal: SIGUSR1", [], "signal=SIGUSR1 is not known"),
        ("max_restarts: -1", [], "max_restarts=-1"),
        ("environment: {A B: x}", [], "environment.'A B' is not a name"),
        ("environment: {'A=1;B': x}", [], "environment.'A=1;B' is not a name"),
        ("sbatch_options: {foo bar: '1'}", [], "sbatch_options.'foo bar' is not a name"),
        ("nodes: 1", ["checkpoint.resume=false"], "the next phase's would start anew"),
        ("nodes: 1", ["parallel.zero_stage=3"], "zero_stage=3"),
        ("tasks_per_node: 4", ["parallel.tp=4"], "num_heads=2 is not divisible by parallel.tp=4"),
        ("tasks_per_node: 8", ["phases.1.global_batch=7"], "over 8 data-parallel"),
        (
            "nodes: 1",
            ["shards.len128.max_length=128", "parallel.micro_batch_tokens=127"],
            "micro_batch_tokens=127 is below the 128 tokens",
        ),
        (
            "nodes: 1",
            ["shards.len128.max_length=100", "parallel.micro_batch_tokens=100"],
            "micro_batch_tokens=100 is below the 112 tokens",
        ),
        ("nodes: 1", ["model.max_position_embeddings=64"], "model.max_position_embeddings=64"),
        ("nodes: 1", ["model.type_vocab_size=1"], "model.type_vocab_size=1"),
        ("nodes: 1", ["guard.save_signals=[FOO]"], "FOO is not a signal"),
        ("gpus_per_node: 0", ["train.precision=fp16"], "train.precision=fp16 needs a GPU"),
        ("nodes: 1", ["train.probe=nosuch"], "train.probe=nosuch: not there"),
        ("nodes: 1", ["checkpoint.init_from=nosuch"], "checkpoint.init_from=nosuch: not there"),
        ("nodes: 1", ["phases=[]"], "phases is empty"),
        (
            "tasks_per_node: 1",
            ["shards.len128.objective=full-sentences"],
            "shards.len128 has rows without a next sentence",
        ),
        (
            "tasks_per_node: 1",
            ["shards.len128={objective: single, single_prob: 0.5}", "model.nsp_head=false"],
            "shards.len128.single_prob=0.5 with objective single",
        ),
    ],
)
def test_bad_input_is_named_before_anything_is_queued(recipe, profile, site, arguments, named):
    with pytest.raises(UserError) as caught:
        submit.main([recipe, *arguments, "--profile", profile(site)])
    assert named in str(caught.value)


def test_no_sbatch_here(recipe, profile, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="is not installed here.*\n.*--dry-run"):
        submit.main([recipe, "--profile", profile("nodes: 1")])


def test_unknown_profile_names_the_shipped_ones(recipe):
    with pytest.raises(UserError, match="did you mean gpu-srun"):
        submit.main([recipe, "--profile", "gpu-srn"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:02:03", 3723),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:05", 86405),
        ("UNLIMITED", None),
        ("soon", None),
    ],
)
def test_time_limits(text, seconds):
    assert seconds_of(text) == seconds


def test_gres_forms():
    assert count_gpus("gpu:8") == 8
    assert count_gpus("gpu:h100:8(S:0-1),nvme:2") == 8
    assert count_gpus("gpu:a100:4,gpu:t4:2") == 6
    assert count_gpus("(null)") == 0


def test_what_was_made_of_something_else_is_made_again(recipe, profile, tmp_path):
    site = load_profile(profile("nodes: 1"), [])

    def todo(*overrides):
        jobs = build_chain(load_recipe(recipe, list(overrides)), tmp_path / "recipe.yaml", site)
        return jobs, [job.name for job in submit.unfinished(tmp_path, jobs)]

    first = load_recipe(recipe).phases[0].shards
    jobs, names = todo()
    assert names == [job.name for job in jobs]
    for job in jobs:
        (tmp_path / f"{job.name}.done").write_text(work_key(job) + "\n")
    assert todo()[1] == []
    assert todo("train.eval_every=7")[1] == []
    # Trained for longer: the model is exported and scored again, though those commands are the same.
    assert todo("phases.1.steps=20")[1] == ["train-two", "export", "evaluate"]
    # Or for more minutes; what is up to then is the trainer's to say.
    assert todo("train.max_minutes=5")[1] == ["train-one", "train-two", "export", "evaluate"]
    assert todo("vocab.size=999")[1] == names
    assert todo("sources=[{kind: text, path: other}]")[1] == names
    # So are shards whose rows keep as many predictions as the masking rates need, or hold masks.
    rate, cap = "phases.0.mask_probability=0.3", f"shards.{first}.mask_cap=40"
    assert todo(rate)[1] == todo("masking.probability=0.3")[1] == names
    assert todo("phases.0.mask_probability=0.1")[1] == todo("masking.kind=span")[1] == []
    (tmp_path / "prep.done").write_text(work_key(todo(cap)[0][0]) + "\n")
    assert todo(cap)[1] == todo(cap, rate)[1] == []
    static = f"shards.{first}.static_masks=true"
    (tmp_path / "prep.done").write_text(work_key(todo(static)[0][0]) + "\n")
    assert todo(static)[1] == [] and todo(static, "masking.replace_random=0.2")[1] == names


def test_slots_are_a_number_of_processes():
    with pytest.raises(UserError, match="--slots -3"):
        hostfile.main(["--nodes", "gpu[1-2]", "--slots", "-3"])


def test_hostfile_of_an_allocation(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[008-010]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2),3")
    hostfile.main([])
    assert capsys.readouterr().out == "gpu008 slots=4\ngpu009 slots=4\ngpu010 slots=3\n"
    hostfile.main(["--slots", "8", "-o", str(tmp_path / "hosts")])
    assert (tmp_path / "hosts").read_text().splitlines()[2] == "gpu010 slots=8"
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x5)")
    with pytest.raises(UserError, match="does not fit"):
        hostfile.main([])
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    with pytest.raises(UserError, match="not a SLURM allocation"):
        hostfile.main([])


def test_ctrl_c_waits_for_the_save_and_says_so_in_the_exit_code(tmp_path):
    """To the whole group, as a terminal does: the launcher left before its training had saved."""
    training = (
        "import pathlib, signal, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGINT, lambda *_: told.append(1))\n"
        "pathlib.Path(sys.argv[1], 'started').touch()\n"
        "while not told: time.sleep(0.05)\n"
        "time.sleep(1)  # the save\n"
        "pathlib.Path(sys.argv[1], 'saved').touch()\n"
        "sys.exit(75)\n"
    )
    line = [
        "-m",
        "cluster",
        "launch",
        "--starter",
        "torchrun",
        "--",
        sys.executable,
        "-c",
        training,
    ]
    process = subprocess.Popen(
        [sys.executable, *line, str(tmp_path)],
        start_new_session=True,
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 600
    while not (tmp_path / "started").exists() and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == PREEMPTED_EXIT, said.decode()
    assert (tmp_path / "saved").exists()


def test_signals_go_past_the_starter_to_the_topmost_ranks():
    worker = (
        "import subprocess, sys; print('up', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    )
    starter = (
        "import os, subprocess, sys\n"
        "ps = [subprocess.Popen([sys.executable, '-c', sys.argv[1]], env={**os.environ, 'RANK': str(r)},"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE) for r in range(2)]\n"
        "[p.stdout.readline() for p in ps]  # one that has just been started has no environment yet\n"
        "print(*(p.pid for p in ps), flush=True)\n"
        "input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", starter, worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    try:
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        assert sorted(training_processes(process.pid)) == sorted(ranks)
    finally:
        process.communicate("\n")
