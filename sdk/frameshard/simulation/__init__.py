"""A scripted host: replays what a game does with its frames and its VRAM against a real sidecar.

``trace`` is the script, ``player`` plays it and judges what it saw, ``plot`` draws it.
"""
