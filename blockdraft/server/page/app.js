// The page: its controls, the keyboard, the state of the server, and the feed of live figures.

import { Conversation } from "./conversation.js";
import { $, make, makeButton } from "./dom.js";
import { namesOf, seconds, showEngine, showNothing, showNow, showStartup } from "./live.js";
import { bindMenu } from "./menu.js";
import { getJson, getStartup, hasKey, HttpError, pause, storeKey, watch } from "./net.js";
import {
  checkSettings, clearSettings, fillWidths, keepSettings, labelOfName, readSettings, readTools, sampling, showDefaults,
} from "./settings.js";
import { currentChat, keepChat, newChat, rememberCurrent } from "./store.js";

const EXAMPLES = [
  "Explain speculative decoding in three sentences.",
  "Write a binary search in Python, with a docstring.",
  "List the planets with one fact about each.",
];

const POLL_MS = 1000; // polls the start while the user has given no key

const state = {
  server: "connecting", // connecting | starting | ready | draining | failed | offline
  engine: null,
  model: null, // its name in requests
  governedWidth: null, // the present width of steps that do not set one
  isDraftView: false,
  isCompare: false,
};

const conversation = new Conversation($("log"), {
  view: { isDraftView: () => state.isDraftView, width: () => state.engine?.width ?? 1 },
  bodies: requestBodies,
  isCompare: () => state.isCompare && canSwitch(),
  canAsk,
  changed: showControls,
  announce: (text) => { $("announcement").textContent = text; },
  warn: (text) => { $("note").textContent = text; },
  explain,
  askKey,
});

// ---- requests

const hasDrafter = () => state.engine !== null && state.engine.draft !== null;
// Other engines draft for all requests or for none, and do not say which tokens were drafts.
const canSwitch = () => hasDrafter() && state.engine.can_switch !== false;

// Returns whether a request can be sent. If the settings are wrong, shows why at the field and in the note.
function canAsk() {
  if (state.server !== "ready") return false;
  const wrong = checkSettings();
  const tools = readTools();
  if (wrong === null && Array.isArray(tools)) return true;
  toggleSettings(true);
  $("note").textContent = wrong?.text ?? tools;
  $(wrong?.id ?? "tools").closest("details")?.setAttribute("open", "");
  $(wrong?.id ?? "tools").focus();
  return false;
}

// Returns a new salt, with which the prompt is not found in the cache.
const newSalt = () => [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("");

function requestBodies(messages, more) {
  const common = {
    model: state.model ?? undefined,
    messages,
    ...sampling(),
    ...more,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!canSwitch()) return { speculative: common, plain: common };
  // A comparison needs drafts in one answer, so there "off" means the server's own width.
  const chosen = Number($("width").value);
  const isAutomatic = chosen === 0 || (state.isCompare && chosen === 1);
  // A server that has found drafts too slow decodes plainly. To show drafts, the request must set a width.
  const isMissed = (state.engine.width === 1 || state.governedWidth === 1) && (state.isCompare || state.isDraftView);
  const width = !isAutomatic ? { width: chosen } : isMissed ? { width: Math.min(state.engine.block, 8) } : {};
  // In a comparison, the second answer would find the prompt in the cache; with salts, neither does.
  const salted = () => (state.isCompare ? { cache_salt: newSalt() } : {});
  return {
    speculative: { ...common, ...salted(), speculative: { ...width, detail: true } },
    plain: { ...common, ...salted(), speculative: false },
  };
}

function explain(error, hasText) {
  if (!(error instanceof HttpError)) return `The page failed: ${error.message}`;
  const { status, message, retryAfter, param } = error;
  const again = retryAfter === null ? "in a moment" : `in ${seconds(retryAfter)}`;
  if (status === 0) {
    return hasText ? "The connection was lost; the answer above is incomplete." : "The server cannot be reached. Is it still running?";
  }
  if (status === 401) return "The server wants an API key.";
  if (status === 429) return `The server is busy and its queue is full. Try again ${again}.`;
  if (status === 503) return `The server cannot answer now: ${message} Try again ${again}.`;
  const label = labelOfName(param);
  return label === null ? message : `${label} (in Settings): ${message}`;
}

// ---- chats

function openChat(chat) {
  rememberCurrent(chat.id);
  $("system").value = chat.system;
  $("note").textContent = "";
  conversation.open(chat);
}

// A new chat keeps the system prompt, as users try one prompt with many questions.
function beginChat() {
  openChat(newChat($("system").value));
  $("prompt").focus();
}

function takeSystem() {
  conversation.chat.system = $("system").value;
  if (conversation.chat.turns.length > 0) keepChat(conversation.chat);
  showSystem();
}

// Shows the system prompt that the model really gets: the user's or the chat template's.
function showSystem() {
  const own = conversation.chat.system.trim();
  const inserted = state.engine?.system_prompt ?? "";
  $("system-shown").hidden = own === "" && inserted === "";
  $("system-origin").textContent = own === "" ? "inserted by the model's chat template" : "yours";
  $("system-text").textContent = own || inserted;
}

// ---- which controls are enabled

const NOTES = {
  connecting: "Connecting to the server.",
  starting: "The server is starting: sending works as soon as it is ready.",
  draining: "The server is shutting down and takes no new questions.",
  failed: "The server could not start: see Start-up.",
};
const timeFormat = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });

