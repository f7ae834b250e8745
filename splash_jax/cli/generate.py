"""`splash generate`: prompts in, text out."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from splash_jax.cli.process import do_all, prepare_process
from splash_jax.cli.values import (
    byte_size,
    check_targets,
    mesh_and_ranks,
    model_path,
    switch_steps,
    write_json,
)
from splash_jax.errors import SplashError
from splash_jax.files import read_text
from splash_jax.progress import STDERR, progress_report

if TYPE_CHECKING:
    from splash_jax import LLM, RequestOutput, SamplingParams


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or `small` for the embedded model.")],
    prompt: Annotated[list[str] | None, Option(help="A prompt; repeatable.")] = None,
    prompts_file: Annotated[
        Path | None, Option(help="A UTF-8 file with one prompt per line; empty lines are skipped.")
    ] = None,
    chat: Annotated[bool, Option("--chat", help="Render prompts with the model's chat template.")] = False,
    layout: Annotated[str, Option(help="Layout to start in: tp, dp, cp, dop, dcp, rep or node=dop,chip=cp.")] = "tp",
    num_devices: Annotated[
        int | None, Option("--num-devices", "-T", min=1, help="Devices; virtual ones on CPU. Default: --mesh's, or 1.")
    ] = None,
    mesh: Annotated[str | None, Option(metavar="AXES", help="Axes of the devices, e.g. node=2,chip=4.")] = None,
    switch: Annotated[
        list[str] | None,
        Option(
            metavar="STEP:LAYOUT[:MODE]",
            help="Switch inside this step, or as MODE says: spread (over the steps from it on), blocking; repeatable.",
        ),
    ] = None,
    max_tokens: Annotated[int, Option(help="Tokens to generate per sample.")] = 64,
    temperature: Annotated[float, Option(help="0: greedy.")] = 1.0,
    top_p: Annotated[float, Option()] = 1.0,
    top_k: Annotated[int, Option(help="0: no limit.")] = 0,
    min_p: Annotated[float, Option()] = 0.0,
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.")] = None,
    n: Annotated[int, Option("--n", help="Samples per prompt.")] = 1,
    stop: Annotated[list[str] | None, Option(help="Text that ends a sample; repeatable.")] = None,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after the end of a text.")] = False,
    logprobs: Annotated[int | None, Option(help="Show each token's log-probability and so many alternatives.")] = None,
    max_model_len: Annotated[int | None, Option(help="Context length; default: the model's.")] = None,
    max_num_seqs: Annotated[int | None, Option(min=1, help="Requests that run at once; default: up to 16.")] = None,
    device_memory_bytes: Annotated[str | None, Option(metavar="SIZE", help="Per device, e.g. 64M or 1G.")] = None,
    dtype: Annotated[str, Option(help="auto, float32 or bfloat16.")] = "auto",
    json: Annotated[Path | None, Option("--json", metavar="FILE", help="Write results as JSON; - is stdout.")] = None,
) -> None:
    """Complete prompts, on any number of devices, switching the layout where asked to."""
    prompts = _read_prompts(prompt or [], prompts_file)
    switches = switch_steps(switch or [])
    check_targets(json=json, reads=[prompts_file])
    budget = None if device_memory_bytes is None else byte_size(device_memory_bytes)
    axes, ranks = mesh_and_ranks(mesh, num_devices)
    prepare_process(ranks)
    from splash_jax import SamplingParams

    params = SamplingParams(
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop or None,
        ignore_eos=ignore_eos, max_tokens=max_tokens, logprobs=logprobs,
    )  # fmt: skip
    seqs = max_num_seqs or min(16, len(prompts) * n)
    llm = _start(
        model_path(model), layout, switches, num_devices=ranks, mesh=axes, max_model_len=max_model_len,
        max_num_seqs=seqs, device_memory_bytes=budget, dtype=dtype,
    )  # fmt: skip
    began = perf_counter()
    unmade: SplashError | None = None
    try:
        outputs = _complete(llm, prompts, chat, params, switches)
    except SplashError as error:
        if error.outputs is None:
            raise
        outputs, unmade = error.outputs, error
    seconds = perf_counter() - began
    do_all(
        lambda: None if json is None else write_json(json, _as_json(llm, outputs, seconds)),
        lambda: None if str(json) == "-" else _print_texts(outputs),
        lambda: STDERR.print(_summary(llm, outputs, switches, seconds), soft_wrap=True, markup=False),
    )
    if unmade is not None:
        raise unmade


def _read_prompts(given: list[str], file: Path | None) -> list[str]:
    if bool(given) == (file is not None):
        raise typer.BadParameter("give prompts with --prompt (repeatable) or with --prompts-file, one of the two.")
    if file is None:
        return given
    prompts = [line for line in read_text(file).split("\n") if line.strip()]
    if not prompts:
        raise typer.BadParameter(f"{file} has no line with text.", param_hint="--prompts-file")
    return prompts


def _start(model: Path, layout: str, switches: Mapping[int, tuple[str, str]], **settings: Any) -> "LLM":
    """An engine with the programs of this call only: its layouts, its switches, their modes."""
    from splash_jax import LLM

    path = [layout, *(name for name, _ in switches.values())]
    modes = tuple(dict.fromkeys(mode for _, mode in switches.values())) or ("splash",)
    directions = tuple(dict.fromkeys((a, b) for a, b in pairwise(path) if a != b))
    with progress_report() as progress:
        return LLM(
            model, layout=layout, layouts=tuple(dict.fromkeys(path)), directions=directions, switch_modes=modes,
            penalties=False, scoring=False, decode_buckets=(settings["max_num_seqs"],), progress=progress, **settings,
        )  # fmt: skip


def _complete(
    llm: "LLM", prompts: list[str], chat: bool, params: "SamplingParams", switches: Mapping[int, tuple[str, str]]
) -> "list[RequestOutput]":
    if chat:
        return llm.chat([[{"role": "user", "content": text}] for text in prompts], params, switches=switches)
    return llm.generate(prompts, params, switches=switches)


def _print_texts(outputs: "list[RequestOutput]") -> None:
    samples = [(request, output) for request in outputs for output in request.outputs]
    for request, output in samples:
        if len(samples) > 1:
            of = f".{output.index}" if len(request.outputs) > 1 else ""
            typer.echo(f"--- {request.request_id}{of} ({output.finish_reason})")
        typer.echo(output.text)
        for token, values in zip(output.token_ids, output.logprobs or (), strict=False):
            others = "  ".join(f"{v.decoded_token!r} {v.logprob:.4f}" for i, v in values.items() if i != token)
            drawn = values[token]
            typer.echo(f"  {drawn.decoded_token!r:<16} {drawn.logprob:9.4f}  {others}".rstrip())


def _as_json(llm: "LLM", outputs: "list[RequestOutput]", seconds: float) -> dict[str, Any]:
    return {
        "outputs": [asdict(output) for output in outputs],
        "steps": len(llm.records),
        "seconds": seconds,
        "switches": [{"step": r.step} | r.switch.summary() for r in llm.records if r.switch is not None],
    }


def _summary(llm: "LLM", outputs: "list[RequestOutput]", switches: Iterable[int], seconds: float) -> str:
    tokens = sum(len(sample.token_ids) for request in outputs for sample in request.outputs)
    done = [r for r in llm.records if r.switch is not None]
    told = "".join(f", {r.switch.before.layout} -> {r.layout} in step {r.step}" for r in done if r.switch)
    late = [step for step in switches if step >= len(llm.records)]
    missed = f"; no step {', '.join(map(str, late))} came, so no switch there" if late else ""
    switched = f"{len(done)} switch{'' if len(done) == 1 else 'es'}"
    return f"{tokens} tokens in {len(llm.records)} steps and {seconds:.1f} s; {switched}{told}{missed}"
