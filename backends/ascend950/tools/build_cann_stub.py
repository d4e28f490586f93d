"""Builds stand-in CANN libraries, so that torch_npu can be imported on a machine without CANN and without an NPU.

    python -m deepinfer_backends.ascend950.tools.build_cann_stub OUT_DIR

torch_npu links to Huawei's CANN runtime. The tool asks the installed wheel (nm, readelf) which libraries and symbols it lacks on this
machine, and compiles `cann_stub.c` plus one empty function for each of them. Nothing is downloaded and nothing is written outside
OUT_DIR. `stub.load(OUT_DIR)` or LD_LIBRARY_PATH=OUT_DIR then makes the libraries visible. Importing torch itself needs
TORCH_DEVICE_BACKEND_AUTOLOAD=0 until the libraries are loaded, because the wheel hooks into `import torch`.

Exit status: 0 built; 1 built, but torch_npu does not import; 2 something is missing (a sentence says what).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CORE = "libcann_stub.so"
SOURCE = Path(__file__).with_name("cann_stub.c")
TOOLS = ("gcc", "nm", "readelf")

_CHECK = (
    "import torch, torch_npu; x = torch.empty(4, 64, dtype=torch.bfloat16, device='meta'); "
    "y = torch.ops.npu.npu_rms_norm(x, x[0], 1e-6)[0]; assert y.shape == x.shape; "
    "names = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith('npu::')]; "
    "print(f'torch {torch.__version__}, torch_npu {torch_npu.__version__}: {len(names)} npu operators')"
)


class StubError(RuntimeError):
    """The stub cannot be built or used here; the message says what is missing."""


@dataclass(frozen=True)
class Survey:
    """What the wheel needs and this machine lacks."""

    libraries: tuple[str, ...]  # sonames
    symbols: tuple[str, ...]


def missing_prerequisite() -> str | None:
    """Why the stub cannot be built here, or None. Imports neither torch nor torch_npu."""
    if not sys.platform.startswith("linux"):
        return f"the CANN stub needs Linux, this is {sys.platform}"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed; the CANN stub needs a C compiler with binutils (gcc, nm, readelf)"
    for package in ("torch", "torch_npu"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed for {Path(sys.executable).name}; install deepinfer-core[ascend950] in this environment"
    return None


def survey() -> Survey:
    """Libraries and symbols that torch_npu links to and that neither torch, the wheel nor the system provides."""
    torch_dir, npu_dir = _package("torch"), _package("torch_npu")
    shipped = {*torch_dir.glob("lib/*.so*"), *npu_dir.glob("lib/*.so*"), *npu_dir.parent.glob("torch_npu.libs/*.so*")}
    # The ATB plug-in opens a further Huawei product on first use only; it is not part of the import.
    loaded = [path for path in shipped if npu_dir in path.parents and "atb" not in path.name] + list(npu_dir.glob("_C*.so"))
    if not any(path.name == "libtorch_npu.so" for path in loaded):
        raise StubError("the torch_npu package has no libtorch_npu.so: reinstall the wheel")
    needed = {name for path in loaded for name in _needed(path)} - {path.name for path in shipped}
    on_system = {name: _system_library(name) for name in needed}
    # The wheel names some of libc's functions (dlopen, pthread_create) without a version, like CANN's own. Defining those again
    # would break the process, so whatever a present library exports is left alone.
    provided: set[str] = set().union(*(_exports(path) for path in [*shipped, *filter(None, on_system.values())]))
    wanted: set[str] = set().union(*(_imports(path) for path in loaded))
    absent = tuple(sorted(name for name, path in on_system.items() if path is None))
    return Survey(absent, tuple(sorted(wanted - provided)))


def build(out: Path, found: Survey | None = None) -> Survey:
    """Writes the stub libraries into `out` and returns what they stand for. Raises StubError."""
    reason = missing_prerequisite()
    if reason:
        raise StubError(reason)
    found = found or survey()
    if not found.libraries:
        raise StubError("every library that torch_npu needs is on this machine: the real CANN is here, use it")
    out.mkdir(parents=True, exist_ok=True)
    generated = out / "cann_stub.c"
    generated.write_text(_source(found.symbols))
    shared = ["gcc", "-shared", "-fPIC", "-O1", "-fno-builtin"]
    _output(*shared, "-o", str(out / CORE), str(generated), f"-Wl,-soname,{CORE}")
    for name in found.libraries:  # shells that pull in the one core, so that all of them share its state
        link = ["-Wl,--no-as-needed", f"-L{out}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}"]
        _output(*shared, "-x", "c", "/dev/null", "-o", str(out / name), *link)
    return found


def load(out: Path) -> None:
    """Loads the stub libraries of `out` into this process, so that a following `import torch_npu` finds them by name."""
    for path in [out / CORE, *sorted(set(out.glob("*.so")) - {out / CORE})]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def cached() -> Path:
    """The folder of a stub for the installed wheel, built on first use below the user's cache directory. Raises StubError."""
    reason = missing_prerequisite()
    if reason:
        raise StubError(reason)
    wheel = _package("torch_npu") / "lib" / "libtorch_npu.so"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer"
    out = base / f"cann-stub-{wheel.stat().st_size:x}-{SOURCE.stat().st_mtime_ns:x}"
    if not (out / "complete").exists():
        found = build(out)
        (out / "complete").write_text("\n".join(found.libraries))
    return out


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise StubError(f"{name} is not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations)))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StubError(f"{command[0]} failed: {done.stderr.strip()[:1000]}")
    return done.stdout


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\)[^\[]*\[([^\]]+)\]", _output("readelf", "-d", str(library)))


