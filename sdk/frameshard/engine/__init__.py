"""The engine process: llama.cpp, sampling and continuous batching on one shard device. Started by the broker."""

import os
import sys
from types import ModuleType

# ggml_abort otherwise runs a debugger on the process.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

# Before numpy: some numpy wheels carry a C++ runtime of their own, and libllama crashes when it is bound to that one.
if "llama_cpp" not in sys.modules:
    # llama_cpp imports its high-level API, too, and for it jinja2, sqlite3 and more: a sixth of a start's CPU time, for
    # what is not used here. So an empty module stands in for it. A later import of llama_cpp.llama gets the real one.
    sys.modules["llama_cpp.llama"] = ModuleType("llama_cpp.llama")
    import llama_cpp as llama_cpp

    del sys.modules["llama_cpp.llama"]
