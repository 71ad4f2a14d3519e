"""Models that are named as on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import UserError
from pretrain.convert.importing import import_model
from pretrain.convert.layouts import read_foreign


@pytest.mark.parametrize("name", ["nobody/no-such-bert", "nobody/no-such-bert-v1.5"])
def test_a_name_that_is_neither_path_nor_hub_model_is_refused(tmp_path: Path, name: str) -> None:
    """Offline (HF_HUB_OFFLINE=1 in tests) every hub name is one that cannot be had."""
    with pytest.raises(UserError, match="neither a path here nor a model of the hub"):
        import_model(Path(name), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no such file"):
        import_model(Path("nobody/model.pt"), tmp_path / "out")


def test_a_wrong_name_below_a_folder_is_a_path_and_no_hub_name(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="runs/nope: no such file"):
        import_model(Path("runs/nope"), tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], "model*.safetensors*"),
        (
            ["model.safetensors.index.json", "model-00001-of-00001.safetensors"],
            "model*.safetensors*",
        ),
        (
            ["pytorch_model.bin", "onnx/model.safetensors", "adapter.safetensors"],
            "pytorch_model*.bin*",
        ),
    ],
)
def test_what_is_fetched_of_a_hub_model_holds_its_weights(
    hf_folder: Path, monkeypatch, files: list[str], wanted: str
) -> None:
    """A stand-in for the hub: other people's files of the same kind lie beside the weights."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name: files)
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, allow_patterns: asked.append(allow_patterns[-1]) or hf_folder,
    )
    assert read_foreign(Path("owner/bert-v1.5")).config.num_layers == 2
    assert asked == [wanted]
