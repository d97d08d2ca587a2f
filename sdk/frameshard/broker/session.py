"""Sessions and their connections.

A session outlives its connection. A client that was stopped for some time (breakpoint, suspended machine) comes back
with another ZeroMQ address, and resumes its session by number. A peer that has not sent hello is a *stranger*; the
broker keeps no state for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from frameshard.errors import BadMessage, ConnectionLost, FrameshardError, Overloaded
from frameshard.transport import new_number
from frameshard.wire import codec
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection

MAX_SESSIONS = 32
RESUME_S = 5.0
"""After the broker has closed all connections, clients have so many seconds to connect again."""

MAX_STRANGERS = 64
"""The most answers to strangers that wait to be sent. Further ones replace the oldest."""


class Session:
    """One client's session.

    :param peer: the ZeroMQ address of its connection.
    """

    def __init__(self, peer: bytes, client: str, connection: ServerConnection) -> None:
        self.peer = peer
        self.client = client
        self.connection = connection
        self.reachable = True
        """False after a send that found no connection, until the client sends something."""
        self.dropped = False
        """Whether the broker has closed the connection, and the client has sent nothing since."""
        self.notices = False
        """Whether the client has asked for notices."""

    def __repr__(self) -> str:
        return f"<Session {self.connection.session} of {self.client!r}>"


class Sessions:
    """All sessions of one launch."""

    def __init__(
        self,
        epoch: int,
        *,
        held_bytes: int,
        silent_s: float,
        max_client_jobs: int,
        describe: Callable[[], tuple[m.EngineState, m.ModelInfo | None]],
        is_connected: Callable[[Session], bool],
    ) -> None:
        self._epoch = epoch
        self._held_bytes = held_bytes
        self._describe = describe
        self._is_connected = is_connected
        self._limits = m.ServerLimits(
            message_bytes=codec.CLIENT.frame,
            string_bytes=codec.CLIENT.string,
            jobs=max_client_jobs,
            window=m.MAX_WINDOW,
            silent_s=silent_s,
        )
        self._by_peer: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self.strangers: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_STRANGERS)
        """Answers to strangers: address and frame."""
        self.evicted: deque[Session] = deque()
        """Sessions that this object has ended. The caller removes them and drops their jobs."""

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def receive(self, peer: bytes, parts: list[bytes], now: float) -> tuple[Session, m.Request] | None:
        """Takes a message.

        :param peer: the ZeroMQ address of the sender.
        :param now: seconds of a monotonic clock.
        :returns: its session and the request to carry out; None if nothing is left to do.
        """
        session = self._by_peer.get(peer)
        if len(parts) != 1:
            error = BadMessage(f"a message has one part, this one has {len(parts)} or more")
            self._answer_stranger(peer, None, error) if session is None else session.connection.refuse(None, error)
            return None
        if session is not None:
            session.reachable = True
            request = session.connection.receive(parts[0], now)
            if isinstance(request, m.Hello):
                self._greet(peer, request, now)
                return None
            return None if request is None else (session, request)
        try:
            hello = m.decode_request(parts[0])
            if not isinstance(hello, m.Hello):
                request_id = None if isinstance(hello, m.Credit) else hello.id
                raise ConnectionLost("no session on this connection: send hello first", id=request_id)
        except FrameshardError as error:
            self._answer_stranger(peer, error.detail.pop("id", None), error)
        else:
            self._greet(peer, hello, now)
        return None

    def disconnected(self) -> None:
        """To be called when all connections were closed. Clients that connect again resume their sessions."""
        self._by_peer.clear()
        self.strangers.clear()
        for session in self:
            session.reachable, session.dropped = False, True

    def drop(self, peer: bytes) -> None:
        """Ends the session of a peer that violates the protocol."""
        if peer in self._by_peer:
            self.evicted.append(self._by_peer[peer])

    def end(self, session: Session) -> None:
        """Removes a session."""
        self._by_number.pop(session.connection.session, None)
        self._by_peer.pop(session.peer, None)

    def _greet(self, peer: bytes, hello: m.Hello, now: float) -> None:
        if hello.epoch not in (None, self._epoch):
            self._answer_stranger(peer, hello.id, ConnectionLost("the sidecar has been launched anew"))
            return
        session = None if hello.session is None else self._by_number.get(hello.session)
        resumed = session is not None
        if session is not None:
            session.connection.resumed()
        if session is None:
            session = self._by_peer.get(peer)  # the client has sent hello before, and the answer was lost
        if session is None:
            try:
                self._make_room(now)
            except Overloaded as error:
                self._answer_stranger(peer, hello.id, error)
                return
            number = new_number()
            connection = ServerConnection(number, epoch=self._epoch, held_bytes=self._held_bytes, now=now)
            session = self._by_number[number] = Session(peer, hello.client, connection)
        self._by_peer.pop(session.peer, None)
        self._by_peer[peer] = session
        session.peer, session.reachable, session.connection.heard_at = peer, True, now
        session.dropped = False
        session.connection.silent_looks = 0
        session.notices = hello.notices
        engine, model = self._describe()
        session.connection.reply(
            m.Welcome(
                id=hello.id,
                epoch=self._epoch,
                protocol=m.VERSION,
                session=session.connection.session,
                resumed=resumed,
                server="frameshard",
                limits=self._limits,
                engine=engine,
                model=model,
                features=m.FEATURES,
            )
        )

    def _make_room(self, now: float) -> None:
        """Makes room for a new session if there is none: of the sessions without a connection it ends the one that was
        silent longest. It spares clients that have just lost their connection because the broker closed all.

        :raises Overloaded: all sessions are connected.
        """
        if len(self._by_number) < MAX_SESSIONS:
            return
        for session in sorted(self, key=lambda session: session.connection.heard_at):
            if session.dropped and now - session.connection.heard_at < RESUME_S:
                continue
            if not self._is_connected(session):
                self.end(session)
                self.evicted.append(session)
                return
        raise Overloaded(f"{MAX_SESSIONS} clients are connected already")

    def _answer_stranger(self, peer: bytes, request_id: object, error: FrameshardError) -> None:
        answer = m.Error(request_id if type(request_id) is int else None, self._epoch, m.ErrorInfo.of(error))
        self.strangers.append((peer, m.encode(answer)))
