"""The picture of the architecture, as a test.

A room is a folder (or a lone module) of splash_jax. An arrow may only go where the picture has one, wherever
the import stands: inside a function or under TYPE_CHECKING it is still an arrow. Modules are discovered.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("splash_jax", "pallas_kernels")

# From the bottom of the house upwards. Every room may import itself, and every room of splash_jax `errors`.
MAY_IMPORT = {
    "errors": set(),
    "configs": set(),
    "platforms": set(),
    "progress": set(),
    "host": set(),
    "files": set(),
    "fields": {"files"},
    "pallas_kernels": set(),
    "ownership": set(),
    "cost": {"ownership", "configs", "files", "fields"},
    "kv": {"ownership"},
    "scheduler": {"ownership", "kv", "cost"},
    "simulate": {"ownership", "kv", "scheduler", "cost", "configs", "files", "fields"},
    "layouts": {"ownership"},
    "models": set(),
    "runtime": {"layouts", "models", "kv", "ownership", "pallas_kernels"},
    "engine": {"runtime", "scheduler", "cost", "configs", "models", "layouts", "kv", "ownership", "platforms", "host"},
}
MAY_IMPORT["preflight"] = set(MAY_IMPORT)  # asks every room what it would do on a machine that is not here
MAY_IMPORT["calibrate"] = set(MAY_IMPORT)  # measures an engine
MAY_IMPORT["api"] = set(MAY_IMPORT)  # whatever is below it
MAY_IMPORT["splash_jax"] = set(MAY_IMPORT)  # the package's front door: re-exports the api
MAY_IMPORT["cli"] = set(MAY_IMPORT)

# Replays a week of traffic on a laptop: no device, no JAX, nor anything that brings it.
NO_JAX = {"configs", "host", "files", "fields", "ownership", "cost", "scheduler", "kv", "simulate"}
BUT_MAY_JAX = {"splash_jax.kv.store"}  # the device half of kv
JAX_AND_KIN = {"jax", "jaxlib", "flax", "optax", "orbax", "pallas_kernels"}

MAX_LINES = 500


def discover() -> dict[str, Path]:
    """Every module of the two packages: dotted name -> file."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = discover()
# ... and the folders they lie in, which can be imported too, with or without an __init__.py
PLACES = {module.rsplit(".", up)[0] for module in MODULES for up in range(module.count(".") + 1)}
EVERY_MODULE = pytest.mark.parametrize("module", MODULES)


def room_of(module: str) -> str:
    package, *inside = module.split(".")
    if package == "pallas_kernels" or not inside:
        return package
    return "cli" if inside[0] == "__main__" else inside[0]


def imports_of(module: str) -> set[tuple[str, int]]:
    """(dotted name, line) of each import; `from a import b` is a.b where that is one of PLACES, else a."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add((inner if inner in PLACES else base, node.lineno))
    return found


def run_python(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints; the test fails with its words if it does not end well."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_picture_has_no_cycles():
    def below(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"the arrows run in a circle: {' -> '.join([*path, room])}"
        for other in MAY_IMPORT[room]:
            below(other, (*path, room))

    for room in MAY_IMPORT:
        below(room, ())


@EVERY_MODULE
def test_every_module_is_in_a_drawn_room(module):
    assert room_of(module) in MAY_IMPORT, (
        f"{module} is in no room of the picture: move it into one, or draw '{room_of(module)}' in MAY_IMPORT."
    )


@EVERY_MODULE
def test_a_room_imports_only_what_the_picture_allows(module):
    room = room_of(module)
    common = {"errors"} if module.startswith("splash_jax") else set()
    allowed = MAY_IMPORT.get(room, set()) | common | {room}
    uphill = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}; {room} may only import {sorted(allowed)}"
        for name, line in sorted(imports_of(module))
        if name.split(".")[0] in PACKAGES and room_of(name) not in allowed
    ]
    assert not uphill, "\n".join(uphill)


@EVERY_MODULE
def test_rooms_without_jax_do_not_name_it(module):
    if room_of(module) in NO_JAX and module not in BUT_MAY_JAX:
        named = {name: line for name, line in imports_of(module) if name.split(".")[0] in JAX_AND_KIN}
        assert not named, f"{module} is in a room that imports no JAX, but imports (at line) {named}"


@EVERY_MODULE
def test_a_module_fits_in_a_sitting(module):
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{module} has {lines} lines, more than {MAX_LINES}: is it still one thing?"


IMPORT_WITHOUT_JAX = """
import importlib, json, sys, traceback

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in forbidden:
            raise ImportError(f"{name} is forbidden here")

forbidden, modules = json.loads(sys.argv[1])
sys.meta_path.insert(0, Forbid())
failed = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError:
        failed[module] = traceback.format_exc()
print(json.dumps(failed))
"""


def test_rooms_without_jax_import_where_there_is_none():
    modules = [module for module in MODULES if room_of(module) in NO_JAX and module not in BUT_MAY_JAX]
    failed = json.loads(run_python(IMPORT_WITHOUT_JAX, json.dumps([sorted(JAX_AND_KIN), modules])))
    assert not failed, "\n".join(f"{module}:\n{trace}" for module, trace in failed.items())


IMPORT_AND_LOOK_FOR_DEVICES = """
import importlib, json, sys

for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        print(module)
        break
"""


@pytest.mark.parametrize("modules", [["splash_jax"], list(MODULES)], ids=["splash_jax", "every module"])
def test_importing_initialises_no_device(modules):
    # else the number of devices could no longer be chosen, and no process could join a multi-host run
    guilty = run_python(IMPORT_AND_LOOK_FOR_DEVICES, json.dumps(modules)).strip()
    assert not guilty, f"importing {guilty} initialises a device: build arrays in functions, not at import."
