"""`onstep diloco server`: holds the parameters of a run that trains at several sites."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onstep.cli.completed_words import complete_pairs, complete_words
from onstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from onstep.diloco.protocol.messages import Settings
    from onstep.diloco.server.server import DiLoCoServer
    from onstep.http.server import TlsFiles


def server(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE ...]",
            autocompletion=complete_pairs,
            help="Overrides, if the model is that of a configuration or recipe.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            autocompletion=complete_words,
            help="Initial parameters: a run, checkpoint or Hugging Face directory, a safetensors file, or a "
            "configuration file or recipe, whose model is initialized. May be left out to continue from --output-dir.",
        ),
    ] = None,
    num_workers: Annotated[int, typer.Option("-n", "--num-workers", help="Workers that are expected.")] = 1,
    output_dir: Annotated[
        Path | None,
        typer.Option("-o", "--output-dir", help="Directory to save to; the same command continues from it."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; beyond loopback, other machines reach it.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port; default: the first free one from 8512, 0: any.")] = None,
    sync_every: Annotated[int, typer.Option(help="Optimizer steps between two rounds (H).")] = 500,
    num_fragments: Annotated[
        int, typer.Option(help="Parts of the model that are sent in turn, while training continues.")
    ] = 1,
    overlap_steps: Annotated[
        int | None,
        typer.Option(help="Steps that workers take until they merge the result of a round; default: as it arrives."),
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Workers apply their own work at once, and the average when it arrives.")
    ] = False,
    codec: Annotated[str, typer.Option(help="How tensors are sent: fp32, bf16, int8 or int4.")] = "bf16",
    min_workers: Annotated[
        int | None, typer.Option(help="Quorum of a round; default: more than half of the workers.")
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(help="A submission late by more rounds than this is dropped; default: 1, with --async 8."),
    ] = None,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a worker is evicted; 0: never.")
    ] = 120.0,
    dylu: Annotated[bool, typer.Option("--dylu", help="Tell slower workers to take fewer steps a round.")] = False,
    async_mode: Annotated[bool, typer.Option("--async", help="Apply every submission at once; no rounds.")] = False,
    dn_buffer_size: Annotated[
        int | None,
        typer.Option(help="Submissions per update of the momentum with --async; default: the workers, 0: each."),
    ] = None,
    outer_lr: Annotated[float, typer.Option(help="Learning rate of the outer optimizer.")] = 0.7,
    outer_momentum: Annotated[float, typer.Option(help="Its Nesterov momentum; 0: plain SGD.")] = 0.6,
    save_every: Annotated[int, typer.Option(help="Rounds between two checkpoints for other programs; 0: none.")] = 10,
    token_budget: Annotated[
        int | None, typer.Option(help="Tokens of all workers after which they save and stop, and the server ends.")
    ] = None,
    keep_versions: Annotated[
        int, typer.Option(help="Earlier versions that are kept, for `onstep diloco control go-back`.")
    ] = 3,
    change_settings: Annotated[
        bool, typer.Option("--change-settings", help="Continue the saved run with all options as given here.")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Parameter not to train, with * for any text; repeatable.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that workers need; default: one is created for the port.")
    ] = None,
    regen_token: Annotated[bool, typer.Option("--regen-token", help="Make a new token for the port.")] = False,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Accept anyone who can reach the port.")] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file to serve https with, together with --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
) -> None:
    """Serve a run: hold its parameters, and average the pseudo-gradients of workers.

    Workers join with `onstep diloco worker --server HOST:PORT train ...`. Every round is saved in --output-dir before
    any worker gets it; after a crash, the same command continues, including changes by `onstep diloco control`. Ctrl-C
    ends it.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("httpx", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if token_file is not None and (no_auth or regen_token):
        raise ConfigError("--token-file names the token; drop --no-auth and --regen-token.")
    from onstep.diloco.outer import sgd
    from onstep.diloco.protocol.messages import Settings
    from onstep.diloco.server.server import DiLoCoServer
    from onstep.diloco.wire.tokens import read_token

    settings = Settings.with_quorum(
        num_workers,
        "async" if async_mode else "sync",
        min_workers,
        sync_every=sync_every,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        eager=eager,
        codec=codec,
        dylu=dylu,
        **({} if max_staleness is None else {"max_staleness": max_staleness}),
        heartbeat_timeout=heartbeat_timeout,
    )
    made = DiLoCoServer(
        _source(model, words or []),
        output_dir=output_dir,
        host=host,
        port=port,
        settings=settings,
        outer_optimizer_factory=sgd(outer_lr, outer_momentum),
        dn_buffer_size=dn_buffer_size,
        save_every_n_rounds=save_every,
        keep_versions=keep_versions,
        token_budget=token_budget,
        change_settings=change_settings,
        exclude=exclude or [],
        token="" if no_auth else None if token_file is None else read_token(token_file),
        renews_token=regen_token,
        tls=_tls(tls_cert, tls_key),
    )
    _announce(made, no_auth, token_file)
    signal.signal(signal.SIGTERM, _interrupt)
    made.run()
    print(_end_of(made), flush=True)


def _end_of(made: DiLoCoServer) -> str:
    if made.model_path is not None:
        where = f"The model is in {made.model_path} (model.safetensors); the same command continues the run."
    else:
        where = "There is no new checkpoint of the model." if made.saves else "Nothing was saved, without --output-dir."
    parts = made.settings.num_fragments
    rounds = f"{made.sync_round} rounds" + (f" of {parts} fragments" if parts > 1 else "")
    return f"Ended after {rounds} and {made.tokens:,.0f} tokens. {where}"


def _interrupt(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb the end
    raise KeyboardInterrupt


def _source(model: str | None, words: list[str]) -> nn.Module | Path | None:
    """The path that `--model` names, or the initialized model of a configuration or recipe."""
    if model is None or (Path(model).exists() and Path(model).suffix not in (".yaml", ".yml")):
        if words:
            raise ConfigError(f"{words[0]} has no effect without a configuration or recipe as --model; drop it.")
        return None if model is None else Path(model)
    from onstep.cli.config import configuration
    from onstep.data import build_tokenizer
    from onstep.distributed import World
    from onstep.models import build_transformer
    from onstep.training.setup.pretrained import find_pretrained, load_pretrained
    from onstep.training.setup.setup import resolve_vocabulary

    is_file = Path(model).exists()
    config, _ = configuration([*([model] if is_file else []), *words], None if is_file else model)
    source = find_pretrained(config)
    if source is not None:
        return load_pretrained(source, config.model, World())
    if config.model.vocab_size is None and config.tokenizer.tokenizer_type == "bpe":
        raise ConfigError(
            "model.vocab_size must be set for a tokenizer that is trained on the corpus (bpe): give the workers' size, "
            f"for example model.vocab_size={config.tokenizer.vocab_size}."
        )
    if config.model.vocab_size is None:
        resolve_vocabulary(config, build_tokenizer(config.tokenizer, warns=False).vocab_size)
    return build_transformer(config.model, seed=config.rng.seed)


def _tls(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    from onstep.http.server import TlsFiles

    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both.")
    return None if certificate is None or key is None else TlsFiles(certificate, key)


def _outside(made: DiLoCoServer) -> list[str]:
    """Addresses for other machines, if all are bound: the name and the network address of this machine."""
    from onstep.diloco.wire.tokens import own_address_towards

    somewhere = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}.get(made.host)  # reserved for documentation
    if somewhere is None:
        return []
    found = (socket.gethostname(), own_address_towards(somewhere))
    return [made.address_at(one) for one in found if one]


def _of_rounds(settings: Settings) -> str:
    """How rounds are made, in words."""
    if settings.mode == "async":
        return f"asynchronous, each worker submits every {settings.sync_every} steps"
    parts = [f"a round every {settings.sync_every} steps"]
    parts += [f"in {settings.num_fragments} fragments"] if settings.num_fragments > 1 else []
    if settings.overlap_steps is not None:
        parts.append(f"merged {settings.overlap_steps} steps after its submission")
    elif settings.is_overlapped:
        parts.append("merged as it arrives")
    return ", ".join([*parts, "eager"] if settings.eager else parts)


def _announce(made: DiLoCoServer, no_auth: bool, token_file: Path | None) -> None:
    from onstep.diloco.wire.tokens import token_path

    settings = made.settings
    print(
        f"DiLoCo server of {settings.num_workers} workers (quorum {settings.min_workers}) at {made.address}; "
        f"{_of_rounds(settings)}, {settings.codec}. Ctrl-C ends it."
    )
    print(f"Join it: onstep diloco worker --server {made.address} train ...")
    others = _outside(made)
    if others:
        print(f"On other machines: {' or '.join(f'--server {one}' for one in others)}")
    if made.address.startswith("https:"):
        print("Use a name that the PEM file is for; trust an authority of your own with SSL_CERT_FILE or --ca-file.")
    if no_auth:
        print("warning: --no-auth: anyone who can reach the port can change the model.", file=sys.stderr)
    else:
        print(f"Page: {made.url}, which asks for a token: onstep diloco token add NAME --role reader")
        only_here = "" if others else "Only this machine reaches it (--host), unless by a tunnel. "
        where = token_file or token_path(made.port)
        print(f"{only_here}Workers on other machines need the token in {where} (--token-file).")
    sys.stdout.flush()
