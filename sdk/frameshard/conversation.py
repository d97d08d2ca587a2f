"""Conversations, which clients hold: their messages, the next prompt, and saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameshard.errors import BadArgument, typed
from frameshard.records import record
from frameshard.wire import checks, codec, saves
from frameshard.wire import messages as m


@record
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
        return self.exchanges if self.open is None else self.open.so_far()

    def history(self) -> tuple[m.ChatMessage, ...]:
        return _messages(self.system, self.so_far())

    def save(self, model: m.ModelInfo, writer: str) -> bytes:
        exchanges = saves.newest(self.so_far(), len(self.system.encode()))
        return saves.write(saves.save_of(exchanges, self.system, model.fingerprint, model.template_fingerprint, writer))


def check_name(conversation: object) -> None:
    """
    :raises BadArgument: the name of a conversation is not a string.
    """
    if not isinstance(conversation, str):
        raise BadArgument("the name of a conversation is a string", field="conversation")


class Conversations:
    """The conversations of one client, by name.

    :param writer: the client's name, for saves.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._by_name: dict[str, Conversation] = {}

    def find(self, name: str | None) -> Conversation:
        """The conversation of this name, a new one if there is none. Without a name it is not kept."""
        if name is None:
            return Conversation()
        check_name(name)
        return self._by_name.setdefault(name, Conversation())

    def history(self, name: str) -> tuple[m.ChatMessage, ...]:
        check_name(name)
        return self._by_name.get(name, Conversation()).history()

    def forget(self, name: str) -> None:
        """An answer that is open is forgotten, too."""
        check_name(name)
        if name in self._by_name:
            self._by_name[name] = Conversation(self._by_name[name].system)

    def save(self, name: str, model: m.ModelInfo) -> bytes:
        check_name(name)
        return self._by_name.get(name, Conversation()).save(model, self._writer)

    def load(self, data: bytes, name: str, model: m.ModelInfo) -> LoadResult:
        check_name(name)
        if not 0 < len(name.encode(errors="replace")) <= m.MAX_NAME_BYTES:
            raise BadArgument(f"the name of a conversation has 1 to {m.MAX_NAME_BYTES} bytes", field="conversation")
        with typed():
            save = saves.read(data)
        there = self._by_name.get(name)
        if there is not None and there.open is not None:
            raise BadArgument("this conversation's last answer is still open: leave its stream first")
        self._by_name[name] = Conversation(save.system, saves.exchanges_of(save))
        return LoadResult(
            _same(save.model, model.fingerprint),
            _same(save.template, model.template_fingerprint),
        )


