// A model's Markdown as DOM nodes. `marked` splits the text into tokens; this module builds the nodes,
// so that no text can become markup: HTML in an answer is shown as it was written.

import { codeBlock } from "./code.js";
import { make } from "./dom.js";
import { Marked } from "./marked.esm.js";
import { formula } from "./math.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…", times: "×" };

// A formula is one token, as Markdown would remove its backslashes and underscores. Between single dollars,
// no space may follow the first or precede the last, and no digit may follow: "$5 to $10" is money.
const DISPLAY = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/;
const INLINE = /^(?:\\\(([\s\S]+?)\\\)|\$(?![\s$])([^$\n]*[^\s$\\])\$(?![\d$]))/;
const math = {
  name: "math",
  level: "inline",
  start: (source) => source.search(/\$|\\\[|\\\(/),
  tokenizer(source) {
    const display = DISPLAY.exec(source);
    const match = display ?? INLINE.exec(source);
    return match ? { type: "math", raw: match[0], text: (match[1] ?? match[2]).trim(), display } : undefined;
  },
};
const marked = new Marked({ gfm: true, extensions: [math] });

function decode(text) {
  return text.replace(ENTITY, (whole, decimal, hex, name) => {
    const code = decimal ? Number(decimal) : hex ? Number.parseInt(hex, 16) : null;
    if (code === null) return NAMED[name] ?? whole;
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function link(href, children) {
  if (!SAFE_LINK.test(href)) return make("span");
  const node = make("a");
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  if (children === 0) node.textContent = href;
  return node;
}

const WRAPPERS = { strong: "strong", em: "em", del: "del" };

function inline(parent, tokens) {
  for (const token of tokens) {
    const { type } = token;
    if (type in WRAPPERS) inline(parent.appendChild(make(WRAPPERS[type])), token.tokens);
    else if (type === "link") inline(parent.appendChild(link(token.href, token.tokens.length)), token.tokens);
    else if (type === "image") parent.appendChild(link(token.href, 1)).textContent = token.text || token.href;
    else if (type === "codespan") parent.append(make("code", "", token.text));
    else if (type === "math") parent.append(formula(token.text, Boolean(token.display)));
    else if (type === "br") parent.append(make("br"));
    else if (type === "checkbox") parent.append(checkbox(token.checked));
    else if (type === "html") parent.append(token.raw);
    else if (token.tokens) inline(parent, token.tokens);
    else parent.append(decode(token.text ?? token.raw));
  }
}

function checkbox(isChecked) {
  const box = make("input");
  box.type = "checkbox";
  box.checked = isChecked;
  box.disabled = true;
  return box;
}

function list(token) {
  const node = make(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) node.start = token.start;
  for (const item of token.items) {
    const entry = node.appendChild(make("li", item.task ? "task" : ""));
    for (const part of item.tokens) {
      if (part.type === "text" || part.type === "checkbox") inline(entry, [part]);
      else blocks(entry, [part]);
    }
  }
  return node;
}

function table(token) {
  const box = make("div", "table");
  box.tabIndex = 0; // scrolls sideways
  const node = box.appendChild(make("table"));
  const row = (parent, cells, tag) => {
    const line = parent.appendChild(make("tr"));
    for (const cell of cells) {
      const place = line.appendChild(make(tag, cell.align ? `align-${cell.align}` : ""));
      inline(place, cell.tokens);
    }
  };
  row(node.appendChild(make("thead")), token.header, "th");
  const body = node.appendChild(make("tbody"));
  for (const cells of token.rows) row(body, cells, "td");
  return box;
}

const BUILDERS = {
  code: (token) => codeBlock(token.text, (token.lang ?? "").split(/\s/)[0].toLowerCase()),
  hr: () => make("hr"),
  html: (token) => make("p", "", token.raw.trimEnd()),
  list,
  table,
  blockquote: (token) => blocks(make("blockquote"), token.tokens),
  heading: (token) => withInline(make(token.depth < 3 ? "h3" : "h4"), token.tokens),
};

function withInline(node, tokens) {
  inline(node, tokens);
  return node;
}

function build(token) {
  const builder = BUILDERS[token.type];
  return builder ? builder(token) : withInline(make("p"), token.tokens ?? [token]);
}

const isShown = ({ type }) => type !== "space" && type !== "def";

function blocks(parent, tokens) {
  parent.append(...tokens.filter(isShown).map(build));
  return parent;
}

// Shows `text` in `root`, rebuilding only the blocks that changed: while text streams, that is the last one.
export function renderMarkdown(root, text) {
  const tokens = marked.lexer(text).filter(isShown);
  tokens.forEach((token, index) => {
    const old = root.children[index];
    if (old?.source === token.raw) return;
    const node = build(token);
    node.source = token.raw;
    if (old) old.replaceWith(node);
    else root.append(node);
  });
  while (root.children.length > tokens.length) root.lastChild.remove();
}
