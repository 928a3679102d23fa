"""blockdraft chat: what is asked, what is written where, and what stops what."""

import asyncio
import contextlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from blockdraft.bench.endpoint import probe
from blockdraft.cli import chat_screen
from blockdraft.cli.chat import sampling_fields
from blockdraft.cli.chat_answers import AnswerFigures, ChatPiece, LocalModel, RemoteModel
from blockdraft.cli.chat_screen import line_reader, read_question
from blockdraft.cli.chat_talk import Talk
from blockdraft.cli.main import main, parse
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import RequestError
from blockdraft.llm import LLM
from tests.cli.conftest import Terminal
from tests.server.asking import listening
from tests.server.pair import app_over, models, thinking_tokenizer
from tests.tiny import DRAFT, TARGET

ROOT = Path(__file__).parents[2]
LOCAL = [TARGET, "--draft", DRAFT, "--device", "cpu", "--dtype", "float64"]
GREEDY = ["--temperature", "0", "--max-tokens", "5"]
MESSAGES = [{"role": "user", "content": "t1 t2 t3"}]
COUNT = " t4 t5 t6 t7 t8"  # what the pair writes after t3


@pytest.fixture(scope="module")
def llm():
    return LLM(model=TARGET, draft=DRAFT, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def url():
    with app_over(models()) as app, listening(app) as (host, port):
        yield f"http://{host}:{port}"


def pipe(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class Scripted:
    """Answers what it is told to, and remembers what it was asked."""

    name, has_drafts = "scripted", True

    def __init__(self, *answers):
        self.answers, self.asked, self.with_drafts = list(answers), [], []

    def answer(self, messages, *, with_drafts):
        self.asked.append([dict(message) for message in messages])
        self.with_drafts.append(with_drafts)
        for piece in self.answers.pop(0):
            if isinstance(piece, type | BaseException):
                raise piece
            yield piece


def answer(text, **figures):
    return [ChatPiece(text=text), ChatPiece(figures=AnswerFigures(num_tokens=6, seconds=2.0, **figures))]


def talk(answerer, *lines, max_tokens=None):
    one = Talk(answerer, system=None, max_tokens=max_tokens)
    for line in lines:
        one.hear(line)
    return one


# ---- with a model here


def test_piped_questions_are_answered_line_by_line_and_remembered(capsys, monkeypatch):
    asked, stream = [], LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, ids, params: asked.append(ids) or stream(self, ids, params)
    )
    pipe(monkeypatch, "t1 t2 t3\n\nt9\n")
    assert main(["run", *LOCAL, *GREEDY]) == 0  # another name of chat
    captured = capsys.readouterr()
    assert captured.out == f"{COUNT}\n t10 t11 t12 t13 t14\n"
    assert captured.err == "(cut after 5 tokens: raise --max-tokens for more)\n" * 2
    assert asked == [[1, 2, 3], [*range(1, 9), 9]]


def test_a_conversation_that_outgrows_the_context_is_a_sentence(capsys, monkeypatch):
    pipe(monkeypatch, "t1 " * 40 + "\nt1 t2 t3\n")
    assert main(["chat", *LOCAL, *GREEDY, "--max-model-len", "32"]) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{COUNT}\n", "the question that failed is asked again"
    error = captured.err.splitlines()[0]
    assert error.startswith("error: This model's maximum context length is 32 tokens.")
    assert error.endswith("/save FILE keeps the conversation, /reset starts over.")


def test_what_no_flag_says_is_what_the_model_recommends(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params: seen.append(params) or iter(()))
    recommended = {"temperature": 0.3}
    monkeypatch.setattr("blockdraft.start.loading.sampling_defaults", lambda raw, **_: recommended)
    for flags in ([], ["--temperature", "0.9"]):
        pipe(monkeypatch, "t1\n")
        assert main(["chat", *LOCAL, *flags]) == 0
    assert [params.temperature for params in seen] == [0.3, 0.9]


def test_an_interrupt_ends_the_answer_between_two_steps_and_the_model_answers_again(llm):
    model = LocalModel(llm, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), "pair")
    before = signal.getsignal(signal.SIGINT)
    pieces = model.answer(MESSAGES, with_drafts=False)
    assert next(pieces).text == " t4"
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    assert signal.getsignal(signal.SIGINT) is before
    text = "".join(piece.text for piece in model.answer(MESSAGES, with_drafts=False))
    assert text.startswith(COUNT)
    pieces = model.answer(MESSAGES, with_drafts=False)
    next(pieces)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # a second one does not wait
        signal.raise_signal(signal.SIGINT)
    pieces.close()


