"""Offline inference: prompts in, completions out, on a mesh whose attention layout may change while they run."""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax
import numpy as np

from splash_jax.api.outputs import CompletionOutput, Logprob, RequestOutput
from splash_jax.cost import Load, ServedModel, SwitchQuote, load_hardware, quote_switch
from splash_jax.engine import Engine, EngineConfig, Records, StepRecord
from splash_jax.engine.config import mesh_ranks
from splash_jax.errors import ConfigError, LayoutError, PolicyError, RequestError, SplashError
from splash_jax.kv import filled_pool
from splash_jax.ownership import SwitchPlan
from splash_jax.progress import Report, progress_report
from splash_jax.scheduler import PolicyConfig, Request, SamplingParams, Status, plain

Prompt = str | Sequence[int]
Message = Mapping[str, str]
Move = str | tuple[str, str]  # a layout, or a layout and how to switch to it


class LLM:
    """A model served on `num_devices` devices.

    Args:
      model: a Hugging Face checkpoint directory of the DeepSeek-V3 family.
      num_devices: ranks of the attention mesh, T; must divide the attention heads. None: what `mesh` has, or 1.
      mesh: its axes and their sizes, such as {"node": 2, "chip": 4}. None: a single axis.
      layout: what it starts in: a role for every axis ("tp", "dp", "cp", "dop", "dcp", "rep"), or one role for each,
        such as "node=dop,chip=cp". "auto": the policy chooses before every step, by `hardware`'s profile.
      progress: True: bars on stderr while weights load and programs compile, or lines where it is no terminal. False:
        nothing. Or what is called instead, as progress(what, done, in_all).
      **settings: the fields of `EngineConfig`.

    Numbers may be numpy's or JAX's. What the process has set in JAX (64 bits, guards, debugging, a mesh) is set aside
    while an engine works; the few flags that cannot be are refused by name.

    Raises the errors of `splash_jax.errors`, before any device memory is taken.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num_devices: int | None = None,
        mesh: Mapping[str, int] | None = None,
        layout: str = "tp",
        progress: Report | bool = True,
        **settings: Any,
    ) -> None:
        ranks = mesh_ranks(mesh) if num_devices is None else num_devices
        _check_names(settings)
        model = Path(model) if isinstance(model, str | os.PathLike) else model
        config = EngineConfig(model=model, num_devices=ranks, mesh=mesh, layout=layout, **settings)
        with progress_report() if progress is True else nullcontext(progress or None) as report:
            self.engine = Engine(config, report)
        self._serial = itertools.count()

    @property
    def layout(self) -> str:
        """The layout of the next step."""
        return str(self.engine.layout)

    @property
    def records(self) -> Records:
        """What every step so far did: `records[n:]` since there were n. The latest 65,536 are kept."""
        return self.engine.records

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        switches: Mapping[int, Move] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), in order.

        A request ends with finish_reason "length" at its `max_tokens`, or where prompt and output fill the context
        `max_model_len`, whichever comes first: `max_tokens` beyond it is cut, as vLLM's `LLM` does. A request whose own
        fault it is that it cannot go on ends with "error" and says why in `error`; the others are completed.

        `switches` maps a step of this call, from 0, to the layout that it and later steps run in: the switch
        happens inside that step. A pair such as `("dp", "spread")` also says how; see `switch`. Steps are those that
        this call drives, and one that never comes, because all requests ended before it, makes no switch. `on_step` is
        called with the record of every step whose results were read.

        Raises `RequestError` for a prompt or setting that cannot be served, and `LayoutError` for an unknown layout:
        nothing is queued then. When a switch could not be made, its `SwitchRefused` (or `LayoutError`, where the engine
        was not built for that direction) comes after all requests are done and carries them as `outputs`. Raises
        `EngineFailed` when a step raised in its middle: all requests of the engine have ended then.
        """
        switches = self._check_switches(switches)
        texts = _prompt_list(prompts)
        params = _per_prompt(sampling_params, len(texts))
        for text, each in zip(texts, params, strict=True):
            if isinstance(text, str) and each.resumed_tokens:
                raise RequestError(
                    f"resumed_tokens {each.resumed_tokens} counts token ids at the end of the prompt: send the prompt "
                    f"and the output so far as ids; text may be cut into others."
                )
        ids = [self._encode(text) for text in texts]
        groups = self._queue(ids, params)
        refusal = self._run([request for group in groups for request in group], switches, on_step)
        outputs = [self._output(text, group, p) for text, group, p in zip(texts, groups, params, strict=True)]
        if refusal is not None:
            refusal.outputs = outputs
            raise refusal
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        switches: Mapping[int, Move] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one conversation or several, rendered with the checkpoint's own chat template.

        Raises what `generate` raises, and `RequestError` for messages that the template does not take.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer; leave skip_tokenizer_init at False.")
        conversations: Any = _conversations(messages)
        ids = [tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self.generate(ids, sampling_params, switches=switches, on_step=on_step)

    def logits(self, token_ids: Sequence[int], *, switches: Mapping[int, Move] | None = None) -> np.ndarray:
        """Logits after each of the given tokens, f32[len, vocab], computed by the serving path: chunked and paged.

        Raises what `generate` raises; `RequestError` too where the engine was built without `scoring`.
        """
        switches = self._check_switches(switches)
        request = self.engine.add_request(
            self._name(), _listed(token_ids, "logits are of a list of token ids"), SamplingParams(), score=True
        )
        refusal = self._run([request], switches, None)
        rows = self._take_logits(request)
        if refusal is not None:
            raise refusal
        return rows

    def plan(self, src: str | None = None, dst: str = "tp", *, tokens: Sequence[int] | None = None) -> SwitchPlan:
        """The plan of a switch, carried out by nobody.

        Of what is live now, seen from `src` (default: the present layout); or, with `tokens`, of requests that hold so
        many tokens each, owners dealt round-robin. Raises `SwitchRefused` when it does not fit, `RequestError` for
        requests that the source has no room for, and `LayoutError` for an unknown layout.
        """
        engine = self.engine
        source = engine.layout if src is None else engine.allowed_layout(src)
        target = engine.allowed_layout(dst)
        if tokens is not None:
            counts, blueprint = _counts(tokens, engine.max_model_len), engine.blueprint
            pool = filled_pool(source, blueprint.shapes.kv, blueprint.pages[source], counts)
            return engine.plan(target, pool.manifest())
        return engine.plan(target, None if source == engine.layout else engine.plan(source).after)

    def quote(
        self, dst: str, *, hardware: str | Path, src: str | None = None, tokens: Sequence[int] | None = None
    ) -> SwitchQuote:
        """What the switch of `plan` would add to a decode step on `hardware`: in one step (Eq. 7), and spread.

        `hardware` is a name in `configs/hardware`, or a TOML file like those. Raises what `plan` raises, and
        `ConfigError` for a profile that is not there or not right.
        """
        blueprint, chip = self.engine.blueprint, load_hardware(hardware)
        plan = self.plan(src, dst, tokens=tokens)
        requests = plan.before.requests.values()
        context = np.array([request.num_tokens + 1 for request in requests], np.int64)
        home = np.array([request.home for request in requests], np.int64)
        model = ServedModel.of(blueprint.model, blueprint.shapes.dtype)
        return quote_switch(
            model, plan.before.layout, plan.after.layout, Load(context, np.ones_like(context), home), chip
        )

    def switch(self, dst: str, *, mode: str = "splash") -> SwitchPlan:
        """Switch to `dst` at the next step boundary, from any thread; returns the plan carried out.

        `mode` is "splash", inside the step; "spread", over several ordinary steps (where the engine was built with it
        in `switch_modes`); or "blocking", all state before the step. Outputs do not depend on it. Requests that run
        keep running. Raises `SwitchRefused`, with nothing changed, when it does not fit; `LayoutError` for a layout,
        mode or direction that the engine was not built for; and `EngineFailed` when a step raised in its middle.
        """
        future = self.engine.request_switch(dst, mode)
        self._drive(lambda: not future.done())
        self._settle()
        return future.result()

    def set_policy(self, **changes: Any) -> None:
        """Change fields of the policy of an engine with layout "auto", from the next step on.

        `pin="cp"` goes there and stays, `pin=None` lets go; `allowed=("tp", "dp")` narrows the choice. Raises
        `PolicyError` for what cannot be meant, `LayoutError` where the engine has no policy or not this layout.
        """
        pilot = self.engine.pilot
        if pilot is None:
            raise LayoutError(f"this engine stays in {self.layout} until it is switched; build it with layout='auto'.")
        for name in (changes.get("pin"), *(changes.get("allowed") or ())):
            if name is not None:
                self.engine.allowed_layout(name)
        if unknown := sorted(set(changes) - set(PolicyConfig.__slots__)):
            raise PolicyError(f"a policy has no {', '.join(unknown)}; it has {', '.join(PolicyConfig.__slots__)}.")
        pilot.policy = replace(pilot.policy, **changes)

    def _check_switches(self, switches: Mapping[int, Move] | None) -> dict[int, Move]:
        if switches is not None and not isinstance(switches, Mapping):
            raise RequestError(f"switches maps steps to layouts, like {{16: 'cp'}}; got {switches!r:.200}.")
        checked = {plain(step): name for step, name in (switches or {}).items()}
        for step, name in checked.items():
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise RequestError(f"switches maps steps, whole numbers from 0, to layouts; got step {step!r}.")
            self.engine.allowed_switch(*_move(name))
        return checked

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _ids(prompt)
        if self.engine.tokenizer is None:
            raise RequestError("text prompts need a tokenizer; pass token ids or skip_tokenizer_init=False.")
        return self.engine.tokenizer.encode(prompt)

    def _name(self) -> str:
        return next(name for name in map(str, self._serial) if not self.engine.knows(name))

    def _queue(self, ids: list[list[int]], params: list[SamplingParams]) -> list[list[Request]]:
        """Queue every sample of every prompt, or none of them."""
        groups: list[list[Request]] = []
        try:
            for prompt, setting in zip(ids, params, strict=True):
                name, group = self._name(), []
                groups.append(group)
                for sample in range(setting.n):
                    own = name if setting.n == 1 else f"{name}-{sample}"
                    seed = group[0].seed if group else None
                    group.append(self.engine.add_request(own, prompt, setting, sample=sample, seed=seed))
        except RequestError as error:
            self._drop(request for group in groups for request in group)
            if len(ids) == 1:
                raise
            raise RequestError(f"prompts[{len(groups) - 1}]: {error}") from error
        except BaseException:
            self._drop(request for group in groups for request in group)
            raise
        return groups

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.engine.drop(request.name)

    def _run(
        self,
        requests: list[Request],
        switches: dict[int, Move],
        on_step: Callable[[StepRecord], None] | None,
    ) -> SplashError | None:
        """Drive requests to their ends; the first reason why one of their switches was not made, if any.

        Whatever interrupts it, no request is left running.
        """
        pending = dict(switches)
        futures, seen, step = [], len(self.engine.records), 0
        try:
            while any(request.status is not Status.FINISHED for request in requests):
                if step in pending:
                    futures.append(self.engine.request_switch(*_move(pending.pop(step))))
                self.engine.step()
                step += 1
                if on_step:
                    for record in self.engine.records[seen:]:
                        on_step(record)
                    seen = len(self.engine.records)
            self._drive(lambda: not all(future.done() for future in futures))
            self._settle()
            if any(request.error for request in requests):
                self.engine.raise_if_failed()
        except BaseException:
            self._drop(requests)
            raise
        errors = (future.exception() for future in futures)
        return next((error for error in errors if isinstance(error, SplashError)), None)

    def _settle(self) -> None:
        """Read what is in flight, unless there are requests that someone else drives."""
        self._drive(lambda: self.engine.busy and not self.engine.scheduler.unfinished)

    def _drive(self, condition: Callable[[], bool]) -> None:
        while condition():
            self.engine.step()

    def _take_logits(self, request: Request) -> np.ndarray:
        _, _, rows = self.engine.take(request.name)
        if rows is None or request.finish_reason != "stop":  # rows of a part of it, perhaps
            raise RequestError(
                request.error or f"request {request.name} ended with {request.finish_reason} before it was scored."
            )
        return rows

    def _output(self, prompt: Prompt, group: list[Request], params: SamplingParams) -> RequestOutput:
        outputs = []
        for request in group:
            _, text, _ = self.engine.take(request.name)
            outputs.append(
                CompletionOutput(
                    index=request.sample,
                    text=text,
                    token_ids=tuple(request.output_ids),
                    cumulative_logprob=sum(p for p, _ in request.logprobs) if request.logprobs else None,
                    logprobs=self._logprobs(request) if params.logprobs is not None else None,
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason,
                )
            )
        return RequestOutput(
            request_id=group[0].name if len(group) == 1 else group[0].name.rsplit("-", 1)[0],
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(group[0].prompt_ids),
            outputs=tuple(outputs),
            error=next((r.error for r in group if r.error), None),
            num_preemptions=sum(r.preemptions for r in group),
        )

    def _logprobs(self, request: Request) -> tuple[dict[int, Logprob], ...]:
        decode = self.engine.tokenizer.decode if self.engine.tokenizer else None
        result = []
        for token, (own, top) in zip(request.output_ids, request.logprobs, strict=True):
            values: dict[int, tuple[float, int | None]] = {i: (p, rank) for rank, (i, p) in enumerate(top, 1)}
            values.setdefault(token, (own, None))
            result.append(
                {
                    i: Logprob(logprob=p, rank=rank, decoded_token=decode([i], False) if decode else None)
                    for i, (p, rank) in values.items()
                }
            )
        return tuple(result)


VLLM_NAMES = {
    "tensor_parallel_size": "num_devices, the ranks of the attention mesh",
    "data_parallel_size": "num_devices, with a role for them in layout",
    "decode_context_parallel_size": "num_devices, with a role for them in layout",
    "gpu_memory_utilization": "device_memory_bytes; by default most of what is free",
    "swap_space": "nothing: histories are computed again",
    "enforce_eager": "compile_ahead=False",
    "max_logprobs": "nothing: a request may ask for up to 20",
}


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a setting that there is not, with what it is called here or what is like it."""
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            hint = f"there are {', '.join(known)}."
            if name in VLLM_NAMES:
                hint = f"here that is {VLLM_NAMES[name]}."
            elif near := get_close_matches(name, known, 1):
                hint = f"did you mean {near[0]}?"
            raise ConfigError(f"there is no setting {name!r}; {hint}")


def _move(move: Move) -> tuple[str, str]:
    """A layout and how to switch to it."""
    if isinstance(move, tuple) and len(move) == 2:
        return move
    return move, "splash"  # type: ignore[return-value]


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    several = _listed(prompts, "prompts must be text, token ids, or a list of these")
    return [several] if several and isinstance(several[0], int) else several


def _ids(prompt: Any) -> list[int]:
    return _listed(prompt, "a prompt must be text or a list of token ids")


def _conversations(messages: Any) -> list[Any]:
    """One conversation or several, as a list."""
    several = _listed(messages, "messages must be a list of messages, or a list of such lists")
    if not several or isinstance(several[0], Mapping):
        return [several]
    return [_listed(each, "a conversation must be a list of messages") for each in several]


def _counts(tokens: Any, limit: int) -> list[int]:
    counts = _listed(tokens, "tokens must be a list of token counts")
    for place, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= limit:
            raise RequestError(
                f"tokens must be whole numbers from 1 to the context {limit}, got {count!r} at position {place}."
            )
    return counts


def _listed(value: Any, rule: str) -> list[Any]:
    """A sequence or an array as a list of Python values. Raises `RequestError`, which begins with `rule`."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim > 0:
        return np.asarray(value).tolist()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise RequestError(f"{rule}; got {type(value).__name__} {value!r:.200}.")
    return [plain(each) for each in value]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError(f"sampling_params must be one SamplingParams or a list of them; got {params!r:.200}.")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params were given for {count} prompts; give one, or one each.")
    return list(params)
