"""The page at `/`, in a browser: what people see, and what nobody may make of it."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from quill.server.auth.key_file import add_key
from tests.server.http.page.conftest import Open, address_of
from tests.server.running import Running, running_server
from tests.server.tiny_bundle import TinyBundle

pytestmark = pytest.mark.page

PHONE = {"width": 390, "height": 800}
HTML = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b>"


def url_of(running: Running) -> str:
    return f"http://127.0.0.1:{running.server.http_port}"


def ask(page: Page, text: str, **options: object) -> Locator:
    """Sends it, and returns the answer that is being made."""
    for name, value in options.items():
        page.fill(f"#option-{name}", str(value))
    page.fill("#input", text)
    page.locator("#input").press("Enter")
    return page.locator(".answer").last


def finished(answer: Locator) -> str:
    """Its text, once it is over."""
    expect(answer.locator(".facts")).to_be_visible()
    return answer.locator(".text").text_content() or ""


def test_an_answer_comes_as_it_is_made_and_says_what_it_took(
    reciter: Running, open_page: Open
) -> None:
    page = open_page(url_of(reciter))
    expect(page).to_have_title("reciter · Quill")
    reciter.session.hold()
    answer = ask(page, "hello", max_tokens=6)
    reciter.session.let_go(3)
    text = answer.locator(".text")
    expect(text).to_have_text("lmn")  # "k" ends what the template makes of the question
    expect(page.locator("#send")).to_have_text("Stop")
    reciter.session.let_go()
    assert finished(answer) == "lmnopq"
    facts = answer.locator(".facts").text_content() or ""
    assert "max tokens  ·  6 tokens  ·  9 prompt tokens  ·  first token " in facts
    assert " tokens/s" in facts
    assert " total" in facts
    ask(page, "and on")
    expect(page.locator(".user")).to_have_count(2)
    finished(page.locator(".answer").last)
    record = reciter.next_record("OK")
    assert record.frontend == "http"


def test_escape_stops_an_answer_and_the_server_hears_of_it(
    reciter: Running, open_page: Open
) -> None:
    page = open_page(url_of(reciter))
    reciter.session.hold()
    answer = ask(page, "hello", max_tokens=100)
    reciter.session.let_go(2)
    expect(answer.locator(".text")).to_have_text("lm")
    page.keyboard.press("Escape")
    expect(answer.locator(".facts")).to_contain_text("stopped")
    assert reciter.next_record("CANCELLED").num_generated == 2
    expect(page.locator("#send")).to_have_text("Send")


def test_whoever_asks_on_stops_the_answer_and_keeps_it(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter))
    reciter.session.hold()
    first = ask(page, "hello", max_tokens=100)
    reciter.session.let_go(2)
    expect(first.locator(".text")).to_have_text("lm")
    ask(page, "more", max_tokens=4)
    expect(page.locator(".answer")).to_have_count(2)
    reciter.session.let_go()
    second = page.locator(".answer").last
    assert finished(second) == "lmno"
    num_read = len("u:helloa:lmu:morek") + 3  # a token ends each message
    expect(second.locator(".facts")).to_contain_text(f"{num_read} prompt tokens")
    page.click("#clear")
    expect(page.locator(".user, .answer")).to_have_count(0)
    again = ask(page, "hi")
    finished(again)
    expect(again.locator(".facts")).to_contain_text("6 prompt tokens")


def test_the_same_seed_gives_the_same_answer_and_a_new_one_another(
    talker: str, open_page: Open
) -> None:
    page = open_page(talker)
    first = ask(page, "hello", temperature=1.5, max_tokens=40)
    text = finished(first)
    button = first.get_by_role("button", name=re.compile("Seed [0-9]+"))
    seed = (button.text_content() or "").removeprefix("Seed ")
    button.click()
    expect(page.locator("#option-seed")).to_have_value(seed)
    page.get_by_role("button", name="New seed").click()
    assert finished(page.locator(".answer")) != text
    page.click("#clear")
    assert finished(ask(page, "hello")) == text  # with the seed in the options
    page.get_by_role("button", name="Regenerate").click()
    assert finished(page.locator(".answer")) == text
    expect(page.locator(".answer")).to_have_count(1)


def test_a_link_gives_a_shared_answer_again(talker: str, open_page: Open) -> None:
    page = open_page(talker)
    page.fill("#option-system", "Brief.")
    page.fill("#option-stop", "~~\n@@")
    finished(ask(page, "hello", temperature=1.2, max_tokens=10))
    text = finished(ask(page, "<b>on</b>"))
    assert text
    page.get_by_role("button", name="Share").last.click()
    expect(page.locator("#toast")).to_be_visible()
    link = page.url
    assert "#share=" in link
    other = open_page(link)
    expect(other.locator("#toast")).to_contain_text("Press Enter")
    expect(other.locator("#option-system")).to_have_value("Brief.")
    expect(other.locator(".user, .assistant")).to_have_count(2)
    other.locator("#input").press("Enter")
    assert finished(other.locator(".answer")) == text
    open_page(talker + "/#share=bm9uc2Vuc2U")  # no JSON: nothing happens


def test_tokens_tell_what_might_have_been_by_pointer_and_by_keys(
    reciter: Running, open_page: Open
) -> None:
    page = open_page(url_of(reciter))
    answer = ask(page, "hello", max_tokens=4, alternatives=3)
    finished(answer)
    answer.locator(".token").nth(1).hover()
    popover = page.locator("#popover")
    expect(popover.locator("tr")).to_have_count(3)
    expect(popover.locator(".chosen td").first).to_have_text("m")
    expect(popover.locator(".chosen .share")).to_have_text("100.0%")
    answer.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    expect(popover.locator(".chosen td").first).to_have_text("n")
    page.keyboard.press("Escape")
    expect(popover).to_be_hidden()


def test_tokens_that_are_parts_of_a_character_share_it(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter))
    page.get_by_role("tab", name="Complete").click()
    answer = ask(page, "é", max_tokens=4, alternatives=1)
    assert finished(answer) == "éé"
    expect(answer.locator(".token")).to_have_text(["é", "é"])
    answer.locator(".token").first.hover()
    expect(page.locator("#popover table")).to_have_count(2)
    expect(page.locator("#popover .chosen td:first-child")).to_have_text(["<c3>", "<a9>"])


def test_text_shows_whole_whatever_its_tokens(talker: str, open_page: Open) -> None:
    """The small network's bytes are hardly ever characters."""
    page = open_page(talker)
    asked = {"temperature": 2, "max_tokens": 80, "seed": 5}
    parted = ask(page, "hello", **asked)
    text = finished(parted)
    assert parted.locator(".token").count() > 5
    page.click("#clear")
    whole = ask(page, "hello", **asked, alternatives="")
    assert finished(whole) == text
    expect(whole.locator(".token")).to_have_count(0)


