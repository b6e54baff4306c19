"""What `onstep launch` writes for SLURM and Kubernetes, and how it refuses where they are not."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from onstep.cli.main import main
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "guide" / "on-a-cluster.md"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) != 0
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1, said
    return said


def test_the_script_on_the_page_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = blocks(PAGE, "bash")
    at = next(at for at, block in enumerate(shown) if "--slurm --print" in block.code)
    words = shown[at].lines()[0].split()[2:]
    assert printed(capsys, *words) == shown[at + 1].code


def test_the_name_of_a_job_is_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--slurm", "--print", "train", "tiny_gpt", "run.name=a b#1")
    assert "#SBATCH --job-name=a_b_1\n" in text
    assert "'run.name=a b#1'\n" in text


@pytest.mark.parametrize("more", [[], ["--requeue", "--nodes=2", "--gpus-per-node=4", "--sbatch=--account=lab"]])
def test_the_script_passes_the_words_on_as_they_are(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bash runs it with an `srun` that shows what it got, and ends as a preempted run does."""
    text = printed(capsys, "--slurm", "--print", *more, "--", "train", "dataset.paths=[~/a b, '$c']", "run.name=x")
    for name, code in {"srun": 75, "scontrol": 0}.items():
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name}; printf "%s\\n" "$@"\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    ran = subprocess.run(["bash"], input=text, capture_output=True, text=True, env=environment, check=False)
    said = ran.stdout.splitlines()
    assert said[:4] == ["srun", "--kill-on-bad-exit=0", "onstep", "launch"]
    start = said.index("--")
    assert said[start + 1 : start + 4] == ["train", "dataset.paths=[~/a b, '$c']", "run.name=x"]
    assert said[start + 4 :] == (["scontrol", "requeue", "12"] if more else [])
    assert (ran.returncode, ran.stderr) == (75, "")
    if more:
        assert "#SBATCH --account=lab\n" in text
        assert "--nnodes=2" in said


