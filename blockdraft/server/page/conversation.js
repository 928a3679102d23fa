// One conversation on the page: its turns, the running answer, edits, new attempts and failures.
//
// A question without an answer (refused, unreachable, stopped too early) does not stay in `chat.turns`, so the
// next request leaves it out. It stays on the page, marked as unanswered, until the user tries it again.

import { Comparison, Single } from "./chat.js";
import { make, makeButton } from "./dom.js";
import { asMessages, keepChat, newChat } from "./store.js";

const NEAR_END_PX = 80;

export class Conversation {
  // host: { view, bodies(messages, more), isCompare(), canAsk(), changed(), announce(text), warn(text),
  //   explain(error, hasText), askKey() }
  constructor(root, host) {
    this.root = root;
    this.host = host;
    this.chat = newChat();
    this.shown = []; // { turn, node, message }: the turn is null if it is no part of the conversation
    this.running = null; // AbortController
  }

  // ---- chats

  open(chat) {
    this.stop();
    this.running = null;
    for (const { node } of this.shown) node.remove();
    this.shown = [];
    this.chat = chat;
    for (const turn of chat.turns) this.add(turn);
    this.showActions();
    this.host.changed();
    this.root.scrollTop = chat.turns.length > 0 ? this.root.scrollHeight : 0;
  }

  stop() {
    this.running?.abort();
  }

  // Saves the part of an answer that has arrived, when the user leaves the page.
  keepWhatCame() {
    const partial = this.running === null ? null : this.shown.at(-1).message.turn();
    if (partial !== null) keepChat({ ...this.chat, turns: [...this.chat.turns, partial] });
  }

  keep(chat) {
    if (chat.isGone || keepChat(chat)) return;
    this.host.warn("This browser has no room left for this chat: export it, or delete older ones.");
  }

  // ---- asking

  ask(text) {
    return this.attempt({ turns: [{ role: "user", content: text }] });
  }

  // Asks for another answer to the last question.
  regenerate() {
    const last = this.shown.findLastIndex(({ turn }) => turn?.role === "assistant");
    return this.attempt({ turns: [], from: last });
  }

  // Continues the last answer, which was cut or broke off.
  goOn() {
    const last = this.shown.findLastIndex(({ turn }) => turn?.role === "assistant");
    return this.attempt({ turns: [], from: last, continued: this.shown[last].turn });
  }

  // Sends the results of the last answer's tool calls.
  giveResults(results) {
    return this.attempt({ turns: results.map(({ id, content }) => ({ role: "tool", id, content })) });
  }

  // Replaces all entries from `from` on by `turns` and an answer. If no answer comes, nothing changes.
  // If `continued` is a turn, the answer begins with that turn's text.
  async attempt({ turns, from = this.shown.length, continued = null }) {
    if (this.running !== null || !this.host.canAsk()) return;
    const { chat } = this;
    const before = chat.turns;
    const removed = this.shown.splice(from);
    for (const { node } of removed) node.remove();
    const gone = new Set(removed.map(({ turn }) => turn));
    chat.turns = [...before.filter((turn) => !gone.has(turn)), ...turns];
    const asked = turns.map((turn) => this.add(turn));
    const entry = this.begin(continued);
    const { problem, isStopped } = await this.run(entry.message, chat, continued);
    const turn = entry.message.turn();
    entry.turn = turn;
    chat.turns = turn === null ? before : [...chat.turns, turn];
    this.keep(chat);
    if (this.chat !== chat) return; // another chat was opened meanwhile
    const entries = [...asked, entry];
    const again = () => this.tryAgain(turns, entries);
    const isPutBack = turn === null && removed.some((one) => one.turn !== null);
    if (isPutBack) this.putBack(removed, entries, problem);
    else if (turn === null) this.showUnanswered(entries, problem, again);
    else this.showEnd(entry, problem, isStopped);
    this.running = null;
    this.showActions();
    this.host.changed();
    if (problem?.status === 401 && (await this.host.askKey()) && turn === null && !isPutBack) again();
  }

  begin(continued) {
    const isCompare = continued === null && this.host.isCompare();
    const message = isCompare ? new Comparison(this.host.view) : new Single(this.host.view, continued ?? undefined);
    if (continued !== null) message.goOn(continued);
    const entry = { turn: null, node: message.node, message };
    this.shown.push(entry);
    this.root.append(message.node);
    this.showActions();
    this.root.scrollTop = this.root.scrollHeight;
    return entry;
  }

  async run(message, chat, continued) {
    const turns = continued === null ? chat.turns : [...chat.turns, continued];
    const more = continued === null ? {} : { continue_final_message: true, add_generation_prompt: false };
    const running = new AbortController();
    this.running = running;
    this.host.announce("");
    this.host.changed();
    let problem = null;
    try {
      const bodies = this.host.bodies(asMessages({ ...chat, turns }), more);
      await message.run(bodies, running.signal, () => this.draw(message));
    } catch (error) {
      if (!running.signal.aborted) problem = error;
    }
    const scroll = this.follow();
    message.render();
    // Show the top of a comparison, which holds its result.
    if (scroll() && message instanceof Comparison) message.node.scrollIntoView({ block: "start" });
    return { problem, isStopped: running.signal.aborted };
  }

  tryAgain(turns, entries) {
    if (this.running !== null || !this.host.canAsk()) return;
    for (const { node } of entries) node.remove();
    this.shown = this.shown.filter((entry) => !entries.includes(entry));
    this.attempt({ turns });
  }

  // ---- how it ended

