// Answers: one streaming answer, and the same prompt answered twice, with and without speculation.

import { codeBlock } from "./code.js";
import { copyButton, make } from "./dom.js";
import { countTokens, drawStrip, renderBlocks, tokensPerStep } from "./draft.js";
import { rate, seconds } from "./live.js";
import { renderMarkdown } from "./markdown.js";
import { streamChat } from "./net.js";

const now = () => performance.now() / 1000;

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still arriving, or not JSON at all
  }
}

// One answer, streamed or read from a saved chat: its content so far, its times, and the nodes that show it.
export class Answer {
  constructor(view, turn = {}) {
    this.view = view; // { isDraftView(), width() }
    this.text = turn.content ?? "";
    this.reasoning = turn.reasoning ?? "";
    this.calls = turn.calls ?? []; // { id, name, arguments }
    this.blocks = turn.blocks ?? [];
    this.kept = turn.figures ?? null; // { tokens, seconds, rate } of a saved answer
    this.before = null; // the turn that this answer continues
    this.settings = turn.settings ?? null; // the request's settings
    this.usage = null;
    this.finishReason = turn.finish ?? null;
    this.startS = this.firstS = this.lastS = this.endS = null;
    this.node = make("div", "answer-body");
    this.thinking = make("details", "thinking");
    this.thinking.append(make("summary", "", "Thoughts"), make("div", "markdown thoughts"));
    this.thinking.firstChild.addEventListener("click", () => { this.isThinkingChosen = true; });
    this.prose = make("div", "markdown prose");
    this.tools = make("div", "calls");
    this.tokens = make("div", "tokens");
    this.strip = make("canvas", "strip");
    this.strip.setAttribute("role", "img");
    this.strip.title = "one bar for each step, as high as the tokens it committed";
    this.node.append(this.thinking, this.prose, this.tools, this.tokens, this.strip);
    this.render();
  }

