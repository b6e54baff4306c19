"""What is said about a URL, or by a store, has neither credentials nor markup, and names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.cli.main import main
from onstep.errors import ConfigError, DataError
from onstep.stores.reasons import reason_of
from onstep.stores.urls import check_place, local_place, with_urls, without_secrets

MARKED = "marked-secret"
HEAD = "Error performing GET http://host/b?list-type=2&prefix=x in 4ms - Server returned non-2xx status code: "


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{MARKED}@host/x",
        f"there is no run at https:/user:{MARKED}@host",
        f"https://host/x?X-Amz-Credential=id&X-Amz-Signature={MARKED}&a=b does not exist",
        f"https:/host/x?sig={MARKED}",
        f"https://host/x?access_token={MARKED}",
    ],
)
def test_errors_have_no_credentials(text: str) -> None:
    assert MARKED not in str(DataError(text))
    assert MARKED not in without_secrets(text)


@pytest.mark.parametrize("text", ["what is a@b?", "runs/x@3", "https://host/x?page=2", "C:/a:b@c"])
def test_other_text_is_shown_as_it_is(text: str) -> None:
    assert str(DataError(text)) == text


def test_a_reason_has_the_word_of_the_store_and_no_markup() -> None:
    error = f'{HEAD}404 Not Found: <?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Key>{MARKED}</Key></Error>\n'
    assert reason_of(OSError(error)) == f"{without_secrets(HEAD)}404 Not Found (NoSuchBucket)."
    assert "http://host/b?... in 4ms" in reason_of(OSError(error))
    one_line = (
        f"{HEAD}403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{MARKED}</AWSAccessKeyId>"
    )
    assert reason_of(OSError(one_line)).endswith("403 Forbidden (SignatureDoesNotMatch).")
    assert "there are no credentials" in reason_of(
        OSError("Error performing PUT http://169.254.169.254/latest/api/token")
    )


@pytest.mark.parametrize("place", ["https://host/runs", "s3:/bucket/runs", "hdfs://host/runs", "S3://bucket/runs"])
def test_a_url_that_is_not_one_of_a_store_makes_no_directory(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must "):
        check_place("run.output_dir", place)
    for words in (["train", "tiny_gpt", f"run.output_dir={place}"], ["why", place], ["checkpoint", "list", place]):
        assert main(words) == 1
        assert capsys.readouterr().err.count("error: ") == 1
    assert [*tmp_path.iterdir()] == []
    check_place("run.output_dir", "C:/runs")


def test_a_stream_of_a_url_with_a_signature_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"https://host/x.jsonl?X-Amz-Signature={MARKED}"
    assert main(["config", "show", "tiny_gpt", "dataset.kind=stream", f"dataset.paths=[{url}]"]) != 0
    output = capsys.readouterr()
    assert MARKED not in output.out + output.err
    assert "must be without credentials" in output.err


def test_copies_of_runs_are_in_the_cache_and_shown_as_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("ONSTEP_CACHE", str(tmp_path))
    assert local_place("s3://bucket/runs/x") == tmp_path / "stores" / "s3" / "bucket" / "runs" / "x"
    text = f"{tmp_path}/copies/s3/bucket/runs/x: good, {tmp_path}/copies/file/data/x: bad, {tmp_path}/other"
    assert with_urls(text) == f"s3://bucket/runs/x: good, file:///data/x: bad, {tmp_path}/other"


def test_a_tokenizer_by_url_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokenizer.tokenizer_type=huggingface", "tokenizer.tokenizer_model=s3://bucket/tokenizer"]
    assert main(["config", "show", "tiny_gpt", *words]) == 1
    assert "tokenizer.tokenizer_model=s3://bucket/tokenizer must be a local path" in capsys.readouterr().err
