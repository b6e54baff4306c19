"""`onstep launch`: starts the ranks of a run on this machine or by Ray, or writes what starts them on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.application import application
from onstep.cli.exit_codes import OK
from onstep.errors import ConfigError
from onstep.launch.kubernetes import Kind, KubernetesJob, manifest
from onstep.launch.plan import Launch, Nodes, command_of, rendezvous_of, require_words
from onstep.launch.ray import RayJob, program
from onstep.launch.slurm import SlurmJob, script, submit

app = application()

_HERE = "a launch on this machine"
_BELONGS = {
    **dict.fromkeys(("rdzv", "rdzv_id", "rdzv_conf", "log_dir"), (_HERE,)),
    "nnodes": (_HERE, "--ray"),
    "nodes": ("--slurm", "--kubernetes"),
    **dict.fromkeys(("gpus_per_node", "name"), ("--slurm", "--kubernetes", "--ray")),
    "print_": ("--slurm", "--ray"),
    **dict.fromkeys(("time", "partition", "requeue", "signal_seconds", "array", "sbatch"), ("--slurm",)),
    **dict.fromkeys(("image", "volume"), ("--kubernetes",)),
}
"""Option -> engines that know it."""


@app.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
def launch(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND ...", help="train ..., finetune ..., run ..., python script.py ..., or a program."
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, envvar="PET_NPROC_PER_NODE", help="Ranks on each node; default: one on each GPU, or one."),
    ] = None,
    nnodes: Annotated[
        str,
        typer.Option(
            metavar="N | LEAST:MOST",
            envvar="PET_NNODES",
            help="Nodes, each of which runs this command; with --ray, nodes of the cluster.",
        ),
    ] = "1",
    max_restarts: Annotated[int, typer.Option(min=0, help="How often ranks are started again after a failure.")] = 0,
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT | FILE", help="Where the nodes meet: a port of one, or a file that all see."),
    ] = None,
    rdzv_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of this launch there; default: $SLURM_JOB_ID, or onstep.")
    ] = None,
    rdzv_conf: Annotated[
        str | None, typer.Option(metavar="NAME=VALUE,...", help="Settings of torchelastic's rendezvous.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what ranks print there; default: only after a failure.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write an sbatch script, and submit it.")] = False,
    kubernetes: Annotated[Kind | None, typer.Option(help="Print a manifest for kubectl apply -f -.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run it by Ray Train, on the cluster at HOST:PORT, auto, or local for one of its own.",
        ),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="With --slurm or --ray: print the script, and start nothing.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs on each node, with a rank each.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; default: the recipe, or the script.")] = None,
    time: Annotated[str | None, typer.Option(metavar="T", help="With --slurm: time limit, such as 04:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="With --slurm: partition.")] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="With --slurm: a preempted run continues in another allocation.")
    ] = False,
    signal_seconds: Annotated[
        int, typer.Option(min=1, max=65535, help="With --slurm: how long before the end the run is asked to save.")
    ] = 120,
    array: Annotated[
        str | None, typer.Option(metavar="TASKS", help="With --slurm: one run for each of these numbers, as 0-3.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="With --slurm: another option of sbatch; repeatable.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="With --kubernetes: image that has Onstep.")] = None,
    volume: Annotated[
        str | None, typer.Option(metavar="CLAIM:PATH", help="With --kubernetes: a volume claim, mounted at PATH.")
    ] = None,
) -> int:
    """Run a command on several ranks: onstep launch --nproc 2 -- train tiny_gpt, or -- python script.py.

    Lines of ranks have their rank in front, one line says which rank failed first, and the exit code is that of the
    run: 75 if it was preempted and has saved. Several nodes each run this command with the same --rdzv.
    """
    words = words or []
    require_words(words)
    command = () if print_ or kubernetes is not None else command_of(words)  # what is written runs elsewhere
    engines = {"--slurm": slurm, "--kubernetes": kubernetes is not None, "--ray": ray is not None}
    _refuse_foreign(context, [name for name, is_wanted in engines.items() if is_wanted])
    ranks = nproc or gpus_per_node
    if slurm:
        job = SlurmJob(
            words=words,
            name=name or _name_of(words),
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            ranks_per_node=ranks,
            max_restarts=max_restarts,
            time=time,
            partition=partition,
            requeue=requeue,
            lead_seconds=signal_seconds,
            array=array,
            options=sbatch or (),
        )
        _submit(job, shows=print_)
        return OK
    if kubernetes is not None:
        wanted = KubernetesJob(words, name or _name_of(words), nodes, gpus_per_node, ranks, max_restarts, image, volume)
        print(manifest(kubernetes, wanted), end="")
        return OK
    allowed = Nodes.parse(nnodes)
    if ray is not None:
        by_ray = RayJob(
            words,
            name or _name_of(words),
            address=ray,
            nodes=allowed,
            ranks_per_node=ranks or 1,
            has_gpus=gpus_per_node is not None,
            max_restarts=max_restarts,
            directory=Path.cwd(),
        )
        return _run_by_ray(by_ray, shows=print_)
    where = rendezvous_of(rdzv, rdzv_id, rdzv_conf, allowed)
    from onstep.launch.agent import default_ranks, run

    return run(Launch(command, nproc or default_ranks(), allowed, max_restarts, where, log_dir))


def _refuse_foreign(context: typer.Context, engines: list[str]) -> None:
    """Refuse options that mean nothing for what is started.

    Args:
        context: of the command.
        engines: those that are wanted, of which there may be one; none for a launch on this machine.

    Raises:
        ConfigError: naming the first.
    """
    if len(engines) > 1:
        raise ConfigError(f"{' and '.join(engines)} exclude each other; give the one of your cluster.")
    engine = engines[0] if engines else _HERE
    for parameter, known in _BELONGS.items():
        source = context.get_parameter_source(parameter)
        if source is not None and source.name == "COMMANDLINE" and engine not in known:
            option = f"--{parameter.strip('_').replace('_', '-')}"
            more = "" if engines else f", or add {known[0]}"
            raise ConfigError(f"{option} belongs to {' and '.join(known)}; drop it{more}.")


def _name_of(words: list[str]) -> str:
    """The name of a job: the run's, else the configuration's or the script's."""
    named = next((word.partition("=")[2] for word in words if word.startswith("run.name=")), "")
    first = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), words[0])
    return named or Path(first).stem


def _submit(job: SlurmJob, *, shows: bool) -> None:
    """Print the script, or submit it and say how to watch it."""
    job.check()
    text = script(job)
    if shows:
        print(text, end="")
        return
    number = submit(text)
    output = f"{job.label}-{number}{'' if job.array is None else '_*'}.out"
    print(f"Submitted batch job {number}. Its output: {output}; its place in the queue: squeue -j {number}")
    print("While it runs with run.control=true: onstep control list")


def _run_by_ray(job: RayJob, *, shows: bool) -> int:
    """Print the program, or run what it runs."""
    if shows:
        print(program(job), end="")
        return OK
    from onstep.integrations.ray import run_command
    from onstep.launch.ray import run

    return run(job, run_command)
