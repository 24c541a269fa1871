"""Settings as a configuration file: what is set as it is, everything else behind ``#``, each with its explanation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

from swarm.node.settings import GROUPS, extra, fields

WIDTH = 100


def config_text(values: Mapping[str, object]) -> str:
    """TOML that reads back as ``values``."""
    lines = ["# swarm-node reads this file before its command line; each key is the option of that name."]
    for group in GROUPS:
        lines += ["", f"# --- {group}"]
        for key, field in fields().items():
            if extra(field)["group"] == group:
                lines += [
                    "",
                    *textwrap.wrap(field.description or "", WIDTH, initial_indent="# ", subsequent_indent="# "),
                ]
                lines.append(_line(key, values[key]) if key in values else f"# {_example(key)}")
    return "\n".join(lines) + "\n"


def _line(key: str, value: object) -> str:
    return f"{key} = {_toml(value)}"


def _example(key: str) -> str:
    default = fields()[key].default
    if default is None or default in ((), ""):
        metavar = extra(fields()[key])["metavar"]
        is_number = metavar in ("N", "S")
        return f"{key} = {metavar}" if is_number else _line(key, [metavar] if default == () else metavar)
    return _line(key, default)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, str):
        # JSON's strings are TOML's but for one character, and for halves of characters that no file has
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
