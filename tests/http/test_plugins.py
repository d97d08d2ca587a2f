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
        for fields in ({"mirostat": 2}, {"grammar": 'root ::= "yes"'}):
            refused = http.ask("POST", "/v1/chat/completions", {**chat, **fields, "messages": MESSAGES})
            assert refused.error["param"] == next(iter(fields))
        taken = {"typical_p": 0.9, "max_tokens": 2, "messages": MESSAGES}
        assert http.ask("POST", "/v1/chat/completions", taken).status == 200


def test_llmunity_finds_the_server_but_is_refused(http: Server) -> None:
    """LLMUnity's remote mode, all by POST: what an LLMAgent asks for each chat, then what an LLMClient and an
    LLMEmbedder ask. An agent has the chat template rendered and sends the text as a prompt."""
    sampling = {"temperature": 0.2, "top_k": 40, "typical_p": 1, "mirostat": 0, "ignore_eos": False, "n_probs": 0}
    completion = {"prompt": "<|im_start|>user", "id_slot": -1, "n_keep": 0, "n_predict": 8, **sampling, "stream": True}
    chat = {"messages": MESSAGES, "stream": False}
    for path, body, status in (
        ("/health", None, 200),
        ("/apply-template", {"messages": [MESSAGES[0], {"role": "user", "content": ""}], "stream": False}, 404),
        ("/tokenize", {"content": "", "stream": False}, 404),
        ("/props", {"stream": False}, 405),
        ("/apply-template", chat, 404),
        ("/completion", completion, 404),
        ("/detokenize", {"tokens": [1], "stream": False}, 404),
        ("/embeddings", {"content": "one", "stream": False}, 404),
    ):
        answer = http.ask("POST", path, body)
        assert answer.status == status, path
        if status != 200:
            assert answer.error["code"] == ("unknown_url" if status == 404 else "method_not_supported"), path
