"""Command line, environment and file: which of them wins, and what is said of a file with something wrong in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from swarm.chat.settings import initial_peers
from swarm.errors import UsageError
from swarm.node.arguments import parse
from swarm.node.config_text import config_text
from swarm.node.gather import COMMANDS, Gathered, gather
from swarm.node.settings import DEFAULT_MODEL, Settings, extra, fields, flag

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJm6F67Lay"
OTHER = PEER.replace("192.0.2.7", "192.0.2.8")
GLM_DIR = "SWARM_GLM52_DIR"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def gathered(line: str, file: Path, **environment: str) -> Gathered:
    return gather(vars(parse(line.split())), environment, file, named=False)


def settings(line: str, file: Path, **environment: str) -> Settings:
    return gathered(line, file, **environment).settings


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    assert settings("", file).model == DEFAULT_MODEL
    file.write_text(f'model = "glm-tiny"\ninitial_peers = ["{PEER}"]\n')
    assert (settings("", file).model, settings("", file).initial_peers) == ("glm-tiny", (PEER,))
    environment = {"SWARM_MODEL": "b.gguf", "SWARM_PEERS": f"{OTHER}, {PEER}"}
    assert settings("", file, **environment).model == "b.gguf"
    assert settings("", file, **environment).initial_peers == (OTHER, PEER)
    assert settings(f"--model c.gguf --initial-peers {PEER}", file, **environment).model == "c.gguf"
    assert settings(f"--initial-peers {PEER}", file, **environment).initial_peers == (PEER,)
    assert settings("", file, SWARM_MODEL="", SWARM_PEERS="").model == "glm-tiny"


def test_every_option_has_a_key_of_its_name() -> None:
    options = {word for word in parse_options() if not word.startswith("--no-") or word == "--no-color"}
    assert options - {flag(command) for command in COMMANDS} == {flag(key) for key in fields()}


def parse_options() -> set[str]:
    from swarm.node.arguments import _parser

    return {word for action in _parser()._actions for word in action.option_strings if word.startswith("--")}


def test_what_the_file_says_reads_as_on_the_command_line(file: Path) -> None:
    line = (
        "--layers 3:7 --mtp --listen 0.0.0.0:4001 [::]:4001 --memory 20GiB --threads 3 --drain-seconds 5 "
        "--weights locked --log-level info --no-color --sessions-per-peer 7"
    )
    file.write_text(
        'layers = "3:7"\nmtp = true\nlisten = ["0.0.0.0:4001", "[::]:4001"]\nmemory = "20GiB"\nthreads = 3\n'
        'drain_seconds = 5\nweights = "locked"\nlog_level = "info"\nno_color = true\nsessions_per_peer = 7\n'
    )
    assert settings("", file) == settings(line, file.with_name("absent.toml"))
    assert not settings("--no-mtp", file).mtp


# --- keys that exclude each other


def test_a_new_swarm_on_the_command_line_overrules_peers_of_elsewhere(file: Path) -> None:
    file.write_text(f'initial_peers = ["{PEER}"]\n')
    assert settings("--new-swarm", file, SWARM_PEERS=OTHER).initial_peers == ()
    file.write_text("new_swarm = true\n")
    assert not settings("", file, SWARM_PEERS=OTHER).new_swarm
    assert not settings(f"--initial-peers {PEER}", file).new_swarm
    assert settings("", file).new_swarm


def test_files_that_are_here_and_a_source_overrule_each_other(file: Path) -> None:
    file.write_text('source = "http://192.0.2.1/"\n')
    assert settings("", file).source == "http://192.0.2.1/"
    here = settings("", file, **{GLM_DIR: "/models"})
    assert (here.model_dir, here.source) == ("/models", None)
    both = {GLM_DIR: "/models", "SWARM_SOURCE": "http://192.0.2.2/"}
    assert settings("", file, **both).source is None
    fetched = settings("--source hub", file, **both)
    assert (fetched.model_dir, fetched.source) == (None, "hub")
    assert settings("--model-dir /other", file, **both).model_dir == "/other"
    assert settings("--model-dir /other", file, **both).source is None


def test_a_source_in_the_environment_is_for_models_that_are_fetched(file: Path, tmp_path: Path) -> None:
    assert settings("", file, SWARM_SOURCE="http://192.0.2.1/").source == "http://192.0.2.1/"
    assert settings("--manifest m.json", file, SWARM_SOURCE="http://192.0.2.1/").source == "http://192.0.2.1/"
    assert settings("--model glm-tiny", file, SWARM_SOURCE="http://192.0.2.1/").source is None
    assert settings("--model x.gguf", file, SWARM_SOURCE="http://192.0.2.1/", **{GLM_DIR: "/x"}).model_dir is None


def test_another_model_leaves_the_files_places_alone(file: Path, tmp_path: Path) -> None:
    file.write_text('model = "glm-5.2-ud-iq1_s"\nmodel_dir = "glm"\nlayers = "0:10"\npublic_name = "me"\n')
    assert settings("", file).model_dir == str(tmp_path / "glm")
    for line in ("--model glm-tiny", "--manifest m.json"):
        other = settings(line, file)
        assert (other.model_dir, other.layers, other.public_name) == (None, "auto", "me")
    assert settings("--model glm-5.2-ud-iq1_s", file).layers == "0:10"


def test_a_model_and_a_manifest_in_one_place(file: Path) -> None:
    with pytest.raises(UsageError, match="--model and --manifest exclude each other"):
        gathered("--model glm-tiny --manifest m.json", file)
    file.write_text('model = "glm-tiny"\n')
    assert settings("--manifest m.json", file).manifest == "m.json"


# --- paths


def test_paths_of_a_file_count_from_its_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file.write_text('data_dir = "data"\nidentity = "~/key"\njournal_dir = "/var/journals"\nsource = "files"\n')
    read = settings("", file)
    assert read.data_dir == str(tmp_path / "data")
    assert read.identity == "/home/someone/key"
    assert read.journal_dir == "/var/journals"
    assert read.source == str(tmp_path / "files")
    for text, found in (
        ("hub", "hub"),
        ("https://h/x", "https://h/x"),
    ):
        file.write_text(f'source = "{text}"\n')
        assert settings("", file).source == found
    for text, found in (("glm-tiny", "glm-tiny"), ("own.gguf", f"{tmp_path}/own.gguf"), ("a/b", f"{tmp_path}/a/b")):
        file.write_text(f'model = "{text}"\n')
        assert settings("", file).model == found


# --- what is wrong with a file


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('layer = "0:1"', "there is no key layer; did you mean layers?"),
        ('initial-peers = ["x"]', "there is no key initial-peers; did you mean initial_peers?"),
        ('announce = ["x"]', "there is no key announce; did you mean announce_maddrs?"),
        ('name = "x"', "there is no key name; did you mean public_name?"),
        ("zzzzzz = 1", "there is no key zzzzzz; remove it"),
        ("explain = true", "explain is for one call; remove it from the file, and write --explain on the command line"),
        ("model = 3", "model must be a text in quotes, not 3; correct the file"),
        ("memory = 20", "memory must be a text in quotes, not 20"),
        ('initial_peers = "x"', "initial_peers must be a list of texts, not 'x'"),
        ("listen = [1]", "listen must be a list of texts, not [1]"),
        ('threads = "3"', "threads must be a whole number, not '3'"),
        ("threads = 1.5", "threads must be a whole number, not 1.5"),
        ("sessions_per_peer = true", "sessions_per_peer must be a whole number, not True"),
        ('drain_seconds = "5"', "drain_seconds must be a number, not '5'"),
        ("mtp = 1", "mtp must be true or false, not 1"),
        ('weights = "heavy"', "weights must be one of mapped, prefetched, locked, not 'heavy'"),
        ("model = [", "can't be read: "),
        ('model = "\\ud800"', "can't be read: "),
        ("[node]\nmodel = 'x'", "there is no key node; did you mean"),
    ],
)
def test_a_wrong_file_is_named_with_the_key(file: Path, text: str, complaint: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        gathered("", file)
    assert str(caught.value).startswith(f"{file}")
    assert complaint in str(caught.value)


def test_a_file_that_was_named_must_be_there(file: Path) -> None:
    with pytest.raises(UsageError, match=r"--config .*config\.toml: no such file; write one with: swarm-node --print"):
        gather({}, {}, file, named=True)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read: Is a directory; correct or remove the file"):
        gather({}, {}, tmp_path, named=False)


def test_an_error_about_a_value_says_that_it_is_the_files(file: Path) -> None:
    file.write_text('memory = "much"\nthreads = 0\n')
    found = gathered("--threads 0", file)
    wrong = UsageError("--memory much: not a size; write for example --memory 20GiB")
    assert str(found.located(wrong)) == f"{wrong} (memory is set in {file})"
    wrong = UsageError("--threads 0: out of range")
    assert found.located(wrong) is wrong


# --- the file that --print-config writes, and swarm-chat's share of it


def test_the_printed_file_explains_every_key_and_sets_none(file: Path) -> None:
    text = config_text({})
    assert tomllib.loads(text) == {}
    for key in fields():
        assert f"\n# {key} = " in text
    examples = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# ") and " = " in line)
    known = [line for line in examples.splitlines() if line.split(" = ")[0] in fields()]
    assert len(known) == len(fields())
    defaults = {key: field.default for key, field in fields().items() if field.default not in (None, (), "")}
    set_again = tomllib.loads("\n".join(line for line in known if line.split(" = ")[0] in defaults))
    assert set_again == defaults


@given(st.data())
@examples(deadline=None, max_examples=50)
def test_the_printed_file_reads_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    texts = st.text(st.characters(codec="utf-8"), max_size=20)
    kinds = {int: st.integers(1, 99), float: st.floats(0, 1e6), bool: st.booleans()}
    drawn: dict[str, object] = {}
    for key in data.draw(st.sets(st.sampled_from(sorted(fields())))):
        default = fields()[key].default
        if key in ("weights", "log_level", "model", "manifest") or extra(fields()[key])["path"]:
            continue
        if extra(fields()[key])["metavar"] == "N":
            drawn[key] = data.draw(st.integers(1, 99))
        elif isinstance(default, tuple):
            drawn[key] = tuple(data.draw(st.lists(texts, max_size=3)))
        else:
            drawn[key] = data.draw(kinds.get(type(default), texts))
    file = tmp_path_factory.mktemp("printed") / "config.toml"
    file.write_text(config_text(drawn), "utf-8")
    found = gather({}, {}, file, named=True)
    assert found.in_file == drawn
    assert found.settings == Settings(**drawn)  # type: ignore[arg-type]


def test_the_chat_reads_its_peers_from_a_nodes_file(file: Path) -> None:
    file.write_text(config_text({"initial_peers": (PEER,), "layers": "0:3"}))
    assert initial_peers((), {}, file) == (PEER,)
    file.write_text('initial_peers = "x"')
    with pytest.raises(UsageError, match=r"config\.toml: initial_peers must be a list of texts; correct the file"):
        initial_peers((), {}, file)
