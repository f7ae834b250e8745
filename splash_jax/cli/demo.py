"""`splash demo`: one batch drains through all four layouts; what it cost and that no token changed."""

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from splash_jax.cli import scene as script
from splash_jax.cli.live import RunView
from splash_jax.cli.process import do_all, on_cpu, prepare_process
from splash_jax.cli.report import compare, print_decisions, print_proof, print_switches, print_texts, switch_costs
from splash_jax.cli.values import check_targets, make_folder, model_path, write_json
from splash_jax.host import processors
from splash_jax.progress import make_console, progress_report

if TYPE_CHECKING:
    from splash_jax import LLM, RequestOutput
    from splash_jax.cli.scene import Scene
    from splash_jax.engine import StepRecord

LARGEST = 1e-3  # difference of log-probabilities that the proof lets pass


def demo(
    num_devices: Annotated[int, Option("--num-devices", "-T", min=1, help="Devices; virtual ones on CPU.")] = 8,
    out: Annotated[Path, Option(help="Folder for run.png and run.json.")] = Path("splash_demo"),
    model: Annotated[str, Option(help="Checkpoint directory with a tokenizer.")] = "small",
    auto: Annotated[bool, Option("--auto", help="Let the policy choose the layouts instead of a script.")] = False,
    hardware: Annotated[
        str | None, Option(help="With --auto: a profile's name or TOML file (`splash calibrate`). Default: by device.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print run.json on stdout, all else on stderr.")] = False,
) -> None:
    """Drain a batch of 16 real prompts through dp, dop, tp, cp and back, and show what every switch did.

    With --auto, through the layouts that the policy chooses from the load.

    On a machine with accelerators: JAX_PLATFORMS=cpu splash demo.
    """
    began = perf_counter()
    console = make_console(stderr=json)
    if hardware is not None and not auto:
        raise typer.BadParameter("is the policy's profile; add --auto.", param_hint="--hardware")
    make_folder(out, "--out")
    for name in ("run.json", "run.png"):
        check_targets(out=out / name)
    prepare_process(num_devices)
    from splash_jax.cli.plots import draw_run

    route = "layouts as the policy chooses" if auto else f"layouts {' -> '.join(script.layouts())}"
    console.print(f"SPLASH demo: 16 prompts, {num_devices} devices, {route}.")
    settings = script.settings(num_devices) | (script.auto_settings(hardware) if auto else {})
    llm = _start(console, model_path(model), settings)
    ready = perf_counter() - began
    count = llm.engine.programs.compiled
    console.print(f"Ready after {ready:.0f} s with {count} programs; nothing compiles from here on. Warming them up.")
    warm = _warm_up(llm)
    scene = script.draw(llm)
    if auto:
        llm.set_policy(pin=None)
        console.print("\nThe live run: one batch; the policy is asked before every step.")
    else:
        console.print(f"\nThe live run: one batch, {len(scene.switches)} switches while its requests run.")
    outputs, records = _run(llm, scene, console, "live run", {} if auto else scene.switches)
    if auto:
        print_decisions(console, llm, len(records))
    costs = switch_costs(llm, records, warm)
    print_switches(console, costs, _place(num_devices))
    console.print(f"\nThe proof: the same prompts and seeds again, in {script.FIXED} from beginning to end.")
    _go_to(llm, script.FIXED)
    fixed, _ = _run(llm, scene, console, f"fixed {script.FIXED}", {})
    proof = compare(outputs, fixed)
    result = _as_json(num_devices, ready, records, costs, proof, scene, outputs)
    do_all(
        lambda: write_json(out / "run.json", result),
        lambda: draw_run(records, out / "run.png", num_devices),
        lambda: print_proof(console, proof, script.FIXED),
        lambda: print_texts(console, llm, scene, outputs),
        lambda: write_json(Path("-"), result) if json else None,
    )
    console.print(f"\nPicture of the run: {out / 'run.png'}  (data: {out / 'run.json'})", soft_wrap=True)
    console.print(f"Done after {perf_counter() - began:.0f} s.")
    if proof.largest > LARGEST or proof.equal < proof.tokens:
        raise typer.Exit(1)


def _start(console: Console, model: Path, settings: dict[str, Any]) -> "LLM":
    console.print("Loading and compiling (a minute or two; later runs find compiled programs).")
    from splash_jax import LLM

    with progress_report() as progress:
        return LLM(model, progress=progress, **settings)


def _warm_up(llm: "LLM") -> "list[StepRecord]":
    """Run every program, in every layout of the script, and end where it began. Returns the steps' records."""
    from splash_jax import SamplingParams

    seqs = llm.engine.config.max_num_seqs
    # More requests than may run at once: the later prompts join steps in which others decode, as a switch's step is.
    lengths = [3 + i // 2 for i in range(seqs)] + [2] * (seqs // 2)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, logprobs=0) for n in lengths]
    records = []
    for layout in script.layouts():
        _go_to(llm, layout)
        first = len(llm.records)
        llm.generate([[2 + i] * 8 for i in range(len(lengths))], params)
        records += llm.records[first + 1 :]  # the first one waits for the host as no later one does
    _go_to(llm, script.layouts()[0])
    return records


def _go_to(llm: "LLM", layout: str) -> None:
    """Switch to a layout, with nothing running, along the directions that are compiled; a policy stays there."""
    if llm.engine.pilot is not None:
        llm.set_policy(pin=layout)
    onward = dict(script.directions())
    while llm.layout != layout:
        llm.switch(layout if llm.engine.pilot is not None else onward[llm.layout])
    while llm.engine.busy:
        llm.engine.step()  # read the switch's own step, so that its record is no part of what comes next


def _run(
    llm: "LLM", scene: "Scene", console: Console, name: str, switches: dict[int, str]
) -> "tuple[list[RequestOutput], list[StepRecord]]":
    first = len(llm.records)
    with RunView(console, name, scene.tokens) as view:
        outputs = llm.generate(scene.token_ids, script.params(scene), switches=switches, on_step=view.step)
    return outputs, llm.records[first:]


def _place(num_devices: int) -> str:
    """Where times were measured, in words that keep them from being read as an accelerator's."""
    if on_cpu():
        return f"CPU times: {num_devices} virtual devices share {processors()} cores; they say nothing of accelerators"
    import jax

    return f"times on {num_devices} x {jax.devices()[0].device_kind}"


def _as_json(
    num_devices: int,
    ready: float,
    records: "list[StepRecord]",
    costs: list[Any],
    proof: Any,
    scene: "Scene",
    outputs: "list[RequestOutput]",
) -> dict[str, Any]:
    def step(record: "StepRecord") -> dict[str, Any]:
        names = [name for name in record.__slots__ if name != "switch"]
        plan = None if record.switch is None else record.switch.summary()
        return {name: getattr(record, name) for name in names} | {"switch": plan}

    return {
        "num_devices": num_devices,
        "times": _place(num_devices),
        "ready_seconds": ready,
        "switches": [asdict(cost) for cost in costs],
        "proof": asdict(proof) | {"fixed_layout": script.FIXED},
        "texts": [
            {"prompt": prompt, "text": output.outputs[0].text, "token_ids": list(output.outputs[0].token_ids)}
            for prompt, output in zip(scene.prompts, outputs, strict=True)
        ],
        "steps": [step(record) for record in records],
    }
