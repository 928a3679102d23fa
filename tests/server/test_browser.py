"""The page in a real browser, over the fake server and over the real one: Chromium, driven by Playwright."""

import contextlib
import re

import httpx
import pytest

from tests.server.asking import listening
from tests.server.browsing import DESKTOP, MARKDOWN, MARKS, ask, expect, finish, wait_for
from tests.server.fake import ACCEPTED, ENGINE, STEP_S, TEXT, TOKENS, WIDTH, serve, steps
from tests.server.pair import app_over, models

pytestmark = MARKS
STEPS = list(steps(WIDTH))
BLOCK = ENGINE["block"]
DOES_NOT_SCROLL = (
    "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
)


# ---- the real server, over the tiny pair


@pytest.fixture
def real_url():
    with app_over(models()) as app, listening(app) as (host, port):
        yield f"http://{host}:{port}"


def test_the_real_server_chats_marks_drafts_and_compares(browser, real_url):
    with contextlib.closing(browser.new_page(viewport=DESKTOP)) as page:  # its feed would keep the server
        chats_marks_and_compares(page, real_url)


def chats_marks_and_compares(page, real_url):
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(real_url)
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("target")
    expect(page.locator("#model-facts")).to_contain_text("safetensors float32")
    expect(page.locator("#drafter")).to_have_text("drafter: draft")
    page.click("#settings-button")
    page.fill("#max-tokens", "40")
    page.fill("#temperature", "0")
    ask(page, "t1 t2 t3")
    finish(page)
    expect(page.locator(".prose")).to_contain_text("t4 t5 t6 t7")
    page.click("#drafts")
    body = {"messages": [{"role": "user", "content": "t1 t2 t3"}], "max_tokens": 40, "temperature": 0}
    counted = httpx.post(f"{real_url}/v1/chat/completions", json=body, timeout=60).json()
    num_steps = counted["metrics"]["speculative_decoding"]["num_spec_steps"]
    expect(page.locator(".foot")).to_contain_text(f"{num_steps} steps instead of 40")
    accepted = page.locator(".tokens .accepted").count()
    assert accepted > 25  # the pair drafts nearly everything
    assert accepted + page.locator(".tokens .own").count() == 40
    expect(page.locator("#rate")).to_have_text(re.compile(r"\d"))
    expect(page.locator("#phases li")).to_have_count(6)
    page.click("#new-chat")
    page.click("#compare")
    ask(page, "t1 t2 t3")
    finish(page)
    expect(page.locator(".verdict")).to_contain_text("The texts are identical.")
    assert problems == []


# ---- chat


def test_an_answer_streams_and_is_formatted(page, fake):
    fake.step_s = 5 * STEP_S  # long enough to be seen under way
    ask(page)
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".prose")).to_contain_text("Speculative")
    finish(page)
    prose = page.locator(".prose")
    expect(prose.locator("ol > li")).to_have_count(3)
    expect(prose.locator("li").first).to_have_text(
        "The drafter proposes a whole block of tokens in one forward."
    )
    expect(prose.locator("strong")).to_have_text("drafter")
    expect(prose.locator("li > code")).to_have_text("one")
    expect(prose.locator("pre .hl-keyword").first).to_have_text("def")
    code = re.search(r"```python\n(.*?)\n```", TEXT, re.S)[1]
    assert prose.locator("pre").text_content() == code
    expect(prose.locator("p").last).to_contain_text("<b>Markup</b> stays text")
    assert prose.locator("b").count() == 0
    expect(page.locator(".foot")).to_contain_text(f"{len(TOKENS)} tokens")
    (body,) = fake.bodies
    assert body["model"] == "default"
    assert body["messages"] == [{"role": "user", "content": "Explain it."}]
    assert body["speculative"] == {"detail": True}
    assert not {"temperature", "top_p", "stop", "tools"} & body.keys()  # the model's
    assert body["max_completion_tokens"] == 1024  # a model that repeats itself does not go on for ever


