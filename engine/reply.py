"""A reply being generated: from sampled tokens to text, and when it ends."""

from __future__ import annotations

from typing import NamedTuple

from engine.events import Completion, Finished, FinishReason, RequestUsage, TokenDelta, TokenLogprob
from engine.params import SamplingParams
from engine.sampling import SamplerState
from engine.scheduler import Request
from engine.speculation.verify import Verified
from engine.stop_strings import StopStrings
from engine.text import TextCodec


class Accepted(NamedTuple):
    """What one step added to a reply, and why it ends with it, if it does.

    num_kept: sampled tokens that are part of the text or end it. num_tested, num_accepted: guesses among them.
    """

    delta: TokenDelta
    reason: FinishReason | None
    num_kept: int
    num_tested: int
    num_accepted: int


class Reply:
    """The engine's side of one request: sampler state, detokenizer, stop strings and the clock.

    is_conversation: the prompt was a chat, so the reply begins a new text (and, without a template, ends with its turn).
    num_dropped: messages of the chat that were left out of the prompt.
    Times are ``time.perf_counter()`` seconds.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        codec: TextCodec,
        submitted_at: float,
        is_conversation: bool,
        num_dropped: int = 0,
    ) -> None:
        self.request = request
        self.params = params
        self.sampler = SamplerState(params, request.tokens, codec.vocab_size)
        self._ends = frozenset() if params.ignore_eos else codec.eos_token_ids
        self._detokenizer = codec.detokenizer(() if is_conversation else request.tokens)
        self._stops = StopStrings((*params.stop, *codec.turn_stop) if is_conversation else params.stop)
        self._submitted_at = submitted_at
        self._num_dropped = num_dropped
        self._first_token_at: float | None = None
        self._last_token_at = submitted_at
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_drafted = 0
        self._num_accepted = 0

    @property
    def request_id(self) -> int:
        return self.request.request_id

    def accept(self, verified: Verified, now: float, context_length: int) -> Accepted:
        """Take the tokens just sampled, up to the one that ends the reply, before the scheduler commits them."""
        assert verified.sampled
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now
        text, num_kept, reason = "", 0, None
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for sampled in verified.sampled:
            num_kept += 1
            if sampled.token_id in self._ends:
                text, reason = text + self._rest(), FinishReason.STOP
                break
            token_ids.append(sampled.token_id)
            logprobs += [sampled.logprob] if sampled.logprob else []
            piece, stopped = self._stops.push(self._detokenizer.push(sampled.token_id))
            reason = FinishReason.STOP if stopped else self._limit_reached(num_kept, context_length)
            text += piece + (self._rest() if reason and not stopped else "")
            if reason:
                break
        num_tested, num_accepted = min(verified.num_tested, num_kept), min(verified.num_accepted, num_kept)
        self._num_drafted += num_tested
        self._num_accepted += num_accepted
        self._token_ids += token_ids
        delta = self._delta(text, tuple(token_ids), tuple(logprobs))
        return Accepted(delta, reason, num_kept, num_tested, num_accepted)

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
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
            dropped_messages=self._num_dropped,
        )

    def completion(self, reason: FinishReason) -> Completion:
        return Completion("".join(self._pieces), tuple(self._token_ids), reason, self.usage(), tuple(self._logprobs))

    def _limit_reached(self, num_new: int, context_length: int) -> FinishReason | None:
        """With ``num_new`` tokens that the request does not have yet."""
        if self.request.num_generated + num_new >= self.request.max_tokens:
            return FinishReason.LENGTH
        if self.request.num_tokens + num_new >= context_length:
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
