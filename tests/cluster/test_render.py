"""What sbatch reads of a script's options, whatever the names and texts of recipe and profile."""

import shlex
import subprocess
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.slurm.chain import Job
from cluster.slurm.render import render
from configs.schema import Profile, Recipe

TEXT = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_categories=["Cc"]), min_size=1
)


@given(name=TEXT, value=TEXT, folder=TEXT)
@example("my bert", "nightly run", "a b")
@example("bert's", "1-10%2 # no comment", "50% 'mine'")
def test_sbatch_reads_names_and_options_as_they_were_given(name, value, folder):
    profile = Profile(partition=value, account=value, qos=value)
    profile.sbatch_options = {"comment": value, "exclusive": ""}
    job = Job("train-one", 1, 1, 0, 0, "1:00", [])
    script = render(job, Recipe(name=name), profile, Path("/x") / folder, Path("/"))
    lines = [line for line in script.split("\n") if line.startswith("#SBATCH ")]
    options = [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]
    assert len(options) == len(lines) and f"--job-name={name}-train-one" in options
    for key in ("partition", "account", "qos", "comment"):
        assert f"--{key}={value}" in options
    path = str(Path("/x") / folder / "train-one.log").replace("%", "%%")
    assert "--exclusive" in options and f"--output={path}" in options
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