def test_a_conversation_goes_on_until_a_new_chat(page, fake):
    ask(page, "<img src=x onerror=alert(1)>")
    finish(page)
    ask(page, "And then?")
    finish(page)
    assert page.locator("#log img").count() == 0
    assert [turn["role"] for turn in fake.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.bodies[1]["messages"][1]["content"] == TEXT
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#hello")).to_be_visible()
    ask(page, "Again.")
    finish(page)
    assert len(fake.bodies[2]["messages"]) == 1


SETTINGS = {
    "temperature": ("0.2", "temperature", 0.2),
    "top-p": ("0.8", "top_p", 0.8),
    "top-k": ("40", "top_k", 40),
    "min-p": ("0.05", "min_p", 0.05),
    "repetition-penalty": ("1.1", "repetition_penalty", 1.1),
    "presence-penalty": ("0.5", "presence_penalty", 0.5),
    "frequency-penalty": ("-0.5", "frequency_penalty", -0.5),
    "max-tokens": ("64", "max_completion_tokens", 64),
    "seed": ("7", "seed", 7),
    "stop-texts": ("END\n\\n\\n", "stop", ["END", "\n\n"]),
}


def test_the_settings_reach_the_request(page, fake):
    page.click("#settings-button")
    for field, (typed, _, _) in SETTINGS.items():
        page.fill(f"#{field}", typed)
    page.fill("#system", "Be brief.")
    page.select_option("#width", "4")
    ask(page)
    finish(page)
    expect(page.locator("#settings-reset")).to_have_text("Reset")
    page.click("#settings-reset")
    ask(page)
    finish(page)
    first, second = fake.bodies
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: first[name] for _, name, _ in SETTINGS.values()} == {
        name: value for _, name, value in SETTINGS.values()
    }
    assert first["speculative"] == {"width": 4, "detail": True}
    assert {name for _, name, _ in SETTINGS.values()} & second.keys() == {"seed", "max_completion_tokens"}
    assert (second["seed"] != 7, second["max_completion_tokens"]) == (True, 1024)
    assert second["speculative"] == {"detail": True}


def test_empty_fields_show_what_the_model_is_made_for(open_page, fake):
    page = open_page()
    page.click("#settings-button")
    expect(page.locator("#temperature")).to_have_attribute("placeholder", "0.6")
    assert page.input_value("#temperature") == ""
    shown = {
        field: page.get_attribute(f"#{field}", "placeholder")
        for field in ("top-p", "top-k", "min-p", "presence-penalty", "max-tokens", "seed")
    }
    assert shown == {
        "top-p": "0.95",
        "top-k": "off",
        "min-p": "off",
        "presence-penalty": "off",
        "max-tokens": "1024",
        "seed": "random",
    }
    del fake.engine["sampling"]  # another engine, which does not tell
    expect(page.locator("#temperature")).to_have_attribute("placeholder", "model's own")


