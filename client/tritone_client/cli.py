"""The command `tritone`.

    chat  say  bench  ping                            ask a running server; this package alone is enough
    serve  reload  profile  render  check  doctor  models  backends    run one; they come with the server part

Exit codes: 0 done, 1 failed (one sentence on stderr), 2 wrong usage, 130 interrupted.
What --out names is replaced when the answer is complete, or by what came until Ctrl-C; after a failure a file
that was there is as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tritone_bench import cli as bench
from tritone_bench.bench import BenchPlan
from tritone_client.client import DEFAULT_PIPELINE, DEFAULT_URL, AsyncTritoneClient
from tritone_client.display import choose_display
from tritone_client.errors import InvalidRequest, ServerFault, TritoneError
from tritone_client.events import AudioChunk, Done, Event
from tritone_client.request import RequestOptions
from tritone_client.wav import WavWriter, checked_wav_path

_Result = TypeVar("_Result")

SERVER_COMMANDS = {
    "serve": "start a Triton server with pipelines",
    "reload": "have a running `tritone serve` follow a changed deploy.yaml",
    "profile": "see where a stage of a running `tritone serve` spends its time",
    "render": "write the model repository from deploy files",
    "plan": "show what pipelines will hold in memory, stage by stage",
    "check": "check pipelines and deploy files",
    "doctor": "say what this machine lacks to serve",
    "models": "list the pipelines",
    "backends": "compose a backend directory for plain tritonserver",
}
TLS_FILES = ("root_certificates", "private_key", "certificate_chain")
MEDIA_FILES = {
    "image": "a picture: PNG or JPEG",
    "audio": "a recording, e.g. the question: WAV, FLAC or MP3",
    "video": "a film: MP4",
}
SERVER_PART = "pip install '.[server,smoltalk]' in a checkout, or 'tritone[server]' from a package"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong usage raises SystemExit(2), as argparse does."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of stdout went away; point stdout elsewhere, or Python complains again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TritoneError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        if os.environ.get("TRITONE_DEBUG"):
            raise
        return _fail(f"{type(error).__name__}: {error}; this is a bug, TRITONE_DEBUG=1 shows where")


def _await(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` to its end; Ctrl-C cancels it and raises KeyboardInterrupt.

    The handler of asyncio.run alone sleeps through an interrupt that comes just as its loop goes to sleep:
    nothing wakes the loop then. A handler of the loop's own has a file descriptor that does.
    """

    async def interruptible() -> _Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _run(arguments: list[str]) -> int:
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser, commands = _parser()
    if command in commands.choices:
        _check_is_text(arguments)
    elif command is None or command in SERVER_COMMANDS:
        missing = _add_server_commands(commands)
        if command is not None and missing:
            return _fail(
                f"`tritone {command}` needs the server part ({missing}); install it with {SERVER_PART}"
            )
    else:
        parser.error(_unknown_command(command, [*commands.choices, *SERVER_COMMANDS]))
    args = parser.parse_args(arguments, argparse.Namespace(arguments=arguments))
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    return int(args.run(args))


def _fail(sentence: str) -> int:
    print(f"tritone: {' '.join(sentence.split())}", file=sys.stderr)
    return 1


