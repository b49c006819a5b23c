"""A reply being generated: from sampled tokens to text, and when it ends."""

from __future__ import annotations

from engine.events import Completion, Finished, FinishReason, RequestUsage, TokenDelta, TokenLogprob
from engine.params import SamplingParams
from engine.sampling import SamplerState
from engine.scheduler import Request
from engine.stop_strings import StopStrings
from engine.text import TextCodec


class Reply:
    """The engine's side of one request: sampler state, detokenizer, stop strings and the clock.

    is_conversation: the prompt was a chat, so the reply begins a new text (and, without a template, ends with its turn).
    Times are ``time.perf_counter()`` seconds.
    """

    def __init__(
        self, request: Request, params: SamplingParams, codec: TextCodec, submitted_at: float, is_conversation: bool
    ) -> None:
        self.request = request
        self.params = params
        self.sampler = SamplerState(params, request.tokens, codec.vocab_size)
        self._ends = frozenset() if params.ignore_eos else codec.eos_token_ids
        self._detokenizer = codec.detokenizer(() if is_conversation else request.tokens)
        self._stops = StopStrings((*params.stop, *codec.turn_stop) if is_conversation else params.stop)
        self._submitted_at = submitted_at
        self._first_token_at: float | None = None
        self._last_token_at = submitted_at
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def request_id(self) -> int:
        return self.request.request_id

    def accept(
        self, token_id: int, logprob: TokenLogprob | None, now: float, context_length: int
    ) -> tuple[TokenDelta, FinishReason | None]:
        """Take the token just sampled; return what it adds to the text and why the reply ends with it, if it does."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now
        self.sampler.commit(token_id)
        if token_id in self._ends:
            return self._delta(self._rest(), (), ()), FinishReason.STOP
        self._token_ids.append(token_id)
        logprobs = (logprob,) if logprob else ()
        text, stopped = self._stops.push(self._detokenizer.push(token_id))
        reason = FinishReason.STOP if stopped else self._limit_reached(context_length)
        if reason and not stopped:
            text += self._rest()
        return self._delta(text, (token_id,), logprobs), reason

    def held_back(self) -> TokenDelta | None:
        """Text that waited for more (a possible stop string), now that the reply is stopped; None when there is none."""
        text = self._rest()
        return self._delta(text, (), ()) if text else None

    def finished(self, reason: FinishReason, message: str = "") -> Finished:
        return Finished(self.request_id, reason, self.usage(), message)

    def usage(self) -> RequestUsage:
        first = self._first_token_at
        return RequestUsage(
            prompt_tokens=self.request.num_prompt,
            cached_tokens=self.request.cached_tokens,
            new_tokens=self.request.num_generated,
            recomputed_tokens=self.request.recomputed_tokens,
            first_token_seconds=None if first is None else first - self._submitted_at,
            decode_seconds=0.0 if first is None else self._last_token_at - first,
        )

    def completion(self, reason: FinishReason) -> Completion:
        return Completion("".join(self._pieces), tuple(self._token_ids), reason, self.usage(), tuple(self._logprobs))

    def _limit_reached(self, context_length: int) -> FinishReason | None:
        if self.request.num_generated >= self.request.max_tokens:
            return FinishReason.LENGTH
        if self.request.num_tokens >= context_length:
            return FinishReason.CONTEXT
        return None

    def _rest(self) -> str:
        """What detokenizer and stop strings held back, now that nothing follows."""
        text, stopped = self._stops.push(self._detokenizer.flush())
        return text if stopped else text + self._stops.flush()

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> TokenDelta:
        self._pieces.append(text)
        self._logprobs += logprobs
        return TokenDelta(self.request_id, text, token_ids, logprobs)
