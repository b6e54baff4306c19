"""What the tests share: small real configurations and a small corpus."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from onstep.config import ConfigContainer
from onstep.recipes import tiny_gpt_pretrain_config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several test processes share two cores, and bits must not depend on how."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 kB of real text: some modules of the standard library."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("corpus")
    library = Path(json.__file__).parent.parent
    for name in ("bisect.py", "colorsys.py", "heapq.py", "keyword.py", "sched.py", "textwrap.py"):
        shutil.copy(library / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests keep token files."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def tiny_config(corpus: Path, token_cache: Path) -> ConfigContainer:
    """A run of 8 steps of a 2-layer model on the small corpus: seconds on one core."""
    config = tiny_gpt_pretrain_config()
    config.dataset.paths = [str(corpus)]
    config.dataset.cache_dir = str(token_cache)
    config.dataset.split = "80,10,10"
    config.dataset.seq_length = config.model.seq_length = 32
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 32, 2
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 8, 4, 4
    config.scheduler.lr_warmup_iters = 2
    config.validation.eval_on_start = False
    config.validation.eval_interval, config.validation.eval_iters = 5, 2
    config.logger.log_interval = 4
    config.dist.device = "cpu"
    return config
