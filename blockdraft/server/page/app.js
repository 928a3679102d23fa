// The page: conversation, controls, keyboard, and the state of the server. Nothing of a conversation is stored.

import { Comparison, Single } from "./chat.js";
import { seconds, showEngine, showNow, showStartup } from "./live.js";
import { getJson, hasKey, HttpError, storeKey, watch } from "./net.js";
import { make } from "./text.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = "blockdraft.settings";
const MAX_SEED = 2 ** 31;
const EXAMPLES = [
  "Explain speculative decoding in three sentences.",
  "Write a binary search in Python, with a docstring.",
  "List the planets with one fact about each.",
];

const state = {
  turns: [], // { role, content }
  messages: [], // what is on the page, in order: Single | Comparison
  server: "connecting", // connecting | starting | ready | draining | failed | offline
  engine: null,
  model: null,
  running: null, // AbortController
  isDraftView: false,
  isCompare: false,
};
const view = { isDraftView: () => state.isDraftView, width: () => state.engine?.width ?? 1 };

// ---- settings: kept in this browser, without the texts

function readSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    // Damaged or forbidden: the defaults do.
  }
  $("temperature").value = kept.temperature ?? "0.7";
  $("max-tokens").value = kept.maxTokens ?? "512";
  setPressed("drafts", kept.isDraftView === true);
  setPressed("compare", kept.isCompare === true);
}

function keepSettings() {
  const { isDraftView, isCompare } = state;
  const kept = { temperature: $("temperature").value, maxTokens: $("max-tokens").value, isDraftView, isCompare };
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(kept));
  } catch {
    // Private windows may forbid it.
  }
}

function setPressed(id, isOn) {
  $(id).setAttribute("aria-pressed", String(isOn));
  state[id === "drafts" ? "isDraftView" : "isCompare"] = isOn;
  $("legend").hidden = !state.isDraftView;
}

function fillWidths(width, block, isFree = true) {
  const widths = [2, 4, 8, 16, 32].filter((value) => value <= block && value !== width);
  const options = [["", block > 1 ? `automatic (${width})` : "1: no drafter"]];
  if (block > 1 && isFree) options.push(["1", "1: off"], ...widths.map((value) => [String(value), String(value)]));
  $("width").replaceChildren(...options.map(([value, label]) => new Option(label, value)));
  $("width").disabled = block === 1 || !isFree;
}

// ---- requests

function number(id) {
  const value = $(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

const hasDrafter = () => state.engine !== null && state.engine.draft !== null;
// Other engines draft for every request or for none, and do not tell which tokens were drafts.
const canSwitch = () => hasDrafter() && state.engine.can_switch !== false;

function requestBodies() {
  const system = $("system").value.trim();
  const common = {
    model: state.model ?? undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...state.turns],
    temperature: number("temperature"),
    max_completion_tokens: number("max-tokens"),
    seed: number("seed") ?? Math.floor(Math.random() * MAX_SEED),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!canSwitch()) return { speculative: common, plain: common };
  // A comparison with itself says nothing: there, "off" means the server's own width.
  const chosen = Number($("width").value);
  const isAutomatic = chosen === 0 || (state.isCompare && chosen === 1);
  // A server that found drafts too slow here decodes plainly: to see some, one has to ask.
  const isMissed = state.engine.width === 1 && (state.isCompare || state.isDraftView);
  const width = !isAutomatic ? { width: chosen } : isMissed ? { width: Math.min(state.engine.block, 8) } : {};
  return {
    speculative: { ...common, speculative: { ...width, detail: true } },
    plain: { ...common, speculative: false },
  };
}

function explain(error) {
  if (error instanceof HttpError) {
    const again = error.retryAfter === null ? "in a moment" : `in ${seconds(error.retryAfter)}`;
    if (error.status === 401) return "The server wants an API key.";
    if (error.status === 429) return `The server is busy and its queue is full. Try again ${again}.`;
    if (error.status === 503) return `The server cannot answer now: ${error.message} Try again ${again}.`;
    return error.message;
  }
  return "The server cannot be reached. Is it still running?";
}

// ---- conversation

// Call it, change the log, then call what it gave: who read the end goes on reading the end, and that says so.
function follow() {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  return () => {
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    return isAtEnd;
  };
}

let isDrawing = false;

function draw(message) {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    const scroll = follow();
    message.render();
    scroll();
  });
}