def _unknown_command(command: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(command, known, n=1)
    guess = f", did you mean {close[0]!r}?" if close else "."
    return f"there is no command {command!r}{guess} The commands are {', '.join(known)}."


def _check_is_text(arguments: Sequence[str]) -> None:
    """Raise InvalidRequest for an argument with bytes that are no UTF-8; the shell hands over any bytes."""
    for argument in arguments:
        shown = argument.encode(errors="surrogateescape").decode(errors="backslashreplace")
        if shown != argument:
            raise InvalidRequest(
                f"the argument '{shown}' is not UTF-8 text; type it, or name the file, in UTF-8"
            )


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(
        prog="tritone", description="Speech, text and pictures from models on Triton."
    )
    commands = parser.add_subparsers(dest="command", metavar="command")

    chat = commands.add_parser("chat", help="ask a question and hear the answer")
    chat.add_argument("question", nargs="?", help="the question; may be left out if a file is given")
    for kind, meaning in MEDIA_FILES.items():
        chat.add_argument(
            f"--{kind}", type=Path, action="append", default=[], metavar="FILE", help=f"{meaning}; repeatable"
        )
    chat.add_argument(
        "--use-audio-in-video",
        action="store_true",
        help="hear the sound of the videos as well",
    )
    chat.add_argument("--system", metavar="TEXT", help="how the assistant should behave")
    chat.add_argument("--modalities", metavar="LIST", help="e.g. text,audio or text; default: all there are")
    chat.add_argument(
        "--out", type=_wav_path, metavar="FILE.wav", help="the spoken answer; replaces a file that is there"
    )
    chat.add_argument("--json", action="store_true", help="print JSON lines")
    _add_request_arguments(chat)
    _add_chunk_arguments(chat)
    _add_server_arguments(chat)
    _add_trace_argument(chat)
    chat.set_defaults(run=_chat, parser=chat)

    say = commands.add_parser("say", help="speak a text")
    say.add_argument("text", help="the text to speak")
    say.add_argument(
        "--out",
        type=_wav_path,
        metavar="FILE.wav",
        required=True,
        help="the speech; replaces a file that is there",
    )
    say.add_argument("--json", action="store_true", help="print JSON lines")
    _add_request_arguments(say)
    _add_chunk_arguments(say)
    _add_server_arguments(say)
    _add_trace_argument(say)
    say.set_defaults(run=_say, parser=say)

    load = commands.add_parser("bench", help="measure latency and throughput under load")
    load.add_argument("pipeline", nargs="?", default=DEFAULT_PIPELINE, help=f"default: {DEFAULT_PIPELINE}")
    bench.add_arguments(load)
    _add_request_arguments(load)
    _add_chunk_arguments(load)
    _add_url_arguments(load)
    load.set_defaults(run=_bench, parser=load)

    ping = commands.add_parser("ping", help="exit 0 if every stage of the pipeline is ready, 1 if not")
    ping.add_argument("--deadline-s", type=float, default=5.0, metavar="S", help="default: 5")
    _add_server_arguments(ping)
    ping.set_defaults(run=_ping, parser=ping)
    return parser, commands


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--speaker", metavar="NAME", help="the voice")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="length limit of the text")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--deadline-s", type=float, metavar="S", help="give up after so many seconds")


def _add_chunk_arguments(parser: argparse.ArgumentParser) -> None:
    chunks = parser.add_argument_group("how the speech is cut", "codec frames; default: the server's")
    chunks.add_argument(
        "--initial-codec-chunk-frames", type=_positive, metavar="N", help="of the first chunk: small is early"
    )
    chunks.add_argument("--codec-chunk-frames", type=_positive, metavar="N", help="of every later one")
    chunks.add_argument(
        "--codec-chunk-growth", type=float, metavar="X", help="at most so many times the chunk before; 0: any"
    )


def _add_trace_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traceparent",
        metavar="W3C",
        help="record the server's spans below this one: 00-<32 hex>-<16 hex>-01",
    )


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    default = DEFAULT_PIPELINE
    parser.add_argument("--pipeline", default=default, metavar="NAME", help=f"default: {default}")
    _add_url_arguments(parser)


def _add_url_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, metavar="HOST:PORT", help=f"default: {DEFAULT_URL}")
    parser.add_argument("--ssl", action="store_true", help="use TLS")
    parser.add_argument("--root-certificates", metavar="FILE.pem", help="whom to trust with TLS")
    parser.add_argument("--private-key", metavar="FILE.pem", help="of this client, for a mutual TLS")
    parser.add_argument("--certificate-chain", metavar="FILE.pem", help="of this client, for a mutual TLS")


def _add_server_commands(commands: Any) -> str | None:
    """Let the server part add its commands; without it add their help alone and say what is missing."""
    try:
        from tritone.cli import add_commands
    except ImportError as error:
        for name, meaning in SERVER_COMMANDS.items():
            commands.add_parser(name, help=f"{meaning} (needs the server part)")
        return str(error)
    add_commands(commands)
    return None


