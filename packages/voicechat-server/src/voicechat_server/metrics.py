"""What the server counts, as Prometheus reads it. One registry for each app: nothing is global."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
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
        self.sessions = Counter("voicechat_sessions", "Connections that were admitted", registry=registry)
        self.busy = Counter(
            "voicechat_server_busy", "Connections refused because the slot was taken", registry=registry
        )
        self.frames = Counter("voicechat_frames", "Frames that the model ran", registry=registry)
        self.skipped = Counter("voicechat_frames_skipped", "Frames dropped under the policy skip", registry=registry)
        self.frame_ms = Histogram(
            "voicechat_frame_ms",
            "Milliseconds of a frame on the model's thread",
            registry=registry,
            buckets=FRAME_BUCKETS,
        )
        self.slots_taken = Gauge("voicechat_slots_taken", "Sessions that are active", registry=registry)
        self.model_ready = Gauge("voicechat_model_ready", "1 when the model is loaded and runs", registry=registry)

    def frame_took(self, frame: FrameTime) -> None:
        """One frame on the model's thread."""
        self.frames.inc()
        self.frame_ms.observe(1000 * frame.seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