function addQuestion(text) {
  const node = make("article", "message user");
  node.setAttribute("aria-label", "You");
  node.append(make("p", "", text));
  $("log").append(node);
}

async function ask(text) {
  $("welcome").hidden = true;
  addQuestion(text);
  state.turns.push({ role: "user", content: text });
  await answer();
}

async function answer() {
  const message = state.isCompare && canSwitch() ? new Comparison(view) : new Single(view);
  state.messages.push(message);
  $("log").append(message.node);
  $("log").scrollTop = $("log").scrollHeight;
  const running = new AbortController();
  state.running = running;
  $("announcement").textContent = "";
  showControls();
  let problem = null;
  try {
    await message.run(requestBodies(), running.signal, () => draw(message));
  } catch (error) {
    if (!running.signal.aborted) problem = error;
  }
  const scroll = follow();
  message.render();
  if (state.running !== running) return; // a new chat began meanwhile
  state.running = null;
  if (message.text !== "") state.turns.push({ role: "assistant", content: message.text });
  if (problem !== null) addProblem(message, problem);
  else if (running.signal.aborted) message.node.append(make("p", "muted small", "Stopped."));
  else $("announcement").textContent = "The answer is complete.";
  // Of a comparison the result matters, and that stands on top.
  if (scroll() && message instanceof Comparison) message.node.scrollIntoView({ block: "start" });
  showControls();
  if (problem?.status === 401 && (await askKey())) retry(message);
}

function addProblem(message, problem) {
  const row = make("p", "error");
  row.setAttribute("role", "alert");
  row.append(make("span", "", explain(problem)));
  if (message.text === "") {
    const button = row.appendChild(make("button", "quiet", "Try again"));
    button.type = "button";
    button.addEventListener("click", () => retry(message));
  }
  message.node.append(row);
}

function retry(message) {
  if (state.running !== null || state.server !== "ready") return;
  message.node.remove();
  state.messages = state.messages.filter((other) => other !== message);
  answer();
}

function newChat() {
  state.running?.abort();
  state.running = null;
  state.turns = [];
  state.messages = [];
  for (const node of document.querySelectorAll("#log > .message")) node.remove();
  $("welcome").hidden = false;
  $("note").textContent = "";
  showControls();
  $("prompt").focus();
}

// ---- what can be done now

const NOTES = {
  connecting: "Connecting to the server.",
  starting: "The server is starting: sending works as soon as it is ready.",
  draining: "The server is shutting down and takes no new questions.",
  failed: "The server could not start: see Start-up.",
  offline: "The connection to the server is lost. Trying again.",
};

function showControls() {
  const isRunning = state.running !== null;
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("send").disabled = state.server !== "ready" || $("prompt").value.trim() === "";
  for (const id of ["drafts", "compare"]) {
    $(id).disabled = state.engine !== null && !canSwitch();
    if ($(id).disabled) {
      $(id).title = hasDrafter() ? "This engine cannot switch its drafter off." : "This server runs without a drafter.";
    }
  }
  for (const button of document.querySelectorAll("#examples button")) button.disabled = state.server !== "ready";
}

function setServer(server) {
  if (server === state.server) return;
  state.server = server;
  $("status").dataset.state = server;
  $("status").textContent = server;
  $("note").textContent = NOTES[server] ?? "";
  $("starting").hidden = server !== "starting" && server !== "failed";
  $("hello").hidden = !$("starting").hidden;
  if (server === "ready" && state.model === null) readModel();
  showControls();
}

async function readModel() {
  try {
    state.model = (await getJson("v1/models")).data[0].id;
  } catch {
    // Requests without a model's name are answered too.
  }
}

function showStarting(startup) {
  const phase = startup.phases.find((item) => item.state === "running" || item.state === "failed");
  const num = startup.phases.filter((item) => item.state === "done" || item.state === "skipped").length;
  const total = Math.max(1, startup.phases.length);
  $("starting-title").textContent = startup.state === "failed" ? "The server could not start" : "Getting ready";
  $("starting-detail").textContent = startup.error ?? [phase?.name, phase?.detail].filter(Boolean).join(": ");
  $("starting-bar").style.width = `${(100 * (num + (phase?.progress ?? 0))) / total}%`;
}

