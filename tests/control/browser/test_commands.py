"""The buttons of the page in a real browser: each sends what it says, and what became of it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.control.browser.conftest import Watched
from tests.control.browser.steered_job import ENDING, Served, SteeredJob

pytestmark = pytest.mark.process


@pytest.fixture
def training(job: SteeredJob, opened: Watched) -> Iterator[SteeredJob]:
    """The job, which takes commands from now on."""
    job.train()
    yield job
    job.close()


def test_every_command_of_the_job_has_a_button(opened: Watched, job: SteeredJob) -> None:
    names = {one["name"] for one in job.feed.status["commands"]} - {"resume"}  # shown in place of Pause
    shown = opened.page.locator("[data-command]").evaluate_all("(all) => all.map((one) => one.dataset.command)")
    assert set(shown) == names


def test_a_button_sends_its_command(opened: Watched, training: SteeredJob) -> None:
    buttons = {"Save": "save_checkpoint", "Evaluate": "evaluate", "Ping": "status", "Dump router": "dump_router"}
    for button, command in buttons.items():
        opened.page.get_by_role("button", name=button, exact=True).click()
        opened.page.locator(f".toast.is-applied[data-command={command}]", has_text="applied at step").wait_for()
    assert training.taken == [(command, {}) for command in buttons.values()]


def test_a_click_shows_queued_until_the_step_ends(opened: Watched, job: SteeredJob) -> None:
    opened.page.get_by_role("button", name="Save", exact=True).click()
    opened.page.locator(".toast.is-queued", has_text="Save: queued").wait_for()
    job.step()
    opened.page.locator(".toast.is-applied", has_text="Save: applied at step 30").wait_for()


def test_pause_becomes_resume_and_back(opened: Watched, training: SteeredJob) -> None:
    opened.page.get_by_role("button", name="Pause").click()
    opened.page.get_by_role("button", name="Resume").click()
    opened.page.get_by_role("button", name="Pause").wait_for()
    assert [name for name, _ in training.taken] == ["pause", "resume"]


FORMS = [
    ("Skip batch…", {"Count": "5"}, ("skip_batch", {"count": 5})),
    ("Profile…", {}, ("profile", {"steps": 3})),
    ("Generate…", {"Prompts": "def \nclass "}, ("generate", {"prompts": ["def ", "class "], "max_new_tokens": 64})),
    ("Roll back…", {"Step": "40", "Lr factor": "0.5"}, ("rollback", {"step": 40, "lr_factor": 0.5})),
    ("Set…", {"Key": "logging_steps", "Value": "25"}, ("set", {"key": "logging_steps", "value": 25})),
    ("Set…", {"Key": "lr_factor"}, ("set", {"key": "lr_factor", "value": None})),
]


def test_a_form_sends_its_fields(opened: Watched, training: SteeredJob) -> None:
    for button, fields, sent in FORMS:
        opened.page.get_by_role("button", name=button).click()
        dialog = opened.page.get_by_role("dialog")
        for label, text in fields.items():
            field = dialog.get_by_label(label, exact=True)
            field.select_option(text) if field.evaluate("(one) => one.tagName") == "SELECT" else field.fill(text)
        dialog.get_by_role("button", name=button.rstrip("…"), exact=True).click()
        opened.page.locator(f".toast.is-applied[data-command={sent[0]}]").first.wait_for()
        assert training.taken == [sent]
        training.taken.clear()
        opened.page.get_by_role("button", name="Dismiss").click()


def test_what_ends_the_run_asks_first_and_says_how_it_ended(
    serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    jobs = {"Stop": SteeredJob("job-a"), "Save and stop": SteeredJob("job-b"), "Abort": SteeredJob("job-c")}
    watched = new_page(viewport={"width": 1600, "height": 900})
    watched.page.goto(serve(*jobs.values()).new_link())
    for (button, job), command in zip(jobs.items(), ENDING, strict=True):
        job.train()
        watched.page.get_by_role("checkbox", name=job.served.job_id).check()
        card = watched.page.locator(".card", has_text=job.served.job_id)
        dialog = watched.page.get_by_role("dialog")
        card.get_by_role("button", name=button, exact=True).click()
        dialog.get_by_role("button", name="Cancel").click()
        dialog.wait_for(state="hidden")
        assert job.taken == []
        card.get_by_role("button", name=button, exact=True).click()
        dialog.get_by_role("button", name=button, exact=True).click()
        card.get_by_text(f"This run has ended: {command} by browser").wait_for()
        assert card.locator(".commands button:enabled").count() == 0
        assert job.taken == [(command, {})]


def test_a_refused_command_says_why(opened: Watched, job: SteeredJob) -> None:
    job.inbox.close("training has ended at step 30.")
    opened.page.get_by_role("button", name="Save", exact=True).click()
    opened.page.locator(
        ".toast.is-refused", has_text="refused: save_checkpoint: training has ended at step 30."
    ).wait_for()
    opened.complaints[:] = [one for one in opened.complaints if "409" not in one]  # the browser's own line


def test_results_of_commands_are_shown(opened: Watched, training: SteeredJob) -> None:
    opened.page.get_by_role("button", name="Stacks").click()
    opened.page.locator("#results pre", has_text="rank 0").wait_for()
    assert 'File "loop.py", line 1, in run\n  train()' in opened.page.locator("#results pre").text_content()


def test_a_setting_is_changed_and_restored_in_the_table(opened: Watched, training: SteeredJob) -> None:
    row = opened.page.locator("#settings tr", has_text="lr_factor")
    row.get_by_label("lr_factor").fill("0.25")
    row.get_by_role("button", name="Set").click()
    row.get_by_role("button", name="Restore").click()
    row.get_by_role("button", name="Restore").wait_for(state="hidden")
    assert [data["value"] for _, data in training.taken] == [0.25, None]
    assert row.get_by_label("lr_factor").input_value() == "1"


def test_save_is_reached_and_pressed_by_keyboard_alone(opened: Watched, training: SteeredJob) -> None:
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement.dataset.command === 'save_checkpoint'"):
            break
    outline = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    opened.page.keyboard.press("Enter")
    opened.page.locator(".toast.is-applied", has_text="Save: applied").wait_for()
    assert outline == "solid"
    assert training.taken == [("save_checkpoint", {})]


def test_escape_closes_a_dialog_and_focus_returns(opened: Watched, job: SteeredJob) -> None:
    opened.page.get_by_role("button", name="Abort").focus()
    opened.page.keyboard.press("Space")
    opened.page.get_by_role("dialog").wait_for()
    opened.page.keyboard.press("Escape")
    opened.page.get_by_role("dialog").wait_for(state="hidden")
    assert opened.page.evaluate("document.activeElement.dataset.command") == "abort"
    job.step()
    assert job.taken == []