@pytest.mark.parametrize(("code", "restarts", "comes_back"), [(75, 99, True), (137, 19, True), (137, 20, False)])
def test_killed_ranks_requeue_a_job_in_its_first_20_starts_and_75_always_does(
    code: int, restarts: int, comes_back: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in {"srun": f"exit {code}", "scontrol": "echo requeued"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": str(restarts)}
    text = printed(capsys, "--slurm", "--print", "--requeue", "train")
    ran = subprocess.run(["bash"], input=text, capture_output=True, text=True, env=environment, check=False)
    assert (ran.returncode, ran.stdout) == ((75, "requeued\n") if comes_back else (code, ""))


def test_each_task_of_an_array_has_a_run_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--slurm", "--print", "--requeue", "--array=0-3%2"]
    text = printed(capsys, *options, "train", "tiny_gpt", "rng.seed=$SLURM_ARRAY_TASK_ID", "run.name=a b")
    number = '"$SLURM_ARRAY_TASK_ID"'
    assert f"-- train tiny_gpt rng.seed={number} 'run.name=a b-'{number}\n" in text
    assert '    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\n' in text
    assert "#SBATCH --array=0-3%2\n#SBATCH --output=%x-%A_%a.out\n" in text
    text = printed(capsys, *options, "train", "tiny_gpt", "run.name=x$SLURM_ARRAY_TASK_ID-b")
    assert f"-- train tiny_gpt run.name=x{number}-b\n" in text
    assert f"-- train tiny_gpt run.name=tiny_gpt-{number}\n" in printed(capsys, *options, "train", "tiny_gpt")
    assert "-- python script.py\n" in printed(capsys, *options, "python", "script.py")


def test_a_job_is_submitted_with_the_script_and_watched_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\ncat > {tmp_path}/script\necho "7;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = printed(capsys, "--slurm", "train", "tiny_gpt")
    assert "Submitted batch job 7. Its output: tiny_gpt-7.out" in said
    assert "onstep control list" in said
    assert (tmp_path / "script").read_text() == printed(capsys, "--slurm", "--print", "train", "tiny_gpt")
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    assert "invalid partition specified: x" in refusal(capsys, "--slurm", "--partition=x", "train")


def test_the_program_on_the_page_is_the_one_that_is_printed_for_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is Python with the same arguments, which needs no Ray to be written."""
    shown = blocks(PAGE, "bash", "text")
    at = next(at for at, block in enumerate(shown) if "--ray auto --print" in block.code)
    monkeypatch.chdir(tmp_path)
    text = printed(capsys, *shown[at].lines()[0].split()[2:])
    assert text == shown[at + 1].code.replace("/shared/lab", str(tmp_path))
    compile(text, "program.py", "exec")
    assert "num_workers=(1, 3), use_gpu=False" in printed(
        capsys, "--ray=local", "--nnodes=1:3", "--print", "--", "python", "-m", "job", "a b"
    )


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_line_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ray=auto requires Ray Train, which is not installed: pip install 'onstep[ray]'" in refusal(
        capsys, "--ray=auto", "train"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--slurm", "train"], "--slurm requires sbatch, which is not on the path; run this on a login node"),
        (["--kubernetes=jobset", "train"], "--kubernetes requires --image"),
        (["--kubernetes=jobset", "--image=i", "--name=2_b", "train"], "got '2_b'; give another one"),
        (["--kubernetes=trainjob", "--image=i", "--volume=here", "train"], "CLAIM:/PATH, got 'here'"),
        (["--slurm", "--kubernetes=jobset", "train"], "exclude each other"),
        (["--slurm", "--time=soon", "train"], "--time must be MINUTES, HH:MM:SS or DAYS-HH:MM:SS, got 'soon'"),
        (["--slurm", "--array=all", "train"], "--array must be numbers and ranges, such as 0-3 or 0-31%4, got 'all'"),
        (["--slurm", "--sbatch=account=lab", "train"], "got 'account=lab'"),
        (["--slurm", "--rdzv=a:1", "train"], "--rdzv belongs to a launch on this machine; drop it"),
        (["--time=1", "train"], "--time belongs to --slurm; drop it, or add --slurm"),
        (["--gpus-per-node=1", "train"], "drop it, or add --slurm"),
        (["--ray=here", "train"], "--ray must be HOST:PORT, auto or local, got 'here'"),
        (
            ["--ray=auto", "python", "-c", "1"],
            "which are Python: train, finetune, run, python script.py or python -m MODULE",
        ),
        (["--ray=auto", "--slurm", "train"], "--slurm and --ray exclude each other"),
        (["--ray=auto", "--rdzv=a:1", "train"], "--rdzv belongs to a launch on this machine; drop it"),
        (["--print", "train"], "--print belongs to --slurm and --ray; drop it, or add --slurm"),
        ([], "requires what to run: onstep launch -- train tiny_gpt"),
        (["trian"], "got 'trian'"),
        (["gone.py"], "gone.py: the file does not exist"),
        (["python", "gone.py"], "gone.py: the file does not exist"),
        (["--slurm", "python", "gone.py"], "gone.py: the file does not exist"),
        (["--slurm", "--print"], "requires what to run: onstep launch -- train tiny_gpt"),
        (["--nnodes=3:2", "train"], "LEAST:MOST of at least 1, such as 2 or 1:4, got '3:2'"),
        (["--nnodes=2", "train"], "--nnodes=2 requires --rdzv, where the nodes meet"),
        (["--nnodes=2", "--rdzv=host", "train"], "HOST:PORT or the path of a file, got 'host'"),
        (["--nnodes=2", "--rdzv=gone/rdzv", "train"], "--rdzv=gone/rdzv is in a directory that does not exist"),
        (["--nnodes=2", "--rdzv=h:1", "--rdzv-conf=a", "train"], "NAME=NUMBER,NAME=NUMBER of join_timeout, "),
        (["--nnodes=2", "--rdzv=h:1", "--rdzv-conf=join_tmeout=9", "train"], "got 'join_tmeout=9'"),
        (["--nnodes=2", "--rdzv=h:1", "--rdzv-conf=join_timeout=0", "train"], "got 'join_timeout=0'"),
        (["--log-dir=/dev/null/logs", "train"], "--log-dir=/dev/null/logs cannot be written to (Not a directory)"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_one_line(
    words: list[str], reason: str, empty_path: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal(capsys, *words)


@pytest.mark.parametrize("words", [["gone.py"], ["python", "/app/gone.py"], ["gone-program", "x"]])
def test_what_runs_elsewhere_need_not_be_here(
    words: list[str], empty_path: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"-- {' '.join(words)}\n" in printed(capsys, "--slurm", "--print", "--", *words)
    assert yaml.safe_load(printed(capsys, "--kubernetes=jobset", "--image=i", "--name=job", "--", *words))


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with no other fields than these."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def each(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, COUNT, YES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"const": True}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
MOUNTS = each(fields("name mountPath", name=NAME, mountPath=TEXT))
VOLUMES = each(fields("name", name=NAME, persistentVolumeClaim=fields("claimName", claimName=NAME)))
RESOURCES = fields(limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}})
METADATA = fields("name", name=NAME)
PATCHED_POD = fields(
    terminationGracePeriodSeconds=COUNT,
    volumes=VOLUMES,
    containers=each(fields("name", name=NAME, volumeMounts=MOUNTS)),
)
PATCHED_JOB = fields("name", name=NAME, template=fields(spec=fields(template=fields(spec=PATCHED_POD))))
TRAIN_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=fields(
        "runtimeRef",
        runtimeRef=fields("name", name=NAME),
        trainer=fields(
            image=TEXT, command=each(TEXT), numNodes=COUNT, numProcPerNode=COUNT, resourcesPerNode=RESOURCES
        ),
        runtimePatches=each(
            fields(
                "manager",
                manager=TEXT,
                trainingRuntimeSpec=fields(template=fields(spec=fields(replicatedJobs=each(PATCHED_JOB)))),
            )
        ),
    ),
)
"""Fields of Kubeflow Trainer 2.3, as its models in `kubeflow-trainer-api` name them."""
POD = fields(
    "containers",
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=COUNT,
    volumes=VOLUMES,
    containers=each(
        fields("name", name=NAME, image=TEXT, command=each(TEXT), resources=RESOURCES, volumeMounts=MOUNTS)
    ),
)
INDEXED_JOB = fields(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["NonIndexed", "Indexed"]},
    backoffLimit=COUNT,
    template=fields(spec=POD),
)
JOB_SET = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=fields(
        network=fields(enableDNSHostnames=YES),
        failurePolicy=fields(maxRestarts=COUNT),
        replicatedJobs=each(fields("name template", name=NAME, replicas=COUNT, template=fields(spec=INDEXED_JOB))),
    ),
)


@pytest.mark.parametrize(("kind", "schema"), [("trainjob", TRAIN_JOB), ("jobset", JOB_SET)])
@pytest.mark.parametrize("more", [[], ["--gpus-per-node=8", "--volume=claim:/runs", "--max-restarts=2"]])
def test_manifests_have_fields_that_kubernetes_knows(
    kind: str, schema: dict[str, Any], more: list[str], empty_path: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--kubernetes={kind}", "--image=me/onstep:1", "--nodes=2", *more]
    found = yaml.safe_load(printed(capsys, *words, "train", "tiny_gpt"))
    jsonschema.validate(found, schema)
    assert found["metadata"]["name"] == "tiny-gpt"
    assert "claimName: claim" in yaml.safe_dump(found) or not more
