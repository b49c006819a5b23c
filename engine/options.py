"""THE table of optimizations. Everything that switches, chooses, explains or prints one is built from it. Imports no torch.

A value is always one of an entry's choices, as a string: the command line, the panel, the presets and the
engine speak of the same thing with the same word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.kv.layout import reason_against


class Kind(StrEnum):
    """What flipping a switch costs a running engine."""

    FREE = "free"  # between two steps, nothing is lost
    GRAPH = "graph"  # captured graphs are dropped
    CACHE = "cache"  # running requests are recomputed, the prefix index is emptied
    WEIGHTS = "weights"  # weights are read again


class Pile(StrEnum):
    """Where an optimization acts (after "the three piles" of LLM inference)."""

    FEWER_BYTES = "Move fewer bytes per token"
    MORE_TOKENS = "Get more tokens per byte"
    CAPACITY = "Free capacity"
    PREFILL = "Avoid or split prefill work"
    FUSION = "Fuse and overlap"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the machine at hand can do, as far as switches care."""

    device: str = "cpu"
    is_fallback: bool = False  # the model runs through transformers
    has_native_kernels: bool = True  # the C kernels are built and this CPU runs them
    has_bitsandbytes: bool = True  # the package is installed
    not_stored_packed: str = ""  # why the file's weights cannot be kept as they are; empty when they can
    head_dim: int = 64  # of the model at hand
    no_draft: str = ""  # why no draft model can guess for this one; empty when one can


@dataclass(frozen=True, slots=True)
class Choice:
    value: str
    title: str
    note: str  # one line: what this choice does


Reason = Callable[[str, Capabilities], str | None]


def _always(choice: str, capabilities: Capabilities) -> str | None:
    return None


def _not_with_fallback(choice: str, capabilities: Capabilities) -> str | None:
    if capabilities.is_fallback:
        return "This model runs through transformers, which keeps its own weights and ops."
    return None


def _weights_can_be_held(choice: str, capabilities: Capabilities) -> str | None:
    if choice in ("nf4", "llm_int8") and not capabilities.has_bitsandbytes:
        return "bitsandbytes is not installed. Install it with pip to try this form of weights."
    if choice == "as_stored" and not capabilities.is_fallback:
        if not capabilities.has_native_kernels:
            return "The C kernels are not built here, and torch has no products for a GGUF file's blocks."
        return capabilities.not_stored_packed or None
    return _not_with_fallback(choice, capabilities)


def _heads_can_be_kept(choice: str, capabilities: Capabilities) -> str | None:
    return reason_against(choice, capabilities.head_dim)


def _can_guess(choice: str, capabilities: Capabilities) -> str | None:
    if choice == "layer_skip" and capabilities.is_fallback:
        return "This model runs through transformers, whose layers cannot be left out."
    return capabilities.no_draft or None if choice == "draft" else None


def _int8_activations_need_kernels(choice: str, capabilities: Capabilities) -> str | None:
    if choice == "int8" and not capabilities.has_native_kernels:
        return "The C kernels are not built here; torch's packed products keep activations in bf16."
    return _not_with_fallback(choice, capabilities)


def _on_a_gpu(why_not_on_cpu: str) -> Reason:
    """A switch whose "on" needs a GPU; its default is "off"."""

    def reason(choice: str, capabilities: Capabilities) -> str | None:
        return why_not_on_cpu if choice == "on" and capabilities.device == "cpu" else None

    return reason


@dataclass(frozen=True, slots=True)
class Requirement:
    """Another switch must be at ``value``, and why."""

    key: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class OptionEntry:
    """One optimization.

    lossless: flipping it leaves greedy fp32 text unchanged.
    terms: what it changes in the ledger, in words the panel shows.
    reason: why a choice cannot be used here, or None when it can.
    requires: what choices other than the default need of other switches.
    """

    key: str
    title: str
    pile: Pile
    kind: Kind
    choices: tuple[Choice, ...]
    default: str
    lossless: bool
    explanation: str
    terms: str
    reason: Reason = _always
    requires: tuple[Requirement, ...] = ()  # of other switches, by every choice but the default

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(choice.value for choice in self.choices)

    def choice(self, value: str) -> Choice:
        return next(choice for choice in self.choices if choice.value == value)

    def default_for(self, capabilities: Capabilities) -> str:
        """The default, or what stands in for it where it cannot be used: the first choice that can, if any can."""
        usable = (value for value in (self.default, *self.values) if not self.reason(value, capabilities))
        return next(usable, self.default)


