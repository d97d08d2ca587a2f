"""Figures of the sidecar and of this server in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from frameshard.wire import messages as m

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_STATES: tuple[m.EngineState, ...] = ("loading", "ready", "restarting", "hibernated", "off")
LEASE_STATES: tuple[m.LeaseState, ...] = ("active", "parked", "hibernated")

Samples = Iterable[tuple[Mapping[str, object], float]]
"""Labels and values."""


def page(stats: m.Stats, budget: m.Budget, responses: Counter[tuple[str, int]], connections: int) -> str:
    """The page of ``/metrics``.

    :param responses: the number of responses by path and status.
    """
    broker, engine = stats.broker, stats.engine or {}
    lines: list[str] = []

    def add(name: str, text: str, samples: float | Samples, kind: str = "gauge") -> None:
        lines.extend((f"# HELP frameshard_{name} {text}", f"# TYPE frameshard_{name} {kind}"))
        each = [({}, samples)] if isinstance(samples, (int, float)) else samples
        for labels, value in each:
            words = ",".join(f'{label}="{word}"' for label, word in labels.items())
            lines.append(f"frameshard_{name}{'{' + words + '}' if words else ''} {value}")

    add("jobs_running", "Jobs that run.", broker.jobs_running)
    add("jobs_queued", "Jobs that wait.", broker.jobs_queued)
    add("sessions", "Clients of the sidecar.", broker.sessions)
    add("uptime_seconds", "Time since the launch of the sidecar.", broker.uptime_s)
    add("engine_restarts_total", "Restarts of the engine.", broker.engine_restarts, "counter")
    add("engine_state", "1: the engine is in this state.", _one_of(ENGINE_STATES, broker.engine))
    add("tokens_per_second", "Tokens that all jobs get now.", float(engine.get("tokens_per_second", 0.0)))
    add("lease_state", "1: the lease is in this state.", _one_of(LEASE_STATES, budget.state))
    add("vram_budget_bytes", "VRAM budget; 0: no limit.", budget.vram_budget_bytes)
    add("vram_used_bytes", "VRAM in use by the sidecar's own count.", budget.used_bytes)
    add("vram_floor_bytes", "The smallest VRAM budget.", budget.floor_bytes)
    add("vram_full_bytes", "With this VRAM budget all weights are resident.", budget.full_bytes)
    add("host_budget_bytes", "Host budget; 0: no limit.", budget.host_budget_bytes)
    add("host_used_bytes", "Host memory in use by the sidecar's own count.", budget.host_used_bytes)
    add("host_floor_bytes", "The smallest host budget.", budget.host_floor_bytes)
    counts = [({"path": path, "status": status}, float(n)) for (path, status), n in sorted(responses.items())]
    add("http_responses_total", "Responses of the HTTP server.", counts, "counter")
    add("http_connections", "Open connections of the HTTP server.", connections)
    return "\n".join(lines) + "\n"


def _one_of(states: Iterable[str], now: str) -> Samples:
    return [({"state": state}, float(state == now)) for state in states]
