"""Writes bindings/vectors and bindings/saves. Run it (``make generate``) after a change of the protocol.

There is one file per frame. index.json has for each: ``file``, ``from`` (``client`` or ``broker``), ``valid``,
``about``, and for a valid frame ``message``, the map as JSON. Frames of a newer sidecar (``forward-*``) also have
``known``: the part of the message that a client of this version keeps. If ``known`` has no ``t``, it is an unknown
event of a job, and the client keeps ``job``, ``seq`` and ``epoch`` to count it. If ``known`` is empty, the client
ignores the message.

It also writes bindings/saves: saved conversations, right and wrong ones. Their index.json has ``file``, ``valid``,
``about`` and, for a right one, ``save``: its content.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import msgpack

from frameshard import errors
from frameshard.wire import messages as m
from frameshard.wire import saves

VECTORS = Path(__file__).parents[2] / "bindings" / "vectors"
EPOCH = 2**53 - 1
TALK = (m.ChatMessage("system", "You keep an inn."), m.ChatMessage("user", "Zwei Zimmer, bitte: für ñandú und 猫 🐈."))
LOOK = m.ToolCall("def", "look", "{}")
FLOOR = errors.BudgetBelowFloor("the floor is 16777216 bytes", budget_bytes=1, floor_bytes=16777216)
MODEL = m.ModelInfo(
    "innkeeper.gguf",
    "llama",
    "CUDA0",
    1024,
    4,
    49152,
    30,
    True,
    16777216,
    1 << 32,
    {"resident": [1, 2], "ring": 0},
    fingerprint="ab" * 32,
    template_fingerprint="cd" * 32,
)
PLACE = {"job": 7, "seq": 0, "epoch": EPOCH, "timeline": 3}
TOOLS = (m.Tool("price", "What it costs.", '{"properties": {"item": {"type": "string"}}}'), m.Tool("look"))

VALID: dict[str, m.Message] = {
    "hello": m.Hello(1, 1, "my game"),
    "hello-notices": m.Hello(1, 1, "my game", notices=True),
    "hello-again": m.Hello(9, 1, "my game", epoch=EPOCH, session=4711),
    "submit-chat": m.Submit(2, EPOCH, 7, "chat", messages=TALK, conversation="innkeeper", timeline=3),
    "submit-tools": m.Submit(
        27,
        EPOCH,
        14,
        "chat",
        messages=(
            *TALK,
            m.ChatMessage("assistant", "Hm.", (m.ToolCall("abc", "price", '{"item": "Süß"}'), LOOK)),
            m.ChatMessage("tool", "12", tool_call_id="abc"),
            m.ChatMessage("tool", "", tool_call_id="def"),
        ),
        tools=TOOLS,
        tool_choice="required",
    ),
    "submit-completion": m.Submit(
        3,
        EPOCH,
        8,
        "completion",
        prompt="Once upon a time",
        sampling=m.Sampling(
            16,
            0.0,
            0,
            1.0,
            0.0,
            1.1,
            2**32 - 1,
            ("\n", "END"),
            frequency_penalty=0.25,
            presence_penalty=-0.5,
            typical_p=0.9,
            xtc_probability=0.5,
            choices=("yes", "no"),
            logit_bias=(m.LogitBias(-100.0, text=" gold"), m.LogitBias(2.5, token=0)),
            dry_multiplier=0.8,
            dry_penalty_last_n=256,
            dry_sequence_breakers=("\n", "。"),
        ),
        window=1,
        priority=2,
        adapters=(m.Adapter("pirate", 0.75), m.Adapter("old")),
        deadline_ms=1500,
    ),
    "submit-sentences": m.Submit(3, EPOCH, 8, "completion", prompt="Once upon a time", sentences=True),
    "submit-thinking": m.Submit(
        3,
        EPOCH,
        8,
        "chat",
        messages=TALK,
        thinking="shown",
        thinking_tokens=64,
        template_keywords='{"reasoning_effort": "low"}',
    ),
    "submit-warm-up": m.Submit(3, EPOCH, 8, "chat", messages=TALK, warm_up=True),
    "submit-images": m.Submit(
        3,
        EPOCH,
        9,
        "chat",
        messages=(m.ChatMessage("user", "What is this?"),),
        images=(
            m.Image("encoded", b"\x89PNG\r\n"),
            m.Image("rgba", b"", "/proc/4100/fd/7", 1920 * 4 * 1080, 1920, 1080, 1920 * 4),
        ),
    ),
    "cancel": m.Cancel(4, EPOCH, 7),
    "priority_set": m.PrioritySet(4, EPOCH, 7, 2),
    "credit": m.Credit(EPOCH, 7, 16),
    "credit-resend": m.Credit(EPOCH, 7, 0, True),
    "budget_set": m.BudgetSet(5, EPOCH, 1610612736, 0.5),
    "budget_set-none": m.BudgetSet(5, EPOCH, 0),
    "budget_set-lease": m.BudgetSet(5, EPOCH, 1610612736, 0.5, "active", 268435456, 12, "streaming cell"),
    "budget_set-host": m.BudgetSet(5, EPOCH, 1610612736, host_budget_bytes=3 << 30),
    "budget_set-host-none": m.BudgetSet(5, EPOCH, 1610612736, host_budget_bytes=0),
    "budget_set-parked": m.BudgetSet(5, EPOCH, 1610612736, state="parked"),
    "budget_set-hibernated": m.BudgetSet(5, EPOCH, 0, state="hibernated", version=13),
    "caps_and_requirements": m.CapsGet(6, EPOCH),
    "plan": m.PlanGet(6, EPOCH, (268435456, 1610612736, 0), 2048),
    "count_tokens": m.CountTokens(6, EPOCH, messages=TALK),
    "count_tokens-tools": m.CountTokens(6, EPOCH, messages=TALK, tools=TOOLS),
    "count_tokens-prompt": m.CountTokens(6, EPOCH, prompt="Once upon a time"),
    "embed": m.Embed(6, EPOCH, texts=("the cat sits outside", "größer")),
    "budget_get": m.BudgetGet(6, EPOCH),
    "frame_block": m.FrameBlockGet(6, EPOCH),
    "pacing": m.Pacing(6, EPOCH, "prioritize_graphics", 20.0),
    "model_info": m.ModelInfoGet(7, EPOCH),
    "adapter_load": m.AdapterLoad(8, EPOCH, "pirate", "/game/adapters/pirate.gguf"),
    "adapter_unload": m.AdapterUnload(8, EPOCH, "pirate"),
    "kv_save": m.KvSave(17, EPOCH, "innkeeper", "/saves/innkeeper.kv"),
    "kv_load": m.KvLoad(18, EPOCH, "innkeeper", "/saves/innkeeper.kv"),
    "stats": m.StatsGet(8, EPOCH),
    "ping": m.Ping(9, EPOCH),
    "bye": m.Bye(10, EPOCH),
    "shutdown": m.Shutdown(11, EPOCH),
    "hello-features": m.Hello(1, 1, "my game", features=("lora", "tools")),
    "welcome-features": m.Welcome(
        1,
        EPOCH,
        1,
        4711,
        False,
        "frameshard",
        m.ServerLimits(1 << 20, 1 << 16, 64, 256, 10.0),
        "loading",
        None,
        ("lora", "tools"),
    ),
    "welcome": m.Welcome(
        1, EPOCH, 1, 4711, False, "frameshard", m.ServerLimits(1 << 20, 1 << 16, 64, 256, 10.0), "ready", MODEL
    ),
    "answer-model_info": m.Model(7, EPOCH, MODEL),
    "ok": m.Ok(2, EPOCH),
    "error": m.Error(5, EPOCH, m.ErrorInfo.of(FLOOR)),
    "error-without-id": m.Error(None, EPOCH, m.ErrorInfo.of(errors.BadMessage("not a message: a key occurs twice"))),
    "error-stale_lease": m.Error(5, EPOCH, m.ErrorInfo.of(errors.StaleLease("version 12 is not above 13", version=13))),
    "lease": m.Lease(5, EPOCH, "granted", 1610612736, 0.004, 12),
    "lease-host": m.Lease(5, EPOCH, "granted", 1610612736, 0.004, 12, 3 << 30),
    "lease-partial": m.Lease(5, EPOCH, "partial", 2147483648, 0.75, 0),
    "released": m.Released(5, EPOCH, 1610612736, 1610612000, 0.004),
    "observed": m.Observed(5, EPOCH, 1611661312, 0.25),
    "observed-host": m.Observed(5, EPOCH, 1611661312, 0.25, 3 << 29),
    "observed-unknown": m.Observed(5, EPOCH, None, 0.0),
    "budget": m.Budget(6, EPOCH, 0, 16777216, 1 << 32, "active", 0, 1 << 32, 1610612000),
    "budget-host": m.Budget(6, EPOCH, 0, 1 << 24, 1 << 32, "active", 0, 1 << 32, 1 << 30, 3 << 30, 1 << 29, 1 << 31),
    "budget-parked": m.Budget(6, EPOCH, 1610612736, 16777216, 1 << 32, "parked", 12, 0, 0),
    "answer-caps_and_requirements": m.Caps(
        6, EPOCH, "CUDA0", 8589934592, 2147483648, 16777216, 1 << 32, 1024, "planned"
    ),
    "answer-caps_and_requirements-unknown": m.Caps(
        6, EPOCH, "Vulkan0", None, None, 16777216, 1 << 32, 1024, "stream_only"
    ),
    "answer-plan": m.PlanAnswer(
        6,
        EPOCH,
        (m.PlanRow(1610612736, True, 0.25, 41.5, 1 << 30, 1 << 29, 0), m.PlanRow(1, False, None, None, 0, 0, 0)),
    ),
    "answer-plan-empty": m.PlanAnswer(6, EPOCH, ()),
    "token_count": m.TokenCount(6, EPOCH, 21, 1003),
    "embeddings": m.Embeddings(6, EPOCH, 2, bytes.fromhex("cd38663a0080003c"), 7),  # 0.6 0.8, -0 1
    "answer-frame_block": m.FrameBlock(6, EPOCH, "/proc/4000/fd/9"),
    "answer-adapters": m.Adapters(8, EPOCH, (m.AdapterInfo("pirate", 20971520),), 536870912),
    "answer-adapters-none": m.Adapters(8, EPOCH, (), 0),
    "answer-kv": m.Kv(17, EPOCH, 577, 13_631_488, ""),
    "answer-kv-none": m.Kv(18, EPOCH, 0, 0, "the file is not used: it is damaged"),
    "answer-stats": m.Stats(
        8, EPOCH, m.BrokerStats(4000, 4001, "ready", 1, 2, 0, 3, 12.5), {"used_bytes": 1, "tokens_per_second": 40.5}
    ),
    "answer-stats-off": m.Stats(8, EPOCH, m.BrokerStats(4000, None, "off", 3, 1, 0, 0, 60.0), None),
    "pong": m.Pong(9, EPOCH, ((7, 3), (8, 0))),
    "engine-restarting": m.Engine(EPOCH, "restarting", 0),
    "engine-off": m.Engine(EPOCH, "off", 3, m.ErrorInfo.of(errors.EngineDied("the engine keeps dying"))),
    "engine-hibernated": m.Engine(EPOCH, "hibernated", 0),
    "loading-read": m.Loading(EPOCH, "read", 1024, 15_318),
    "loading-fill": m.Loading(EPOCH, "fill", 0, 2048),
    "notice-wants": m.Notice(EPOCH, "wants", 1 << 32, 0.0, "jobs are open and weights are streamed"),
    "notice-gives_back": m.Notice(EPOCH, "gives_back", 268435456, 0.0, ""),
    "notice-late": m.Notice(EPOCH, "late", 2147483648, 0.75, "the release lags behind"),
    "notice-pressure": m.Notice(EPOCH, "pressure", 1476395008, 0.0, "96 MiB of the device are free"),
    "notice-other_process": m.Notice(EPOCH, "other_process", 536870912, 0.0, "process 4100"),
    "notice-state": m.Notice(EPOCH, "state", 1610612736, 0.5, "parked"),
    "notice-host_pressure": m.Notice(EPOCH, "host_pressure", 0, 0.0, "the system has 300 MiB left", 1 << 30),
    "notice-http": m.Notice(EPOCH, "http", 0, 0.5, "signal 9"),
    "started": m.Started(**PLACE, n_prompt=21, seed=2**32 - 1),
    "progress": m.Progress(**{**PLACE, "seq": 1}, phase="encode", done=1, total=2),
    "delta": m.Delta(**{**PLACE, "seq": 1}, text="Zimmer für die 猫? 🐈", tokens=9),
    "delta-sentence_end": m.Delta(**{**PLACE, "seq": 2}, text="走。", tokens=0, sentence_end=True),
    "thought": m.Thought(**{**PLACE, "seq": 1}, text="Ein Zimmer? 猫!", tokens=7),
    "tool_call": m.ToolCalled(**{**PLACE, "seq": 2}, call_id="x1y2z3abc", name="price", arguments='{"item": "好"}'),
    "paused": m.Paused(**{**PLACE, "seq": 2}),
    "resumed": m.Resumed(**{**PLACE, "seq": 3}),
    "done": m.Done(
        **{**PLACE, "seq": 2},
        reason="stop",
        n_prompt=21,
        n_generated=9,
        prefill_s=0.25,
        decode_s=1.5,
        n_reused=12,
        n_left=994,
        n_thought=4,
    ),
    "failed": m.Failed(**{**PLACE, "seq": 2}, error=m.ErrorInfo.of(errors.Overloaded("not read", held_bytes=49152))),
    "cancelled": m.Cancelled(**{**PLACE, "seq": 2}),
}


def submit(**fields: Any) -> dict[str, Any]:
    """A valid submit with some fields changed; a field that is None is left out."""
    right = {"t": "submit", "id": 1, "epoch": 5, "job": 1, "kind": "completion", "prompt": "x"}
    return {name: value for name, value in {**right, **fields}.items() if value is not None}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def ping(**fields: Any) -> dict[str, Any]:
    return {"t": "ping", "id": 1, "epoch": 5, **fields}


# The frame breaks the rules, so its message does not matter.
BAD_FRAMES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no byte at all"),
    "cut-off": (msgpack.packb(ping())[:-1], "the last byte is missing"),
    "two-values": (msgpack.packb(ping()) * 2, "two maps"),
    "array": (msgpack.packb(["ping", 1, 5]), "an array"),
    "number": (b"\x07", "a number"),
    "unused-byte": (b"\xc1", "a byte that msgpack never uses"),
    "key-twice": (b"\x84\xa1t\xa4ping\xa2id\x01\xa5epoch\x05\xa2id\x02", "the key id occurs twice"),
    "key-number": (msgpack.packb({**ping(), 5: 5}), "a key that is a number"),
    "key-binary": (msgpack.packb({**ping(), b"x": 5}), "a key that is binary"),
    "extension": (msgpack.packb(ping(x=msgpack.ExtType(9, b"abc"))), "an extension type"),
    "timestamp": (msgpack.packb(ping(x=msgpack.Timestamp(1, 0))), "a timestamp"),
    "not-utf8": (msgpack.packb(ping()).replace(b"ping", b"pin\xff"), "a string that is not UTF-8"),
    "surrogate": (
        msgpack.packb(ping(), unicode_errors="surrogatepass").replace(b"ping", b"p\xed\xa0\x80"),
        "half a pair",
    ),
    "nan": (msgpack.packb(ping(x=math.nan)), "not a number"),
    "infinity": (msgpack.packb(ping(x=math.inf)), "infinity"),
    "integer-2-53": (msgpack.packb(ping(id=2**53)), "an integer of 2^53"),
    "integer-2-64": (msgpack.packb(ping(id=2**64 - 1)), "the largest unsigned integer of msgpack"),
    "nested-9": (msgpack.packb(ping(x=nested(8))), "nine deep"),
    "array-1025": (msgpack.packb(ping(x=[0] * 1025)), "an array of 1025"),
    "map-65": (msgpack.packb({str(index): 0 for index in range(65)}), "a map of 65"),
    "string-65537": (msgpack.packb(ping(x="x" * 65537)), "a string of 65537 bytes"),
    "elements": (msgpack.packb(ping(x=[[[]] * 1000] * 17)), "more than 16384 elements in all"),
    "claims-4-gi": (b"\x81\xa1t\xdd\xff\xff\xff\xff", "an array that claims to have 2^32 - 1 elements"),
}

CALL = {"id": "def", "name": "look", "arguments": "{}"}


def calling(calls: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    """A chat whose last answer has calls."""
    answer = {"role": "assistant", "content": "", "tool_calls": calls or [CALL]}
    return submit(kind="chat", prompt=None, messages=[{"role": "user", "content": "x"}, answer], **more)


# The frame is valid, and the message is not.
BAD_MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "no-t": ({"id": 1, "epoch": 5}, "no t"),
    "unknown-t": ({"t": "fly", "id": 1, "epoch": 5}, "an unknown t"),
    "answer-as-request": ({"t": "ok", "id": 1, "epoch": 5}, "an answer where a request should be"),
    "t-number": ({"t": 1, "id": 1, "epoch": 5}, "t is a number"),
    "unknown-field": (ping(colour="red"), "a field that ping does not have"),
    "missing-epoch": ({"t": "ping", "id": 1}, "no epoch"),
    "id-zero": (ping(id=0), "id 0"),
    "id-negative": (ping(id=-1), "id -1"),
    "id-true": (ping(id=True), "true is no integer"),
    "id-float": (ping(id=1.0), "1.0 is no integer"),
    "id-text": (ping(id="1"), "a string is no integer"),
    "id-nil": (ping(id=None), "id is nil"),
    "kind": (submit(kind="song"), "an unknown kind"),
    "chat-without-messages": (submit(kind="chat", prompt=None), "a chat without messages"),
    "chat-with-prompt": (submit(kind="chat", messages=[{"role": "user", "content": "x"}]), "a chat with a prompt"),
    "completion-without-prompt": (submit(prompt=""), "a completion without a prompt"),
    "messages-map": (submit(kind="chat", prompt=None, messages={"role": "user"}), "messages is a map"),
    "tools-65": (calling(tools=[{"name": f"t{i}"} for i in range(65)]), "65 tools"),
    "tools-name": (calling(tools=[{"name": ""}]), "a tool without a name"),
    "tools-schema": (calling(tools=[{"name": "t", "schema": {}}]), "a schema that is no text"),
    "tool_choice-empty": (calling(tool_choice=""), "an empty choice of tools"),
    "tool_calls-17": (
        calling(calls=[CALL] * 17),
        "a message with 17 calls",
    ),
    "tool_calls-arguments": (
        calling(calls=[{"id": "a", "name": "t"}]),
        "a call without arguments",
    ),
    "role": (submit(kind="chat", prompt=None, messages=[{"role": "narrator", "content": "x"}]), "an unknown role"),
    "window-0": (submit(window=0), "a window of 0"),
    "window-257": (submit(window=257), "a window of 257"),
    "deadline": (submit(deadline_ms=3_600_001), "a deadline in more than an hour"),
    "priority_set-3": ({"t": "priority_set", "id": 1, "epoch": 5, "job": 1, "priority": 3}, "a priority of 3"),
    "priority": (submit(priority=3), "a priority of 3"),
    "adapter-scale": (submit(adapters=[{"name": "pirate", "scale": 4.5}]), "a scale of 4.5"),
    "adapters-3": (submit(adapters=[{"name": name} for name in "abc"]), "three adapters"),
    "conversation-empty": (submit(conversation=""), "an empty name of a conversation"),
    "temperature": (submit(sampling={"temperature": -0.1}), "a temperature below 0"),
    "penalty": (submit(sampling={"frequency_penalty": 2.1}), "a penalty above 2"),
    "xtc_threshold": (submit(sampling={"xtc_threshold": 0.6}), "an XTC threshold above 0.5"),
    "choices-empty": (submit(sampling={"choices": [""]}), "an empty choice"),
    "dry_base": (submit(sampling={"dry_base": 0.5}), "a DRY base below 1"),
    "regex-number": (submit(sampling={"regex": 1}), "a regular expression that is a number"),
    "top_p-text": (submit(sampling={"top_p": "0.9"}), "a string where a number should be"),
    "seed": (submit(sampling={"seed": 2**32}), "a seed of 2^32"),
    "stop-17": (submit(sampling={"stop": ["x"] * 17}), "17 stop strings"),
    "stop-empty": (submit(sampling={"stop": [""]}), "an empty stop string"),
    "images-9": (submit(images=[{"format": "rgb", "data": b"x"}] * 9), "nine images"),
    "images-format": (submit(images=[{"format": "bmp", "data": b"x"}]), "an unknown format of an image"),
    "images-text": (submit(images=[{"format": "encoded", "data": "x"}]), "a string where a binary should be"),
    "images-long": (submit(images=[{"format": "encoded", "data": b"x" * 900001}]), "a binary of 900001 bytes"),
    "sampling-unknown": (submit(sampling={"top_q": 1}), "an unknown field of sampling"),
    "budget-negative": ({"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": -1}, "a budget below 0"),
    "host-budget-negative": (
        {"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": 1, "host_budget_bytes": -1},
        "a host budget below 0",
    ),
    "budget-float": ({"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": 1e9}, "a budget of 1e9 as a float"),
    "timeout-0": ({"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": 1, "timeout_s": 0}, "no time at all"),
    "lease-state": (
        {"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": 1, "state": "asleep"},
        "an unknown state",
    ),
    "lease-version": (
        {"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": 1, "version": -1},
        "a version below 0",
    ),
    "lease-reason": (
        {"t": "budget_set", "id": 1, "epoch": 5, "vram_budget_bytes": 1, "reason": "x" * 65},
        "a reason of 65 bytes",
    ),
    "count_tokens-nothing": ({"t": "count_tokens", "id": 1, "epoch": 5}, "neither messages nor a prompt"),
    "count_tokens-prompt-tools": (
        {"t": "count_tokens", "id": 1, "epoch": 5, "prompt": "Once", "tools": [{"name": "look"}]},
        "tools beside a prompt",
    ),
    "embed-nothing": ({"t": "embed", "id": 1, "epoch": 5, "texts": []}, "no texts"),
    "embed-65": ({"t": "embed", "id": 1, "epoch": 5, "texts": ["a"] * 65}, "65 texts"),
    "embed-empty": ({"t": "embed", "id": 1, "epoch": 5, "texts": ["a", ""]}, "an empty text"),
    "plan-33": ({"t": "plan", "id": 1, "epoch": 5, "budgets": [1] * 33}, "33 budgets"),
    "plan-no-prompt": ({"t": "plan", "id": 1, "epoch": 5, "budgets": [1], "prompt_tokens": 0}, "a prompt of 0 tokens"),
    "target-tiny": (
        {"t": "pacing", "id": 1, "epoch": 5, "target_tokens_per_second": 1e-12},
        "a rate above 0 below 0.1",
    ),
    "target-huge": ({"t": "pacing", "id": 1, "epoch": 5, "target_tokens_per_second": 10001}, "a rate above 10000"),
    "target-bool": ({"t": "pacing", "id": 1, "epoch": 5, "target_tokens_per_second": False}, "false is not 0"),
    "notices-number": ({"t": "hello", "id": 1, "protocol": 1, "client": "", "notices": 1}, "1 is not true"),
    "sentences-number": (submit(sentences=1), "1 is not true"),
    "warm-up-number": (submit(warm_up=1), "1 is not true"),
    "resend-number": ({"t": "credit", "epoch": 5, "job": 1, "next": 0, "resend": 1}, "1 is not true"),
}

# Messages without the fields that a client may leave out.
SHORT: dict[str, tuple[dict[str, Any], str]] = {
    "hello-short": ({"t": "hello", "id": 1, "protocol": 1, "client": ""}, "without fields that have defaults"),
    "submit-short": (submit(), "without fields that have defaults"),
    "sampling-short": (submit(sampling={"temperature": 1}), "an integer is a number; the rest has defaults"),
    "limits": (submit(conversation="c" * 512, window=256), "a name and a window as large as they may be"),
}


def of(name: str, **more: Any) -> dict[str, Any]:
    """A valid message of the sidecar with some fields added or changed."""
    message = VALID[name]
    (kind,) = (kind for kind, cls in m.ANSWERS.items() if cls is type(message))
    return {"t": kind, **plain(dataclasses.asdict(message)), **more}


def longer(fields: dict[str, Any]) -> dict[str, Any]:
    """A record with fields that this version does not know."""
    return {**fields, "colour": "red", "shades": [1, 2, {"of": "it"}]}


def _forward() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Messages of a newer sidecar: for each the message, the part that a client keeps, and what is new in it."""
    welcome, stats, plan, failed = of("welcome"), of("answer-stats"), of("answer-plan"), of("failed")
    event = {"t": "hum", "job": 7, "seq": 3, "epoch": EPOCH, "timeline": 3, "tune": [1, 2, 3]}
    newer = {"protocol": 7, "features": ["songs"], "engine": "dreaming"}
    return {
        "ok": (longer(of("ok")), of("ok"), "unknown fields in an answer"),
        "welcome": (
            longer({**welcome, **newer, "limits": longer(welcome["limits"]), "model": longer(welcome["model"])}),
            {**welcome, **newer},
            "a newer version, unknown features, an unknown state of the engine, unknown fields in records",
        ),
        "stats": (
            {**stats, "broker": longer(stats["broker"])},
            stats,
            "unknown fields in a record; the engine's figures are no record and are kept",
        ),
        "plan": (
            {**plan, "rows": [longer(row) for row in plan["rows"]]},
            plan,
            "unknown fields in records of an array",
        ),
        "failed": (
            {**failed, "error": longer({**failed["error"], "code": 99, "name": "stage_fright"})},
            {**failed, "error": {**failed["error"], "code": 99, "name": "stage_fright"}},
            "an unknown error, and unknown fields in it",
        ),
        "delta": (longer(of("delta")), of("delta"), "unknown fields in an event of a job"),
        "done-reason": (of("done", reason="applause"), of("done", reason="applause"), "an unknown reason"),
        "progress-phase": (of("progress", phase="draft"), of("progress", phase="draft"), "an unknown phase"),
        "engine-state": (
            longer(of("engine-hibernated", state="dreaming")),
            of("engine-hibernated", state="dreaming"),
            "an unknown state",
        ),
        "loading-stage": (of("loading-read", stage="think"), of("loading-read", stage="think"), "an unknown stage"),
        "notice-kind": (of("notice-wants", kind="sings"), of("notice-wants", kind="sings"), "an unknown kind"),
        "lease-decision": (of("lease", decision="lent"), of("lease", decision="lent"), "an unknown decision"),
        "budget-state": (of("budget", state="napping"), of("budget", state="napping"), "an unknown state of the lease"),
        "unknown-event": (
            event,
            {"job": 7, "seq": 3, "epoch": EPOCH},
            "an unknown event of a job: counted, given credit for, not handed on",
        ),
        "unknown-answer": ({"t": "weather", "id": 7, "epoch": EPOCH, "rain": True}, {}, "an unknown answer: ignored"),
        "unknown-notice": ({"t": "weather", "epoch": EPOCH, "rain": 0.5}, {}, "an unknown message: ignored"),
        "unknown-bare": ({"t": "weather"}, {}, "an unknown message without any field: ignored"),
    }