  async stream(body, signal, onChange) {
    this.startS = now();
    const { model, messages, stream, stream_options, cache_salt, ...settings } = body;
    this.settings = settings;
    this.node.classList.add("streaming");
    try {
      for await (const chunk of streamChat(body, signal)) {
        this.take(chunk);
        onChange();
      }
    } finally {
      this.endS = now();
      this.node.classList.remove("streaming");
      onChange();
    }
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta = {}, draft } = choice;
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    if (draft?.tokens.length > 0) this.blocks.push(draft);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (Object.values(delta).some((value) => value && value !== "assistant") || draft?.tokens.length > 0) {
      this.lastS = now();
      this.firstS ??= this.lastS;
    }
  }

  takeCall({ index = 0, id, function: called = {} }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id = id ?? call.id;
    call.name += called.name ?? "";
    call.arguments += called.arguments ?? "";
  }

  // Continues `turn`: keeps its content, and appends what arrives.
  goOn(turn) {
    this.before = turn;
    this.kept = this.finishReason = null;
    this.blocks = [...this.blocks];
  }

  // Whether the request's token limit cut the answer; any other answer that was cut filled the context.
  get isAtLimit() {
    const numNew = this.numTokens - (this.before?.figures.tokens ?? 0);
    return this.finishReason === "length" && numNew >= (this.settings?.max_completion_tokens ?? Infinity);
  }

  // Whether the answer can be continued: the server continues text, but no calls and no thoughts.
  get canGoOn() {
    const isCut = this.finishReason === null ? this.endS !== null || this.kept !== null : this.isAtLimit;
    return isCut && this.text !== "" && this.reasoning === "" && this.calls.length === 0;
  }

  // Returns the turn for the conversation; null if nothing has arrived that it could go on from.
  turn() {
    if (this.text === "" && this.calls.length === 0 && this.finishReason === null) return null;
    return {
      role: "assistant",
      content: this.text,
      reasoning: this.reasoning,
      calls: this.calls,
      blocks: this.blocks,
      figures: { tokens: this.numTokens, seconds: this.totalS, rate: this.rate },
      settings: this.settings,
      finish: this.finishReason ?? (this.text === this.before?.content ? this.before.finish : null),
    };
  }

  get numTokens() {
    if (this.kept) return this.kept.tokens;
    const numBefore = this.before?.figures.tokens ?? 0;
    const numOld = this.before?.blocks.length ?? 0;
    return numBefore + (this.usage?.completion_tokens ?? countTokens(this.blocks.slice(numOld)));
  }

  get totalS() {
    if (this.kept) return this.kept.seconds;
    if (this.startS === null) return null;
    return (this.before?.figures.seconds ?? 0) + (this.endS ?? now()) - this.startS;
  }

  // Tokens per second from the question to the last token.
  get wholeRate() {
    return this.totalS > 0 && this.numTokens > 0 ? this.numTokens / this.totalS : null;
  }

  // Tokens per second after the first step, which includes the prompt's time; null before the second step.
  get rate() {
    if (this.kept) return this.kept.rate;
    const time = this.lastS - this.firstS;
    const first = this.blocks[this.before?.blocks.length ?? 0];
    const numLater = this.numTokens - (this.before?.figures.tokens ?? 0) - (first?.tokens.length ?? 1);
    return numLater < 1 || !(time > 0) ? null : numLater / time;
  }

  render() {
    const hasDrafts = this.view.isDraftView() && this.blocks.length > 0;
    this.renderThinking(hasDrafts);
    this.prose.hidden = hasDrafts;
    this.tools.hidden = hasDrafts || this.calls.length === 0;
    this.tokens.hidden = this.strip.hidden = !hasDrafts;
    if (!hasDrafts) {
      renderMarkdown(this.prose, this.text);
      this.renderCalls();
      return;
    }
    renderBlocks(this.tokens, this.blocks);
    drawStrip(this.strip, this.blocks, this.view.width());
    const sizes = this.blocks.map((block) => block.tokens.length);
    this.strip.setAttribute("aria-label", `Tokens of each step: ${sizes.join(", ")}`);
  }

  // Shows the thoughts, open until the answer begins. Once the user has clicked, the user's choice stays.
  renderThinking(hasDrafts) {
    this.thinking.hidden = hasDrafts || this.reasoning === "";
    if (this.reasoning === "") return;
    const isThinking = this.text === "" && this.finishReason === null && this.kept === null;
    this.thinking.firstChild.textContent = isThinking ? "Thinking" : "Thoughts";
    if (!this.isThinkingChosen) this.thinking.open = isThinking;
    renderMarkdown(this.thinking.lastChild, this.reasoning);
  }

  renderCalls() {
    const shown = JSON.stringify(this.calls);
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    this.tools.replaceChildren(...this.calls.map((call) => {
      const node = make("div", "call");
      const title = make("p", "muted small", "The model calls ");
      title.append(make("code", "", call.name || "a tool"));
      node.append(title, codeBlock(pretty(call.arguments), "json"));
      return node;
    }));
  }

  figures() {
    const { blocks } = this;
    const perStep = tokensPerStep(this.blocks);
    return [
      `${this.numTokens} tokens`,
      seconds(this.totalS),
      this.rate === null ? null : `${rate(this.rate)} tok/s`,
      perStep === null ? null : `${perStep.toFixed(2)} per step`,
      perStep === null || !this.view.isDraftView() ? null : `${blocks.length} steps instead of ${countTokens(blocks)}`,
      this.endText(),
    ].filter((item) => item !== null);
  }

  endText() {
    if (this.finishReason !== "length") return null;
    return this.isAtLimit ? `cut at ${this.numTokens.toLocaleString("en")} tokens` : "cut: the context is full";
  }
}

// A message with one answer.
export class Single {
  constructor(view, turn) {
    this.node = make("article", "message assistant");
    this.node.setAttribute("aria-label", "Answer");
    this.answer = new Answer(view, turn);
    this.foot = make("footer", "foot muted");
    this.figures = make("span", "figure", "\u00a0");
    this.foot.append(this.figures);
    this.node.append(this.answer.node, this.foot);
    if (turn?.note) this.node.append(make("p", "muted small", turn.note));
    if (turn) this.render();
  }

  // Appends to the text of `turn`, with which this message was made.
  goOn(turn) {
    this.answer.goOn(turn);
  }

  async run(bodies, signal, onChange) {
    await this.answer.stream(bodies.speculative, signal, onChange);
  }

  turn() {
    return this.answer.turn();
  }

  render() {
    this.answer.render();
    if (this.answer.numTokens === 0) return;
    this.figures.textContent = this.answer.figures().join(" · ");
    const isComplete = this.answer.endS !== null || this.answer.kept !== null;
    if (isComplete && !this.foot.querySelector("button")) this.foot.append(copyButton(() => this.answer.text));
  }
}

