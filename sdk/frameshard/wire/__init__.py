"""Protocol v1 without any I/O: bytes and times go in, typed messages and bytes come out.

bindings/PROTOCOL.md is the description for people; nothing here opens a socket or asks for the time. What each module
has is in docs/architecture.md.
"""