def plain(value: Any) -> Any:
    """A value as in JSON: tuples become lists, and bytes become a map with their base64."""
    return json.loads(json.dumps(value, default=lambda binary: {"base64": base64.b64encode(binary).decode()}))


def make() -> dict[str, bytes]:
    """The content of every file, by name."""
    files: dict[str, bytes] = {}
    index: list[dict[str, Any]] = []

    def add(name: str, frame: bytes, sender: str, about: str, message: Any = None, **more: Any) -> None:
        files[f"{name}.msgpack"] = frame
        row = {"file": f"{name}.msgpack", "from": sender, "valid": message is not None, "about": about}
        index.append(row if message is None else {**row, "message": message, **more})

    for name, message in VALID.items():
        sender = "client" if type(message) in m.REQUESTS.values() else "broker"
        about = " ".join((type(message).__doc__ or "").split())
        frame = m.encode(message)
        add(name, frame, sender, about, plain(msgpack.unpackb(frame)))
    for name, (fields, about) in SHORT.items():
        add(name, msgpack.packb(fields), "client", about, plain(fields))
    for name, (message, known, about) in _forward().items():
        add(f"forward-{name}", msgpack.packb(message), "broker", about, plain(message), known=plain(known))
    for name, (frame, about) in BAD_FRAMES.items():
        add(f"invalid-frame-{name}", frame, "client", about)
    for name, (fields, about) in BAD_MESSAGES.items():
        add(f"invalid-{name}", msgpack.packb(fields), "client", about)
    return {**files, "index.json": as_index(index)}


