"""What ranks find out about each other when a training comes up."""

from __future__ import annotations

import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from configs.errors import UserError
from pretrain.checkpoint import checkpoints, save_logical
from tests.trainer.launch import world
from tests.trainer.runs import output, plan, spell, train

MASKS = [range(8), range(8), range(8, 14)]


def threads() -> int:
    from pretrain import starting

    os.sched_getaffinity = lambda _: set(MASKS[dist.get_rank()])  # type: ignore[assignment]
    return starting._threads()


def test_ranks_share_the_cpus_that_both_may_use_and_no_others() -> None:
    assert world(3, "tests.trainer.test_starting:threads") == [4, 4, 6]


@pytest.mark.parametrize(
    ("precision", "size", "refused"),
    [
        ("fp16", 1, True),
        ("fp8", 1, True),
        ("fp32", 2, True),
        ("bf16", 2, True),
        ("fp32", 1, False),
        ("bf16", 1, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_replaced_only_where_a_cpu_will_do(
    precision, size, refused, run
) -> None:
    from pretrain import starting

    if torch.cuda.is_available():
        pytest.skip("needs a machine whose GPU, if any, torch cannot use")
    found = plan(run, world=size)
    found.device, found.recipe.train.precision = "cuda", precision  # as nvidia-smi lets one think
    if refused:
        with pytest.raises(UserError, match="this torch cannot use it") as caught:
            starting._device(found)
        assert "CUDA_VISIBLE_DEVICES=" in caught.value.remedy
    else:
        assert starting._device(found).type == "cpu"
        assert "training on the CPU" in found.warnings[-1]


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("a b " * 30, r"a sentence of \d+ word pieces, the model has 48 positions"),
        (None, "holds no pairs"),
        ("no parquet", ""),
    ],
)
def test_a_probe_that_cannot_be_read_is_refused_while_the_checkpoints_stand(
    sentence, message, run, tmp_path
) -> None:
    """With checkpoint.resume=false they were set aside, and a stack trace came after."""
    (run / "vocab").unlink()
    spell(run / "vocab")
    file = tmp_path / "probe.parquet"
    columns = ("linguistics_term", "UID", "sentence_good", "sentence_bad")
    text = pa.array([sentence] if sentence else [], pa.string())
    pq.write_table(pa.table(dict.fromkeys(columns, text)), file)
    if sentence == "no parquet":
        file.write_text(sentence)
    save_logical(run / "train", {"x": torch.zeros(2)}, {"model": {}}, 5)
    assert train(run, f"train.probe={file}", "checkpoint.resume=false") == [2], output(run)
    assert re.search(f"error: train.probe={file}: {message}", output(run)), output(run)
    assert "Traceback" not in output(run)
    assert [step for step, _ in checkpoints(run / "train")] == [5]