def test_what_people_write_stays_text(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter), expected="requires 'TrustedHTML'")
    finished(ask(page, HTML, max_tokens=3))
    expect(page.locator(".user .text")).to_have_text(HTML)
    assert page.locator("img, b, main script").count() == 0
    refused = page.evaluate("() => { try { document.body.innerHTML = 'x' } catch { return true } }")
    assert refused, "the policy lets nobody write HTML"


def test_the_dashboard_moves_with_the_server(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter))
    reciter.session.hold()
    ask(page, "hello", max_tokens=100)
    reciter.session.let_go(30)
    page.get_by_role("tab", name="Dashboard").click()
    card = page.locator(".card")
    expect(card.nth(0).locator(".number")).to_have_text("1 / 0")
    expect(card.nth(1).locator(".quiet")).to_have_text("30 since the start")
    reciter.session.let_go()
    expect(card.nth(0).locator(".number")).to_have_text("0 / 0")
    expect(card.nth(1).locator(".quiet")).to_have_text("100 since the start")
    expect(card.nth(2).locator(".number")).not_to_have_text("–")
    expect(page.locator("#calls")).to_contain_text("/v1/chat/completions")
    page.get_by_role("tab", name="Chat").click()
    finished(page.locator(".answer"))


def test_colours_are_the_systems_until_somebody_chooses(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter), color_scheme="dark")
    dark = "rgb(21, 23, 26)"
    expect(page.locator("body")).to_have_css("background-color", dark)
    page.locator("#theme").click()
    expect(page.locator("body")).not_to_have_css("background-color", dark)
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Dark")
    page.emulate_media(color_scheme="light")
    expect(page.locator("body")).to_have_css("background-color", dark)
    page.reload()
    expect(page.locator("#theme")).to_have_text("Dark")