MIRA = saves.Save(
    exchanges=(("Any rooms left?", "One, under the roof."), ("Für zwei? 好 🐈", "Für zwei.")),
    model="ab" * 32,
    steps=(),
    system="You are Mira, an innkeeper.",
    template="cd" * 32,
    writer="python",
)
SOLD = saves.save_of(
    [
        saves.Exchange("Any rooms left?", "One."),
        saves.Exchange(
            "What does it cost?",
            "Two gold.",
            (
                m.ChatMessage("assistant", "Let me see. 好", (m.ToolCall("abc123xyz", "price", '{"item": "Süß"}'),)),
                m.ChatMessage("tool", "2 gold", tool_call_id="abc123xyz"),
            ),
        ),
        saves.Exchange("And a horse?", "", (m.ChatMessage("assistant", "", (m.ToolCall("call_2", "stable", "{}"),)),)),
    ],
    "You are Mira.",
    "ab" * 32,
    "",
    "python",
)
SAVES = {
    "calls": (SOLD, "calls of tools; the last one waits for its result"),
    "conversation": (MIRA, "a conversation of two exchanges"),
    "empty": (saves.Save((), "", (), "", "", ""), "nothing was said; model and template are not known"),
    "long": (
        saves.Save((("q" * 300, "a" * 65536), *[("", "x")] * 40), "", (), "s" * 40, "", "c"),
        "texts and arrays whose lengths take two and four bytes",
    ),
}


