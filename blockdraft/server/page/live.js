// The right-hand side: what the engine does now, from one event of /events per second.

import { make } from "./text.js";

const WINDOW_S = 300;
const $ = (id) => document.getElementById(id);

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

// An idle engine has no tokens per step: the last figure stays, dimmed.
function showPerStep(value) {
  $("per-step").classList.toggle("idle", !(value > 0));
  if (value > 0) $("per-step").textContent = value.toFixed(2);
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
      { ...axis, size: 22, gap: 4, grid: { show: false }, splits: () => [-240, -180, -120, -60, 0],
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
  for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
    matchMedia(query).addEventListener("change", () => made.redraw(false));
  }
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

function showAcceptance(acceptance, hasDrafter) {
  const root = $("acceptance");
  const hasData = acceptance.some((value) => value > 0);
  $("acceptance-caption").textContent = !hasDrafter ? "no drafter" : hasData || !root.firstChild ? "" : "last active";
  root.classList.toggle("idle", !hasData);
  if (!hasData && root.children.length === acceptance.length) return; // idle: the last picture stays
  while (root.children.length > acceptance.length) root.lastChild.remove();
  while (root.children.length < acceptance.length) {
    const column = root.appendChild(make("div", "column"));
    column.append(make("div", "bar"), make("span", "label", String(root.children.length)));
    column.firstChild.append(make("i"));
  }
  acceptance.forEach((value, index) => {
    const column = root.children[index];
    column.querySelector("i").style.height = `${Math.max(0, Math.min(1, value)) * 100}%`;
    column.title = `position ${index + 1}: ${percent(value)} accepted`;
  });
  root.classList.toggle("dense", acceptance.length > 9);
  root.setAttribute("aria-label", hasData
    ? `Accepted by position: ${acceptance.map((value, index) => `${index + 1}: ${percent(value)}`).join(", ")}`
    : "No drafts yet");
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
  // Open while it matters, out of the way afterwards; in between the reader's own choice stays.
  $("startup").open = startup.state === "starting" || startup.state === "failed";
  $("startup-card").classList.toggle("settled", startup.state === "ready");
  shownState = startup.state;
}

// ---- engine

const ENGINE_ROWS = [
  ["engine", "Engine"], ["target", "Target"], ["draft", "Drafter"], ["width", "Width"], ["width_reason", "Why this width"],
  ["block", "Drafter's block"], ["dtype", "Type"],
  ["quantization", "Quantisation"], ["device", "Device"], ["max_context", "Context"], ["max_rows", "Rows"],
  ["same_bits", "Same bits in any company"], ["same_bits_reason", "How that is known"],
  ["page_size", "Tokens per page"], ["num_cache_bytes", "Cache"], ["is_dummy", "Random weights"],
  ["synthetic_acceptance", "Synthetic acceptance"],
];

function engineValue(name, value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (name === "num_cache_bytes") return `${(value / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 0 })} MiB`;
  return typeof value === "number" ? value.toLocaleString("en") : String(value);
}

export function showEngine(engine) {
  const rows = ENGINE_ROWS.filter(([name]) => name in engine && engine[name] !== "");
  $("engine").replaceChildren(
    ...rows.flatMap(([name, label]) => [make("dt", "", label), make("dd", "", engineValue(name, engine[name]))]),
  );
}

// ---- all of it

export function showNow(event, isFirst) {
  const { now, engine } = event;
  if (now) {
    $("rate").textContent = $("live-rate").textContent = rate(now.tokens_per_second);
    $("steps").textContent = rate(now.steps_per_second);
    showPerStep(now.tokens_per_step);
    $("per-step-note").textContent = now.speculation || "plain decoding: 1";
    showAcceptance(now.acceptance ?? [], engine === null || engine.draft !== null);
    showCache(now);
  }
  addHistory(event.history, isFirst);
}
