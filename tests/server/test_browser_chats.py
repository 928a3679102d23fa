"""Conversations on the page, in a real browser: their history, what is kept of them, what they look like."""

import json

import pytest

from tests.server.browsing import MARKDOWN, MARKS, ask, expect, finish, wait_for
from tests.server.fake import STEP_S, TEXT, TOKENS, WIDTH, steps

pytestmark = MARKS
STEPS = list(steps(WIDTH))


# ---- the history


def roles(body):
    return [turn["role"] for turn in body["messages"]]


@pytest.mark.parametrize("compares", [False, True])
def test_a_refused_question_is_not_part_of_what_is_sent_next(page, fake, compares):
    if compares:
        page.click("#compare")
    fake.refusal = (400, {})
    ask(page, "Too long.")
    expect(page.locator(".message .error")).to_contain_text("not part of the conversation")
    finish(page)
    fake.refusal = None
    ask(page, "Shorter.")
    finish(page)
    assert [turn["content"] for turn in fake.bodies[0]["messages"]] == ["Shorter."]
    ask(page, "And then?")
    finish(page)
    assert roles(fake.bodies[-1]) == ["user", "assistant", "user"]
    assert len(page.evaluate(KEPT)[0]["turns"]) == 4


def test_a_question_stopped_before_its_first_word_is_not_part_either(page, fake):
    fake.step_s = 30
    ask(page, "Never mind.")
    expect(page.locator("#stop")).to_be_visible()
    wait_for(lambda: len(fake.bodies) == 1)
    page.keyboard.press("Escape")
    expect(page.locator(".message .error")).to_contain_text("Stopped before the first word.")
    fake.step_s = STEP_S
    ask(page, "Instead.")
    finish(page)
    assert [turn["content"] for turn in fake.bodies[1]["messages"]] == ["Instead."]
    page.locator(".error button").click()  # asked again, it comes last
    finish(page)
    assert [turn["content"] for turn in fake.bodies[2]["messages"]] == ["Instead.", TEXT, "Never mind."]
    expect(page.locator(".message.user p")).to_have_text(["Instead.", "Never mind."])


def test_an_edited_message_replaces_what_followed(page, fake):
    for question in ("One?", "Two?"):
        ask(page, question)
        finish(page)
    page.locator(".message.user").first.hover()
    page.locator(".message.user .edit").first.click()
    box = page.get_by_label("Edit your message")
    expect(box).to_be_focused()
    expect(box).to_have_value("One?")
    page.keyboard.press("Escape")
    expect(box).to_have_count(0)
    page.locator(".message.user .edit").first.focus()
    page.keyboard.press("Enter")
    box.fill("Other?")
    page.keyboard.press("Enter")
    finish(page)
    assert fake.bodies[2]["messages"] == [{"role": "user", "content": "Other?"}]
    expect(page.locator(".message")).to_have_count(2)
    ask(page, "Then?")
    finish(page)
    assert [turn["content"] for turn in fake.bodies[3]["messages"]] == ["Other?", TEXT, "Then?"]


def test_an_answer_can_be_had_again(page, fake):
    for question in ("One?", "Two?"):
        ask(page, question)
        finish(page)
    expect(page.locator(".again")).to_have_count(1)
    page.click(".again")
    finish(page)
    first, second = fake.bodies[1:]
    assert first["messages"] == second["messages"]
    assert first["seed"] != second["seed"]
    expect(page.locator(".message")).to_have_count(4)
    assert [turn["role"] for turn in page.evaluate(KEPT)[0]["turns"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("way", ["again", "edit"])
def test_a_change_that_is_refused_changes_nothing(page, fake, way):
    ask(page, "One?")
    finish(page)
    fake.refusal = (400, {})
    if way == "again":
        page.click(".again")
    else:
        page.locator(".message.user .edit").focus()
        page.keyboard.press("Enter")
        page.get_by_label("Edit your message").fill("Other?")
        page.keyboard.press("Enter")
    expect(page.locator(".message .error")).to_contain_text("The conversation is as it was.")
    expect(page.locator(".message.user p")).to_have_text(["One?"])
    expect(page.locator(".prose")).to_contain_text("Speculative")
    fake.refusal = None
    ask(page, "Two?")
    finish(page)
    assert [turn["content"] for turn in fake.bodies[1]["messages"]] == ["One?", TEXT, "Two?"]


def test_an_answer_that_was_cut_says_where_and_goes_on(page, fake):
    page.click("#settings-button")
    page.fill("#max-tokens", "30")
    ask(page, "One?")
    finish(page)
    foot = page.locator(".foot")
    count = int(foot.locator(".figure").text_content().split()[0])
    expect(foot).to_contain_text(f"cut at {count} tokens")
    (half,) = (turn["content"] for turn in page.evaluate(KEPT)[0]["turns"] if turn["role"] == "assistant")
    page.fill("#max-tokens", "")
    page.get_by_role("button", name="Continue").click()
    finish(page)
    more = fake.bodies[1]
    assert (more["continue_final_message"], more["add_generation_prompt"]) == (True, False)
    assert more["messages"][-1] == {"role": "assistant", "content": half}
    expect(page.locator(".prose ol > li")).to_have_count(3)
    expect(foot).to_contain_text(f"{len(TOKENS)} tokens")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    assert [turn["content"] for turn in page.evaluate(KEPT)[0]["turns"]] == ["One?", TEXT]
    page.click("#drafts")
    assert page.locator(".tokens").text_content().replace("↵", "") == TEXT
    ask(page, "Two?")
    finish(page)
    assert [turn["content"] for turn in fake.bodies[2]["messages"]] == ["One?", TEXT, "Two?"]


def test_an_answer_that_cannot_go_on_stays_as_it_was(page, fake):
    page.click("#settings-button")
    page.fill("#max-tokens", "30")
    ask(page, "One?")
    finish(page)
    kept = page.evaluate(KEPT)[0]["turns"]
    fake.refusal = (400, {})
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".message .error")).to_contain_text("refused.")
    assert [turn["content"] for turn in page.evaluate(KEPT)[0]["turns"]] == [turn["content"] for turn in kept]
    fake.refusal = None
    page.get_by_role("button", name="Continue").click()
    finish(page)
    assert len(fake.bodies) == 2
    expect(page.locator(".message")).to_have_count(2)