  showEnd(entry, problem, isStopped) {
    const scroll = this.follow();
    if (problem !== null) entry.node.append(this.endRow(problem, true));
    else if (isStopped) entry.node.append(make("p", "muted small", "Stopped."));
    else this.host.announce("The answer is complete.");
    if (entry.turn.content === "" && entry.turn.calls.length === 0) {
      const text = entry.turn.finish === "length"
        ? "The limit was reached before the answer began: Max tokens in Settings allows more."
        : "The model ended its answer without a word.";
      entry.node.append(make("p", "muted small", text));
    }
    scroll();
  }

  showUnanswered(entries, problem, again) {
    for (const entry of entries) {
      entry.turn = null;
      entry.node.classList.add("unanswered");
      entry.node.querySelector(".edit")?.remove();
    }
    const { node } = entries.at(-1);
    const row = this.endRow(problem);
    row.append(make("span", "", "The question is not part of the conversation."), makeButton("quiet retry", "Try again", again));
    node.append(row);
  }

  // Restores the conversation after an edit or a new answer failed, and says what happened.
  putBack(removed, entries, problem) {
    for (const { node } of entries) node.remove();
    this.shown = this.shown.filter((entry) => !entries.includes(entry));
    for (const entry of removed) {
      this.shown.push(entry);
      this.root.append(entry.node);
    }
    const row = this.endRow(problem);
    row.append(make("span", "", "The conversation is as it was."));
    const node = make("div", "message");
    node.append(row);
    this.shown.push({ turn: null, node, message: null });
    this.root.append(node);
    this.root.scrollTop = this.root.scrollHeight;
  }

  // Returns a row that says why no answer, or no more of it, came; null means that the user stopped it.
  endRow(problem, hasText = false) {
    const row = make("p", problem === null ? "error stopped" : "error");
    row.setAttribute("role", "alert");
    row.append(make("span", "", problem === null ? "Stopped before the first word." : this.host.explain(problem, hasText)));
    return row;
  }

  // ---- what is on the page

  add(turn) {
    const entry = { turn, node: null, message: null };
    if (turn.role === "assistant") {
      entry.message = new Single(this.host.view, turn);
      entry.node = entry.message.node;
    } else {
      entry.node = turn.role === "tool" ? toolNode(turn) : this.questionNode(turn);
    }
    this.shown.push(entry);
    this.root.append(entry.node);
    if (entry.message) entry.message.render(); // only now does the strip have a size
    return entry;
  }

  questionNode(turn) {
    const node = make("article", "message user");
    node.setAttribute("aria-label", "You");
    const edit = makeButton("small-button edit", "Edit", () => this.edit(turn, node));
    node.append(make("p", "", turn.content), edit);
    return node;
  }

  edit(turn, node) {
    const from = this.shown.findIndex((entry) => entry.turn === turn);
    if (from < 0 || this.running !== null || node.querySelector("form")) return;
    const form = make("form", "edit-form");
    const box = make("textarea");
    box.value = turn.content;
    box.rows = Math.min(12, turn.content.split("\n").length + 1);
    box.setAttribute("aria-label", "Edit your message");
    const close = () => { form.remove(); node.classList.remove("editing"); node.querySelector(".edit")?.focus(); };
    const send = make("button", "primary", "Send");
    send.type = "submit";
    const row = make("div", "row");
    const hint = from + 2 < this.shown.length ? "What follows this message is replaced." : "";
    row.append(make("span", "muted small", hint), makeButton("quiet", "Cancel", close), send);
    form.append(box, row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = box.value.trim();
      close();
      if (text !== "") this.attempt({ turns: [{ role: "user", content: text }], from });
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    node.classList.add("editing");
    node.append(form);
    box.focus();
  }

  // Buttons that only the last answer has: continue it, replace it, and give the results of its calls.
  showActions() {
    for (const node of this.root.querySelectorAll(".again, .results")) node.remove();
    this.root.classList.toggle("is-running", this.running !== null);
    const last = this.shown.findLast(({ turn }) => turn !== null);
    if (this.running !== null || last?.turn.role !== "assistant") return;
    const { foot, answer } = last.message;
    if (answer?.canGoOn) foot.append(makeButton("small-button again retry", "Continue", () => this.goOn()));
    foot.append(makeButton("small-button again retry", "Regenerate", () => this.regenerate()));
    const row = last.node.querySelector(":scope > .error");
    row?.append(makeButton("quiet again retry", "Try again", () => (answer?.before ? this.goOn() : this.regenerate())));
    if (last.turn.calls?.length > 0) last.node.append(this.resultsForm(last.turn.calls));
  }

  resultsForm(calls) {
    const form = make("form", "results");
    const boxes = calls.map((call) => {
      const label = form.appendChild(make("label", "", `What ${call.name || "the tool"} returns`));
      return label.appendChild(make("textarea"));
    });
    const send = form.appendChild(make("button", "primary", "Send results"));
    send.type = "submit";
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.giveResults(calls.map((call, index) => ({ id: call.id, content: boxes[index].value })));
    });
    return form;
  }

  // ---- drawing

  // Call this before a change of the log, and the returned function after it: it scrolls to the end if the
  // log was at its end, and returns whether it was.
  follow() {
    const { root } = this;
    const isAtEnd = root.scrollHeight - root.scrollTop - root.clientHeight < NEAR_END_PX;
    return () => {
      if (isAtEnd) root.scrollTop = root.scrollHeight;
      return isAtEnd;
    };
  }

  draw(message) {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      const scroll = this.follow();
      message.render();
      scroll();
    });
  }

  redraw() {
    const scroll = this.follow();
    for (const { message } of this.shown) message?.render();
    scroll();
  }
}

function toolNode(turn) {
  const node = make("article", "message tool");
  node.setAttribute("aria-label", "Result of a tool");
  node.append(make("p", "muted small", "The tool returned"), make("pre", "", turn.content));
  return node;
}
