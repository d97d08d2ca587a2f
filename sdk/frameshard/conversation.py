"""Conversations, which clients hold: their messages, the next prompt, and saves."""

from __future__ import annotations

from dataclasses import dataclass

from frameshard.errors import BadArgument
from frameshard.wire import codec, saves
from frameshard.wire import messages as m

MAX_NAME_BYTES = 128


@dataclass(frozen=True)
class LoadResult:
    """What :meth:`frameshard.Client.load` has found. The texts of the save are loaded in any case.

    :param same_model: the save was made with the model that is loaded now. With another model the same texts give other
        answers.
    :param same_template: it was made with the same chat template.
    """

    same_model: bool
    same_template: bool


class Conversation:
    """The system text, questions and answers of a conversation so far. An answer has only the text that was read."""

    def __init__(self, system: str = "", exchanges: tuple[saves.Exchange, ...] = ()) -> None:
        self.system = system
        self.exchanges = list(exchanges)
        self.open: Turn | None = None
        """The question that is being answered."""

    def so_far(self) -> list[saves.Exchange]:
        """All exchanges, with the open one if some of its answer was read."""
        return self.exchanges + (self.open.exchange() if self.open is not None else [])

    def history(self) -> tuple[m.ChatMessage, ...]:
        return _messages(self.system, self.so_far())

    def save(self, model: m.ModelInfo, writer: str) -> bytes:
        exchanges = saves.newest(self.so_far(), len(self.system.encode()))
        return saves.write(saves.Save(exchanges, model.fingerprint, self.system, model.template_fingerprint, writer))


class Conversations:
    """The conversations of one client, by name.

    :param writer: the client's name, for saves.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._by_name: dict[str, Conversation] = {}

    def find(self, name: str | None) -> Conversation:
        """The conversation of this name, a new one if there is none. Without a name it is not kept."""
        return Conversation() if name is None else self._by_name.setdefault(name, Conversation())

    def history(self, name: str) -> tuple[m.ChatMessage, ...]:
        return self._by_name.get(name, Conversation()).history()

    def forget(self, name: str) -> None:
        """An answer that is open is forgotten, too."""
        if name in self._by_name:
            self._by_name[name] = Conversation(self._by_name[name].system)

    def save(self, name: str, model: m.ModelInfo) -> bytes:
        return self._by_name.get(name, Conversation()).save(model, self._writer)

    def load(self, data: bytes, name: str, model: m.ModelInfo) -> LoadResult:
        if not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
            raise BadArgument(f"the name of a conversation has 1 to {MAX_NAME_BYTES} bytes", field="conversation")
        save = saves.read(data)
        there = self._by_name.get(name)
        if there is not None and there.open is not None:
            raise BadArgument("this conversation's last answer is still open: leave its stream first")
        self._by_name[name] = Conversation(save.system, save.exchanges)
        return LoadResult(
            _same(save.model, model.fingerprint),
            _same(save.template, model.template_fingerprint),
        )


class Turn:
    """One question in a conversation."""

    def __init__(self, conversations: Conversations, name: str | None, system: str | None, question: str) -> None:
        self.answer = ""
        """The text of the answer that was read so far."""
        self.n_dropped = 0
        """How many of the oldest exchanges are not in the prompt, because they do not fit."""
        self._n_forgotten = 0
        self._conversations = conversations
        self._name = name
        self._conversation = Conversation()
        self._system = system
        self._system_before = ""
        self._question = question

    def messages(self) -> tuple[m.ChatMessage, ...]:
        """The prompt: as much of the conversation as fits into a message, and the question."""
        conversation = self._conversation
        texts = conversation.system + self._question
        other_bytes = len(texts.encode(errors="replace"))
        exchanges = saves.newest(conversation.exchanges, other_bytes)
        self.n_dropped = self._n_forgotten + len(conversation.exchanges) - len(exchanges)
        return (*_messages(conversation.system, exchanges), m.ChatMessage("user", self._question))

    def exchange(self) -> list[saves.Exchange]:
        """The question and its answer; nothing if no text of the answer was read."""
        answer = self.answer.encode()[: codec.CLIENT.string].decode(errors="ignore")
        return [(self._question, answer)] if answer else []

    def begin(self) -> None:
        conversation = self._conversations.find(self._name)
        if conversation.open is not None:
            raise BadArgument("this conversation's last answer is still open: leave its stream first")
        conversation.open = self
        self._conversation = conversation
        self._system_before = conversation.system
        if self._system is not None:
            conversation.system = self._system

    def take_back(self) -> None:
        """The question could not be sent: the conversation has its system text from before."""
        self._conversation.system = self._system_before

    def shorten(self) -> bool:
        """Forgets the oldest question and answer of the conversation.

        :returns: false if there is none.
        """
        if not self._conversation.exchanges:
            return False
        del self._conversation.exchanges[0]
        self._n_forgotten += 1
        return True

    def end(self) -> None:
        conversation = self._conversation
        conversation.open = None
        conversation.exchanges += self.exchange()


def _messages(system: str, exchanges: list[saves.Exchange] | tuple[saves.Exchange, ...]) -> tuple[m.ChatMessage, ...]:
    first = (m.ChatMessage("system", system),) if system else ()
    told = (
        message
        for question, answer in exchanges
        for message in (m.ChatMessage("user", question), m.ChatMessage("assistant", answer))
    )
    return (*first, *told)


def _same(saved: str, loaded: str) -> bool:
    """Sidecars that are older than fingerprints have none."""
    return saved == loaded != ""
