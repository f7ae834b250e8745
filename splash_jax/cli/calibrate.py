"""`splash calibrate`: the constants of the cost model, measured on the machine at hand."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typer import Option

from splash_jax.cli.process import do_all, prepare_process
from splash_jax.cli.values import check_targets, make_folder, model_path
from splash_jax.files import write_text
from splash_jax.progress import STDERR, progress_report

if TYPE_CHECKING:
    from splash_jax.calibrate import Calibration

UNITS = {
    "hbm_bytes_per_s": ("reading weights", 1e9, "GB/s"),
    "bf16_flops_per_s": ("products with weights", 1e9, "GFLOP/s"),
    "kv_bytes_per_s": ("reading histories", 1e9, "GB/s"),
    "attention_flops_per_s": ("attention", 1e9, "GFLOP/s"),
    "interconnect_bytes_per_s": ("received in collectives", 1e9, "GB/s"),
    "message_latency_s": ("a collective without payload", 1e-6, "us"),
    "step_overhead_s": ("a step, whatever is in it", 1e-3, "ms"),
}


def calibrate(
    model: Annotated[str, typer.Argument(help="Checkpoint whose steps are measured; `small` is embedded.")] = "small",
    num_devices: Annotated[int, Option("--num-devices", "-T", min=1, help="Ranks; virtual devices on CPU.")] = 8,
    name: Annotated[str, Option(help="Name of the profile.")] = "here",
    out: Annotated[Path | None, Option(metavar="FILE", help="Default: configs/hardware/NAME.toml.")] = None,
    layouts: Annotated[str, Option(help="Layouts to measure, as many as will be served.")] = "tp,dp,cp,dop",
    max_num_seqs: Annotated[int, Option(min=1, help="Requests of the largest step.")] = 16,
    dtype: Annotated[str, Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Measure memory, products, collectives and whole steps; fit the cost model's constants; write a profile."""
    target = out or Path("configs") / "hardware" / f"{name}.toml"
    if target.suffix != ".toml" or target.is_dir():
        raise typer.BadParameter(f"{target} is no .toml file; name one.", param_hint="--out")
    make_folder(target.parent, "--out")
    check_targets(out=target)
    prepare_process(num_devices)
    from splash_jax.calibrate import calibrate as measure
    from splash_jax.calibrate import profile_toml

    with progress_report() as progress:
        found = measure(
            model_path(model), num_devices=num_devices, layouts=tuple(layouts.split(",")), name=name, dtype=dtype,
            max_num_seqs=max_num_seqs, progress=progress,
        )  # fmt: skip
    do_all(lambda: write_text(target, profile_toml(found)), lambda: _print(found))
    typer.echo(f"written to {target}")


def _print(found: "Calibration") -> None:
    table = Table("", "microbenchmark", "fitted to steps", box=None, pad_edge=False)
    for key, (what, unit, named) in UNITS.items():
        alone = found.micro.get(key)
        before = "" if alone is None else f"{alone / unit:.4g} {named}"
        table.add_row(what, before, f"{getattr(found.hardware, key) / unit:.4g} {named}")
    STDERR.print(table)
    fit = found.fit
    STDERR.print(
        f"{len(found.measured)} steps measured in {found.seconds:.0f} s: predicted within {fit.median_error:.1%} "
        f"(median) and {fit.worst_error:.0%} (worst); they vary by {fit.noise:.1%} themselves.\n"
        f"The layout called fastest is {fit.regret:.1%} slower than the fastest on average, {fit.worst_regret:.0%} at "
        "most.",
        soft_wrap=True,
    )
