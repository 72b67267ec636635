"""A comparison as text for people, with what the peer computes otherwise: times are of what each computes."""

from typing import Any

__all__ = ["DIFFERENCES", "table"]

# From NVIDIA's code, as measured on random weights. Times are of what each computes.
DIFFERENCES = (
    "edges of a recording are padded by reflection, not by zeros: the first two log-mel frames are off by up to 6.8",
    "a recording's last log-mel frame is kept, not set to zero, and its encoder may give one frame more",
    "the voice prompt ends with PAD, not with EOS: the speech decoder starts elsewhere, and most codes differ",
    "fused inputs are divided by the number of quantizers, not always by 31: here the same, at 8 another model",
    "a step without any text id still adds flag embeddings; no session has one",
    "frame 0 sounds as silence, where NVIDIA's offline loop has code 0: so does ours",
    "what is decoded begins after the prompt, where NVIDIA decodes the prompt's codes, too: so does ours, live",
)


def table(found: dict[str, Any]) -> str:
    """All of ``compare``'s results."""
    return "\n".join([*_facts(found), "", *_ratios(found), "", *_beginnings(found), *_counts(found), "", *_notes()])


def _facts(found: dict[str, Any]) -> list[str]:
    machine, backend = found["ours"]["machine"], found["ours"]["backend"]
    peer = ", ".join(f"{name} {version}" for name, version in found["peer"]["versions"].items())
    wheels = ", ".join(f"{name} {version}" for name, version in backend["mlx_wheels"].items())
    libraries = ", ".join(f"{name} {digest}" for name, digest in backend["libraries"].items())
    where = "one process, one MLX" if found["in_process"] else "two processes, the same MLX and BLAS"
    return [
        f"{found['checkpoint']}, fingerprint {found['ours']['fingerprint']}; {found['date']}",
        ", ".join(str(machine[key]) for key in ("gpu", "cpu", "cores", "system", "python") if machine[key]),
        f"{backend['device']}, {wheels}; {where}: {libraries or 'not listed by this system'}",
        f"ours: steps {'compiled' if found['ours']['compiled'] else 'as they are written'}; peer: {peer}",
    ]


def _ratios(found: dict[str, Any]) -> list[str]:
    lines = [f"{'ours / peer, in turns':<24}{'ours ms':>10}{'peer ms':>10}{'min':>8}{'median':>8}{'max':>8}"]
    for name, row in {"whole frame": found["frame"], **found["stages"]}.items():
        ratios = "".join(f"{row[key]:>8.3f}" for key in ("least", "median", "greatest"))
        lines.append(f"{name:<24}{row['ours_ms']:>10.2f}{row['peer_ms']:>10.2f}{ratios}")
    for name in ("ours", "peer"):
        spread = found["frame"][name]
        lines.append(f"whole frame, {name}: " + ", ".join(f"{key[:-3]} {ms:.2f} ms" for key, ms in spread.items()))
    lines.append("Stages are of sessions that wait after each of them: together they take longer than a frame.")
    return lines


def _beginnings(found: dict[str, Any]) -> list[str]:
    starts, lines = found["starts"], []
    for key, what in (("default", "default prompt"), ("fresh", "fresh prompt")):
        ratio = starts[f"{key}_over_peer"]
        lines.append(
            f"session start, {what} of {found['prompt_positions']} positions, over the peer's: "
            f"{starts[f'ours_{key}_ms']:.2f} / {starts['peer_fresh_ms']:.2f} ms = {ratio['median']:.5f} "
            f"({ratio['least']:.5f} to {ratio['greatest']:.5f})"
        )
    for name in ("ours", "peer"):
        row = found["first_frames"][name]
        lines.append(
            f"after a start without a prompt, {name}: frame 0 (silence, by rule) {row['frame_0_ms']:.2f} ms, frame 1 "
            f"(the first that is spoken) {row['frame_1_ms']:.2f} ms = {row['frame_1_over_steady']:.2f} steady frames"
        )
    return lines


def _counts(found: dict[str, Any]) -> list[str]:
    return [
        f"counted on preset {found['counted_preset']}, without a transcript, {name}: "
        f"{row['primitives']:.0f} primitives and {row['host_waits']:.0f} host waits a frame"
        for name, row in found["counts"].items()
    ]


def _notes() -> list[str]:
    return ["The peer's values differ from NVIDIA's:", *(f"  - {line}" for line in DIFFERENCES)]
