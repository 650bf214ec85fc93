"""The part of an autoregressive engine on vLLM that schedules, runs and draws; text is told as by any other.

session ─► LLMEngine.add_request ─► [vLLM: waits, prompt in chunks, a token a step] ─► TextWriter ─► deltas
                                        └─ hidden states of wanted rows ─► session
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from tritone.engines.base import PREFILL, QUEUED, Delta
from tritone.engines.text_writer import TextSession, TextWriter
from tritone.engines.vllm.request import EXTRA, RunnerRequest, TappedRows
from tritone.engines.vllm.warm_up import warm_up
from tritone.errors import InvalidRequest, TritoneError
from tritone.sampling import Sampling

LEAST_TEMPERATURE = 0.01  # vLLM raises what is between 0 and it, and warns of that request by request

T = TypeVar("T", bound=TextSession)


class VllmTextEngine(TextWriter[T], Generic[T]):
    """Sessions whose tokens vLLM draws. `_llm` is its LLMEngine."""

    def _draw_with(self, llm: Any) -> None:
        """To be called once, before the first session."""
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._llm, self._params, self._delta_kind = llm, SamplingParams, RequestOutputKind.DELTA
        self._refusals = (ValueError, VLLMValidationError)  # of requests; one is the other before 0.32
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._requests: dict[str, RunnerRequest] = {}  # of sessions that vLLM has
        self._is_spoilt = False  # a step has failed, and its rows may be in the caches

    def _warm_up(self) -> None:
        """Have vLLM compile all that it compiles in a step. Before the first session."""
        options = self._slot_options
        rows = options.max_slots + options.prefill_chunk_tokens
        warm_up(self._llm, self._params, rows, options.max_slots, options.max_context_tokens)

    # -- the interface --------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        deltas = super().step()
        if not self._llm.has_unfinished_requests():
            return deltas
        if self._is_spoilt:
            self._empty_caches()
        self._is_spoilt = True
        outputs = self._llm.step()
        self._is_spoilt = False
        self._counts["steps"] += 1
        self._take_tapped()
        return [*deltas, *self._take_begun(), *self._take_wrong(), *self._take_drawn(outputs)]

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._llm.has_unfinished_requests())

    def abort(self, session: str) -> None:
        super().abort(session)
        if self._requests.pop(session, None) is not None:
            self._llm.abort_request([session])

    def stats(self) -> dict[str, int | float]:
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        return {
            **super().stats(),
            "running": running,
            "waiting": waiting,
            "kv_tokens": (scheduler.blocks - scheduler.free_blocks) * scheduler.cache_config.block_size,
            "kv_capacity_tokens": scheduler.blocks * scheduler.cache_config.block_size,
        }

    def close(self) -> None:
        """Let go of vLLM's workers and their memory."""
        self._llm.engine_core.shutdown()

    def check_integrity(self) -> None:
        """AssertionError unless sessions and vLLM's requests agree, and nobody holds blocks of the cache."""
        assert not self._scheduler.begun and not self._scheduler.tapped and not self._scheduler.wrong
        assert self._requests.keys() <= self._sessions.keys()
        if not self._sessions:
            assert not self._llm.has_unfinished_requests()
            assert self._scheduler.free_blocks == self._scheduler.blocks

    # -- for subclasses -------------------------------------------------------------------------------------

    @abstractmethod
    def _prompt_input(self, session: T) -> Mapping[str, Any]:
        """What vLLM takes for the prompt of a session; see media.py."""

    @abstractmethod
    def _runner_request(self, session: T) -> RunnerRequest:
        """What goes along to the runner."""

    @abstractmethod
    def _take_rows(self, session: T, tapped: TappedRows) -> None:
        """Hidden states of wanted rows; they come again where vLLM computes rows anew."""

    def _has_rows(self, session: T) -> bool:
        """All wanted rows have come; else the prompt is read again, from none of what the cache holds."""
        return True

    def _begun(self, session: T) -> list[Delta]:
        """What there is to say when a session gets its turn."""
        return []

    def _queue(self, session: T) -> None:
        """Hand a session that has its prompt to vLLM. InvalidRequest if vLLM does not take it."""
        self._requests[session.id] = self._runner_request(session)
        session.ready_s = time.monotonic()
        self.note_phase(session.id, QUEUED)
        self._submit(session)

    def _submit(self, session: T, from_cache: bool = True) -> None:
        try:
            settings = self._settings(session, from_cache)
            self._llm.add_request(session.id, self._prompt_input(session), settings)
        except self._refusals as fault:
            del self._requests[session.id]
            said = str(fault.args[0]).rstrip(".")
            raise InvalidRequest(f"vLLM does not take the request: {said}", "change its settings") from None

    def _settings(self, session: T, from_cache: bool) -> Any:
        """A session's SamplingParams."""
        sampling = session.sampling
        most = min(sampling.max_tokens, self._slot_options.max_context_tokens - session.prompt_tokens)
        return self._params(
            **_given(sampling),
            max_tokens=most,
            min_tokens=min(sampling.min_tokens, most),
            ignore_eos=True,  # which ids end an answer is said by the next line alone
            stop_token_ids=[] if sampling.ignore_eos else sorted(self._eos_ids),
            detokenize=False,
            output_kind=self._delta_kind,
            skip_reading_prefix_cache=not from_cache,
            extra_args={EXTRA: self._requests[session.id]},
        )

    # -- inside a step --------------------------------------------------------------------------------------

    def _empty_caches(self) -> None:
        """After a step that failed, whose sessions have been aborted.

        vLLM enters rows into its caches when it schedules them: what was never computed would be taken for
        the beginning of later prompts.
        """
        self._scheduler.forget()
        if not self._llm.reset_prefix_cache():
            raise TritoneError("vLLM does not give up the rows of a step that failed", "see the server log")
        self._llm.reset_encoder_cache()

    def _take_begun(self) -> list[Delta]:
        """Note the sessions whose prompt vLLM has begun to read."""
        begun, self._scheduler.begun = self._scheduler.begun, []
        deltas: list[Delta] = []
        for name, cached_tokens in begun:
            session = self._sessions.get(name)
            if session is None:
                continue
            session.cached_tokens = cached_tokens
            if not session.started_s:  # else it begins again, for rows that the cache had spared
                session.started_s = time.monotonic()
                self.note_phase(name, PREFILL)
                self._counts["prompt_tokens"] += session.prompt_tokens
                self._counts["cached_tokens"] += cached_tokens
                deltas += self._begun(session)
        return deltas

    def _take_tapped(self) -> None:
        """Give sessions the rows that came with a step."""
        tapped, self._scheduler.tapped = self._scheduler.tapped, []
        for rows in tapped:
            session = self._sessions.get(rows.session)
            if session is not None:
                self._take_rows(session, rows)

    def _take_wrong(self) -> list[Delta]:
        """End the sessions whose scores are not numbers; what was drawn from them is not told."""
        wrong, self._scheduler.wrong = self._scheduler.wrong, []
        deltas: list[Delta] = []
        for name in wrong:
            session = self._sessions.get(name)
            if session is not None:
                deltas.append(self._not_drawn(session))
                self.abort(name)
        return deltas

    def _take_drawn(self, outputs: list[Any]) -> list[Delta]:
        """Tell the text of the tokens that came with a step."""
        deltas: list[Delta] = []
        for output in outputs:
            session = self._sessions.get(output.request_id)
            if session is None:
                continue
            if session.completion_tokens == 0 and not self._has_rows(session):
                self._llm.abort_request([session.id])
                self._submit(session, from_cache=False)
                continue
            deltas += self._told_all(session, output.outputs[0].token_ids)
            if output.finished and self._sessions.pop(output.request_id, None) is not None:
                del self._requests[output.request_id]
                reason = output.outputs[0].finish_reason
                fault = TritoneError(f"vLLM gave the request up ({reason})", "see the server log")
                deltas.append(Delta(output.request_id, error=fault))
        return deltas

    def _told_all(self, session: T, tokens: Sequence[int]) -> list[Delta]:
        """What there is to say of tokens; none after the one that ends the answer."""
        deltas: list[Delta] = []
        for token in tokens:
            delta = self._told(session, token)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self.abort(session.id)
                    break
        return deltas


def _given(sampling: Sampling) -> dict[str, Any]:
    """The settings that mean the same to vLLM."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(sampling, name) for name in names}
    return given if sampling.temperature >= LEAST_TEMPERATURE else {**given, "temperature": 0.0}