WRONG = {
    "temperature": ("-5", "Temperature: -5 is too small: at least 0."),
    "top-p": ("1.5", "Top-p: 1.5 is too large: at most 1."),
    "top-k": ("-5", "Top-k: -5 is too small: at least -1."),
    "max-tokens": ("2.5", "Max tokens: 2.5 is not a whole number."),
    "seed": ("-5", "Seed: -5 is too small: at least 0."),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_setting_is_refused_beside_its_field(page, fake, field):
    typed, words = WRONG[field]
    page.click("#settings-button")
    page.fill(f"#{field}", typed)
    message = page.locator(f"#{field}-error")
    expect(message).to_have_text(words)
    expect(page.locator(f"#{field}")).to_have_attribute("aria-invalid", "true")
    page.click("#settings-close")
    ask(page)
    expect(message).to_be_visible()  # the settings are open again
    expect(page.locator(f"#{field}")).to_be_focused()
    expect(page.locator("#note")).to_have_text(words)
    assert (fake.bodies, page.input_value("#prompt")) == ([], "Explain it.")
    page.fill(f"#{field}", "")
    expect(message).to_be_hidden()
    page.press("#prompt", "Enter")
    finish(page)
    assert len(fake.bodies) == 1


def test_a_wrong_setting_of_before_is_told_to_who_clicks_an_example(page, fake):
    page.evaluate("""() => localStorage.setItem("blockdraft.settings", '{"top-k": "-5"}')""")
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    page.locator("#examples button").first.click()
    expect(page.locator("#top-k-error")).to_be_visible()
    assert fake.bodies == []


@pytest.mark.parametrize("width", [320, 1280])
def test_the_choices_of_a_list_are_not_cut(open_page, width):
    page = open_page(viewport={"width": width, "height": 800})
    expect(page.locator("#status")).to_have_attribute("data-state", "ready")
    page.click("#settings-button")
    needed, there = page.locator("#width").evaluate("""select => {
        const style = getComputedStyle(select);
        const pen = document.createElement("canvas").getContext("2d");
        pen.font = style.font;
        const widths = [...select.options].map(option => pen.measureText(option.text).width);
        const arrow = 20;
        const inner = select.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
        return [Math.max(...widths), inner - arrow];
    }""")
    assert needed <= there


def test_models_have_names_formats_and_sizes(page):
    expect(page.locator("#model")).to_have_text("Example-4B-Instruct")
    expect(page.locator("#model-facts")).to_have_text("(GGUF Q4_1, 98 MB; computed in int8)")
    expect(page.locator("#drafter")).to_have_text("drafter: Example-4B-DFlash-b16")
    expect(page.locator("#welcome-names")).to_have_text(
        "Here the model is Example-4B-Instruct (GGUF Q4_1, 98 MB; computed in int8), "
        "and the drafter Example-4B-DFlash-b16 (safetensors bfloat16, 39 MB)."
    )
    page.click("#engine-details > summary")
    rows = page.locator("#engine").inner_text()
    assert "Example-4B-DFlash-b16" in rows
    assert "safetensors bfloat16, 39 MB" in rows
    assert "Quantisation" not in rows


def test_an_engine_that_tells_little_is_named_all_the_same(open_page, fake):
    fake.engine = {"target": "/models/org/Other-8B", "draft": None, "width": 1, "can_switch": False}
    page = open_page()
    expect(page.locator("#model")).to_have_text("Other-8B")
    expect(page.locator("#model-facts")).to_have_text("")
    expect(page.locator("#drafter")).to_have_text("no drafter")


def test_the_system_prompt_is_shown_whoever_wrote_it(page, fake):
    page.click("#system-shown summary")
    expect(page.locator("#system-origin")).to_have_text("inserted by the model's chat template")
    expect(page.locator("#system-text")).to_have_text("You are Example, a helpful model.")
    page.click("#system-change")
    assert page.evaluate("document.activeElement.id") == "system"
    expect(page.locator("#system")).to_have_attribute("placeholder", "You are Example, a helpful model.")
    page.fill("#system", "Be brief.")
    expect(page.locator("#system-origin")).to_have_text("yours")
    expect(page.locator("#system-text")).to_have_text("Be brief.")
    page.fill("#system", "")
    ask(page)
    finish(page)
    assert [turn["role"] for turn in fake.bodies[0]["messages"]] == ["user"]


def test_keyboard_only(page, fake):
    fake.step_s = 0.2
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "drafts"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Space")
    expect(page.locator("#drafts")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".tokens .block").nth(2)).to_be_visible()
    page.keyboard.press("Escape")
    finish(page)
    wait_for(lambda: fake.num_stopped == 1)
    expect(page.locator(".message.assistant")).to_contain_text("Stopped.")
    assert fake.bodies[0]["messages"][0]["content"] == "one\ntwo"


# ---- live figures