def test_a_phone_is_wide_enough(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter), viewport=PHONE, is_mobile=True, has_touch=True)
    page.fill("#input", "hello " + "x" * 60)
    page.tap("#send")
    answer = page.locator(".answer")
    finished(answer)
    for tab in ("Chat", "Complete", "Dashboard"):
        page.get_by_role("tab", name=tab).tap()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    page.get_by_role("tab", name="Chat").tap()
    page.locator("#options summary").tap()
    expect(page.locator("#option-temperature")).to_be_in_viewport()
    expect(page.locator("#send")).to_be_in_viewport()


def test_everything_is_reached_by_keys(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter))
    finished(ask(page, "hello", max_tokens=3))
    reached = set()
    page.locator("#tab-chat").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    assert {"theme", "input", "clear", "send", "option-temperature", "option-tint"} <= reached
    assert {"Regenerate", "Share", "Copy"} <= reached


def test_wrong_options_are_told_in_the_servers_words(reciter: Running, open_page: Open) -> None:
    page = open_page(url_of(reciter), expected="400 (Bad Request)")
    refused = ask(page, "hello", temperature=-1)
    expect(refused.locator(".error")).to_contain_text("temperature is -1")
    expect(page.locator("#input")).to_have_value("hello")  # to try again
    page.fill("#option-temperature", "")
    page.click("#clear")
    page.evaluate("document.querySelector('#option-logit_bias').value = '1:2 x'")
    ask(page, "hello")
    expect(page.locator("#toast")).to_contain_text("Bias")
    expect(page.locator(".user")).to_have_count(0)
    page.fill("#option-logit_bias", "")
    page.fill("#option-num_beams", "2")
    expect(page.locator("#option-temperature")).to_be_disabled()
    expect(page.locator("#option-length_penalty")).to_be_enabled()
    found = ask(page, "hello", max_tokens=3)
    finished(found)
    expect(found.get_by_role("button")).to_have_text(["Copy", "Share"])  # a search has no seed


def test_a_translator_has_two_panes(
    open_page: Open, tiny_translator: TinyBundle, tmp_path: Path
) -> None:
    with address_of(tiny_translator.directory, tmp_path / "log") as url:
        page = open_page(url)
        expect(page.get_by_role("tab")).to_have_text(["Translate", "Dashboard"])
        answer = ask(page, "hello", max_tokens=10)
        finished(answer)
        left, right = page.locator("#composer").bounding_box(), answer.bounding_box()
        assert left is not None
        assert right is not None
        assert left["x"] + left["width"] <= right["x"]
        page.close()


def test_a_key_is_asked_for_and_kept_nowhere(open_page: Open, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "alice")
    with running_server(http_port=0, api_keys=keys) as running:
        page = open_page(url_of(running), expected="401 (Unauthorized)")
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key-field", key)
        page.locator("#key-field").press("Enter")
        page.locator("#tab-chat").wait_for()
        finished(ask(page, "hello", max_tokens=3))
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert key not in kept + page.url
        assert json.loads(kept)[0].keys() <= {"quill.theme"}
        page.get_by_role("button", name="Share").click()
        expect(page.locator("#toast")).to_be_visible()
        assert key not in page.url
        page.close()
