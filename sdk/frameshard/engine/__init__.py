"""The engine process: llama.cpp, sampling and continuous batching on one shard device. Started by the broker."""

import os

# ggml_abort otherwise runs a debugger on the process.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

# Before numpy: some numpy wheels carry a C++ runtime of their own, and libllama crashes when it is bound to that one.
import llama_cpp as llama_cpp