def sealed(body: bytes, *, magic: bytes = b"FSSV", number: int = 1) -> bytes:
    """A save with the right checksum."""
    head = magic + number.to_bytes(4, "little")
    return head + zlib.crc32(head + body).to_bytes(4, "little") + body


def _bad_saves() -> dict[str, tuple[bytes, str]]:
    right = saves.write(MIRA)
    fields: dict[str, Any] = msgpack.unpackb(right[12:])
    bad = {
        "nothing": (b"", "no byte at all"),
        "short": (right[:11], "shorter than its head"),
        "cut-off": (right[:-1], "the last byte is missing"),
        "longer": (right + b"\0", "one byte more"),
        "changed": (right.replace(b"roof", b"hoof"), "one bit is wrong"),
        "magic": (sealed(right[12:], magic=b"FSSW"), "another kind of file"),
        "newer": (sealed(b"\x01", number=saves.FORMAT + 1), "a newer format"),
        "no-body": (sealed(b""), "only a head"),
    }
    bodies: dict[str, tuple[Any, str]] = {
        "array": ([1], "the body is no map"),
        "missing": ({name: value for name, value in fields.items() if name != "system"}, "a field is missing"),
        "unknown": ({**fields, "mood": "good"}, "an unknown field"),
        "number": ({**fields, "system": 7}, "a number where a text should be"),
        "nil": ({**fields, "exchanges": None}, "nil where an array should be"),
        "single": ({**fields, "exchanges": [["x"]]}, "a question without an answer"),
        "three": ({**fields, "exchanges": [["x", "y", "z"]]}, "an exchange of three texts"),
        "exchange-number": ({**fields, "exchanges": [["x", 1]]}, "an answer that is a number"),
        "fingerprint": ({**fields, "model": "a" * 65}, "a fingerprint of 65 bytes"),
        "string": ({**fields, "system": "s" * 65537}, "a text of 65537 bytes"),
        "many": ({**fields, "exchanges": [["x", "y"]] * 1025}, "1025 exchanges"),
    }
    calls: dict[str, Any] = msgpack.unpackb(saves.write(SOLD)[12:])
    step = calls["steps"][0]
    new_bodies: dict[str, tuple[Any, str]] = {
        "no-steps": (fields, "format 2 without steps"),
        "step-exchange": ({**calls, "steps": [{**step, "exchange": 3}]}, "a step of no exchange"),
        "step-role": ({**calls, "steps": [{**step, "role": "actor"}]}, "a step with an unknown role"),
        "step-unknown": ({**calls, "steps": [{**step, "mood": "good"}]}, "a step with an unknown field"),
        "step-call": ({**calls, "steps": [{**step, "tool_calls": [{"id": "x"}]}]}, "a call without a name"),
    }
    bad |= {name: (sealed(msgpack.packb(body), number=2), about) for name, (body, about) in new_bodies.items()}
    bodies["steps-too-old"] = calls, "steps in format 1"
    bad |= {name: (sealed(msgpack.packb(body)), about) for name, (body, about) in bodies.items()}
    return {**bad, "claims-4-gi": (sealed(b"\x81\xa9exchanges\xdd\xff\xff\xff\xff"), "an array that claims 2^32 - 1")}


