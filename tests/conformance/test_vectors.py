"""Document, vectors and code agree. The vectors are checked with the document, and then with the code."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, get_type_hints

import document
import make_vectors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameshard import errors
from frameshard.wire import codec, saves
from frameshard.wire import messages as m

VECTORS = document.BINDINGS / "vectors"
INDEX: list[dict[str, Any]] = json.loads((VECTORS / "index.json").read_text())
SAVES = document.BINDINGS / "saves"
SAVE_INDEX: list[dict[str, Any]] = json.loads((SAVES / "index.json").read_text())


def named(row: dict[str, Any]) -> str:
    return str(row["file"])


def test_the_vectors_are_what_the_code_makes() -> None:
    made = make_vectors.make()
    assert {path.name for path in VECTORS.iterdir()} == set(made)
    for name, content in made.items():
        assert (VECTORS / name).read_bytes() == content, f"{name}: run tests/conformance/make_vectors.py"


def test_the_saves_are_what_the_code_makes() -> None:
    made = make_vectors.make_saves()
    assert {path.name for path in SAVES.iterdir()} == set(made)
    for name, content in made.items():
        assert (SAVES / name).read_bytes() == content, f"{name}: run tests/conformance/make_vectors.py"


@pytest.mark.parametrize("row", SAVE_INDEX, ids=named)
def test_the_document_and_the_code_agree_on_a_save(row: dict[str, Any]) -> None:
    data = (SAVES / row["file"]).read_bytes()
    if row["valid"]:
        assert document.save(data) == row["save"]
        save = saves.read(data)
        assert make_vectors.as_written(save) == row["save"]
        assert saves.write(save) == data
    else:
        with pytest.raises(document.Malformed):
            document.save(data)
        with pytest.raises(errors.BadSave):
            saves.read(data)


@pytest.mark.parametrize("row", INDEX, ids=named)
def test_the_document_alone_tells_right_from_wrong(row: dict[str, Any]) -> None:
    frame = (VECTORS / row["file"]).read_bytes()
    if "known" in row:
        assert document.taken(frame)
        assert make_vectors.plain(document.known(frame)) == row["known"]
    else:
        assert document.valid(row["from"], frame) == row["valid"]
    if row["valid"]:
        assert make_vectors.plain(document.read(frame)) == row["message"]
    elif row["file"].startswith("invalid-frame-"):
        with pytest.raises(document.Malformed):
            document.read(frame)


@pytest.mark.parametrize("row", INDEX, ids=named)
def test_the_code_agrees(row: dict[str, Any]) -> None:
    frame = (VECTORS / row["file"]).read_bytes()
    decode = m.decode_request if row["from"] == "client" else m.decode_answer
    if not row["valid"]:
        with pytest.raises(errors.BadMessage):
            decode(frame)
        return
    message = decode(frame)
    kept = row.get("known", row["message"])
    if message is None:
        assert kept == {}
        return
    if "known" not in row:
        assert document.valid(row["from"], m.encode(message))
    written = make_vectors.plain(dataclasses.asdict(message))
    assert contains(written, {name: value for name, value in kept.items() if name != "t"})


def contains(value: Any, expected: Any) -> bool:
    """Whether `value` is the expected one. It may have more fields: those with defaults."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return all(name in value and contains(value[name], item) for name, item in expected.items())
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(contains, value, expected))
    return bool(value == expected)


def test_every_message_has_a_vector_and_a_table() -> None:
    for sender, table, described in (
        ("client", m.REQUESTS, document.REQUESTS),
        ("broker", m.ANSWERS, document.ANSWERS),
    ):
        assert set(table) == set(described)
        right = [row for row in INDEX if row["valid"] and row["from"] == sender and "known" not in row]
        assert set(table) == {row["message"]["t"] for row in right}


def test_the_tables_have_the_fields_of_the_code() -> None:
    records = [m.ChatMessage, m.Image, m.Sampling, m.ErrorInfo, m.ModelInfo, m.ServerLimits, m.BrokerStats, m.PlanRow]
    records += [m.Adapter, m.AdapterInfo, m.LogitBias, m.Tool, m.ToolCall, saves.Step]
    described = {
        **{cls: document.REQUESTS[name] for name, cls in m.REQUESTS.items()},
        **{cls: document.ANSWERS[name] for name, cls in m.ANSWERS.items()},
        **{cls: document.RECORDS[cls.__name__] for cls in records},
    }
    assert set(document.RECORDS) == {cls.__name__ for cls in records}
    for cls, rows in described.items():
        fields = [(field.name, field.default is dataclasses.MISSING) for field in dataclasses.fields(cls)]
        assert [(row.name, row.required) for row in rows] == fields, cls
        assert set(get_type_hints(cls)) == {row.name for row in rows}


def test_the_documents_errors_are_the_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (yes|no) \|", document.DOCUMENT, re.MULTILINE)
    expected = {(str(cls.code), cls.name, "yes" if cls.retriable else "no") for cls in errors.BY_NAME.values()}
    assert set(rows) == expected


def test_links_inside_the_document_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", document.DOCUMENT, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", document.DOCUMENT)) <= anchors


SHORT = [frame for row in INDEX if len(frame := (VECTORS / row["file"]).read_bytes()) < 2000]


@settings(max_examples=1000)
@given(st.data())
def test_two_readers_of_frames_agree(data: st.DataObject) -> None:
    """The document's reader and the code agree on vectors with bytes changed, removed and added."""
    frame = bytearray(data.draw(st.sampled_from(SHORT)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(frame)))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        expected = document.read(bytes(frame))
    except document.Malformed:
        with pytest.raises(errors.BadMessage):
            codec.decode(bytes(frame))
    else:
        assert codec.decode(bytes(frame)) == expected
        for judge, decode in (
            (lambda frame: document.valid("client", frame), m.decode_request),
            (document.taken, m.decode_answer),
        ):
            try:
                decode(bytes(frame))
            except (errors.BadMessage, errors.VersionMismatch):
                assert not judge(bytes(frame)) or expected.get("protocol", 0) > 1
            else:
                assert judge(bytes(frame))
