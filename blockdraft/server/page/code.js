// Code blocks: a bar with the language and a copy button, and the code in colours.
// highlight.js parses the code; this module builds nodes from its tree, since its own output is markup.

import { copyButton, make } from "./dom.js";
import hljs from "./highlight.min.js";

const MAX_COLOURED = 20000; // characters; colouring a longer block at every frame would cost too much

function append(parent, children) {
  for (const child of children) {
    if (typeof child === "string") {
      parent.append(child);
    } else {
      const scope = child.scope?.split(".")[0];
      append(parent.appendChild(make("span", scope ? `hl-${scope}` : "")), child.children);
    }
  }
}

export function codeNode(text, language) {
  const node = make("code");
  if (language && text.length <= MAX_COLOURED && hljs.getLanguage(language)) {
    append(node, hljs.highlight(text, { language, ignoreIllegals: true })._emitter.root.children);
  } else {
    node.textContent = text;
  }
  return node;
}

export function codeBlock(text, language) {
  const box = make("div", "code");
  const bar = box.appendChild(make("div", "code-bar"));
  bar.append(make("span", "", language || "text"), copyButton(() => text));
  const pre = box.appendChild(make("pre"));
  pre.tabIndex = 0; // scrolls sideways: the keyboard must reach it
  pre.append(codeNode(text, language));
  return box;
}
