"""Writes manifests of Kubernetes: a TrainJob of Kubeflow Trainer, or a JobSet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from onstep.errors import ConfigError
from onstep.launch.plan import ClusterJob

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A label of DNS, short enough for the names of pods."""
_PORT = 29500
_GRACE_SECONDS = 120
"""How long a pod that is evicted has to save."""
_VOLUME = "runs"
Object = dict[str, Any]


class Kind(StrEnum):
    """Kinds of manifests."""

    TRAINJOB = "trainjob"
    JOBSET = "jobset"


@dataclass(frozen=True)
class KubernetesJob(ClusterJob):
    """What a manifest asks for and runs."""

    image: str | None = None
    volume: str | None = None
    """`CLAIM:PATH`: a persistent volume claim, and where it is mounted."""

    @property
    def label(self) -> str:
        """The name of the job in the cluster: `tiny-gpt` of `tiny_gpt`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())

    def check(self) -> None:
        """Refuse what Kubernetes would refuse.

        Raises:
            ConfigError: naming the option.
        """
        if self.image is None:
            raise ConfigError(
                "--kubernetes requires --image, a container image that has Onstep: --image=REGISTRY/NAME:TAG."
            )
        if not _NAME.fullmatch(self.label):
            raise ConfigError(
                f"--name must be at most 40 letters, digits and hyphens, beginning with a letter and not ending with a "
                f"hyphen, got {self.name!r}; give another one."
            )
        claim, _, path = (self.volume or "claim:/path").partition(":")
        if not (claim and path.startswith("/")):
            raise ConfigError(f"--volume must be CLAIM:/PATH, got {self.volume!r}.")


def manifest(kind: Kind, job: KubernetesJob) -> str:
    """The manifest of a job, as YAML.

    Raises:
        ConfigError: for what Kubernetes would refuse.
    """
    import yaml

    job.check()
    build = {Kind.TRAINJOB: _train_job, Kind.JOBSET: _job_set}[kind]
    return str(yaml.safe_dump(build(job), sort_keys=False, width=120))


def _train_job(job: KubernetesJob) -> Object:
    """Kubeflow's controller says by `PET_...` how many nodes there are and where they meet."""
    trainer: Object = {"image": job.image, "command": _command(job), "numNodes": job.nodes}
    trainer["numProcPerNode"] = job.ranks_per_node or 1
    if job.gpus_per_node:
        trainer["resourcesPerNode"] = _resources(job)
    pod: Object = {"terminationGracePeriodSeconds": _GRACE_SECONDS}
    if job.volume:
        pod["volumes"] = [_claimed(job)]
        pod["containers"] = [{"name": "node", "volumeMounts": [_mount(job)]}]
    patched = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [patched]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.label},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [{"manager": "onstep/launch", "trainingRuntimeSpec": runtime}],
        },
    }


def _job_set(job: KubernetesJob) -> Object:
    """The pod 0 of the job `node`, which the others find by its name, holds the rendezvous."""
    options = [f"--nproc={job.ranks_per_node or 1}"]
    if job.nodes > 1:
        options += [
            f"--nnodes={job.nodes}",
            f"--rdzv={job.label}-node-0-0.{job.label}:{_PORT}",
            f"--rdzv-id={job.label}",
        ]
    container: Object = {"name": "node", "image": job.image, "command": _command(job, *options)}
    if job.gpus_per_node:
        container["resources"] = _resources(job)
    pod: Object = {"restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE_SECONDS, "containers": [container]}
    if job.volume:
        container["volumeMounts"], pod["volumes"] = [_mount(job)], [_claimed(job)]
    nodes = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.label},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": max(job.max_restarts, 1)},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
        },
    }


def _command(job: KubernetesJob, *options: str) -> list[str]:
    restarts = [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    return ["onstep", "launch", *options, *restarts, "--", *job.words]


def _resources(job: KubernetesJob) -> Object:
    return {"limits": {"nvidia.com/gpu": job.gpus_per_node}}


def _claimed(job: KubernetesJob) -> Object:
    claim = str(job.volume).partition(":")[0]
    return {"name": _VOLUME, "persistentVolumeClaim": {"claimName": claim}}


def _mount(job: KubernetesJob) -> Object:
    return {"name": _VOLUME, "mountPath": str(job.volume).partition(":")[2]}
