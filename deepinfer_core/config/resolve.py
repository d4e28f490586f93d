"""From keyword arguments, a YAML file, the environment and command-line flags to one `EngineConfig`, with the source of every value.

Rising precedence: defaults, keyword arguments, file, environment, flags.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deepinfer_core.config.engine_config import SHORTHANDS, EngineConfig, is_optional, leaves, section_types, unknown_key, values
from deepinfer_core.config.environment import read_environment
from deepinfer_core.config.sections import Section, plain
from deepinfer_core.config.text import parse
from deepinfer_core.errors import ConfigError

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code from a checkpoint is never run"),
    "engine_type": (("NORMAL", 0), "this version has the engine that prefills and decodes only"),
    "engine_rank": ((0,), "this version runs in one process"),
    "engine_group_rank": ((0,), "this version runs in one process"),
    "tokens_per_block": ((-1, 128), "a page holds 128 tokens"),
    "lookahead_tokens": ((0,), "it belongs to a drafter that this model does not have"),
    "offline_inference": ((True, False), "a marker"),
    "ignore_len": ((None, True, False, 0), "without effect in DeepInfer 0.1.0 too"),
}
"""Keyword names of DeepInfer 0.1.0 that set nothing here: the accepted values, and why no other."""

UNSET = {"data_parallel_size": 0, "engram_parallel_size": 0}
"""Keyword values of DeepInfer 0.1.0 that mean "the default"."""


@dataclass(frozen=True)
class ResolvedConfig:
    """The configuration, and for each key where its value comes from: "default", "keyword", "file NAME", "env NAME" or "flag"."""

    config: EngineConfig
    sources: dict[str, str]
    notes: tuple[str, ...] = ()  # what the user should know: variables that are set and have no effect

    def as_text(self) -> str:
        """YAML, each line with its source as a comment."""
        lines, section = [], ""
        entries = list(values(self.config))
        width = max(len(_line(path, value)) for path, value in entries)
        for path, value in entries:
            if path.split(".")[0] != section:
                section = path.split(".")[0]
                lines.append(f"{section}:")
            lines.append(f"{_line(path, value):<{width}}  # {self.sources[path]}")
        return "\n".join(lines)

    def as_json(self) -> str:
        """{key: {"value": …, "source": …}} and the notes."""
        keys = {path: {"value": value, "source": self.sources[path]} for path, value in values(self.config)}
        return json.dumps({"config": keys, "notes": list(self.notes)}, indent=2)


def resolve_config(
    keywords: Mapping[str, Any] | None = None,
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Merges the sources. `env` is os.environ unless given; keywords and flags that are None count as not given.

    Keywords and flags are named like keys ("scheduler.max_num_seqs"), like sections, or, where only one section has the key, by its
    last part: `max_num_seqs=8`. The keyword names of DeepInfer 0.1.0 are such names, or listed in `FIXED`.
    Raises: ConfigError with every problem of the sources, or else every problem of the merged values.
    """
    environment, notes = read_environment(os.environ if env is None else env)
    merged: dict[str, tuple[Any, str]] = {}
    problems: list[str] = []
    for data, source, is_file in ((keywords, "keyword", False), (_read(file), f"file {file}", True)):
        merged.update(_flatten(data or {}, source, problems, flat_names=not is_file))
    merged.update({path: (value, f"env {variable}") for path, (value, variable) in environment.items()})
    merged.update(_flatten(flags or {}, "flag", problems, flat_names=True))
    if problems:
        raise ConfigError(problems)
    nested: dict[str, dict[str, Any]] = {}
    for path, (value, _) in merged.items():
        section, name = path.split(".")
        nested.setdefault(section, {})[name] = value
    sources = {path: merged[path][1] if path in merged else "default" for path in leaves()}
    config = EngineConfig.model_validate(nested, context={"sources": sources})
    return ResolvedConfig(config, sources, tuple(notes))


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Flags from KEY=VALUE strings; each value is read as its key's type. Raises ConfigError that lists every bad one."""
    found: dict[str, Any] = {}
    problems = []
    fields = leaves()
    for setting in settings:
        name, equals, text = setting.partition("=")
        path = flat_names().get(name, name)
        if not equals:
            problems.append(f"setting {setting!r}: expected KEY=VALUE, such as scheduler.max_num_seqs=8")
        elif path not in fields:
            problems.append(unknown_key(name, "flag"))
        else:
            try:
                found[path] = parse(text, fields[path])
            except ValueError as error:
                problems.append(f"setting {setting!r}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def flat_names() -> dict[str, str]:
    """Last part of a key -> key, where only one section has it; and each section's shorthand."""
    keys = list(leaves())
    last = [key.split(".")[1] for key in keys]
    names = {name: key for name, key in zip(last, keys, strict=True) if last.count(name) == 1}
    return {**names, **{section: f"{section}.{key}" for section, key in SHORTHANDS.items()}}


def _flatten(data: Mapping[str, Any], source: str, problems: list[str], *, flat_names: bool) -> dict[str, tuple[Any, str]]:
    """Key -> (value, source) of one source. Appends to `problems` what cannot be placed."""
    out: dict[str, tuple[Any, str]] = {}
    for name, value in data.items():
        if not isinstance(name, str):
            problems.append(f"key {name!r} ({source}): expected a section name, such as 'scheduler'")
        elif name in section_types() and not (name in SHORTHANDS and isinstance(plain(value), str)):
            _flatten_section(name, value, source, problems, out)
        else:
            _place(name, plain(value), source, problems, out, flat_names)
    given = {path: entry for path, entry in out.items() if entry[0] is not None or (source.startswith("file") and _may_be_none(path))}
    problems += [unknown_key(path, source) for path in given if path not in leaves()]
    return {path: entry for path, entry in given.items() if path in leaves()}


def _flatten_section(section: str, value: Any, source: str, problems: list[str], out: dict[str, tuple[Any, str]]) -> None:
    if value is None:
        return
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping):
        problems.append(
            f"{section} = {value!r} ({source}): expected keys and values, of {', '.join(section_types()[section].model_fields)}"
        )
        return
    out.update({f"{section}.{name}": (plain(v), source) for name, v in value.items()})


def _place(name: str, value: Any, source: str, problems: list[str], out: dict[str, tuple[Any, str]], flat: bool) -> None:
    """One top-level name that is not a whole section."""
    if name in leaves() or (name in SHORTHANDS):
        out[flat_names().get(name, name)] = (value, source)
    elif flat and name in FIXED:
        allowed, why = FIXED[name]
        if getattr(value, "name", value) not in allowed:
            problems.append(f"{name} = {value!r} ({source}): expected {' or '.join(map(repr, allowed))}; {why}")
    elif flat and name in flat_names():
        if value != UNSET.get(name, object()):
            out[flat_names()[name]] = (value, source)
    else:
        problems.append(unknown_key(name, source))


def _may_be_none(path: str) -> bool:
    fields = leaves()
    return path not in fields or is_optional(fields[path])


def _read(file: str | Path | None) -> Mapping[str, Any] | None:
    """The mapping in a YAML file. Raises ConfigError if it cannot be read or is something else."""
    if file is None:
        return None
    try:
        data = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"configuration file {str(file)!r} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration file {str(file)!r} is not UTF-8 text; expected YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {str(file)!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"configuration file {str(file)!r} holds {type(data).__name__}, expected sections such as 'model:'")
    return data


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error instead of the last one winning."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _line(path: str, value: Any) -> str:
    """One YAML line. JSON scalars and lists are YAML too."""
    value = list(value) if isinstance(value, tuple) else value
    return f"  {path.split('.')[1]}: {json.dumps(value)}"