def test_the_figures_and_the_chart_move(page, fake):
    fake.step_s = 30 * STEP_S  # busy until it is stopped
    canvas = page.locator("#rate-chart canvas")
    expect(canvas).to_be_visible()
    box = canvas.bounding_box()
    assert box["width"] > 200
    assert box["height"] > 80
    picture = "canvas => canvas.toDataURL()"
    before = canvas.evaluate(picture)
    expect(page.locator("#rate")).to_have_text("0")
    ask(page)
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.locator("#per-step")).to_have_text("4.89")
    expect(page.locator("#per-step-caption")).to_have_text("last 10 s")
    expect(page.locator("#acceptance-caption")).to_have_text("last 10 s")
    expect(page.locator("#per-step-note")).to_have_text(re.compile("^about 2.3. the plain speed$"))
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#pages")).to_have_text("611 of 4,096 pages")
    expect(page.locator("#acceptance .column")).to_have_count(BLOCK - 1)
    expect(page.locator("#acceptance")).to_have_attribute("aria-label", re.compile("1: 93 %, 2: 86 %"))
    assert heights(page) == pytest.approx([93, 86, 77, 66, 55, 45, 36, *[0] * (BLOCK - WIDTH)])
    assert canvas.evaluate(picture) != before
    page.keyboard.press("Escape")
    finish(page)
    expect(page.locator("#rate")).to_have_text("0")
    expect(page.locator("#acceptance-caption")).to_have_text("when last busy")
    expect(page.locator("#per-step-caption")).to_have_text("when last busy")
    expect(page.locator("#per-step")).to_have_text("4.89")


def heights(page):
    bars = page.locator("#acceptance i")
    return bars.evaluate_all("bars => bars.map(bar => parseFloat(bar.style.height) || 0)")


def test_acceptance_keeps_its_columns_whatever_was_tried_lately(page, fake):
    columns = page.locator("#acceptance .column")
    expect(columns).to_have_count(BLOCK - 1)  # before the first draft
    where = page.locator("#cache-title").bounding_box()
    fake.step_s = 0.2
    ask(page)
    expect(page.locator("#acceptance-caption")).to_have_text("last 10 s")
    assert heights(page)[6] == pytest.approx(36)
    fake.acceptance = [0.5, 0.25]
    page.wait_for_function("() => document.querySelector('#acceptance i').style.height === '50%'")
    expect(columns).to_have_count(BLOCK - 1)
    assert heights(page)[:4] == pytest.approx([50, 25, 0, 0])
    expect(columns.nth(2)).to_have_attribute("title", "position 3: no draft was tried there")
    shares = "Accepted by position: 1: 50 %, 2: 25 %"
    expect(page.locator("#acceptance")).to_have_attribute("aria-label", shares)
    assert page.locator("#cache-title").bounding_box()["y"] == pytest.approx(where["y"], abs=30)


def test_drafts_of_before_are_not_forgotten(open_page, fake):
    page = open_page()
    expect(page.locator("#acceptance-caption")).to_have_text("no drafts yet")
    fake.num_drafts = 300
    expect(page.locator("#acceptance-caption")).to_have_text("none in the last 10 s")


def test_a_starting_server_shows_its_phases_and_takes_no_question(open_page, fake):
    fake.state, fake.num_done = "starting", 1
    page = open_page()
    expect(page.locator("#starting")).to_contain_text("load: weights, 3 of 5 files")
    expect(page.locator("#phases li")).to_have_count(6)
    expect(page.locator("#phases li.running")).to_contain_text("60 %")
    expect(page.locator("#warnings")).to_contain_text("no CUDA graphs")
    ask(page)
    expect(page.locator("#send")).to_be_disabled()
    assert fake.bodies == []
    fake.state, fake.num_done = "ready", 6
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#phases")).to_be_hidden()
    expect(page.locator("#startup-title")).to_have_text("Started · 1 warning")
    page.press("#prompt", "Enter")
    finish(page)


