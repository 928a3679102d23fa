// The right-hand side: what the engine does now, from one event of /events per second.

import { $, make } from "./dom.js";

const WINDOW_S = 300;

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export function rate(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  return value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

const percent = (value) => `${Math.round(value * 100)} %`;

export function size(numBytes) {
  return numBytes < 1e9 ? `${Math.round(numBytes / 1e6)} MB` : `${(numBytes / 1e9).toFixed(1)} GB`;
}

const shortName = (name) => name.split("/").filter(Boolean).at(-1) ?? name;

// Returns the usual names and the files of the target and the drafter; other engines report less.
export function namesOf(engine) {
  const { target, target_title, target_format, target_bytes, target_computed } = engine;
  const { draft, draft_title, draft_format, draft_bytes } = engine;
  const files = (format, bytes) => [format, bytes ? size(bytes) : null].filter(Boolean).join(", ");
  return {
    target: target_title || shortName(target),
    targetFiles: files(target_format, target_bytes),
    computed: target_computed ?? "",
    draft: draft === null ? null : draft_title || shortName(draft),
    draftFiles: files(draft_format, draft_bytes),
  };
}

// An idle engine has no tokens per step: the last figure stays, dimmed.
function showPerStep(now) {
  const value = now.tokens_per_step;
  $("per-step").classList.toggle("idle", !(value > 0));
  if (value > 0) $("per-step").textContent = value.toFixed(2);
  $("per-step-caption").textContent = $("per-step").textContent === "–" ? "" : windowText(now, value > 0);
}

const windowText = ({ lately_s: lately }, isActive) => (isActive ? `last ${lately ?? 10} s` : "when last busy");

// Returns what drafts gain now. The tooltip has the whole sentence, with what it is compared to.
function speculationText(now, hasDrafter) {
  if (!hasDrafter) return "no drafter: it is 1";
  if (!now.speculation) return "without drafts it is 1";
  if (now.governed_width === 1) return "drafts do not pay now";
  return now.speedup > 0 && now.tokens_per_step > 0 ? `about ${(Math.floor(10 * now.speedup) / 10).toFixed(1)}× the plain speed` : "without drafts it is 1";
}

// ---- tokens per second

const points = { times: [], rates: [] };
let plot = null;

const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function makePlot(root) {
  const axis = { stroke: colour("--muted"), ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    width: root.clientWidth,
    height: root.clientHeight,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7, fill: colour("--accent") } },
    scales: {
      x: { time: false, range: [-WINDOW_S, 0] },
      y: { range: (_, low, high) => [0, Math.max(5, (high ?? 0) * 1.15)] },
    },
    axes: [
      { ...axis, size: 22, gap: 4, grid: { show: false }, splits: (chart) => (chart.width < 280 ? [-240, -120, 0] : [-240, -180, -120, -60, 0]),
        values: (_, splits) => splits.map((s) => (s === 0 ? "now" : `−${-s / 60} min`)) },
      { ...axis, size: 40, gap: 4, space: 32, grid: { stroke: colour("--line"), width: 1 },
        values: (_, splits) => splits.map((s) => s.toLocaleString("en")) },
    ],
    series: [{}, { stroke: colour("--accent"), fill: colour("--accent-wash"), width: 1.75, points: { show: false } }],
    hooks: { setCursor: [showPoint] },
  };
  const made = new uPlot(options, [[], []], root);
  new ResizeObserver(() => {
    if (root.clientWidth > 0) made.setSize({ width: root.clientWidth, height: root.clientHeight });
  }).observe(root);
  addEventListener("themechange", () => made.redraw(false));
  return made;
}

function showPoint(chart) {
  const { idx } = chart.cursor;
  const [ages, rates] = chart.data;
  $("rate-caption").textContent = rates[idx] === undefined
    ? "last 5 minutes"
    : `${rate(rates[idx])} tok/s, ${Math.round(-ages[idx])} s ago`;
}

