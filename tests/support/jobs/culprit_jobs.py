"""What the processes of the planted culprits run: `job_*(settings)`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import onstep
from onstep.past import Past
from onstep.training.compute.rows import rows_of
from tests.support.planted_culprits import GARBLED, Case, train, train_base, trainer_of

_FIRST = 31
"""The rewind begins with this step, after the checkpoint in the middle; an epoch follows."""


def job_base(settings: dict[str, Any]) -> None:
    """Train what a run of `pretrain` starts from."""
    train_base(Case(**settings), Path())


def job_train(settings: dict[str, Any]) -> None:
    """Train the run with the culprit."""
    train(Case(**settings), Path())


def job_find(settings: dict[str, Any]) -> dict[str, Any]:
    """Rewind to the step with the culprit; what is first there."""
    case = Case(**settings)
    with _rewound(case) as past:
        seen: dict[str, set[int]] = {}
        while not (culprits := _culprits(case, past, seen)):
            past.next()
        samples = past.samples()
        past.finish_step()
        is_culprit = [(one.rank, one.micro_batch, max(one.row, 0)) in culprits for one in samples]
        by_share = max(range(len(samples)), key=lambda at: samples[at].share)
        by_gradient = max(range(len(samples)), key=lambda at: samples[at].grad_norm or 0.0)
        noted = [
            at
            for at, one in enumerate(samples)
            if any(" same content " in x or " of its text " in x for x in one.unusual)
        ]
        return {
            "step": past.step,
            "samples": len(samples),
            "culprits": len(culprits),
            "by_share": is_culprit[by_share],
            "by_gradient": is_culprit[by_gradient],
            "by_unusual": bool(noted) and all(is_culprit[at] for at in noted),
            "summary": past.comparison.summary,
            "notes": [samples[at].unusual for at in range(len(samples)) if is_culprit[at]][:1],
        }


def _rewound(case: Case) -> AbstractContextManager[Past]:
    if case.door == "trainer":
        return trainer_of(case, Path()).rewind(_FIRST)
    return onstep.rewind("runs/x", _FIRST)


def _culprits(case: Case, past: Past, seen: dict[str, set[int]]) -> set[tuple[int, int, int]]:
    """The planted samples of the step that is held, of all ranks; of a duplicate those whose text was seen before."""
    world, ids = past.job.run.world, past.current.sample_ids
    assert ids is not None
    own = [
        (world.rank, number, row, ids[number][row], _trace(case, part))
        for number, batch in enumerate(past.batches)
        if not past.current.batches.is_filler[number]
        for row, part in enumerate(rows_of(batch))
    ]
    found = [one for rank in world.gather(own) for one in rank]
    if case.kind != "duplicate":
        return {one[:3] for one in found if one[4]}
    for *_, index, trace in found:
        for text in trace:
            seen.setdefault(text, set()).add(index)
    return {
        one[:3] for one in found if sum(bool(seen[text] - {one[3]}) for text in one[4]) >= max(len(one[4]) * 0.4, 1)
    }


def _trace(case: Case, part: Any) -> set[str]:
    """What shows that a sample is planted; of a possible duplicate, what it consists of."""
    tokens = part.get("tokens", part.get("input_ids"))
    if case.kind == "garbled":
        return {"garbled"} if int(torch.isin(tokens, torch.tensor(list(GARBLED))).sum()) > 20 else set()
    if case.kind == "answer":
        return {"answer"} if b"XX" in bytes(one for one in tokens[0].tolist() if one < 256) else set()
    if case.kind == "huge":
        return {"huge"} if float(part["x"].abs().max()) > 1e3 else set()
    if case.kind == "label":
        return {"label"} if _is_wrong(case, part) else set()
    if tokens is None:
        return {str(part["x"].tolist())}
    text = bytes(one if one < 256 else 10 for one in tokens[0].tolist())
    return {text[at : at + 24].decode(errors="replace") for at in range(len(text) - 23)}


def _is_wrong(case: Case, part: Any) -> bool:
    from tests.support.planted_culprits import rows_of as planted

    rows, clean = planted(case)
    wrong = next(one for one, good in zip(rows, clean, strict=True) if one["labels"] != good["labels"])
    return torch.equal(part["x"][0], wrong["x"])


def job_again_and_again(settings: dict[str, Any]) -> None:
    """Rewind the run until the process is killed."""
    case = Case(**settings)
    while True:
        with _rewound(case) as past:
            past.samples()
            past.next()


def job_look(settings: dict[str, Any]) -> dict[str, Any]:
    """Rewind the run to the step after the checkpoint in its middle; how it compares with the record."""
    with _rewound(Case(**settings)) as past:
        samples = past.samples()
        return {
            "summary": past.finish_step().comparison.summary,
            "num_samples": len(samples),
            "share": sum(one.share for one in samples),
        }
