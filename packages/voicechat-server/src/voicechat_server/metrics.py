"""What the server counts, as Prometheus reads it. One registry for each app: nothing is global."""

import threading

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from voicechat_server.worker import FrameTime

__all__ = ["Metrics"]

# Milliseconds; a frame lasts 80.
FRAME_BUCKETS = (10, 20, 30, 40, 50, 60, 70, 80, 100, 120, 160, 240, 480)


class Metrics:
    """Names and meanings are in the help texts."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, files, processor time; it knows Linux only

        def counter(name: str, help_text: str) -> Counter:
            return Counter(f"voicechat_{name}", help_text, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"voicechat_{name}", help_text, registry=registry)

        self.sessions = counter("sessions", "Connections that were admitted")
        self.busy = counter("server_busy", "Connections refused because the slot was taken")
        self.turned_away = counter("connections_turned_away", "Connections closed because too many were open")
        self.frames = counter("frames", "Frames that the model ran")
        self.skipped = counter("frames_skipped", "Frames dropped under the policy skip, of sessions that have ended")
        self.calls = counter("function_calls", "Calls that clients were to answer, of sessions that have ended")
        self.calls_failed = counter(
            "function_calls_failed", "Calls that could not be read, of sessions that have ended"
        )
        self.slots_taken = gauge("slots_taken", "Sessions that are active")
        self.model_sessions = gauge("model_sessions", "Sessions that the model's thread has not closed yet")
        self.model_ready = gauge("model_ready", "1 when the model is loaded and runs")
        self.lag_seconds = gauge("lag_seconds", "Audio that waits for the model")
        self.connections = gauge("connections", "Connections that are open, the one that asks included")
        self._tasks = gauge("tasks", "Trio's tasks")
        self._threads = gauge("threads", "Python's threads")
        self.frame_ms = Histogram(
            "voicechat_frame_ms",
            "Milliseconds of a frame on the model's thread",
            registry=registry,
            buckets=FRAME_BUCKETS,
        )

    def frame_took(self, frame: FrameTime) -> None:
        """One frame on the model's thread."""
        self.frames.inc()
        self.frame_ms.observe(1000 * frame.seconds)

    def text(self) -> bytes:
        """In Prometheus' text format. Called inside Trio, which is counted too."""
        self._tasks.set(trio.lowlevel.current_statistics().tasks_living)
        self._threads.set(threading.active_count())
        return generate_latest(self._registry)