def _chat(args: argparse.Namespace) -> int:
    files = {kind: getattr(args, kind) for kind in MEDIA_FILES}
    if args.question is None and not any(files.values()):
        args.parser.error("give a question, --audio, --image or --video")
    for what, text in (("question", args.question), ("system text", args.system)):
        if text is not None and not text.strip():
            raise InvalidRequest(f"the {what} is empty; give some words")
    options = _request_options(args)
    options |= {
        "traceparent": args.traceparent,
        "modalities": args.modalities,
        "system": args.system,
        "images": files["image"],
        "audios": files["audio"],
        "videos": files["video"],
        "use_audio_in_video": args.use_audio_in_video or None,
    }
    if args.json:
        options["return_timings"] = True
    silence = "the answer has no audio"
    if args.modalities is not None and "audio" not in args.modalities:
        silence = "no audio was asked for"
    with _file_named(files):
        return _await(_converse(args, lambda client: client.stream(args.question, **options), silence))


def _say(args: argparse.Namespace) -> int:
    options = _request_options(args)
    options["traceparent"] = args.traceparent
    silence = "none of the characters can be spoken"
    return _await(_converse(args, lambda client: client.say(args.text, **options), silence))


@contextmanager
def _file_named(files: Mapping[str, Sequence[Path]]) -> Iterator[None]:
    """Name the file in what a server says about one, of which it knows only the bytes.

    It calls a file `image`, or `image[1]` where there are several.
    """
    try:
        yield
    except InvalidRequest as error:
        about = re.match(r"(image|audio|video)(?:\[(\d+)\])?(?!\w)", error.message)
        paths = files[about[1]] if about else ()
        number = int(about[2] or 0) if about else 0
        if about is None or number >= len(paths) or (about[2] is None and len(paths) > 1):
            raise
        raise InvalidRequest(f"{paths[number]}: {error.message}", error.code) from None


async def _converse(
    args: argparse.Namespace,
    request: Callable[[AsyncTritoneClient], AsyncGenerator[Event, None]],
    silence: str,
) -> int:
    """Stream one answer to the display and, if asked for, into a WAV file.

    Args:
        request: makes the request, which reads the files of the question; so it comes before the WAV file.
        silence: why a complete answer has no audio.
    """
    done: Done | None = None
    async with _client(args) as client, aclosing(request(client)) as events:
        with ExitStack() as stack:
            wav = None if args.out is None else stack.enter_context(WavWriter(args.out))
            display = stack.enter_context(choose_display(args.json))
            async for event in events:
                display.show(event)
                if wav is not None and isinstance(event, AudioChunk):
                    wav.write(event)
                if isinstance(event, Done):
                    done = event
            if done is None:
                raise ServerFault("the answer ended without its last event")
            written = wav.path if wav is not None and wav.audio_s else None
            if wav is not None:
                wav.close()
            display.summarize(done, written)
    if wav is not None and written is None:
        reason = done.finish_reasons.get("audio", "stop")
        why = silence if reason == "stop" else f"the answer was ended by {reason} before any audio came"
        return _fail(f"{why}, so {args.out} was not written")
    return 0


def _bench(args: argparse.Namespace) -> int:
    if not bench.needs_server(args):
        return bench.show_saved(args)
    options = _request_options(args)
    return _await(_run_bench(args, bench.plan_of(args, options), options))


async def _run_bench(args: argparse.Namespace, plan: BenchPlan, options: RequestOptions) -> int:
    async with _client(args) as client:
        return await bench.measure(args, client, plan, options)


def _ping(args: argparse.Namespace) -> int:
    stages = _await(_run_ping(args))
    down = [f"{name} ({state['error']})" for name, state in stages.items() if "error" in state]
    if down:
        return _fail(f"{args.pipeline} at {args.url} is not ready: {', '.join(down)}")
    print(f"{args.pipeline} at {args.url} is ready: {', '.join(stages)}")
    return 0


async def _run_ping(args: argparse.Namespace) -> dict[str, Any]:
    async with _client(args) as client:
        return await client.ping(args.deadline_s)


def _client(args: argparse.Namespace) -> AsyncTritoneClient:
    files = {name: getattr(args, name) for name in TLS_FILES}
    secure = args.ssl or any(files.values())
    return AsyncTritoneClient(args.url, args.pipeline, ssl=secure, **files)


def _request_options(args: argparse.Namespace) -> RequestOptions:
    return {
        "speaker": args.speaker,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "deadline_s": args.deadline_s,
        "initial_codec_chunk_frames": args.initial_codec_chunk_frames,
        "codec_chunk_frames": args.codec_chunk_frames,
        "codec_chunk_growth": args.codec_chunk_growth,
    }


def _wav_path(text: str) -> Path:
    try:
        return checked_wav_path(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