// ---- live feed

function onEvent(event, isFirst) {
  setServer(event.startup.state);
  showStarting(event.startup);
  showStartup(event.startup);
  if (event.engine !== null && JSON.stringify(event.engine) !== JSON.stringify(state.engine)) {
    state.engine = event.engine;
    $("model").textContent = shortName(event.engine.target);
    $("model").title = event.engine.target;
    const { draft, width, block = width } = event.engine;
    $("drafter").textContent = draft === null ? "no drafter" : `drafted by ${shortName(draft)}`;
    $("per-step-note").textContent = draft === null ? "no drafter" : "plain decoding: 1";
    fillWidths(width, draft === null ? 1 : block, canSwitch());
    showEngine(event.engine);
    showNotices(event.engine.notices ?? []);
    showControls();
  }
  showNow(event, isFirst);
}

// Whoever sees a figure of an engine that is for timing only must see that it is.
function showNotices(notices) {
  $("notices").hidden = notices.length === 0;
  $("notices").replaceChildren(...notices.map((notice) => make("li", "", notice)));
}

const shortName = (name) => name.split("/").filter(Boolean).at(-1) ?? name;

function onLost(error) {
  if (error.status === 401) return askKey().then((isGiven) => (isGiven ? undefined : keyGiven()));
  setServer("offline");
  return undefined;
}

// ---- API key

let asking = null; // the promise of the open dialog
let wakeFeed = null;

const keyGiven = () => new Promise((resolve) => { wakeFeed = resolve; });

// True when a key was given. The feed and a question may both need it: one dialog serves both.
function askKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (hasKey()) $("key-text").textContent = "The server did not accept that key. Try another.";
    $("key").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      const isGiven = dialog.returnValue === "ok";
      if (isGiven) wakeFeed?.();
      resolve(isGiven);
    }, { once: true });
  });
  return asking;
}

function bindKeyDialog() {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey($("key").value.trim());
    $("key-dialog").close("ok");
  });
  $("key-cancel").addEventListener("click", () => $("key-dialog").close(""));
}

// ---- controls

function send() {
  const text = $("prompt").value.trim();
  if (text === "" || state.running !== null || state.server !== "ready") return;
  $("prompt").value = "";
  grow();
  $("note").textContent = "";
  ask(text);
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function toggleSettings(isOpen) {
  $("settings").hidden = !isOpen;
  $("settings-button").setAttribute("aria-expanded", String(isOpen));
}

function onKey(event) {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (!$("settings").hidden) {
    toggleSettings(false);
    $("settings-button").focus();
  } else {
    state.running?.abort();
  }
}

function bindToggles() {
  for (const id of ["drafts", "compare"]) {
    $(id).addEventListener("click", () => {
      setPressed(id, $(id).getAttribute("aria-pressed") !== "true");
      keepSettings();
      const scroll = follow();
      for (const message of state.messages) message.render();
      scroll();
    });
  }
  $("settings-button").addEventListener("click", () => toggleSettings($("settings").hidden));
  $("settings").addEventListener("change", keepSettings);
  $("live-button").addEventListener("click", () => {
    const isOpen = document.body.classList.toggle("show-live");
    $("live-button").setAttribute("aria-expanded", String(isOpen));
  });
}

function bindComposer() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("input", () => { grow(); showControls(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => { state.running?.abort(); $("prompt").focus(); });
  $("new-chat").addEventListener("click", newChat);
  document.addEventListener("keydown", onKey);
  for (const text of EXAMPLES) {
    const button = $("examples").appendChild(make("button", "quiet", text));
    button.type = "button";
    button.addEventListener("click", () => { $("prompt").focus(); ask(text); });
  }
}

function redrawStrips() {
  for (const message of state.messages) message.render();
}

readSettings();
fillWidths(1, 1);
bindToggles();
bindComposer();
bindKeyDialog();
showControls();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawStrips);
addEventListener("resize", redrawStrips);
if (matchMedia("(min-width: 60rem)").matches) $("prompt").focus();
watch(onEvent, onLost);
