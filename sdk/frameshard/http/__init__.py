"""The HTTP server: OpenAI's HTTP interface in front of a sidecar.

It is a process of its own and an ordinary client of the sidecar. Nothing that a program sends to it can end the
sidecar.

What each module has is in docs/architecture.md. Needs frameshard[http]: Starlette for paths and CORS, Hypercorn for
HTTP on trio.
"""
