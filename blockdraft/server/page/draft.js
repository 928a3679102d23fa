// The draft view: which tokens were accepted drafts, which the target wrote itself, and where each block ended.

import { make } from "./text.js";

const BAR_PX = 7; // one step in the strip
const GAP_PX = 3;
const MIN_PITCH_PX = 1.5;

// A line break shows as a sign, then breaks; the last `numHeld` breaks of the text only show.
function tokenNode(text, isAccepted, numHeld) {
  const node = make("span", isAccepted ? "token accepted" : "token own");
  if (text === "") {
    node.append(make("span", "glyph", "·"));
    node.title = "no text of its own: part of a character, or a special token";
  }
  let position = 0;
  for (const piece of text.split(/(\n)/)) {
    node.append(piece === "\n" ? make("span", "glyph", "↵") : piece);
    if (piece === "\n" && position < text.length - numHeld) node.append("\n");
    position += piece.length;
  }
  return node;
}

export function blockNode(block) {
  const node = make("span", "block");
  const num = block.tokens.length;
  node.title = `one step: ${num} ${num === 1 ? "token" : "tokens"}, ${block.accepted} from the draft`;
  // Breaks at the end of a block go behind its mark, which would otherwise begin the next line.
  const breaks = /\n*$/.exec(block.tokens[num - 1])[0];
  block.tokens.forEach((text, index) => {
    node.append(tokenNode(text, index < block.accepted, index === num - 1 ? breaks.length : 0));
  });
  node.append(make("span", "block-end"), breaks);
  return node;
}

// Appends what is missing; blocks never change once they are there.
export function renderBlocks(root, blocks) {
  for (let index = root.children.length; index < blocks.length; index++) root.append(blockNode(blocks[index]));
}

// The decoding steps. The prompt's own step always yields one token, whatever the drafter does: it is left out.
export function decodeBlocks(blocks) {
  const hasPromptStep = blocks.length > 0 && blocks[0].tokens.length === 1 && blocks[0].accepted === 0;
  return hasPromptStep ? blocks.slice(1) : blocks;
}

export const countTokens = (blocks) => blocks.reduce((sum, block) => sum + block.tokens.length, 0);

// Null without a decoding step.
export function tokensPerStep(blocks) {
  const steps = decodeBlocks(blocks);
  return steps.length === 0 ? null : countTokens(steps) / steps.length;
}

// One bar per step, as high as the tokens it committed: drafts below, the target's own on top.
export function drawStrip(canvas, blocks, width) {
  const style = getComputedStyle(canvas);
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [canvas.clientWidth, canvas.clientHeight];
  if (wide === 0 || blocks.length === 0) return;
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(high * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const pitch = Math.max(MIN_PITCH_PX, Math.min(BAR_PX + GAP_PX, wide / blocks.length));
  const bar = pitch > 2 * GAP_PX ? pitch - GAP_PX : pitch * 0.7;
  const shown = blocks.slice(-Math.floor(wide / pitch)); // a very long answer shows its end
  const unit = high / Math.max(width, ...shown.map((block) => block.tokens.length));
  shown.forEach((block, index) => {
    const accepted = Math.min(block.accepted, block.tokens.length) * unit;
    const own = (block.tokens.length - block.accepted) * unit;
    context.fillStyle = style.getPropertyValue("--accepted-bar");
    context.fillRect(index * pitch, high - accepted, bar, accepted);
    context.fillStyle = style.getPropertyValue("--own-bar");
    context.fillRect(index * pitch, high - accepted - own, bar, own);
  });
}