# ---- chats


KEPT = """() => Object.keys(localStorage).filter(key => key.startsWith("blockdraft.chat."))
    .map(key => JSON.parse(localStorage.getItem(key)))"""


def test_a_chat_survives_a_reload(page, fake):
    page.click("#settings-button")
    page.fill("#system", "Be brief.")
    ask(page, "One?")
    finish(page)
    figures = page.locator(".foot .figure").text_content()
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".message.user p")).to_have_text("One?")
    expect(page.locator(".prose ol > li")).to_have_count(3)
    assert page.locator(".foot .figure").text_content() == figures
    page.click("#drafts")
    expect(page.locator(".tokens .block")).to_have_count(len(STEPS))
    ask(page, "Two?")
    finish(page)
    assert [turn["content"] for turn in fake.bodies[1]["messages"]] == ["Be brief.", "One?", TEXT, "Two?"]


def test_what_had_come_survives_a_reload_in_the_middle(page, fake):
    fake.step_s = 0.2
    ask(page, "One?")
    expect(page.locator(".prose")).to_contain_text("Speculative decoding")
    page.reload()
    expect(page.locator(".prose")).to_contain_text("Speculative decoding")
    expect(page.locator(".message.user p")).to_have_text("One?")


def test_several_chats_are_kept_opened_and_deleted(page, fake):
    for question in ("First chat?", "Second chat?"):
        page.click("#new-chat")
        ask(page, question)
        finish(page)
    page.click("#menu-button")
    titles = page.locator("#chats .title")
    expect(titles).to_have_text(["Second chat?", "First chat?"])
    expect(page.locator("#chats .current .title")).to_have_text("Second chat?")
    page.locator(".chat-open").nth(1).click()
    expect(page.locator("#menu")).to_be_hidden()
    expect(page.locator(".message.user p")).to_have_text("First chat?")
    ask(page, "More?")
    finish(page)
    assert fake.bodies[2]["messages"][0]["content"] == "First chat?"
    page.click("#menu-button")
    expect(titles).to_have_text(["First chat?", "Second chat?"])  # the latest first
    delete = page.locator("#chats li").first.get_by_role("button", name="Delete")
    delete.click()
    expect(titles).to_have_count(2)  # it asks first
    delete.click()
    expect(titles).to_have_text(["Second chat?"])
    page.keyboard.press("Escape")
    expect(page.locator(".message")).to_have_count(0)
    assert [chat["title"] for chat in page.evaluate(KEPT)] == ["Second chat?"]


def test_a_chat_deleted_while_it_is_answered_stays_deleted(page, fake):
    ask(page, "One?")
    finish(page)
    fake.step_s = 0.2
    ask(page, "Two?")
    expect(page.locator(".prose").nth(1)).to_contain_text("Speculative")
    page.click("#menu-button")
    delete = page.locator("#chats li").first.get_by_role("button", name="Delete")
    delete.click()
    delete.click()
    wait_for(lambda: fake.num_stopped == 1)
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate(KEPT) == []


def test_a_chat_is_exported_as_markdown_and_json(page, fake):
    ask(page, "What is it?")
    finish(page)
    page.click("#menu-button")
    texts = {}
    for kind, name in (("markdown", "what-is-it.md"), ("json", "what-is-it.json")):
        with page.expect_download() as found:
            page.click(f"#export-{kind}")
        assert found.value.suggested_filename == name
        texts[kind] = found.value.path().read_text()
    said = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": TEXT}]
    exported = json.loads(texts["json"])
    assert (exported["model"], exported["messages"]) == ("Example-4B-Instruct", said)
    (answer,) = exported["answers"]
    asked = ("seed", "speculative", "max_completion_tokens")
    assert answer["settings"] == {name: fake.bodies[0][name] for name in asked}
    assert (answer["tokens"], answer["steps"], answer["finish_reason"]) == (len(TOKENS), len(STEPS), "stop")
    assert answer["tokens_per_step"] == len(TOKENS) / len(STEPS)
    assert answer["seconds"] > 0 < answer["tokens_per_second"]
    assert texts["markdown"].startswith(
        "# What is it?\n\nModel: Example-4B-Instruct\n\n## You\n\nWhat is it?"
    )


