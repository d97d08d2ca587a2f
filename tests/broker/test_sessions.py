"""Sessions and their connections, without a socket."""

from __future__ import annotations

from frameshard.broker.session import MAX_SESSIONS, RESUME_S, Session, Sessions
from frameshard.wire import messages as m

EPOCH = 77


class Place:
    """The sessions of a launch. All peers are connected, but those in `gone`."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.sessions = Sessions(
            EPOCH,
            held_bytes=1 << 14,
            silent_s=1.0,
            max_client_jobs=9,
            describe=lambda: ("ready", None),
            is_connected=self._is_connected,
        )

    def _is_connected(self, session: Session) -> bool:
        return session.peer not in self.gone

    def hello(self, peer: bytes, now: float, session: int | None = None) -> m.Welcome | None:
        """Greets; returns the welcome, None if there is no room."""
        self.sessions.receive(peer, [m.encode(m.Hello(1, m.VERSION, "test", session=session))], now)
        for each in self.sessions:
            if each.peer == peer and (frame := each.connection.next_frame()) is not None:
                each.connection.sent()
                welcome = m.decode_answer(frame)
                assert isinstance(welcome, m.Welcome)
                return welcome
        assert self.refusal(peer) == "overloaded"
        return None

    def refusal(self, peer: bytes) -> str:
        """The error that a peer without a session gets."""
        to, frame = self.sessions.strangers.popleft()
        error = m.decode_answer(frame)
        assert isinstance(error, m.Error)
        assert to == peer
        return error.error.name

    def evicted(self) -> list[bytes]:
        peers = [session.peer for session in self.sessions.evicted]
        self.sessions.evicted.clear()
        return peers


def test_room_is_made_of_the_one_that_is_gone_for_longest() -> None:
    place = Place()
    peers = [b"%d" % at for at in range(MAX_SESSIONS)]
    for at, peer in enumerate(reversed(peers)):
        assert place.hello(peer, float(at))
    assert place.hello(b"new", 100.0) is None  # all are connected
    place.sessions.receive(b"5", [m.encode(m.Ping(2, EPOCH))], 99.0)
    place.gone |= {b"3", b"4", b"5"}
    assert place.hello(b"new", 100.0)
    assert place.hello(b"newer", 100.0)
    assert place.evicted() == [b"4", b"3"]
    assert len(place.sessions) == MAX_SESSIONS


def test_clients_that_the_broker_has_dropped_have_time_to_come_back() -> None:
    place = Place()
    peers = [b"%d" % at for at in range(MAX_SESSIONS)]
    welcomes = [place.hello(peer, 50.0) for peer in peers]
    place.sessions.disconnected()
    place.gone.update(peers)
    soon, later = 50.0 + RESUME_S - 0.1, 50.0 + RESUME_S
    assert place.hello(b"new", soon) is None
    assert welcomes[0] is not None
    back = place.hello(b"back", soon, session=welcomes[0].session)
    assert back is not None
    assert (back.session, back.resumed) == (welcomes[0].session, True)
    place.gone.add(b"back")  # and this time the broker has not done it
    assert place.hello(b"new", soon)
    assert place.hello(b"newer", soon) is None
    assert place.hello(b"newer", later)
    assert place.evicted() == [b"back", b"1"]


def test_a_session_has_one_connection() -> None:
    """Its last one. What still comes from the one before is of a stranger, and so is all after a disconnection."""
    place = Place()
    first = place.hello(b"old", 0.0)
    assert first is not None
    assert place.hello(b"new", 1.0, session=first.session)
    ping = [m.encode(m.Ping(2, EPOCH))]
    assert place.sessions.receive(b"old", ping, 1.0) is None
    assert place.refusal(b"old") == "connection_lost"
    place.sessions.disconnected()
    assert place.sessions.receive(b"new", ping, 2.0) is None
    assert place.refusal(b"new") == "connection_lost"
