"""What the next step computes. Continuous batching, chunked prefill, preemption and speculation are one idea here:

    every request wants ``num_computed`` (tokens whose keys and values are written) to reach ``num_tokens + num_drafts``,
    and each step has a budget of tokens to spend on that.

A request in prefill is many tokens behind, a decoding one exactly one; the scheduler does not tell them apart
(after vLLM V1). A request that has caught up gets its logits, and with them a new token, and is behind by one again.

Drafts are guesses at the tokens that follow (engine/speculation/): rows computed behind the last token, each of whose
logits tell whether the next guess was right. A rejected draft lowers ``num_computed`` and nothing else is undone: its
keys and values are written over. Drafts get what a step leaves over, so nobody waits or is preempted for a guess.

One step:  ``plan()`` -> StepPlan, the single truth of the step: the runner executes it, the ledger counts it.
           ``commit(plan, tokens)`` records what was computed and what was sampled.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.events import PageMap, PoolSnapshot
from engine.kv.layout import NUM_SINKS
from engine.kv.pool import PagePool
from engine.model.spec import ModelSpec
from engine.options import Options


@dataclass(eq=False, slots=True)
class Request:
    """A conversation being continued. ``tokens`` is the prompt and what was generated after it."""

    request_id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int  # of the reply
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    num_registered: int = 0  # full pages offered to the prefix index
    cached_tokens: int = 0  # of the prompt, found in the index
    recomputed_tokens: int = 0
    peak_computed: int = 0  # most tokens ever computed: below it, computing is repeating
    num_in_run: int = 0  # leading pages that are neighbours in memory
    drafts: list[int] = field(default_factory=list)  # guesses at what follows ``tokens``, for the next step only
    num_unseen: int = 0  # pages [sinks, num_unseen) left every layer's window and were given back: 0 in the table

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_behind(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def held_pages(self) -> list[int]:
        return [page for page in self.pages if page] if self.num_unseen else self.pages

    @property
    def is_decoding(self) -> bool:
        return self.num_behind == 1 and self.num_generated > 0

    def block_table(self) -> Sequence[int]:
        """The pages in order; a ``range`` when they are neighbours, which attention reads as one piece."""
        pages, run = self.pages, self.num_in_run
        while run < len(pages) and (run == 0 or pages[run] == pages[run - 1] + 1):
            run += 1
        self.num_in_run = run
        return range(pages[0], pages[0] + run) if run == len(pages) else pages


@dataclass(frozen=True, slots=True)
class Item:
    """One request's part in a step: tokens [start, start + count), a prefill chunk or a decode token alike.

    The last ``num_drafts`` of them are guesses; what precedes them is text.
    """

    request: Request
    start: int
    count: int
    wants_logits: bool  # the text's last token is among the rows: its logits, and those of the drafts, give new tokens
    num_drafts: int = 0

    @staticmethod
    def next_of(request: Request, count: int) -> Item:
        start = request.num_computed
        return Item(request, start, count, wants_logits=start + count == request.num_tokens)

    @property
    def context(self) -> int:
        """Tokens the last row sees, itself included."""
        return self.start + self.count

    @property
    def num_logit_rows(self) -> int:
        """Of the last rows, how many must give logits."""
        return self.num_drafts + 1 if self.wants_logits else 0

    @property
    def is_prefill(self) -> bool:
        return self.count - self.num_drafts > 1 or self.start < self.request.num_prompt

    @property
    def is_plain_decode(self) -> bool:
        """One row that continues a reply, without guesses to verify."""
        return self.count == 1 and not self.is_prefill

    def token_ids(self) -> list[int]:
        """What the rows hold, in order."""
        request, num_text = self.request, self.context - self.num_drafts
        return request.tokens[self.start : num_text] + request.drafts[: self.num_drafts]


class StepPlan(NamedTuple):
    items: tuple[Item, ...]

    @property
    def num_rows(self) -> int:
        return sum(item.count for item in self.items)

    @property
    def num_logit_rows(self) -> int:
        return sum(item.num_logit_rows for item in self.items)


@dataclass(frozen=True, slots=True)
class Policy:
    """The switches that scheduling obeys."""

    max_batch: int
    token_budget: int
    chunked: bool
    fixed_groups: bool
    keep_kv: bool
    paged: bool
    share_prefixes: bool
    window: int | None = None  # tokens back that some layer still sees; None: all
    keep_finished: bool = True  # pages of finished texts stay findable until their room is needed

    @property
    def prompts_run_alone(self) -> bool:
        """Unchunked: a prompt is computed whole, in a step of its own, and everyone else waits for it."""
        return not self.chunked and self.keep_kv

    @property
    def step_tokens(self) -> int:
        """Tokens one step may compute. Without chunks there is no bound: whole texts are computed."""
        return self.token_budget if self.chunked else sys.maxsize

    @staticmethod
    def of(options: Options, spec: ModelSpec | None = None) -> Policy:
        """The policy that ``options`` ask for; ``spec`` knows the windows that the model has of its own."""
        keep_kv = options.on("kv_cache")
        window = None if options["window"] == "model" else options.number("window")
        if spec is not None:
            window = (spec if window is None else spec.with_window(window, NUM_SINKS)).widest_window
        return Policy(
            max_batch=1 if options["batching"] == "off" else options.number("max_batch"),
            token_budget=options.number("token_budget"),
            chunked=options.on("chunked_prefill") and keep_kv,
            fixed_groups=options["batching"] == "fixed",
            keep_kv=keep_kv,
            paged=options.on("paging"),
            share_prefixes=options.on("prefix") and keep_kv,
            window=window,
            keep_finished=options["eviction"] == "lru",
        )


class Scheduler:
    """Owns the requests and their block tables; the only one to change them.

    context_length: the longest conversation, tokens; what a contiguous reservation reserves.
    """

    def __init__(self, pool: PagePool, policy: Policy, context_length: int) -> None:
        self.pool = pool
        self.policy = policy
        self.context_length = context_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        assert 0 < request.num_tokens < self.context_length, (request.num_tokens, self.context_length)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Finished, stopped or failed: its pages are given back at once (indexed ones stay findable)."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- one step -----------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the next step's work; takes the pages it needs. Empty only when there are no requests."""
        self._preempt_beyond_limit()
        items = self._plan_running()
        if not (self.policy.prompts_run_alone and any(item.is_prefill for item in items)):
            items = self._plan_admissions(items)
        return StepPlan(tuple(self._add_drafts(items)))

    def commit(self, plan: StepPlan, tokens: Mapping[int, Sequence[int]]) -> None:
        """Record a step that ran: ``tokens`` maps the request ids that got logits to their new tokens.

        All but the last of them are the item's first drafts, found right; the keys and values of the others are void.
        """
        for item in plan.items:
            request = item.request
            if request not in self.running:  # stopped while the step ran
                continue
            new = tokens[request.request_id] if item.wants_logits else ()
            assert len(new) <= item.num_logit_rows
            assert not item.wants_logits or request.drafts[: len(new) - 1] == list(new[:-1])
            computed = item.context - item.num_drafts + max(0, len(new) - 1)
            repeated = max(0, min(computed, request.peak_computed) - item.start)
            request.recomputed_tokens += repeated if self.policy.keep_kv else 0
            request.num_computed = computed
            request.peak_computed = max(request.peak_computed, computed)
            request.tokens += new
            request.drafts = []
            if self.policy.share_prefixes:
                self._register_full_pages(request)
            if not self.policy.keep_kv:
                request.num_computed = 0
            elif self.policy.window is not None and self.policy.paged:
                self._free_unseen_pages(request, self.policy.window)

    # -- switches -----------------------------------------------------------------------------

    def change_policy(self, policy: Policy) -> int:
        """Obey other switches from the next step on. Returns how many running requests must be recomputed."""
        old = self.policy
        layout_changed = (policy.keep_kv, policy.paged, policy.window) != (old.keep_kv, old.paged, old.window)
        preempted = self.preempt_all() if layout_changed else 0
        if layout_changed or not policy.share_prefixes:
            self.pool.clear_index()
        if not policy.keep_finished:
            self.pool.free_cached()
        self.policy = policy
        return preempted

    def preempt_all(self) -> int:
        """Every running request gives its pages back and waits, in order, to be computed again."""
        count = len(self.running)
        while self.running:
            self._preempt(self.running[-1])
        return count

    def move_to(self, pool: PagePool, context_length: int) -> None:
        """Go on with an empty pool (other weights or another KV dtype); nothing may be running."""
        assert not self.running
        self.pool = pool
        self.context_length = context_length

    # -- looking in ---------------------------------------------------------------------------

    def tables(self) -> list[list[int]]:
        return [request.held_pages for request in self.running]

    def check_integrity(self) -> None:
        assert all(not request.pages for request in self.waiting), "a waiting request holds pages"
        self.pool.check_integrity(self.tables())

    def num_stranded(self) -> int:
        """Pages reserved that hold no token."""
        return sum(len(request.pages) - self._pages_for(request.num_tokens) for request in self.running)

    def snapshot(self, page_bytes: int) -> PoolSnapshot:
        pool = self.pool
        return PoolSnapshot(
            total=pool.num_pages - 1,
            used=pool.num_held,
            shared=pool.num_shared,
            cached=pool.num_cached,
            free=pool.num_free,
            stranded=0 if self.policy.paged else self.num_stranded(),
            page_size=pool.page_size,
            page_bytes=page_bytes,
        )

    def page_map(self) -> PageMap:
        owners = [-1 if self.pool.is_cached(page) else 0 for page in range(self.pool.num_pages)]
        owners[0] = -2
        sharers: dict[int, tuple[int, ...]] = {}
        stranded: set[int] = set()
        for request in self.running:
            for page in request.held_pages:
                owners[page] = request.request_id
                if self.pool.refs(page) > 1:
                    owners[page] = -3
                    sharers[page] = (*sharers.get(page, ()), request.request_id)
            stranded.update(request.pages[self._pages_for(request.num_tokens) :])
        return PageMap(tuple(owners), frozenset(stranded), sharers)

    # -- planning, in detail ------------------------------------------------------------------

    def _plan_running(self) -> list[Item]:
        """Decoders first, so that none stalls behind a long prompt; then prefills with what is left of the budget."""
        order = sorted(self.running, key=lambda request: not request.is_decoding)
        if self.policy.prompts_run_alone:
            order = [request for request in self.running if not request.is_decoding][:1] or order
        items: list[Item] = []
        budget = self.policy.step_tokens
        for request in order:
            count = min(request.num_behind, budget)
            if request not in self.running or count == 0:  # preempted for one before it, or nothing left to spend
                continue
            if self._make_room(request, request.num_computed + count, {item.request.request_id for item in items}):
                items.append(Item.next_of(request, count))
                budget -= count
        return items

    def _plan_admissions(self, items: list[Item]) -> list[Item]:
        """Waiting requests join while the batch, the budget and the pages allow it, first come first served."""
        policy = self.policy
        budget = policy.step_tokens - sum(item.count for item in items)
        if policy.fixed_groups and items:
            return items
        while self.waiting and len(self.running) < policy.max_batch and (budget > 0 or policy.fixed_groups):
            request = self.waiting[0]
            if not self._admit(request):
                break
            item = Item.next_of(request, min(request.num_behind, budget))
            if policy.prompts_run_alone and item.is_prefill:
                return [item]
            if item.count:
                items.append(item)
                budget -= item.count
        return items

    def _admit(self, request: Request) -> bool:
        """Take pages for all of the request's tokens, shared ones first. False, and nothing taken, when they do not fit."""
        assert not request.pages
        assert request.num_computed == 0
        if not self.policy.paged:
            pages = self.pool.allocate_run(self._pages_for(self.context_length))
            if pages is None:
                return False
        else:
            shared = self.pool.match(request.tokens) if self.policy.share_prefixes else []
            self.pool.acquire(shared)
            needed = self._pages_for(request.num_tokens) - len(shared)
            fresh = self._allocate(needed, shared[-1] if shared else None)
            if fresh is None:
                self.pool.release(shared, keep=self.policy.keep_finished)
                return False
            pages = shared + fresh
            request.num_computed = len(shared) * self.pool.page_size
            request.num_registered = len(shared)
            if request.peak_computed == 0:
                request.cached_tokens = request.num_computed
        request.pages = pages
        self.waiting.popleft()
        self.running.append(request)
        return True

    def _make_room(self, request: Request, num_tokens: int, planned: set[int]) -> bool:
        """Grow the block table to hold ``num_tokens``, preempting the youngest request that is not yet planned."""
        missing = self._pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        while (fresh := self._allocate(missing, request.pages[-1] if request.pages else None)) is None:
            victim = next(other for other in reversed(self.running) if other.request_id not in planned)
            self._preempt(victim)
            if victim is request:
                return False
        request.pages.extend(fresh)
        return True

    def _allocate(self, count: int, after: int | None) -> list[int] | None:
        """Pages for text. When they run out, those that only rejected drafts needed are given back first."""
        fresh = self.pool.allocate(count, after)
        if fresh is None and self.policy.paged:
            for request in self.running:
                needed = self._pages_for(request.num_tokens)
                self.pool.release(request.pages[needed:])
                del request.pages[needed:]
                request.num_in_run = min(request.num_in_run, needed)
            fresh = self.pool.allocate(count, after)
        return fresh

    def _add_drafts(self, items: list[Item]) -> list[Item]:
        """Decoding items with as many of their drafts as the text's limits, the budget and the free pages allow."""
        budget = self.policy.step_tokens - sum(item.count for item in items)
        drafted: list[Item] = []
        for item in items:
            request = item.request
            limit = min(request.max_tokens - request.num_generated, self.context_length - request.num_tokens)
            most = min(len(request.drafts), budget, limit - 1) if request.is_decoding and self.policy.keep_kv else 0
            missing = max(0, self._pages_for(request.num_tokens + most) - len(request.pages)) if most > 0 else 0
            fresh = self.pool.allocate(missing, after=request.pages[-1]) if missing else []
            if most > 0 and fresh is not None:
                request.pages.extend(fresh)
                budget -= most
                item = replace(item, count=item.count + most, num_drafts=most)
            drafted.append(item)
        return drafted

    def _preempt_beyond_limit(self) -> None:
        """The batch limit was lowered: the youngest wait again."""
        while len(self.running) > self.policy.max_batch:
            self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.held_pages, keep=self.policy.keep_finished)
        request.num_unseen = 0
        request.pages = []
        request.num_computed = 0
        request.num_registered = 0
        request.num_in_run = 0
        request.drafts = []

    def _free_unseen_pages(self, request: Request, window: int) -> None:
        """Give back pages that no later token sees; page 0 takes their place in the table.

        The next token, at position num_computed, sees ``window`` tokens up to itself and the sinks. The page before the next
        one to be registered stays, since that one's text is chained to it.
        """
        size = self.pool.page_size
        first_seen = request.num_computed - window + 1
        end = min(first_seen // size, request.num_computed // size - 1)
        begin = max(request.num_unseen, -(-NUM_SINKS // size))
        if begin < end:
            self.pool.release(request.pages[begin:end], keep=self.policy.keep_finished)
            request.pages[begin:end] = [0] * (end - begin)
            request.num_unseen = end
            request.num_in_run = 0

    def _register_full_pages(self, request: Request) -> None:
        size = self.pool.page_size
        for index in range(request.num_registered, request.num_computed // size):
            previous = request.pages[index - 1] if index else None
            self.pool.register(request.pages[index], previous, request.tokens[index * size : (index + 1) * size])
            request.num_registered = index + 1

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)
