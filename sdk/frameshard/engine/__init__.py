"""The engine process: llama.cpp, sampling and continuous batching on one shard device. Started by the broker."""