def test_a_browser_without_room_says_so_and_goes_on(page, fake):
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }")
    ask(page)
    finish(page)
    expect(page.locator("#note")).to_contain_text("no room left")
    ask(page, "And then?")
    finish(page)
    assert roles(fake.bodies[1]) == ["user", "assistant", "user"]


def test_what_others_left_in_the_storage_does_no_harm(page):
    page.evaluate("""() => {
        localStorage.setItem("blockdraft.chat.a", "{");
        localStorage.setItem("blockdraft.chat.b", "null");
        localStorage.setItem("blockdraft.settings", "[");
        sessionStorage.setItem("blockdraft.current", "a");
    }""")
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    page.click("#menu-button")
    expect(page.locator("#no-chats")).to_be_visible()


# ---- what answers look like


def test_markdown_is_whole(page, fake):
    fake.deltas = [{"content": MARKDOWN[at : at + 7]} for at in range(0, len(MARKDOWN), 7)]
    fake.step_s = 0.001
    ask(page)
    finish(page)
    prose = page.locator(".prose").last
    expect(prose.locator("h3")).to_have_text("Title")
    expect(prose.locator("th")).to_have_text(["fruit", "price"])
    expect(prose.locator("td em")).to_have_text("apple")
    assert prose.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    expect(prose.locator("ul > li > ol > li > ul > li")).to_have_text("innermost")
    expect(prose.locator("li.task input")).to_be_checked()
    expect(prose.locator("blockquote strong")).to_have_text("words")
    links = prose.locator("a").evaluate_all(
        "links => links.map(link => [link.href, link.textContent, link.rel])"
    )
    safe = "noopener noreferrer"
    assert links == [["https://example.com/a", "link", safe], ["https://example.com/p.png", "picture", safe]]
    assert prose.locator("img").count() == 0
    text = prose.inner_text()
    assert "a trap, " in text
    assert "\n& old." in text
    assert "<img src=x onerror=alert(1)>" in text
    expect(prose.locator("math msub")).to_have_count(2)
    expect(prose.locator(".hl-comment")).to_have_text("# comment")
    expect(prose.locator(".hl-string")).to_have_text('"text"')
    expect(prose.locator("pre").nth(1)).to_have_text("<b>")


FORMULAS = r"""Between $5 and $10, or $5-$10. Then $x^2$ and \(y_1\), $$\frac{1}{2}$$ and $\nosuchthing{$.

\[ \boxed{42} \]
"""


def test_formulas_are_drawn_and_money_is_not(page, fake):
    fake.deltas = [{"content": FORMULAS[at : at + 5]} for at in range(0, len(FORMULAS), 5)]
    ask(page)
    finish(page)
    prose = page.locator(".prose").last
    expect(prose.locator(".math math")).to_have_count(4)
    expect(prose.locator(".math.display math")).to_have_count(2)
    expect(prose.locator("mfrac")).to_have_count(1)
    expect(prose.locator("code.math")).to_have_text(r"\nosuchthing{")
    assert "Between $5 and $10, or $5-$10." in prose.inner_text()


def test_thoughts_and_tool_calls_are_shown_and_calls_answered(page, fake):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    fake.deltas = [
        {"reasoning_content": "I need the "},
        {"reasoning_content": "weather."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":"Oslo"}'}}]},
    ]
    page.click("#settings-button")
    page.click("#settings details summary")
    page.fill("#tools", "[{")
    ask(page, "Weather?")
    expect(page.locator("#note")).to_contain_text("not valid JSON")
    assert page.input_value("#prompt") == "Weather?"  # nothing was lost
    page.fill("#tools", json.dumps(tools))
    page.press("#prompt", "Enter")
    finish(page)
    assert fake.bodies[0]["tools"] == tools
    expect(page.locator(".thinking summary")).to_have_text("Thoughts")
    page.click(".thinking summary")
    expect(page.locator(".thinking .thoughts")).to_have_text("I need the weather.")
    expect(page.locator(".call")).to_contain_text("The model calls weather")
    expect(page.locator(".call pre")).to_have_text('{\n  "city": "Oslo"\n}')
    fake.deltas = [{"content": "It rains."}]
    page.get_by_label("What weather returns").fill("rain")
    page.click("#settings-close")
    page.click(".results button")
    finish(page)
    function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert fake.bodies[1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    expect(page.locator(".prose").last).to_have_text("It rains.")
    page.reload()
    expect(page.locator(".call")).to_contain_text("weather")
    expect(page.locator(".message.tool pre")).to_have_text("rain")