def test_an_engine_for_timing_only_is_labelled_above_the_chat(open_page, fake):
    notices = ["weights are random: every answer is nonsense; for timing only", "acceptance is synthetic"]
    fake.engine |= {"is_dummy": True, "synthetic_acceptance": "mean:4", "notices": notices}
    page = open_page()
    expect(page.locator("#notices li")).to_have_text(notices)
    expect(page.locator("#notices")).to_be_visible()
    fake.engine |= {"notices": []}
    expect(page.locator("#notices")).to_be_hidden()


def test_a_failed_start_says_why(open_page, fake):
    fake.state, fake.num_done = "failed", 5
    page = open_page()
    expect(page.locator("#startup-error")).to_have_text("the drafter does not fit the target.")
    expect(page.locator("#status")).to_have_text("failed")
    expect(page.locator("#send")).to_be_disabled()


NO_FIGURE = "\N{EN DASH}"
FIGURES = ("rate", "live-rate", "per-step", "steps", "running", "waiting")


def test_a_lost_server_is_shown_as_lost_until_it_comes_back(browser, fake):
    fake.step_s = 0.2
    with serve(fake.app()) as url:
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#status")).to_have_text("ready")
        opacity = "aside => getComputedStyle(aside.querySelector('.card')).opacity"
        assert page.locator("#live").evaluate(opacity) == "1"
        ask(page)
        expect(page.locator("#per-step")).to_have_text("4.89")
    expect(page.locator("#status")).to_have_text(re.compile(r"^offline since \d"))
    expect(page.locator("#note")).to_have_text(re.compile(r"^Offline since \d.*: the connection .* is lost"))
    expect(page.locator("#offline")).to_have_text(re.compile(r"^Offline since \d"))
    assert {page.locator(f"#{name}").text_content() for name in FIGURES} == {NO_FIGURE}
    assert page.locator("#pages").text_content() == page.locator("#per-step-note").text_content() == ""
    assert set(heights(page)) == {0}
    assert float(page.locator("#live").evaluate(opacity)) < 1
    expect(page.locator(".message .error")).to_have_text(
        "The connection was lost; the answer above is incomplete.Try again"
    )
    again = page.locator(".error .retry")
    expect(again).to_be_disabled()  # nobody is there to ask
    with serve(fake.app(), port=int(url.rsplit(":", 1)[1])):
        expect(page.locator("#status")).to_have_text("ready", timeout=15_000)
        expect(page.locator("#offline")).to_be_hidden()
        expect(page.locator("#running")).to_have_text("0")
        assert fake.num_feeds == 2
        fake.step_s = STEP_S
        again.click()
        finish(page)
        expect(page.locator(".message")).to_have_count(2)
        expect(page.locator(".prose")).to_contain_text("the number of steps is not")
        page.close()


def test_the_start_is_seen_before_the_key_is_asked_for(open_page, fake):
    fake.key, fake.state, fake.num_done = "correct horse", "starting", 1
    page = open_page()
    expect(page.locator("#starting")).to_contain_text("load: weights, 3 of 5 files")
    expect(page.locator("#phases li.running")).to_contain_text("60 %")
    expect(page.locator("#key-dialog")).to_be_hidden()
    fake.num_done = 3
    expect(page.locator("#starting")).to_contain_text("capture")
    fake.state, fake.num_done = "ready", 6
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", fake.key)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("ready")
    ask(page)
    finish(page)


# ---- drafts


