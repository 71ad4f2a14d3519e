"""Reads recipes and profiles: YAML on typed dataclasses, `base:` files, `key=value` overrides.

Importing this costs 0.1 s, so that a wrong key is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from configs.errors import UserError
from configs.ranges import check_ranges
from configs.schema import Profile, Recipe, ShardsConfig
from configs.together import check_together

T = TypeVar("T")
HERE = Path(__file__).parent
DEFAULT_SET = "len128"  # of a recipe without `shards`


class _AsWritten(yaml.SafeLoader):
    """Leaves words as they are written, but for null: the schema knows which of them are numbers or
    switches. YAML would make 86400 of 24:00:00, 5349 of an account 012345, and False of a qos `no`."""

    yaml_implicit_resolvers = {
        first: [(tag, words) for tag, words in found if tag.endswith((":null", ":merge"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` (a file, or the name of one in configs/recipes) with overrides applied.

    Raises:
        UserError: no such file, broken YAML, unknown key, wrong type; names the key and its neighbour.
            A number out of range; a phase on rows that are not there, or cannot have its masks,
            or without time.
    """
    recipe = _load(Recipe, _find(path, "recipes"), overrides)
    sources = {f"sources.{number}.path": source for number, source in enumerate(recipe.sources)}
    # But for vocab.file, which a finished vocabulary was stamped with as it is written: its reader
    # expands it.
    _expand_home({
        "work_dir": recipe,
        "prep.abbreviations": recipe.prep,
        "checkpoint.init_from": recipe.checkpoint,
        "train.probe": recipe.train,
        "train.shards_dir": recipe.train,
        **sources,
    })  # fmt: skip
    recipe.shards = recipe.shards or {DEFAULT_SET: ShardsConfig()}
    check_ranges(recipe)
    check_together(recipe)
    return recipe


def _expand_home(sections: dict[str, Any]) -> None:
    """`~/x` is below the home folder, which no shell has said of a file's words or after `key=`.

    sections: what holds it, by key.
    """
    for name, section in sections.items():
        key = name.rpartition(".")[2]
        if (text := getattr(section, key)).startswith("~"):
            try:
                setattr(section, key, str(Path(text).expanduser()))
            except RuntimeError as error:
                raise UserError(f"{name}={text}: {error}", "write the path in full") from None