function addHistory(history, isFirst) {
  if (isFirst) points.times.length = points.rates.length = 0;
  for (const [time, value] of history ?? []) {
    if (time === points.times.at(-1)) points.times.pop(), points.rates.pop();
    points.times.push(time);
    points.rates.push(value);
  }
  const newest = points.times.at(-1);
  const start = points.times.findIndex((time) => time >= newest - WINDOW_S);
  points.times.splice(0, Math.max(0, start));
  points.rates.splice(0, Math.max(0, start));
  plot ??= makePlot($("rate-chart"));
  plot.setData([points.times.map((time) => time - newest), points.rates]);
}

// ---- acceptance

let hasAcceptance = false; // whether a chart of drafts is shown, new or old

// Makes a column for every position of a block, used lately or not, so that the chart does not jump.
function makeColumns(root, num) {
  while (root.children.length < num) {
    const column = root.appendChild(make("div", "column"));
    column.append(make("div", "bar"), make("span", "label", String(root.children.length)));
    column.firstChild.append(make("i"));
  }
  root.classList.toggle("dense", root.children.length > 9);
}

function drawAcceptance(root, acceptance) {
  [...root.children].forEach((column, index) => {
    const value = acceptance[index];
    const isTried = value !== undefined;
    column.querySelector("i").style.height = isTried ? `${Math.max(0, Math.min(1, value)) * 100}%` : "0";
    column.classList.toggle("untried", !isTried);
    column.title = `position ${index + 1}: ` +
      (isTried ? `${percent(value)} of the drafts tried there were accepted` : "no draft was tried there");
  });
  const shares = acceptance.map((value, index) => `${index + 1}: ${percent(value)}`).join(", ");
  root.setAttribute("aria-label", shares ? `Accepted by position: ${shares}` : "No drafts yet");
  hasAcceptance = acceptance.length > 0;
}

function showAcceptance(now, engine, hasDrafter) {
  const root = $("acceptance");
  const acceptance = now.acceptance ?? [];
  const hasData = acceptance.length > 0;
  const none = now.num_drafts > 0 ? `none in the last ${now.lately_s ?? 10} s` : "no drafts yet";
  const caption = hasData || hasAcceptance ? windowText(now, hasData) : none;
  $("acceptance-caption").textContent = hasDrafter ? caption : "no drafter";
  root.classList.toggle("idle", !hasData);
  makeColumns(root, Math.max(engine?.draft ? (engine.block ?? engine.width) - 1 : 0, acceptance.length));
  if (hasData || !hasAcceptance) drawAcceptance(root, acceptance); // else the last chart stays
}

// ---- cache and queue

function showCache(now) {
  const share = now.num_pages > 0 ? now.pages_used / now.num_pages : 0;
  $("pages").textContent = now.num_pages > 0
    ? `${now.pages_used.toLocaleString("en")} of ${now.num_pages.toLocaleString("en")} pages`
    : "";
  $("cache-bar").style.width = `${share * 100}%`;
  $("cache-meter").setAttribute("aria-valuenow", String(Math.round(share * 100)));
  $("running").textContent = String(now.running);
  $("waiting").textContent = String(now.waiting);
}

// ---- start-up

const MARKS = { waiting: "", running: "", done: "✓", skipped: "–", failed: "✕" };
let shownState = null;
let startupText = "";

function phaseNode(phase) {
  const node = make("li", phase.state);
  node.append(make("span", "mark", MARKS[phase.state]), make("span", "name", phase.name));
  const share = phase.state === "running" && phase.progress !== null ? percent(phase.progress) : "";
  node.append(make("span", "detail muted", [phase.detail, share].filter(Boolean).join(" · ")));
  const time = phase.state === "skipped" ? "skipped" : seconds(phase.seconds);
  node.append(make("span", "time figure", time));
  node.setAttribute("aria-label", `${phase.name}: ${phase.state} ${phase.detail ?? ""} ${share} ${time}`);
  return node;
}

const TITLES = { starting: "Starting", ready: "Started", failed: "The start failed", draining: "Shutting down" };

