"""What the ranks of the tests of a pipeline's features run: `job_*(settings)`."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from onstep import Callback, pretrain
from onstep.analysis.logs.samples_log import FILE_NAME
from onstep.callbacks import EMA, GradNormLogger, ParameterNormLogger, TextgenCallback, WeightNormLogger
from onstep.config import apply_overrides
from onstep.distributed import open_world
from onstep.errors import ConfigError, OnstepError
from onstep.models.generation.generate import generate
from onstep.models.hf.any_directory import build_model
from onstep.models.hf.stages_probe import keeps_states
from onstep.training.compute.undisturbed import preserve_state
from onstep.training.setup.model_and_data import cut_into_stages
from onstep.training.setup.placement import place
from tests.support.jobs.pipeline_jobs import VOCABULARY, Curve, Evaluated, config_of, family_of
from tests.support.small_configs import small_pretrain_config


class Trouble(Callback):
    """What happens in step 3 or after it, on the last rank or in one stage."""

    ranks = "all"

    def __init__(self, kind: str) -> None:
        self.kind, self.step = kind, 0
        self.is_there = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def on_train_start(self, context: Any) -> None:
        for chunk in context.model:
            for name, parameter in chunk.named_parameters():
                if self.kind == "nan" and name == "layers.0.attention.query.weight":
                    parameter.register_hook(self._spoiled)

    def _spoiled(self, gradient: Any) -> Any:
        return gradient * math.nan if self.step == 3 else gradient

    def on_step_begin(self, context: Any) -> None:
        self.step += 1

    def on_step_end(self, context: Any) -> None:
        if self.step == 3 and self.is_there:
            if self.kind == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.kind == "stop":
                context.control.stop("enough")
            if self.kind == "rollback":
                context.control.rollback("going wrong")


def job_runs(settings: dict[str, Any]) -> list[Any]:
    """Several runs of `pretrain`, each by its keys and what happens; its curve on this rank, and how it ended."""
    return [run(settings, number, *row) for number, row in enumerate(settings["rows"])]


def run(settings: dict[str, Any], number: int, keys: list[str], trouble: str = "") -> dict[str, Any]:
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=4, length=16)
    config.tokenizer.tokenizer_type, config.model.vocab_size = "bytes", 261
    config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 8, 2, settings["steps"]
    config.validation.eval_interval, config.validation.eval_iters = 3, 2
    config.logger.log_interval, config.checkpoint.save_interval = 1, 2
    config.run.output_dir, config.run.name = settings["output"], f"{settings['name']}-{number}"
    given = [key.replace("BASE", f"{settings['output']}/of-1-0") for key in [*settings["keys"], *keys]]
    apply_overrides(config, ["logger.console=quiet", *given])
    curve, evaluated, end = Curve(), Evaluated(), ""
    texts = TextgenCallback(None, ["The", "a license"], max_new_tokens=4)
    try:
        average = EMA(0.5, apply_at_end=False)
        measured = [GradNormLogger(), ParameterNormLogger(power_iter_steps=3), WeightNormLogger(), average]
        pretrain(config, callbacks=[curve, evaluated, texts, *measured, Trouble(trouble)])
    except SystemExit as left:
        end = f"exit {left.code}"
    except OnstepError as error:
        end = str(error) if isinstance(error, ConfigError) else type(error).__name__
    with suppress(ValueError):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found = {"losses": curve.losses, "norms": curve.norms, "evaluated": evaluated.found, "logits": curve.logits}
    found["experts"] = curve.experts
    samples = Path(config.run.output_dir) / config.run.name / FILE_NAME
    found["of_parameters"] = norms_in(samples.parent)
    lines = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    return {**found, "end": end, "texts": [[line["prompt"], line["text"]] for line in lines]}


def norms_in(directory: Path) -> dict[str, float]:
    """What callbacks have recorded of the norms of each parameter, and of all together."""
    found: dict[str, float] = {}
    for path in sorted(directory.rglob("*_norms.json")):
        for record in json.loads(path.read_text()):
            for kind, norms in ((kind, norms) for kind, norms in record.items() if isinstance(norms, dict)):
                found |= {f"{record['global_step']} {kind} {name}": norm for name, norm in norms.items()}
    record_file = directory / "record.jsonl"
    for line in record_file.read_text().splitlines() if record_file.exists() else []:
        record = json.loads(line)
        if "weight_norm" in record:
            found[f"{record.get('step', record.get('global_step'))} all"] = record["weight_norm"]
    return found


GENERATIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 6, "temperature": 0},
    {"max_new_tokens": 20, "seed": 5, "top_k": 7, "repetition_penalty": 1.3},
    {"max_new_tokens": 9, "seed": 3, "top_p": 0.9, "eos_id": 11},
]
"""The second is longer than the window of the model."""


def job_generation(settings: dict[str, Any]) -> list[Any]:
    """The tokens that each row's stages add, and the whole model."""
    return [generated(keys, family, settings["ranks"]) for keys, family in settings["rows"]]


def generated(keys: list[str], family: str | None, ranks: int) -> list[Any]:
    config = config_of(keys, 1)
    if family is not None:
        window = {"sliding_window": 8} if family in ("mistral", "gemma2") else {}
        config.model = family_of(family, **window)
        assert keeps_states(config.model)
    world = open_world(config.dist, config.parallel_sizes(ranks))
    chunks = place(cut_into_stages([build_model(config.model, seed=0)], config, world), world, config)
    whole = build_model(config.model, seed=0)
    prompts = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    chunks[-1].train()
    with preserve_state(chunks[-1]) if world.sizes.dp_shard > 1 else nullcontext():
        found = [generate(chunks[-1], prompts, **options).tolist() for options in GENERATIONS]
    assert chunks[-1].training
    world.close()
    return [found, [generate(whole, prompts, **options).tolist() for options in GENERATIONS]]
