"""Protocol v1 without any I/O: bytes and times go in, typed messages and bytes come out.

codec       one msgpack map and the limits it must keep
messages    one frozen type per message, strictly converted
states      what may happen when, as literal tables
connection  the server's and the client's side of one session
channel     frames between broker and engine process
launch      what host and broker tell each other at start

bindings/PROTOCOL.md is the description for people; nothing here opens a socket or asks for the time.
"""
