"""Answers with a form: a JSON schema, choices, a regular expression or a Lark grammar. Also forms that are attacks.
Models with random weights are the hardest test, because without the form their answers are random tokens."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user
from pydantic import BaseModel, Field

from frameshard.engine.forms import MAX_BYTES, Form
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

Name = Annotated[str, Field(max_length=8)]


class Mood(Enum):
    CALM = "calm"
    ANGRY = 'so "angry" \\ he\nshouts'


class Item(BaseModel):
    name: Name
    weight: Annotated[int, Field(ge=0, le=999)]
    cursed: bool = False


class Sword(BaseModel):
    kind: Literal["sword"]
    edge: Annotated[int, Field(ge=1, le=10)]


class Potion(BaseModel):
    kind: Literal["potion"]
    of: Name | None = None


class Person(BaseModel):
    name: Name
    mood: Mood
    place: tuple[Annotated[int, Field(ge=-50, le=50)], Annotated[int, Field(ge=-50, le=50)]]
    bag: Annotated[list[Item], Field(max_length=2)]
    holds: Annotated[Sword | Potion, Field(discriminator="kind")]


class Party(BaseModel):
    leader: Person
    others: Annotated[list[Person], Field(max_length=1)]
    pact: Literal["none", "süß", 7, None]


class Quest(BaseModel):
    """A recursive schema."""

    title: Name
    done: bool
    steps: Annotated[list[Quest], Field(max_length=2)] = []


MODELS: dict[str, type[BaseModel]] = {"item": Item, "person": Person, "party": Party, "quest": Quest, "potion": Potion}
WORD = {"type": "string", "maxLength": 8}
ODD = '" \\ \n\t\0\x7f\u2028 🐉 ▁ </s> <|im_end|>'
SCHEMAS: dict[str, dict[str, Any]] = {
    **{name: model.model_json_schema() for name, model in MODELS.items()},
    "types": {"type": ["integer", "null", "boolean"], "minimum": -5, "maximum": 5},
    "const": {"const": ODD},
    "deep const": {"const": [[{"a": [{"b": {"c": [1, 2.5, None, {"d": ODD}]}}]}]]},
    "enum": {"enum": [ODD, "", 0, -1.5, None, True, [], {"k": ["v", ODD]}]},
    "names": {"type": "object", "properties": {ODD: WORD, "$ref": WORD, "ü": WORD}, "required": ["$ref", ODD]},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}( the [A-Z][a-z]{2,8})?$"},
    "format": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1, "maxItems": 2},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, WORD], "items": False, "minItems": 2},
    "map": {"type": "object", "patternProperties": {"^[a-c]$": {"enum": [1, 2]}}, "additionalProperties": False},
    "any": {"anyOf": [WORD, {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99}, {"const": None}]},
    "all": {"allOf": [{"type": "string", "pattern": "^a.*z$"}, {"maxLength": 6}]},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "optional": {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(6)}, "required": ["p3"]},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": WORD, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["v", "next"],
            }
        },
    },
}

WARM = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 600}
NO_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')


def check(name: str, answer: str) -> None:
    """Checks that the answer fits the schema, and ends where it is complete."""
    value = json.loads(answer)
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(value)
    if name in MODELS:
        MODELS[name].model_validate_json(answer)
    outside = NO_STRINGS.sub("", answer)
    assert not re.search(r"\s\s|[^,:]\s|\s$", outside), answer


@pytest.fixture(scope="module")
def tiny(talking_model: Path) -> Iterator[EngineProcess]:
    with engine(talking_model, n_ctx=1024, n_parallel=16) as child:
        yield child


def job(child: EngineProcess, schema: object, seed: int, **params: object) -> int:
    held = schema if isinstance(schema, str) else json.dumps(schema)
    return child.submit("Once", params={**WARM, "seed": seed, **params, "json_schema": held})


def refusal(events: list[Event], field: str = "json_schema") -> str:
    error = events[-1]["error"]
    assert (error["name"], error["detail"]) == ("bad_argument", {"field": field}), error
    return str(error["message"])


# --- answers fit ------------------------------------------------------------------------------------------------------


def test_whatever_is_drawn_fits(talking_model: Path) -> None:
    """There are 200 seeds and 20 schemas. All allowed tokens are drawn with equal probability, unlike with a model."""
    assert len(SCHEMAS) == 20
    config = EngineConfig(str(talking_model), n_ctx=512, n_parallel=1, n_threads=1)
    with Runtime.load(config, measure=False) as runtime:
        pieces = [runtime.tokenizer.piece(token) for token in range(runtime.n_vocab)]
        for name, schema in SCHEMAS.items():
            matcher = runtime.forms.matcher(Form("json_schema", json.dumps(schema)))
            endless = 0
            for seed in range(200):
                matcher._matcher.reset()  # a new one takes longer than most answers
                draw, said = random.Random(f"{name} {seed}"), b""
                for _ in range(2000):
                    token = int(draw.choice(matcher.allowed()))
                    if runtime.tokenizer.is_end(token):
                        break
                    matcher.accept(token)
                    said += pieces[token]
                    if matcher.complete:
                        break
                else:
                    endless += 1
                    continue
                check(name, said.decode())
            assert endless <= 2, name


def test_every_answer_that_ends_fits(tiny: EngineProcess) -> None:
    """Answers come from the engine, 16 at a time, with the probabilities of a model."""
    jobs = {job(tiny, schema, seed): name for name, schema in SCHEMAS.items() for seed in range(5)}
    ended = 0
    for number, events in tiny.finish(*jobs).items():
        assert events[-1]["ev"] == "done", (jobs[number], events[-1])
        if events[-1]["reason"] == "stop":
            check(jobs[number], text(events))
            ended += 1
    assert ended >= 0.95 * len(jobs)


def test_a_model_that_has_an_idea(wordy_model: Path) -> None:
    with engine(wordy_model, n_ctx=1024, n_parallel=4) as child:
        names = ("item", "person", "types", "any")
        jobs = {
            child.submit(
                user(f"Describe one {name} of a tavern as JSON."),
                params={"json_schema": json.dumps(SCHEMAS[name]), "temperature": 0.8, "seed": 1, "max_tokens": 300},
            ): name
            for name in names
        }
        for number, events in child.finish(*jobs).items():
            assert events[-1]["reason"] == "stop", events[-1]
            check(jobs[number], text(events))


CHOICES = ["yes", "no", "no way", ODD, "süß", '"quoted"', "a\\nb", "// no comment"]
REGEXES = [
    r"[A-Z][a-z]{2,8}( the [A-Z][a-z]{2,8})?",
    r"\d{1,2}/\d{1,2}\/\d{4}",  # a slash, and one that is escaped already
    r"(?i)(north|south)-(east|west)",
    "one\ntwo|three\\\\four",
]
ARITHMETIC = """
start: sum
sum: term (" + " term){0,3}
term: NUMBER | "(" NUMBER " * " NUMBER ")"
NUMBER: /[1-9][0-9]?/
"""


def test_answers_are_one_of_the_choices(tiny: EngineProcess) -> None:
    jobs = [tiny.submit("Once", params={**WARM, "seed": seed, "choices": CHOICES}) for seed in range(64)]
    answers = list(tiny.finish(*jobs).values())
    assert all(events[-1]["reason"] == "stop" for events in answers)
    said = {text(events) for events in answers}
    assert said <= set(CHOICES)
    assert len(said) > 3


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_match_the_regular_expression(tiny: EngineProcess, regex: str) -> None:
    jobs = [tiny.submit("Once", params={**WARM, "seed": seed, "regex": regex}) for seed in range(16)]
    for events in tiny.finish(*jobs).values():
        assert events[-1]["reason"] == "stop"
        assert re.fullmatch(regex, text(events)), text(events)


def test_answers_fit_the_grammar(tiny: EngineProcess) -> None:
    number = r"([1-9][0-9]?|\([1-9][0-9]? \* [1-9][0-9]?\))"
    jobs = [tiny.submit("Once", params={**WARM, "seed": seed, "lark": ARITHMETIC}) for seed in range(16)]
    for events in tiny.finish(*jobs).values():
        assert events[-1]["reason"] == "stop"
        assert re.fullmatch(rf"{number}( \+ {number}){{0,3}}", text(events)), text(events)


@pytest.mark.parametrize(
    ("form", "field", "why"),
    [
        ({"regex": "(("}, "regex", "unclosed group"),
        ({"regex": "ends in \\"}, "regex", "regex: a backslash at the end"),
        ({"regex": "\\"}, "regex", "regex: a backslash at the end"),
        ({"regex": "a\\\\\\\nb"}, "regex", "regex: a backslash at the end or before a line break"),
        ({"regex": "[^\\s\\S]"}, "regex", ""),
        ({"choices": [str(i) * 2000 for i in range(10, 30)]}, "choices", f"more than {MAX_BYTES} bytes"),
        ({"regex": "(a"}, "regex", "regex: invalid regex"),
        ({"lark": "start: word"}, "lark", "word"),
        ({"lark": "start: word\n"}, "lark", "lark: at 1(8): "),
        ({"lark": "start: <|im_end|>"}, "lark", "it cannot name tokens"),
        ({"lark": "start: <[99999]>"}, "lark", "it cannot name tokens"),
        ({"lark": "begin: /a/"}, "lark", "no start rule"),
        ({"lark": "start: start"}, "lark", "nothing fits it"),
        ({"lark": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "lark", "too deeply nested"),
        ({"lark": 'start: "a"\n  %llguidance {"no_forcing": false}'}, "lark", "options of llguidance"),
        ({"lark": "start: @other"}, "lark", "other"),
        ({"choices": ["a"], "regex": "a"}, "regex", "choices and regex: an answer has one form"),
        ({"json_schema": "{}", "lark": 'start: "a"'}, "lark", "json_schema and lark: an answer has one form"),
    ],
)
def test_forms_that_cannot_be_used(tiny: EngineProcess, form: dict[str, object], field: str, why: str) -> None:
    number = tiny.submit("Once", params={**WARM, "max_tokens": 5, **form})
    message = refusal(tiny.finish(number)[number], field)
    assert why in message, message
    assert len(message) < 600


def test_control_tokens_are_no_text(shallow_model: Path) -> None:
    config = EngineConfig(str(shallow_model), n_ctx=512, n_parallel=1, n_threads=1)
    with Runtime.load(config, measure=False) as runtime:
        matcher = runtime.forms.matcher(Form("json_schema", '{"type": "string"}'))
        for token in runtime.tokenizer.tokenize('"a', add_special=False):
            matcher.accept(token)
        allowed = set(matcher.allowed().tolist())
        control = runtime.tokenizer.tokenize("<|im_start|><|im_end|><|endoftext|><repo_name>", parse_special=True)
        assert len(control) == 4
        assert not allowed & set(control)
        assert len(allowed) > 40_000
        (quote,) = runtime.tokenizer.tokenize('"', add_special=False)
        matcher.accept(quote)
        assert matcher.complete
        ends = {token for token in range(runtime.n_vocab) if runtime.tokenizer.is_end(token)}
        assert set(matcher.allowed().tolist()) == ends


def test_a_number_ends_with_the_models_end(tiny: EngineProcess) -> None:
    """A number has no last character, so only the token that ends an answer completes it."""
    number = job(tiny, {"type": "integer", "minimum": 1}, 3)
    events = tiny.finish(number)[number]
    assert events[-1]["reason"] == "stop"
    assert int(text(events)) >= 1


def test_max_tokens_cuts_an_answer_off(tiny: EngineProcess) -> None:
    number = job(tiny, {"type": "array", "items": WORD, "minItems": 50}, 3, max_tokens=9)
    events = tiny.finish(number)[number]
    assert (events[-1]["reason"], events[-1]["n_generated"]) == ("length", 9)
    assert text(events).startswith("[")


def test_an_object_has_only_what_is_named_unless_it_says_otherwise(talking_model: Path) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    rest = b'{"a":null,'
    with Runtime.load(EngineConfig(str(talking_model), n_ctx=512, n_parallel=1, n_threads=1)) as runtime:

        def goes_on(schema: dict[str, Any]) -> bool:
            matcher = runtime.forms.matcher(Form("json_schema", json.dumps(schema)))
            for byte in rest[:-1]:
                matcher.accept(3 + byte)
            return 3 + rest[-1] in matcher.allowed()

        assert not goes_on(schema)
        assert goes_on({**schema, "additionalProperties": True})
        assert goes_on({**schema, "required": ["a", "b"]})
        assert goes_on({"allOf": [schema, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]})
        assert goes_on({**schema, "anyOf": [{"properties": {"b": {"type": "null"}}}]})


# --- attacks ----------------------------------------------------------------------------------------------------------


def nested(levels: int, head: str, tail: str) -> str:
    return head * levels + "1" + tail * levels


ATTACKS: dict[str, object] = {
    "null required": {"type": "object", "properties": {"a": WORD}, "required": None},
    "list of properties": {"type": "object", "properties": [1], "required": [[1]]},
    "no such type": {"type": "strng"},
    "deep const": nested(200, '{"const":[', "]}"),
    "deeper const": '{"const":' + nested(2000, "[", "]") + "}",
    "deepest const": '{"const":' + nested(30_000, "[", "]") + "}",
    "deep schema": '{"items":' * 500 + "{}" + "}" * 500,
    "deep pattern": {"type": "string", "pattern": "(" * 20_000 + ")" * 20_000},
    "deep stars": {"type": "string", "pattern": "(" * 200 + "a" + ")*" * 200},
    "many nested counts": {"type": "string", "pattern": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "explosive": {"type": "string", "pattern": "^(a|b)*a(a|b){5000}c$"},
    "many patterns at once": {"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(200)]},
    "large divisor": {"type": "integer", "multipleOf": 1_000_003},
    "items without end": {"type": "array", "items": WORD, "minItems": 10**9, "maxItems": 10**9},
    "string without end": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "negative length": {"type": "string", "maxLength": -1},
    "itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    "a remote one": {"$ref": "https://example.com/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "nowhere": {"$ref": "#/$defs/none"},
    "product of choices": {
        "allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"const": j}}} for j in range(4)]} for i in range(12)]
    },
    "doubling": {
        "$ref": "#/$defs/a0",
        "$defs": {
            **{f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 9} for i in range(40)},
            "a40": WORD,
        },
    },
    "no value": {"type": "integer", "minimum": 5, "maximum": 4},
    "nothing to choose": {"enum": []},
    "unknown to llguidance": {"type": "array", "uniqueItems": True},
    "several at once": {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
    "not JSON": "{",
    "no schema": "[]",
    "no number": '{"const": NaN}',
    "too large a number": '{"const": 1e999}',
    "a number of 5,000 digits": '{"const": ' + "9" * 5000 + "}",
    "half a character": '{"const": "\\ud800"}',
    "more of a schema": '{}}], "max_tokens": 1, "grammars": [{"lark_grammar": "start: /x/"',
    "its own layout": {"const": [1, 2], "x-guidance": {"item_separator": "x", "whitespace_flexible": True}},
    "too long": {"const": "x" * MAX_BYTES},
}


def test_a_hostile_schema_hurts_nobody_else(tiny: EngineProcess) -> None:
    endless = [{"token": 2, "bias": -100}]  # without the end of an answer
    other = tiny.submit("Once", params={"temperature": 0.0, "max_tokens": 900, "logit_bias": endless})
    jobs = {job(tiny, schema, 1, max_tokens=20): name for name, schema in ATTACKS.items()}
    answers = tiny.finish(other, *jobs)
    assert (answers[other][-1]["ev"], len(ids(answers[other]))) == ("done", 900)
    for number, name in jobs.items():
        last = answers[number][-1]
        if last["ev"] == "failed":
            assert len(refusal(answers[number])) < 600, name
        elif last["reason"] == "stop":
            schema = ATTACKS[name]
            jsonschema.validate(
                json.loads(text(answers[number])), json.loads(schema) if isinstance(schema, str) else schema
            )
    for number in (job(tiny, SCHEMAS["types"], seed) for seed in range(3)):
        check("types", text(tiny.finish(number)[number]))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"type": "object", "properties": {"a/b": {"type": "array", "items": {"type": "strng"}}}},
            "#/properties/a~1b/items",
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [WORD, {"not": WORD}]}}}, "#/$defs/x/anyOf/1"),
        ({"type": "string", "pattern": "(("}, "#: regex parse error"),
        ({"anyOf": [WORD, {"enum": [2**53, {"id": 2**53 + 1}]}]}, "#/anyOf/1/enum: 9007199254740993 would be rounded"),
        ({"type": "integer", "minimum": 2**53 + 1}, "#/minimum: 9007199254740993 would"),
        ({"type": "integer", "minimum": 10**400, "maximum": 10**401}, "#/minimum: 1000000000000000000"),
    ],
)
def test_a_refusal_names_the_place(tiny: EngineProcess, schema: object, place: str) -> None:
    number = job(tiny, schema, 1)
    assert f"json_schema: at {place}" in refusal(tiny.finish(number)[number])


def test_one_that_is_too_complex_in_the_middle_fails_alone(tiny: EngineProcess) -> None:
    """The state that the matcher needs depends on the answer, so it is too large only in the middle."""
    optional = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    number, other = job(tiny, optional, 1), job(tiny, SCHEMAS["person"], 1)
    answers = tiny.finish(number, other)
    assert "too complex" in refusal(answers[number])
    check("person", text(answers[other]))


def test_the_process_that_checks_is_started_again(tiny: EngineProcess) -> None:
    number = job(tiny, {"const": "first"}, 1)
    assert text(tiny.finish(number)[number]) == '"first"'
    tasks = Path(f"/proc/{tiny.process.pid}/task").iterdir()
    pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    number = job(tiny, {"const": "second"}, 1)
    assert text(tiny.finish(number)[number]) == '"second"'


# --- the same text again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stream_only", "planned"])
def test_an_answer_goes_on_after_the_engines_death(talking_model: Path, mode: str) -> None:
    """In stream-only mode the text is the same. In planned mode it fits the schema."""
    model, config = talking_model, {"device": "emulated", "mode": mode, "n_ctx": 1024, "n_parallel": 2}
    params = {**WARM, "seed": 5, "json_schema": json.dumps(SCHEMAS["party"])}
    child = EngineProcess()
    try:
        child.load(model, **config, n_threads=1)
        whole = child.run("Once", params=params)
        assert whole[-1]["reason"] == "stop"
        number = child.submit("Once", params=params)
        started, said = child.wait_for("started"), []
        while len(said) < len(ids(whole)) // 2:
            said.append(child.wait_for("token", job=number))
        child.process.kill()
    finally:
        child.close()
    with engine(model, **config) as child:
        for n in (len(said), 1, len(ids(whole))):
            old = whole[1 : 1 + n] if n > len(said) else said[:n]
            more = {"history": started["history"]} if mode == "stream_only" else {}
            events = child.run("Once", params=params, resume=ids(old), **more)
            assert events[-1]["reason"] == "stop"
            check("party", text(old) + text(events))
            if mode == "stream_only":
                assert ids(old) + ids(events) == ids(whole)


def test_drafts_do_not_change_an_answer(talking_model: Path) -> None:
    """The answer repeats itself, so many tokens are drafted. A rejected token must not change what is allowed next."""
    schema = {"type": "array", "items": {"enum": ["no weapons", "no magic", "no talk"]}, "minItems": 6, "maxItems": 9}
    answers = []
    for speculate in ("auto", "off"):
        with engine(
            talking_model, device="emulated", mode="stream_only", n_ctx=1024, n_parallel=4, speculate=speculate
        ) as child:
            jobs = [job(child, schema, seed) for seed in range(4)]
            done = child.finish(*jobs)
            answers.append([text(done[number]) for number in jobs])
            assert (child.stats()["drafted_tokens"] > 0) == (speculate == "auto")
    assert answers[0] == answers[1]
    for answer in answers[0]:
        jsonschema.validate(json.loads(answer), schema)