def load_profile(path: str | Path, overrides: Sequence[str] = ()) -> Profile:
    """The site profile at `path` or named in configs/profiles; errors as `load_recipe`."""
    profile = _load(Profile, _find(path, "profiles"), overrides)
    _expand_home({"stage_shards_to": profile})
    return profile


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass of this schema as plain dicts and lists (for JSON and YAML)."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config)))


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: old there, new now` of every leaf that differs between two `to_dict`s."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key, "nothing"), new.get(key, "nothing")
        if isinstance(a, list) and isinstance(b, list) and any(isinstance(x, dict) for x in a + b):
            a, b = ({str(i): x for i, x in enumerate(part)} for part in (a, b))
        if isinstance(a, dict) and isinstance(b, dict):
            lines += difference(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {_short(a)} there, {_short(b)} now")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _find(path: str | Path, folder: str) -> Path:
    path = Path(path)
    for candidate in (path, HERE / folder / path, HERE / folder / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder", f"name a YAML file, or one of the shipped {folder}")
    known = sorted(p.stem for p in (HERE / folder).glob("*.yaml"))
    near = get_close_matches(path.stem, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"{path}: no such file", f"{hint}shipped {folder}: {', '.join(known)}")


def _load(schema: type[T], path: Path, overrides: Sequence[str]) -> T:
    layers: list[tuple[str, dict[str, Any]]] = []
    _read_layers(path, layers, ())
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key or key.startswith("-"):
            raise UserError(f"override {text!r} is not key=value", "for example train.stop_at=100")
        _refuse_slip(key.split("."), layers, f"override {text!r}")
        try:
            given = yaml.load(value, _AsWritten) if value else ""  # `key=` empties a text
            layers.append((f"override {text!r}", _nest(key.split("."), given)))
        except yaml.YAMLError as error:
            quoted = f"""'{key}="{value}"'"""
            remedy = f"quote the value inside the shell's quotes as well: {quoted}"
            raise UserError(f"override {text!r}: {error}", remedy) from None
    return _build(schema, layers)


def _refuse_slip(
    keys: list[str], layers: Sequence[tuple[str, dict[str, Any]]], origin: str
) -> None:
    """One key below a set of shards that no layer has: a slip in its name rather than a new set."""
    if keys[0] != "shards" or len(keys) < 3:
        return
    given = [values["shards"] for _, values in layers if isinstance(values.get("shards"), dict)]
    known = list(dict.fromkeys(name for sets in given for name in sets)) or [DEFAULT_SET]
    if keys[1] not in known:
        near = get_close_matches(keys[1], known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"{origin}: no set of shards is called {keys[1]}",
            f"{hint}known sets: {', '.join(known)}; a new one is given whole: "
            f"'shards.{keys[1]}={{{'.'.join(keys[2:])}: ...}}'",
        )


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return cast(dict[str, Any], value)


def _read_layers(
    path: Path, layers: list[tuple[str, dict[str, Any]]], seen: tuple[Path, ...]
) -> None:
    if path.resolve() in seen:
        raise UserError(f"{path}: `base` leads back to itself", "break the circle of base files")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _AsWritten) or {}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}", "save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(
            f"{path}: not valid YAML: {error}", "check indentation and quotes"
        ) from None
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: holds a {type(values).__name__}, not keys", "write key: value lines"
        )
    base = values.pop("base", None)
    if base:
        if not isinstance(base, str):
            raise UserError(f"{path}: base={base} is no file", "name one YAML file")
        base_path = path.parent / Path(base).expanduser()
        if not base_path.is_file():
            raise UserError(f"{path}: base={base}: no such file", "base is relative to this file")
        _read_layers(base_path, layers, (*seen, path.resolve()))
    layers.append((str(path), values))


_PUT_IN = "${key} and ${oc.env:NAME,else} are put in; write \\${ for text that keeps it"


def _build(schema: type[T], layers: list[tuple[str, dict[str, Any]]]) -> T:
    merged = OmegaConf.structured(schema)
    for origin, values in layers:
        values = _apply_list_overrides(merged, values, origin)
        _check_keys(schema, values, origin, "")
        try:
            merged = OmegaConf.merge(merged, values)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or getattr(error, "key", "") or ""
            text = (getattr(error, "msg", None) or str(error)).splitlines()[0]
            if origin.startswith("override "):  # inside a list OmegaConf tells only the key's end
                key = origin.removeprefix("override ")[1:].partition("=")[0]
            elif (entry := _entry(schema, values)) and not str(key).startswith(entry):
                key = f"{entry}.{key}".removesuffix(".")
            remedy = _PUT_IN if isinstance(error, GrammarParseError) else ""
            remedy = remedy or _expected(schema, str(key))
            raise UserError(f"{origin}: {key}: {text}", remedy) from None
    try:
        if "work_dir" in merged and not merged.work_dir:
            merged.work_dir = "runs/${name}"
        return cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        text = (getattr(error, "msg", None) or str(error)).splitlines()[0]
        raise UserError(f"{getattr(error, 'full_key', None) or 'a key'}: {text}", _PUT_IN) from None


def _apply_list_overrides(merged: Any, values: dict[str, Any], origin: str) -> dict[str, Any]:
    """`phases.0.steps=10` reaches into a list: the list is rewritten with that one change."""
    for key, value in values.items():
        current = merged.get(key) if key in merged else None
        if OmegaConf.is_list(current) and isinstance(value, dict):
            items = cast(list[Any], OmegaConf.to_container(current))
            for index, change in value.items():
                if not str(index).isdecimal():
                    raise UserError(
                        f"{origin}: {key} is a list, and {index} is no place in it",
                        f'in a file put "- " before each entry; in an override {key}.0.{index}=...',
                    )
                if int(index) >= len(items):
                    raise UserError(
                        f"{origin}: {key}.{index} does not exist",
                        f"{key} has {len(items)} entries, counted from 0",
                    )
                items[int(index)] = _deep_merge(items[int(index)], change)
            values = {**values, key: items}
    return values


def _deep_merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{k: _deep_merge(old.get(k), v) for k, v in new.items()}}
    return new


def _check_keys(schema: Any, values: Any, origin: str, prefix: str) -> None:
    """Names an unknown key and the nearest known one, which OmegaConf's own message does not."""
    origin_type, arguments = get_origin(schema), get_args(schema)
    if origin_type in (list, dict):
        inner = arguments[-1]
        items = (
            enumerate(values)
            if isinstance(values, list)
            else (values or {}).items()
            if isinstance(values, dict)
            else ()
        )
        for key, item in items:
            _check_keys(inner, item, origin, f"{prefix}{key}.")
        return
    if schema is str and isinstance(values, list | dict):  # OmegaConf would write it as Python does
        key = prefix.removesuffix(".")
        remedy = "quote a text that holds `: ` or starts with `[` or `{`"
        if isinstance(values, list) and len(values) > 1:
            remedy = "give one; a source has one path, and more of them are more sources"
        raise UserError(f"{origin}: {key}={values} is no text", remedy)
    if not (isinstance(schema, type) and is_dataclass(schema)) or not isinstance(values, dict):
        return
    hints = get_type_hints(schema)
    known = [f.name for f in fields(schema)]
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            below = [name for name in known if key in _keys_of(hints[name])]
            if len(below) == 1:
                hint = f"did you mean {prefix}{below[0]}.{key}?"
            elif near:
                hint = f"did you mean {prefix}{near[0]}?"
            else:
                hint = f"known here: {', '.join(known)}"
            raise UserError(f"{origin}: unknown key {prefix}{key}", hint)
        _check_keys(hints[key], value, origin, f"{prefix}{key}.")


def _keys_of(schema: Any) -> Sequence[str]:
    return [f.name for f in fields(schema)] if is_dataclass(schema) else []


def _entry(schema: type[T], values: Mapping[str, Any]) -> str:
    """The key at the top of a file, or its entry of a list, that cannot be merged; "" if all can.
    OmegaConf tells only what stands below it."""
    hints = get_type_hints(schema)
    for key, value in values.items():
        listed = isinstance(value, list) and get_origin(hints[key]) is list
        for number, part in enumerate([[item] for item in value] if listed else [value]):
            try:
                OmegaConf.merge(OmegaConf.structured(schema), {key: part})
            except OmegaConfBaseException:
                return f"{key}.{number}" if listed else key
    return ""


def _expected(schema: Any, key: str) -> str:
    parts = key.replace("[", ".").replace("]", "").split(".")
    for number, part in enumerate(parts):
        if isinstance(schema, type) and is_dataclass(schema):
            if part not in get_type_hints(schema):
                return "configs/schema.py tells the type of each key"
            schema = get_type_hints(schema)[part]
        elif get_args(schema):
            schema = get_args(schema)[-1]
            if is_dataclass(schema) and part in get_type_hints(schema):  # shards.max_length=...
                return f"did you mean {'.'.join([*parts[:number], 'NAME', *parts[number:]])}?"
    if is_dataclass(schema):
        return f"give keys below it: {', '.join(_keys_of(schema)[:4])}, ..."
    kind = get_origin(schema) or schema
    words = {dict: "named entries: {NAME: {...}}", list: "a list of entries"}
    return f"expected {words.get(kind) or getattr(kind, '__name__', kind)}"
