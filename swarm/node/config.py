"""What a node is told: options of the operator, limits towards strangers, and timeouts by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from shim.types import ContextSpec, KvType
from swarm.artifact.manifest import Manifest
from swarm.placement.moving import MoveRules


@dataclass(frozen=True)
class Timeouts:
    """One limit per phase."""

    first_frame_seconds: float = 10.0  # a stream that says nothing after it was opened
    info_seconds: float = 30.0  # between two requests on an info stream
    connect_seconds: float = 10.0  # dial the successor, attach
    beat_seconds: float = 1.0  # between two signs of life to a predecessor
    silence_seconds: float = 5.0  # of a successor that owes them
    session_seconds: float = 30.0  # silence of the client on its control stream
    idle_seconds: float = 600.0  # without a step, after which a session gives way to another one
    longest_idle_seconds: float = 3600.0  # after which it ends in any case
    drain_seconds: float = 60.0  # running sessions after SIGTERM
    restart_first_seconds: float = 0.2  # the engine is started again after this pause, doubled each time
    restart_longest_seconds: float = 30.0
    links_seconds: float = 240.0  # between two measurements of the way to likely neighbours
    quiet_seconds: float = 5.0  # that nothing runs, before the speed that an earlier run has found is measured again
    engine_seconds: float = (
        120.0  # one call of the engine; ten times its slowest so far, up to 5 times this, where it is slow
    )


@dataclass(frozen=True)
class PerMinute:
    """Requests of one kind."""

    of_peer: int
    of_all: int


@dataclass(frozen=True)
class Limits:
    """What one peer, or one session, may take of a node. A peer may be a gateway with many users."""

    sessions_per_peer: int = 64
    streams_per_peer: int = 1024  # a hop before this one has one for each session
    streams: int = 8192  # of all peers, or fewer where the system allows fewer open files
    steps_in_flight: int = 4  # of one session, received and not yet passed on; more wait in the transport
    tokens_in_flight_per_peer: int = 8192  # in steps that wait for the engine, few rows apart; more wait as above
    tokens_in_flight: int = 32768  # of all peers
    opens: PerMinute = PerMinute(600, 6000)  # sessions
    rows: PerMinute = PerMinute(1200, 12000)  # of logits, 600 KB each for the largest vocabulary
    copies: PerMinute = PerMinute(600, 6000)  # begun, to a node that a client has named
    questions: PerMinute = PerMinute(3000, 30000)  # what the node is
    pieces: PerMinute = PerMinute(120, 1200)  # manifests and headers
    poison_strikes: int = 2  # engines a session may cost before it is refused
    remembered_sessions: int = 1024  # whose strikes are kept


class Weights(StrEnum):
    """How the span's weights are held in memory."""

    MAPPED = "mapped"  # by the page cache, read on first use
    PREFETCHED = "prefetched"  # the same, read before the node says that it serves
    LOCKED = "locked"  # may not be dropped again


@dataclass(frozen=True)
class StoreOptions:
    """Where the parts of a model that this node fetches come from, and where they are kept."""

    manifest: Manifest  # with the files' names
    folder: Path  # of this artifact alone
    source: str  # "hub", a folder with the files, or the http(s) URL of one
    bytes_per_second: int | None = None  # None: as fast as it goes
    disk_reserve_bytes: int = 2 << 30  # left free there
    digests: Mapping[str, str] | None = None  # of all tensors by name; None where nobody has sealed the model


@dataclass(frozen=True)
class ModelOptions:
    """Which layers of which file, and how they are loaded."""

    path: Path
    layers: str = "auto"  # "A:B" or "auto"
    memory_bytes: int | None = None  # None: what the machine has free, less a reserve
    threads: int = 1
    contexts: tuple[ContextSpec, ...] | None = None  # None: chosen by memory
    chunk_tokens: int | None = None  # None: by measured speed
    kv_type: KvType = KvType.F16
    journal_bytes: int = 256 << 20  # of memory for what sessions may have to replay, or less where slots hold less
    mtp: bool = False  # load the MTP block, on the span that ends with the last layer
    name: str = ""  # the catalog's, for a model chosen by it
    store: StoreOptions | None = None  # None: the files are at ``path``, whole
    weights: Weights = Weights.MAPPED


@dataclass(frozen=True)
class NetworkOptions:
    """Where the node listens, whom it joins, and who it is."""

    initial_peers: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # multiaddrs
    announce: tuple[str, ...] = ()
    identity_path: Path | None = None  # None: the first free one of this model in the user's data folder
    public_name: str = ""


@dataclass(frozen=True)
class HostPort:
    """Where a TCP server listens; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# An announcement is stored by others before it counts as made: whoever chose before it was there to be read has
# announced a choice of its own a moment later.
JOINING = MoveRules(join_delay_seconds=3.0, second_look_seconds=2.0)


@dataclass(frozen=True)
class NodeConfig:
    """Everything ``SwarmNode`` needs."""

    model: ModelOptions
    network: NetworkOptions = field(default_factory=NetworkOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    journal_folder: Path | None = None  # for what does not fit the memory; None: in the user's cache
    journal_disk_reserve_bytes: int = 256 << 20  # left free there
    calls_in_flight: int = 2  # engine calls handed over and not yet answered
    measure_speed: bool = True  # of the span, and of the way to neighbours
    speed_folder: Path | None = None  # for what was measured; None: in the user's cache
    metrics: HostPort | None = None  # where Prometheus may read; None: nowhere
    explain: bool = False  # look, show why which layers would be chosen and what lost, and end
    moves: MoveRules = JOINING  # for a node that chooses its layers
    look_seconds: float = 60.0  # between two looks at the swarm for the operator
