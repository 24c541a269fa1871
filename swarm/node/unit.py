"""A systemd unit that runs ``swarm-node`` as it was called: after a reboot, after a crash, and not after a mistake.

A user's by default: that needs no rights, and downloads, keys and settings are where the command by hand has them. A
unit of the system can wait for the network, and lock as much memory as it likes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UsageError
from swarm.node.settings import Settings, flag, from_folder, locks

NAME = "swarm-node"
STOP_SECONDS = 30  # beyond draining: to withdraw, and for the engine to end
STEPS_SINCE = 254  # systemd's version that knows growing pauses
# where the program and its folders are; what else it reads of the environment becomes options
KEPT_VARIABLES = ("PYTHONPATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_ENDPOINT")
TOKEN_VARIABLE = "HF_TOKEN"
# how the network is reached, in either spelling: without these what is fetched by hand is not fetched after a reboot
NETWORK_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")

UNIT = """\
{remarks}
[Unit]
Description=Layers of a model for a swarm of peers
{network}StartLimitIntervalSec=0

[Service]
Type=exec
{user}{environment}ExecStart=:{command}
# It comes back by itself, but not after a wrong option (2) or wrong layers (4). Told to leave before it serves: 130.
Restart=on-failure
RestartPreventExitStatus=2 4
SuccessExitStatus=130
{pauses}
# To stop it, the program alone is told: its sessions need its engine for up to {drain_seconds:g} s more.
KillMode=mixed
TimeoutStopSec={stop_seconds}
# An engine that ran out of memory is started again by the program.
OOMPolicy=continue
LimitNOFILE=65536
{memlock}{hardening}
[Install]
WantedBy={target}
"""
USER_REMARKS = """\
To install it, so that it runs from now on and after every reboot:
  mkdir -p ~/.config/systemd/user && {command} > ~/.config/systemd/user/{name}.service
  systemctl --user daemon-reload && systemctl --user enable --now {name}
  loginctl enable-linger
The last one lets it run while you are not logged in. What it says: journalctl --user -u {name} -f
To leave the swarm: systemctl --user disable --now {name}. What was fetched stays where it is."""
SYSTEM_REMARKS = """\
To install it, so that it runs from now on and after every reboot:
  {command} | sudo tee /etc/systemd/system/{name}.service
  sudo systemctl daemon-reload
  sudo systemctl enable --now {name}
What it says: journalctl -u {name} -f
To leave the swarm: sudo systemctl disable --now {name}. What was fetched stays where it is."""
LOCK_REMARK = (
    "A user's unit locks no more memory than `ulimit -H -l` says; where that is too little: --print-unit system"
)
ROOT_REMARK = "It needs no root: better give it a user of its own, with User= below."
TOKEN_REMARK = f"{TOKEN_VARIABLE} is not written here, for others may read this; log in to the hub with: hf auth login"
SECRET_REMARK = (
    "{names} has a password and is not written here, for others may read this; put it into a file that `systemctl "
    "{scope}edit {name}` opens: [Service] and Environment=NAME=VALUE"
)
HARDENING = ("NoNewPrivileges", "RestrictSUIDSGID", "RestrictRealtime", "LockPersonality")
# more of these need rights that a user's manager may not have
SYSTEM_HARDENING = ("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups")


@dataclass(frozen=True)
class Call:
    """How the program was called. ``given`` are its settings, but for those of a configuration file."""

    interpreter: str
    given: Mapping[str, object]
    config: Path | None
    environment: Mapping[str, str]
    folder: Path  # relative paths count from it
    user: str
    systemd_version: int


def unit_text(call: Call, settings: Settings, *, system: bool) -> str:
    """Raises ``UsageError`` for an option that can't stand in a unit."""
    arguments = _arguments(call)
    keys = HARDENING + (SYSTEM_HARDENING if system else ())
    hardening = [*(f"{key}=yes" for key in keys), "SystemCallArchitectures=native"]
    if system:
        hardening.append("ProtectSystem=full")
    return UNIT.format(
        remarks=_comment(_remarks(call, settings, arguments, system=system)),
        network="Wants=network-online.target\nAfter=network-online.target\n" if system else "",
        user=f"User={_word(call.user)}\n" if system else "",
        environment="".join(f"Environment={_word(text)}\n" for text in _kept(call.environment)),
        command=" ".join(
            _word(text) for text in (_program(call.interpreter), "-P", "-m", "swarm.node.cli", *arguments)
        ),
        pauses=_pauses(call.systemd_version),
        drain_seconds=settings.drain_seconds,
        stop_seconds=int(settings.drain_seconds) + STOP_SECONDS,
        memlock="LimitMEMLOCK=infinity\n" if locks(settings) else "",
        hardening="".join(f"{line}\n" for line in hardening),
        target="multi-user.target" if system else "default.target",
    )


def _program(interpreter: str) -> str:
    if re.search(r"[\"'\\]", interpreter) or not interpreter.isprintable():
        raise UsageError(
            f"systemd runs no program whose path has quotes or backslashes, as {interpreter!r}; install into another "
            "folder"
        )
    return interpreter


def _arguments(call: Call) -> list[str]:
    arguments = [] if call.config is None else [f"--config={call.folder / call.config}"]
    for key, value in call.given.items():
        if isinstance(value, bool):
            arguments.append(flag(key) if value else flag(f"no_{key}"))
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            arguments.append(f"{flag(key)}={from_folder(key, each, call.folder)}")
    for argument in arguments:
        if not argument.isprintable():
            name = argument.partition("=")[0]
            raise UsageError(f"{name}: a line break or control character can't stand in a unit; leave it out")
    return arguments


def _remarks(call: Call, settings: Settings, arguments: Iterable[str], *, system: bool) -> list[str]:
    command = shlex.join([NAME, *arguments, "--print-unit", *(["system"] if system else [])])
    text = SYSTEM_REMARKS if system else USER_REMARKS
    lines = text.format(command=command, name=NAME).splitlines()
    if locks(settings) and not system:
        lines.append(LOCK_REMARK)
    if system and call.user == "root":
        lines.append(ROOT_REMARK)
    if call.environment.get(TOKEN_VARIABLE):
        lines.append(TOKEN_REMARK)
    names = [name for name, value in _network(call.environment) if _has_password(value)]
    if names:
        scope = "" if system else "--user "
        lines.append(SECRET_REMARK.format(names=" and ".join(names), scope=scope, name=NAME))
    return lines


def _comment(lines: Iterable[str]) -> str:
    # a comment that ends in a backslash would go on in the next line
    return "".join(f"# {line}\n" if not line.endswith("\\") else f"# {line} \n" for line in lines)


def _kept(environment: Mapping[str, str]) -> list[str]:
    kept = [(name, environment.get(name)) for name in KEPT_VARIABLES]
    kept += [(name, value) for name, value in _network(environment) if not _has_password(value)]
    return [f"{name}={value}" for name, value in kept if value and value.isprintable()]


def _network(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in sorted(environment.items()) if name.lower() in NETWORK_VARIABLES]


def _has_password(value: str) -> bool:
    return "@" in value


def _pauses(systemd_version: int) -> str:
    """After a failure. Older versions know one length only."""
    if systemd_version < STEPS_SINCE:
        return "RestartSec=30"
    return "RestartSec=5\nRestartSteps=8\nRestartMaxDelaySec=600"


def _word(text: str) -> str:
    """Quoted for ``ExecStart=:`` and ``Environment=``, where ``$`` stands for itself."""
    text = text.replace("%", "%%")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./~^{}()*?$!&|<>#-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