def test_drafts_are_marked_step_by_step(llm, url):
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    for model in (
        LocalModel(llm, sampling, "pair"),
        RemoteModel(asyncio.run(probe(url)), {"temperature": 0, "max_tokens": 30}, None),
    ):
        pieces = list(model.answer(MESSAGES, with_drafts=True))
        text = "".join(piece.text for piece in pieces)
        assert text.startswith(COUNT)
        assert "".join(token for piece in pieces for token in piece.tokens) == text
        first, *steps = [piece for piece in pieces if piece.tokens]
        assert (len(first.tokens), first.num_drafts) == (1, 0)
        for piece in steps[:-1]:  # the last may be cut
            assert piece.num_drafts == len(piece.tokens) - 1
        figures = pieces[-1].figures
        assert 0 < figures.accepted == figures.num_tokens - figures.steps <= figures.drafted
        # Of a block that was cut all tokens are drafts; the figures count one of them as the target's own.
        assert sum(piece.num_drafts for piece in pieces) - figures.accepted in (0, 1)
        assert figures.steps < figures.num_tokens == 30


def test_thoughts_are_told_from_the_answer(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", thinking_tokenizer())
    monkeypatch.setattr(llm.engine, "models", replace(llm.engine.models, tokenizer=llm.tokenizer))
    model = LocalModel(llm, SamplingParams(temperature=0.0, max_tokens=6), "pair")
    pieces = list(model.answer([{"role": "user", "content": "t1 t2"}], with_drafts=False))
    assert "".join(piece.thought for piece in pieces).split() == ["t4", "t5"]
    assert "".join(piece.text for piece in pieces).split() == ["t7", "t8"]


# ---- with a server


def test_a_server_is_asked_as_a_model_is(capsys, monkeypatch, url):
    pipe(monkeypatch, "t1 t2 t3\n/stats\n")
    assert main(["chat", f"{url}/v1", *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{COUNT}\n"
    assert re.search(r"last answer: 5 tokens in .* tokens per step, \d+ of \d+ drafts accepted", captured.err)


def test_a_servers_refusal_is_a_sentence(capsys, monkeypatch, url):
    pipe(monkeypatch, "t1 " * 600 + "\n")
    assert main(["chat", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: This model's maximum context length is 512 tokens.")
    assert "/reset starts over" in error
    assert main(["chat", "http://127.0.0.1:9"]) == 2
    assert "cannot connect to 127.0.0.1:9" in capsys.readouterr().err
    assert main(["chat", url, "--width", "2"]) == 2
    assert "--width does not work with the server" in capsys.readouterr().err


def test_a_server_is_told_what_the_flags_say_and_nothing_else():
    assert sampling_fields(parse(["chat"])) == {"max_tokens": 2048}
    given = parse(["chat", "--temperature", "1", "--top-k", "0", "--stop", "a", "--seed", "3"])
    told = {"temperature": 1.0, "top_k": 0, "stop": ["a"], "seed": 3, "max_tokens": 2048}
    assert sampling_fields(given) == told


@contextlib.contextmanager
def other_server(pieces, *, is_endless=False):
    """A server that knows the least there is of OpenAI's API: no usage, no figures."""

    async def models(request):
        return JSONResponse({"object": "list", "data": [{"id": "other", "object": "model"}]})

    async def chat(request):
        async def events():
            for piece in pieces:
                chunk = {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
                yield f"data: {json.dumps(chunk)}\r\n\r\n"
            while is_endless:
                await asyncio.sleep(0.02)
                yield ": still here\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    with listening(Starlette(routes=routes)) as (host, port):
        yield f"http://{host}:{port}"


def test_any_openai_compatible_server_will_do(capsys, monkeypatch):
    with other_server(["Hel", "lo."]) as address:
        pipe(monkeypatch, "Hi\n/stats\n")
        assert main(["chat", address]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello.\n"
    assert "last answer: 2 tokens" in captured.err
    assert "steps and drafts were not counted" in captured.err


class Pty:
    """A process at a terminal of its own."""

    def __init__(self, argv, **environment):
        pty = pytest.importorskip("pty")
        self.ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, "-m", "blockdraft", *argv]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text, patience_s=60.0):
        end_s = time.monotonic() + patience_s
        while text not in self.seen:
            assert time.monotonic() < end_s, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 4096).decode()
        self.seen = self.seen.partition(text)[2]

    def type(self, text):
        os.write(self.ours, text.encode())


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_program():
    with other_server(["Hello \x1b[2J", "you"], is_endless=True) as address:
        terminal = Pty(["chat", address])
        try:
            terminal.wait_for("/help lists commands")
            terminal.wait_for(">>> ")
            terminal.type("Hi\n")
            terminal.wait_for("Hello [2Jyou")  # nothing in an answer can move the cursor
            terminal.process.send_signal(signal.SIGINT)
            terminal.wait_for("(stopped)")
            terminal.wait_for(">>> ")
            time.sleep(0.5)  # it has to have begun to wait for a line
            terminal.process.send_signal(signal.SIGINT)  # nothing to stop
            terminal.wait_for("Ctrl-D or /exit ends")
            terminal.wait_for(">>> ")
            terminal.type("\x04")
            assert terminal.process.wait(timeout=30) == 0
            assert "Traceback" not in terminal.seen
        finally:
            terminal.process.kill()
            terminal.process.wait()
            os.close(terminal.ours)


# ---- lines


def reads(*lines):
    given = iter(lines)
    prompts = []

    def read_line(prompt):
        prompts.append(prompt)
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return read_line, prompts


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (["one", "two"], "one"),
        (["one\\", "two\\", "three", "four"], "one\ntwo\nthree"),
        (["one\\"], "one"),
        (['"""', "one", "", "  two\\", '"""', "three"], "one\n\n  two\\"),
        (['"""one', 'two"""', "three"], "one\ntwo"),
        (['"""one"""'], "one"),
        (['"""', "one"], "one"),
    ],
)
def test_a_question_may_have_several_lines(lines, question):
    read_line, prompts = reads(*lines)
    assert read_question(read_line) == question
    assert prompts == [">>> ", *["... "] * (len(prompts) - 1)]


def test_without_readline_lines_are_read_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr(sys, "stdin", Terminal("typed\n"))
    read_line = line_reader()
    assert read_line is chat_screen._typed_line
    assert read_question(read_line) == "typed"


# ---- what happens to the conversation


def test_the_system_message_stays_in_front_and_reset_forgets_the_rest(capsys):
    answerer = Scripted(answer("A"), answer("B"), answer("C"))
    talk(answerer, "/system Be brief.", "one", "two", "/reset", "three")
    system = {"role": "system", "content": "Be brief."}
    one, two, three = ({"role": "user", "content": text} for text in ("one", "two", "three"))
    assert answerer.asked == [
        [system, one],
        [system, one, {"role": "assistant", "content": "A"}, two],
        [system, three],
    ]
    assert capsys.readouterr().out == "A\nB\nC\n"


def test_what_was_stopped_stays_and_what_failed_is_forgotten(capsys):
    stopped = [ChatPiece(text="Half"), KeyboardInterrupt]
    answerer = Scripted(stopped, [KeyboardInterrupt], [RequestError("no.\nReally.")], answer("C"))
    talk(answerer, "one", "two", "three", "four")
    assert [message["content"] for message in answerer.asked[-1]] == ["one", "Half", "four"]
    captured = capsys.readouterr()
    assert captured.out == "Half\nC\n"
    assert captured.err == "(stopped)\n(stopped)\nerror: no. Really.\n"


def test_a_full_context_is_told_from_an_answer_that_was_cut(capsys):
    cut = {"finish_reason": "length"}
    talk(Scripted(answer("A", **cut), answer("B", **cut)), "one", max_tokens=6)
    assert "(cut after 6 tokens: raise --max-tokens for more)" in capsys.readouterr().err
    talk(Scripted(answer("A", **cut)), "one", max_tokens=7)
    assert "(cut: the context is full." in capsys.readouterr().err


def test_save_writes_the_conversation_once(tmp_path, capsys):
    text, data = tmp_path / "said.txt", tmp_path / "said.json"
    one = talk(Scripted(answer("A")), "/system S", "one", f"/save {text}", f"/save {data}")
    assert text.read_text() == "[system]\nS\n\n[user]\none\n\n[assistant]\nA\n"
    messages = json.loads(data.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    one.hear("/reset")
    one.hear(f"/save {text}")
    assert "File exists" in capsys.readouterr().err
    assert "one" in text.read_text()
    one.hear("/save")
    one.hear(f"/save {tmp_path / 'no' / 'where'}")
    assert "cannot be written: No such file or directory." in capsys.readouterr().err


def test_stats_are_of_the_last_answer_and_of_all(capsys):
    first = answer("A", steps=2, drafted=8, accepted=4)
    one = talk(Scripted(first, answer("B", steps=4, drafted=8, accepted=2)), "/stats", "one", "/stats")
    assert capsys.readouterr().err.splitlines() == [
        "no answer is complete yet",
        "last answer: 6 tokens in 2.0 s: 3.0 tok/s, 3.00 tokens per step, 4 of 8 drafts accepted (50%)",
    ]
    one.hear("two")
    one.hear("/stats")
    assert capsys.readouterr().err.splitlines()[-1] == (
        "2 answers: 12 tokens in 4.0 s: 3.0 tok/s, 2.00 tokens per step, 6 of 16 drafts accepted (38%)"
    )


def test_an_unknown_command_is_not_asked_and_a_space_asks_it(capsys):
    answerer = Scripted(answer("A"), answer("B"))
    talk(answerer, "/stat", "/", " /etc/hosts?", "/a path\nand more", "   ")
    assert "unknown command /stat: did you mean /stats? /help" in capsys.readouterr().err
    assert [asked[-1]["content"] for asked in answerer.asked] == ["/etc/hosts?", "/a path\nand more"]


def test_help_names_every_command_and_other_programs_words_are_understood(capsys):
    one = talk(Scripted(answer("A")), "t1", "/clear", "/?")
    told = capsys.readouterr().err
    assert all(f"{name} " in told for name in one._commands)
    assert one._messages == []
    assert "the conversation was forgotten" in told


def test_exit_ends_before_the_next_question(monkeypatch):
    for name in ("/exit", "/quit", "/bye"):
        pipe(monkeypatch, f"{name}\nt1\n")
        assert Talk(Scripted()).run() == 0


MARKED = [
    ChatPiece(text="a", tokens=("a",)),
    ChatPiece(text="bcd", tokens=("b", "c", "d"), num_drafts=2),
    ChatPiece(figures=AnswerFigures(num_tokens=4, seconds=1.0)),
]


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "written"),
    [(True, None, "a\x1b[32mbc\x1b[0md\nabcd\n"), (True, "1", "abcd\nabcd\n"), (False, None, "abcd\nabcd\n")],
)
def test_accepted_drafts_are_coloured_where_colours_are_wanted(monkeypatch, is_terminal, no_color, written):
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    answerer = Scripted(MARKED, MARKED)
    talk(answerer, "/drafts", "one", "/drafts", "two")
    assert out.getvalue() == written
    assert answerer.with_drafts == [is_terminal and no_color is None, False]


def test_thoughts_are_for_terminals(monkeypatch):
    pieces = [ChatPiece(thought="hm"), ChatPiece(text="\nA"), answer("")[1]]
    monkeypatch.setenv("TERM", "xterm")
    for out, written in ((Terminal(), "\x1b[2mhm\x1b[0m\n\nA\n"), (io.StringIO(), "\nA\n")):
        monkeypatch.setattr(sys, "stdout", out)
        talk(Scripted(pieces), "one")
        assert out.getvalue() == written
