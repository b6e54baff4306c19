"""schemathesis invents requests from the server's own description; none may be answered with 5xx or beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.control_server import TOKEN, Served, served  # noqa: E402
from tests.support.waiting import PATIENCE  # noqa: E402

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def ended_job(registry: Path) -> Iterator[Served]:
    """A job whose event streams end, and whose commands are refused after some."""
    with served() as job:
        for step in range(50):
            job.feed.add_record({"step": step, "loss": 1.0, "memory": [1, 2], "nan": float("nan")})
        job.feed.add_event("end", {})
        yield job


def test_the_description_is_complete_and_valid(ended_job: Served) -> None:
    schema = schemathesis.openapi.from_dict(description(ended_job))
    schema.config.generation.max_examples = 1
    operations = {f"{one.ok().method.upper()} {one.ok().path}" for one in schema.get_all_operations()}
    assert {"POST /jobs/{job_id}/control", "GET /jobs/{job_id}/events", "GET /metrics", "POST /login"} <= operations
    assert len(operations) == 14


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {TOKEN}"}, {}], ids=["owner", "stranger"])
def test_no_invented_request_is_answered_with_5xx_or_beside_the_description(
    ended_job: Served, headers: dict[str, str]
) -> None:
    fuzz(ended_job, headers, examples=4 if headers else 2)


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {TOKEN}"}, {}], ids=["owner", "stranger"])
def test_no_invented_request_in_many_is_answered_with_5xx_or_beside_the_description(
    ended_job: Served, headers: dict[str, str]
) -> None:
    fuzz(ended_job, headers, examples=60 if headers else 15)


def description(job: Served) -> dict:
    """The server's own."""
    with job.client() as client:
        return client.get("/openapi.json").json()


def fuzz(job: Served, headers: dict[str, str], examples: int) -> None:
    """Send invented requests of every operation, valid ones and invalid ones."""
    schema = schemathesis.openapi.from_dict(description(job))
    operations = [found.ok() for found in schema.get_all_operations()]
    for one in operations:
        send_invented(job, one.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE), headers, examples)
        if one.query or one.body or one.path_parameters:  # else there is nothing to get wrong
            send_invented(job, one.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE), headers, examples)


def send_invented(job: Served, cases, headers: dict[str, str], examples: int) -> None:
    """Send requests, about half of those about a job about the one that exists."""

    @seed(5)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, is_about_ours=st.booleans())
    def send(case, is_about_ours: bool) -> None:
        if is_about_ours and "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = "job"
        for given_values in (case.body, case.query):
            wait = given_values.get("wait") if isinstance(given_values, dict) else None
            if isinstance(wait, (int, float)):
                given_values["wait"] = min(wait, 0.01)
        answer = case.call(base_url=job.url, headers=headers, timeout=PATIENCE, allow_redirects=False)
        case.validate_response(answer, checks=CHECKS, headers=headers)
        job.inbox.take()

    send()