def make_saves() -> dict[str, bytes]:
    """The content of every file of bindings/saves, by name."""
    files: dict[str, bytes] = {}
    index: list[dict[str, Any]] = []
    for name, (save, about) in SAVES.items():
        files[f"{name}.save"] = saves.write(save)
        row = {"file": f"{name}.save", "valid": True, "about": about}
        index.append({**row, "save": as_written(save)})
    for name, (content, about) in _bad_saves().items():
        files[f"invalid-{name}.save"] = content
        index.append({"file": f"invalid-{name}.save", "valid": False, "about": about})
    return {**files, "index.json": as_index(index)}


def as_written(save: saves.Save) -> Any:
    """The fields of a save as JSON, without steps if there are none."""
    fields = plain(dataclasses.asdict(save))
    return fields if fields["steps"] else {name: value for name, value in fields.items() if name != "steps"}


def as_index(rows: list[dict[str, Any]]) -> bytes:
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    return f"[\n{lines}\n]\n".encode()


def main() -> None:
    for directory, files in ((VECTORS, make()), (VECTORS.with_name("saves"), make_saves())):
        directory.mkdir(exist_ok=True)
        for stale in {path.name for path in directory.iterdir()} - files.keys():
            (directory / stale).unlink()
        for name, content in files.items():
            (directory / name).write_bytes(content)


if __name__ == "__main__":
    main()