function showControls() {
  const isRunning = conversation.running !== null;
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("send").disabled = state.server !== "ready" || $("prompt").value.trim() === "";
  for (const id of ["drafts", "compare"]) {
    $(id).disabled = state.engine !== null && !canSwitch();
    if ($(id).disabled) {
      $(id).title = hasDrafter() ? "This engine cannot switch its drafter off." : "This server runs without a drafter.";
    }
  }
  for (const button of document.querySelectorAll("#examples button, .retry")) button.disabled = state.server !== "ready";
  $("welcome").hidden = conversation.shown.length > 0;
  showSystem();
}

function setServer(server) {
  if (server === state.server) return;
  state.server = server;
  $("status").dataset.state = server;
  $("status").textContent = server;
  $("note").textContent = NOTES[server] ?? "";
  $("offline").hidden = server !== "offline";
  $("live").classList.toggle("is-offline", server === "offline");
  if (server === "offline") showOffline();
  $("starting").hidden = server !== "starting" && server !== "failed";
  $("hello").hidden = !$("starting").hidden;
  if (server === "ready" && state.model === null) readModel();
  showControls();
}

function showOffline() {
  const since = timeFormat.format(Date.now());
  $("status").textContent = `offline since ${since}`;
  $("note").textContent = `Offline since ${since}: the connection to the server is lost. Trying again.`;
  $("offline").textContent = `Offline since ${since}. Figures return with the server.`;
  showNothing();
}

async function readModel() {
  try {
    state.model = (await getJson("v1/models")).data[0].id;
  } catch {
    // Requests without a model's name are answered, too.
  }
}

function showStarting(startup) {
  const phase = startup.phases.find((item) => item.state === "running" || item.state === "failed");
  const num = startup.phases.filter((item) => item.state === "done" || item.state === "skipped").length;
  const total = Math.max(1, startup.phases.length);
  $("starting-title").textContent = startup.state === "failed" ? "The server could not start" : "Getting ready";
  const next = startup.phases.find((item) => item.state === "waiting");
  const running = [phase?.name, phase?.detail].filter(Boolean).join(": ");
  $("starting-detail").textContent = startup.error ?? (running || (next ? `next: ${next.name}` : ""));
  $("starting-bar").style.width = `${(100 * (num + (phase?.progress ?? 0))) / total}%`;
}

// ---- live feed

function takeStartup(startup) {
  setServer(startup.state);
  showStarting(startup);
  showStartup(startup);
}

function onEvent(event, isFirst) {
  takeStartup(event.startup);
  state.governedWidth = event.now?.governed_width ?? null;
  if (event.engine !== null && JSON.stringify(event.engine) !== JSON.stringify(state.engine)) {
    state.engine = event.engine;
    showNames(event.engine);
    const { draft, width, block = width } = event.engine;
    fillWidths(width, draft === null ? 1 : block, canSwitch());
    showDefaults(event.engine);
    showEngine(event.engine);
    showNotices(event.engine.notices ?? []);
    showControls();
  }
  showNow(event, isFirst);
}

// If an engine is for timing only, its figures must come with a notice that says so.
function showNotices(notices) {
  $("notices").hidden = notices.length === 0;
  $("notices").replaceChildren(...notices.map((notice) => make("li", "", notice)));
}

