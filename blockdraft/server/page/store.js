// Chats, kept only in this browser, each in one entry of localStorage; and their export.
//
// A chat is { id, title, changed, system, turns }. A turn is { role: "user", content }, or
// { role: "assistant", content, reasoning, calls, blocks, figures, settings, note, finish }, or { role: "tool", id, content }.

import { tokensPerStep } from "./draft.js";

const PREFIX = "blockdraft.chat.";
const CURRENT = "blockdraft.current"; // per tab, so that a reload finds it again
const MAX_TITLE = 60;

export function newChat(system = "") {
  return { id: makeId(), title: "", changed: Date.now(), system, turns: [] };
}

// randomUUID needs a secure context; plain http from another machine is none.
function makeId() {
  const parts = crypto.getRandomValues(new Uint32Array(3));
  return [...parts].map((part) => part.toString(36)).join("");
}

function titleOf(chat) {
  const first = chat.turns.find((turn) => turn.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return first.length > MAX_TITLE ? `${first.slice(0, MAX_TITLE - 1)}…` : first;
}

function parse(text) {
  try {
    const chat = JSON.parse(text);
    return typeof chat?.id === "string" && Array.isArray(chat.turns) ? chat : null;
  } catch {
    return null; // damaged, or not ours
  }
}

// Returns all chats, the latest first.
export function listChats() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map((key) => parse(localStorage.getItem(key))).filter(Boolean).sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

// Saves a chat. Returns false if the browser forbids it or has no space.
export function keepChat(chat) {
  if (chat.turns.length === 0) {
    forgetChat(chat.id);
    return true;
  }
  chat.title = titleOf(chat);
  chat.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

export function forgetChat(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // The browser forbids storage, so there is nothing to forget.
  }
}

export function rememberCurrent(id) {
  try {
    sessionStorage.setItem(CURRENT, id);
  } catch {
    // Storage is forbidden: a reload will begin a new chat.
  }
}

// Returns this tab's chat; null if none was saved.
export function currentChat() {
  try {
    return parse(localStorage.getItem(PREFIX + sessionStorage.getItem(CURRENT)));
  } catch {
    return null;
  }
}

// ---- requests and export

const asCall = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });

export function asMessages(chat) {
  const system = chat.system.trim();
  const messages = chat.turns.map((turn) => {
    if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.content };
    const calls = turn.calls?.length > 0 ? { tool_calls: turn.calls.map(asCall) } : {};
    return { role: turn.role, content: turn.content, ...calls };
  });
  return [...(system ? [{ role: "system", content: system }] : []), ...messages];
}

// Returns an answer's settings and figures, for the export.
function asAnswer({ settings, figures, blocks, finish }) {
  return {
    settings: settings ?? null,
    tokens: figures?.tokens ?? null,
    seconds: figures?.seconds ?? null,
    tokens_per_second: figures?.rate ?? null,
    steps: blocks?.length || null,
    tokens_per_step: tokensPerStep(blocks ?? []),
    finish_reason: finish ?? null,
  };
}

// `messages` is as in a request; `answers` has one entry for each message of the assistant.
export function asJson(chat, model) {
  const changed = new Date(chat.changed).toISOString();
  const answers = chat.turns.filter((turn) => turn.role === "assistant").map(asAnswer);
  return `${JSON.stringify({ title: chat.title, model, changed, messages: asMessages(chat), answers }, null, 2)}\n`;
}

const HEADINGS = { user: "You", assistant: "Answer", tool: "Tool" };

export function asMarkdown(chat, model) {
  const parts = [`# ${chat.title || "Chat"}`];
  if (model) parts.push(`Model: ${model}`);
  if (chat.system.trim()) parts.push("## System prompt", chat.system.trim());
  for (const turn of chat.turns) {
    parts.push(`## ${HEADINGS[turn.role]}`);
    if (turn.reasoning) parts.push(turn.reasoning.trim().replace(/^/gm, "> "));
    if (turn.content.trim()) parts.push(turn.content.trim());
    for (const call of turn.calls ?? []) parts.push(`Called \`${call.name}\`:`, `\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}
