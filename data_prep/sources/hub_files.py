"""Which files a data set's configuration and split are, in a local folder or on the hub.

The rules are those of `datasets` for sets without a script: the README's `configs`, else a folder
named like the configuration and files named like the split. Nothing is converted or copied; files
are read where they are (locally, in the hub's cache, or as a stream).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from configs.errors import UserError
from configs.schema import SourceConfig
from data_prep.sources.base import check_file, check_numbered, files_below, find_files, matches

FORMATS = (
    (".parquet",),
    (".arrow",),
    (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst"),
    (".txt", ".txt.gz", ".txt.zst"),
)
SUFFIXES = tuple(suffix for group in FORMATS for suffix in group)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|dev|eval)(?=[/_.-]|\d|$)")
PARQUET_COPY = "refs/convert/parquet"  # the hub makes one of sets that need a script
LOOKS_LIKE = "a data set's name on the hub, or parquet, arrow, jsonl or text files"


def resolve(config: SourceConfig) -> list[str]:
    """Paths of the data set's files, in order: local ones, or hf:// addresses when streaming.

    Raises:
        UserError: nothing there, no such configuration or split, a set that needs a script, or the
            hub cannot be reached.
    """
    path = Path(config.path)
    if path.is_dir():
        names = sorted(
            p.relative_to(path).as_posix()
            for p in files_below(path)
            if not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        readme = path / "README.md"
        # Only its YAML counts here; one letter of another encoding hides nothing of it.
        text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
        chosen = [path / name for name in choose(names, text, config)]
        for file in chosen:
            check_file(file, f"source {config.name or config.path!r} (kind: hub)")
        return [str(file) for file in chosen]
    if (
        path.exists()
        or any(mark in config.path for mark in "*?[")
        or not _NAME.fullmatch(config.path)
    ):
        return [str(file) for file in find_files(config, SUFFIXES, LOOKS_LIKE)]
    return _from_hub(config)


def choose(names: Sequence[str], readme: str, config: SourceConfig) -> list[str]:
    """Of all files of a set, those of the wanted configuration and split, of one format."""
    where = f"source {config.name or config.path!r} (kind: hub)"
    data = [name for name in names if name.lower().endswith(SUFFIXES)]
    if not data:
        scripts = [name for name in names if name.endswith(".py") and "/" not in name]
        if scripts:
            raise UserError(
                f"{where}: {config.path} is a script data set ({scripts[0]}), which datasets >= 4 "
                "refuses to run",
                f"set revision: {PARQUET_COPY} on this source (the hub's parquet copy of it)",
            )
        raise UserError(f"{where}: no data files in {config.path}", f"it reads {LOOKS_LIKE}")
    listed, patterns = _readme_configs(readme, where), ["*"]
    if listed:
        patterns = _listed_patterns(listed, config, where)
        data = [name for name in data if any(_matches(name, p) for p in patterns)]
    else:
        if config.config:
            inside = [name for name in data if config.config in PurePosixPath(name).parts[:-1]]
            if not inside:
                folders = sorted({PurePosixPath(n).parts[0] for n in data if "/" in n})
                remedy = (
                    f"folders: {', '.join(folders)}" if folders else "leave sources.N.config empty"
                )
                raise UserError(f"{where}: no configuration {config.config!r}", remedy)
            data = inside
        data = _of_split(data, config, where)
    for group in FORMATS:
        found = sorted(name for name in data if name.lower().endswith(group))
        if found:
            check_numbered(found, patterns, where)
            return found
    raise UserError(f"{where}: no data files of split {config.split!r}", f"it reads {LOOKS_LIKE}")


def _not_understood(where: str) -> UserError:
    return UserError(
        f"{where}: README.md: configs not understood", "name the files in sources.N.path"
    )


def _readme_configs(readme: str, where: str) -> list[dict[str, Any]]:
    """`configs` of the YAML at the top of a README.md."""
    if not readme.startswith("---"):
        return []
    try:
        head = yaml.safe_load(readme.split("\n---", 1)[0].removeprefix("---"))
    except yaml.YAMLError:
        return []
    configs = (head.get("configs") if isinstance(head, dict) else None) or []
    if not isinstance(configs, list) or not all(isinstance(one, dict) for one in configs):
        raise _not_understood(where)
    return [one for one in configs if one.get("data_files")]


def _listed_patterns(listed: list[dict[str, Any]], config: SourceConfig, where: str) -> list[str]:
    names = [str(one.get("config_name", "default")) for one in listed]
    if config.config:
        wanted = [one for one in listed if one.get("config_name") == config.config]
    else:
        wanted = [o for o in listed if o.get("default") or o.get("config_name") == "default"]
        wanted = wanted or (listed if len(listed) == 1 else [])
    if not wanted:
        missing = f"no configuration {config.config!r}" if config.config else "which configuration?"
        shown = ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")
        raise UserError(f"{where}: {missing}", f"set sources.N.config to one of: {shown}")
    files = wanted[0]["data_files"]
    if _is_text(files):
        files = [{"split": "train", "path": files}]
    if not isinstance(files, list):
        raise _not_understood(where)
    patterns: list[str] = []
    for entry in files:
        if not isinstance(entry, dict) or not _is_text(entry.get("path")):
            raise _not_understood(where)
        if entry.get("split", "train") == config.split:
            path = entry["path"]
            patterns += [path] if isinstance(path, str) else path
    patterns = [pattern.removeprefix("./") for pattern in patterns]
    if not patterns:
        splits = ", ".join(str(entry.get("split", "train")) for entry in files)
        raise UserError(f"{where}: no split {config.split!r}", f"splits: {splits}")
    return patterns


def _is_text(value: Any) -> bool:
    """A string, or a list of some."""
    return isinstance(value, str) or (
        isinstance(value, list) and value != [] and all(isinstance(one, str) for one in value)
    )


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern.rstrip("/") + "/") or matches(name, pattern)


def _of_split(data: list[str], config: SourceConfig, where: str) -> list[str]:
    splits = {name: list(_SPLIT.findall(name)) for name in data}
    if not any(splits.values()):
        return data if config.split == "train" else _no_split(["train"], config, where)
    found = [name for name, marks in splits.items() if config.split in marks]
    unmarked = [name for name, marks in splits.items() if not marks]
    if not found and config.split == "train":
        found = unmarked
    known = sorted({mark for marks in splits.values() for mark in marks})
    return found or _no_split(known, config, where)


def _no_split(known: list[str], config: SourceConfig, where: str) -> list[str]:
    raise UserError(f"{where}: no split {config.split!r}", f"splits: {', '.join(known)}")


def _from_hub(config: SourceConfig) -> list[str]:
    """Files of a set on the hub: addresses when streaming, else paths in the hub's cache."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, revision = config.path, config.revision or None
    where = f"source {config.name or name!r} (kind: hub)"
    at = f" (revision {revision})" if revision else ""
    try:
        names = _list_files(name, revision)
        if names is None:
            cached = _cached(name, revision)
            if cached is None:
                option = f" --revision {revision}" if revision else ""
                script = (
                    ""
                    if revision
                    else (
                        "; a set that is a script, as bookcorpus, has a parquet copy: "
                        f"revision: {PARQUET_COPY} on this source, --revision {PARQUET_COPY} there"
                    )
                )
                raise UserError(
                    f"{where}: {name}{at} is neither a local path nor downloaded, "
                    "and the hub is not reachable",
                    "check the path, or download it first: "
                    f"hf download {name} --repo-type dataset{option}{script}",
                )
            return resolve(_at(config, str(cached)))
        readme = ""
        if "README.md" in names:
            file = hf_hub_download(name, "README.md", repo_type="dataset", revision=revision)
            readme = Path(file).read_text(encoding="utf-8", errors="replace")
        chosen = choose(names, readme, config)
        if config.streaming:
            marked = f"@{revision.replace('/', '%2F')}" if revision else ""
            return [f"hf://datasets/{name}{marked}/{file}" for file in chosen]
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=chosen
        )
        return [str(Path(folder) / file) for file in chosen]
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{where}: {name}{at}: {reason}",
            "check the name, the revision and your access (hf auth login)",
        ) from error


def _list_files(name: str, revision: str | None) -> list[str] | None:
    """Names of a set's files, or None where the hub cannot be reached (said within seconds)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().repo_info(name, repo_type="dataset", revision=revision, timeout=5)
    except HfHubHTTPError:
        raise
    except Exception:  # connection errors of whatever HTTP library huggingface_hub uses
        return None
    return sorted(sibling.rfilename for sibling in getattr(info, "siblings", None) or [])


def _cached(name: str, revision: str | None) -> Path | None:
    """What the hub's cache holds of a set: snapshot_download refuses one of which only some files
    were wanted."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _at(config: SourceConfig, folder: str) -> SourceConfig:
    return SourceConfig(**{**vars(config), "path": folder})