function showNames(engine) {
  const names = namesOf(engine);
  const facts = [names.targetFiles, names.computed].filter(Boolean).join("; ");
  const target = facts ? `${names.target} (${facts})` : names.target;
  const files = names.draftFiles ? ` (${names.draftFiles})` : "";
  const drafter = names.draft === null ? "no drafter" : `drafter: ${names.draft}`;
  $("model").textContent = names.target;
  $("model-facts").textContent = facts ? `(${facts})` : "";
  $("drafter").textContent = drafter;
  $("names").title = `${target}, ${drafter}`;
  $("welcome-names").textContent = names.draft === null
    ? `Here the model is ${target}, without a drafter.`
    : `Here the model is ${target}, and the drafter ${names.draft}${files}.`;
}

function onLost(error) {
  if (error.status === 401) return becomeKnown();
  setServer("offline");
  return undefined;
}

// The feed needs a key, the start's progress needs none. The dialog for the key opens once the start is over.
async function becomeKnown() {
  for (;;) {
    const startup = await getStartup();
    if (startup?.state !== "starting") break;
    takeStartup(startup);
    await pause(POLL_MS);
  }
  if (!(await askKey())) await keyGiven();
}

// ---- API key

let asking = null; // the promise of the open dialog
let wakeFeed = null;

const keyGiven = () => new Promise((resolve) => { wakeFeed = resolve; });

// Returns true if the user gave a key. The feed and a question may both need it and share one dialog.
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

function setPressed(id, isOn) {
  $(id).setAttribute("aria-pressed", String(isOn));
  state[id === "drafts" ? "isDraftView" : "isCompare"] = isOn;
  $("legend").hidden = !state.isDraftView;
}

const keep = () => keepSettings({ isDraftView: state.isDraftView, isCompare: state.isCompare });

function send() {
  const text = $("prompt").value.trim();
  if (text === "" || conversation.running !== null || !canAsk()) return;
  $("prompt").value = "";
  grow();
  $("note").textContent = "";
  if (matchMedia("(max-width: 40rem)").matches) toggleSettings(false); // they would cover the answer
  conversation.ask(text);
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
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!$("settings").hidden) {
    toggleSettings(false);
    $("settings-button").focus();
  } else {
    conversation.stop();
  }
}

function bindToggles() {
  for (const id of ["drafts", "compare"]) {
    $(id).addEventListener("click", () => {
      setPressed(id, $(id).getAttribute("aria-pressed") !== "true");
      keep();
      conversation.redraw();
    });
  }
  $("live-button").addEventListener("click", () => {
    const isOpen = document.body.classList.toggle("show-live");
    $("live-button").setAttribute("aria-expanded", String(isOpen));
  });
}

function bindSettings() {
  const kept = readSettings();
  setPressed("drafts", kept.isDraftView === true);
  setPressed("compare", kept.isCompare === true);
  fillWidths(1, 1);
  $("settings-button").addEventListener("click", () => toggleSettings($("settings").hidden));
  $("settings-close").addEventListener("click", () => { toggleSettings(false); $("settings-button").focus(); });
  $("settings").addEventListener("change", keep);
  $("settings").addEventListener("input", checkSettings);
  $("settings-reset").addEventListener("click", () => { clearSettings(); checkSettings(); keep(); });
  $("system").addEventListener("input", takeSystem);
  $("system-change").addEventListener("click", () => { toggleSettings(true); $("system").focus(); });
}

function bindComposer() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("input", () => { grow(); showControls(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => { conversation.stop(); $("prompt").focus(); });
  $("new-chat").addEventListener("click", beginChat);
  document.addEventListener("keydown", onKey);
  for (const text of EXAMPLES) {
    const button = makeButton("quiet", text, () => { $("prompt").focus(); conversation.ask(text); });
    $("examples").append(button);
  }
}

bindSettings();
bindToggles();
bindComposer();
bindKeyDialog();
bindMenu({
  chat: () => conversation.chat,
  open: openChat,
  begin: beginChat,
  model: () => (state.engine === null ? "" : namesOf(state.engine).target),
});
openChat(currentChat() ?? newChat());
addEventListener("themechange", () => conversation.redraw());
addEventListener("resize", () => conversation.redraw());
addEventListener("pagehide", () => conversation.keepWhatCame());
if (matchMedia("(min-width: 60rem)").matches) $("prompt").focus();
watch(onEvent, onLost);
