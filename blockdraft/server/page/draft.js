// The draft view: which tokens are accepted drafts, which the target wrote itself, and where each block ends.

import { make } from "./dom.js";

const BAR_PX = 7; // one step in the strip
const GAP_PX = 3;
const MIN_PITCH_PX = 1.5;

const FENCE = /^ {0,3}(```|~~~)/;

// Reads a text token by token: `isCode(text)` returns whether this next token is part of code or its fences.
class CodeReader {
  constructor() {
    this.line = "";
    this.isFenced = false;
    this.isInline = false;
  }

  isCode(text) {
    const wasCode = this.isFenced || this.isInline;
    let hasTick = false;
    for (const character of text) {
      if (character === "\n") {
        if (FENCE.test(this.line)) this.isFenced = !this.isFenced;
        this.line = "";
        this.isInline = false;
        continue;
      }
      this.line += character;
      if (character !== "`" || this.isFenced) continue;
      this.isInline = !this.isInline;
      hasTick = true;
    }
    return wasCode || this.isFenced || hasTick || FENCE.test(this.line);
  }
}

// Shows each line break as a sign, followed by a break, except that the last `numHeld` signs have no break.
function tokenNode(text, isAccepted, isCode, numHeld) {
  const node = make("span", `token ${isAccepted ? "accepted" : "own"}${isCode ? " mono" : ""}`);
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

function blockNode(block, reader) {
  const node = make("span", "block");
  const num = block.tokens.length;
  node.title = `one step: ${num} ${num === 1 ? "token" : "tokens"}, ${block.accepted} from the draft`;
  // Breaks at the end of a block go after its end mark, which would otherwise begin the next line.
  const breaks = /\n*$/.exec(block.tokens[num - 1])[0];
  block.tokens.forEach((text, index) => {
    const numHeld = index === num - 1 ? breaks.length : 0;
    node.append(tokenNode(text, index < block.accepted, reader.isCode(text), numHeld));
  });
  node.append(make("span", "block-end"), breaks);
  return node;
}

// Appends the blocks that are missing; blocks on the page never change.
export function renderBlocks(root, blocks) {
  root.reader ??= new CodeReader();
  for (let index = root.children.length; index < blocks.length; index++) {
    root.append(blockNode(blocks[index], root.reader));
  }
}

export const countTokens = (blocks) => blocks.reduce((sum, block) => sum + block.tokens.length, 0);

// Returns the mean tokens per block; null if there are no blocks. Every block is a decoding step: our engine
// never samples while it reads a prompt, and other engines send no blocks.
export function tokensPerStep(blocks) {
  return blocks.length === 0 ? null : countTokens(blocks) / blocks.length;
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
  const shown = blocks.slice(-Math.floor(wide / pitch)); // of a very long answer, show the end
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
