"""Makes the source distribution and the wheels of every platform on this machine, and opens each to check it.

    python wheels/make_wheels.py [--only PART OF A TAG] [--to FOLDER]

The C compiler is clang of the package ziglang, which compiles for every system. What was compiled once is kept, in
build/native; from nothing, all of it takes ten minutes of a core.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from platforms import PLATFORMS, Platform
from wheel_contents import faults

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "src" / "regard_models"
DOCTOR = ROOT / "src" / "regard_doctor"


def run(*command: str | Path, **environment: str) -> str:
    """Run a command, and return what it says; where it fails that is shown, and this program ends."""
    told = {**os.environ, **environment}
    done = subprocess.run([str(word) for word in command], env=told, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(str(word) for word in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(source: Path, to: Path, kind: str, **environment: str) -> Path:
    """The distribution of a folder, of the kind "sdist" or "wheel"."""
    before = set(to.glob("*"))
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", to, source, **environment)
    (made,) = set(to.glob("*")) - before
    return made


def wheel_of(platform: Platform, to: Path) -> Path:
    """The wheel of the library for a platform."""
    compiler = [sys.executable, str(ROOT / "wheels" / "cross_compiler.py"), platform.target]
    return build(ROOT, to, "wheel", CC=shlex.join(compiler), REGARD_PLATFORM=platform.tag, REGARD_VARIANTS="all")


def main() -> None:
    """Make them all, check them, and print what there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="platforms with this in their tag; without the other distributions")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="the folder that they are put into")
    told = parser.parse_args()
    told.to.mkdir(parents=True, exist_ok=True)
    for old in [*told.to.glob("regard*.whl"), *told.to.glob("regard*.tar.gz")]:
        old.unlink()
    made, wrong = [], []
    print("| distribution | MB | seconds |\n| --- | --- | --- |")
    for platform in [platform for platform in PLATFORMS if told.only in platform.tag]:
        began = time.monotonic()
        wheel = wheel_of(platform, told.to)
        made.append(wheel)
        wrong += [f"{wheel.name}: {fault}" for fault in faults(wheel, platform)]
        print(f"| {wheel.name} | {wheel.stat().st_size / 1e6:.2f} | {time.monotonic() - began:.0f} |", flush=True)
    if not told.only:
        for source, kind in (
            (ROOT, "sdist"),
            *((folder, kind) for folder in (MODELS, DOCTOR) for kind in ("wheel", "sdist")),
        ):
            made.append(build(source, told.to, kind))
            print(f"| {made[-1].name} | {made[-1].stat().st_size / 1e6:.2f} | |")
    if wrong:
        sys.exit("\n".join(wrong))
    told_of_texts = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *made)
    # Two packages are meant (W009), and each translator has both its vocabularies, the same or not (W002).
    told_of_files = run(
        Path(sys.executable).with_name("check-wheel-contents"),
        *("--ignore", "W002,W009"),
        *(path for path in made if path.suffix == ".whl"),
    )
    print(f"\n{told_of_texts}\n{told_of_files}")
    if not os.environ.get("REGARD_URL"):
        print("Without links of the project: REGARD_URL names the address where it is published.")
    print(f"{len(made)} distributions in {told.to}, none with a fault.")


if __name__ == "__main__":
    main()
