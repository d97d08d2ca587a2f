"""A scripted host: replays a game's frames, VRAM demand and questions with a real sidecar.

``trace`` reads the script, ``player`` plays it and checks the result, ``plot`` draws the result.
"""