def _numbers(*values: int, unit: str) -> tuple[Choice, ...]:
    return tuple(Choice(str(v), str(v), f"up to {v} {unit}") for v in values)


def _on_off(on: str, off: str) -> tuple[Choice, ...]:
    return (Choice("on", "on", on), Choice("off", "off", off))


def _off_on(off: str, on: str) -> tuple[Choice, ...]:
    return (Choice("off", "off", off), Choice("on", "on", on))


OPTIONS: tuple[OptionEntry, ...] = (
    OptionEntry(
        key="weights",
        title="Weights",
        pile=Pile.FEWER_BYTES,
        kind=Kind.WEIGHTS,
        choices=(
            Choice("none", "full", "fp32 on a CPU: 4 bytes per weight"),
            Choice("int8", "int8", "1 byte per weight, one scale per output row"),
            Choice("int4", "int4", "half a byte per weight, scale and offset per 32 weights: 0.63 bytes in all"),
            Choice("int4_g64", "int4, groups of 64", "scale and offset per 64 weights: 0.56 bytes per weight in all"),
            Choice(
                "int4_g128", "int4, groups of 128", "scale and offset per 128 weights: 0.53 bytes per weight in all"
            ),
            Choice(
                "as_stored", "as stored", "a GGUF file's own blocks: its bits and its values, nothing is rounded again"
            ),
            Choice(
                "nf4",
                "NF4",
                "4 bits by bitsandbytes, meant for a GPU: a CPU unpacks the whole weight at each call",
            ),
            Choice(
                "llm_int8", "LLM.int8", "8 bits by bitsandbytes, meant for a GPU: several times slower than int8 here"
            ),
        ),
        default="int4",
        lossless=False,
        explanation=(
            "Decoding one token reads every weight once and does two operations with each, so the reading is the cost. "
            "Weights in 8 or 4 bits are 4 to 6 times fewer bytes than fp32, and decode speeds up almost as much. "
            "The price is rounding: the text can differ from full precision; larger groups are fewer bytes and rounder weights. Prefill is "
            "limited by arithmetic and gains little. A GGUF file comes rounded already: as stored, its blocks (Q4_0 to Q6_K) are multiplied "
            "as they are, so that nothing is lost a second time. NF4 and LLM.int8 are bitsandbytes' formats, meant for a GPU: on a CPU it "
            "unpacks the whole weight at each call (LLM.int8's only without AVX-512), so they are many times slower than int4 here; a CPU "
            "without bf16 of its own multiplies the unpacked NF4 weights in fp32, which moves twice the bytes again. Head and embedding "
            "are int8 beside them (beside NF4 unless Sensitive layers is off)."
        ),
        terms="weight bytes per step",
        reason=_weights_can_be_held,
    ),
    OptionEntry(
        key="activations",
        title="Activations",
        pile=Pile.FEWER_BYTES,
        kind=Kind.WEIGHTS,
        choices=(
            Choice("none", "full", "what a product is fed keeps 16 bits (bf16 without the C kernels)"),
            Choice("int8", "int8", "rounded to 8 bits, a scale per 32 values, made anew for each token"),
        ),
        default="int8",
        lossless=False,
        explanation=(
            "With packed weights the products themselves run on integers, so what goes into them is rounded too. In 16 bits next to "
            "nothing is lost, but every product is done twice, once for each half; in 8 bits once. Decoding one token waits for the "
            "weights, so it gains a little; prefill and large batches wait for arithmetic and gain up to twice the speed. Where "
            "rounding costs the most, 16 bits are kept either way: what goes into attention, the first and the last layer (while "
            "Sensitive layers is on), and the likely ones of the head's tokens."
        ),
        terms="compute per token",
        reason=_int8_activations_need_kernels,
    ),
    OptionEntry(
        key="kv_dtype",
        title="KV precision",
        pile=Pile.FEWER_BYTES,
        kind=Kind.CACHE,
        choices=(
            Choice("native", "native", "as computed: 4 bytes per element with full weights, 2 with packed ones"),
            Choice("int8", "int8", "1 byte per element, one scale per head and token"),
            Choice("int4", "int4", "4 bits per value, 6 per rotated key, scale and minimum per head and token"),
        ),
        default="native",
        lossless=False,
        explanation=(
            "Every new token reads the keys and values of all tokens it sees; in a long chat that is more than the weights. In 8 "
            "bits they take a quarter or half of the memory and more chats fit. Channels that are always large are evened out first, "
            "so that they do not drown the others. Under int4 heads are rotated too, which spreads what is large over all channels; values "
            "keep 4 bits, keys 6, since a rounded key moves the text ten times as much as a rounded value: 5.5 bits on average with "
            "what scales them. The price is rounding. The C kernels read the codes as they "
            "are; for models that run through transformers (whose channels are not evened out) they are decoded before attention, "
            "which costs time."
        ),
        terms="KV bytes per token",
        reason=_heads_can_be_kept,
    ),
    OptionEntry(
        key="gqa",
        title="Shared KV heads",
        pile=Pile.FEWER_BYTES,
        kind=Kind.CACHE,
        choices=_on_off(
            "a group of query heads shares one key and value", "keys and values are stored for every query head"
        ),
        default="on",
        lossless=True,
        explanation=(
            "In grouped-query attention several query heads look at the same keys and values, so these are stored and read once per "
            "group. Off, they are copied for every query head, as in older models: pages hold fewer tokens and every token reads more. "
            "The text stays the same; it shows what sharing saves. Models without groups see no change."
        ),
        terms="KV bytes per token",
    ),
    OptionEntry(
        key="window",
        title="Attention window",
        pile=Pile.FEWER_BYTES,
        kind=Kind.CACHE,
        choices=(
            Choice("model", "own", "each layer sees what it was trained to see"),
            *(Choice(str(w), str(w), f"the last {w} tokens and the first 4") for w in (512, 1024, 2048, 4096)),
        ),
        default="model",
        lossless=False,
        explanation=(
            "Layers that see the whole chat are limited to its last tokens and the first four, which many heads use as a resting place "
            "(attention sinks). Positions stay those of the whole text. What every layer has left behind is freed, so memory and reads "
            "stop growing; the model no longer sees that part of the chat. Layers with a narrower window of their own keep it."
        ),
        terms="KV tokens read and held",
    ),
    OptionEntry(
        key="sparse",
        title="Sparse attention",
        pile=Pile.FEWER_BYTES,
        kind=Kind.FREE,
        choices=(
            Choice("off", "off", "each token reads all it sees"),
            *(Choice(str(k), f"{k} pages", f"each KV head reads {k} pages of 32 tokens") for k in (8, 16, 32)),
        ),
        default="off",
        lossless=False,
        explanation=(
            "Most of a long chat hardly matters for the next token. For each page the least and largest value of every key channel are "
            "kept; they bound how much a query can want the page (Quest), and each KV head reads only the pages it could want most, the "
            "first and the last one always. Prompts, verified guesses and the first two layers read everything. The bounds take memory and "
            "are read too, so it pays only in long chats. Within a window, and without the C kernels, the choosing runs as plain torch "
            "steps, which are slow."
        ),
        terms="KV tokens read per new token",
        requires=(Requirement("kv_cache", "on", "without a KV cache there are no pages to choose from"),),
    ),
    OptionEntry(
        key="sensitive_layers",
        title="Sensitive layers",
        pile=Pile.FEWER_BYTES,
        kind=Kind.WEIGHTS,
        choices=(
            Choice(
                "on", "kept", "under 4 bits, head and embedding at int8; first and last layer: activations in 16 bits"
            ),
            Choice(
                "more", "kept, and more", "the same, and under 4 bits the weights of first and last layer at int8 too"
            ),
            Choice("off", "off", "everything at the precision of the weights"),
        ),
        default="on",
        lossless=False,
        explanation=(
            "Rounding does not hurt everywhere alike. Every token's choice hangs on the head, and the first and last layers stand "
            "closest to the words. So weights of 4 bits (int4 and NF4) leave the head at 8 bits, a few more bytes per token, and "
            "activations of 8 bits keep 16 in the first and the last layer, for text that moves less."
        ),
        terms="weight bytes per step",
        reason=_not_with_fallback,
    ),
    OptionEntry(
        key="batching",
        title="Batching",
        pile=Pile.MORE_TOKENS,
        kind=Kind.FREE,
        choices=(
            Choice("continuous", "continuous", "chats join and leave the batch at every step"),
            Choice("fixed", "fixed groups", "a group starts together; nobody joins until all have finished"),
            Choice("off", "off", "one chat at a time; the others wait"),
        ),
        default="continuous",
        lossless=True,
        explanation=(
            "The weights read for one chat's token can be multiplied with every other chat's at almost no cost, "
            "so eight chats together get several times the tokens of one. Fixed groups lose the slots of chats that end early; "
            "continuous batching refills them at once."
        ),
        terms="tokens per weight read",
    ),
    OptionEntry(
        key="max_batch",
        title="Batch limit",
        pile=Pile.MORE_TOKENS,
        kind=Kind.FREE,
        choices=_numbers(1, 2, 4, 8, 16, 32, unit="chats in one step"),
        default="16",
        lossless=True,
        explanation=(
            "How many chats may share one step. More chats per step means more tokens in all, "
            "until arithmetic takes as long as reading the weights; past that point each chat slows down."
        ),
        terms="tokens per weight read",
    ),
    OptionEntry(
        key="speculation",
        title="Speculation",
        pile=Pile.MORE_TOKENS,
        kind=Kind.FREE,
        choices=(
            Choice("off", "off", "one token per chat and step"),
            Choice("ngram", "n-gram", "guess that what followed the last words before follows again"),
            Choice("draft", "draft model", "a smaller model with the same vocabulary guesses"),
            Choice("layer_skip", "layer skip", "an experiment: some of the model's own layers guess for all of them"),
        ),
        default="off",
        lossless=True,
        explanation=(
            "One read of the weights can test several guessed tokens at once, and every guess that the model would have chosen itself "
            "is a token gained. The text keeps exactly its distribution. It pays where guesses are often right (quoting, editing, code) "
            "and turns itself off where they are not, or where a large batch already keeps the machine busy."
        ),
        terms="tokens per weight read, rows per step",
        reason=_can_guess,
    ),
    OptionEntry(
        key="draft_length",
        title="Guessed tokens",
        pile=Pile.MORE_TOKENS,
        kind=Kind.FREE,
        choices=(
            Choice("adaptive", "adaptive", "as many as the chat's acceptance and the measured seconds make worthwhile"),
            *_numbers(1, 2, 3, 4, 6, 8, unit="guesses per step, while they pay"),
        ),
        default="adaptive",
        lossless=True,
        explanation=(
            "How many tokens speculation guesses per step. More guesses gain more when they are right; each one adds a row to compute, "
            "and those behind a wrong one are wasted. Adaptive follows what each chat accepts and what a guess costs on this machine."
        ),
        terms="rows per step",
    ),
    OptionEntry(
        key="kv_cache",
        title="KV cache",
        pile=Pile.CAPACITY,
        kind=Kind.CACHE,
        choices=_on_off(
            "keys and values of earlier tokens are kept", "the whole text is computed again for every token"
        ),
        default="on",
        lossless=True,
        explanation=(
            "Each new token looks back at the keys and values of all tokens before it. Keeping them costs memory and reads; "
            "without them every token pays for a full prefill of the text so far. Turn it off once to see why it exists."
        ),
        terms="tokens computed per step, KV bytes",
    ),
    OptionEntry(
        key="paging",
        title="Paging",
        pile=Pile.CAPACITY,
        kind=Kind.CACHE,
        choices=_on_off(
            "pages are handed out as a chat grows", "each chat reserves room for the longest possible conversation"
        ),
        default="on",
        lossless=True,
        explanation=(
            "A chat gets its KV memory in small pages as it grows. Without paging each chat reserves one contiguous stretch for the "
            "longest conversation it might become; what it never uses is stranded, and fewer chats fit."
        ),
        terms="pages used and stranded",
    ),
    OptionEntry(
        key="eviction",
        title="Finished pages",
        pile=Pile.CAPACITY,
        kind=Kind.FREE,
        choices=(
            Choice("lru", "keep", "kept until their room is needed, the least recently used given up first"),
            Choice("off", "free at once", "freed as soon as no running chat holds them"),
        ),
        default="lru",
        lossless=True,
        explanation=(
            "When a reply ends its KV pages could be freed, but the next turn of the same chat begins with the same text. Kept until "
            "somebody needs the room, they cost nothing and spare that turn most of its prefill. Freed at once, only chats that run at "
            "the same time share their beginnings."
        ),
        terms="prefill tokens computed",
    ),
    OptionEntry(
        key="host_offload",
        title="Host offload",
        pile=Pile.CAPACITY,
        kind=Kind.CACHE,
        choices=_off_on("all pages lie where the model runs", "pages that wait are moved to the computer's own memory"),
        default="off",
        lossless=True,
        explanation=(
            "A GPU's memory is fast and small. Pages of chats that wait, and of finished ones that are kept for their next turn, can be "
            "moved to the computer's own memory and fetched before they are needed: more chats are held, for the time of the transfers."
        ),
        terms="pages held, bytes moved between memories",
        reason=_on_a_gpu("On a CPU the cache lies in the computer's own memory already."),
    ),
    OptionEntry(
        key="prefix",
        title="Prefix sharing",
        pile=Pile.PREFILL,
        kind=Kind.FREE,
        choices=_on_off(
            "pages with the same text from the start are computed once", "every prompt is computed in full"
        ),
        default="on",
        lossless=True,
        explanation=(
            "Two chats that begin with the same text (a system prompt, or the same chat one turn later) need the same keys and values. "
            "Full pages are remembered by the text before them and reused, so that part of the prefill costs nothing."
        ),
        terms="prefill tokens computed",
    ),
    OptionEntry(
        key="chunked_prefill",
        title="Chunked prefill",
        pile=Pile.PREFILL,
        kind=Kind.FREE,
        choices=_on_off(
            "long prompts are cut to fit the step's token budget", "a prompt is computed whole, others wait"
        ),
        default="on",
        lossless=True,
        explanation=(
            "A long prompt computed in one step stalls every other chat until it is done. Cut into chunks it shares each step "
            "with their decode tokens: they keep flowing, and the weights are read once for both."
        ),
        terms="prefill tokens per step",
    ),
    OptionEntry(
        key="token_budget",
        title="Step budget",
        pile=Pile.PREFILL,
        kind=Kind.FREE,
        choices=_numbers(32, 64, 128, 256, 512, 1024, unit="tokens in one step"),
        default="512",
        lossless=True,
        explanation=(
            "How many tokens one step may compute, decode tokens and prefill chunks together. Small keeps other chats smooth while a long "
            "prompt is read; large reads the prompt faster, because each pass over the weights serves more tokens."
        ),
        terms="prefill tokens per step",
    ),
    OptionEntry(
        key="attention",
        title="Attention",
        pile=Pile.PREFILL,
        kind=Kind.FREE,
        choices=(
            Choice("fused", "fused", "scores are used as they arise and never stored"),
            Choice("reference", "step by step", "all scores are written, weighed and read again, in plain torch"),
        ),
        default="fused",
        lossless=True,
        explanation=(
            "Every token is scored against all tokens it sees, which for a prompt is its length squared, and the scores are needed but once. "
            "Fused attention works through the keys in blocks and keeps what it needs of the scores beside the processor. Step by step "
            "they go to memory and back, as in a textbook. Either way the result is the same."
        ),
        terms="activation bytes: the scores",
    ),
    OptionEntry(
        key="fused_ops",
        title="Fused operations",
        pile=Pile.FUSION,
        kind=Kind.FREE,
        choices=_on_off("norms, rotation and activations each run as one call", "each runs as plain torch steps"),
        default="on",
        lossless=True,
        explanation=(
            "A norm or an activation written in small steps sends each intermediate result to memory and back and pays for every call. "
            "Fused, the intermediate values stay close to the processor. It acts on overhead and activation bytes, not on weights."
        ),
        terms="activation bytes, calls per step",
        reason=_not_with_fallback,
    ),
    OptionEntry(
        key="graphs",
        title="CUDA graphs",
        pile=Pile.FUSION,
        kind=Kind.GRAPH,
        choices=_off_on("each kernel is launched by itself", "a step's launches are recorded once and replayed as one"),
        default="off",
        lossless=True,
        explanation=(
            "A small model's step on a GPU is hundreds of kernels that each run for microseconds, and launching one costs as long. "
            "Recorded as a graph they are launched together, and what is left of a step is the work itself."
        ),
        terms="overhead: launches per step",
        reason=_on_a_gpu("Graphs replay the launches of a GPU's kernels; on a CPU there are none."),
    ),
    OptionEntry(
        key="overlap",
        title="Overlap",
        pile=Pile.FUSION,
        kind=Kind.FREE,
        choices=_off_on("a step is prepared after the one before", "a step is prepared while the one before runs"),
        default="off",
        lossless=True,
        explanation=(
            "While a GPU computes, the CPU is idle: it can plan the next step and send its numbers ahead on a second stream. "
            "Then nothing is left to wait for between two steps. It hides overhead and changes neither bytes nor arithmetic."
        ),
        terms="overhead: what happens between steps",
        reason=_on_a_gpu("On a CPU the cores that would prepare the next step are busy with this one."),
    ),
)

