"""What the figures mean, in plain sentences. Computed from StepRecords only; knows no Qt.

Whatever is computed rather than measured is called predicted: memory time is counted bytes over the bandwidth this
machine was measured to have, compute time counted FLOPs over its measured throughput.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.tuning.figures import LiveFigures, PhaseMeans
from app.tuning.numbers import milliseconds, percent, plural, rate
from engine.events import ModelInfo, Phase

HOW_PREDICTED = (
    "Memory time is predicted: the bytes the step moves, counted from its plan, over this machine's measured read "
    "bandwidth. Compute time is predicted in the same way from its operations and the measured throughput. "
    "The time of the whole step is measured. Overhead is what neither explains."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line: which side of the ridge point this moment is on. ``share`` is None when nothing was measured."""

    lead: str  # "Decode waits for memory:"
    share: float | None = None
    tail: str = ""  # "of each step"
    short_tail: str = ""  # where the whole does not fit
    limit: str = ""  # "memory", "compute", "overhead" or "": which of the theme's colours it has

    @property
    def text(self) -> str:
        if self.share is None:
            return self.lead
        return f"{self.lead} {percent(self.share)} % {self.tail}"


def limit_of(means: PhaseMeans) -> str:
    """What takes the largest part of the step: "memory", "compute" or "overhead"."""
    if means.overhead > max(means.memory, means.compute):
        return "overhead"
    return "memory" if means.memory >= means.compute else "compute"


def verdict(figures: LiveFigures, time: float) -> Verdict:
    """The verdict on the steps in the window; in the past tense when nothing runs at ``time``."""
    phase = figures.spoken_phase()
    if phase is None:
        return Verdict("Nothing measured yet" if figures.info else "No model loaded")
    means = figures.means(phase)
    assert means is not None
    past = figures.is_past(time)
    subject = "Decode" if phase is Phase.DECODE else "Prefill"
    limit = limit_of(means)
    waits, spends = ("waited", "spent") if past else ("waits", "spends")
    lead, share = {
        "memory": (f"{subject} {waits} for memory:", means.memory_share),
        "compute": (f"{subject} {waits} for arithmetic:", means.compute_share),
        "overhead": (f"{subject} {spends}", means.overhead_share),
    }[limit]
    if limit == "overhead":
        return Verdict(lead, share, "of each step on overhead", "on overhead", limit)
    return Verdict(lead, share, "of each step", "", limit)


def advice(figures: LiveFigures) -> str:
    """Two or three sentences with the user's own numbers; teaches what will stand here while there are none."""
    info, phase = figures.info, figures.spoken_phase()
    if info is None:
        return "Load a model and send a message. This panel then shows where each token's time goes."
    if phase is None and figures.last is not None:
        return "Nothing measured since the last change. The next steps show what it did."
    if phase is None:
        return f"{info.name} is ready. Send a message to see what each step waits for: memory, arithmetic or overhead."
    means = figures.means(phase)
    assert means is not None
    if phase is Phase.PREFILL:
        return " ".join(_prefill_sentences(means))
    return " ".join((*_decode_sentences(means, info), _sharing_sentence(means)))


def _decode_sentences(means: PhaseMeans, info: ModelInfo) -> list[str]:
    step = milliseconds(means.step)
    sentences = []
    if means.memory >= means.compute:
        weights = milliseconds(min(means.weights, means.step))
        sentences.append(f"Reading weights takes {weights} of {step} ms, predicted.")
        if means.kv_read > 0.05 * means.step:
            sentences.append(f"Reading the KV cache takes {milliseconds(means.kv_read)} ms.")
    else:
        compute = milliseconds(min(means.compute, means.step))
        sentences.append(
            f"Arithmetic takes {compute} of {step} ms, predicted: more than reading the weights "
            f"({milliseconds(means.weights)} ms)."
        )
    if means.overhead_share >= 0.15:
        sentences.append(f"{milliseconds(means.overhead)} ms is overhead: neither memory nor arithmetic.")
    if means.memory > means.step:
        bandwidth = rate(info.machine.read_bytes_per_second / 1e9)
        sentences.append(f"It runs faster than the {bandwidth} GB/s measured for this machine predict.")
    return sentences


def _sharing_sentence(means: PhaseMeans) -> str:
    if means.batch >= 1.5:
        return f"Each read of the weights serves {rate(means.batch).removesuffix('.0')} chats."
    if means.memory >= means.compute:
        return "One chat uses each weight it reads once; a second chat would share the same read."
    return ""


def _prefill_sentences(means: PhaseMeans) -> list[str]:
    step = milliseconds(means.step)
    first = (
        f"Arithmetic takes {milliseconds(min(means.compute, means.step))} of {step} ms per prefill step, predicted."
        if means.compute >= means.memory
        else f"Memory takes {milliseconds(min(means.memory, means.step))} of {step} ms per prefill step, predicted."
    )
    return [first, f"The prompt went through in {plural(means.num_steps, 'step')} so far."]


def what_runs(figures: LiveFigures) -> str:
    """The paths that really ran in the last step, one operation a line."""
    paths = figures.active_paths()
    if not paths:
        return "Load a model to see which code runs."
    return "\n".join(f"{operation}: {path}" for operation, path in sorted(paths.items()))


def what_was_measured(info: ModelInfo | None) -> str:
    """The machine's figures that predictions rest on."""
    if info is None:
        return "Measured with the first model."
    machine = info.machine
    products = ", ".join(f"{dtype} {rate(flops / 1e9)}" for dtype, flops in sorted(machine.flops_per_second.items()))
    lines = [
        machine.name,
        f"Reads {rate(machine.read_bytes_per_second / 1e9)} GB/s",
        f"Multiplies, GFLOP/s: {products}",
    ]
    if info.dtype in machine.flops_per_second:
        ridge = rate(machine.ridge_point(info.dtype))
        lines.append(f"Ridge point in {info.dtype}: {ridge} operations per byte; below it a step waits for memory")
    lines.append(f"Measured {machine.measured_at.replace('T', ' ')[:16]}")
    return "\n".join(lines)