export function showStartup(startup) {
  const text = JSON.stringify(startup);
  if (text === startupText) return;
  startupText = text;
  const num = startup.warnings.length;
  const warned = num > 0 && startup.state !== "starting" ? ` · ${num} warning${num === 1 ? "" : "s"}` : "";
  $("startup-title").textContent = TITLES[startup.state] + warned;
  $("startup-time").textContent = (startup.state === "ready" ? "in " : "") + seconds(startup.seconds);
  $("phases").replaceChildren(...startup.phases.map(phaseNode));
  $("warnings").replaceChildren(...startup.warnings.map((warning) => make("li", "", warning)));
  $("startup-error").hidden = !startup.error;
  $("startup-error").textContent = startup.error ?? "";
  if (startup.state === shownState) return;
  // Opens for a start or a failure, closes afterwards; between changes of state, the user's choice stays.
  $("startup").open = startup.state === "starting" || startup.state === "failed";
  $("startup-card").classList.toggle("settled", startup.state === "ready");
  shownState = startup.state;
}

// ---- engine

const ENGINE_ROWS = [
  ["engine", "Engine"], ["target", "Named as"], ["draft", "Drafter named as"], ["width", "Width to begin with"],
  ["width_reason", "Why this width"], ["block", "Drafter's block"], ["dtype", "Computed in"], ["device", "Device"], ["replicas", "Replicas"],
  ["quantization", "Weights held as"], ["max_model_len", "Context"], ["max_num_seqs", "Requests at once"],
  ["same_bits", "Same bits in any company"], ["same_bits_reason", "How that is known"],
  ["fingerprint", "Fingerprint of answers"],
  ["page_size", "Tokens per page"], ["num_cache_bytes", "Cache"],
  ["kv_dtype", "Keys and values in"], ["kv_bytes_per_token", "Bytes per token"], ["kv_window", "Tokens kept exact"],
  ["is_dummy", "Random weights"], ["synthetic_acceptance", "Synthetic acceptance"],
];
const HELD = { none: "no quantisation", keep: "as stored" };

function engineValue(name, value, engine) {
  if (name === "kv_window" && value === null) return ""; // nothing is compressed
  if (value === null || value === undefined) return "none";
  if (name === "fingerprint") return value.id ?? `none: ${value.reason}`;
  if (name === "kv_dtype" && engine.kv_compression > 1) return `${value}, ${engine.kv_compression.toFixed(1)}× smaller`;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (name === "num_cache_bytes") return size(value);
  if (name === "quantization") return HELD[value] ?? value;
  return typeof value === "number" ? value.toLocaleString("en") : String(value);
}

export function showEngine(engine) {
  const names = namesOf(engine);
  const rows = [["Model", names.target], ["Its files", names.targetFiles], ["Drafter", names.draft ?? "none"]];
  rows.push(["Its files", names.draftFiles]);
  const isTold = ([name]) => name in engine && engine[name] !== "";
  rows.push(...ENGINE_ROWS.filter(isTold).map(([name, label]) => [label, engineValue(name, engine[name], engine)]));
  const shown = rows.filter(([, value]) => value !== "");
  $("engine").replaceChildren(...shown.flatMap(([label, value]) => [make("dt", "", label), make("dd", "", value)]));
}

// ---- all of it

// Clears all figures when the server is gone, as old ones would look current.
export function showNothing() {
  for (const id of ["rate", "live-rate", "per-step", "steps", "running", "waiting"]) $(id).textContent = "–";
  for (const id of ["per-step-caption", "per-step-note", "acceptance-caption", "pages"]) $(id).textContent = "";
  $("cache-bar").style.width = "0";
  $("cache-meter").setAttribute("aria-valuenow", "0");
  drawAcceptance($("acceptance"), []);
  points.times.length = points.rates.length = 0;
  plot?.setData([[], []]);
}

export function showNow(event, isFirst) {
  const { now, engine } = event;
  if (now) {
    $("rate").textContent = $("live-rate").textContent = rate(now.tokens_per_second);
    $("steps").textContent = rate(now.steps_per_second);
    const hasDrafter = engine === null || engine.draft !== null;
    showPerStep(now);
    $("per-step-note").textContent = speculationText(now, hasDrafter);
    $("per-step-note").title = now.speculation ?? "";
    showAcceptance(now, engine, hasDrafter);
    showCache(now);
  }
  addHistory(event.history, isFirst);
}
