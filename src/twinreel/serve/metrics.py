"""Prometheus figures of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """What happened (counters, histograms) and what is (gauges; the queue's are read when asked for)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {"registry": self.registry}
        self.ended = Counter("twinreel_jobs_ended", "Jobs that ended, by status", ["status"], **given)
        self.job = Histogram("twinreel_job_seconds", "From start to end of completed jobs", buckets=SECONDS, **given)
        self.stage = Histogram(
            "twinreel_stage_seconds", "By stage of completed jobs", ["stage"], buckets=SECONDS, **given
        )
        self.steps = Counter("twinreel_steps", "Steps of completed jobs", **given)
        self.calls = Counter("twinreel_model_calls", "Model calls of completed jobs", **given)
        self.cache = Counter("twinreel_cache_lookups", "Conditioning cache of completed jobs", ["result"], **given)
        self.restarts = Counter("twinreel_engine_restarts", "Engines lost while running", **given)
        self.retried = Counter("twinreel_jobs_retried", "Jobs begun anew: their engine or a rank was lost", **given)
        self.answers = Counter("twinreel_http_answers", "Answers by status code", ["code"], **given)
        self.refused = Counter("twinreel_refused", "Refused requests by type of error", ["type"], **given)
        self.memory = Gauge("twinreel_engine_peak_bytes", "Peak memory by stage of the last job", ["stage"], **given)
        self.ranks = Gauge("twinreel_engine_ranks", "Processes of the engine", **given)
        self.running = Gauge("twinreel_running_step", "Units done of the running stage", ["stage"], **given)

    def progress(self, event: dict[str, Any]) -> None:
        """A running job moved."""
        self.running.labels(event["stage"]).set(event["done"])

    def finished(self, took: float, outcome: dict[str, Any]) -> None:
        """A job is complete."""
        self.job.observe(took)
        for name, seconds in outcome.get("stages", {}).items():
            self.stage.labels(name).observe(seconds)
        for name, size in outcome.get("peaks", {}).items():
            self.memory.labels(name).set(size)
        self.steps.inc(max(0, outcome.get("steps", 0)))
        self.calls.inc(max(0, outcome.get("calls", 0)))
        for result, number in outcome.get("cache", {}).items():
            self.cache.labels(result).inc(number)
        self.running.clear()

    def watch(self, counts: Callable[[], dict[str, int]], up: Callable[[], bool]) -> None:
        """Read the queue and the engine whenever the figures are asked for."""
        self.registry.register(_Live(counts, up))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _Live:
    def __init__(self, counts: Callable[[], dict[str, int]], up: Callable[[], bool]) -> None:
        self.counts, self.up = counts, up

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("twinreel_jobs", "Jobs kept, by status", labels=["status"])
        for status, number in self.counts().items():
            jobs.add_metric([status], number)
        yield jobs
        yield GaugeMetricFamily("twinreel_engine_up", "1 while the engine is ready", value=float(self.up()))