def test_the_draft_view_marks_every_token_and_every_block(page):
    expect(page.locator("#legend")).to_be_hidden()
    ask(page)
    finish(page)
    page.click("#drafts")
    expect(page.locator("#legend")).to_be_visible()
    expect(page.locator(".prose")).to_be_hidden()
    count = "block => ['.accepted', '.own'].map(kind => block.querySelectorAll(kind).length)"
    blocks = page.locator(".tokens .block").evaluate_all(f"blocks => blocks.map({count})")
    assert blocks == [[accepted, len(texts) - accepted] for texts, accepted in STEPS]
    assert page.locator(".tokens").text_content().replace("↵", "") == TEXT
    expect(page.locator(".tokens .block-end")).to_have_count(len(STEPS))
    num_steps, num_tokens = len(STEPS), len(TOKENS)  # a first step of one token is a step
    foot = page.locator(".foot")
    expect(foot).to_contain_text(f"{num_tokens / num_steps:.2f} per step")
    expect(foot).to_contain_text(f"{num_steps} steps instead of {num_tokens}")
    mono = "node => getComputedStyle(node).fontFamily.includes('mono')"
    code = re.search(r"```.*```", TEXT, re.S)[0]
    shown = page.locator(".tokens .mono").evaluate_all(
        "nodes => nodes.map(node => node.textContent).join('')"
    )
    assert code.replace("\n", "") in shown.replace("↵", "").replace("\n", "")
    assert "Speculative" not in shown
    assert page.locator(".tokens .mono").first.evaluate(mono)
    colours = [
        page.locator(f".tokens .{kind}").first.evaluate("token => getComputedStyle(token).backgroundColor")
        for kind in ("accepted", "own")
    ]
    assert len({*colours, "rgba(0, 0, 0, 0)"}) == 3
    assert page.locator(".strip").evaluate(
        "strip => strip.getContext('2d').getImageData(0, 0, strip.width, strip.height).data.some(v => v > 0)"
    )
    page.click("#drafts")
    expect(page.locator(".prose")).to_be_visible()
    expect(page.locator(".tokens")).to_be_hidden()


def test_without_a_drafter_there_is_nothing_to_show(open_page, fake):
    fake.engine["draft"] = None
    page = open_page()
    expect(page.locator("#drafter")).to_have_text("no drafter")
    expect(page.locator("#drafts")).to_be_disabled()
    expect(page.locator("#compare")).to_be_disabled()
    ask(page)
    finish(page)
    assert "speculative" not in fake.bodies[0]


def test_where_drafts_are_too_slow_they_come_on_request(open_page, fake):
    """The server serves width 1: plain questions are left alone, and those who want to see drafts ask."""
    fake.engine |= {"width": 1, "width_reason": "width 1: no draft pays on this machine"}
    fake.engine["replicas"] = "1 of 2 ready"
    page = open_page()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#engine")).to_contain_text("no draft pays on this machine")
    expect(page.locator("#engine")).to_contain_text("1 of 2 ready")
    expect(page.locator("#width")).to_be_enabled()
    widths = ["automatic", "1: off", "2", "4", "8", "16"]
    assert page.locator("#width option").all_inner_texts() == widths
    ask(page)
    finish(page)
    assert fake.bodies[0]["speculative"] == {"detail": True}
    page.click("#drafts")
    ask(page)
    finish(page)
    assert fake.bodies[1]["speculative"] == {"width": 8, "detail": True}


def test_a_comparison_drafts_where_drafts_stopped_to_pay(open_page, fake):
    """Plain steps beside plain steps would be called slower "with speculation"."""
    fake.governed_width = 1
    page = open_page()
    expect(page.locator("#per-step-note")).to_have_text("drafts do not pay now")
    page.click("#compare")
    ask(page)
    finish(page)
    drafted, plain = (body["speculative"] for body in fake.bodies)
    assert (drafted, plain) == ({"width": 8, "detail": True}, False)


# ---- comparison


def seconds(text):
    value, unit = text.split()
    return float(value) / (1000 if unit == "ms" else 1)