_BY_KEY: Mapping[str, OptionEntry] = {entry.key: entry for entry in OPTIONS}


def entry(key: str) -> OptionEntry:
    """The entry for ``key``; ValueError names the keys that exist."""
    if key not in _BY_KEY:
        raise ValueError(f"There is no option {key!r}. Options are: {', '.join(_BY_KEY)}.")
    return _BY_KEY[key]


def check(key: str, value: str, capabilities: Capabilities) -> None:
    """ValueError with the remedy when ``key`` = ``value`` is unknown or cannot be used here."""
    option = entry(key)
    if value not in option.values:
        raise ValueError(f"Option {key!r} cannot be {value!r}. Choose one of: {', '.join(option.values)}.")
    reason = option.reason(value, capabilities)
    if reason and value != option.default_for(capabilities):
        raise ValueError(f"Option {key}={value} cannot be used here: {reason}")


def _broken(values: Mapping[str, str]) -> Iterator[tuple[OptionEntry, Requirement]]:
    """Each option set to what another switch does not allow, and what it needs of that one."""
    for option in OPTIONS:
        if values[option.key] != option.default:
            yield from ((option, needed) for needed in option.requires if values[needed.key] != needed.value)


def _check_together(values: Mapping[str, str]) -> None:
    """ValueError, naming both switches and the ways out, when two settings cannot go together."""
    for option, needed in _broken(values):
        raise ValueError(
            f"{option.key}={values[option.key]} cannot go with {needed.key}={values[needed.key]}: {needed.why}. "
            f"Set {needed.key}={needed.value} or {option.key}={option.default}."
        )


