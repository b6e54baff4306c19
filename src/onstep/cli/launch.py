"""`onstep launch`: starts the ranks of a run on this machine, or writes what starts them on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.application import application
from onstep.cli.exit_codes import OK
from onstep.errors import ConfigError
from onstep.launch.kubernetes import Kind, KubernetesJob, manifest
from onstep.launch.plan import Launch, Nodes, command_of, rendezvous_of
from onstep.launch.slurm import SlurmJob, script, submit

app = application()

_LOCAL = ("nnodes", "rdzv", "rdzv_id", "rdzv_conf", "log_dir")
_CLUSTER = ("nodes", "gpus_per_node", "name")
_SLURM = ("print_", "time", "partition", "requeue", "signal_seconds", "array", "sbatch")
_KUBERNETES = ("image", "volume")
_BELONGS = {
    **dict.fromkeys(_LOCAL, ("", "a launch on this machine")),
    **dict.fromkeys(_CLUSTER, ("--slurm --kubernetes", "--slurm and --kubernetes")),
    **dict.fromkeys(_SLURM, ("--slurm", "--slurm")),
    **dict.fromkeys(_KUBERNETES, ("--kubernetes", "--kubernetes")),
}
"""Option -> (engines that know it, what to say)."""


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
            help="Nodes, each of which runs this command.",
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
    print_: Annotated[
        bool, typer.Option("--print", help="With --slurm: print the script, and submit nothing.")
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
    command = command_of(words)
    _refuse_foreign(context, slurm=slurm, kubernetes=kubernetes is not None)
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
    where = rendezvous_of(rdzv, rdzv_id, rdzv_conf, allowed)
    from onstep.launch.agent import default_ranks, run

    return run(Launch(command, nproc or default_ranks(), allowed, max_restarts, where, log_dir))


def _refuse_foreign(context: typer.Context, *, slurm: bool, kubernetes: bool) -> None:
    """Refuse options that mean nothing for what is started.

    Raises:
        ConfigError: naming the first.
    """
    if slurm and kubernetes:
        raise ConfigError("--slurm and --kubernetes exclude each other; give the one of your cluster.")
    engine = "--slurm" if slurm else "--kubernetes" if kubernetes else ""
    for parameter, (engines, text) in _BELONGS.items():
        source = context.get_parameter_source(parameter)
        if source is not None and source.name == "COMMANDLINE" and engine not in (engines.split() or [""]):
            option = f"--{parameter.strip('_').replace('_', '-')}"
            raise ConfigError(
                f"{option} belongs to {text}; drop it{f', or add {engines.split()[0]}' if not engine else ''}."
            )


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