def test_a_comparison_runs_one_after_the_other_with_equal_settings(page, fake):
    page.click("#compare")
    ask(page)
    expect(page.locator(".lane.plain .figures")).to_have_text("next")
    finish(page)
    expect(page.locator(".column-text")).to_have_count(2)
    expect(page.locator(".verdict")).to_be_in_viewport()
    boxes = [page.locator(".column-text").nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    fast, plain = (seconds(text) for text in page.locator(".lane .time").all_text_contents())
    assert fast >= len(STEPS) * STEP_S
    assert plain >= len(TOKENS) * STEP_S
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("The texts are identical.")
    speedup = float(re.match(r"([\d.]+). faster", verdict.text_content())[1])
    assert speedup == pytest.approx(plain / fast, rel=0.04)  # the times are rounded
    rates = [float(text.split()[0]) for text in page.locator(".lane .figures").all_text_contents()]
    assert speedup == pytest.approx(rates[0] / rates[1], rel=0.04)
    first, second = fake.bodies
    assert first.pop("cache_salt") != second.pop("cache_salt")  # both read the prompt anew
    assert first.pop("speculative") == {"detail": True}
    assert second.pop("speculative") is False
    assert first == second
    assert isinstance(first["seed"], int)
    ask(page, "And now?")
    finish(page)
    assert [turn["role"] for turn in fake.bodies[2]["messages"]] == ["user", "assistant", "user"]


def test_a_comparison_says_when_the_texts_differ(page, fake):
    fake.differs = True
    page.click("#compare")
    ask(page)
    finish(page)
    position = len("".join(TOKENS[:3])) + 1
    expected = next(i for i, (a, b) in enumerate(zip(TEXT[position:], "otherwise", strict=False)) if a != b)
    expect(page.locator(".verdict")).to_contain_text(f"differ from character {position + expected + 1} on")


def test_a_slower_answer_is_not_in_the_colour_of_success(page, fake):
    def colour():
        return page.locator(".verdict strong").evaluate("node => getComputedStyle(node).color")

    page.click("#compare")
    ask(page)
    finish(page)
    faster = colour()
    page.click("#new-chat")
    fake.step_s, fake.draft_s = STEP_S / 5, 6 * STEP_S
    ask(page)
    finish(page)
    expect(page.locator(".verdict")).to_contain_text("slower with speculation")
    assert colour() != faster


def test_a_stopped_comparison_has_no_verdict(page, fake):
    page.click("#compare")
    ask(page)
    expect(page.locator(".lane.plain .time")).to_contain_text("s")
    page.keyboard.press("Escape")
    finish(page)
    assert page.locator(".verdict").text_content().strip() == ""


# ---- trouble


def test_the_key_is_asked_for_once_and_stays_in_the_tab(open_page, fake):
    fake.key = "correct horse"
    page = open_page()
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-text")).to_contain_text("did not accept")
    expect(page.locator("#key")).to_have_value("")
    page.fill("#key", fake.key)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#key-dialog")).to_be_hidden()
    ask(page)
    finish(page)
    assert len(fake.bodies) == 1
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#key-dialog")).to_be_hidden()
    assert fake.key not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (429, {"retry-after": "3"}, "busy and its queue is full. Try again in 3.00 s"),
        (503, {}, "cannot answer now: refused. Try again in a moment"),
        (400, {}, "refused."),
    ],
)
def test_a_refused_question_can_be_tried_again(page, fake, status, headers, words):
    fake.refusal = (status, headers)
    ask(page)
    expect(page.locator(".message .error")).to_contain_text(words)
    fake.refusal = None
    page.click(".message .error button")
    expect(page.locator(".prose")).to_contain_text("Speculative")
    finish(page)
    expect(page.locator(".message")).to_have_count(2)
    assert len(fake.bodies[0]["messages"]) == 1


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(page, fake):
    fake.breaks_after = 4
    ask(page)
    expect(page.locator(".message .error")).to_contain_text(
        "The connection was lost; the answer above is incomplete."
    )
    expect(page.locator(".prose")).to_contain_text("Speculative decoding")
    finish(page)


# ---- looks


def test_dark_and_light_follow_the_machine(open_page, fake):
    fake.event_s = 60  # the chart must not wait for the next event
    page = open_page(color_scheme="light")
    expect(page.locator("#status")).to_have_text("ready")
    background = "getComputedStyle(document.body).backgroundColor"
    brightness = f"() => {background}.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    picture = "() => document.querySelector('#rate-chart canvas').toDataURL()"
    assert page.evaluate(brightness) > 600
    light = page.evaluate(picture)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => ({brightness})() < 150")
    page.wait_for_function(
        "before => document.querySelector('#rate-chart canvas').toDataURL() !== before", arg=light
    )


