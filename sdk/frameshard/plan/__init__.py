"""Computes the placement of each shard from a model's header, a machine's rates and a VRAM budget."""