def _imports(library: Path) -> set[str]:
    """Undefined symbols without a version: those that carry one belong to libc and libstdc++."""
    lines = _output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)).splitlines()
    names = {line.split()[-1] for line in lines if line.split()[:1] == ["U"]}
    return {name for name in names if "@" not in name and not re.match("_?Py", name)}


def _exports(library: Path) -> set[str]:
    return {line.split()[-1].partition("@")[0] for line in _output("nm", "-D", "--defined-only", str(library)).splitlines() if line.strip()}


def _system_library(soname: str) -> Path | None:
    answer = _output("gcc", f"-print-file-name={soname}").strip()
    return Path(answer) if "/" in answer else None


def _source(symbols: tuple[str, ...]) -> str:
    """`cann_stub.c` and a definition for each symbol that it lacks."""
    text = SOURCE.read_text()
    written = set(re.findall(r"^(?:int|const char \*) ?(\w+)\(", text, flags=re.MULTILINE))
    lines = [text, "/* ---- everything else the wheel links to */"]
    for name in symbols:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise StubError(f"torch_npu wants a symbol that C cannot spell: {name!r}")
        if name not in written:
            is_table = name.startswith(("_ZTV", "_ZTI", "_ZTS"))  # C++ virtual tables and type information are data
            lines.append(f"void *{name}[32];" if is_table else f"long {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Command line: builds, then imports torch_npu in a child process to prove it."""
    parser = argparse.ArgumentParser(prog="build_cann_stub", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path, help="folder for the libraries; made if absent")
    out = parser.parse_args(arguments).out_dir.resolve()
    try:
        found = build(out)
    except StubError as error:
        print(f"build_cann_stub: {error}", file=sys.stderr)
        return 2
    print(f"{len(found.symbols)} symbols in {len(found.libraries)} libraries: {' '.join(found.libraries)}")
    search = os.pathsep.join(filter(None, [str(out), os.environ.get("LD_LIBRARY_PATH")]))
    environment = {**os.environ, "LD_LIBRARY_PATH": search, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CANN_STUB_DEVICES": "0"}
    done = subprocess.run([sys.executable, "-c", _CHECK], env=environment, capture_output=True, text=True)
    print(done.stdout.strip() if done.returncode == 0 else f"build_cann_stub: torch_npu does not import\n{done.stderr}")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
