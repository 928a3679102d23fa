// A model's Markdown as DOM nodes: the few forms that chat answers use. Everything is set as text, never as markup.

export function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,9})[.)]\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*(\S(?:.*?\S)?)\*(?![\w*])/gs;

// Blocks of consecutive lines: { kind, source, ... }. `source` tells whether a block has changed since last time.
function parse(text) {
  const blocks = [];
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length > 0) blocks.push({ kind: "p", body: paragraph.join("\n") });
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      flush();
      const body = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) body.push(lines[i]);
      blocks.push({ kind: "code", language: fence[2], body: body.join("\n") });
      continue;
    }
    const heading = HEADING.exec(line);
    const bullet = BULLET.exec(line);
    const number = NUMBER.exec(line);
    if (heading) {
      flush();
      blocks.push({ kind: "heading", body: heading[2] });
    } else if (bullet || number) {
      flush();
      const kind = bullet ? "ul" : "ol";
      const item = bullet ? bullet[1] : number[2];
      const last = blocks.at(-1);
      if (last?.kind === kind) last.items.push(item);
      else blocks.push({ kind, items: [item], start: number ? Number(number[1]) : 1 });
    } else if (line.trim() === "") {
      flush();
    } else if (/^\s+/.test(line) && paragraph.length === 0 && blocks.at(-1)?.items) {
      const { items } = blocks.at(-1); // a list item that goes on
      items.push(`${items.pop()}\n${line.trim()}`);
    } else {
      paragraph.push(line);
    }
  }
  flush();
  return blocks;
}

function inline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index));
    if (match[2] !== undefined) parent.append(make("code", "", match[2]));
    else if (match[3] !== undefined) inline(parent.appendChild(make("strong")), match[3]);
    else inline(parent.appendChild(make("em")), match[4]);
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
}

function build(block) {
  if (block.kind === "code") {
    const box = make("div", "code");
    const bar = box.appendChild(make("div", "code-bar"));
    bar.append(make("span", "", block.language), copyButton(() => block.body));
    const pre = box.appendChild(make("pre"));
    pre.tabIndex = 0; // scrolls sideways: the keyboard must reach it
    pre.append(make("code", "", block.body));
    return box;
  }
  if (block.items) {
    const list = make(block.kind);
    if (block.kind === "ol") list.start = block.start;
    for (const item of block.items) inline(list.appendChild(make("li")), item);
    return list;
  }
  const node = make(block.kind === "heading" ? "h3" : "p");
  inline(node, block.body);
  return node;
}

// Shows `text` in `root`, rebuilding only the blocks that changed: while text streams, that is the last one.
export function renderMarkdown(root, text) {
  const blocks = parse(text);
  blocks.forEach((block, index) => {
    const source = JSON.stringify(block);
    const old = root.children[index];
    if (old?.source === source) return;
    const node = build(block);
    node.source = source;
    if (old) old.replaceWith(node);
    else root.append(node);
  });
  while (root.children.length > blocks.length) root.lastChild.remove();
}

export function copyButton(getText) {
  const button = make("button", "copy", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(getText());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed"; // plain http from another machine has no clipboard
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
