// The settings of a request. An empty field is left out of the request. The server then uses the value that
// the model's makers recommend, which is the field's placeholder.

import { $ } from "./dom.js";

const KEY = "blockdraft.settings";
const MAX_SEED = 2 ** 31;
const MAX_TOKENS = 1024; // a small model that repeats itself would fill the whole context

// The field, its name in a request, and the value if neither the user nor the model's makers set one.
const NUMBERS = [
  ["temperature", "temperature", "1"],
  ["top-p", "top_p", "1"],
  ["top-k", "top_k", "off"],
  ["min-p", "min_p", "off"],
  ["repetition-penalty", "repetition_penalty", "off"],
  ["presence-penalty", "presence_penalty", "off"],
  ["frequency-penalty", "frequency_penalty", "off"],
  ["max-tokens", "max_completion_tokens", String(MAX_TOKENS)],
];
const KEPT = [...NUMBERS.map(([id]) => id), "stop-texts", "tools"];
const OFF = { top_k: [0, -1], min_p: [0], repetition_penalty: [1] }; // values that do nothing

export function readSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    // Damaged or forbidden: use the defaults.
  }
  for (const id of KEPT) $(id).value = kept[id] ?? "";
  return kept;
}

export function keepSettings(more) {
  const kept = Object.fromEntries(KEPT.map((id) => [id, $(id).value]));
  try {
    localStorage.setItem(KEY, JSON.stringify({ ...kept, ...more }));
  } catch {
    // Private windows may forbid it.
  }
}

export function clearSettings() {
  for (const id of [...KEPT, "seed", "width"]) $(id).value = "";
}

// Placeholders: the server's values for empty fields. Other engines do not report them.
export function showDefaults(engine) {
  const { sampling } = engine;
  for (const [id, name, neutral] of NUMBERS) {
    const value = sampling?.[name];
    const isKnown = value !== undefined && !OFF[name]?.includes(value);
    const isModels = name in { temperature: 1, top_p: 1, top_k: 1, min_p: 1, repetition_penalty: 1 };
    $(id).placeholder = isKnown ? String(value) : sampling || !isModels ? neutral : "model's own";
  }
  $("system").placeholder = engine.system_prompt || "none";
  $("system-hint").textContent = engine.system_prompt
    ? "Empty: the model's chat template inserts the text shown in grey."
    : "Empty: no system prompt is sent.";
}

export function fillWidths(width, block, isFree = true) {
  const widths = [2, 4, 8, 16, 32].filter((value) => value <= block && value !== width);
  const options = [["", block > 1 ? "automatic" : "1: no drafter"]];
  const begins = block > 1 ? `; automatic: it begins with ${width} and follows what drafts bring` : "";
  $("width-label").title = `Tokens that one step may check; 1: no drafts${begins}`;
  if (block > 1 && isFree) options.push(["1", "1: off"], ...widths.map((value) => [String(value), String(value)]));
  $("width").replaceChildren(...options.map(([value, label]) => new Option(label, value)));
  $("width").disabled = block === 1 || !isFree;
}

// ---- mistakes in fields

const FIELDS = [...NUMBERS.map(([id]) => id), "seed"];
const labelOf = (id) => $(id).closest("label").firstChild.textContent.trim();

// Returns what is wrong with a field, or "". The limits are in the HTML and are the server's.
function mistake(id) {
  const { validity, value, min, max } = $(id);
  if (validity.badInput) return `${labelOf(id)}: this is not a number.`;
  if (validity.rangeUnderflow) return `${labelOf(id)}: ${value} is too small: at least ${min}.`;
  if (validity.rangeOverflow) return `${labelOf(id)}: ${value} is too large: at most ${max}.`;
  return validity.stepMismatch ? `${labelOf(id)}: ${value} is not a whole number.` : "";
}

// Writes next to each field what is wrong with it. Returns the first wrong field and why, or null.
export function checkSettings() {
  const wrong = FIELDS.map((id) => ({ id, text: mistake(id) }));
  for (const { id, text } of wrong) {
    $(`${id}-error`).textContent = text;
    $(`${id}-error`).hidden = text === "";
    $(id).setAttribute("aria-invalid", String(text !== ""));
  }
  return wrong.find(({ text }) => text !== "") ?? null;
}

// Returns the label of a request's field on the page; null if the page has no such field.
export function labelOfName(name) {
  const id = { stop: "stop-texts", tools: "tools", seed: "seed" }[name] ?? NUMBERS.find((one) => one[1] === name)?.[0];
  if (!id) return null;
  return { "stop-texts": "Stop at", tools: "Tools" }[id] ?? labelOf(id);
}

function number(id) {
  const value = $(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

// Returns the stop texts, one per line; \n and \t stand for a line break and a tab.
function stops() {
  const lines = $("stop-texts").value.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\n/g, "\n").replace(/\\t/g, "\t"));
}

// Returns the tools, or a sentence that says what is wrong with them.
export function readTools() {
  const text = $("tools").value.trim();
  if (text === "") return [];
  try {
    const tools = JSON.parse(text);
    return Array.isArray(tools) ? tools : "Tools must be a JSON list, as in OpenAI's API. See Settings.";
  } catch (error) {
    return `Tools are not valid JSON (${error.message}). See Settings.`;
  }
}

// Returns the fields of a request. JSON leaves out undefined ones.
export function sampling() {
  const given = Object.fromEntries(NUMBERS.map(([id, name]) => [name, number(id)]));
  given.max_completion_tokens ??= MAX_TOKENS;
  const stop = stops();
  const tools = readTools();
  if (stop.length > 0) given.stop = stop;
  if (tools.length > 0 && Array.isArray(tools)) given.tools = tools;
  return { ...given, seed: number("seed") ?? Math.floor(Math.random() * MAX_SEED) };
}