def test_the_theme_is_chosen_in_the_menu_and_kept(open_page):
    page = open_page(color_scheme="light")
    expect(page.locator("#status")).to_have_text("ready")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#menu-button")
    expect(page.get_by_label("System", exact=True)).to_be_checked()
    page.get_by_label("Dark").check()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark  # at once, without a flash
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == dark  # chosen is chosen
    page.click("#menu-button")
    page.get_by_label("System", exact=True).check()
    assert page.evaluate(background) == light


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(open_page, fake, theme):
    """WCAG's 4.5 to 1, of muted text and of code in colours."""
    page = open_page(color_scheme=theme)
    expect(page.locator("#status")).to_have_text("ready")
    names = ["muted", "ink", "accent", "error", "warn"]
    names += [f"code-{kind}" for kind in ("keyword", "string", "number", "title", "comment")]
    value = "getComputedStyle(document.documentElement).getPropertyValue('--' + name)"
    colours = page.evaluate(f"names => names.map(name => {value})", [*names, "surface", "bg"])
    *texts, surface, bg = map(luminance, colours)
    for name, text in zip(names, texts, strict=True):
        for under in (surface, bg):
            low, high = sorted((text, under))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name


def luminance(colour):
    channels = [int(colour.strip()[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("width", [320, 360])
def test_a_phone_never_scrolls_sideways(open_page, fake, width):
    page = open_page(viewport={"width": width, "height": 720}, has_touch=True, is_mobile=True)
    expect(page.locator("#status")).to_have_attribute("data-state", "ready")
    assert page.evaluate(DOES_NOT_SCROLL)
    assert page.evaluate("document.getElementById('log').scrollTop") == 0  # the welcome from its beginning
    page.tap("#drafts")
    ask(page)
    finish(page)
    assert page.evaluate(DOES_NOT_SCROLL)
    page.tap("#compare")
    page.tap("#settings-button")
    assert page.evaluate(DOES_NOT_SCROLL)
    ask(page)
    finish(page)
    expect(page.locator(".verdict")).to_be_in_viewport()
    assert page.evaluate(DOES_NOT_SCROLL)
    for control in (
        *("#drafts", "#compare", "#settings-button", "#send"),
        *("#menu-button", "#new-chat", "#live-button"),
    ):
        box = page.locator(control).bounding_box()
        assert box["x"] >= 0, control
        assert box["x"] + box["width"] <= width, control
    tops = {page.locator(control).bounding_box()["y"] for control in ("#drafts", "#settings-button", "#send")}
    assert len(tops) == 1  # of the composer, on one line
    page.tap("#compare")
    fake.deltas = [{"content": MARKDOWN}]
    ask(page)
    finish(page)
    assert page.evaluate(DOES_NOT_SCROLL)
    page.tap("#menu-button")
    assert page.evaluate(DOES_NOT_SCROLL)
    page.tap("#menu-close")
    expect(page.locator("#live")).to_be_hidden()
    page.tap("#live-button")
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#rate-chart canvas")).to_be_visible()
    assert page.locator("#rate-chart canvas").bounding_box()["width"] > 200
    assert page.evaluate(DOES_NOT_SCROLL)


def test_the_composer_does_not_move_while_an_answer_streams(page):
    where = page.locator(".box").bounding_box()
    ask(page)
    expect(page.locator(".prose")).to_contain_text("Speculative")
    assert page.locator(".box").bounding_box() == where
    finish(page)
    assert page.locator(".box").bounding_box() == where


def test_the_fake_has_every_kind_of_step():
    assert {0, WIDTH - 1} <= set(ACCEPTED)
    assert "".join(text for texts, _ in STEPS for text in texts) == TEXT
