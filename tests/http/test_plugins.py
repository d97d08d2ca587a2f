"""What the remote modes of two game plugins send, in their order: read in their sources, not tried in the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from servers import Server, server

MESSAGES = [{"role": "system", "content": "You are Mira."}, {"role": "user", "content": "Who are you?"}]


def test_llama_unreal_can_chat(place: Path) -> None:
    """Llama-Unreal's ULlamaRemoteComponent: /health, /props, then chats as streams. It sends no key."""
    sampling = {"temperature": 0.800000011920929, "min_p": 0.05000000074505806}
    chat: dict[str, Any] = {"stream": True, **sampling, "cache_prompt": True, "id_slot": 0}
    thought = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_format": "none"}
    with server(place, "--no-key") as http:
        assert http.ask("GET", "/health").status == 200
        props = http.ask("GET", "/props").json
        assert props["model_path"]
        assert props["modalities"] == {"vision": True, "audio": False}
        accept = {"Content_Type": "application/json", "Accept": "text/event-stream"}
        asked = {**chat, **thought, "messages": MESSAGES}
        chunks = http.ask("POST", "/v1/chat/completions", asked, **accept).events()
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        penalties = {"top_k": 40, "top_p": 0.95, "typical_p": 1, "repeat_penalty": 1.1, "mirostat": 0}
        asked = {**chat, **penalties, "mirostat_tau": 5, "mirostat_eta": 0.1, "seed": 7, "stop": ["\n"]}
        chunks = http.ask("POST", "/v1/completions", {**asked, "prompt": "Once upon a time"}, **accept).events()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
        # The plugin ignores that a slot is not erased.
        assert http.ask("POST", "/slots/0?action=erase", {}).error["code"] == "unknown_url"
        for fields in ({"mirostat": 2}, {"grammar": 'root ::= "yes"'}, {"typical_p": 0.9}):
            refused = http.ask("POST", "/v1/chat/completions", {**chat, **fields, "messages": MESSAGES})
            assert refused.error["param"] == next(iter(fields))


def test_llmunity_finds_the_server_but_is_refused(http: Server) -> None:
    """LLMUnity's LLMAgent: POST /health, /apply-template, /completion. It renders the chat template's text itself."""
    assert http.ask("POST", "/health").json["status"] == "ok"
    for path, body in (
        ("/apply-template", {"messages": MESSAGES, "stream": False}),
        ("/completion", {"prompt": "<|im_start|>user", "stream": True, "id_slot": -1, "n_predict": 8}),
        ("/tokenize", {"content": "one", "stream": False}),
    ):
        refused = http.ask("POST", path, body)
        assert (refused.status, refused.error["code"]) == (404, "unknown_url")
