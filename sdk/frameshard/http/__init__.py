"""The HTTP server: OpenAI's HTTP interface in front of a sidecar.

It is a process of its own and an ordinary client of the sidecar. Nothing that a program sends to it can end the
sidecar.

server      runs the process: connects to the sidecar, listens, ends with the sidecar
__main__    what a sidecar starts if it is launched with `http`
listener    accepts connections; limits for many and slow clients
exchange    one request: its body within limits, and its end when the client leaves
guard       who may ask: key, Host, Origin
app         the paths and what each does
request     from OpenAI's fields to a job
answer      from a job to OpenAI's objects and stream
refusal     errors in OpenAI's form
metrics     figures for Prometheus

Needs frameshard[http]: Starlette for paths and CORS, Hypercorn for HTTP on trio.
"""