// A message with two answers to one prompt, one after the other.
export class Comparison {
  constructor(view) {
    this.node = make("article", "message assistant comparison");
    this.node.setAttribute("aria-label", "Comparison with and without speculation");
    const top = this.node.appendChild(make("div", "top"));
    this.race = top.appendChild(make("div", "race"));
    this.verdict = top.appendChild(make("p", "verdict", "\u00a0"));
    const columns = this.node.appendChild(make("div", "columns"));
    this.lanes = [
      this.lane(view, columns, "With speculation", "speculative"),
      this.lane(view, columns, "Without", "plain"),
    ];
    this.node.append(make("p", "muted small",
      "One after the other, so that each has the machine to itself, with the same seed and settings; " +
      "both read the whole prompt. Times and tok/s are from the question to the last token."));
    this.foot = this.node.appendChild(make("footer", "foot muted"));
  }

  lane(view, columns, title, kind) {
    const answer = new Answer(view);
    const row = this.race.appendChild(make("div", `lane ${kind}`));
    const [time, figures, bar] = [make("span", "time figure", "–"), make("span", "figures figure muted"), make("i")];
    const track = make("div", "meter");
    track.append(bar);
    row.append(make("span", "title", title), track, time, figures);
    const column = columns.appendChild(make("section", "column-text"));
    column.setAttribute("aria-label", title);
    column.append(make("h3", "", title), answer.node);
    return { kind, answer, time, figures, bar };
  }

  async run(bodies, signal, onChange) {
    const clock = setInterval(() => this.renderRace(), 100);
    try {
      for (const { kind, answer } of this.lanes) await answer.stream(bodies[kind], signal, onChange);
    } finally {
      clearInterval(clock);
      onChange();
    }
  }

  // A comparison is saved as its answer and a note with the result.
  turn() {
    const turn = this.lanes[0].answer.turn() ?? this.lanes[1].answer.turn();
    const note = this.verdict.textContent.trim();
    return turn && note ? { ...turn, note: `Compared: ${note}` } : turn;
  }

  render() {
    for (const lane of this.lanes) lane.answer.render();
    this.renderRace();
    this.renderVerdict();
  }

  renderRace() {
    const longest = Math.max(...this.lanes.map(({ answer }) => answer.totalS ?? 0));
    for (const { kind, answer, time, figures, bar } of this.lanes) {
      if (answer.startS === null) {
        figures.textContent = "next";
        continue;
      }
      time.textContent = seconds(answer.totalS);
      bar.style.width = `${(100 * answer.totalS) / Math.max(longest, 0.001)}%`;
      const perStep = kind === "plain" ? 1 : tokensPerStep(answer.blocks);
      const parts = [answer.wholeRate === null ? null : `${rate(answer.wholeRate)} tok/s`];
      parts.push(perStep === null ? null : `${perStep === 1 ? 1 : perStep.toFixed(2)} per step`);
      figures.textContent = parts.filter(Boolean).join(" · ") || "\u00a0";
    }
  }

  renderVerdict() {
    const [fast, plain] = this.lanes.map((lane) => lane.answer);
    if (fast.finishReason === null || plain.finishReason === null || plain.endS === null) return;
    const parts = [];
    if (fast.wholeRate !== null && plain.wholeRate !== null) {
      const speedup = fast.wholeRate / plain.wholeRate; // if the texts are equal, the ratio of the times above
      const times = speedup >= 1 ? speedup : 1 / speedup;
      const how = speedup >= 1 ? "faster" : "slower";
      const per = fast.numTokens === plain.numTokens ? "" : " per token";
      parts.push(make("strong", how, `${times.toFixed(2)}× ${how}`), `${per} with speculation. `);
    }
    const [one, two] = [fast.reasoning + fast.text, plain.reasoning + plain.text];
    const isSame = one === two;
    parts.push(make("span", isSame ? "same" : "differ", isSame
      ? "✓ The texts are identical."
      : `The texts differ from character ${firstDifference(one, two) + 1} on. ` +
        "Rounding may decide a near-tie; anything else is a bug."));
    if (fast.isAtLimit && plain.isAtLimit) parts.push(` Both were ${fast.endText()}.`);
    this.verdict.replaceChildren(...parts);
  }
}

function firstDifference(one, two) {
  let index = 0;
  while (index < one.length && one[index] === two[index]) index++;
  return index;
}
