"""Families of transformers trained at the command line's level: `python benchmarks/families.py [--short] [NAME ...]`.

For each tiny model with random weights, and a tokenizer trained on the spot: a run on packed conversations has the
losses of a loop written by hand over the class of transformers; the same run, killed by SIGKILL and started again, ends
with the same bits; two ranks learn what one does; packed documents have the logits of documents alone, or are refused;
the exported directory opens with the right class, and continues a prompt as the class's own `generate` does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils import clip_grad_norm_

from onstep import Callback
from onstep import finetune as finetune_run
from onstep.callbacks import JsonLogger
from onstep.cli.generation.trained import open_trained
from onstep.config import ConfigContainer, apply_overrides
from onstep.errors import ConfigError
from onstep.models.generation.generate import Sampling, generate
from onstep.models.hf.any_directory import load_directory
from onstep.models.hf.causal_lm import CausalLM, block_mask
from onstep.models.hf.documents_probe import prepare_for_data
from onstep.recipes import any_finetune_config
from onstep.record import read_records
from onstep.training import forward_step
from tiny_families import FAMILIES, family, write_data

STEPS, KILLED_AT, LENGTH = 6, 5, 64
SHORT = ("gemma3_text", "falcon", "mamba")
LENGTHS = (20, 7, 37)
"""Documents of a packed sequence."""
NOT_TRAINED = ("bert", "opt")
"""Of `FAMILIES`, those for refusals."""


class Kill(Callback):
    """Kills the process at the end of a step."""

    def on_step_end(self, context: Any) -> None:
        if context.state.train_state.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def configuration(base: str, name: str, *, packing: bool) -> ConfigContainer:
    """A run on conversations from the weights in `base`."""
    config = any_finetune_config()
    words = (
        f"run.name={name} checkpoint.pretrained_checkpoint={base} dataset.paths=[chat.jsonl] dataset.split=80,20,0 "
        f"dataset.packing={packing} dataset.cache_dir=cache-{base} dataset.seq_length={LENGTH} "
        f"model.seq_length={LENGTH} dataset.num_workers=0 train.num_epochs=null train.train_iters={STEPS} "
        f"train.global_batch_size=4 train.micro_batch_size=1 optimizer.lr=1e-3 "
        f"optimizer.clip_grad=1.0 optimizer.adam_eps=1e-6 scheduler.lr_decay_style=constant "
        f"scheduler.lr_warmup_fraction=null "
        f"checkpoint.save_interval=2 checkpoint.most_recent_k=-1 validation.eval_iters=1 validation.eval_interval=3 "
        f"logger.log_interval=1 logger.console=quiet mixed_precision=null dist.device=cpu"
    )
    apply_overrides(config, words.split())
    return config


def losses_of(name: str) -> list[float]:
    """The losses of a run's steps."""
    lines = read_records(Path("runs") / name / "trainer_logs.json")
    return [line["loss"] for line in lines if "loss" in line]


def job_train(base: str, name: str, packing: bool) -> None:
    finetune_run(configuration(base, name, packing=packing), callbacks=[JsonLogger()])


def job_killed(base: str, name: str, packing: bool) -> None:
    finetune_run(configuration(base, name, packing=packing), callbacks=[JsonLogger(), Kill()])


def job_loop(base: str, name: str, packing: bool) -> float:
    """The largest difference of a loss between a run and a loop over the class of transformers."""
    batches: list[dict[str, torch.Tensor]] = []

    def seen(data: Any, model: Any) -> Any:
        batch = next(data)
        if model.training:
            batches.append({key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)})
        return forward_step(iter([batch]), model)

    finetune_run(configuration(base, name, packing=packing), seen, [JsonLogger()])
    separation = _separation(base) if packing else None
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(base, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        micros = batches[4 * step : 4 * step + 4]
        count = sum(int((one["labels"] != -100).sum()) for one in micros)
        total = 0.0
        for batch in micros:
            inputs: dict[str, Any] = {}
            if packing:
                inputs["position_ids"] = batch["position_ids"]
                if separation != "positions":
                    inputs["attention_mask"] = block_mask(batch["document_ids"])
            labels = batch["labels"]
            output = model(input_ids=batch["tokens"], labels=labels, shift_labels=labels, use_cache=False, **inputs)
            loss = output.loss * int((labels != -100).sum()) / count
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return max(abs(one - other) for one, other in zip(losses_of(name), found, strict=True))


def _separation(base: str) -> str:
    model = load_directory(base)
    assert isinstance(model, CausalLM)
    prepare_for_data(model, has_documents=True, seq_length=LENGTH)
    return str(model.separation)


def job_packed(base: str, name: str, packing: bool) -> list[Any]:
    """How documents are separated and the largest relative difference of a logit, or the refusal."""
    model = load_directory(base).eval()
    assert isinstance(model, CausalLM)
    try:
        prepare_for_data(model, has_documents=True, seq_length=LENGTH)
    except ConfigError as error:
        return [None, str(error)]
    tokens = torch.randint(model.config.vocab_size or 1, (1, sum(LENGTHS)))
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions, document_ids=ids)[0]
        alone = torch.cat([model(one[None])[0] for one in torch.split(tokens[0], list(LENGTHS))])
    return [str(model.separation), float((packed - alone).abs().max() / alone.abs().max())]