def clashes(values: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Option key -> choice -> why it cannot be chosen while the other switches are as in ``values`` (all of them); names both."""
    found: dict[str, dict[str, str]] = {}
    for option in OPTIONS:
        for choice in option.choices:
            tried = {**values, option.key: choice.value}
            for needing, needed in _broken(tried):
                if option.key in (needing.key, needed.key):
                    other = entry(needed.key)
                    found.setdefault(option.key, {})[choice.value] = (
                        f"{needing.title} ({needing.choice(tried[needing.key]).title}) needs {other.title} "
                        f"({other.choice(needed.value).title}): {needed.why}."
                    )
    return found


def unavailable(capabilities: Capabilities) -> dict[str, dict[str, str]]:
    """Option key -> choice -> why it cannot be used here; empty where all can."""
    found: dict[str, dict[str, str]] = {}
    for option in OPTIONS:
        for value in option.values:
            reason = option.reason(value, capabilities)
            if reason:
                found.setdefault(option.key, {})[value] = reason
    return found


class Options(Mapping[str, str]):
    """A full, checked setting of every switch. Immutable; ``replaced`` gives a new one."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None, capabilities: Capabilities | None = None) -> None:
        here = capabilities or Capabilities()
        for key, value in (values or {}).items():
            check(key, value, here)
        self._values = {option.key: (values or {}).get(option.key, option.default_for(here)) for option in OPTIONS}
        _check_together(self._values)

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Options({self._values})"

    def on(self, key: str) -> bool:
        return self._values[key] == "on"

    def number(self, key: str) -> int:
        return int(self._values[key])

    def replaced(self, changes: Mapping[str, str], capabilities: Capabilities | None = None) -> Options:
        """These options with ``changes``; ValueError as for ``check``."""
        return Options({**self._values, **changes}, capabilities)

    def changed(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """Keys whose value differs in ``other``, in table order."""
        return tuple(key for key in self._values if other[key] != self._values[key])


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """``["weights=int8", "prefix=off"]`` -> a dict; ValueError for a pair that is not key=value or unknown."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is not of the form key=value, e.g. weights=int8.")
        check(key.strip(), value.strip(), Capabilities())
        settings[key.strip()] = value.strip()
    return settings
