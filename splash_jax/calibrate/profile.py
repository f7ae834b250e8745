"""A hardware profile as the text of its TOML file."""

import json
from datetime import date

from splash_jax.calibrate.calibrate import Calibration

NUMBERS = (
    "hbm_bytes", "hbm_bytes_per_s", "bf16_flops_per_s", "interconnect_bytes_per_s", "message_latency_s",
    "kv_bytes_per_s", "attention_flops_per_s", "step_overhead_s",
)  # fmt: skip


def profile_toml(found: Calibration) -> str:
    """The file that `splash_jax.cost.load_hardware` reads."""
    hardware, fit = found.hardware, found.fit
    lines = [
        f"# Measured by `splash calibrate` on {date.today().isoformat()}: {len(found.measured)} steps' medians, median "
        f"error {fit.median_error:.1%},",
        f"# worst {fit.worst_error:.1%} ({fit.worst.layout}, {len(fit.worst.load)} requests); steps vary by "
        f"{fit.noise:.1%} themselves.",
        "",
        f"name = {_quoted(hardware.name)}",
        f"ranks_share_device = {str(hardware.ranks_share_device).lower()}",
        "",
        *(f"{key} = {getattr(hardware, key):.6g}" for key in NUMBERS),
        "",
        "[provenance]",
        *(f"{key} = {_quoted(hardware.provenance[key])}" for key in NUMBERS),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A basic string of TOML: JSON's, but that it takes no halves of characters, and DEL only by its number."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