def job_exported(base: str, name: str, packing: bool) -> list[Any]:
    """The class that opens the export, whether it has the run's last weights, and the same greedy continuation."""
    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(f"runs/{name}/model", dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(f"runs/{name}/model")
    trained = open_trained(f"runs/{name}")
    ids = tokenizer("All work and no", return_tensors="pt")["input_ids"]
    ours = generate(trained.model, ids, max_new_tokens=12, temperature=0.0)
    text = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    said = "".join(trained.pieces(ids[0].tolist(), Sampling(0.0), 12, None))
    return [type(theirs).__name__, ours[:, : text.shape[1]].tolist() == text.tolist(), said]


def job_same_bits(base: str, name: str, packing: bool) -> bool:
    """Whether the run that was killed ended with the weights and the losses of the one that was not."""
    from safetensors.torch import load_file

    one, other = (load_file(f"runs/{run}/model/model.safetensors") for run in (name, f"{name}-killed"))
    is_same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return is_same and losses_of(name) == losses_of(f"{name}-killed")


def job_two_ranks(base: str, name: str, packing: bool) -> float:
    """The largest difference of a loss between one rank and two."""
    return max(abs(a - b) for a, b in zip(losses_of(name), losses_of(f"{name}-ranks"), strict=True))


def forked(job: Callable[..., Any], *arguments: Any, ranks: int = 1) -> tuple[list[int], Any]:
    """The exit codes of `job` in processes of its own, and what it returned on rank 0."""
    result = Path(f"result-{os.getpid()}.json")
    result.unlink(missing_ok=True)
    children = []
    with socket.socket() as held:  # until rank 0 listens there, nobody else gets the port
        held.bind(("127.0.0.1", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _be_rank(job, arguments, rank, ranks, held.getsockname()[1], result)
            children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes, json.loads(result.read_text()) if result.exists() else None


def _be_rank(job: Callable[..., Any], arguments: Any, rank: int, ranks: int, port: int, result: Path) -> None:
    code = 1
    try:
        output = os.open(f"{job.__name__}-{arguments[1]}-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if ranks > 1:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), **place})
        torch.set_num_threads(1)
        returned = job(*arguments)
        if rank == 0:
            result.write_text(json.dumps(returned))
        code = 0
    except BaseException:
        logging.exception("the job failed")
    finally:
        sys.stdout.flush()
        os._exit(code)


def row(base: str) -> list[str]:
    """A line of the table.

    Raises:
        AssertionError: if something does not hold.
    """
    began = time.monotonic()
    assert forked(_make, base, base)[0] == [0], base
    _, (separation, difference) = forked(job_packed, base, base, True)
    packing = separation is not None
    assert not packing or difference <= 1e-5, (base, difference)
    assert packing or "dataset.packing=false" in difference, difference
    codes, from_loop = forked(job_loop, base, base, packing)
    assert codes == [0], (base, Path(f"job_loop-{base}-0.out").read_text()[-700:])
    assert from_loop <= 1e-5, (base, from_loop)
    assert forked(job_killed, base, f"{base}-killed", packing)[0] == [-signal.SIGKILL], base
    assert forked(job_train, base, f"{base}-killed", packing)[0] == [0], base
    assert forked(job_same_bits, base, base, packing)[1] is True, base
    assert forked(job_train, base, f"{base}-ranks", packing, ranks=2)[0] == [0, 0], base
    _, from_ranks = forked(job_two_ranks, base, base, packing)
    assert from_ranks <= 1e-5, (base, from_ranks)
    codes, exported = forked(job_exported, base, base, packing)
    assert codes == [0], (base, Path(f"job_exported-{base}-0.out").read_text()[-700:])
    assert exported[1] is True, (base, exported)
    packed = f"{separation}, {difference:.0e}" if packing else "refused"
    cells = (base, exported[0], packed, f"{from_loop:.0e}", "same bits", f"{from_ranks:.0e}", "equal")
    return [*cells, f"{time.monotonic() - began:.0f}"]


def _make(base: str, name: str) -> None:
    family(Path(base), base)


HEAD = ("family", "exported class", "packed - alone", "run - loop", "killed", "2 ranks - 1", "generated", "s")


def main() -> None:
    """Print the table; fails at the first family for which something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families; all without any")
    parser.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT)}")
    asked = parser.parse_args()
    names = asked.names or (SHORT if asked.short else [one for one in FAMILIES if one not in NOT_TRAINED])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_data(Path())
        print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD), flush=True)
        for name in names:
            print("| " + " | ".join(row(name)) + " |", flush=True)


if __name__ == "__main__":
    main()
