"""What is repeated, and in which shapes, against a model that keeps every row with the shape it was computed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from swarm.replay import Held, Replay, Track

Row = tuple[int, ...]  # what its bits depend on


@dataclass
class Model:
    """A hop's state: each position's row, by what it was computed from. A chunk's rows depend on its whole shape."""

    rows: list[Row] = field(default_factory=list)

    def compute(self, start: int, contents: list[int], *, chunk: bool) -> None:
        assert start <= len(self.rows), "a gap"
        del self.rows[start:]
        shape = (start, *contents) if chunk else ()
        self.rows += [(content, *shape) for content in contents]


@dataclass(frozen=True)
class Step:
    start: int  # taken modulo what is held, and one more
    contents: list[int]
    chunk: bool


steps = st.lists(
    st.builds(
        Step,
        start=st.one_of(st.just(-1), st.integers(0, 60)),
        contents=st.lists(st.integers(0, 1000), min_size=1, max_size=9),
        chunk=st.booleans(),
    ),
    max_size=20,
)


def played(given_steps: list[Step]) -> tuple[Track[list[int]], Model]:
    track: Track[list[int]] = Track()
    model = Model()
    for step in given_steps:
        held = len(model.rows)
        start = held if step.start < 0 else step.start % (held + 1)
        model.compute(start, step.contents, chunk=step.chunk)
        track.append(start, len(step.contents), chunk=step.chunk, content=step.contents)
    return track, model


def contents_of(replay: Replay[list[int]]) -> list[int]:
    contents = [value for part in replay.slices for value in part.content[part.first : part.last]]
    assert len(contents) == replay.count
    return contents


@given(steps, st.data())
def test_a_replay_gives_the_rows_of_the_first_time(given_steps: list[Step], data: st.DataObject) -> None:
    track, model = played(given_steps)
    assert track.end == len(model.rows)
    keep = data.draw(st.integers(0, track.end), "keep")
    track.truncate(keep)
    first = data.draw(st.integers(0, keep), "first")
    most = data.draw(st.integers(1, 12), "most")
    assert track.covers(first)
    successor = Model(model.rows[:first])
    for replay in track.replay(first, most):
        assert replay.chunk or replay.count <= most
        successor.compute(replay.start, contents_of(replay), chunk=replay.chunk)
    assert successor.rows[:keep] == model.rows[:keep]


@given(steps, st.data())
def test_a_replay_through_a_hop_gives_its_successor_what_it_lacks(given_steps: list[Step], data: st.DataObject) -> None:
    track, model = played(given_steps)
    behind = data.draw(st.integers(0, track.end), "what the successor holds")
    fed = data.draw(st.integers(0, behind), "what the hop holds")
    hop, successor, held = Model(model.rows[:fed]), Model(model.rows[:behind]), Held(behind)
    for replay in track.replay(fed, 5):
        contents = contents_of(replay)
        hop.compute(replay.start, contents, chunk=replay.chunk)
        lacking = held.lacks(replay.start, replay.count, chunk=replay.chunk)
        if lacking is not None:
            successor.compute(replay.start + lacking, contents[lacking:], chunk=replay.chunk)
    assert hop.rows[: track.end] == successor.rows[: track.end] == model.rows


def test_what_is_replaced_is_returned_the_latest_first() -> None:
    track: Track[str] = Track()
    track.append(0, 4, chunk=True, content="a")
    track.append(4, 1, chunk=False, content="b")
    track.append(5, 1, chunk=False, content="c")
    assert [piece.content for piece in track.append(4, 2, chunk=False, content="d")] == ["c", "b"]
    assert [piece.content for piece in track.truncate(2)] == ["d"]
    assert [(replay.start, replay.count) for replay in track.replay(0, 8)] == [(0, 4)], "the chunk stays whole"
    assert (track.first, track.end, len(track)) == (0, 2, 1)


def test_a_step_beyond_the_end_begins_anew() -> None:
    track: Track[str] = Track()
    track.append(0, 4, chunk=True, content="a")
    assert [piece.content for piece in track.append(6, 1, chunk=False, content="b")] == ["a"]
    assert not track.covers(0)
    assert track.covers(6)
    assert track.covers(7), "nothing is needed"