class Turn:
    """One question in a conversation, or the results of the calls that its last answer ended with.

    :param question: the text of the question, or the results by the ids of the calls.
    """

    def __init__(
        self, conversations: Conversations, name: str | None, system: str | None, question: str | Mapping[str, str]
    ) -> None:
        self.answer = ""
        """The text of the answer that was read so far."""
        self.calls: tuple[m.ToolCall, ...] = ()
        """The calls of the answer that were read so far."""
        self.n_dropped = 0
        """How many of the oldest exchanges are not in the prompt, because they do not fit."""
        self._n_forgotten = 0
        self._conversations = conversations
        self._name = name
        self._conversation = Conversation()
        self._system = system
        self._asked = question
        self._before: tuple[str, list[saves.Exchange]] = "", []  # system text and exchanges
        self._told = saves.Exchange("", "")  # without this answer

    def messages(self, others: Mapping[str, Any]) -> tuple[m.ChatMessage, ...]:
        """The prompt: as much of the conversation as fits into a message, and the question.

        :param others: the other fields of the job, which are in the same message.
        :raises BadArgument: one of them has a wrong value, or they are too large for a message.
        """
        conversation = self._conversation
        texts_bytes = len(conversation.system.encode(errors="replace")) + self._told.n_bytes
        question = (m.ChatMessage("user", self._told.question), *self._told.steps)
        exchanges = saves.newest(conversation.exchanges, texts_bytes + _frame_bytes(others), len(question))
        self.n_dropped = self._n_forgotten + len(conversation.exchanges) - len(exchanges)
        return (*_messages(conversation.system, exchanges), *question)

    def so_far(self) -> list[saves.Exchange]:
        """The exchanges with this question and its answer. If nothing of the answer was read, those from before: with
        what the question has dropped, and with calls that wait for results."""
        answer = self.answer.encode()[: codec.CLIENT.string].decode(errors="ignore")
        question, _, steps = self._told
        if self.calls:
            called = m.ChatMessage("assistant", answer, self.calls)
            return [*self._conversation.exchanges, saves.Exchange(question, "", (*steps, called))]
        if answer:
            return [*self._conversation.exchanges, saves.Exchange(question, answer, steps)]
        return self._before[1]

    def begin(self) -> None:
        conversation = self._conversations.find(self._name)
        if conversation.open is not None:
            raise BadArgument("this conversation's last answer is still open: leave its stream first")
        self._before = conversation.system, list(conversation.exchanges)
        waiting = conversation.exchanges[-1:] if conversation.exchanges and conversation.exchanges[-1].waiting else []
        if isinstance(self._asked, str):
            self._told = saves.Exchange(self._asked, "")
            kept = [_without_calls(exchange) for exchange in waiting]
        else:
            self._told, kept = _with_results(waiting, self._asked), []
        if waiting:
            conversation.exchanges[-1:] = [exchange for exchange in kept if exchange.answer]
        conversation.open = self
        self._conversation = conversation
        if self._system is not None:
            conversation.system = self._system

    def shorten(self, excess: int = 0) -> bool:
        """Forgets the oldest question and answer of the prompt, and those that are older.

        :param excess: at least so many tokens do not fit. More exchanges are forgotten, as far as this needs it for
            certain: a token has a byte or more.
        :returns: false if the prompt has none.
        """
        exchanges = self._conversation.exchanges
        n = self.n_dropped - self._n_forgotten + 1
        if n > len(exchanges):
            return False
        excess -= exchanges[n - 1].n_bytes
        while excess > 0 and n < len(exchanges):
            excess -= exchanges[n].n_bytes
            n += 1
        del exchanges[:n]
        self._n_forgotten += n
        return True

    def end(self, *, failed: bool = False) -> None:
        """The answer has ended. A question of which no answer was read leaves the exchanges as they were.

        :param failed: it has ended by an error. Without an answer the system text is that from before, too.
        """
        conversation = self._conversation
        conversation.open, conversation.exchanges = None, self.so_far()
        if failed and not (self.answer or self.calls):
            conversation.system = self._before[0]


def _frame_bytes(others: Mapping[str, Any]) -> int:
    """The bytes of the frame of a job with these fields and an empty question."""
    try:
        job = m.Submit(1, 1, 1, "chat", (m.ChatMessage("user", ""),), **others)
    except checks.Refused as refused:
        raise BadArgument(str(refused)) from None
    return len(m.encode(job))


def _without_calls(exchange: saves.Exchange) -> saves.Exchange:
    """An exchange whose last calls got no results, without them. The texts beside calls are its answer."""
    return saves.Exchange(exchange.question, exchange.steps[-1].content, exchange.steps[:-1])


def _with_results(waiting: list[saves.Exchange], results: Mapping[str, str]) -> saves.Exchange:
    if not waiting:
        raise BadArgument("the last answer of this conversation has no calls of tools", field="results")
    calls = [call.id for call in waiting[0].steps[-1].tool_calls]
    if set(calls) != results.keys():
        raise BadArgument(f"give a result for each of the calls {', '.join(calls)}, and for no other", field="results")
    told = (m.ChatMessage("tool", results[call], tool_call_id=call) for call in calls)
    return saves.Exchange(waiting[0].question, "", (*waiting[0].steps, *told))


def _messages(system: str, exchanges: list[saves.Exchange] | tuple[saves.Exchange, ...]) -> tuple[m.ChatMessage, ...]:
    first = (m.ChatMessage("system", system),) if system else ()
    return (*first, *(message for exchange in exchanges for message in exchange.messages()))


def _same(saved: str, loaded: str) -> bool:
    """Sidecars that are older than fingerprints have none."""
    return saved == loaded != ""
